# What ffi/testing/module.cc makes, as `_testing_cpu` and `_testing_cuda`.
from jax_gradops._cpu import registrations as registrations
from jax_gradops._cpu import signatures as signatures
