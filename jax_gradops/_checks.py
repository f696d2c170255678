"""Checks arguments at trace time. An error says what was expected, what came, and the fix."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
INTEGER_DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))

#: Arguments here, and their names in other libraries.
_OTHER_NAMES = {
    "scale": ("weight", "gamma"),
    "kernel": ("weight",),
    "bias": ("beta", "shift"),
    "begin_norm_axis": ("axis", "dim", "normalized_shape", "reduction_axes"),
    "axis": ("dim", "channel_axis", "feature_axes"),
    "num_groups": ("groups",),
    "labels": ("target", "targets"),
    "max_norm": ("clip_norm", "max_grad_norm"),
}
#: Arguments that users give to a function without them, and the functions that have them.
_ELSEWHERE = {
    "num_groups": "group_norm has it",
    "residual_bias": "add_layer_norm and add_rms_norm have it",
}

#: Types of what is never a scale or a bias.
_NO_VECTORS = (int, float, np.generic, str, tuple)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_hints(function: _Function) -> _Function:
    """`function`, with errors that say what to write if a call does not fit its signature.

    A number, a word or a tuple is no scale and no bias: an option was meant, or PyTorch's order.
    """
    op, known = function.__name__, inspect.signature(function).parameters
    positional = [name for name, p in known.items() if p.kind is not p.KEYWORD_ONLY]
    required = [name for name, p in known.items() if p.default is p.empty]
    usage = ", ".join(name if name in positional else f"{name}=..." for name in known)

    def wrong_call(what: str) -> TypeError:
        return TypeError(f"{op}: {what}. Write {op}({usage})")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for given in kwargs:
            if given not in known:
                raise TypeError(f"{op}: there is no argument {given!r}. {_hint(given, known)}")
        if len(args) > (most := len(positional)):
            raise wrong_call(f"expected at most {most} positional arguments, got {len(args)}")
        given_in_order = dict(zip(positional, args, strict=False))
        if missing := [n for n in required if n not in given_in_order and n not in kwargs]:
            raise wrong_call(f"{', '.join(missing)} must be given")
        for name, value in given_in_order.items():
            if name in ("scale", "bias") and isinstance(value, _NO_VECTORS):
                raise wrong_call(f"{name} must be an array, got {described(value)}")
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _hint(given: str, known: Collection[str]) -> str:
    """What to write in the place of an argument that a function does not have."""
    if given in _ELSEWHERE:
        return _ELSEWHERE[given]
    meant = [ours for ours, others in _OTHER_NAMES.items() if given in others and ours in known]
    if name := next(iter(meant), None) or _closest(given, known):
        return f"Did you mean {name!r}?"
    return f"The arguments are {', '.join(known)}"


def _closest(given: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that is most like `given`. Capital letters and underscores do not count."""
    import difflib  # takes milliseconds

    plain = {name.lower().replace("_", ""): name for name in names}
    found = difflib.get_close_matches(given.lower().replace("_", ""), plain, 1, cutoff)
    return plain[found[0]] if found else None


class UnboundAxisError(ValueError, NameError):
    """An unbound axis name. It is a ValueError as a wrong argument, and a NameError as in JAX."""


def described(value: Any) -> str:
    """Describes a value on one line: an array by shape and dtype, a long value by its type."""
    if isinstance(value, Tracer):
        return f"a traced {value.dtype.name}[{','.join(map(str, value.shape))}]"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype.name}"
    text = repr(value)
    return type(value).__name__ if len(text) > 60 or " at 0x" in text else text


def wrong(op: str, name: str, expected: str, value: Any, error: type[Exception]) -> Exception:
    """The exception for a wrong argument that has to be known at trace time."""
    fix = (
        ". It has to be known while tracing: mark the argument in static_argnames"
        if isinstance(value, Tracer)
        else ""
    )
    return error(f"{op}: {name} must be {expected}, got {described(value)}{fix}")


def is_array(value: Any) -> bool:
    """Whether JAX's functions accept `value` as an array. They do not accept a list."""
    scalars_and_arrays = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    return isinstance(value, scalars_and_arrays) or hasattr(value, "__jax_array__")


def array(op: str, name: str, value: Any, dtypes: Sequence[str] = FLOAT_DTYPES) -> jax.Array:
    """`value` as an array of one of `dtypes`, not weakly typed."""
    if not is_array(value) or isinstance(value, np.ma.MaskedArray):
        fix = f". Pass jnp.asarray({name})" if isinstance(value, list | tuple) else ""
        raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}{fix}")
    # jnp.asarray would raise JAX's own error for a NumPy dtype that JAX does not have.
    x = value if isinstance(value, np.ndarray | np.generic) else jnp.asarray(value)
    is_float0 = x.dtype == jax.dtypes.float0  # the name of float0 is "void"
    if x.dtype.name not in dtypes:
        others, last = ", ".join(dtypes[:-1]), dtypes[-1]
        is_number = x.dtype == bool or is_real(x)
        usual = next((d for d in ("float32", "int32") if d in dtypes), dtypes[-1])
        fix = f". Cast it first: jnp.asarray({name}, jnp.{usual})" if is_number else ""
        if is_float0:
            fix = ", the gradient by an integer. Put None in its place"
        raise TypeError(
            f"{op}: {name} must have dtype {' or '.join(filter(None, (others, last)))}, "
            f"got {'float0' if is_float0 else x.dtype.name}{fix}"
        )
    # JAX accepts the machine's byte order only.
    x = jnp.asarray(x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")))
    return lax.convert_element_type(x, x.dtype)


def like(
    op: str, name: str, value: Any, other: str, x: jax.Array, *, any_dtype: bool = False
) -> jax.Array:
    """`value` as an array with the shape and dtype (or `any_dtype`) of x. x is named `other`."""
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
    """`value` as a Python float. It must be a static real number, neither bool nor NaN."""
    if isinstance(value, Tracer | bool | np.bool_) or not (
        isinstance(value, int | float | np.integer | np.floating)
        or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and is_real(value))
    ):
        raise wrong(op, name, "a number", value, TypeError)
    try:
        result = float(value)
    except OverflowError:  # a large integer
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
    """`value` as a float, raised to the smallest normal number of the statistics' dtype.

    1/sqrt(epsilon) is then finite. A row's results do not change if its variance is at least 2^24
    (float64: 2^53) times the smallest normal number.
    """
    return max(number(op, "epsilon", value, minimum=0), float(jnp.finfo(dtype).tiny))


def count(op: str, name: str, value: Any) -> int:
    """`value` as a positive Python int."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise wrong(op, name, "a positive integer", value, TypeError)
    if value < 1:
        raise wrong(op, name, "a positive integer", value, ValueError)
    return int(value)


def flag(op: str, name: str, value: Any) -> bool:
    """`value` as a Python bool; numbers and strings are refused."""
    if not isinstance(value, bool | np.bool_):
        error = wrong(op, name, "True or False", value, TypeError)
        if name == "approximate" and isinstance(value, str) and value in ("tanh", "none"):
            error = TypeError(f"{error}. Pass {value == 'tanh'}")  # PyTorch has these names
        raise error
    return bool(value)


def choice(op: str, name: str, value: Any, *choices: str | None) -> Any:
    """Returns `value` if it is one of `choices`. None is valid only if listed there."""
    if isinstance(value, str | None) and value in choices:
        return value
    *others, last = map(repr, choices)
    error = wrong(op, name, f"{', '.join(others)} or {last}", value, ValueError)
    if isinstance(value, str) and (meant := _closest(value, filter(None, choices), 0.8)):
        error = ValueError(f"{error}. Did you mean {meant!r}?")
    raise error


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


def axes(op: str, name: str, value: Any, ndim: int) -> tuple[int, ...]:
    """`value`, an axis or a tuple of different axes, as axes in [0, ndim)."""
    found = tuple(
        axis(op, name, v, ndim) for v in (value if isinstance(value, tuple) else (value,))
    )
    if len(set(found)) < len(found):
        raise ValueError(f"{op}: {name} must not have an axis twice, got {value}")
    return found


def axis_names(op: str, value: Any, under_jit: str) -> tuple[Any, ...] | None:
    """`value` as a tuple of bound names, or None for no name. `under_jit` says what jit needs."""
    if value is None or (isinstance(value, tuple | list) and not value):
        return None
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    try:
        repeated = len(set(names)) < len(names)
    except TypeError:
        repeated = None  # a value that cannot be hashed is not a name
    if repeated is None or any(isinstance(name, int | tuple | list) for name in names):
        expected = "the name of a mapped axis, or several"
        raise wrong(op, "axis_name", expected, value, TypeError)
    if repeated:
        raise ValueError(f"{op}: axis_name={value!r} has a name twice")
    try:
        lax.axis_size(names)
    except NameError:
        raise UnboundAxisError(
            f"{op}: axis_name={value!r} names no axis here. Names are bound inside jax.shard_map, "
            f"jax.pmap or jax.vmap(..., axis_name=...); under jax.jit {under_jit}"
        ) from None
    return names
