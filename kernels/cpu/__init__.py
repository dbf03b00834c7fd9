"""Native CPU kernels in C++, called through `jax.ffi` (see library.py for how they are built)."""
