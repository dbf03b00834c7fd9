"""How many replicas there should be: a pure policy, and what hooks it into Ray Serve."""
