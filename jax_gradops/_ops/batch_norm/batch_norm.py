"""Batch norm with fused backward passes, alone and with what follows it in residual networks."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import accum_dtype
from jax_gradops._ops.batch_norm import kernels as kernels
from jax_gradops._ops.batch_norm.arguments import checked_x, per_channel, statistic
from jax_gradops._ops.batch_norm.kernels import BatchNorm


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

    Mean and (biased) variance are those of each channel, over all axes but `axis`.

    Args:
      x: float16, bfloat16, float32 or float64, at least two axes; with an `axis_name` one is
        enough.
      scale: shape ``(x.shape[axis],)``; any of the four dtypes, independent of x's. None: no scale.
      bias: as `scale`. None: no bias.
      axis: the channels' axis, in ``[-x.ndim, x.ndim)``: -1 for channels last (NHWC), 1 for
        channels first (NCHW).
      epsilon: added to the variance; finite, at least 0.
      axis_name: inside `jax.shard_map`, `jax.pmap` or `jax.vmap`, the name of a mapped axis, or
        several in a tuple: statistics, and what the gradient needs of them, are over these too.
        Under `jax.jit` with a sharded batch they are the whole batch's without that.
      activation: ``"relu"``, or None. In the same pass over memory, forward and backward.
      residual: of x's shape and dtype; is added before the activation, in the same pass. Its
        gradient comes out of the pass that makes x's.
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      ``(y, mean, var)``: y of x's shape and dtype; mean and variance of the batch, shape
      ``(x.shape[axis],)``, in float32 (float64 for float64), for running averages. Gradients flow
      through y only: mean and var are constants to them, as after `jax.lax.stop_gradient`.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range, or a `residual` of another shape or
        dtype than x; for ``implementation="ffi"`` where there is no kernel.
      NameError: for an `axis_name` that is not bound, as from `jax.lax.psum`. It is a ValueError,
        too.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. Statistics are
    those of differences from a number of the channel, by parts, put together by Chan's formula:
    never E[x²] − E[x]², which loses all digits where the mean is large beside the deviation.
    A constant channel gives exactly `bias`, for every epsilon, as in `jax_gradops.layer_norm`.
    Results are bitwise the same from run to run. NaN or infinity makes its channel NaN, and no
    other. An empty batch has mean 0 and variance 0.

    The derivative with respect to x, scale, bias and residual is one fused operation; `jax.hessian`
    and other derivatives of it work too, and so does forward mode (`jax.jvp`).
    Without a residual, relu's derivative is computed from x again; with one, from y: no mask is
    saved. What the derivative needs of statistics is named "batch_norm_mean", "batch_norm_rstd" and
    "batch_norm_delta" (what the mean's rounding has left) for
    `jax.checkpoint_policies.save_only_these_names`.

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
    names, shards = _checked_axis_name(op, axis_name)
    x, axis = checked_x(op, x, axis, least=1 if names else 2)
    activation = _checks.choice(op, "activation", activation, "relu", None)
    return kernels.normalize(
        x,
        None if residual is None else _checks.like(op, "residual", residual, "x", x),
        per_channel(op, "scale", scale, x, axis),
        per_channel(op, "bias", bias, x, axis),
        norm=BatchNorm(
            inner=x.ndim - 1 - axis,
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            axis_name=names,
            shards=shards,
            relu=activation == "relu",
            implementation=resolve_implementation(implementation, op),
        ),
    )


def _checked_axis_name(op: str, value: Any) -> tuple[Any, int]:
    """The names in a tuple, or None for no name, and the product of the axes' sizes."""
    if value is None or (isinstance(value, tuple | list) and not value):
        return None, 1
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    try:
        repeated = len(set(names)) < len(names)
    except TypeError:
        repeated = None  # what cannot be hashed is no name
    if repeated is None or any(isinstance(name, int | tuple | list) for name in names):
        expected = "the name of a mapped axis, or several"
        raise _checks.wrong(op, "axis_name", expected, value, TypeError)
    if repeated:
        raise ValueError(f"{op}: axis_name={value!r} has a name twice")
    try:
        return names, math.prod(jax.lax.axis_size(name) for name in names)
    except NameError:
        raise _checks.UnboundAxisError(
            f"{op}: axis_name={value!r} names no axis here. Names are bound inside jax.shard_map, "
            "jax.pmap or jax.vmap(..., axis_name=...); under jax.jit with a sharded batch, "
            "statistics are the whole batch's without one"
        ) from None


def batch_norm_inference(
    x: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Batch normalisation as in inference: by given statistics, such as running averages.

    .. math:: y = \frac{x - \text{mean}}{\sqrt{\text{var} + \text{epsilon}}} \cdot \text{scale}
              + \text{bias}

    Args:
      x: float16, bfloat16, float32 or float64, at least two axes.
      mean: shape ``(x.shape[axis],)``; any of the four dtypes, used in float32 (float64 for
        float64).
      var: as `mean`.
      scale: as `mean`, or None: no scale.
      bias: as `mean`, or None: no bias.
      axis: the channels' axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance; finite, at least 0.
      implementation: ``"ffi"`` for the native kernel; ``"xla"``, and None, for `jax.numpy`. This is
        one multiplication and one addition an element, which XLA fuses with what comes before and
        after it; a kernel of its own would read and write x once more.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. Differentiable
    in all arrays, in forward mode too, also with the kernel: JAX differentiates the formula.

    References:
      Ioffe, Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167

    >>> import jax.numpy as jnp, jax_gradops
    >>> x, mean, var = jnp.array([[1.0, 5.0], [3.0, 5.0]]), jnp.array([2.0, 1.0]), jnp.ones(2)
    >>> print(jax_gradops.batch_norm_inference(x, mean, var, epsilon=0.0))
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
        norm=BatchNorm(
            inner=x.ndim - 1 - axis,
            epsilon=_checks.epsilon(op, epsilon, accum_dtype(x.dtype)),
            implementation=resolve_implementation(implementation, op) or "xla",
        ),
    )
