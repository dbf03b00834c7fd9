"""One replica is one JAX engine on one TPU host or slice."""
