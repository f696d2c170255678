"""The ops in `jax.numpy`, as JAX users write them, and in float64 as the oracle of all results.

XLA is timed with the first half. Its formulas are the textbook's: two passes for the variance, and
backward passes from saved statistics. The oracles in the second half take float64 arrays of NumPy
or JAX (`xp` is the module), and return a list of results.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Arrays: TypeAlias = list[Any]
EPSILON = 1e-6
MAX_NORM = 1.0


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype of sums and parameters."""
    return np.dtype("float64" if jnp.dtype(dtype) == jnp.float64 else "float32")


# --- In jax.numpy, for XLA -----------------------------------------------------------------------


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x.dtype))


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, -1, keepdims=True)


def statistics(x: jax.Array, centered: bool) -> Arrays:
    """The values that a backward pass saves: each row's 1 / deviation, and mean if `centered`."""
    wide = _wide(x)
    mean = [_mean(wide)] if centered else []
    rstd = jax.lax.rsqrt(_mean(jnp.square(wide - mean[0] if centered else wide)) + EPSILON)
    return [*mean, rstd]


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> Arrays:
    """Layer norm."""
    mean, rstd = statistics(x, centered=True)
    return [((_wide(x) - mean) * rstd * scale[None] + bias[None]).astype(x.dtype)]


def rms_norm(x: jax.Array, scale: jax.Array) -> Arrays:
    """RMS norm."""
    (rstd,) = statistics(x, centered=False)
    return [(_wide(x) * rstd * scale[None]).astype(x.dtype)]


def layer_norm_vjp(
    dy: jax.Array, x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, rstd: jax.Array
) -> Arrays:
    """The gradients of layer norm."""
    del bias
    wide, x_hat = _wide(dy), (_wide(x) - mean) * rstd
    wdy = wide * scale[None]
    dx = (wdy - _mean(wdy) - x_hat * _mean(wdy * x_hat)) * rstd
    return [dx.astype(x.dtype), jnp.sum(wide * x_hat, 0), jnp.sum(wide, 0)]


def rms_norm_vjp(dy: jax.Array, x: jax.Array, scale: jax.Array, rstd: jax.Array) -> Arrays:
    """The gradients of RMS norm."""
    wide, x_hat = _wide(dy), _wide(x) * rstd
    wdy = wide * scale[None]
    dx = (wdy - x_hat * _mean(wdy * x_hat)) * rstd
    return [dx.astype(x.dtype), jnp.sum(wide * x_hat, 0)]


def gelu(x: jax.Array, *bias: jax.Array, approximate: bool) -> Arrays:
    """GELU of x + bias, or of x if there is no bias."""
    z = _wide(x) + bias[0][None] if bias else _wide(x)
    return [jax.nn.gelu(z, approximate).astype(x.dtype)]


def gelu_vjp(dy: jax.Array, x: jax.Array, *bias: jax.Array, approximate: bool) -> Arrays:
    """The gradients of GELU. The bias's gradient is summed before dx is rounded."""
    z = _wide(x) + bias[0][None] if bias else _wide(x)
    (dz,) = jax.vjp(lambda z: jax.nn.gelu(z, approximate), z)[1](_wide(dy))
    return [dz.astype(x.dtype), *([jnp.sum(dz, 0)] if bias else [])]


def global_norm(x: jax.Array) -> Arrays:
    """The L2 norm of x."""
    return [jnp.sqrt(jnp.sum(jnp.square(_wide(x))))]


def clip(x: jax.Array) -> Arrays:
    """x, scaled down so that its norm is at most `MAX_NORM`."""
    (norm,) = global_norm(x)
    factor = jnp.where(norm < MAX_NORM, 1, MAX_NORM / norm)
    return [(_wide(x) * factor.astype(_wide(x).dtype)).astype(x.dtype)]


# --- In float64, of NumPy or JAX -----------------------------------------------------------------


def _normalized(xp: Any, x: Any, centered: bool) -> tuple[Any, Any]:
    if centered:
        x = x - xp.mean(x, -1, keepdims=True)
    rstd = 1 / xp.sqrt(xp.mean(x * x, -1, keepdims=True) + EPSILON)
    return x * rstd, rstd


def norm_oracle(xp: Any, x: Any, scale: Any, *bias: Any) -> Arrays:
    """Layer norm, or RMS norm if there is no bias."""
    y = _normalized(xp, x, bool(bias))[0] * scale[None]
    return [y + bias[0][None] if bias else y]


def norm_vjp_oracle(xp: Any, dy: Any, x: Any, scale: Any, *bias: Any) -> Arrays:
    """The gradients of layer norm or RMS norm."""
    x_hat, rstd = _normalized(xp, x, bool(bias))
    wdy = dy * scale[None]
    dx = wdy - x_hat * xp.mean(wdy * x_hat, -1, keepdims=True)
    if bias:
        dx = dx - xp.mean(wdy, -1, keepdims=True)
    return [dx * rstd, xp.sum(dy * x_hat, 0), *([xp.sum(dy, 0)] if bias else [])]


def _erfc(xp: Any, z: Any) -> Any:
    return np.vectorize(math.erfc)(z) if xp is np else jax.lax.erfc(z)


def _gelu_parts(xp: Any, z: Any, approximate: bool) -> tuple[Any, Any]:
    """The weight w in gelu(z) = z w(z), and the derivative of gelu."""
    if approximate:
        c = 2 * math.sqrt(2 / math.pi)
        weight = 1 / (1 + xp.exp(-c * (z + 0.044715 * z**3)))
        return weight, weight + z * weight * (1 - weight) * c * (1 + 3 * 0.044715 * z**2)
    weight = 0.5 * _erfc(xp, -z / math.sqrt(2))
    return weight, weight + z * xp.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def gelu_oracle(xp: Any, x: Any, *bias: Any, approximate: bool) -> Arrays:
    """GELU of x + bias, or of x if there is no bias."""
    z = x + bias[0][None] if bias else x
    return [z * _gelu_parts(xp, z, approximate)[0]]


def gelu_vjp_oracle(xp: Any, dy: Any, x: Any, *bias: Any, approximate: bool) -> Arrays:
    """The gradients of GELU."""
    dx = dy * _gelu_parts(xp, x + bias[0][None] if bias else x, approximate)[1]
    return [dx, *([xp.sum(dx, 0)] if bias else [])]


def global_norm_oracle(xp: Any, x: Any) -> Arrays:
    """The L2 norm of x."""
    return [xp.sqrt(xp.sum(x * x))]


def clip_oracle(xp: Any, x: Any) -> Arrays:
    """x, scaled down so that its norm is at most `MAX_NORM`."""
    (norm,) = global_norm_oracle(xp, x)
    return [x * xp.where(norm < MAX_NORM, 1.0, MAX_NORM / norm)]
