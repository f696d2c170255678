"""Programs around the library, which imports none of them: the benchmark and the demo."""
