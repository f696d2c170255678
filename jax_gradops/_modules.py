"""What the Flax modules of `jax_gradops.linen` and `jax_gradops.nnx` have in common.

Each function computes what Flax's module does, to roundings, or returns None where the kernels do
not cover it: then Flax's own code has to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import dtypes

from jax_gradops._ops.batch_norm import batch_norm as _batch_norm
from jax_gradops._ops.layer_norm import layer_norm, rms_norm

_FLOATS = tuple(jnp.dtype(d) for d in ("float16", "bfloat16", "float32", "float64"))


def canonical_axes(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Positive, each once, in order."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({rank + axis if axis < 0 else axis for axis in given}))


def trailing_axes(rank: int, reduction_axes: Any, feature_axes: Any) -> int | None:
    """How many trailing axes are both normalised and the parameters', or None."""
    axes = canonical_axes(rank, reduction_axes)
    if axes != canonical_axes(rank, feature_axes) or not axes:
        return None
    return len(axes) if axes == tuple(range(rank - len(axes), rank)) else None


def _covered(*arrays: Any) -> bool:
    return all(a is None or jnp.result_type(a) in _FLOATS for a in arrays)


def _in_and_out(x: jax.Array, params: tuple[Any, ...], dtype: Any) -> tuple[jax.Array, Any]:
    """x as the kernel takes it, and the result's dtype: Flax's, which normalises in float32 or
    wider, and rounds to the dtype asked for, or that of x and the parameters together, once."""
    result = jnp.dtype(
        dtypes.canonicalize_dtype(x, *(p for p in params if p is not None), dtype=dtype)
    )
    return x.astype(jnp.promote_types(x.dtype, result)), result


def norm(
    x: jax.Array,
    scale: Any,
    bias: Any,
    *,
    centered: bool,
    epsilon: float,
    dtype: Any,
    reduction_axes: Any,
    feature_axes: Any,
) -> jax.Array | None:
    """LayerNorm's result (`centered`) or RMSNorm's."""
    axes = trailing_axes(x.ndim, reduction_axes, feature_axes)
    if axes is None or x.size == 0 or not _covered(x, scale, bias):
        return None
    x, result = _in_and_out(x, (scale, bias), dtype)
    if result not in _FLOATS:
        return None
    if centered:
        y = layer_norm(x, scale, bias, begin_norm_axis=-axes, epsilon=epsilon)
    else:
        y = rms_norm(x, scale, begin_norm_axis=-axes, epsilon=epsilon)
    return y.astype(result)


def batch_norm(
    x: jax.Array,
    scale: Any,
    bias: Any,
    *,
    axis: Any,
    epsilon: float,
    dtype: Any,
    axis_name: Any,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """BatchNorm's result in training, and the batch's mean and variance."""
    axes = canonical_axes(x.ndim, axis)
    if len(axes) != 1 or not 2 <= x.ndim <= 5 or x.size == 0 or not _covered(x, scale, bias):
        return None
    x, result = _in_and_out(x, (scale, bias), dtype)
    if result not in _FLOATS:
        return None
    y, mean, var = _batch_norm(x, scale, bias, axis=axes[0], epsilon=epsilon, axis_name=axis_name)
    return y.astype(result), mean, var
