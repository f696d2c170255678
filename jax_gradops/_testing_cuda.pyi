# What ffi/testing/cuda_module.cc makes.
from jax_gradops._cpu import registrations as registrations
from jax_gradops._cpu import signatures as signatures
