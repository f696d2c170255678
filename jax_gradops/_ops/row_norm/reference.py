"""Reference implementations of the layer norm and RMS norm kernels, in `jax.numpy`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_gradops._kernel.array_types import Arrays, accum_dtype
from jax_gradops._kernel.primitive import Function, unchanged
from jax_gradops._kernel.spec import along_features

Array = jax.Array


def _row_mean(x: Array) -> Array:
    n: Any = x.shape[-1]
    if not isinstance(n, int):  # a symbolic dimension of jax.export
        n = jnp.asarray(n).astype(x.dtype)
    elif n == 0:
        n = 1
    return jnp.sum(x, -1, keepdims=True) / n


def _along(parameter: Array | None, like: Array, offset: float = 0.0) -> Array | None:
    """A parameter plus `offset`, in the dtype and rank of `like`."""
    if parameter is None:
        return None
    return along_features(parameter.astype(like.dtype) + float(offset), like)


def _affine(x_hat: Array, scale: Array | None, bias: Array | None) -> Array:
    y = x_hat if scale is None else x_hat * scale
    return y if bias is None else y + bias


def inverse_deviation(variance: Array, epsilon: float, strict: bool = False) -> Array:
    """1/sqrt(variance + epsilon). It is 0 if epsilon is infinite in the variance's dtype.

    It is NaN where the variance is infinite, unless `strict`. The value 0 would silently turn such
    a row into zeros.
    """
    kind = jnp.finfo(variance.dtype)
    largest = float(kind.max)
    # With a huge epsilon, variance + epsilon may overflow. A quarter of the sum does not.
    half = 0.5 if epsilon > largest * float(kind.eps) / 8 else 1.0
    added = math.inf if epsilon > largest else float(epsilon)
    square = variance * half**2 + added * half**2
    # Not `lax.rsqrt`: its derivative has the third power, which leaves the range earlier.
    return half / jnp.sqrt(square if strict else jnp.where(jnp.isfinite(variance), square, -1))


def root_of_count(n: Any) -> float:
    """A power of two that is at least sqrt(n): the divisor of x before n squares are summed.

    The sum then overflows only if the mean of x² does. Digits are lost if that mean is below
    n times 1e-38.
    """
    return 2.0 ** ((n.bit_length() + 1) // 2 if isinstance(n, int) else 10)  # 2^10 if n is symbolic


def _mean_square(x: Array) -> Array:
    unit = root_of_count(x.shape[-1])
    return _row_mean(jnp.square(x * (1 / unit))) * unit**2


def _through_dtype(x: Array, dtype: str) -> Array:
    # XLA removes a pair of casts and keeps the more precise value. The barrier prevents this.
    return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def _rounded(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds x to `dtype` and casts the result to x's dtype. The derivative does not round."""
    return Function(_through_dtype, unchanged, (jnp.dtype(dtype).name,))(x)[0]


def _to_normalize(x: Array, residual: Array | None, residual_bias: Array | None) -> Array:
    """x, or x + residual rounded to x's dtype. The result has the accumulation dtype."""
    wide = x.astype(accum_dtype(x.dtype))
    if residual is None:
        return wide
    update = _affine(residual.astype(wide.dtype), None, _along(residual_bias, wide))
    return _rounded(wide + update, x.dtype)


# --- Forward: y, the sum with the residual, statistics -------------------------------------------


def forward(
    x: Array,
    residual: Array | None,
    residual_bias: Array | None,
    scale: Array | None,
    bias: Array | None,
    *,
    centered: bool,
    epsilon: float,
    scale_offset: float,
    strict: bool,
) -> tuple[Any, ...]:
    wide = _to_normalize(x, residual, residual_bias)
    if not centered:
        rstd = inverse_deviation(_mean_square(wide), epsilon, strict)
        y = _affine(wide * rstd, _along(scale, wide, scale_offset), None)
        return y.astype(x.dtype), wide.astype(x.dtype), None, rstd[..., 0]
    # The mean is computed from differences to the row's first element: exact for a constant row.
    # The mean's rounding error is delta. The number that is subtracted first does not change y.
    # This number does not change the gradient either, so it comes from stop_gradient.
    fixed = lax.stop_gradient(wide)
    shift = jnp.sum(fixed[..., :1], -1, keepdims=True)
    mean = shift + _row_mean(fixed - shift)
    shifted = wide - mean
    delta = _row_mean(shifted)
    deviations = shifted - delta
    rstd = inverse_deviation(_mean_square(deviations), epsilon, strict)
    y = _affine(deviations * rstd, _along(scale, wide, scale_offset), _along(bias, wide))
    return y.astype(x.dtype), wide.astype(x.dtype), (mean + delta)[..., 0], rstd[..., 0]


def layer_norm_by_statistics(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    rstd: Array,
    *,
    scale_offset: float,
) -> Array:
    """Layer norm with given statistics. It has no kernel, because XLA fuses it."""
    x_hat = (x.astype(mean.dtype) - mean[..., None]) * rstd[..., None]
    y = _affine(x_hat, _along(scale, x_hat, scale_offset), _along(bias, x_hat))
    return y.astype(x.dtype)


# --- Backward: dx, dscale, dbias (of layer norm), dresidual_bias ---------------------------------


def backward(
    dy: Array,
    x: Array,
    dsum: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    centered: bool,
    from_output: bool,
    scale_offset: float,
    epsilon: float,
) -> Arrays:
    del epsilon  # kernels choose an algorithm by it
    gamma, x_hat = _normalized(x, scale, bias, mean, rstd, scale_offset, from_output)
    rows = tuple(range(dy.ndim - 1))
    wide = dy.astype(x_hat.dtype)
    wdy = wide if gamma is None else wide * gamma
    dx = wdy - x_hat * _row_mean(wdy * x_hat)
    if centered:
        dx = dx - _row_mean(wdy)
    dx = dx * rstd[..., None]
    if dsum is not None:
        dx = dx + dsum.astype(dx.dtype)
    return dx.astype(dy.dtype), *(jnp.sum(t, rows) for t in (wide * x_hat, wide, dx))


def _normalized(
    saved: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array,
    scale_offset: float,
    from_output: bool,
) -> tuple[Array | None, Array]:
    """Returns scale + scale_offset and x_hat. `saved` is x or y."""
    wide = saved.astype(rstd.dtype)
    gamma = _along(scale, wide, scale_offset)
    if (
        from_output
    ):  # the inverse of `_affine`. Where gamma is 0, x_hat is 0 with finite derivatives
        beta = _along(bias, wide)
        shifted = wide if beta is None else wide - beta
        x_hat = shifted if gamma is None else shifted / jnp.where(gamma == 0, jnp.inf, gamma)
        return gamma, x_hat
    if mean is None:
        return gamma, wide * rstd[..., None]
    given = mean[..., None]
    shifted = wide - given
    # A saved mean has a rounding error. The error is large relative to a small deviation, so it is
    # removed. A larger difference is not rounding: the caller gave a mean that is not the row's.
    delta = lax.stop_gradient(_row_mean(shifted))
    rounding = jnp.abs(delta) < 2 * float(jnp.finfo(given.dtype).eps) * jnp.abs(given)
    return gamma, (shifted - jnp.where(rounding, delta, 0)) * rstd[..., None]


# --- Tangents: of y, of the sum, of mean (of layer norm) and of rstd ------------------------------


def tangents(
    saved: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array,
    dx: Array | None,
    dresidual: Array | None,
    dresidual_bias: Array | None,
    dscale: Array | None,
    dbias: Array | None,
    *,
    scale_offset: float,
    centered: bool,
    from_output: bool,
) -> tuple[Array, ...]:
    """The tangents are linear in dx to dbias, where None stands for 0. `saved` is x or y."""
    gamma, x_hat = _normalized(saved, scale, bias, mean, rstd, scale_offset, from_output)
    dz = jnp.zeros_like(x_hat)
    for change in (dx, dresidual):
        dz = dz if change is None else dz + change.astype(x_hat.dtype)
    dz = _affine(dz, None, _along(dresidual_bias, x_hat))
    level, slope = _row_mean(dz), _row_mean(dz * x_hat)
    dx_hat = ((dz - level if centered else dz) - x_hat * slope) * rstd[..., None]
    dy = dx_hat if gamma is None else dx_hat * gamma
    if dscale is not None:
        dy = dy + _affine(x_hat, _along(dscale, x_hat), None)
    dy = _affine(dy, None, _along(dbias, x_hat))
    drstd = -jnp.square(rstd) * slope[..., 0]
    return dy.astype(saved.dtype), dz.astype(saved.dtype), level[..., 0], drstd
