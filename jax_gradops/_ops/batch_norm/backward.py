"""Batch norm without autodiff: `jax_gradops.backward`."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.batch_norm import kernels as kernels
from jax_gradops._ops.batch_norm.arguments import checked_x, per_channel, statistic
from jax_gradops._ops.batch_norm.kernels import BatchNorm


def batch_norm_forward(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Batch norm by the statistics of the batch, and the statistics that its gradient needs.

    .. math:: y = (x - \text{mean})\,\text{rstd} \cdot \text{scale} + \text{bias}, \qquad
              \text{rstd} = \frac{1}{\sqrt{\text{var} + \text{epsilon}}}

    Args:
      x: float16, bfloat16, float32 or float64, at least two axes.
      scale: shape ``(x.shape[axis],)``; any of the four dtypes. None: no scale.
      bias: as `scale`. None: no bias.
      axis: the channels' axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance; finite, at least 0.
      implementation: as in `jax_gradops.batch_norm`.

    Returns:
      ``(y, mean, rstd)``: y of x's shape and dtype; mean and 1/sqrt(var + epsilon) of shape
      ``(x.shape[axis],)``, in float32 (float64 for float64).

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    Numerics are as in `jax_gradops.batch_norm`.

    References:
      Ioffe, Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> y, mean, rstd = backward.batch_norm_forward(jnp.array([[1.0], [3.0]]), epsilon=0.0)
    >>> print(mean, rstd)
    [2.] [1.]
    """
    op = "batch_norm_forward"
    x, axis = checked_x(op, x, axis)
    return kernels.forward(
        x,
        per_channel(op, "scale", scale, x, axis),
        per_channel(op, "bias", bias, x, axis),
        norm=BatchNorm(
            inner=x.ndim - 1 - axis,
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            implementation=resolve_implementation(implementation, op),
        ),
    )


@overload
def batch_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    axis: int = -1,
    activation: Literal["relu"] | None = None,
    y: None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]: ...


@overload
def batch_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    axis: int = -1,
    activation: Literal["relu"] | None = None,
    y: ArrayLike,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]: ...


def batch_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    axis: int = -1,
    activation: Literal["relu"] | None = None,
    y: ArrayLike | None = None,
    implementation: Implementation = None,
) -> Any:
    r"""The gradient of batch norm from its input and saved statistics (BatchNormalizationGrad).

    .. math:: dx = \text{scale} \cdot \text{rstd} \cdot \bigl(dz - \overline{dz}
              - \hat x \cdot \overline{dz \cdot \hat x}\bigr), \qquad
              d\text{scale} = \sum dz \cdot \hat x, \quad d\text{bias} = \sum dz

    with :math:`\hat x` = (x − mean) · rstd; sums and means are over all axes but `axis`. dz is dy,
    or, with an activation, dy where its argument was positive and 0 elsewhere.

    Args:
      dy: the cotangent of y, of x's shape and dtype.
      x: the input of the forward pass: float16, bfloat16, float32 or float64, at least two axes.
      scale: shape ``(x.shape[axis],)``, any of the four dtypes; None where there was none.
      mean: the mean of each channel, shape ``(x.shape[axis],)``, any of the four dtypes.
      rstd: 1/sqrt(var + epsilon) of each channel, likewise.
      bias: as `scale`. The activation's argument is computed from it again; dbias has its dtype.
      axis: the channels' axis, in ``[-x.ndim, x.ndim)``.
      activation: as in `jax_gradops.batch_norm`: ``"relu"``, or None.
      y: the output of a forward pass that added a residual, of x's shape and dtype; None where
        there was no residual. The activation's argument was positive where y is.
      implementation: as in `jax_gradops.batch_norm`.

    Returns:
      ``(dx, dscale, dbias)``, and with `y` ``(dx, dscale, dbias, dresidual)``: dx of x's shape and
      dtype; dscale of scale's, None without a scale; dbias of bias's (without one of scale's shape
      and dtype, without both in float32, float64 for float64); dresidual is dz in x's dtype.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    The same kernels as the derivative of `jax_gradops.batch_norm`, which also has what rounding the
    mean left. With the rounded mean alone, x − mean is off by up to 2^-24 of the mean (float32).

    References:
      ONNX Runtime, BatchNormalizationGrad (its saved_mean and saved_inv_std): https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dy, x, mean = jnp.array([[1.0], [0.0]]), jnp.array([[1.0], [3.0]]), jnp.array([2.0])
    >>> dx, dscale, dbias = backward.batch_norm_backward(dy, x, jnp.ones(1), mean, jnp.ones(1))
    >>> print(dx[:, 0], dscale, dbias)
    [0. 0.] [-1.] [1.]
    >>> *_, dresidual = backward.batch_norm_backward(
    ...     dy, x, None, mean, jnp.ones(1), activation="relu", y=jnp.array([[0.0], [1.0]]))
    >>> print(dresidual[:, 0])
    [0. 0.]
    """
    op = "batch_norm_backward"
    x, axis = checked_x(op, x, axis)
    gamma = per_channel(op, "scale", scale, x, axis)
    beta = per_channel(op, "bias", bias, x, axis)
    activation = _checks.choice(op, "activation", activation, "relu", None)
    given = [p.dtype for p in (beta, gamma) if p is not None]
    dtypes = {"dbias": given[0] if given else accum_dtype(x.dtype)}
    if gamma is not None:
        dtypes["dscale"] = gamma.dtype
    return kernels.differentiate(
        _checks.like(op, "dy", dy, "x", x),
        x,
        None if y is None else _checks.like(op, "y", y, "x", x),
        gamma,
        beta,
        statistic(op, "mean", mean, x, axis),
        statistic(op, "rstd", rstd, x, axis),
        norm=BatchNorm(
            inner=x.ndim - 1 - axis,
            relu=activation == "relu",
            implementation=resolve_implementation(implementation, op),
        ),
        dtypes=tuple((name, jnp.dtype(dtype).name) for name, dtype in dtypes.items()),
    )
