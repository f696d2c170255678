"""GELU, exact and by tanh."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jax_gradops._fuse import polynomial
from jax_gradops._fuse.patterns.candidate import Before, Candidate, dtype_of, same_layout
from jax_gradops._fuse.polynomial import Function, Polynomial
from jax_gradops._fuse.search import Values
from jax_gradops._implementation import strict_infinities
from jax_gradops._ops.gelu import bias_gelu


def gelu(values: Values, v: Var) -> Candidate | None:
    """GELU of the root."""
    if not same_layout(values, v):
        return None
    p = values.forms[v].polynomial
    functions = {a for m in p.terms for a, _ in m if isinstance(a, Function)}
    names = {a.name for a in functions}
    if len(functions) != 1 or not names <= {"tanh", "erf"}:
        return None
    approximate = names == {"tanh"}
    (function,) = functions
    # In bfloat16 the literals are rounded: sqrt(2 / pi) is 0.796875.
    unit = float(jnp.finfo(dtype_of(values, function)).eps)
    x = polynomial.of_atom(values.root_atom)
    argument = polynomial.from_key(function.of)
    if not argument.close_to(_argument(x, approximate), max(unit, 1e-6)):
        return None
    half = x.scaled(0.5)
    if not p.close_to(half + half * polynomial.of_atom(function), 1e-5):
        return None
    call = functools.partial(_gelu, approximate=approximate)
    before = Before("bias", "bias_gelu", functools.partial(_bias_gelu, approximate))
    options = "" if approximate else "exact"
    return Candidate("gelu", call, (values.root,), v, options, before=before, rounding=unit)


@strict_infinities()
def _gelu(x: jax.Array, approximate: bool) -> jax.Array:
    return bias_gelu.gelu(x, approximate)


@strict_infinities()
def _bias_gelu(approximate: bool, x: jax.Array, bias: jax.Array) -> jax.Array:
    return bias_gelu.bias_gelu(x, bias.reshape(-1), approximate)


def _argument(x: Polynomial, approximate: bool) -> Polynomial:
    if not approximate:
        return x.scaled(math.sqrt(0.5))
    return (x + (x * x * x).scaled(0.044715)).scaled(math.sqrt(2 / math.pi))
