"""Softmax cross-entropy in float64: see `_oracles`. The labels follow from the shape of logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_gradops._oracles import Reference

#: The label of ignored rows, in all forms with the option `ignore_index`.
IGNORE_INDEX = -100


def labels_of(logits: Any, ignore_index: int | None = None) -> Any:
    """Labels for logits of any shape: int32. With `ignore_index`, every fifth row is ignored."""
    *rows, classes = logits.shape
    labels = np.arange(math.prod(rows)).reshape(rows) * 7919 % max(1, classes)
    if ignore_index is not None:
        labels.flat[4::5] = ignore_index
    return labels.astype(np.int32)


def _parts(x: Any, label_smoothing: float, ignore_index: int | None) -> tuple[Any, ...]:
    """Returns x, differences to the row's maximum, lse of these, weights of labels, who counts."""
    xp = x.__array_namespace__()
    labels = xp.asarray(labels_of(x, ignore_index))
    counts = labels != IGNORE_INDEX if ignore_index is not None else labels == labels
    x = xp.where(counts[..., None], x, 0.0)
    differences = x - x.max(-1, keepdims=True)
    lse = xp.log(xp.exp(differences).sum(-1))
    is_label = labels[..., None] == xp.arange(x.shape[-1])
    weights = (1 - label_smoothing) * is_label + label_smoothing / x.shape[-1]
    return x, differences, lse, weights, counts


def softmax_cross_entropy(
    x: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int | None = None
) -> Reference:
    """The loss of each row."""
    x, differences, lse, weights, counts = _parts(x, label_smoothing, ignore_index)
    whole = lse + x.max(-1)
    loss = lse - (weights * differences).sum(-1) + z_loss * whole * whole
    magnitude = abs(lse) + 1 + (weights * abs(differences)).sum(-1)
    magnitude = magnitude + z_loss * (abs(whole) + abs(x).max(-1)) ** 2
    return Reference(loss * counts, magnitude * counts)


def softmax_cross_entropy_vjp(
    dloss: Any,
    x: Any,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> tuple[Reference]:
    """The gradient with respect to the logits."""
    xp = x.__array_namespace__()
    x, differences, lse, weights, counts = _parts(x, label_smoothing, ignore_index)
    p = xp.exp(differences - lse[..., None])
    whole = (lse + x.max(-1))[..., None]
    dloss = (dloss * counts)[..., None]
    gradient = dloss * (p * (1 + 2 * z_loss * whole) - weights)
    # An error of a difference d is eps |d|.
    size = p * (2 + abs(differences)) * (1 + 2 * z_loss * (abs(whole) + abs(x).max())) + weights
    return (Reference(gradient, abs(dloss) * size),)
