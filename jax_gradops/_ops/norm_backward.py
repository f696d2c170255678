"""Layer norm without autodiff, and what RMS norm has in common with it: `jax_gradops.backward`."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._ops.norm_arguments import Arguments
from jax_gradops._ops.norm_kernels import Norm, differentiate
from jax_gradops._ops.norm_kernels import forward as _forward
from jax_gradops._ops.norm_reference import inverse_deviation

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
) -> tuple[Any, ...]:
    """y, mean or None, rstd."""
    arguments = Arguments.of(op, "x", x, begin_norm_axis)
    y, mean, rstd = _forward(
        arguments.flat(arguments.x),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        norm=Norm(
            centered=op.startswith("layer_norm"),
            epsilon=_checks.number(op, "epsilon", epsilon, minimum=0),
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
    mean: jax.Array | None,
    rstd: jax.Array,
    wanted: dict[str, tuple[Any, Any]],
    implementation: Implementation,
) -> tuple[Any, Any, Any]:
    """dx, dscale, dbias; `wanted` has, for the last two, the parameter's shape and dtype."""
    several = len(arguments.normalized_shape) > 1
    # A gradient that is summed further, over normalised axes, is rounded after that.
    dtypes = tuple(
        (name, (arguments.accum_dtype if several else dtype).name)
        for name, (_, dtype) in wanted.items()
    )
    dx, *gradients = differentiate(
        arguments.like_x("dy", dy),
        arguments.flat(arguments.x),
        arguments.parameter("scale", scale),
        arguments.parameter("bias", bias),
        mean,
        rstd,
        norm=Norm(
            centered=op.startswith("layer_norm"),
            residuals="output" if op.endswith("from_output") else "input",
            implementation=resolve_implementation(implementation, op),
        ),
        dtypes=dtypes,
    )
    named = zip(("dscale", "dbias"), gradients, strict=True)
    dscale, dbias = (
        None if g is None else arguments.gradient(g, *wanted[name]) for name, g in named
    )
    return arguments.whole(dx), dscale, dbias


def wanted_gradients(op: str, **parameters: ArrayLike | None) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of the gradient of each parameter that is there."""
    given = {name: _checks.array(op, name, p) for name, p in parameters.items() if p is not None}
    return {f"d{name}": (array.shape, array.dtype) for name, array in given.items()}


# --- Layer norm ----------------------------------------------------------------------------------


def layer_norm_forward(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    begin_norm_axis: int = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Layer norm, and the statistics that its gradient needs.

    .. math:: y = (x - \text{mean})\,\text{rstd}\,(\text{scale} + \text{scale\_offset})
              + \text{bias}, \qquad \text{rstd} = 1 / \sqrt{\text{var} + \text{epsilon}}

    Args:
      x: float16, bfloat16, float32 or float64, any shape with at least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes. None: no scale.
      bias: as `scale`. None: no bias.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      epsilon: added to the variance; finite, at least 0.
      scale_offset: a number added to `scale`, if there is one.
      implementation: as in `jax_gradops.layer_norm`.

    Returns:
      ``(y, mean, rstd)``: y of x's shape and dtype; mean and 1/sqrt(var + epsilon) of shape
      ``x.shape[:begin_norm_axis]``, in float32 (float64 for float64).

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a wrong shape, axis or number; for ``implementation="ffi"`` without a kernel.

    Numerics are as in `jax_gradops.layer_norm`.

    References:
      Ba, Kiros, Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> y, mean, rstd = backward.layer_norm_forward(jnp.array([[1.0, 3.0]]))
    >>> print(mean, rstd.round(3))
    [2.] [1.]
    """
    options = (begin_norm_axis, epsilon, scale_offset, implementation)
    return run_forward("layer_norm_forward", x, scale, bias, *options)  # type: ignore[return-value]


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
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    r"""The gradient of layer norm, from the input and its statistics.

    .. math:: \hat x = (x - \text{mean})\,\text{rstd}, \qquad d = dy \cdot \text{scale}, \qquad
              dx = \bigl(d - \overline{d} - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    with means over the normalised axes; dscale and dbias are the sums of dy·x̂ and of dy over all
    other axes. ONNX Runtime's LayerNormalizationGrad (with its saved ``inv_std_dev`` as `rstd`) and
    oneDNN Graph's LayerNormBackward (with `variance` and `epsilon`; ``use_affine=False`` is
    ``scale=None, has_bias=False``).

    Args:
      dy: the cotangent of y, of x's shape and dtype.
      x: the input of the forward operator: float16, bfloat16, float32 or float64, any shape with at
        least one axis.
      scale: shape ``x.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(x.shape[-1],)``; any of the four dtypes. None: no scale.
      mean: of each row, in shape ``x.shape[:begin_norm_axis]``, or with an axis of size 1 for each
        normalised one; any of the four dtypes. What its rounding left is taken off x too.
      rstd: 1/sqrt(variance + epsilon) of each row, as `mean`.
      variance: the biased variance of each row, as `mean`: in place of `rstd`.
      epsilon: added to `variance`; finite, at least 0. Not used with `rstd`.
      begin_norm_axis: first normalised axis, in ``[-x.ndim, x.ndim)``.
      has_bias: whether dbias is wanted.
      implementation: as in `jax_gradops.layer_norm`.

    Returns:
      ``(dx, dscale, dbias)``: dx of x's shape and dtype; dscale of scale's, None if that is None;
      dbias of scale's shape and dtype too (without a scale: of shape
      ``x.shape[begin_norm_axis:]`` and x's dtype), None without `has_bias`.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a shape, an axis or a number out of range; unless exactly one of `rstd` and
        `variance` is given; for ``implementation="ffi"`` where there is no kernel.

    All arithmetic is in float32 (float64 for float64), each result is rounded once, and sums over
    rows have a fixed order.

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
    epsilon = _checks.number(op, "epsilon", epsilon, minimum=0)
    if (rstd is None) == (variance is None):
        raise ValueError(
            f"{op}: exactly one of rstd and variance must be given, got "
            + ("neither" if rstd is None else "both")
        )
    if rstd is not None:
        inverse = arguments.statistic("rstd", rstd)
    else:
        assert variance is not None
        inverse = inverse_deviation(arguments.statistic("variance", variance), epsilon)
    wanted = wanted_gradients(op, scale=scale)
    if _checks.flag(op, "has_bias", has_bias):
        without_scale = (arguments.normalized_shape, arguments.x.dtype)
        wanted["dbias"] = wanted.get("dscale", without_scale)
    statistics = (arguments.statistic("mean", mean), inverse)
    return run_backward(op, dy, arguments, scale, None, *statistics, wanted, implementation)


def layer_norm_backward_from_output(
    dy: ArrayLike,
    y: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    rstd: ArrayLike,
    *,
    begin_norm_axis: int = -1,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    r"""The gradient of layer norm, from its output.

    .. math:: \hat x = (y - \text{bias}) / \text{scale}, \qquad d = dy \cdot \text{scale}, \qquad
              dx = \bigl(d - \overline{d} - \hat x\,\overline{d \hat x}\bigr)\,\text{rstd}

    ONNX Runtime's InvertibleLayerNormalizationGrad: `layer_norm_backward` with another x̂, which is
    0 where scale is 0. That makes dscale 0 there; other columns are not touched. How exact it is:
    ``residuals="output"`` in `jax_gradops.layer_norm`.

    Args:
      dy: the cotangent of y, of y's shape and dtype.
      y: the output of the forward operator: float16, bfloat16, float32 or float64, any shape with
        at least one axis.
      scale: shape ``y.shape[begin_norm_axis:]``, or, when several axes are normalised, also
        ``(y.shape[-1],)``; any of the four dtypes. None: no scale.
      bias: as `scale`. None: no bias.
      rstd: 1/sqrt(variance + epsilon) of each row, in shape ``y.shape[:begin_norm_axis]``, or with
        an axis of size 1 for each normalised one; any of the four dtypes.
      begin_norm_axis: first normalised axis, in ``[-y.ndim, y.ndim)``.
      implementation: as in `jax_gradops.layer_norm`.

    Returns:
      ``(dx, dscale, dbias)``: dx of y's shape and dtype, dscale of scale's and dbias of bias's;
      None for a parameter that is None.

    Raises:
      TypeError: for a dtype that is none of the four, or an argument of a wrong kind.
      ValueError: for a wrong shape or axis; for ``implementation="ffi"`` where there is no kernel.

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
    statistics = (None, arguments.statistic("rstd", rstd))
    return run_backward(op, dy, arguments, scale, bias, *statistics, wanted, implementation)
