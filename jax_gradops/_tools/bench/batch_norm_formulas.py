"""Training batch norm as in Flax, and its float64 oracle. The module is like `formulas`.

Both take x, a residual if the form adds one, scale and bias.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_gradops._tools.bench.formulas import EPSILON, Arrays, wide_dtype

# The argument of relu is undecided if its absolute value is below this fraction of its terms.
# Rounding may change its sign, because PyTorch adds a residual in 16 bits.
_UNDECIDED = 2**-7


def _others(x: Any, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis)


def _along(values: Any, x: Any, axis: int) -> Any:
    """Reshapes one value per channel so that it broadcasts over x."""
    return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


# --- In jax.numpy, for XLA: flax.linen.BatchNorm -------------------------------------------------


def statistics(x: jax.Array, axis: int) -> Arrays:
    """Mean and variance of each channel, in one pass: E[x²] - E[x]², the default of Flax."""
    x = x.astype(wide_dtype(x.dtype))
    mean, mean_square = (jnp.mean(v, _others(x, axis)) for v in (x, jnp.square(x)))
    return [mean, jnp.maximum(0, mean_square - jnp.square(mean))]


def _normalize(
    x: jax.Array, mean: Any, var: Any, scale: Any, bias: Any, *residual: Any,
    axis: int, relu: bool, dtype: Any,
) -> jax.Array:  # fmt: skip
    """Applies batch norm with given statistics. x has its accumulation dtype."""
    factor = jax.lax.rsqrt(var + EPSILON) * scale
    y = (x - _along(mean, x, axis)) * _along(factor, x, axis) + _along(bias, x, axis)
    y = y.astype(dtype)
    if residual:
        y = y + residual[0]
    return jax.nn.relu(y) if relu else y


def batch_norm(x: jax.Array, *others: jax.Array, axis: int, relu: bool) -> Arrays:
    """Batch norm."""
    *residual, scale, bias = others
    mean, var = statistics(x, axis)
    wide = x.astype(mean.dtype)
    options = {"axis": axis, "relu": relu, "dtype": x.dtype}
    return [_normalize(wide, mean, var, scale, bias, *residual, **options)]


def batch_norm_vjp(
    dy: jax.Array, x: jax.Array, *others: jax.Array, axis: int, relu: bool
) -> Arrays:
    """The gradients of batch norm by JAX's autodiff, from saved statistics.

    The derivative of `statistics` is written out, because autodiff would compute the statistics
    again.
    """
    *residual, scale, bias, mean, var = others
    wide = x.astype(mean.dtype)

    def normalize(*arguments: Any) -> jax.Array:
        return _normalize(*arguments, axis=axis, relu=relu, dtype=x.dtype)

    pullback = jax.vjp(normalize, wide, mean, var, scale, bias, *residual)[1]
    dx, dmean, dvar, dscale, dbias, *dresidual = pullback(dy)
    count = x.size // x.shape[axis]
    dvar = jnp.where(var > 0, dvar, 0) * (2 / count)
    dx = dx + wide * _along(dvar, x, axis) + _along(dmean / count - mean * dvar, x, axis)
    return [dx.astype(x.dtype), *dresidual, dscale, dbias]


# --- In float64, of NumPy or JAX -----------------------------------------------------------------


def _normalized(xp: Any, x: Any, axis: int) -> tuple[Any, Any]:
    centered = x - xp.mean(x, _others(x, axis), keepdims=True)
    variance = xp.mean(centered * centered, _others(x, axis), keepdims=True)
    rstd = 1 / xp.sqrt(variance + EPSILON)
    return centered * rstd, rstd


def oracle(xp: Any, x: Any, *others: Any, axis: int, relu: bool) -> Arrays:
    """Batch norm."""
    *residual, scale, bias = others
    z = _normalized(xp, x, axis)[0] * _along(scale, x, axis) + _along(bias, x, axis)
    z = sum(residual, start=z)
    return [xp.maximum(z, 0) if relu else z]


def vjp_oracle(xp: Any, dy: Any, x: Any, *others: Any, axis: int, relu: bool) -> Arrays:
    """The gradients of batch norm."""
    *residual, scale, bias = others
    x_hat, rstd = _normalized(xp, x, axis)
    wide_scale = _along(scale, x, axis)
    terms = [x_hat * wide_scale, _along(bias, x, axis), *residual]
    z, size = sum(terms), sum(map(abs, terms))
    dz = xp.where(z > 0, dy, 0) if relu else dy
    means = [xp.mean(v, _others(x, axis), keepdims=True) for v in (dz * x_hat, dz)]
    dx = (dz - means[1] - x_hat * means[0]) * rstd * wide_scale
    arrays = [dx, *([dz] if residual else [])]
    if relu:
        arrays = [xp.where(abs(z) > _UNDECIDED * size, a, xp.nan) for a in arrays]
    return [*arrays, *(m.reshape(-1) * (x.size // x.shape[axis]) for m in means)]
