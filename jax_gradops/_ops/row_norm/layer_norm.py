"""Layer norm and RMS norm with fused backward passes, with or without a residual addition."""

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
    *,
    centered: bool,
    adds: bool = False,
) -> tuple[jax.Array, Any]:
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    y, total = normalize(
        arguments.flat(arguments.x),
        arguments.like_x("residual", residual) if adds else None,
        arguments.parameter("residual_bias", residual_bias),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        norm=Norm(
            centered=centered,
            epsilon=_checks.epsilon(op, epsilon, arguments.accum_dtype),
            scale_offset=_checks.number(op, "scale_offset", scale_offset),
            residuals=_checks.choice(op, "residuals", residuals, "input", "output"),
            implementation=resolve_implementation(implementation, op),
        ),
    )
    return arguments.whole(y), None if total is None else arguments.whole(total)


@_checks.with_hints
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

    The mean and the (biased) variance are taken over the axes from `begin_norm_axis` on.

    Args:
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. The dtype is independent of x's. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one. Pass 1.0 for parameters that are
        stored as ``scale - 1``.
      residuals: the array saved for the derivative. ``"input"`` saves x. ``"output"`` saves y, and
        the derivative computes :math:`\hat x` from y. Use ``"output"`` to save memory if the next
        operation keeps y anyway and nothing else keeps x. It is less exact: see below.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available. With ``"xla"``, JAX differentiates the formula, and
        `residuals` has no effect.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. The variance
    is computed in two passes over data held on chip, never as E[x²] − E[x]². A constant row gives
    exactly `bias`, for every epsilon. For this, the smallest normal number of float32 (float64 for
    float64) replaces a smaller epsilon. This does not change a float32 variance above 4e-31.

    Results are bitwise reproducible from run to run. A row's result does not depend on the other
    rows. A NaN, an infinity or an overflowing variance makes its whole row NaN, in y and in the
    gradient. Other rows are not affected. On a GPU, if a row's size is not a multiple of 16 bytes,
    its last bits depend on the row's index modulo 8, 4 or 2.

    The derivative with respect to x, scale and bias is one fused operation. It can be
    differentiated again, for example by `jax.hessian`. Forward mode (`jax.jvp`) works too. The
    derivative needs the mean and 1/sqrt(var + epsilon) of each row. They are named
    "layer_norm_mean" and "layer_norm_rstd" for `jax.checkpoint_policies.save_only_these_names`.

    For ``residuals="output"``, the derivative computes :math:`\hat x` = (y − bias) / (scale +
    scale_offset) from the rounded y. The error of :math:`\hat x` is half a unit in the last place
    of y, divided by the scale. It grows with the ratio of bias to scale. Without a bias, the scale
    does not matter. Measured relative errors (L2 norm) in bfloat16, 2048 rows of 1024, bias of 1:

    ============  ========  =======  =======
    `residuals`   scale     dx       dscale
    ============  ========  =======  =======
    ``"input"``   0.5 to 2  0.0017   1e-7
    ``"output"``  0.5 to 2  0.0017   0.0023
    ``"output"``  0.1       0.0018   0.018
    ``"output"``  0.01      0.008    0.17
    ``"output"``  0.001     useless  useless
    ============  ========  =======  =======

    The error of dx in the first line is the rounding of dx. All errors are 8 times smaller in
    float16 and 65,000 times smaller in float32.

    In a column where scale + scale_offset is 0, y does not contain :math:`\hat x`, and the
    derivative uses 0 instead. There, the gradient of `scale` is 0, and the gradient of x lacks the
    term with :math:`\hat x`. Other columns are not affected.

    References:
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y = jax_gradops.layer_norm(jnp.arange(6.0).reshape(2, 3), scale=jnp.ones(3))
    >>> print(np.asarray(y).round(3))
    [[-1.225  0.     1.225]
     [-1.225  0.     1.225]]
    """
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("layer_norm", x, None, None, scale, bias, *options, centered=True)[0]


@_checks.with_hints
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
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. The dtype is independent of x's. None means no scale.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one. Pass 1.0 for Gemma, which stores
        ``scale - 1``.
      residuals: the array saved for the derivative, as in `layer_norm`.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    Numerics, determinism and differentiation are as in `layer_norm`. The only saved statistic is
    1/sqrt(mean(x²) + epsilon) of each row. Its name for checkpoint policies is "rms_norm_rstd".

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> print(np.asarray(jax_gradops.rms_norm(jnp.array([[3.0, 4.0]]))).round(3))
    [[0.849 1.131]]
    """
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("rms_norm", x, None, None, scale, None, *options, centered=False)[0]


@_checks.with_hints
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

    This is the pattern of a transformer's residual stream: s is passed on, and y is the input of
    the next layer. The backward pass adds the cotangent of s in its single pass over memory.

    If the residual is a matrix product with a bias, pass this bias as `residual_bias`. Elsewhere,
    its addition and its gradient would each take another pass over memory.

    Args:
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      residual: the array added to x. It has x's shape and dtype.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. The dtype is independent of x's. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      residual_bias: has the rules of `scale`. It is added to each row of `residual`. None means no
        residual bias.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one.
      residuals: the array saved for the derivative, as in `layer_norm`. ``"input"`` saves the sum.
        Do not confuse it with `residual`.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      ``(y, s)``, both of x's shape and dtype. The sum s is rounded only once, to x's dtype. The
      rounded sum is returned and normalised.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `residual` without x's shape and dtype.
        Also for ``implementation="ffi"`` if no kernel is available.

    Numerics, determinism and differentiation are as in `layer_norm`. The gradient with respect to x
    and residual is rounded once, after both cotangents are added. The gradient of residual_bias is
    the sum of this gradient over the rows. The sum is taken before the rounding. A GPU takes it
    after the rounding if rows are too wide for a multiprocessor, or if an array does not start at a
    16-byte boundary.

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
    operands = (x, residual, residual_bias, scale, bias)
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("add_layer_norm", *operands, *options, centered=True, adds=True)


@_checks.with_hints
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
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      residual: the array added to x. It has x's shape and dtype.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. The dtype is independent of x's. None means no scale.
      residual_bias: has the rules of `scale`. It is added to each row of `residual`. None means no
        residual bias.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the mean square. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one.
      residuals: the array saved for the derivative, as in `layer_norm`. ``"input"`` saves the sum.
        Do not confuse it with `residual`.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      ``(y, s)``, both of x's shape and dtype. The sum s is rounded only once, to x's dtype. The
      rounded sum is returned and normalised.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or a `residual` without x's shape and dtype.
        Also for ``implementation="ffi"`` if no kernel is available.

    Numerics, determinism and differentiation are as in `add_layer_norm`.

    References:
      Zhang, Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y, total = jax_gradops.add_rms_norm(jnp.ones((1, 2)), jnp.array([[2.0, 3.0]]))
    >>> print(np.asarray(y).round(3), total)
    [[0.849 1.131]] [[3. 4.]]
    """
    operands = (x, residual, residual_bias, scale, None)
    options = (begin_norm_axis, epsilon, scale_offset, residuals, implementation)
    return _norm("add_rms_norm", *operands, *options, centered=False, adds=True)
