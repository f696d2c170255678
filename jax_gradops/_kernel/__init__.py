"""Declares kernels (`spec`) and runs them (`invoke`). Nothing here knows any op."""
