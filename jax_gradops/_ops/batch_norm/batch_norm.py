"""Batch norm with fused backward passes, with optional residual addition and relu."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.batch_norm import kernels as kernels
from jax_gradops._ops.batch_norm.arguments import checked_x, per_channel, statistic
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.batch_norm.kernels import ChannelNorm


@_checks.with_hints
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    axis_name: Any = None,
    activation: Literal["relu"] | None = None,
    residual: ArrayLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Batch normalisation as in training: by the statistics of the batch itself.

    .. math:: y = \text{activation}(\hat x \cdot \text{scale} + \text{bias} + \text{residual}),
              \qquad \hat x = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}

    Each channel has its own mean and (biased) variance, over all axes but `axis`.

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes. With an
        `axis_name`, one axis is enough.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. The dtype is independent of
        x's. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``. Use -1 for channels last (NHWC), and 1 for
        channels first (NCHW).
      epsilon: added to the variance. It is finite and at least 0.
      axis_name: the name of a mapped axis of `jax.shard_map`, `jax.pmap` or `jax.vmap`, or a tuple
        of names. Statistics, and the sums in the gradient, then cover these axes too. Under
        `jax.jit` with a sharded batch, statistics cover the whole batch without an `axis_name`.
      activation: ``"relu"``, or None. It takes no extra pass over memory, forward or backward.
      residual: an array of x's shape and dtype. It is added before the activation, in the same
        pass. One pass computes the gradients of x and `residual`.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      ``(y, mean, var)``. y has x's shape and dtype. mean and var are the batch's, for running
      averages, of shape ``(x.shape[axis],)``, in float32 (float64 for float64). Gradients flow
      through y only: mean and var are constants, as after `jax.lax.stop_gradient`.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `residual` without x's shape and dtype.
        Also for ``implementation="ffi"`` if no kernel is available.
      NameError: for an `axis_name` that is not bound, as from `jax.lax.psum`. The error is also a
        ValueError.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. A channel is
    split into parts. The statistics of a part use differences from one number per channel, and
    Chan's formula combines the parts. E[x²] − E[x]² is never used: it loses all digits if the mean
    is large relative to the deviation. A constant channel gives exactly `bias`, for every epsilon,
    as in `jax_gradops.layer_norm`. Results are bitwise reproducible from run to run. A NaN or an
    infinity makes only its own channel NaN. An empty batch has mean 0 and variance 0.

    The derivative with respect to x, scale, bias and residual is one fused operation. It can be
    differentiated again, for example by `jax.hessian`. Forward mode (`jax.jvp`) works too. relu's
    derivative is computed from x, or from y if there is a residual. No mask is saved. The saved
    statistics are named "batch_norm_mean", "batch_norm_rstd" and "batch_norm_delta" (the rounding
    error of the mean) for `jax.checkpoint_policies.save_only_these_names`.

    References:
      Ioffe, Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167
      Chan, Golub, LeVeque, Algorithms for computing the sample variance: analysis and
      recommendations, The American Statistician 37 (1983), https://www.jstor.org/stable/2683386

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y, mean, var = jax_gradops.batch_norm(jnp.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> print(np.asarray(y).round(3), mean, var)
    [[-1.  0.]
     [ 1.  0.]] [2. 5.] [1. 0.]
    """
    op = "batch_norm"
    names = _checks.axis_names(
        op, axis_name, "with a sharded batch, statistics are the whole batch's without one"
    )
    x, axis = checked_x(op, x, axis, least=1 if names else 2)
    activation = _checks.choice(op, "activation", activation, "relu", None)
    return kernels.normalize(
        x,
        None if residual is None else _checks.like(op, "residual", residual, "x", x),
        per_channel(op, "scale", scale, x, axis),
        per_channel(op, "bias", bias, x, axis),
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis),
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            axis_name=names,
            activation=activation,
            implementation=resolve_implementation(implementation, op),
        ),
    )


@_checks.with_hints
def batch_norm_inference(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    mean: ArrayLike,
    var: ArrayLike,
    axis: int = -1,
    epsilon: float = 1e-5,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Batch normalisation as in inference: by given statistics, such as running averages.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}} \cdot \text{scale}
              + \text{bias}

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      mean: has the rules of `scale`. It is converted to float32 (float64 for float64).
      var: the variances. The rules of `mean` apply.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance. It is finite and at least 0.
      implementation: ``"ffi"`` selects the native kernel. ``"xla"`` and None select `jax.numpy`:
        XLA fuses the multiplication and the addition per element with neighbouring operations. A
        separate kernel would read and write x once more.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. The result is
    differentiable in all arrays, also in forward mode and with the kernel: JAX differentiates the
    formula.

    References:
      Ioffe, Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167

    >>> import jax.numpy as jnp, jax_gradops
    >>> x, mean, var = jnp.array([[1.0, 5.0], [3.0, 5.0]]), jnp.array([2.0, 1.0]), jnp.ones(2)
    >>> print(jax_gradops.batch_norm_inference(x, mean=mean, var=var, epsilon=0.0))
    [[-1.  4.]
     [ 1.  4.]]
    """
    op = "batch_norm_inference"
    x, axis = checked_x(op, x, axis)
    return kernels.apply(
        x,
        statistic(op, "mean", mean, x, axis),
        statistic(op, "var", var, x, axis),
        per_channel(op, "scale", scale, x, axis),
        per_channel(op, "bias", bias, x, axis),
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis),
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            implementation=resolve_implementation(implementation, op) or "xla",
        ),
    )
