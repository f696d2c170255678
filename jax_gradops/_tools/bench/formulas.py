"""The ops in `jax.numpy`, as JAX users write them. XLA is timed with these formulas.

They are the textbook's: two passes for the variance of rows, and backward passes from saved
statistics. Batch norm and group norm have Flax's formulas. A formula takes a `Form`'s operands and
options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops._ops.batch_norm import spec as batch_norm_spec
from jax_gradops._ops.cross_entropy import oracle as cross_entropy_oracle
from jax_gradops._ops.op_spec import EPSILON as EPSILON
from jax_gradops._ops.op_spec import MAX_NORM as MAX_NORM
from jax_gradops._ops.op_spec import Form

Arrays: TypeAlias = list[Any]


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype of sums and parameters."""
    return np.dtype("float64" if jnp.dtype(dtype) == jnp.float64 else "float32")


# --- Norms of rows -------------------------------------------------------------------------------


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x.dtype))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, -1, keepdims=True)


def layer_norm_statistics(x: jax.Array, *, epsilon: float) -> Arrays:
    """The values that a backward pass saves: each row's mean and 1 / deviation."""
    mean = _mean(_wide(x))
    return [mean, *rms_norm_statistics(_wide(x) - mean, epsilon=epsilon)]


def rms_norm_statistics(x: jax.Array, *, epsilon: float) -> Arrays:
    """The value that a backward pass saves: 1 / the root of each row's mean square."""
    return [jax.lax.rsqrt(_mean(jnp.square(_wide(x))) + epsilon)]


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float) -> Arrays:
    """Layer norm."""
    mean, rstd = layer_norm_statistics(x, epsilon=epsilon)
    return [((_wide(x) - mean) * rstd * scale[None] + bias[None]).astype(x.dtype)]


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> Arrays:
    """RMS norm."""
    (rstd,) = rms_norm_statistics(x, epsilon=epsilon)
    return [(_wide(x) * rstd * scale[None]).astype(x.dtype)]


def layer_norm_vjp(
    dy: jax.Array, x: jax.Array, scale: jax.Array, *others: jax.Array, epsilon: float
) -> Arrays:
    """The gradients of layer norm."""
    del epsilon
    _, mean, rstd = others
    wide, x_hat = _wide(dy), (_wide(x) - mean) * rstd
    wdy = wide * scale[None]
    dx = (wdy - _mean(wdy) - x_hat * _mean(wdy * x_hat)) * rstd
    return [dx.astype(x.dtype), jnp.sum(wide * x_hat, 0), jnp.sum(wide, 0)]


def rms_norm_vjp(
    dy: jax.Array, x: jax.Array, scale: jax.Array, rstd: jax.Array, *, epsilon: float
) -> Arrays:
    """The gradients of RMS norm."""
    del epsilon
    wide, x_hat = _wide(dy), _wide(x) * rstd
    wdy = wide * scale[None]
    dx = (wdy - x_hat * _mean(wdy * x_hat)) * rstd
    return [dx.astype(x.dtype), jnp.sum(wide * x_hat, 0)]


# --- Batch norm: flax.linen.BatchNorm -------------------------------------------------------------


def _others(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis)


def _along(values: Any, x: Any, axis: int) -> Any:
    """Reshapes one value per channel so that it broadcasts over x."""
    return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def batch_norm_statistics(x: jax.Array, *, axis: int, **options: Any) -> Arrays:
    """Mean and variance of each channel, in one pass: E[x²] - E[x]², the default of Flax."""
    del options
    x = x.astype(wide_dtype(x.dtype))
    mean, mean_square = (jnp.mean(v, _others(x, axis)) for v in (x, jnp.square(x)))
    return [mean, jnp.maximum(0, mean_square - jnp.square(mean))]


def _normalize(
    x: jax.Array, mean: Any, var: Any, scale: Any, bias: Any, *residual: Any,
    axis: int, epsilon: float, relu: bool, dtype: Any,
) -> jax.Array:  # fmt: skip
    """Applies batch norm with given statistics. x has its accumulation dtype."""
    factor = jax.lax.rsqrt(var + epsilon) * scale
    y = (x - _along(mean, x, axis)) * _along(factor, x, axis) + _along(bias, x, axis)
    y = y.astype(dtype)
    if residual:
        y = y + residual[0]
    return jax.nn.relu(y) if relu else y


def batch_norm(x: jax.Array, *others: jax.Array, **options: Any) -> Arrays:
    """Batch norm."""
    *residual, scale, bias = others
    mean, var = batch_norm_statistics(x, **options)
    wide = x.astype(mean.dtype)
    return [_normalize(wide, mean, var, scale, bias, *residual, **options, dtype=x.dtype)]


def batch_norm_vjp(
    dy: jax.Array, x: jax.Array, *others: jax.Array, axis: int, **options: Any
) -> Arrays:
    """The gradients of batch norm by JAX's autodiff, from saved statistics.

    The derivative of the statistics is written out, because autodiff would compute them again.
    """
    *residual, scale, bias, mean, var = others
    wide = x.astype(mean.dtype)

    def normalize(*arguments: Any) -> jax.Array:
        return _normalize(*arguments, axis=axis, **options, dtype=x.dtype)

    pullback = jax.vjp(normalize, wide, mean, var, scale, bias, *residual)[1]
    dx, dmean, dvar, dscale, dbias, *dresidual = pullback(dy)
    count = x.size // x.shape[axis]
    dvar = jnp.where(var > 0, dvar, 0) * (2 / count)
    dx = dx + wide * _along(dvar, x, axis) + _along(dmean / count - mean * dvar, x, axis)
    return [dx.astype(x.dtype), *dresidual, dscale, dbias]


# --- Group norm: flax.linen.GroupNorm, then silu --------------------------------------------------

#: The number of groups of a number of channels.
Groups: TypeAlias = Callable[[int], int]


def _by_group(x: jax.Array, groups: int, axis: int) -> jax.Array:
    sizes = groups, x.shape[axis] // groups
    return x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def group_norm_statistics(groups: Groups, x: jax.Array, *, axis: int, **options: Any) -> Arrays:
    """Mean and variance of each sample and group, by E[x²] - E[x]², the default of Flax."""
    del options
    parts = _by_group(x.astype(wide_dtype(x.dtype)), groups(x.shape[axis]), axis)
    others = [i for i in range(1, parts.ndim) if i != axis]
    mean, mean_square = (jnp.mean(v, others) for v in (parts, jnp.square(parts)))
    return [mean, jnp.maximum(0, mean_square - jnp.square(mean))]


def _each_channel(statistic: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """A number per sample and group, as a number per sample and channel that broadcasts over x."""
    repeated = jnp.repeat(statistic, x.shape[axis] // statistic.shape[1], 1)
    return repeated.reshape([s if i in (0, axis) else 1 for i, s in enumerate(x.shape)])


def _normalize_groups(
    x: jax.Array, mean: Any, var: Any, scale: Any, bias: Any,
    *, axis: int, epsilon: float, activation: str | None, dtype: Any,
) -> jax.Array:  # fmt: skip
    """Applies group norm with given statistics. x has its accumulation dtype."""
    mean, var = (_each_channel(s, x, axis) for s in (mean, var))
    factor = jax.lax.rsqrt(var + epsilon) * _along(scale, x, axis)
    y = ((x - mean) * factor + _along(bias, x, axis)).astype(dtype)
    return y if activation is None else {"relu": jax.nn.relu, "silu": jax.nn.silu}[activation](y)


def group_norm(
    groups: Groups, x: jax.Array, scale: jax.Array, bias: jax.Array, **options: Any
) -> Arrays:
    """Group norm, then the activation."""
    mean, var = group_norm_statistics(groups, x, **options)
    wide = x.astype(mean.dtype)
    return [_normalize_groups(wide, mean, var, scale, bias, **options, dtype=x.dtype)]


def group_norm_vjp(
    groups: Groups, dy: jax.Array, x: jax.Array, *others: jax.Array, axis: int, **options: Any
) -> Arrays:
    """The gradients of group norm, as those of batch norm."""
    scale, bias, mean, var = others
    wide = x.astype(mean.dtype)
    normalize = functools.partial(_normalize_groups, axis=axis, **options, dtype=x.dtype)
    pullback = jax.vjp(normalize, wide, mean, var, scale, bias)[1]
    dx, dmean, dvar, dscale, dbias = pullback(dy)
    count = x.size // (x.shape[0] * groups(x.shape[axis]))
    dvar = jnp.where(var > 0, dvar, 0) * (2 / count)
    rest = _each_channel(dmean / count - mean * dvar, x, axis)
    dx = dx + wide * _each_channel(dvar, x, axis) + rest
    return [dx.astype(x.dtype), dscale, dbias]


def _group_norm_formulas(groups: Groups) -> dict[str, Callable[..., Arrays]]:
    found = {"fwd": group_norm, "bwd": group_norm_vjp, "saved": group_norm_statistics}
    return {name: functools.partial(f, groups) for name, f in found.items()}


# --- GELU ----------------------------------------------------------------------------------------


def gelu(x: jax.Array, *bias: jax.Array, approximate: bool) -> Arrays:
    """GELU of x + bias, or of x if there is no bias."""
    z = _wide(x) + bias[0][None] if bias else _wide(x)
    return [jax.nn.gelu(z, approximate).astype(x.dtype)]


def gelu_vjp(dy: jax.Array, x: jax.Array, *bias: jax.Array, approximate: bool) -> Arrays:
    """The gradients of GELU. The bias's gradient is summed before dx is rounded."""
    z = _wide(x) + bias[0][None] if bias else _wide(x)
    (dz,) = jax.vjp(lambda z: jax.nn.gelu(z, approximate), z)[1](_wide(dy))
    return [dz.astype(x.dtype), *([jnp.sum(dz, 0)] if bias else [])]


# --- Softmax cross-entropy ------------------------------------------------------------------------


def cross_entropy_statistics(x: jax.Array) -> Arrays:
    """The value that a backward pass saves: the logsumexp of each row."""
    return [jax.nn.logsumexp(_wide(x), -1)]


def cross_entropy(x: jax.Array) -> Arrays:
    """Softmax cross-entropy."""
    labels = jnp.asarray(cross_entropy_oracle.labels_of(x))
    of_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return [cross_entropy_statistics(x)[0] - _wide(of_label)]


def cross_entropy_vjp(dloss: jax.Array, x: jax.Array, lse: jax.Array) -> Arrays:
    """The gradient of softmax cross-entropy."""
    labels = jnp.asarray(cross_entropy_oracle.labels_of(x))[..., None]
    is_label = jax.lax.broadcasted_iota(labels.dtype, x.shape, x.ndim - 1) == labels
    softmax = jnp.exp(_wide(x) - lse[..., None])
    return [(dloss[..., None] * (softmax - is_label.astype(softmax.dtype))).astype(x.dtype)]


# --- Clipping ------------------------------------------------------------------------------------


def global_norm(x: jax.Array) -> Arrays:
    """The L2 norm of x."""
    return [jnp.sqrt(jnp.sum(jnp.square(_wide(x))))]


def clip(x: jax.Array, *, max_norm: float) -> Arrays:
    """x, scaled down so that its norm is at most `max_norm`."""
    (norm,) = global_norm(x)
    factor = jnp.where(norm < max_norm, 1, max_norm / norm)
    return [(_wide(x) * factor.astype(_wide(x).dtype)).astype(x.dtype)]


#: By op: the formulas of both directions, and of the statistics that a backward pass has saved. The
#: formula of the backward pass takes dy, the operands and these statistics.
XLA: dict[str, dict[str, Callable[..., Arrays]]] = {
    "layer_norm": {"fwd": layer_norm, "bwd": layer_norm_vjp, "saved": layer_norm_statistics},
    "rms_norm": {"fwd": rms_norm, "bwd": rms_norm_vjp, "saved": rms_norm_statistics},
    "batch_norm": {"fwd": batch_norm, "bwd": batch_norm_vjp, "saved": batch_norm_statistics},
    "group_norm": _group_norm_formulas(batch_norm_spec.groups_of),
    "instance_norm": _group_norm_formulas(lambda channels: channels),
    "gelu": {"fwd": gelu, "bwd": gelu_vjp},
    "bias_gelu": {"fwd": gelu, "bwd": gelu_vjp},
    "softmax_cross_entropy_with_integer_labels": {
        "fwd": cross_entropy,
        "bwd": cross_entropy_vjp,
        "saved": cross_entropy_statistics,
    },
    "global_norm": {"fwd": global_norm},
    "clip_tree_by_global_norm": {"fwd": clip},
}


def formulas_of(op: str, form: Form) -> dict[str, Callable[..., Arrays]]:
    """The formulas in `XLA`. An op without an entry is timed with its reference in `jax.numpy`."""
    reference = functools.partial(form.call, implementation="xla")

    def vjp(dy: jax.Array, *operands: jax.Array, **options: Any) -> Arrays:
        return list(jax.vjp(functools.partial(reference, **options), *operands)[1](dy))

    def value(*operands: jax.Array, **options: Any) -> Arrays:
        return [reference(*operands, **options)]

    return XLA.get(op, {"fwd": value, "bwd": vjp})
