"""Layer norm and RMS norm with fused backward passes, alone and after a residual's addition."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._ops.row_norm.arguments import Arguments
from jax_gradops._ops.row_norm.kernels import Norm, Residuals, normalize


def _norm(
    op: str,
    x: ArrayLike,
    residual: ArrayLike | None,
    residual_bias: ArrayLike | None,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    begin_norm_axis: int,
    epsilon: float,
    scale_offset: float,
    residuals: Residuals,
    implementation: Implementation,
) -> tuple[jax.Array, Any]:
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    adds = op.startswith("add_")
    y, total = normalize(
        arguments.flat(arguments.x),
        arguments.like_x("residual", residual) if adds else None,
        arguments.parameter("residual_bias", residual_bias),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        norm=Norm(
            centered=op.endswith("layer_norm"),
            epsilon=_checks.epsilon(op, epsilon, arguments.accum_dtype),
            scale_offset=_checks.number(op, "scale_offset", scale_offset),
            residuals=_checks.choice(op, "residuals", residuals, "input", "output"),
            implementation=resolve_implementation(implementation, op),
        ),
    )
    return arguments.whole(y), None if total is None else arguments.whole(total)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residuals: Residuals = "input",
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
      scale_offset: a number added to `scale`, if there is one (1.0 for parameters stored as
        ``scale - 1``).
      residuals: what is kept of each row for the derivative: ``"input"``, x; or ``"output"``, y,
        from which :math:`\hat x` is computed again. That saves memory where y is kept anyway, by
        the product that follows, and x by nothing else. It is less exact: see below.
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one. With ``"xla"`` JAX differentiates the formula, and `residuals` has no
        effect.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; for ``implementation="ffi"`` where
        there is no kernel.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. The variance
    is computed in two passes over data held on chip, never as E[x²] − E[x]². A constant row gives
    exactly `bias`, for every epsilon: what is added to the variance is at least the smallest normal
    number of float32 (float64 for float64). No float32 variance above 1e-31 notices that.

    Results are bitwise the same from run to run, and a row's result does not depend on the other
    rows. NaN, infinity, or a variance that overflows makes all of that row NaN (in y and in the
    gradient), and no other. On a GPU, the last bits of rows that are no multiple of 16 bytes long
    depend on their place in the array, modulo up to 8 rows.

    The derivative with respect to x, scale and bias is one fused operation; `jax.hessian` and other
    derivatives of it work too, and so does forward mode (`jax.jvp`). The mean and
    1/sqrt(var + epsilon) of each row, which the derivative needs, are named "layer_norm_mean" and
    "layer_norm_rstd" for `jax.checkpoint_policies.save_only_these_names`.

    With ``residuals="output"``, the derivative sees :math:`\hat x` = (y − bias) / (scale +
    scale_offset) of the rounded y: off by half a unit in the last place of y, over the scale.
    Measured in bfloat16, as the relative error (in the L2 norm, 2048 rows of 1024) of dx and of
    dscale: 0.0017 and 0.0023 for scales of 0.5 to 2 and a bias of size 1, where ``"input"`` has
    0.0017 (the rounding of dx) and 1e-7. What counts is bias over scale: it is 0.0018 and 0.018 for
    a scale of 0.1, 0.008 and 0.17 for 0.01, and useless for 0.001; without a bias it does not
    matter. float16 is eight times as exact, float32 65,000 times.
    Where scale + scale_offset is 0, :math:`\hat x` is lost and taken for 0: that makes the gradient
    of this element of `scale` 0, and that of x lacks its term with :math:`\hat x` in this column;
    other columns are not touched.

    References:
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y = jax_gradops.layer_norm(jnp.arange(6.0).reshape(2, 3), scale=jnp.ones(3))
    >>> print(np.asarray(y).round(3))
    [[-1.225  0.     1.225]
     [-1.225  0.     1.225]]
    """
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("layer_norm", x, None, None, scale, bias, *options)[0]


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residuals: Residuals = "input",
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
      scale_offset: a number added to `scale`, if there is one (Gemma stores ``scale - 1``: pass
        1.0).
      residuals: what is kept of each row for the derivative, as in `layer_norm`.
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
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("rms_norm", x, None, None, scale, None, *options)[0]


def add_layer_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual_bias: ArrayLike | None = None,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residuals: Residuals = "input",
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""``layer_norm(x + residual)`` and ``x + residual``, in one pass over memory.

    .. math:: s = x + (\text{residual} + \text{residual\_bias}), \qquad
              y = \frac{s - \text{mean}(s)}{\sqrt{\text{var}(s) + \text{epsilon}}}
              (\text{scale} + \text{scale\_offset}) + \text{bias}

    As in a transformer's residual stream: the sum goes on, and its norm into the next layer. In the
    backward pass, the cotangent of the sum is added to the norm's in the same pass.

    Where the residual is a matrix product with a bias, this is the place for that bias: by itself,
    its addition and its gradient are a pass more each.

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      residual: of x's shape and dtype.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes, independent of x's. None: no scale.
      bias: as `scale`. None: no bias.
      residual_bias: as `scale`; added to each row of `residual`. None: nothing is.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance; finite, at least 0.
      scale_offset: a number added to `scale`, if there is one.
      residuals: what is kept of each row for the derivative, as in `layer_norm`: ``"input"`` is
        the sum here. (Not to be confused with `residual`.)
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      ``(y, s)``, both of x's shape and dtype. What is normalised is the sum that is returned, after
      its rounding to x's dtype, which is the only one.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range, or a `residual` of another shape or
        dtype than x; for ``implementation="ffi"`` where there is no kernel.

    Numerics, determinism and differentiation are as in `layer_norm`; the gradient with respect to x
    and residual is rounded once, after the addition of both cotangents. That of residual_bias is
    its sum over the rows, of what it was before that rounding, or, on a GPU, where rows are too
    wide for its multiprocessors or arrays do not start at 16-byte boundaries, after it.

    References:
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y, total = jax_gradops.add_layer_norm(jnp.ones((1, 2)), jnp.array([[1.0, 3.0]]))
    >>> print(np.asarray(y).round(3), total)
    [[-1.  1.]] [[2. 4.]]
    >>> bias = jnp.array([0.0, 2.0])
    >>> print(jax_gradops.add_layer_norm(jnp.ones((1, 2)), jnp.ones((1, 2)), residual_bias=bias)[1])
    [[2. 4.]]
    """
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("add_layer_norm", x, residual, residual_bias, scale, bias, *options)


def add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    residual_bias: ArrayLike | None = None,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residuals: Residuals = "input",
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""``rms_norm(x + residual)`` and ``x + residual``, in one pass over memory.

    .. math:: s = x + (\text{residual} + \text{residual\_bias}), \qquad
              y = \frac{s}{\sqrt{\text{mean}(s^2) + \text{epsilon}}}
              (\text{scale} + \text{scale\_offset})

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      residual: of x's shape and dtype.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes, independent of x's. None: no scale.
      residual_bias: as `scale`; added to each row of `residual`. None: nothing is.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square; finite, at least 0.
      scale_offset: a number added to `scale`, if there is one.
      residuals: what is kept of each row for the derivative, as in `layer_norm`: ``"input"`` is
        the sum here. (Not to be confused with `residual`.)
      implementation: ``"ffi"`` for the native kernel, ``"xla"`` for `jax.numpy`; None: the kernel
        where there is one.

    Returns:
      ``(y, s)``, both of x's shape and dtype. What is normalised is the sum that is returned, after
      its rounding to x's dtype, which is the only one.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range, or a `residual` of another shape or
        dtype than x; for ``implementation="ffi"`` where there is no kernel.

    Numerics, determinism and differentiation are as in `add_layer_norm`.

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y, total = jax_gradops.add_rms_norm(jnp.ones((1, 2)), jnp.array([[2.0, 3.0]]))
    >>> print(np.asarray(y).round(3), total)
    [[0.849 1.131]] [[3. 4.]]
    """
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("add_rms_norm", x, residual, residual_bias, scale, None, *options)
