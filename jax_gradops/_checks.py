"""Argument errors, raised while a function is traced: what was expected, what came, and the fix."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class UnboundAxisError(ValueError, NameError):
    """An axis name that is bound to no axis: wrong as an argument, and a NameError as JAX's is."""


def described(value: Any) -> str:
    """What came, on one line: an array by its shape and dtype, what is long by its type."""
    if isinstance(value, Tracer):
        return f"a traced {value.dtype.name}[{','.join(map(str, value.shape))}]"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype.name}"
    text = repr(value)
    return type(value).__name__ if len(text) > 60 or " at 0x" in text else text


def wrong(op: str, name: str, expected: str, value: Any, error: type[Exception]) -> Exception:
    """The exception for an argument that has to be known while a function is traced."""
    fix = (
        ". It has to be known while tracing: mark the argument in static_argnames"
        if isinstance(value, Tracer)
        else ""
    )
    return error(f"{op}: {name} must be {expected}, got {described(value)}{fix}")


def is_array(value: Any) -> bool:
    """Whether `value` is what JAX's functions take for an array; a list is not."""
    scalars_and_arrays = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    return isinstance(value, scalars_and_arrays) or hasattr(value, "__jax_array__")


def array(op: str, name: str, value: Any, dtypes: Sequence[str] = FLOAT_DTYPES) -> jax.Array:
    """`value` as an array of one of `dtypes`, not weakly typed."""
    if not is_array(value) or isinstance(value, np.ma.MaskedArray):
        fix = f". Pass jnp.asarray({name})" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}{fix}")
    # A dtype of NumPy's that JAX does not have would be JAX's error.
    x = value if isinstance(value, np.ndarray | np.generic) else jnp.asarray(value)
    is_float0 = x.dtype == jax.dtypes.float0  # whose name is "void"
    if x.dtype.name not in dtypes:
        is_number = x.dtype == bool or is_real(x)
        fix = f". Cast it first: jnp.asarray({name}, jnp.float32)" if is_number else ""
        if is_float0:
            fix = ", the gradient by an integer. Put None in its place"
        raise TypeError(
            f"{op}: {name} must have dtype {', '.join(dtypes[:-1])} or {dtypes[-1]}, "
            f"got {'float0' if is_float0 else x.dtype.name}{fix}"
        )
    # JAX takes the bytes in the machine's order only.
    x = jnp.asarray(x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")))
    return lax.convert_element_type(x, x.dtype)


def like(
    op: str, name: str, value: Any, other: str, x: jax.Array, *, any_dtype: bool = False
) -> jax.Array:
    """`value` as an array of the shape and dtype (or `any_dtype`) of x, whose name is `other`."""
    result = array(op, name, value)
    if result.shape != x.shape or not (any_dtype or result.dtype == x.dtype):
        fix = (
            f"{name}.astype({other}.dtype)"
            if result.shape == x.shape
            else f"jnp.broadcast_to({name}, {other}.shape), if that is meant"
        )
        raise ValueError(
            f"{op}: {name} must have {other}'s shape {x.shape}"
            + ("" if any_dtype else f" and dtype {x.dtype}")
            + f", got shape {result.shape} and dtype {result.dtype}. Pass {fix}"
        )
    return result


def is_real(value: jax.Array | np.ndarray | np.generic) -> bool:
    """Whether an array's dtype is an integer's or a floating-point number's."""
    return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))


def number(
    op: str, name: str, value: Any, *, minimum: float | None = None, finite: bool = True
) -> float:
    """`value` as a Python float: a static real number, not a bool, not NaN."""
    if isinstance(value, Tracer | bool | np.bool_) or not (
        isinstance(value, int | float | np.integer | np.floating)
        or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and is_real(value))
    ):
        raise wrong(op, name, "a number", value, TypeError)
    try:
        result = float(value)
    except OverflowError:  # an integer
        result = math.inf if value > 0 else -math.inf
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


def epsilon(op: str, value: Any, dtype: Any) -> float:
    """`value` as a number, raised to the smallest normal one of the statistics' dtype.

    1/sqrt(epsilon) is a number then. That changes the results of no row whose variance is at least
    2^24 (float64: 2^53) times that number.
    """
    return max(number(op, "epsilon", value, minimum=0), float(jnp.finfo(dtype).tiny))


def flag(op: str, name: str, value: Any) -> bool:
    """`value` as a Python bool; numbers and strings are refused."""
    if not isinstance(value, bool | np.bool_):
        raise wrong(op, name, "True or False", value, TypeError)
    return bool(value)


def choice(op: str, name: str, value: Any, *choices: str | None) -> Any:
    """`value`, if it is one of the strings, or None where that is among them."""
    if isinstance(value, str | None) and value in choices:
        return value
    *others, last = map(repr, choices)
    raise wrong(op, name, f"{', '.join(others)} or {last}", value, ValueError)


def axis(op: str, name: str, value: Any, ndim: int) -> int:
    """`value` as an axis in [0, ndim)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise wrong(op, name, "an integer", value, TypeError) from None
    if not -ndim <= result < ndim:
        raise ValueError(
            f"{op}: {name} must be in [{-ndim}, {ndim}) for an array of {ndim} axes, got {result}"
        )
    return result % ndim
