"""Declares kernels (`spec`, `trees`) and runs them (`invoke`). Nothing here knows any op."""
