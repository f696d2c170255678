"""What `jax_gradops.linen` and `jax_gradops.nnx` are made of."""
