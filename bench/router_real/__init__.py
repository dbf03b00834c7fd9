"""Holds a real service of two engine replicas against the router's promises and its simulator."""
