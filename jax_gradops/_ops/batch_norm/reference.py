"""What the kernels of batch norm and group norm compute, in `jax.numpy`, and their tangents."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_gradops._kernel.array_types import Arrays, accum_dtype
from jax_gradops._kernel.primitive import Function, Operands, unchanged
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.row_norm.reference import inverse_deviation, root_of_count

Array = jax.Array
Activation: TypeAlias = Literal["relu", "silu"] | None


# --- Activations ---------------------------------------------------------------------------------


def _silu(z: Array) -> Array:
    return z / (1 + jnp.exp(-z))


def _slope_of_silu(z: Array) -> Array:
    # 1 - sigmoid(z) would have no correct digit for large z.
    return jax.nn.sigmoid(z) * (1 + z * jax.nn.sigmoid(-z))


def _tangent_of_silu(operands: Operands, result: Array, tangents: Operands) -> Array:
    del result
    return _slope_of_silu(operands[0]) * tangents[0]


def _activated(z: Array, activation: Activation) -> Array:
    if activation == "silu":
        # JAX's own derivative of exp(-z) may overflow.
        return Function(_silu, _tangent_of_silu)(z)[0]
    return jax.nn.relu(z) if activation == "relu" else z


def _through_activation(dy: Array, z: Array, activation: Activation) -> Array:
    """Multiplies dy by the activation's derivative at z. For relu, z may be relu's result."""
    if activation == "silu":
        return dy * _slope_of_silu(z)
    return jnp.where(z > 0, dy, 0) if activation == "relu" else dy


# --- Forward -------------------------------------------------------------------------------------


def _normalized(axes: Axes, x: Array, mean: Array, delta: Array | None, rstd: Array) -> Array:
    """Returns x_hat. x has the accumulation dtype."""
    centered = x - axes.along_statistic(mean, x)
    if delta is not None:
        centered = centered - axes.along_statistic(delta, x)
    return centered * axes.along_statistic(rstd, x)


def _argument(
    axes: Axes, x_hat: Array, scale: Array | None, bias: Array | None, residual: Array | None
) -> Array:
    """The argument of the activation."""
    z = x_hat
    if scale is not None:
        z = z * axes.along_parameter(scale.astype(z.dtype), z)
    if bias is not None:
        z = z + axes.along_parameter(bias.astype(z.dtype), z)
    return z if residual is None else z + residual.astype(z.dtype)


def forward(
    axes: Axes,
    x: Array,
    residual: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array | None,
    rstd: Array | None,
    delta: Array | None,
    *,
    epsilon: float,
    strict: bool,
    activation: Activation,
) -> Arrays:
    """Returns y, mean, variance, rstd and delta."""
    wide = x.astype(accum_dtype(x.dtype))
    if mean is None or rstd is None:
        n = axes.terms(wide)
        # The mean's rounding error is delta. The number that is subtracted first does not change y
        # or y's gradient, so it comes from stop_gradient.
        first = as_rounded(axes.sum_of_statistic(lax.stop_gradient(wide)) / n)
        shifted = wide - axes.along_statistic(first, wide)
        offset = axes.sum_of_statistic(shifted) / n
        centered = shifted - axes.along_statistic(offset, wide)
        unit = root_of_count(n)
        variance = axes.sum_of_statistic(jnp.square(centered * (1 / unit))) / n * unit**2
        mean, delta = split(first, offset)
        rstd = inverse_deviation(variance, epsilon, strict)
        x_hat = centered * axes.along_statistic(rstd, wide)
    else:
        x_hat = _normalized(axes, wide, mean, delta, rstd)
        variance = delta = jnp.zeros_like(mean)  # not asked for
    y = _activated(_argument(axes, x_hat, scale, bias, residual), activation)
    return y.astype(x.dtype), mean, variance, rstd, delta


def _through_integers(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(bits | (x != x).astype(bits.dtype), x.dtype)


def as_rounded(x: Array) -> Array:
    """Returns x, and makes all users of x see one rounded number.

    XLA may compute x again inside a fused user, with fewer roundings (x * y + z has one rounding).
    A bitcast to integers and back prevents this. A barrier does not: XLA's CPU compiler drops it.
    """
    return Function(_through_integers, unchanged)(x)[0]


def split(first: Array, offset: Array) -> tuple[Array, Array]:
    """Returns the rounded first + offset, and the rounding error, which has no derivative."""
    first, offset = as_rounded(first), as_rounded(offset)
    mean = as_rounded(first + offset)
    return mean, lax.stop_gradient((first - mean) + offset)


# --- Derivatives ---------------------------------------------------------------------------------


def tangents(
    axes: Axes,
    x: Array,
    y: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    rstd: Array,
    delta: Array | None,
    dx: Array | None,
    dresidual: Array | None,
    dscale: Array | None,
    dbias: Array | None,
    *,
    activation: Activation,
    axis_name: Any,
) -> Arrays:
    """Returns the tangents of y, mean, variance and rstd.

    They are linear in dx to dbias. None stands for zero.
    """
    x_hat = _normalized(axes, x.astype(mean.dtype), mean, delta, rstd)
    wide = jnp.zeros_like(x_hat) if dx is None else dx.astype(x_hat.dtype)
    n, sums = axes.terms(wide), [axes.sum_of_statistic(t) for t in (wide, wide * x_hat)]
    if axis_name is not None:
        n, sums = lax.psum(1, axis_name) * n, lax.psum(sums, axis_name)
    level, slope = (axes.along_statistic(part / n, wide) for part in sums)
    dx_hat = (wide - level - x_hat * slope) * axes.along_statistic(rstd, wide)
    dz = _argument(axes, dx_hat, scale, dbias, dresidual)
    if dscale is not None:
        dz = dz + x_hat * axes.along_parameter(dscale.astype(dz.dtype), dz)
    if activation is not None:
        z = _argument(axes, x_hat, scale, bias, None) if y is None else y
        dz = _through_activation(dz, z, activation)
    dmean, dslope = (part / n for part in sums)
    drstd = -jnp.square(rstd) * dslope
    return dz.astype(x.dtype), dmean, 2 * dslope / rstd, drstd


def backward(
    axes: Axes,
    dy: Array,
    x: Array,
    y: Array | None,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    rstd: Array,
    delta: Array | None,
    mean_dz: Array | None,
    mean_dz_x_hat: Array | None,
    *,
    activation: Activation,
) -> tuple[Array, ...]:
    """Returns dx, dresidual, dscale, dbias, and the sums whose means dx needs.

    In batch norm, these are the sums of dz and dz * x_hat: dbias and dscale. In group norm, the
    terms are multiplied by the scale, because a group has several scales.
    """
    x_hat = _normalized(axes, x.astype(mean.dtype), mean, delta, rstd)
    dz = dy.astype(x_hat.dtype)
    if activation is not None:
        z = _argument(axes, x_hat, scale, bias, None) if y is None else y
        dz = _through_activation(dz, z, activation)
    dscale, dbias = axes.sum_of_parameter(dz * x_hat), axes.sum_of_parameter(dz)
    dx, factor, sums = dz, rstd, [dbias, dscale]
    gamma = None if scale is None else scale.astype(rstd.dtype)
    if axes.grouped:
        dx = _argument(axes, dz, scale, None, None)
        sums = [jnp.sum(s if gamma is None else s * gamma, -1) for s in sums]
    elif gamma is not None:
        factor = rstd * gamma
    n = axes.terms(dx)
    level = axes.along_statistic(sums[0] / n if mean_dz is None else mean_dz, dx)
    slope = axes.along_statistic(sums[1] / n if mean_dz_x_hat is None else mean_dz_x_hat, dx)
    dx = (dx - level - x_hat * slope) * axes.along_statistic(factor, dx)
    return dx.astype(dy.dtype), dz.astype(dy.dtype), dscale, dbias, *sums
