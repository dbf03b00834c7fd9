"""HTTP and routing, CPU only. Nothing in here imports jax."""
