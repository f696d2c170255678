"""GELU, with and without a bias."""
