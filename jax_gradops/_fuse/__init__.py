"""`jax_gradops.fuse`: finds code that equals an op of this library, and puts the op in its place.

A function is traced to a jaxpr, JAX's list of equations. The search has these steps:

1. `program.py` lists the equations. Small inner `jit` functions are opened. `parts.py` lists some
   equations as several simpler ones.
2. Some equations can only belong to an op: 1/sqrt belongs to a norm, tanh to a GELU, log to a loss.
   `search.py` looks back from each to the arrays from which the op may start.
3. From such an array, the root, `forms.py` follows the equations and writes each value as a
   polynomial. Its variables are the root, means of the root over some axes, other arrays, and
   functions of polynomials, such as 1/sqrt. All ways to write a variance, for example, have the
   same polynomial: mean(x²) - mean(x)². So the order of the algebra does not matter.
4. `patterns/` compares polynomials with the formulas of the ops.
5. `check.py` runs the found equations and the op on random numbers, a few rows of them.
6. `program.py` puts the op in the place of the equations.
7. `skipped.py` names norms, activations, losses, clips and embeddings that are left. A table says
   what shows such code, and why it is left. `report.py` has the lines.

Lookups of embeddings (`patterns/lookups.py`) have no formula: one equation shows each.
"""
