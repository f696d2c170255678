"""GELU and bias + GELU with fused backward passes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, is_strict, resolve_implementation
from jax_gradops._kernel.array_types import Arrays, accum_dtype, match_vma, reshard_like
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.primitive import Function, Operands, Operation, Unknown
from jax_gradops._kernel.spec import Kernel, Result, along_features, column_sum_workspace

# --- References: the meaning of the kernels in jax.numpy -----------------------------------------


def _tanh_argument(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """2u and its derivative, for u = sqrt(2/pi) (x + 0.044715 x^3)."""
    c = 2 * math.sqrt(2 / math.pi)
    square = jnp.square(x)
    return c * x * (1 + 0.044715 * square), c * (1 + 3 * 0.044715 * square)


def _normal_density(x: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * jnp.square(x)) * (1 / math.sqrt(2 * math.pi))


def _normal_cdf(x: jax.Array) -> jax.Array:
    """Phi(x). JAX 0.12 cannot differentiate its own erfc inside `jax.shard_map`."""
    return Function(_normal_cdf_value, _normal_cdf_tangent)(x)[0]


def _normal_cdf_value(x: jax.Array) -> jax.Array:
    return 0.5 * jax.scipy.special.erfc(x * -math.sqrt(0.5))


def _normal_cdf_tangent(operands: Any, y: jax.Array, tangents: Any) -> jax.Array:
    del y
    return tangents[0] * _normal_density(operands[0])


@dataclasses.dataclass(frozen=True)
class _Form:
    """Which GELU to compute.

    Attributes:
      approximate: the tanh form.
      strict: NaN where the formula, computed step by step, is NaN, because it has inf * 0. These
        are the value at -inf and the derivative at infinities. In the derivative of the tanh form,
        3 x^2 may overflow, too.
    """

    approximate: bool
    strict: bool

    def value(self, z: jax.Array) -> jax.Array:
        """GELU of z."""
        return Function(_value, _tangent, (self,))(z)[0]

    def derivative(self, z: jax.Array) -> jax.Array:
        """The derivative of `value`."""
        if self.strict:
            most = float(jnp.finfo(z.dtype).max)
            limit = math.sqrt(most / 3) if self.approximate else most
            z = jnp.where(jnp.abs(z) > limit, jnp.nan, z)
        # Beyond |z| = 40, the derivative is 1 or 0 even in float64. The clip prevents inf * 0.
        z = jnp.clip(z, -40, 40)
        if self.approximate:
            argument, slope = _tanh_argument(z)
            sigmoid = jax.nn.sigmoid(argument)
            return sigmoid + z * slope * sigmoid * jax.nn.sigmoid(-argument)
        return _normal_cdf(z) + z * _normal_density(z)


def _value(z: jax.Array, form: _Form) -> jax.Array:
    # z Phi(z) and z sigmoid(2u): the forms with 1 + erf and 1 + tanh lose digits for negative z.
    weight = jax.nn.sigmoid(_tanh_argument(z)[0]) if form.approximate else _normal_cdf(z)
    return jnp.where(z == -jnp.inf, jnp.nan if form.strict else 0.0, z * weight)


def _tangent(operands: Any, y: jax.Array, tangents: Any, form: _Form) -> jax.Array:
    del y
    return tangents[0] * form.derivative(operands[0])


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    wide = x.astype(accum_dtype(x.dtype))
    return wide if bias is None else wide + along_features(bias, wide)


def _fwd_reference(
    x: jax.Array, bias: jax.Array | None, *, approximate: bool, strict: bool
) -> Arrays:
    return (_Form(approximate, strict).value(_biased(x, bias)).astype(x.dtype),)


def _bwd_reference(
    dy: jax.Array, x: jax.Array, bias: jax.Array | None, *, approximate: bool, strict: bool
) -> Arrays:
    z = _biased(x, bias)
    dz = dy.astype(z.dtype) * _Form(approximate, strict).derivative(z)
    return dz.astype(x.dtype), jnp.sum(dz, tuple(range(x.ndim - 1)))


# --- Kernels -------------------------------------------------------------------------------------

FWD = Kernel(
    name="bias_gelu_fwd",
    operands={"x": "nd", "bias": "d"},
    results={"y": Result("nd", "x")},
    reference=_fwd_reference,
)
BWD = Kernel(
    name="bias_gelu_bwd",
    operands={"dy": "nd", "x": "nd", "bias": "d"},
    results={"dx": Result("nd", "x"), "dbias": Result("d")},
    reference=_bwd_reference,
    workspace=column_sum_workspace,
    in_place={"dx": "dy"},
)


# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _BiasGelu(Operation):
    """gelu(x + bias), for the operands x and bias."""

    form: _Form
    implementation: Implementation

    def compute(self, *operands: Any) -> Arrays:
        x, bias = operands
        form = dataclasses.asdict(self.form)
        return invoke(FWD, x, bias, **form, implementation=self.implementation)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        return self(*operands), _Tangent(self)(*operands, *tangents)


@dataclasses.dataclass(frozen=True)
class _Tangent(Operation):
    """The tangent of `_BiasGelu`'s result. The transpose is the backward pass.

    The operands are `_BiasGelu`'s operands and their tangents.
    """

    op: _BiasGelu
    linear = (2, 3)

    def compute(self, *operands: Any) -> Arrays:
        x, bias, dx, dbias = operands
        z = _biased(x, bias)
        dz = jnp.zeros_like(z) if dx is None else dx.astype(z.dtype)
        if dbias is not None:
            dz = dz + along_features(dbias, z)
        return ((dz * self.op.form.derivative(z)).astype(x.dtype),)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        x, bias, *tangents = operands
        has_dx, has_dbias = (isinstance(t, Unknown) for t in tangents)
        dx, dbias = invoke(
            BWD,
            cotangents[0],
            x,
            bias,
            skip=[] if has_dbias else ["dbias"],
            **dataclasses.asdict(self.op.form),
            implementation=self.op.implementation,
        )
        return None, None, dx if has_dx else None, dbias


# --- Public functions ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("form", "implementation"))
def _apply(
    x: jax.Array, bias: jax.Array | None, *, form: _Form, implementation: Implementation
) -> jax.Array:
    if bias is not None:
        bias = bias.astype(accum_dtype(x.dtype))
    spread_x, bias = prepare(FWD, x, bias)
    op = _BiasGelu(form, implementation)
    # JAX differentiates "xla" by itself.
    (y,) = (op.compute if implementation == "xla" else op)(spread_x, bias)
    return reshard_like(y, x)


@functools.partial(jax.jit, static_argnames=("form", "implementation"))
def _apply_backward(
    dy: jax.Array,
    x: jax.Array,
    bias: jax.Array | None,
    *,
    form: _Form,
    implementation: Implementation,
) -> tuple[jax.Array, Any]:
    operands = match_vma(dy, x, bias)
    skip = ["dbias"] if bias is None else []
    options = {**dataclasses.asdict(form), "implementation": implementation}
    dx, dbias = invoke(BWD, *operands, skip=skip, **options)
    return reshard_like(dx, x), dbias


def _checked_form(op: str, approximate: bool) -> _Form:
    return _Form(_checks.flag(op, "approximate", approximate), is_strict())


def _checked_bias(op: str, x: jax.Array, value: ArrayLike) -> jax.Array:
    bias = _checks.array(op, "bias", value)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a scalar")
    if bias.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: bias must have shape (x.shape[-1],) = {x.shape[-1:]}, got {bias.shape}"
        )
    return bias


@_checks.with_hints
def gelu(
    x: ArrayLike, approximate: bool = True, *, implementation: Implementation = None
) -> jax.Array:
    r"""Gaussian error linear unit, like `jax.nn.gelu`, with a fused backward pass.

    .. math:: y = x \Phi(x) \qquad\text{or}\qquad
              y = x \, \sigma(2u), \; u = \sqrt{2/\pi}\,(x + 0.044715 x^3)

    where Φ is the distribution function of the normal distribution, and σ is the logistic function.

    Args:
      x: the input, in float16, bfloat16, float32 or float64. It may have any shape.
      approximate: True selects the tanh form (the second formula). False selects the exact form.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or if `approximate` is not a bool.
      ValueError: for ``implementation="ffi"`` if no kernel is available.

    All arithmetic is in float32 (float64 for float64), with one rounding at the end. The largest
    errors are, in units in the last place (ulp) or relative to the result:

    =================  ==========  =========
    dtype, range       exact form  tanh form
    =================  ==========  =========
    float16, bfloat16  1 ulp       1 ulp
    float32, x > -3    8 ulp       16 ulp
    float32, x <= -3   1e-6        2e-5
    float64            4e-15       6e-13
    =================  ==========  =========

    The column of the exact form is for the native kernel. With ``"xla"``, the exact form has the
    limits of the tanh form. For x <= -3, ``1 + erf`` and ``1 + tanh`` would lose digits. Results
    are finite everywhere: ``gelu(-inf) == 0``, and the derivative at ±1e38 is 1 or 0.

    References:
      Hendrycks, Gimpel, Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> print(np.asarray(jax_gradops.gelu(jnp.array([-1.0, 0.0, 2.0]))).round(3))
    [-0.159  0.     1.955]
    """
    x = _checks.array("gelu", "x", x)
    y = _apply(
        x.reshape(1) if x.ndim == 0 else x,
        None,
        form=_checked_form("gelu", approximate),
        implementation=resolve_implementation(implementation, "gelu"),
    )
    return y.reshape(x.shape)


@_checks.with_hints
def bias_gelu(
    x: ArrayLike,
    bias: ArrayLike,
    approximate: bool = True,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    r"""``gelu(x + bias)`` in one pass. The backward pass computes both gradients in one pass.

    .. math:: y = z \Phi(z) \qquad\text{or}\qquad y = z \, \sigma(2u), \;
              u = \sqrt{2/\pi}\,(z + 0.044715 z^3), \qquad z = x + \text{bias}

    Args:
      x: the input. Its dtype is float16, bfloat16, float32 or float64. It has at least one axis.
      bias: of shape ``(x.shape[-1],)``, in any of the four dtypes. The dtype is independent of x's.
      approximate: True selects the tanh form. False selects the exact form.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or if `approximate` is not a bool.
      ValueError: for a wrong shape. Also for ``implementation="ffi"`` if no kernel is available.

    Numerics are as in `gelu`. The sum ``x + bias`` is not rounded. The gradient of `bias` is summed
    in float32 (float64 for float64) in a fixed order.

    References:
      Hendrycks, Gimpel, Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415

    >>> import jax.numpy as jnp, jax_gradops, numpy as np
    >>> y = jax_gradops.bias_gelu(jnp.zeros((1, 2)), jnp.array([-1.0, 2.0]))
    >>> print(np.asarray(y).round(3))
    [[-0.159  1.955]]
    """
    op = "bias_gelu"
    x = _checks.array(op, "x", x)
    return _apply(
        x,
        _checked_bias(op, x, bias),
        form=_checked_form(op, approximate),
        implementation=resolve_implementation(implementation, op),
    )


@_checks.with_hints
def gelu_backward(
    dy: ArrayLike,
    x: ArrayLike,
    *,
    approximate: bool,
    implementation: Implementation = None,
) -> jax.Array:
    r"""The gradient of `jax_gradops.gelu`.

    .. math:: dx = dy \cdot \mathrm{gelu}'(x)

    With ``approximate=False``, this is ONNX Runtime's GeluGrad and oneDNN's backward
    eltwise_gelu_erf. With ``approximate=True``, it is FastGeluGrad and eltwise_gelu_tanh.

    Args:
      dy: the cotangent of y. It has x's shape and dtype. dx takes over the memory of dy, as in
        `bias_gelu_backward`.
      x: the input of the forward operator, in float16, bfloat16, float32 or float64. It may have
        any shape.
      approximate: True selects the tanh form. False selects the exact form.
      implementation: as in `jax_gradops.gelu`.

    Returns:
      dx. It has x's shape and dtype.

    Raises:
      TypeError: for an unsupported dtype, or if `approximate` is not a bool.
      ValueError: if dy's shape or dtype is not x's. Also for ``implementation="ffi"`` if no kernel
        is available.

    Numerics are as in `jax_gradops.gelu`.

    References:
      ONNX Runtime, GeluGrad and FastGeluGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> print(backward.gelu_backward(jnp.ones(2), jnp.array([0.0, 40.0]), approximate=False))
    [0.5 1. ]
    """
    op = "gelu_backward"
    x = _checks.array(op, "x", x)
    dy = _checks.like(op, "dy", dy, "x", x)
    dx, _ = _apply_backward(
        *((a.reshape(1) if x.ndim == 0 else a) for a in (dy, x)),
        None,
        form=_checked_form(op, approximate),
        implementation=resolve_implementation(implementation, op),
    )
    return dx.reshape(x.shape)


@_checks.with_hints
def bias_gelu_backward(
    dy: ArrayLike,
    x: ArrayLike,
    bias: ArrayLike,
    *,
    approximate: bool,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""The gradient of `jax_gradops.bias_gelu`, in one pass.

    .. math:: dx = dy \cdot \mathrm{gelu}'(x + \text{bias}), \qquad
              dbias = \sum_{\text{all axes but the last}} dx

    dx is ONNX Runtime's BiasGeluGrad_dX (``approximate=False``) or BiasFastGeluGrad_dX
    (``approximate=True``). ONNX Runtime computes the gradient of the bias by another operator.

    Args:
      dy: the cotangent of y. It has x's shape and dtype. Inside `jax.jit`, dx takes over the memory
        of dy, unless dy is needed later. If dy is an argument of the jitted function, it must be
        donated. Otherwise XLA copies dy.
      x: the input of the forward operator, in float16, bfloat16, float32 or float64. It has at
        least one axis.
      bias: of shape ``(x.shape[-1],)``, in any of the four dtypes. The dtype is independent of x's.
      approximate: True selects the tanh form. False selects the exact form.
      implementation: as in `jax_gradops.bias_gelu`.

    Returns:
      ``(dx, dbias)``. dx has x's shape and dtype, and dbias has bias's. dbias is summed in float32
      (float64 for float64), before dx is rounded. For float16 and bfloat16, the error of each
      summand is at most ``1e-5 * abs(dy)``.

    Raises:
      TypeError: for an unsupported dtype, or if `approximate` is not a bool.
      ValueError: for a wrong shape, or if dy's dtype is not x's. Also for
        ``implementation="ffi"`` if no kernel is available.

    Numerics are as in `jax_gradops.gelu`.

    References:
      ONNX Runtime, BiasGeluGrad_dX and BiasFastGeluGrad_dX: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dx, dbias = backward.bias_gelu_backward(
    ...     jnp.ones((2, 1)), jnp.zeros((2, 1)), jnp.zeros(1), approximate=True)
    >>> print(dx.tolist(), dbias)
    [[0.5], [0.5]] [1.]
    """
    op = "bias_gelu_backward"
    x = _checks.array(op, "x", x)
    bias = _checked_bias(op, x, bias)
    dx, dbias = _apply_backward(
        _checks.like(op, "dy", dy, "x", x),
        x,
        bias.astype(accum_dtype(x.dtype)),
        form=_checked_form(op, approximate),
        implementation=resolve_implementation(implementation, op),
    )
    return dx, dbias.astype(bias.dtype)
