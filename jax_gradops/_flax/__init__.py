"""The implementation of `jax_gradops.linen` and `jax_gradops.nnx`."""
