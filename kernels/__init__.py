"""Device kernels. Leaf package: jax and numpy only."""
