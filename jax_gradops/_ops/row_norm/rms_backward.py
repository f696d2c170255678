"""The RMS norm functions of `jax_gradops.backward`."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation
from jax_gradops._ops.row_norm.arguments import Arguments
from jax_gradops._ops.row_norm.backward import (
    only_rstd,
    run_backward,
    run_forward,
    wanted_gradients,
)


@_checks.with_hints
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
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(y, rstd)``, with rstd = 1/sqrt(mean(x²) + epsilon). y has x's shape and dtype. rstd has the
      shape ``x.shape[:begin_norm_axis]``, in float32 (float64 for float64).

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

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
    y, _, rstd = run_forward("rms_norm_forward", x, scale, None, *options, centered=False)
    return y, rstd


@_checks.with_hints
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

    where γ = scale + scale_offset, and means are over the normalised axes. dscale is the sum of
    dy·x̂ over all other axes.

    Args:
      dy: the cotangent of y. It has x's shape and any of the four dtypes.
      x: the input of the forward operator. Its dtype is float16, bfloat16, float32 or float64. It
        has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      rstd: 1/sqrt(mean(x²) + epsilon) of each row, of shape ``x.shape[:begin_norm_axis]``, in any
        of the four dtypes. Normalised axes may be kept, with size 1.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      scale_offset: the number that the forward operator added to `scale`. The default is 0.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(dx, dscale)``. dx has x's shape and dtype. dscale has scale's, or is None without a scale.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

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
    return run_backward(op, dy, arguments, scale, None, *options, centered=False)[:2]


@_checks.with_hints
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

    where γ = scale + scale_offset. This differs from `rms_norm_backward` in x̂. Where γ is 0, x̂ and
    dscale are 0; other columns are not affected.

    Args:
      dy: the cotangent of y. It has y's shape and any of the four dtypes.
      y: the output of the forward operator. Its dtype is float16, bfloat16, float32 or float64. It
        has at least one axis.
      scale: of shape ``y.shape[begin_norm_axis:]``, or ``(y.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      rstd: 1/sqrt(mean(x²) + epsilon) of each row, of shape ``y.shape[:begin_norm_axis]``, in any
        of the four dtypes. Normalised axes may be kept, with size 1.
      begin_norm_axis: the first normalised axis, in ``[-y.ndim, y.ndim)``.
      scale_offset: the number that the forward operator added to `scale`. The default is 0.
      implementation: as in `jax_gradops.rms_norm`.

    Returns:
      ``(dx, dscale)``. dx has y's shape and dtype. dscale has scale's, or is None without a scale.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

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
    return run_backward(
        op, dy, arguments, scale, None, *options, centered=False, residuals="output"
    )[:2]
