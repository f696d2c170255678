"""The batch norm functions of `jax_gradops.backward`."""

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
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.batch_norm.kernels import ChannelNorm


@_checks.with_hints
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
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance. It is finite and at least 0.
      implementation: as in `jax_gradops.batch_norm`.

    Returns:
      ``(y, mean, rstd)``, with rstd = 1/sqrt(var + epsilon). y has x's shape and dtype. mean and
      rstd have the shape ``(x.shape[axis],)``, in float32 (float64 for float64).

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

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
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis),
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


@_checks.with_hints
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

    where :math:`\hat x` = (x − mean) · rstd. Sums and means are over all axes but `axis`. dz is dy.
    With an activation, dz is dy where relu's argument is positive, and 0 elsewhere.

    Args:
      dy: the cotangent of y. It has x's shape and dtype.
      x: the input of the forward pass, in float16, bfloat16, float32 or float64. It has at least
        two axes.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. None means no scale.
      mean: the mean of each channel. The rules of `scale` apply, but it is required.
      rstd: 1/sqrt(var + epsilon) of each channel. The rules of `mean` apply.
      bias: has the rules of `scale`. The activation's argument is computed from it. It also sets
        the dtype of dbias.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``.
      activation: ``"relu"``, or None. See `jax_gradops.batch_norm`.
      y: the output of a forward pass that added a residual. It has x's shape and dtype. None means
        no residual. Where y is positive, the activation's argument was positive.
      implementation: as in `jax_gradops.batch_norm`.

    Returns:
      ``(dx, dscale, dbias)``. If `y` is given, dresidual follows. dx has x's shape and dtype.
      If there is no scale, dscale is None, else it has scale's shape and dtype. dbias has bias's
      dtype, or scale's dtype without a bias. Without both, it is in float32 (float64 for float64).
      dresidual is dz in x's dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    The derivative of `jax_gradops.batch_norm` runs these kernels too. That derivative also uses the
    rounding error of the mean. This function has only the rounded mean: in float32, the error of
    x − mean is up to 2^-24 of the mean.

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
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis),
            activation=activation,
            implementation=resolve_implementation(implementation, op),
        ),
        dtypes=tuple((name, jnp.dtype(dtype).name) for name, dtype in dtypes.items()),
    )
