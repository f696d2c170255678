"""Code that the Flax modules of `jax_gradops.linen` and `jax_gradops.nnx` share.

It computes the results of Flax's modules, up to rounding, with this library's ops. It also says
which cases the ops do not cover: Flax's own code has to compute these.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import module as linen_module
from flax.linen.dtypes import canonicalize_dtype
from jax.extend.core import get_opaque_trace_state

from jax_gradops import _checks
from jax_gradops._linear_bias import plus
from jax_gradops._ops.batch_norm.batch_norm import batch_norm as _batch_norm
from jax_gradops._ops.batch_norm.group_norm import group_norm as _group_norm
from jax_gradops._ops.batch_norm.group_norm import instance_norm as _instance_norm
from jax_gradops._ops.gelu.bias_gelu import bias_gelu, gelu
from jax_gradops._ops.row_norm.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_FLOATS = tuple(map(jnp.dtype, _checks.FLOAT_DTYPES))
_INTEGERS = tuple(map(jnp.dtype, _checks.INTEGER_DTYPES))
_TINY = float(np.finfo(np.float32).tiny)
#: Saved at import: later, a user may set `jax.nn.gelu` to this library's function.
JAX_GELU: Any = jax.nn.gelu
#: JAX's activations that norms compute too, by their names in the ops.
ACTIVATIONS: dict[str, Any] = {"relu": jax.nn.relu, "silu": jax.nn.silu}


class Sum(NamedTuple):
    """A norm's argument: the norm adds it up in the same pass, and returns its result and the sum.

    `x` and `residual` have equal shapes and dtypes. `bias`, if any, has the size of the last axis.
    """

    x: jax.Array
    residual: jax.Array
    bias: jax.Array | None = None

    def plain(self) -> jax.Array:
        """Computes the sum without a norm."""
        return _plain_sum(*self)


def _plain_sum(x: Any, residual: Any, bias: Any) -> Any:
    """The sum x + (residual + bias). A layer of residual's dtype would add its bias like this."""
    if bias is not None:
        residual = plus(residual, jnp.asarray(bias, jnp.result_type(residual)))
    return x + residual


def check_callable(function: str, name: str, value: Any) -> None:
    """Raises if `value` is neither a module (an instance) nor a function."""
    if isinstance(value, type) or not callable(value):
        raise _checks.wrong(function, name, "a module, or a function", value, TypeError)


@dataclasses.dataclass
class Offer:
    """A sum that `add_norm` passes to a norm as an array, and the parts of this sum.

    A norm that is called with this very array takes the offer: it adds the parts itself and stores
    the sum in `total`. Code between `add_norm` and the norm sees an array, and may replace it.
    """

    total: Any
    parts: Sum
    array: Any = dataclasses.field(init=False)
    # The current trace: a sum from an inner traced function must not leave that function.
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
    """The offer whose array is `x`, if any."""
    offer = _offers.get()
    return offer if offer is not None and offer.is_for(x) else None


def _has_interceptors() -> bool:
    """Whether calls of linen modules are intercepted. Flax 0.10 has no public name for this."""
    return bool(getattr(linen_module, "_global_interceptor_stack", True))


def add_norm(
    ours: tuple[type, ...], norm: Any, x: Any, residual: Any, bias: Any
) -> tuple[Any, Any]:
    """Implements `add_norm` of both APIs. `ours` are the classes that accept a `Sum`.

    A subclass with its own `__call__` does not accept a `Sum`. A class from one of Flax's
    transformations wraps our `__call__`, and inside it an offer's array is another array. Such a
    class gets a `Sum` instead, unless an interceptor would see the `Sum`. With a bias it gets
    neither: `vmap` maps all arrays of a `Sum`, and a bias has no axis to map.
    """
    given = {"x": x, "residual": residual} | ({} if bias is None else {"bias": bias})
    for name, value in given.items():
        if not _checks.is_array(value):  # + has another meaning for lists, say
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


# Stands for an unknown rank, and is larger than any: negative axes stay apart from others.
_MANY_AXES = 1000


def _last(rank: int, count: int) -> tuple[int, ...]:
    return tuple(range(rank - count, rank))


def canonical_axes(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """The axes as positive numbers, sorted, without duplicates."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({rank + axis if axis < 0 else axis for axis in given}))


def why_uncovered(module: Any) -> str:
    """Why Flax's own code must compute a module for every input; "" if an op may compute it."""
    for dtype in (module.param_dtype, module.dtype):
        if dtype is not None and jnp.dtype(dtype) not in _FLOATS:
            return f"no kernel for {jnp.dtype(dtype)}"
    if hasattr(module, "num_embeddings"):
        return ""
    # Flax divides by 0 where the variance is 0 and epsilon vanishes. The ops do not.
    epsilon = module.epsilon
    if not isinstance(epsilon, (int, float, np.number)) or not _TINY <= epsilon < np.inf:
        return "epsilon is no positive number"
    if module.axis_index_groups is not None:
        return "axis_index_groups is set"
    if not getattr(module, "force_float32_reductions", True):
        return "force_float32_reductions is False"
    # Of Flax's norms, only LayerNorm and RMSNorm have both kinds of axes, and BatchNorm has none.
    reduces, has_features = (hasattr(module, n) for n in ("reduction_axes", "feature_axes"))
    if not reduces and not has_features:
        return _why_not_one(module.axis)
    if module.axis_name is not None:
        return "axis_name is set"
    if not has_features:  # GroupNorm
        return _why_not_per_sample(module.reduction_axes)
    if not reduces:  # InstanceNorm
        return _why_not_one(module.feature_axes)
    last = canonical_axes(_MANY_AXES, module.reduction_axes)
    if last != canonical_axes(_MANY_AXES, module.feature_axes):
        return "reduction_axes and feature_axes differ"
    if not last or (last[0] > _MANY_AXES // 2 and last != _last(_MANY_AXES, len(last))):
        return "reduction_axes are not the last ones"
    return ""


def _why_not_one(axes: Any) -> str:
    return "" if len(canonical_axes(_MANY_AXES, axes)) == 1 else "more than one axis"


def _is_per_sample(rank: int, axes: Any) -> bool:
    """Whether `axes` are all axes but the first."""
    return canonical_axes(rank, axes) == tuple(range(1, rank))


def _why_not_per_sample(axes: Any) -> str:
    if axes is None:
        return ""
    ranks = range(2, 2 + len(axes) if isinstance(axes, Sized) else 3)
    fits = any(_is_per_sample(rank, axes) for rank in ranks)
    return "" if fits else "reduction_axes are not all axes but the first"


def _is_covered(module: Any, x: Any, mask: Any) -> bool:
    plain = (
        mask is None and _checks.is_array(x) and jnp.result_type(x) in _FLOATS and jnp.size(x) > 0
    )
    return plain and not why_uncovered(module)


def _in_and_out(module: Any, x: jax.Array, *given: Any) -> tuple[jax.Array, list[Any], Any]:
    """`x` and the parameters as the op takes them, and the result's dtype.

    Flax normalises in float32 or wider, and rounds once. The result's dtype is `module.dtype`, or
    else the promoted dtype of x and the parameters. An initialiser may have made integers.
    """
    used = (a for a in (x, *given) if a is not None)
    result = jax.dtypes.canonicalize_dtype(canonicalize_dtype(*used, dtype=module.dtype))
    x = x.astype(jnp.promote_types(x.dtype, result))
    parameters = [p if p is None or p.dtype in _FLOATS else p.astype(x.dtype) for p in given]
    return x, parameters, result


class After(NamedTuple):
    """What a module computes after its norm: activation(y + residual)."""

    activation: Any = None
    residual: jax.Array | None = None

    def plain(self, y: jax.Array) -> jax.Array:
        """The result without an op."""
        y = y if self.residual is None else y + self.residual
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


def after_batch_norm(activation: Any, x: Any, residual: Any) -> After:
    """Checks what a BatchNorm computes after its norm."""
    module = "BatchNorm"
    _checks.choice(module, "activation", activation, "relu", None)
    if residual is None:
        return After(activation)
    if not _checks.is_array(residual):
        raise TypeError(f"{module}: residual must be an array, got {type(residual).__name__}")
    residual = jnp.asarray(residual)
    if residual.shape != jnp.shape(x):
        raise ValueError(
            f"{module}: residual must have x's shape {jnp.shape(x)}, got {residual.shape}"
        )
    return After(activation, residual)


def after_group_norm(module: Any, activation: Any) -> After:
    """Checks what a GroupNorm or InstanceNorm computes after its norm."""
    name = type(module).__name__
    return After(_checks.choice(name, "activation", activation, "silu", "relu", None))


# --- Layer norm and RMS norm ---------------------------------------------------------------------


def normalized_shape(module: Any, x: Any, mask: Any) -> tuple[int, ...] | None:
    """The sizes of the trailing axes that are normalised; None if Flax's own code must do it."""
    x = x.x if isinstance(x, Sum) else x
    shape = np.shape(x)
    axes = canonical_axes(len(shape), module.reduction_axes)
    trailing = 0 < len(axes) <= len(shape) and axes == _last(len(shape), len(axes))
    return shape[-len(axes) :] if trailing and _is_covered(module, x, mask) else None


def norm(
    module: Any, x: Any, shape: tuple[int, ...], scale: Any, bias: Any = None, *, centered: bool
) -> Any:
    """A LayerNorm's result (`centered`) or an RMSNorm's. For a `Sum`: the result and the sum."""
    array = jnp.asarray(x.x if isinstance(x, Sum) else x)
    given = [scale, bias] if centered else [scale]
    promoted, parameters, result = _in_and_out(module, array, *given)
    options: Any = {
        "begin_norm_axis": -len(shape),
        "epsilon": module.epsilon,
        "residuals": module.residuals,
    }
    if isinstance(x, Sum):
        if array.dtype == result:
            fused = add_layer_norm if centered else add_rms_norm
            return fused(x.x, x.residual, *parameters, residual_bias=x.bias, **options)
        total = x.plain()
        return norm(module, total, shape, scale, bias, centered=centered), total
    plain = layer_norm if centered else rms_norm
    return plain(promoted, *parameters, **options).astype(result)


# --- Batch norm ----------------------------------------------------------------------------------


def channel_axis(module: Any, x: Any, mask: Any) -> int | None:
    """The channel axis of a BatchNorm; None if Flax's own code must compute it in training."""
    covered = _is_covered(module, x, mask) and 2 <= jnp.ndim(x) <= 5
    return canonical_axes(jnp.ndim(x), module.axis)[0] if covered else None


def batch_norm(
    module: Any, x: Any, scale: Any, bias: Any, *, axis: int, axis_name: Any, after: After
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A BatchNorm's result in training, and the batch's mean and variance."""
    given = jnp.asarray(x)
    x, (scale, bias), result = _in_and_out(module, given, scale, bias)
    # The op adds a residual of the result's dtype. Any other residual decides the sum's dtype.
    fuses = after.residual is None or after.residual.dtype == result
    fused = after if fuses else After()
    y, mean, var = _batch_norm(
        x,
        scale,
        bias,
        axis=axis,
        epsilon=module.epsilon,
        axis_name=axis_name,
        activation=fused.activation,
        residual=None if fused.residual is None else fused.residual.astype(x.dtype),
    )
    stats = given.dtype if module.dtype is None else jax.dtypes.canonicalize_dtype(module.dtype)
    stats = jnp.promote_types(stats, jnp.float32)
    y = y.astype(result)
    return y if fuses else after.plain(y), mean.astype(stats), var.astype(stats)


def running(module: Any, average: jax.Array, new: jax.Array) -> jax.Array:
    """A running average after one more batch."""
    return module.momentum * average + (1 - module.momentum) * new


# --- Group norm and instance norm ----------------------------------------------------------------


def samples(module: Any, x: Any, mask: Any) -> tuple[int, int | None] | None:
    """The channel axis of a GroupNorm or InstanceNorm, and the number of a GroupNorm's groups.

    None if Flax's own code must compute the norm, or must raise an error.
    """
    shape = np.shape(x)
    if not _is_covered(module, x, mask) or len(shape) < 2:
        return None
    if not hasattr(module, "reduction_axes"):  # InstanceNorm
        axis = canonical_axes(len(shape), module.feature_axes)[0]
        return (axis, None) if 0 < axis < len(shape) else None
    axes, channels = module.reduction_axes, shape[-1]
    count, size = module.num_groups, module.group_size
    if (axes is not None and not _is_per_sample(len(shape), axes)) or (
        isinstance(module, linen_module.Module) and (count is None) == (size is None)
    ):
        return None
    if count is None:
        count = channels // size if isinstance(size, int) and size > 0 else 0
    fits = isinstance(count, int) and count > 0 and channels % count == 0
    fits = fits and size in (None, channels // count)
    return (len(shape) - 1, count) if fits else None


def group_norm(
    module: Any,
    x: Any,
    scale: Any,
    bias: Any,
    *,
    axis: int,
    groups: int | None,
    activation: Any,
) -> jax.Array:
    """The result of a GroupNorm, or of an InstanceNorm (`groups` is None)."""
    x, (scale, bias), result = _in_and_out(module, jnp.asarray(x), scale, bias)
    options: Any = {"axis": axis, "epsilon": module.epsilon, "activation": activation}
    if groups is None:
        return _instance_norm(x, scale, bias, **options).astype(result)
    return _group_norm(x, scale, bias, num_groups=groups, **options).astype(result)


# --- Dense, and what takes its bias --------------------------------------------------------------


def not_rounded(given: list[Any], promoted: list[Any]) -> list[Any]:
    """Each promoted parameter, or the given one if Flax's promotion rounded it."""
    pairs = zip(given, promoted, strict=True)
    return [p if p is None or jnp.can_cast(v.dtype, p.dtype) else v for v, p in pairs]


def deferred(y: jax.Array, bias: Any, exact: Any) -> tuple[jax.Array, Any]:
    """A matrix product, and the unrounded bias to add; None if nothing is left to add.

    `bias` is the bias that Flax would add.
    """
    if bias is not None and jnp.result_type(y, bias) != y.dtype:  # the product is narrower
        return plus(y, bias), None
    return y, exact


def gelu_of_sum(y: jax.Array, bias: jax.Array | None, approximate: bool) -> jax.Array:
    """GELU of the sum of a matrix product and its bias."""
    _checks.flag("DenseGelu", "approximate", approximate)
    if y.dtype not in _FLOATS or y.size == 0 or (bias is not None and bias.dtype != y.dtype):
        return JAX_GELU(y if bias is None else plus(y, bias), approximate)
    return gelu(y, approximate) if bias is None else bias_gelu(y, bias, approximate)


# --- Embed ---------------------------------------------------------------------------------------


def looks_up(table: Any, inputs: Any, dtype: Any) -> bool:
    """Whether the op covers an Embed's call. Else Flax's own code computes it, or raises an error.

    A table of one row is not looked up: Flax repeats its row.
    """
    floats = (table.dtype, table.dtype if dtype is None else jnp.dtype(dtype))
    covered = all(each in _FLOATS for each in floats) and table.shape[0] > 1
    return covered and getattr(inputs, "dtype", None) in _INTEGERS
