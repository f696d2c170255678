"""The layer norm functions of `jax_gradops.backward`, and code that RMS norm shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._ops.row_norm.arguments import Arguments
from jax_gradops._ops.row_norm.kernels import (
    Norm,
    Residuals,
    differentiate,
    forward_by_statistics,
)
from jax_gradops._ops.row_norm.kernels import forward as _forward
from jax_gradops._ops.row_norm.reference import inverse_deviation

_inverse_deviation = jax.jit(inverse_deviation, static_argnums=1)

# --- What all have in common ---------------------------------------------------------------------


def run_forward(
    op: str,
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    begin_norm_axis: int,
    epsilon: float,
    scale_offset: float,
    implementation: Implementation,
    *,
    centered: bool,
) -> tuple[Any, ...]:
    """Returns y, mean (None for RMS norm) and rstd."""
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    y, mean, rstd = _forward(
        arguments.flat(arguments.x),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        norm=Norm(
            centered=centered,
            epsilon=_checks.epsilon(op, epsilon, arguments.accum_dtype),
            scale_offset=_checks.number(op, "scale_offset", scale_offset),
            implementation=resolve_implementation(implementation, op),
        ),
    )
    return arguments.whole(y), mean, rstd


def run_backward(
    op: str,
    dy: ArrayLike,
    arguments: Arguments,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    statistics: Callable[[Arguments], tuple[jax.Array | None, jax.Array]],
    wanted: dict[str, tuple[Any, Any]],
    scale_offset: float,
    implementation: Implementation,
    *,
    centered: bool,
    residuals: Residuals = "input",
) -> tuple[Any, Any, Any]:
    """Returns dx, dscale and dbias.

    `statistics` returns mean and rstd in the accumulation dtype. `wanted` maps "dscale" and "dbias"
    to the parameter's shape and dtype. A gradient that is not in `wanted` is None.
    """
    wide, dy = arguments.with_cotangent(dy)
    several = len(wide.normalized_shape) > 1
    # A gradient may be summed over normalised axes too. Such a gradient is rounded after that sum.
    dtypes = tuple(
        (name, (wide.accum_dtype if several else dtype).name) for name, (_, dtype) in wanted.items()
    )
    dx, *gradients = differentiate(
        dy,
        wide.flat(wide.x),
        wide.parameter("scale", scale),
        wide.parameter("bias", bias),
        *statistics(wide),
        norm=Norm(
            centered=centered,
            scale_offset=_checks.number(op, "scale_offset", scale_offset),
            residuals=residuals,
            implementation=resolve_implementation(implementation, op),
        ),
        dtypes=dtypes,
    )
    named = zip(("dscale", "dbias"), gradients, strict=True)
    dscale, dbias = (None if g is None else wide.gradient(g, *wanted[name]) for name, g in named)
    return wide.whole(dx).astype(arguments.x.dtype), dscale, dbias


def only_rstd(rstd: ArrayLike) -> Callable[[Arguments], tuple[None, jax.Array]]:
    """The argument `statistics` of `run_backward` for an op that takes no mean."""
    return lambda wide: (None, wide.statistic("rstd", rstd))


def wanted_gradients(op: str, **parameters: ArrayLike | None) -> dict[str, tuple[Any, Any]]:
    """The gradients of the parameters that are not None: shape and dtype by name."""
    given = {name: _checks.array(op, name, p) for name, p in parameters.items() if p is not None}
    return {f"d{name}": (array.shape, array.dtype) for name, array in given.items()}


# --- Layer norm ----------------------------------------------------------------------------------


@_checks.with_hints
def layer_norm_forward(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Layer norm, and the statistics that its gradient needs.

    .. math:: y = (x - \text{mean})\,\text{rstd}\,(\text{scale} + \text{scale\_offset})
              + \text{bias}, \qquad \text{rstd} = 1 / \sqrt{\text{var} + \text{epsilon}}

    Args:
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance. It is finite and at least 0.
      scale_offset: a number added to `scale`, if there is one.
      mean: given means, or None to compute each row's mean. The shape is
        ``x.shape[:begin_norm_axis]``, and the dtype is any of the four. Normalised axes may be
        kept, with size 1. A `mean` must come with a `variance`.
      variance: given variances, with the rules of `mean`. A `variance` must come with a `mean`.
      implementation: as in `jax_gradops.layer_norm`. No kernel takes given statistics.

    Returns:
      ``(y, mean, rstd)``, with rstd = 1/sqrt(var + epsilon). y has x's shape and dtype. mean and
      rstd have the shape ``x.shape[:begin_norm_axis]``, in float32 (float64 for float64).

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or if only one of `mean` and `variance` is
        given. Also for ``implementation="ffi"`` if no kernel is available.

    Numerics are as in `jax_gradops.layer_norm`.

    Given statistics make this oneDNN's layer normalization with ``use_global_stats``. It runs in
    `jax.numpy`, because XLA fuses such an operation with its neighbours. JAX differentiates y in x,
    the parameters and the statistics.

    References:
      oneDNN, Layer Normalization: https://oneapi-src.github.io/oneDNN/dev_guide_layer_normalization.html
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> y, mean, rstd = backward.layer_norm_forward(jnp.array([[1.0, 3.0]]))
    >>> print(mean, rstd.round(3))
    [2.] [1.]
    """
    op = "layer_norm_forward"
    if mean is None and variance is None:
        options = (begin_norm_axis, epsilon, scale_offset, implementation)
        return run_forward(op, x, scale, bias, *options, centered=True)  # type: ignore[return-value]
    if mean is None or variance is None:
        missing = "mean" if mean is None else "variance"
        raise ValueError(f"{op}: mean and variance must be given together, {missing} is missing")
    if implementation == "ffi":
        raise ValueError(
            f"{op}: implementation='ffi' is not available with given statistics. Use "
            "implementation=None: XLA fuses such an operation with its neighbours"
        )
    resolve_implementation(implementation, op)
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    epsilon = _checks.epsilon(op, epsilon, arguments.accum_dtype)
    center = arguments.statistic("mean", mean)
    rstd = _inverse_deviation(arguments.statistic("variance", variance), epsilon)
    y = forward_by_statistics(
        arguments.flat(arguments.x),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        center,
        rstd,
        norm=Norm(centered=True, scale_offset=_checks.number(op, "scale_offset", scale_offset)),
    )
    return arguments.whole(y), center, rstd


@_checks.with_hints
def layer_norm_backward(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike | None,
    mean: ArrayLike,
    rstd: ArrayLike | None = None,
    *,
    variance: ArrayLike | None = None,
    epsilon: float = 1e-5,
    begin_norm_axis: int = -1,
    has_bias: bool = True,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    r"""The gradient of layer norm, from the input and its statistics.

    .. math:: \hat x = (x - \text{mean})\,\text{rstd}, \qquad d = dy \cdot \gamma, \qquad
              dx = \bigl(d - \overline{d} - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    where γ = scale + scale_offset, and means are over the normalised axes. dscale is the sum of
    dy·x̂ over all other axes, and dbias is the sum of dy. This is LayerNormalizationGrad of ONNX
    Runtime, whose ``inv_std_dev`` is `rstd`. With `variance` and `epsilon`, it is LayerNormBackward
    of oneDNN Graph. Pass ``scale=None, has_bias=False`` for its ``use_affine=False``.

    Args:
      dy: the cotangent of y. It has x's shape and any of the four dtypes (see below).
      x: the input of the forward operator. Its dtype is float16, bfloat16, float32 or float64. It
        has at least one axis.
      scale: of shape ``x.shape[begin_norm_axis:]``, or ``(x.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      mean: the mean of each row, of shape ``x.shape[:begin_norm_axis]``, in any of the four dtypes.
        Normalised axes may be kept, with size 1. Means that are not the rows' own are allowed.
      rstd: 1/sqrt(variance + epsilon) of each row. The rules of `mean` apply.
      variance: the biased variance of each row, in place of `rstd`. The rules of `mean` apply.
      epsilon: added to `variance`. It is finite and at least 0. It is not used with `rstd`.
      begin_norm_axis: the first normalised axis, in ``[-x.ndim, x.ndim)``.
      has_bias: whether dbias is computed.
      scale_offset: the number that the forward operator added to `scale`. The default is 0.
      implementation: as in `jax_gradops.layer_norm`.

    Returns:
      ``(dx, dscale, dbias)``. dx has x's shape and dtype. dscale and dbias have scale's shape and
      dtype. Without a scale, dscale is None, and dbias has the shape ``x.shape[begin_norm_axis:]``
      and x's dtype. Without `has_bias`, dbias is None.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number, or unless exactly one of `rstd` and `variance`
        is given. Also for ``implementation="ffi"`` if no kernel is available.

    All arithmetic is in float32 (float64 for float64), and each result is rounded once. Sums over
    rows have a fixed order.

    A saved mean has been rounded to float32 (float64 for float64). Let δ be the mean of x − mean.
    If δ is within a few units in the last place of `mean`, δ is this rounding error, and is
    subtracted too. So rows stay exact if their mean is large relative to their deviation. A larger
    δ is not a rounding error: statistics that are not the row's own are used as given.

    If dy and x differ in dtype (ONNX Runtime's types V and T), both are first converted to a dtype
    that holds both. The conversion is one more pass over memory. dx is rounded to x's dtype.

    References:
      ONNX Runtime, LayerNormalizationGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc
      oneDNN Graph, LayerNormBackward: https://oneapi-src.github.io/oneDNN/dev_guide_op_layernormbackward.html

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> x, dy = jnp.array([[1.0, 3.0]]), jnp.array([[1.0, 0.0]])
    >>> dx, dscale, dbias = backward.layer_norm_backward(
    ...     dy, x, jnp.ones(2), mean=jnp.array([2.0]), variance=jnp.array([1.0]))
    >>> print(dscale.round(3), dbias)
    [-1.  0.] [1. 0.]
    """
    op = "layer_norm_backward"
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    epsilon = _checks.epsilon(op, epsilon, arguments.accum_dtype)
    if (rstd is None) == (variance is None):
        raise ValueError(
            f"{op}: exactly one of rstd and variance must be given, got "
            + ("neither" if rstd is None else "both")
        )

    def statistics(wide: Arguments) -> tuple[jax.Array, jax.Array]:
        if rstd is not None:
            inverse = wide.statistic("rstd", rstd)
        else:
            assert variance is not None
            inverse = _inverse_deviation(wide.statistic("variance", variance), epsilon)
        return wide.statistic("mean", mean), inverse

    wanted = wanted_gradients(op, scale=scale)
    if _checks.flag(op, "has_bias", has_bias):
        without_scale = (arguments.normalized_shape, arguments.x.dtype)
        wanted["dbias"] = wanted.get("dscale", without_scale)
    options = (wanted, scale_offset, implementation)
    return run_backward(op, dy, arguments, scale, None, statistics, *options, centered=True)


@_checks.with_hints
def layer_norm_backward_from_output(
    dy: ArrayLike,
    y: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    rstd: ArrayLike,
    *,
    begin_norm_axis: int = -1,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    r"""The gradient of layer norm, from its output.

    .. math:: \hat x = (y - \text{bias}) / \gamma, \qquad d = dy \cdot \gamma, \qquad
              dx = \bigl(d - \overline{d} - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    where γ = scale + scale_offset. This is InvertibleLayerNormalizationGrad of ONNX Runtime. It
    differs from `layer_norm_backward` in x̂. Where γ is 0, x̂ and dscale are 0; other columns are
    not affected. See ``residuals="output"`` in `jax_gradops.layer_norm` for the errors.

    Args:
      dy: the cotangent of y. It has y's shape and any of the four dtypes.
      y: the output of the forward operator. Its dtype is float16, bfloat16, float32 or float64. It
        has at least one axis.
      scale: of shape ``y.shape[begin_norm_axis:]``, or ``(y.shape[-1],)``, in any of the four
        dtypes. None means no scale.
      bias: has the rules of `scale`. None means no bias.
      rstd: 1/sqrt(variance + epsilon) of each row, of shape ``y.shape[:begin_norm_axis]``, in any
        of the four dtypes. Normalised axes may be kept, with size 1.
      begin_norm_axis: the first normalised axis, in ``[-y.ndim, y.ndim)``.
      scale_offset: the number that the forward operator added to `scale`. The default is 0.
      implementation: as in `jax_gradops.layer_norm`.

    Returns:
      ``(dx, dscale, dbias)``. dx has y's shape and dtype. dscale and dbias have the shape and dtype
      of their parameter. The gradient of an absent parameter is None.

    Raises:
      TypeError: for an unsupported dtype, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number. Also for ``implementation="ffi"`` if no kernel
        is available.

    References:
      ONNX Runtime, InvertibleLayerNormalizationGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> y, dy = jnp.array([[-1.0, 1.0]]), jnp.array([[1.0, 0.0]])
    >>> dx, dscale, dbias = backward.layer_norm_backward_from_output(
    ...     dy, y, jnp.ones(2), None, rstd=jnp.array([1.0]))
    >>> print(dscale, dbias)
    [-1.  0.] None
    """
    op = "layer_norm_backward_from_output"
    arguments = Arguments.of(op, "y", y, begin_norm_axis)
    wanted = wanted_gradients(op, scale=scale, bias=bias)
    options = (only_rstd(rstd), wanted, scale_offset, implementation)
    return run_backward(op, dy, arguments, scale, bias, *options, centered=True, residuals="output")
