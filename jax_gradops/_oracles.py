"""The meaning of the ops in float64. `doctor`, the benchmark's gate and the tests compare with it.

An oracle takes float64 arrays: the rounded inputs, widened. It returns a `Reference` for each
result. The arrays are NumPy's. The gate passes arrays of JAX, and uses the values alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Reference(NamedTuple):
    """A float64 result. `magnitude` is the sum of the absolute values of its terms.

    One rounding error of the computation is eps * magnitude. `error` is an additional allowed
    error: the op may have computed the result from rounded values.
    """

    value: Any
    magnitude: Any
    error: Any = 0.0


def total(references: Sequence[Reference]) -> Reference:
    """The sum of results."""
    return Reference(*(sum(parts[1:], start=parts[0]) for parts in zip(*references, strict=True)))


def exact(value: Any) -> Reference:
    """A result that has one term."""
    return Reference(value, abs(value))


def over_rows(r: Reference, axis: int = -1) -> Reference:
    """The sum of a result over all axes but one."""
    rows, error = _rows(r.value, axis), _numpy(r.value).broadcast_to(r.error, r.value.shape)
    return Reference(*(a.sum(rows) for a in (r.value, r.magnitude, error)))


def _numpy(x: Any) -> Any:
    """The module of an array's functions: `numpy` or `jax.numpy`."""
    return x.__array_namespace__()


def _rows(x: Any, axis: int) -> tuple[int, ...]:
    """All axes but one."""
    return tuple(i for i in range(x.ndim) if i != axis % x.ndim)


def along(values: Any, x: Any, axis: int = -1) -> Any:
    """One value per column, in a shape that broadcasts over x."""
    return values.reshape([1 if i in _rows(x, axis) else -1 for i in range(x.ndim)])


def _mean(x: Any, axes: Any = -1) -> Any:
    total = x.sum(axes, keepdims=True)
    return total / max(1, x.size // max(1, total.size))


def _normalized(x: Any, axes: Any, epsilon: float, centered: bool) -> tuple[Any, Any, Any]:
    """Returns x_hat, the magnitude of its terms, and 1/sqrt(variance + epsilon)."""
    if centered:
        x = x - _mean(x, axes)
        x = x - _mean(x, axes)  # removes the rest that rounding of the first mean left
    square = _mean(x * x, axes) + epsilon
    xp = _numpy(x)
    rstd = 1 / xp.sqrt(xp.where(xp.isinf(square), xp.nan, square))  # infinity: NaN, not 0
    x_hat = x * rstd
    size = abs(x_hat)
    if centered:
        size = size + xp.sqrt(_mean(x_hat * x_hat, axes))  # for an error of the mean
    return x_hat, size, rstd


# --- Layer norm and RMS norm ---------------------------------------------------------------------


def norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float,
    centered: bool,
    scale_offset: float = 0.0,
) -> Reference:
    """Layer norm (`centered`) or RMS norm over the last axis."""
    x_hat, size, _ = _normalized(x, -1, epsilon, centered)
    gamma = 1.0 if scale is None else along(scale + scale_offset, x)
    beta = 0.0 if bias is None else along(bias, x)
    return Reference(x_hat * gamma + beta, size * abs(gamma) + abs(beta))


def norm_vjp(
    dy: Any,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float,
    centered: bool,
    scale_offset: float = 0.0,
) -> tuple[Reference, Reference, Reference]:
    """Gradients with respect to x, scale and bias."""
    del bias
    x_hat, size, rstd = _normalized(x, -1, epsilon, centered)
    wdy = dy if scale is None else dy * along(scale + scale_offset, x)
    dx = wdy - x_hat * _mean(wdy * x_hat)
    magnitude = abs(wdy) + size * _mean(abs(wdy) * size)
    if centered:
        dx = dx - _mean(wdy)
        magnitude = magnitude + _mean(abs(wdy))
    return (
        Reference(dx * rstd, magnitude * rstd),
        over_rows(Reference(dy * x_hat, abs(dy) * size)),
        over_rows(exact(dy)),
    )


def add_norm(x: Any, residual: Any, *parameters: Any, **options: Any) -> tuple[Reference, ...]:
    """The norm of a sum, and the sum."""
    return norm(x + residual, *parameters, **options), exact(x + residual)


def add_norm_vjp(
    cotangents: tuple[Any, Any], x: Any, residual: Any, *parameters: Any, **options: Any
) -> tuple[Reference, ...]:
    """Gradients with respect to x, residual, scale and bias."""
    dy, dsum = cotangents
    dx, *rest = norm_vjp(dy, x + residual, *parameters, **options)
    dx = total([dx, exact(dsum)])
    return dx, dx, *rest


def norm_vjp_of_rounded(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    unit: float,
    smallest: float,
    **options: Any,
) -> tuple[Reference, Reference, Reference]:
    """As `norm_vjp`, for an op that computes gradients from the rounded output instead of x.

    `unit` is half of the relative distance between neighbours in the output's dtype. `smallest` is
    their distance near 0. No element of scale + scale_offset may be 0.
    """
    y = norm(x, scale, bias, **options).value
    gamma = scale + options.get("scale_offset", 0.0)
    x_hat, _, rstd = _normalized(x, -1, options["epsilon"], options["centered"])
    wdy = np.abs(dy * gamma)
    # The error of x_hat. 1.01: y itself may be rounded to the wrong side.
    off = (1.01 * unit * np.abs(y) + smallest) / np.abs(gamma)
    size = np.abs(x_hat)
    dx, dscale, dbias = norm_vjp(dy, x, scale, **options)
    dx_error = (off * _mean(wdy * size) + (size + off) * _mean(wdy * off)) * rstd
    dscale_error = np.sum(np.abs(dy) * off, _rows(dy, -1))
    return dx._replace(error=dx_error), dscale._replace(error=dscale_error), dbias


# --- Batch norm ----------------------------------------------------------------------------------


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float,
    relu: bool = False,
    residual: Any = None,
    axis: int = -1,
) -> Reference:
    """Batch norm over all axes but one, then the residual's addition, then relu."""
    x_hat, size, _ = _normalized(x, _rows(x, axis), epsilon, True)
    gamma = 1.0 if scale is None else along(scale, x, axis)
    beta = 0.0 if bias is None else along(bias, x, axis)
    rest = 0.0 if residual is None else residual
    z = x_hat * gamma + beta + rest
    return Reference(
        _numpy(x).maximum(z, 0) if relu else z, size * abs(gamma) + abs(beta) + abs(rest)
    )


def batch_norm_vjp(
    dy: Any,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float,
    relu: bool = False,
    residual: Any = None,
    axis: int = -1,
    unit: float = 2.0**-21,
) -> tuple[Reference, Reference, Reference, Reference]:
    """Gradients with respect to x, scale, bias and the residual.

    `unit` is the relative error of relu's argument. If the argument may be 0, the gradient through
    relu may be 0.
    """
    xp, rows = _numpy(x), _rows(x, axis)
    x_hat, size, rstd = _normalized(x, rows, epsilon, True)
    doubtful = xp.zeros_like(dy)
    if relu:
        z = batch_norm(x, scale, bias, epsilon=epsilon, residual=residual, axis=axis)
        doubtful = xp.where(abs(z.value) <= unit * z.magnitude, abs(dy), 0.0)
        dy = xp.where(z.value > 0, dy, 0.0)
    factor = rstd * (1.0 if scale is None else along(scale, x, axis))
    dx = dy - _mean(dy, rows) - x_hat * _mean(dy * x_hat, rows)
    magnitude = abs(dy) + _mean(abs(dy), rows) + size * _mean(abs(dy) * size, rows)
    error = doubtful + _mean(doubtful, rows) + size * _mean(doubtful * size, rows)
    return (
        Reference(dx * factor, magnitude * abs(factor), error * abs(factor)),
        over_rows(Reference(dy * x_hat, abs(dy) * size, doubtful * size), axis),
        over_rows(Reference(dy, abs(dy), doubtful), axis),
        Reference(dy, abs(dy), doubtful),
    )


def batch_norm_inference(x: Any, mean: Any, var: Any, *, epsilon: float, axis: int) -> Reference:
    """Batch norm with given statistics, without scale and bias."""
    mean, rstd = along(mean, x, axis), 1 / _numpy(x).sqrt(along(var, x, axis) + epsilon)
    return Reference((x - mean) * rstd, (abs(x) + abs(mean)) * rstd)


# --- Group norm ----------------------------------------------------------------------------------


def _by_group(x: Any, groups: int, axis: int) -> tuple[Any, tuple[int, ...]]:
    """Splits the channels of x into groups. Also returns the axes of a group's elements."""
    axis %= x.ndim
    sizes = groups, x.shape[axis] // max(1, groups)
    parts = x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))
    return parts, tuple(i for i in range(1, parts.ndim) if i != axis)


def _normalized_groups(x: Any, groups: int, axis: int, epsilon: float) -> tuple[Any, Any, Any]:
    """As `_normalized`, in x's shape."""
    parts, axes = _by_group(x, groups, axis)
    x_hat, size, rstd = _normalized(parts, axes, epsilon, True)
    each = _numpy(x).broadcast_to(rstd, parts.shape)
    return x_hat.reshape(x.shape), size.reshape(x.shape), each.reshape(x.shape)


def group_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    num_groups: int,
    epsilon: float,
    activation: str | None = None,
    axis: int = -1,
) -> Reference:
    """Group norm, then the activation. Axis 0 has the samples."""
    x_hat, size, _ = _normalized_groups(x, num_groups, axis, epsilon)
    gamma = 1.0 if scale is None else along(scale, x, axis)
    beta = 0.0 if bias is None else along(bias, x, axis)
    z, magnitude = x_hat * gamma + beta, size * abs(gamma) + abs(beta)
    if activation == "relu":
        return Reference(_numpy(x).maximum(z, 0), magnitude)
    if activation == "silu":
        s, rest = _sigmoid(z), _sigmoid(-z)
        return Reference(z * s, abs(z * s) + magnitude * s * (1 + abs(z) * rest))
    return Reference(z, magnitude)


def group_norm_vjp(
    dy: Any,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    num_groups: int,
    epsilon: float,
    activation: str | None = None,
    axis: int = -1,
    unit: float = 2.0**-21,
) -> tuple[Reference, Reference, Reference]:
    """Gradients with respect to x, scale and bias. `unit` is as in `batch_norm_vjp`."""
    xp, options = _numpy(x), {"num_groups": num_groups, "epsilon": epsilon, "axis": axis}
    x_hat, size, rstd = _normalized_groups(x, num_groups, axis, epsilon)
    gamma = 1.0 if scale is None else along(scale, x, axis)
    z = group_norm(x, scale, bias, **options)
    dz = Reference(dy, abs(dy), xp.zeros_like(dy))
    if activation == "relu":
        doubtful = xp.where(abs(z.value) <= unit * z.magnitude, abs(dy), 0.0)
        dz = exact(xp.where(z.value > 0, dy, 0.0))._replace(error=doubtful)
    if activation == "silu":
        s, rest = _sigmoid(z.value), _sigmoid(-z.value)
        slope = s * (1 + z.value * rest)
        # The second derivative says how an error of z changes the slope.
        second = s * rest * (2 + z.value * (rest - s))
        change = s * (1 + abs(z.value) * rest) + abs(second) * z.magnitude
        dz = Reference(dy * slope, abs(dy) * change, xp.zeros_like(dy))

    def mean(a: Any) -> Any:
        parts, axes = _by_group(a, num_groups, axis)
        return xp.broadcast_to(_mean(parts, axes), parts.shape).reshape(a.shape)

    wdz, (_, *others) = dz.value * gamma, dz
    dx = wdz - mean(wdz) - x_hat * mean(wdz * x_hat)
    sizes = [w + mean(w) + size * mean(w * size) for w in (o * abs(gamma) for o in others)]
    return (
        Reference(dx * rstd, *(s * rstd for s in sizes)),
        over_rows(Reference(dz.value * x_hat, *(o * size for o in others)), axis),
        over_rows(dz, axis),
    )


# --- GELU ----------------------------------------------------------------------------------------


def _scipy_special() -> Any:
    return importlib.import_module("scipy.special")  # slow: `import jax_gradops` does not need it


def _sigmoid(x: Any) -> Any:
    return _scipy_special().expit(x) if _numpy(x) is np else jax.nn.sigmoid(x)


def _tanh_argument(z: Any) -> tuple[Any, Any]:
    """2u and its derivative, for u = sqrt(2/pi) (z + 0.044715 z^3)."""
    c = 2 * math.sqrt(2 / math.pi)
    return c * (z + 0.044715 * z**3), c * (1 + 3 * 0.044715 * z**2)


def gelu_value(z: Any, approximate: bool) -> Any:
    """Z Phi(z), or z sigmoid(2u); 0 at -inf."""
    with np.errstate(all="ignore"):
        weight = _sigmoid(_tanh_argument(z)[0]) if approximate else _gaussian(z)[0]
        return _numpy(z).where(z == -np.inf, 0.0, z * weight)


def gelu_derivative(z: Any, approximate: bool) -> Any:
    """The derivative of `gelu_value`."""
    z = _numpy(z).clip(z, -60, 60)  # beyond, the derivative is exactly 0 or 1
    with np.errstate(under="ignore"):
        if approximate:
            argument, slope = _tanh_argument(z)
            weight = _sigmoid(argument)
            return weight + z * slope * weight * _sigmoid(-argument)
        weight, density = _gaussian(z)
        return weight + z * density


def _gaussian(z: Any) -> tuple[Any, Any]:
    """Phi(z) and its derivative.

    z^2 is in two parts: rounding z^2 of hundreds costs hundreds of ulp.
    """
    xp = _numpy(z)
    z = xp.clip(z, -60, 60)
    upper = z.astype(np.float32).astype(np.float64)
    bell = xp.exp(-0.5 * upper * upper) * xp.exp(-0.5 * (z - upper) * (z + upper))
    root = abs(z) / math.sqrt(2)
    # JAX has no erfcx. Its erfc is exact enough for the gate.
    tail = 0.5 * (_scipy_special().erfcx(root) * bell if xp is np else jax.lax.erfc(root))
    return xp.where(z > 0, 1 - tail, tail), bell / math.sqrt(2 * math.pi)


def bias_gelu(x: Any, bias: Any = None, *, approximate: bool) -> Reference:
    """gelu(x + bias)."""
    beta = 0.0 if bias is None else along(bias, x)
    y, slope = gelu_value(x + beta, approximate), gelu_derivative(x + beta, approximate)
    with np.errstate(invalid="ignore"):
        return Reference(y, abs(y) + (abs(x) + abs(beta)) * abs(slope))


def bias_gelu_vjp(
    dy: Any, x: Any, bias: Any = None, *, approximate: bool
) -> tuple[Reference, Reference]:
    """Gradients with respect to x and bias."""
    slope = gelu_derivative(x + (0.0 if bias is None else along(bias, x)), approximate)
    dx = Reference(dy * slope, abs(dy) * (abs(slope) + 1))
    return dx, over_rows(dx)


# --- Global norm ---------------------------------------------------------------------------------


def global_norm(*leaves: Any) -> Reference:
    """The L2 norm over all elements. They are scaled so that no square overflows or vanishes."""
    xp = _numpy(leaves[0])
    largest = xp.max(xp.stack([abs(leaf).max(initial=0.0) for leaf in leaves]))
    scalable = (largest > 0) & (largest < np.inf)
    divisor = xp.where(scalable, largest, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = total([exact(((leaf / divisor) ** 2).sum()) for leaf in leaves]).value
    value = xp.where(scalable, divisor * xp.sqrt(squares), largest)
    # For float64 leaves, sums of the op and the oracle have equal precision. Errors of a long sum
    # grow as the square root of its length.
    growth = 1 + math.sqrt(sum(leaf.size for leaf in leaves)) / 16
    return Reference(value, value * growth)


def global_norm_vjp(dnorm: Any, *leaves: Any) -> tuple[Reference, ...]:
    """Dnorm * leaf / norm; 0 at norm 0."""
    norm_ = float(global_norm(*leaves).value)
    return tuple(exact(dnorm * (leaf / norm_ if norm_ else np.zeros_like(leaf))) for leaf in leaves)


def clip(*leaves: Any, max_norm: float) -> tuple[Reference, ...]:
    """Leaf * max_norm / norm if norm >= max_norm > 0, else leaf."""
    norm_ = global_norm(*leaves).value
    xp, keep = _numpy(norm_), (norm_ < max_norm) | (norm_ == 0)
    factor = xp.where(keep, 1.0, max_norm / xp.where(keep, 1.0, norm_))
    return tuple(exact(leaf * factor) for leaf in leaves)


def clip_vjp(cotangents: Sequence[Any], *leaves: Any, max_norm: float) -> tuple[Reference, ...]:
    """Gradients with respect to all leaves."""
    norm_ = float(global_norm(*leaves).value)
    if norm_ < max_norm or norm_ == 0:
        return tuple(map(exact, cotangents))
    factor, units = max_norm / norm_, [leaf / norm_ for leaf in leaves]
    along = total([exact((d * u).sum()) for d, u in zip(cotangents, units, strict=True)]).value
    size = total([exact(abs(d * u).sum()) for d, u in zip(cotangents, units, strict=True)]).value
    return tuple(
        Reference(factor * (d - u * along), factor * (abs(d) + abs(u) * size))
        for d, u in zip(cotangents, units, strict=True)
    )
