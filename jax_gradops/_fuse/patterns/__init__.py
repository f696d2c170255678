"""The formulas of the ops, as polynomials. See the package's docstring."""
