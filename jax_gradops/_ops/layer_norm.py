"""Layer norm and RMS norm with fused backward passes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._core import Kernel, Result, along_features, column_sum_workspace
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._sharding import Arrays, accum_dtype, gathered, reshard_like

# --- References: the meaning of the kernels in jax.numpy -----------------------------------------


def _row_mean(x: jax.Array) -> jax.Array:
    n: Any = x.shape[-1]
    if not isinstance(n, int):  # a symbolic dimension of jax.export
        n = jnp.asarray(n).astype(x.dtype)
    elif n == 0:
        n = 1
    return jnp.sum(x, -1, keepdims=True) / n


def _affine(x_hat: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    y = x_hat if scale is None else x_hat * along_features(scale, x_hat)
    return y if bias is None else y + along_features(bias, y)


def _inverse_deviation(variance: jax.Array, epsilon: float) -> jax.Array:
    """NaN where the variance is infinite: 0 would turn such a row into zeros nobody notices."""
    square = variance + float(epsilon)
    return jax.lax.rsqrt(jnp.where(jnp.isinf(square), -1, square))


def _layer_norm_fwd_reference(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, epsilon: float
) -> Arrays:
    a = accum_dtype(x.dtype)
    wide = x.astype(a)
    # The mean from differences to the row's first element, exact for a constant row; rounded, it is
    # off by delta. y does not depend on what is taken off before, so neither does the gradient.
    fixed = jax.lax.stop_gradient(wide)
    shift = jnp.sum(fixed[..., :1], -1, keepdims=True)
    mean = shift + _row_mean(fixed - shift)
    shifted = wide - mean
    delta = _row_mean(shifted)
    centered = shifted - delta
    rstd = _inverse_deviation(_row_mean(jnp.square(centered)), epsilon)
    y = _affine(centered * rstd, scale, bias).astype(x.dtype)
    return y, (mean + delta)[..., 0], rstd[..., 0]


def _layer_norm_bwd_reference(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, mean: jax.Array, rstd: jax.Array
) -> Arrays:
    shifted = x.astype(mean.dtype) - mean[..., None]
    # Rounding the saved mean leaves |mean| * 2^-24, which is large beside a small deviation.
    x_hat = (shifted - _row_mean(shifted)) * rstd[..., None]
    return _norm_bwd_reference(dy, x_hat, scale, rstd, centered=True)


def _rms_norm_fwd_reference(x: jax.Array, scale: jax.Array | None, *, epsilon: float) -> Arrays:
    wide = x.astype(accum_dtype(x.dtype))
    rstd = _inverse_deviation(_row_mean(jnp.square(wide)), epsilon)
    return _affine(wide * rstd, scale, None).astype(x.dtype), rstd[..., 0]


def _rms_norm_bwd_reference(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, rstd: jax.Array
) -> Arrays:
    x_hat = x.astype(rstd.dtype) * rstd[..., None]
    return _norm_bwd_reference(dy, x_hat, scale, rstd, centered=False)[:2]


def _norm_bwd_reference(
    dy: jax.Array, x_hat: jax.Array, scale: jax.Array | None, rstd: jax.Array, *, centered: bool
) -> Arrays:
    rows = tuple(range(dy.ndim - 1))
    wide = dy.astype(x_hat.dtype)
    wdy = wide if scale is None else wide * along_features(scale, wide)
    dx = wdy - x_hat * _row_mean(wdy * x_hat)
    if centered:
        dx = dx - _row_mean(wdy)
    return (dx * rstd[..., None]).astype(dy.dtype), jnp.sum(wide * x_hat, rows), jnp.sum(wide, rows)


# --- Kernels -------------------------------------------------------------------------------------

LAYER_NORM_FWD = Kernel(
    name="layer_norm_fwd",
    operands={"x": "nd", "scale": "d", "bias": "d"},
    results={"y": Result("nd", "x"), "mean": Result("n"), "rstd": Result("n")},
    reference=_layer_norm_fwd_reference,
    whole="d",
)
LAYER_NORM_BWD = Kernel(
    name="layer_norm_bwd",
    operands={"dy": "nd", "x": "nd", "scale": "d", "mean": "n", "rstd": "n"},
    results={"dx": Result("nd", "x"), "dscale": Result("d"), "dbias": Result("d")},
    reference=_layer_norm_bwd_reference,
    whole="d",
    workspace=column_sum_workspace,
)
RMS_NORM_FWD = Kernel(
    name="rms_norm_fwd",
    operands={"x": "nd", "scale": "d"},
    results={"y": Result("nd", "x"), "rstd": Result("n")},
    reference=_rms_norm_fwd_reference,
    whole="d",
)
RMS_NORM_BWD = Kernel(
    name="rms_norm_bwd",
    operands={"dy": "nd", "x": "nd", "scale": "d", "rstd": "n"},
    results={"dx": Result("nd", "x"), "dscale": Result("d")},
    reference=_rms_norm_bwd_reference,
    whole="d",
    workspace=column_sum_workspace,
)


# --- Differentiation -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    epsilon: float,
    implementation: Implementation,
) -> jax.Array:
    return _layer_norm_fwd(x, scale, bias, epsilon, implementation)[0]


def _layer_norm_fwd(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    epsilon: float,
    implementation: Implementation,
) -> Any:
    y, mean, rstd = LAYER_NORM_FWD(
        x, scale, bias, epsilon=np.float64(epsilon), implementation=implementation
    )
    mean = checkpoint_name(mean, "layer_norm_mean")
    rstd = checkpoint_name(rstd, "layer_norm_rstd")
    return y, (x, scale, bias, mean, rstd)


def _layer_norm_bwd(
    epsilon: float, implementation: Implementation, residuals: Any, dy: jax.Array
) -> Arrays:
    x, scale, bias, mean, rstd = residuals
    skip = [name for name, p in (("dscale", scale), ("dbias", bias)) if p is None]
    return LAYER_NORM_BWD(dy, x, scale, mean, rstd, skip=skip, implementation=implementation)


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(
    x: jax.Array, scale: jax.Array | None, epsilon: float, implementation: Implementation
) -> jax.Array:
    return _rms_norm_fwd(x, scale, epsilon, implementation)[0]


def _rms_norm_fwd(
    x: jax.Array, scale: jax.Array | None, epsilon: float, implementation: Implementation
) -> Any:
    y, rstd = RMS_NORM_FWD(x, scale, epsilon=np.float64(epsilon), implementation=implementation)
    rstd = checkpoint_name(rstd, "rms_norm_rstd")
    return y, (x, scale, rstd)


def _rms_norm_bwd(
    epsilon: float, implementation: Implementation, residuals: Any, dy: jax.Array
) -> Arrays:
    x, scale, rstd = residuals
    skip = [] if scale is not None else ["dscale"]
    return RMS_NORM_BWD(dy, x, scale, rstd, skip=skip, implementation=implementation)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


# --- Public functions ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("op", "epsilon", "scale_offset", "implementation"))
def _normalize(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    op: str,
    epsilon: float,
    scale_offset: float,
    implementation: Implementation,
) -> jax.Array:
    """The part that is traced: x is [..., *normalized_shape flattened], parameters are flat."""
    a = accum_dtype(x.dtype)
    if scale is not None:
        scale = scale.astype(a) + scale_offset
    if bias is not None:
        bias = bias.astype(a)
    whole_x, scale, bias = LAYER_NORM_FWD.prepare(x, scale, bias)
    # implementation="xla" is differentiated by JAX itself, so that forward mode works.
    xla = implementation == "xla"
    y: Any
    if op == "rms_norm":
        y = (_rms_norm_fwd if xla else _rms_norm)(whole_x, scale, epsilon, implementation)
    else:
        y = (_layer_norm_fwd if xla else _layer_norm)(whole_x, scale, bias, epsilon, implementation)
    return reshard_like(y[0] if xla else y, x)


def _parameter(
    op: str, name: str, value: ArrayLike | None, normalized_shape: tuple[int, ...]
) -> jax.Array | None:
    """A parameter of shape `normalized_shape`, or of its last axis alone, flattened."""
    if value is None:
        return None
    parameter = gathered(_checks.array(op, name, value), 0)
    per_channel = normalized_shape[-1:]
    if parameter.shape not in (normalized_shape, per_channel):
        expected = f"x.shape[begin_norm_axis:] = {normalized_shape}"
        if per_channel != normalized_shape:
            expected += f" or (x.shape[-1],) = {per_channel}"
        raise ValueError(f"{op}: {name} must have shape {expected}, got {parameter.shape}")
    return jnp.broadcast_to(parameter, normalized_shape).reshape(-1)


def _norm(
    op: str,
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    begin_norm_axis: int,
    epsilon: float,
    scale_offset: float,
    implementation: Implementation,
) -> jax.Array:
    x = _checks.array(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a scalar")
    begin = _checks.axis(op, "begin_norm_axis", begin_norm_axis, x.ndim)
    normalized_shape = x.shape[begin:]
    flat = x
    if begin < x.ndim - 1:
        flat = gathered(x, begin).reshape(*x.shape[:begin], math.prod(normalized_shape))
    y = _normalize(
        flat,
        _parameter(op, "scale", scale, normalized_shape),
        _parameter(op, "bias", bias, normalized_shape),
        op=op,
        epsilon=_checks.number(op, "epsilon", epsilon, minimum=0),
        scale_offset=_checks.number(op, "scale_offset", scale_offset),
        implementation=resolve_implementation(implementation, op),
    )
    return y if flat is x else reshard_like(y.reshape(x.shape), x)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Layer normalisation with a fused backward pass.

    .. math:: y = \hat x (\text{scale} + \text{scale\_offset}) + \text{bias}, \qquad
              \hat x = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}

    Mean and (biased) variance are taken over the axes from `begin_norm_axis` on.

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes, independent of x's. None: no scale.
      bias: as `scale`. None: no bias.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance; finite, at least 0.
      scale_offset: a number added to `scale` (1.0 for parameters stored as ``scale - 1``).
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. The variance
    is computed in two passes over data held on chip, never as E[x²] − E[x]²; a constant row gives
    exactly `bias`. Results are bitwise the same from run to run, and a row's result does not depend
    on the other rows: NaN, infinity, or a variance that overflows makes all of that row NaN (in y
    and in the gradient), and no other.

    The derivative with respect to x, scale and bias is one fused operation; `jax.hessian` and other
    derivatives of it work too. Forward mode (`jax.jvp`) needs ``implementation="xla"``. The mean
    and 1/sqrt(var + epsilon) of each row, which the derivative needs, are named "layer_norm_mean"
    and "layer_norm_rstd" for `jax.checkpoint_policies.save_only_these_names`.

    References:
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y = jax_gradops.layer_norm(jnp.arange(6.0).reshape(2, 3), scale=jnp.ones(3))
    >>> print(np.asarray(y).round(3))
    [[-1.225  0.     1.225]
     [-1.225  0.     1.225]]
    """
    return _norm(
        "layer_norm", x, scale, bias, begin_norm_axis, epsilon, scale_offset, implementation
    )


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Root-mean-square normalisation with a fused backward pass.

    .. math:: y = \frac{x}{\sqrt{\text{mean}(x^2) + \text{epsilon}}}
              (\text{scale} + \text{scale\_offset})

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes, independent of x's. None: no scale.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square; finite, at least 0.
      scale_offset: a number added to `scale` (Gemma stores ``scale - 1``: pass 1.0).
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    Numerics, determinism and differentiation are as in `layer_norm`. For checkpoint policies, the
    only saved statistic, 1/sqrt(mean(x²) + epsilon) of each row, is named "rms_norm_rstd".

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> print(np.asarray(jax_gradops.rms_norm(jnp.array([[3.0, 4.0]]))).round(3))
    [[0.849 1.131]]
    """
    return _norm("rms_norm", x, scale, None, begin_norm_axis, epsilon, scale_offset, implementation)
