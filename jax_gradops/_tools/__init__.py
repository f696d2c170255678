"""The benchmark and the demo. The library itself does not import them."""
