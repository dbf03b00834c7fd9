"""Workloads, load client, engine and kernel benches: each compares with a peer or a limit."""
