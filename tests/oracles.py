"""The meaning of the ops in float64 NumPy. The module does not use the library or JAX.

An oracle takes float64 arrays: the rounded inputs, widened. It returns a `Reference` for each
result: the value, and the facts that a test's tolerance needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.special


class Reference(NamedTuple):
    """A float64 result. `magnitude` is the sum of the absolute values of its terms.

    One rounding error of the computation is eps * magnitude. `error` is an additional allowed
    error: the op may have computed the result from rounded values.
    """

    value: np.ndarray
    magnitude: np.ndarray
    error: np.ndarray | float = 0.0


def total(references: Sequence[Reference]) -> Reference:
    """The sum of results."""
    return Reference(
        sum(r.value for r in references),  # pyright: ignore[reportArgumentType]
        sum(r.magnitude for r in references),  # pyright: ignore[reportArgumentType]
        sum(r.error for r in references),
    )


def over_rows(r: Reference) -> Reference:
    """The sum of a result over all axes but the last."""
    error = np.broadcast_to(r.error, r.value.shape)
    return Reference(*(np.sum(a, tuple(range(a.ndim - 1))) for a in (r.value, r.magnitude, error)))


def _mean(x: np.ndarray) -> np.ndarray:
    return np.sum(x, -1, keepdims=True) / max(1, x.shape[-1])


def _columns(terms: np.ndarray, magnitudes: np.ndarray) -> Reference:
    return over_rows(Reference(terms, np.abs(magnitudes)))


# --- Layer norm and RMS norm ---------------------------------------------------------------------


def _x_hat(x: np.ndarray, epsilon: float, centered: bool) -> tuple[np.ndarray, np.ndarray]:
    if centered:
        x = x - _mean(x)
        x = x - _mean(x)  # removes the rest that rounding of the first mean left
    square = _mean(x * x) + epsilon
    rstd = 1 / np.sqrt(np.where(np.isinf(square), np.nan, square))  # infinity: NaN, not 0
    return x * rstd, rstd


def norm(
    x: np.ndarray,
    scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    epsilon: float,
    centered: bool,
    scale_offset: float = 0.0,
) -> Reference:
    """Layer norm (`centered`) or RMS norm over the last axis."""
    x_hat, _ = _x_hat(x, epsilon, centered)
    gamma = 1.0 if scale is None else scale + scale_offset
    beta = 0.0 if bias is None else bias
    spread = np.sqrt(_mean(x_hat * x_hat)) if centered else 0.0  # for an error of the mean
    magnitude = np.abs(gamma) * (np.abs(x_hat) + spread) + np.abs(beta)
    return Reference(x_hat * gamma + beta, magnitude)


def norm_vjp(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray | None = None,
    *,
    epsilon: float,
    centered: bool,
    scale_offset: float = 0.0,
) -> tuple[Reference, Reference, Reference]:
    """Gradients with respect to x, scale and bias."""
    x_hat, rstd = _x_hat(x, epsilon, centered)
    wdy = dy if scale is None else dy * (scale + scale_offset)
    along = _mean(wdy * x_hat)
    dx = wdy - x_hat * along
    spread = np.sqrt(_mean(x_hat * x_hat)) if centered else 0.0
    size = np.abs(x_hat) + spread
    magnitude = np.abs(wdy) + size * _mean(np.abs(wdy) * size)
    if centered:
        dx = dx - _mean(wdy)
        magnitude = magnitude + _mean(np.abs(wdy))
    return (
        Reference(dx * rstd, magnitude * rstd),
        _columns(dy * x_hat, dy * size),
        _columns(dy, dy),
    )


def add_norm(total: np.ndarray, *parameters: Any, **options: Any) -> Reference:
    """The norm of a sum, and the exact sum after it, along the last axis."""
    y = norm(total, *parameters, **options)
    values = [y.value, total], [y.magnitude, np.abs(total)]
    return Reference(*(np.concatenate(v, -1) for v in values))


def add_norm_vjp(
    dy: np.ndarray, dsum: np.ndarray, x: np.ndarray, *parameters: Any, **options: Any
) -> tuple[Reference, Reference, Reference, Reference]:
    """Gradients of a norm and of the sum `x`, with respect to x, scale, bias and a bias of x."""
    dx, dscale, dbias = norm_vjp(dy, x, *parameters, **options)
    dx = total([dx, Reference(dsum, np.abs(dsum))])
    return dx, dscale, dbias, over_rows(dx)


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
    x_hat, rstd = _x_hat(x, options["epsilon"], options["centered"])
    wdy = np.abs(dy * gamma)
    # The error of x_hat. 1.01: y itself may be rounded to the wrong side.
    off = (1.01 * unit * np.abs(y) + smallest) / np.abs(gamma)
    size = np.abs(x_hat)
    dx, dscale, dbias = norm_vjp(dy, x, scale, **options)
    dx_error = (off * _mean(wdy * size) + (size + off) * _mean(wdy * off)) * rstd
    dscale_error = np.sum(np.abs(dy) * off, tuple(range(dy.ndim - 1)))
    return dx._replace(error=dx_error), dscale._replace(error=dscale_error), dbias


# --- Batch norm ----------------------------------------------------------------------------------


class _BatchNorm(NamedTuple):
    x_hat: np.ndarray
    size: np.ndarray  # the magnitude of x_hat's terms
    rstd: np.ndarray
    z: Reference  # the argument of the activation


def _rows_mean(x: np.ndarray) -> np.ndarray:
    rows = tuple(range(x.ndim - 1))
    return np.sum(x, rows) / max(1, x.size // max(1, x.shape[-1]))


def _batch_norm(
    x: np.ndarray,
    scale: np.ndarray | None,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    epsilon: float,
) -> _BatchNorm:
    x = x - _rows_mean(x)
    x = x - _rows_mean(x)  # removes the rest that rounding of the first mean left
    square = _rows_mean(x * x) + epsilon
    rstd = 1 / np.sqrt(np.where(np.isinf(square), np.nan, square))
    x_hat = x * rstd
    gamma = 1.0 if scale is None else scale
    beta = 0.0 if bias is None else bias
    rest = 0.0 if residual is None else residual
    size = np.abs(x_hat) + np.sqrt(_rows_mean(x_hat * x_hat))  # with an error of the mean
    magnitude = np.abs(gamma) * size + np.abs(beta) + np.abs(rest)
    return _BatchNorm(x_hat, size, rstd, Reference(x_hat * gamma + beta + rest, magnitude))


def batch_norm(
    x: np.ndarray,
    scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    epsilon: float,
    relu: bool = False,
    residual: np.ndarray | None = None,
) -> Reference:
    """Batch norm over all axes but the last, then the residual's addition, then relu."""
    z = _batch_norm(x, scale, bias, residual, epsilon).z
    return z._replace(value=np.maximum(z.value, 0)) if relu else z


def batch_norm_vjp(
    dy: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    epsilon: float,
    relu: bool = False,
    residual: np.ndarray | None = None,
    unit: float = 2.0**-21,
) -> tuple[Reference, Reference, Reference, Reference]:
    """Gradients with respect to x, scale, bias and the residual.

    `unit` is the relative error of relu's argument. If the argument may be 0, the gradient through
    relu may be 0.
    """
    x_hat, size, rstd, z = _batch_norm(x, scale, bias, residual, epsilon)
    doubtful = np.zeros_like(dy)
    if relu:
        doubtful = np.abs(dy) * (np.abs(z.value) <= unit * z.magnitude)
        dy = np.where(z.value > 0, dy, 0.0)
    factor = rstd * (1.0 if scale is None else scale)
    dx = dy - _rows_mean(dy) - x_hat * _rows_mean(dy * x_hat)
    magnitude = np.abs(dy) + _rows_mean(np.abs(dy)) + size * _rows_mean(np.abs(dy) * size)
    error = doubtful + _rows_mean(doubtful) + size * _rows_mean(doubtful * size)
    rows = tuple(range(dy.ndim - 1))
    return (
        Reference(dx * factor, magnitude * np.abs(factor), error * np.abs(factor)),
        _columns(dy * x_hat, dy * size)._replace(error=np.sum(doubtful * size, rows)),
        _columns(dy, dy)._replace(error=np.sum(doubtful, rows)),
        Reference(dy, np.abs(dy), doubtful),
    )


# --- GELU ----------------------------------------------------------------------------------------


def _tanh_argument(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2u and its derivative, for u = sqrt(2/pi) (z + 0.044715 z^3)."""
    c = 2 * np.sqrt(2 / np.pi)
    return c * (z + 0.044715 * z**3), c * (1 + 3 * 0.044715 * z**2)


def gelu_value(z: np.ndarray, approximate: bool) -> np.ndarray:
    """z Phi(z), or z sigmoid(2u); 0 at -inf."""
    with np.errstate(all="ignore"):
        weight = scipy.special.expit(_tanh_argument(z)[0]) if approximate else _gaussian(z)[0]
        return np.where(z == -np.inf, 0.0, z * weight)


def gelu_derivative(z: np.ndarray, approximate: bool) -> np.ndarray:
    """The derivative of `gelu_value`."""
    z = np.clip(z, -60, 60)  # beyond, the derivative is exactly 0 or 1
    with np.errstate(under="ignore"):
        if approximate:
            argument, slope = _tanh_argument(z)
            weight = scipy.special.expit(argument)
            return weight + z * slope * weight * scipy.special.expit(-argument)
        weight, density = _gaussian(z)
        return weight + z * density


def _gaussian(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Phi(z) and its derivative.

    z^2 is in two parts: rounding z^2 of hundreds costs hundreds of ulp.
    """
    z = np.clip(z, -60, 60)
    upper = z.astype(np.float32).astype(np.float64)
    bell = np.exp(-0.5 * upper * upper) * np.exp(-0.5 * (z - upper) * (z + upper))
    tail = 0.5 * scipy.special.erfcx(np.abs(z) / np.sqrt(2)) * bell
    return np.where(z > 0, 1 - tail, tail), bell / np.sqrt(2 * np.pi)


def bias_gelu(x: np.ndarray, bias: np.ndarray | None = None, *, approximate: bool) -> Reference:
    """gelu(x + bias)."""
    z = x if bias is None else x + bias
    y, slope = gelu_value(z, approximate), gelu_derivative(z, approximate)
    with np.errstate(invalid="ignore"):
        size = np.abs(x) + (0.0 if bias is None else np.abs(bias))
        return Reference(y, np.abs(y) + size * np.abs(slope))


def bias_gelu_vjp(
    dy: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None, *, approximate: bool
) -> tuple[Reference, Reference]:
    """Gradients with respect to x and bias."""
    slope = gelu_derivative(x if bias is None else x + bias, approximate)
    magnitude = np.abs(dy) * (np.abs(slope) + 1)
    return Reference(dy * slope, magnitude), _columns(dy * slope, magnitude)


# --- Global norm ---------------------------------------------------------------------------------


def global_norm(*leaves: np.ndarray) -> Reference:
    """The L2 norm over all elements. They are scaled so that no square overflows or vanishes."""
    largest = max((float(np.max(np.abs(leaf))) for leaf in leaves if leaf.size), default=0.0)
    if not 0 < largest < np.inf:
        value = np.asarray(np.nan if any(np.isnan(leaf).any() for leaf in leaves) else largest)
    else:
        total = sum(float(np.sum((leaf / largest) ** 2)) for leaf in leaves)
        value = np.asarray(largest * np.sqrt(total))
    # For float64 leaves, sums of the op and the oracle have equal precision. Errors of a long sum
    # grow as the square root of its length.
    growth = 1 + np.sqrt(sum(leaf.size for leaf in leaves)) / 16
    return Reference(value, value * growth)


def global_norm_vjp(dnorm: np.ndarray, *leaves: np.ndarray) -> tuple[Reference, ...]:
    """dnorm * leaf / norm; 0 at norm 0."""
    norm_ = float(global_norm(*leaves).value)
    grads = [dnorm * (leaf / norm_ if norm_ else np.zeros_like(leaf)) for leaf in leaves]
    return tuple(Reference(g, np.abs(g)) for g in grads)


def clip(max_norm: float, *leaves: np.ndarray) -> tuple[Reference, ...]:
    """leaf * max_norm / norm if norm >= max_norm > 0, else leaf."""
    norm_ = float(global_norm(*leaves).value)
    factor = 1.0 if norm_ < max_norm or norm_ == 0 else max_norm / norm_
    return tuple(Reference(leaf * factor, np.abs(leaf * factor)) for leaf in leaves)


def clip_first_vjp(dy: np.ndarray, max_norm: float, *leaves: np.ndarray) -> tuple[Reference, ...]:
    """Gradients, with respect to all leaves, of the first leaf after clipping."""
    norm_ = float(global_norm(*leaves).value)
    if norm_ < max_norm or norm_ == 0:
        grads = [dy, *(np.zeros_like(leaf) for leaf in leaves[1:])]
        return tuple(Reference(g, np.abs(g)) for g in grads)
    factor, directions = max_norm / norm_, [leaf / norm_ for leaf in leaves]
    along = factor * np.sum(dy * directions[0])
    along_magnitude = factor * np.sum(np.abs(dy * directions[0]))
    return tuple(
        Reference(
            factor * (dy if i == 0 else 0.0) - u * along,
            factor * (np.abs(dy) if i == 0 else 0.0) + np.abs(u) * along_magnitude,
        )
        for i, u in enumerate(directions)
    )


# --- Derivatives of any function -----------------------------------------------------------------


def directional_derivative(
    function: Callable[..., Sequence[np.ndarray]],
    at: Sequence[np.ndarray],
    direction: Sequence[np.ndarray],
    step: float = 1e-3,
) -> list[np.ndarray]:
    """Derivatives of all results of `function`, by central differences of fourth order."""

    def moved(h: float) -> Sequence[np.ndarray]:
        return function(*(a + h * d for a, d in zip(at, direction, strict=True)))

    far, near = (
        [(p - m) / (2 * h) for p, m in zip(moved(h), moved(-h), strict=True)]
        for h in (2 * step, step)
    )
    return [(4 * n - f) / 3 for n, f in zip(near, far, strict=True)]
