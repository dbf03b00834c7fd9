"""Replays request traces against the router core and modelled replicas, in simulated time."""
