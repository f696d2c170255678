"""What the Flax modules of `jax_gradops.linen` and `jax_gradops.nnx` have in common.

What Flax's module would compute, up to roundings, on this library's ops; and what they do not
cover, which Flax's own code then has to compute.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import module as linen_module
from flax.linen.dtypes import canonicalize_dtype
from jax import lax
from jax.extend.core import get_opaque_trace_state

from jax_gradops import _checks
from jax_gradops._implementation import default_implementation
from jax_gradops._kernel.array_types import accum_dtype, match_vma
from jax_gradops._kernel.primitive import Operands, Operation, Unknown
from jax_gradops._ops.batch_norm.batch_norm import batch_norm as _batch_norm
from jax_gradops._ops.gelu.bias_gelu import bias_gelu, gelu
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_FLOATS = tuple(map(jnp.dtype, _checks.FLOAT_DTYPES))
#: As it was at import. A user may give JAX's name to this library's function.
JAX_GELU: Any = jax.nn.gelu


class Sum(NamedTuple):
    """An argument of a norm: to be added first, in the same pass. The result is a pair, with it.

    `x` and `residual` have the same shape and dtype; `bias`, if any, is one of the last axis.
    """

    x: jax.Array
    residual: jax.Array
    bias: jax.Array | None = None

    def plain(self) -> jax.Array:
        """The sum by itself."""
        return _plain_sum(*self)


def _plain_sum(x: Any, residual: Any, bias: Any) -> Any:
    """As if a layer of residual's dtype had added its bias."""
    if bias is not None:
        residual = _plus(residual, jnp.asarray(bias, jnp.result_type(residual)))
    return x + residual


def _plus(y: Any, bias: Any) -> Any:
    """A matrix product and its bias, as Flax adds it."""
    return y + jnp.reshape(bias, (1,) * (jnp.ndim(y) - 1) + (-1,))


def check_callable(function: str, name: str, value: Any) -> None:
    """Refuses what is not a module that exists, or a function."""
    if isinstance(value, type) or not callable(value):
        raise _checks.wrong(function, name, "a module, or a function", value, TypeError)


@dataclasses.dataclass
class Offer:
    """A sum that `add_norm` gives to a norm as an array, and what the array is the sum of.

    The norm takes the offer where it is called with that very array: it adds by itself, and says
    in `total` what came out. Whatever stands between the two sees an array, and may replace it.
    """

    total: Any
    parts: Sum
    array: Any = dataclasses.field(init=False)
    # What is traced: a sum made in an inner function must not leave it.
    _trace: Any = dataclasses.field(default_factory=get_opaque_trace_state, init=False)

    def __post_init__(self) -> None:
        self.array = self.total

    def is_for(self, x: Any) -> bool:
        return self.array is x and self._trace == get_opaque_trace_state()


_offers: contextvars.ContextVar[Offer | None] = contextvars.ContextVar("_offers", default=None)


@contextlib.contextmanager
def _offered(offer: Offer) -> Iterator[None]:
    token = _offers.set(offer)
    try:
        yield
    finally:
        _offers.reset(token)


def offer_of(x: Any) -> Offer | None:
    """The offer that `x` belongs to, if any."""
    offer = _offers.get()
    return offer if offer is not None and offer.is_for(x) else None


def _has_interceptors() -> bool:
    """Whether a call of a linen module is intercepted. Flax has no public name for that (0.10)."""
    return bool(getattr(linen_module, "_global_interceptor_stack", True))


def add_norm(
    ours: tuple[type, ...], norm: Any, x: Any, residual: Any, bias: Any
) -> tuple[Any, Any]:
    """The function of that name in both APIs; `ours` are the modules that take a `Sum`.

    A subclass that has a method of its own does not know of sums. One that Flax's transformations
    made wraps ours. The module gets a `Sum` then, as an offer's array is another inside, unless an
    interceptor would see the `Sum`. `vmap` maps all arrays of a `Sum`, and a bias has no axis for
    it.
    """
    given = {"x": x, "residual": residual} | ({} if bias is None else {"bias": bias})
    for name, value in given.items():
        if not _checks.is_array(value):  # lists, say, have another addition
            raise TypeError(f"add_norm: {name} must be an array, got {type(value).__name__}")
    last = jnp.shape(residual)[-1:]
    if bias is not None and (jnp.shape(bias) != last or not last):
        raise ValueError(
            f"add_norm: bias must have shape residual.shape[-1:] = {last}, got {jnp.shape(bias)}"
        )
    check_callable("add_norm", "norm", norm)
    call: Any = norm
    alike = jnp.shape(x) == jnp.shape(residual) and jnp.result_type(x) == jnp.result_type(residual)
    calls: list[Any] = [module.__call__ for module in ours]
    own: Any = type(norm).__call__
    if bias is None:
        fuses = inspect.unwrap(own) in map(inspect.unwrap, calls)
    else:
        fuses = own in calls and jnp.result_type(bias) in _FLOATS
    if not (alike and fuses):
        total = _plain_sum(x, residual, bias)
        return call(total), total
    parts = Sum(*map(jnp.asarray, given.values()))
    if own not in calls and not _has_interceptors():
        return call(parts)
    offer = Offer(parts.plain(), parts)
    with _offered(offer):
        y = call(offer.array)
    return y, offer.total


# More than any array has: where the rank is not known, negative axes are told from others by it.
_MANY_AXES = 1000


def _last(rank: int, count: int) -> tuple[int, ...]:
    return tuple(range(rank - count, rank))


def canonical_axes(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Positive, each once, in order."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({rank + axis if axis < 0 else axis for axis in given}))


def why_uncovered(module: Any) -> str:
    """Why Flax's own code has to compute a norm, whatever its input; "" if an op may."""
    for dtype in (module.param_dtype, module.dtype):
        if dtype is not None and jnp.dtype(dtype) not in _FLOATS:
            return f"no kernel for {jnp.dtype(dtype)}"
    if not isinstance(module.epsilon, (int, float, np.number)) or not 0 <= module.epsilon < np.inf:
        return "epsilon is no number, or negative"
    if module.axis_index_groups is not None:
        return "axis_index_groups is set"
    if not getattr(module, "force_float32_reductions", True):
        return "force_float32_reductions is False"
    if hasattr(module, "reduction_axes"):
        if module.axis_name is not None:
            return "axis_name is set"
        last = canonical_axes(_MANY_AXES, module.reduction_axes)
        if last != canonical_axes(_MANY_AXES, module.feature_axes):
            return "reduction_axes and feature_axes differ"
        if not last or (last[0] > _MANY_AXES // 2 and last != _last(_MANY_AXES, len(last))):
            return "reduction_axes are not the last ones"
    elif len(canonical_axes(_MANY_AXES, module.axis)) != 1:
        return "more than one axis"
    return ""


def _is_covered(module: Any, x: Any, mask: Any) -> bool:
    plain = (
        mask is None and _checks.is_array(x) and jnp.result_type(x) in _FLOATS and jnp.size(x) > 0
    )
    return plain and not why_uncovered(module)


def _in_and_out(module: Any, x: jax.Array, scale: Any, bias: Any) -> tuple[jax.Array, Any]:
    """`x` as the op takes it, and the result's dtype.

    Flax normalises in float32 or wider, and rounds once, to the dtype asked for or to that of x and
    the parameters together.
    """
    given = (a for a in (x, scale, bias) if a is not None)
    result = jax.dtypes.canonicalize_dtype(canonicalize_dtype(*given, dtype=module.dtype))
    return x.astype(jnp.promote_types(x.dtype, result)), result


# --- Layer norm and RMS norm ---------------------------------------------------------------------


def normalized_shape(module: Any, x: Any, mask: Any) -> tuple[int, ...] | None:
    """The trailing axes that a LayerNorm or RMSNorm normalises; None if Flax's own code has to."""
    x = x.x if isinstance(x, Sum) else x
    shape = np.shape(x)
    axes = canonical_axes(len(shape), module.reduction_axes)
    trailing = 0 < len(axes) <= len(shape) and axes == _last(len(shape), len(axes))
    return shape[-len(axes) :] if trailing and _is_covered(module, x, mask) else None


def norm(
    module: Any, x: Any, shape: tuple[int, ...], scale: Any, bias: Any = None, *, centered: bool
) -> Any:
    """A LayerNorm's result (`centered`) or an RMSNorm's; of a `Sum`, the result and the sum."""
    parameters = [scale, bias] if centered else [scale]
    options: Any = {
        "begin_norm_axis": -len(shape),
        "epsilon": module.epsilon,
        "residuals": module.residuals,
    }
    if isinstance(x, Sum):
        _, result = _in_and_out(module, x.x, scale, bias)
        if x.x.dtype == result:
            fused = add_layer_norm if centered else add_rms_norm
            return fused(x.x, x.residual, *parameters, residual_bias=x.bias, **options)
        total = x.plain()
        return norm(module, total, shape, scale, bias, centered=centered), total
    x, result = _in_and_out(module, jnp.asarray(x), scale, bias)
    y = layer_norm(x, *parameters, **options) if centered else rms_norm(x, *parameters, **options)
    return y.astype(result)


# --- Batch norm ----------------------------------------------------------------------------------


def channel_axis(module: Any, x: Any, mask: Any) -> int | None:
    """The axis of a BatchNorm's channels; None if Flax's own code has to normalise by the batch."""
    covered = _is_covered(module, x, mask) and 2 <= jnp.ndim(x) <= 5
    return canonical_axes(jnp.ndim(x), module.axis)[0] if covered else None


def batch_norm(
    module: Any, x: Any, scale: Any, bias: Any, *, axis: int, axis_name: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A BatchNorm's result in training, and the batch's mean and variance."""
    given = jnp.asarray(x)
    x, result = _in_and_out(module, given, scale, bias)
    y, mean, var = _batch_norm(
        x, scale, bias, axis=axis, epsilon=module.epsilon, axis_name=axis_name
    )
    stats = given.dtype if module.dtype is None else jax.dtypes.canonicalize_dtype(module.dtype)
    stats = jnp.promote_types(stats, jnp.float32)
    return y.astype(result), mean.astype(stats), var.astype(stats)


def running(module: Any, average: jax.Array, new: jax.Array) -> jax.Array:
    """A running average after one more batch."""
    return module.momentum * average + (1 - module.momentum) * new


# --- Dense, and what takes its bias --------------------------------------------------------------


def not_rounded(given: list[Any], promoted: list[Any]) -> list[Any]:
    """Parameters as they were given where Flax's promotion has rounded them."""
    pairs = zip(given, promoted, strict=True)
    return [p if p is None or jnp.can_cast(v.dtype, p.dtype) else v for v, p in pairs]


def deferred(y: jax.Array, bias: Any, exact: Any) -> tuple[jax.Array, Any]:
    """A matrix product, and what is to be added: its bias, not rounded; None if there is nothing.

    `bias` is what Flax would add.
    """
    if bias is not None and jnp.result_type(y, bias) != y.dtype:  # the product was narrowed
        return _plus(y, bias), None
    return y, exact


@dataclasses.dataclass(frozen=True)
class _PlusBias(Operation):
    """y + bias, with a backward pass of its own; the bias has this dtype."""

    dtype: str
    linear = (0, 1)

    def compute(self, *operands: Any) -> tuple[jax.Array]:
        y, bias = operands
        return (_plus(y, bias.astype(y.dtype)),)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        dy, dbias = tangents
        if dbias is None:
            return self(*operands), (dy,)
        return self(*operands), self(jnp.zeros_like(operands[0]) if dy is None else dy, dbias)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        wants_dy, wants_dbias = (isinstance(o, Unknown) for o in operands)
        dy = lax.optimization_barrier(cotangents[0])
        return dy if wants_dy else None, _column_sums(dy).astype(
            self.dtype
        ) if wants_dbias else None


def plus_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """A matrix product and its bias, which is rounded to y's dtype, and sharded as y's columns.

    What XLA makes of a sum's gradient reads a cotangent more often than it must: where this is a
    concatenation (of those of queries, keys and values), each product and the sum of the bias's
    gradient have one of their own; so here it exists before all three. And its sums over columns
    take twice the time of reading, a product with ones as long as that (benchmarks/README.md).
    """
    return _PlusBias(bias.dtype.name)(y, bias)[0]


def _column_sums(dy: jax.Array) -> jax.Array:
    """Over all axes but the last, in float32 or wider."""

    def sums(dy: jax.Array) -> jax.Array:
        return jnp.sum(dy, tuple(range(dy.ndim - 1)), accum_dtype(dy.dtype))

    # Wider ones would be rounded (TF32); on an Explicit mesh, sharded rows have no product.
    if dy.dtype.itemsize > 2 or any(jax.typeof(dy).sharding.spec):
        return sums(dy)
    return lax.platform_dependent(dy, cuda=column_sums_by_product, default=sums)


def column_sums_by_product(dy: jax.Array) -> jax.Array:
    """Of 16-bit elements, in float32: products with one are exact."""
    rows = tuple(range(dy.ndim - 1))
    # Eight rows of ones, as XLA makes a reduction of a single one.
    ones = jnp.ones((8, *dy.shape[:-1]), dy.dtype)
    return lax.dot_general(
        ones,
        dy,
        ((tuple(axis + 1 for axis in rows), rows), ((), ())),
        precision=lax.Precision.DEFAULT,  # and not what a user has set for other products
        preferred_element_type=jnp.float32,
    )[0]


def linear(y: jax.Array, bias: jax.Array, exact: jax.Array) -> jax.Array:
    """A matrix product and its bias: `bias` is what Flax would add, and `exact` not rounded."""
    plain = default_implementation() == "xla" or y.dtype not in _FLOATS or y.dtype != bias.dtype
    of_y, of_bias = (jax.typeof(a).sharding.spec for a in (y, exact))
    if plain or of_y[-1] != of_bias[-1]:  # JAX shards the sum, and gives each its own gradient
        return _plus(y, bias)
    matched: Any = match_vma(y, exact, sums=(None, accum_dtype(y.dtype)))
    return plus_bias(*matched)


def gelu_of_sum(y: jax.Array, bias: jax.Array | None, approximate: bool) -> jax.Array:
    """GELU of a matrix product and its bias."""
    _checks.flag("DenseGelu", "approximate", approximate)
    if y.dtype not in _FLOATS or y.size == 0 or (bias is not None and bias.dtype != y.dtype):
        return JAX_GELU(y if bias is None else _plus(y, bias), approximate)
    return gelu(y, approximate) if bias is None else bias_gelu(y, bias, approximate)
