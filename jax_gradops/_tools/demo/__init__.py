"""``python -m jax_gradops demo``: trains a small model with this library's ops."""
