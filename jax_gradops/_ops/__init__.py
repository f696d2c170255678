"""One module per operator family; the public names are re-exported by `jax_gradops`."""
