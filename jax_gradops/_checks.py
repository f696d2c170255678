"""Argument errors, raised while a function is traced: what was expected, what came, and the fix."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def array(op: str, name: str, value: Any) -> jax.Array:
    """`value` as an array of one of the four float dtypes, not weakly typed."""
    if not (
        isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
        or hasattr(value, "__jax_array__")
    ):
        raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}")
    x = jnp.asarray(value)
    if x.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: {name} must have dtype {', '.join(FLOAT_DTYPES[:-1])} or {FLOAT_DTYPES[-1]}, "
            f"got {x.dtype.name}. Cast it first: {name}.astype(jnp.float32)"
        )
    return lax.convert_element_type(x, x.dtype)


def like(op: str, name: str, value: Any, other: str, x: jax.Array) -> jax.Array:
    """`value` as an array of the shape and dtype of x, whose name is `other`."""
    result = array(op, name, value)
    if result.shape != x.shape or result.dtype != x.dtype:
        fix = (
            f"{name}.astype({other}.dtype)"
            if result.shape == x.shape
            else f"jnp.broadcast_to({name}, {other}.shape), if that is meant"
        )
        raise ValueError(
            f"{op}: {name} must have {other}'s shape {x.shape} and dtype {x.dtype}, "
            f"got shape {result.shape} and dtype {result.dtype}. Pass {fix}"
        )
    return result


def is_real(value: jax.Array | np.ndarray) -> bool:
    """Whether an array's dtype is an integer's or a floating-point number's."""
    return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))


def number(
    op: str, name: str, value: Any, *, minimum: float | None = None, finite: bool = True
) -> float:
    """`value` as a Python float: a static real number, not a bool, not NaN."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{op}: {name} must be a static number, got a traced {jax.typeof(value)}. Pass a "
            "Python number, or mark the argument in static_argnames"
        )
    if isinstance(value, bool | np.bool_) or not (
        isinstance(value, int | float | np.integer | np.floating)
        or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and is_real(value))
    ):
        shape = getattr(value, "shape", None)
        got = repr(value) if shape is None else f"an array of shape {shape}"
        raise TypeError(f"{op}: {name} must be a number, got {got}")
    result = float(value)
    if (
        math.isnan(result)
        or (finite and math.isinf(result))
        or (minimum is not None and result < minimum)
    ):
        condition = ("finite and " if finite else "") + (
            f">= {minimum:g}" if minimum is not None else "not NaN"
        )
        raise ValueError(
            f"{op}: {name} must be {condition.removesuffix(' and not NaN')}, got {result}"
        )
    return result


def flag(op: str, name: str, value: Any) -> bool:
    """`value` as a Python bool; numbers and strings are refused."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")
    return bool(value)


def axis(op: str, name: str, value: Any, ndim: int) -> int:
    """`value` as an axis in [0, ndim)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}") from None
    if not -ndim <= result < ndim:
        raise ValueError(
            f"{op}: {name} must be in [{-ndim}, {ndim}) for x with {ndim} axes, got {result}"
        )
    return result % ndim
