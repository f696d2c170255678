"""The gradient operators of ONNX Runtime and oneDNN Graph, in float64 NumPy, as published.

Arrays are [rows, features], statistics are [rows, 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_gradops._oracles import Reference


def columns(terms: np.ndarray, magnitudes: np.ndarray) -> Reference:
    return Reference(terms.sum(0), np.abs(magnitudes).sum(0))


def gradients(
    dy: np.ndarray, x_hat: np.ndarray, size: np.ndarray, scale: Any, rstd: np.ndarray, mean: bool
) -> list[Reference]:
    """dx, dscale, dbias from x_hat. Its rounding errors are proportional to `size`."""
    n = dy.shape[1]
    d = dy if scale is None else dy * scale
    dx = n * d - x_hat * (d * x_hat).sum(1, keepdims=True)
    magnitude = np.abs(d) + size * (np.abs(d) * size).sum(1, keepdims=True) / n
    if mean:
        dx = dx - d.sum(1, keepdims=True)
        magnitude = magnitude + np.abs(d).sum(1, keepdims=True) / n
    return [
        Reference(rstd / n * dx, rstd * magnitude),
        columns(dy * x_hat, dy * size),
        columns(dy, dy),
    ]


def layer_normalization_grad(dy, x, scale, mean, inv_std_dev):  # noqa: ANN001, ANN201
    x_hat = (x - mean) * inv_std_dev
    return gradients(dy, x_hat, (np.abs(x) + np.abs(mean)) * inv_std_dev, scale, inv_std_dev, True)


def simplified_layer_normalization_grad(dy, x, scale, inv_std_dev):  # noqa: ANN001, ANN201
    x_hat = x * inv_std_dev
    return gradients(dy, x_hat, np.abs(x_hat), scale, inv_std_dev, False)


def invertible_layer_normalization_grad(dy, y, scale, bias, inv_std_dev, mean=True):  # noqa: ANN001, ANN201
    gamma = np.ones(y.shape[1]) if scale is None else scale
    beta = np.zeros(y.shape[1]) if bias is None else bias
    divisor = np.where(gamma == 0, np.inf, gamma)
    size = (np.abs(y) + np.abs(beta)) / np.abs(divisor)
    return gradients(dy, (y - beta) / divisor, size, scale, inv_std_dev, mean)


def layer_norm_backward(diff_dst, src, gamma, mean, variance, epsilon):  # noqa: ANN001, ANN201
    """The operator of oneDNN Graph."""
    inv_sqrt = 1 / np.sqrt(variance + epsilon)
    return layer_normalization_grad(diff_dst, src, gamma, mean, inv_sqrt)
