# What ffi/testing/module.cc makes for CUDA.
from jax_gradops._cpu import registrations as registrations
from jax_gradops._cpu import signatures as signatures
