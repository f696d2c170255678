"""Group norm and instance norm with fused backward passes, with an optional activation."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.batch_norm import kernels as kernels
from jax_gradops._ops.batch_norm.arguments import checked_samples, group_count, per_channel
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.batch_norm.kernels import ChannelNorm


@_checks.with_hints
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int,
    axis: int = -1,
    epsilon: float = 1e-6,
    activation: Literal["relu", "silu"] | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Group normalisation, and an activation in the same pass over memory.

    .. math:: y = \text{activation}(\hat x \cdot \text{scale} + \text{bias}),
              \qquad \hat x = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}

    The channels are divided into groups of neighbouring channels. Each sample and group has its own
    mean and (biased) variance, over the channels of the group and all other axes.

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes. Axis 0 has
        the samples.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. The dtype is independent of
        x's. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      num_groups: the number of groups. It divides ``x.shape[axis]``.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``. It is not axis 0. Use -1 for channels last
        (NHWC), and 1 for channels first (NCHW).
      epsilon: added to the variance. It is finite and at least 0.
      activation: ``"silu"`` (also named swish), ``"relu"``, or None. It takes no extra pass over
        memory, forward or backward.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `num_groups` that does not divide the
        number of channels. Also for ``implementation="ffi"`` if no kernel is available.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. A group is
    split into parts. The statistics of a part use differences from one number per channel, and
    Chan's formula combines the parts. E[x²] − E[x]² is never used: it loses all digits if the mean
    is large relative to the deviation. A constant group gives exactly ``activation(bias)``, for
    every epsilon. Results are bitwise reproducible from run to run. A NaN or an infinity makes only
    the group of its own sample NaN.

    The derivative with respect to x, scale and bias is one fused operation. It can be
    differentiated again, for example by `jax.hessian`. Forward mode (`jax.jvp`) works too. The
    activation's derivative is computed from x. Neither its argument nor a mask is saved. The saved
    statistics are named "group_norm_mean", "group_norm_rstd" and "group_norm_delta" (the rounding
    error of the mean) for `jax.checkpoint_policies.save_only_these_names`. Under `jax.jit` with
    sharded arrays, devices send only numbers per sample and group, and gradients of parameters.

    References:
      Wu, He, Group Normalization, https://arxiv.org/abs/1803.08494
      Chan, Golub, LeVeque, Algorithms for computing the sample variance: analysis and
      recommendations, The American Statistician 37 (1983), https://www.jstor.org/stable/2683386

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y = jax_gradops.group_norm(jnp.array([[1.0, 3.0, 5.0, 5.0]]), num_groups=2)
    >>> print(np.asarray(y).round(3))
    [[-1.  1.  0.  0.]]
    """
    op = "group_norm"
    x, axis = checked_samples(op, x, axis)
    groups = group_count(op, num_groups, x, axis)
    return _normalized(op, x, scale, bias, axis, groups, epsilon, activation, implementation)


@_checks.with_hints
def instance_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    activation: Literal["relu", "silu"] | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Instance normalisation: group normalisation with one group per channel.

    .. math:: y = \text{activation}(\hat x \cdot \text{scale} + \text{bias}),
              \qquad \hat x = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}}

    Each sample and channel has its own mean and (biased) variance, over all other axes.

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes. Axis 0 has
        the samples.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. The dtype is independent of
        x's. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``. It is not axis 0. Use -1 for channels last
        (NHWC), and 1 for channels first (NCHW).
      epsilon: added to the variance. It is finite and at least 0.
      activation: as in `jax_gradops.group_norm`.
      implementation: as in `jax_gradops.group_norm`.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    Numerics, derivatives and the names of saved statistics are as in `jax_gradops.group_norm`.

    References:
      Ulyanov, Vedaldi, Lempitsky, Instance Normalization: The Missing Ingredient for Fast
      Stylization, https://arxiv.org/abs/1607.08022

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> x = jnp.array([[[1.0, 5.0], [3.0, 5.0]]])
    >>> print(np.asarray(jax_gradops.instance_norm(x)).round(3))
    [[[-1.  0.]
      [ 1.  0.]]]
    """
    op = "instance_norm"
    x, axis = checked_samples(op, x, axis)
    groups = x.shape[axis]
    return _normalized(op, x, scale, bias, axis, groups, epsilon, activation, implementation)


def _normalized(
    op: str,
    x: jax.Array,
    scale: Any,
    bias: Any,
    axis: int,
    groups: int,
    epsilon: Any,
    activation: Any,
    implementation: Implementation,
) -> jax.Array:
    """Checks the arguments that both norms have, and returns y."""
    y, _, _ = kernels.normalize_samples(
        x,
        per_channel(op, "scale", scale, x, axis),
        per_channel(op, "bias", bias, x, axis),
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis, grouped=True),
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            activation=_checks.choice(op, "activation", activation, "silu", "relu", None),
            implementation=resolve_implementation(implementation, op),
        ),
        groups=groups,
    )
    return y
