"""RMS norm without autodiff: `jax_gradops.backward`."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jax_gradops._implementation import Implementation
from jax_gradops._ops.row_norm.arguments import Arguments
from jax_gradops._ops.row_norm.backward import (
    only_rstd,
    run_backward,
    run_forward,
    wanted_gradients,
)


def rms_norm_forward(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""RMS norm, and the statistic that its gradient needs.

    .. math:: y = x\,\text{rstd}\,(\text{scale} + \text{scale\_offset}), \qquad
              \text{rstd} = 1 / \sqrt{\text{mean}(x^2) + \text{epsilon}}

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes. None: no scale.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square; finite, at least 0.
      scale_offset: a number added to `scale`, if there is one.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(y, rstd)``: y of x's shape and dtype; 1/sqrt(mean(x²) + epsilon) of shape
      ``x.shape[:begin_norm_axis]``, in float32 (float64 for float64).

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number; for ``implementation="ffi"`` without a kernel.

    Numerics are as in `jax_gradops.layer_norm`.

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> y, rstd = backward.rms_norm_forward(jnp.array([[1.0, 7.0]]))
    >>> print(rstd.round(3))
    [0.2]
    """
    options = (begin_norm_axis, epsilon, scale_offset, implementation)
    y, _, rstd = run_forward("rms_norm_forward", x, scale, None, *options)
    return y, rstd


def rms_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    rstd: ArrayLike,
    *,
    begin_norm_axis: int = -1,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None]:
    r"""The gradient of RMS norm: ONNX Runtime's SimplifiedLayerNormalizationGrad.

    .. math:: \hat x = x\,\text{rstd}, \qquad d = dy \cdot \gamma, \qquad
              dx = \bigl(d - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    with γ = scale + scale_offset and means over the normalised axes; dscale is the sum of dy·x̂ over
    all other axes.

    Args:
      dy: the cotangent of y, of x's shape; any of the four dtypes.
      x: the input of the forward operator: float16, bfloat16, float32 or float64, any shape with at
        least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes. None: no scale.
      rstd: 1/sqrt(mean(x²) + epsilon) of each row, in shape ``x.shape[:begin_norm_axis]``, or with
        an axis of size 1 for each normalised one; any of the four dtypes.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      scale_offset: the number that the forward operator added to `scale`.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(dx, dscale)``: dx of x's shape and dtype, dscale of scale's; None if that is None.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a wrong shape or axis; for ``implementation="ffi"`` where there is no kernel.

    Numerics are as in `layer_norm_backward`.

    References:
      ONNX Runtime, SimplifiedLayerNormalizationGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dx, dscale = backward.rms_norm_backward(
    ...     jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 7.0]]), jnp.ones(2), rstd=jnp.array([0.2]))
    >>> print(dscale)
    [0.2 0. ]
    """
    op = "rms_norm_backward"
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    wanted = wanted_gradients(op, scale=scale)
    options = (only_rstd(rstd), wanted, scale_offset, implementation)
    return run_backward(op, dy, arguments, scale, None, *options)[:2]


def rms_norm_backward_from_output(
    dy: ArrayLike,
    y: ArrayLike,
    scale: ArrayLike | None,
    rstd: ArrayLike,
    *,
    begin_norm_axis: int = -1,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None]:
    r"""The gradient of RMS norm, from its output.

    .. math:: \hat x = y / \gamma, \qquad d = dy \cdot \gamma, \qquad
              dx = \bigl(d - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    `rms_norm_backward` with γ = scale + scale_offset and another x̂, which is 0 where γ is 0. That
    makes dscale 0 there; other columns are not touched.

    Args:
      dy: the cotangent of y, of y's shape; any of the four dtypes.
      y: the output of the forward operator: float16, bfloat16, float32 or float64, any shape with
        at least one axis.
      scale: shape ``y.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(y.shape[-1],)``; any of the four dtypes. None: no scale.
      rstd: 1/sqrt(mean(x²) + epsilon) of each row, in shape ``y.shape[:begin_norm_axis]``, or with
        an axis of size 1 for each normalised one; any of the four dtypes.
      begin_norm_axis: first normalised axis, in ``[-y.ndim, y.ndim)``.
      scale_offset: the number that the forward operator added to `scale`.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(dx, dscale)``: dx of y's shape and dtype, dscale of scale's; None if that is None.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a wrong shape or axis; for ``implementation="ffi"`` where there is no kernel.

    Numerics are as in `layer_norm_backward_from_output`.

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dx, dscale = backward.rms_norm_backward_from_output(
    ...     jnp.array([[1.0, 0.0]]), jnp.array([[0.4, 1.4]]), 2 * jnp.ones(2), jnp.array([0.2]))
    >>> print(dscale)
    [0.2 0. ]
    """
    op = "rms_norm_backward_from_output"
    arguments = Arguments.of(op, "y", y, begin_norm_axis)
    wanted = wanted_gradients(op, scale=scale)
    options = (only_rstd(rstd), wanted, scale_offset, implementation)
    return run_backward(op, dy, arguments, scale, None, *options)[:2]
