"""The group norm functions of `jax_gradops.backward`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.batch_norm import kernels as kernels
from jax_gradops._ops.batch_norm.arguments import (
    checked_samples,
    group_count,
    per_channel,
    per_group,
)
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.batch_norm.kernels import ChannelNorm


@_checks.with_hints
def group_norm_forward(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int,
    axis: int = -1,
    epsilon: float = 1e-6,
    activation: Literal["relu", "silu"] | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Group norm, and the statistics that its gradient needs.

    .. math:: y = \text{activation}((x - \text{mean})\,\text{rstd} \cdot \text{scale}
              + \text{bias}), \qquad \text{rstd} = \frac{1}{\sqrt{\text{var} + \text{epsilon}}}

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It has at least two axes. Axis 0 has
        the samples.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      num_groups: the number of groups. It divides ``x.shape[axis]``. For instance norm, pass
        ``x.shape[axis]``.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``. It is not axis 0.
      epsilon: added to the variance. It is finite and at least 0.
      activation: ``"silu"``, ``"relu"``, or None.
      implementation: as in `jax_gradops.group_norm`.

    Returns:
      ``(y, mean, rstd)``, with rstd = 1/sqrt(var + epsilon). y has x's shape and dtype. mean and
      rstd have the shape ``(x.shape[0], num_groups)``, in float32 (float64 for float64).

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `num_groups` that does not divide the
        number of channels. Also for ``implementation="ffi"`` if no kernel is available.

    Numerics are as in `jax_gradops.group_norm`.

    References:
      Wu, He, Group Normalization, https://arxiv.org/abs/1803.08494

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> x = jnp.array([[1.0, 3.0, 5.0, 5.0]])
    >>> y, mean, rstd = backward.group_norm_forward(x, num_groups=2, epsilon=1.0)
    >>> print(mean, rstd)
    [[2. 5.]] [[0.70710677 1.        ]]
    """
    op = "group_norm_forward"
    x, axis = checked_samples(op, x, axis)
    groups = group_count(op, num_groups, x, axis)
    return kernels.normalize_samples(
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


@_checks.with_hints
def group_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike,
    *,
    num_groups: int,
    axis: int = -1,
    activation: Literal["relu", "silu"] | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    r"""The gradient of group norm from its input and saved statistics.

    .. math:: dx = \text{rstd} \cdot \bigl(dz \cdot \text{scale} - \overline{dz \cdot \text{scale}}
              - \hat x \cdot \overline{dz \cdot \text{scale} \cdot \hat x}\bigr), \qquad
              d\text{scale} = \sum dz \cdot \hat x, \quad d\text{bias} = \sum dz

    where :math:`\hat x` = (x − mean) · rstd. Means are over a group of a sample. Sums are over all
    axes but `axis`. dz is dy. With an activation, dz is dy times the activation's derivative at
    :math:`\hat x` · scale + bias.

    Args:
      dy: the cotangent of y. It has x's shape and dtype.
      x: the input of the forward pass, in float16, bfloat16, float32 or float64. It has at least
        two axes. Axis 0 has the samples.
      scale: of shape ``(x.shape[axis],)``, in any of the four dtypes. None means no scale.
      bias: has the rules of `scale`. The activation's argument is computed from it. It also sets
        the dtype of dbias.
      mean: the mean of each sample and group, of shape ``(x.shape[0], num_groups)``, in any of the
        four dtypes.
      rstd: 1/sqrt(var + epsilon) of each sample and group. The rules of `mean` apply.
      num_groups: the number of groups. It divides ``x.shape[axis]``.
      axis: the channel axis, in ``[-x.ndim, x.ndim)``. It is not axis 0.
      activation: ``"silu"``, ``"relu"``, or None. See `jax_gradops.group_norm`.
      implementation: as in `jax_gradops.group_norm`.

    Returns:
      ``(dx, dscale, dbias)``. dx has x's shape and dtype. If there is no scale, dscale is None,
      else it has scale's shape and dtype. dbias has bias's dtype, or scale's dtype without a bias.
      Without both, it is in float32 (float64 for float64).

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `num_groups` that does not divide the
        number of channels. Also for ``implementation="ffi"`` if no kernel is available.

    The derivative of `jax_gradops.group_norm` runs these kernels too. That derivative also uses the
    rounding error of the mean. This function has only the rounded mean: in float32, the error of
    x − mean is up to 2^-24 of the mean.

    References:
      Wu, He, Group Normalization, https://arxiv.org/abs/1803.08494

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dy, x = jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 3.0]])
    >>> mean, rstd = jnp.array([[2.0]]), jnp.array([[1.0]])
    >>> dx, dscale, dbias = backward.group_norm_backward(
    ...     dy, x, jnp.ones(2), None, mean, rstd, num_groups=1)
    >>> print(dx, dscale, dbias)
    [[0. 0.]] [-1.  0.] [1. 0.]
    """
    op = "group_norm_backward"
    x, axis = checked_samples(op, x, axis)
    groups = group_count(op, num_groups, x, axis)
    gamma = per_channel(op, "scale", scale, x, axis)
    beta = per_channel(op, "bias", bias, x, axis)
    given = [p.dtype for p in (beta, gamma) if p is not None]
    dtypes = {"dbias": given[0] if given else accum_dtype(x.dtype)}
    if gamma is not None:
        dtypes["dscale"] = gamma.dtype
    return kernels.differentiate_samples(
        _checks.like(op, "dy", dy, "x", x),
        x,
        gamma,
        beta,
        per_group(op, "mean", mean, x, groups),
        per_group(op, "rstd", rstd, x, groups),
        norm=ChannelNorm(
            Axes(x.ndim - 1 - axis, grouped=True),
            activation=_checks.choice(op, "activation", activation, "silu", "relu", None),
            implementation=resolve_implementation(implementation, op),
        ),
        groups=groups,
        dtypes=tuple((name, jnp.dtype(dtype).name) for name, dtype in dtypes.items()),
    )
