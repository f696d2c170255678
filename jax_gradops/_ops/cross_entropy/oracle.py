"""Softmax cross-entropy in float64: see `_oracles`. The labels follow from the first operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jax_gradops._oracles import Reference

#: The label of ignored rows, in all forms with the option `ignore_index`.
IGNORE_INDEX = -100


#: Maps logits and `ignore_index` to labels.
LabelsOf: TypeAlias = Callable[[Any, int | None], Any]


def labels_of(logits: Any, ignore_index: int | None = None) -> Any:
    """Equal labels for all rows. With `ignore_index`, every fifth row is ignored."""
    *rows, classes = logits.shape
    labels = np.full(rows, 7919 % max(1, classes))
    if ignore_index is not None:
        labels.flat[4::5] = ignore_index
    return labels.astype(np.int32)


def _parts(
    x: Any, labels_of: LabelsOf, label_smoothing: float, ignore_index: int | None
) -> tuple[Any, ...]:
    """The values that both oracles need, in the order of the last line."""
    xp = x.__array_namespace__()
    labels = xp.asarray(labels_of(x, ignore_index))
    counts = labels != IGNORE_INDEX if ignore_index is not None else labels == labels
    x = xp.where(counts[..., None], x, 0)
    largest = x.max(-1, initial=-math.inf)
    differences = x - largest[..., None]
    total = xp.exp(differences).sum(-1)
    lse = xp.log(xp.where(total == 0, xp.nan, total))  # NaN for no classes
    classes = xp.arange(x.shape[-1], dtype=np.int32).reshape([1] * labels.ndim + [-1])
    is_label = labels[..., None] == classes
    weights = (1 - label_smoothing) * is_label.astype(x.dtype) + label_smoothing / max(
        1, x.shape[-1]
    )
    return x, largest, differences, lse, weights, counts.astype(x.dtype)


def softmax_cross_entropy(
    x: Any,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    labels_of: LabelsOf = labels_of,
) -> Reference:
    """The loss of each row."""
    x, largest, differences, lse, weights, counts = _parts(
        x, labels_of, label_smoothing, ignore_index
    )
    whole = lse + largest
    loss = lse - (weights * differences).sum(-1) + z_loss * whole * whole
    magnitude = abs(lse) + 1 + (weights * abs(differences)).sum(-1)
    magnitude = magnitude + z_loss * (abs(whole) + abs(x).max(-1, initial=0)) ** 2
    return Reference(loss * counts, magnitude * counts)


def softmax_cross_entropy_vjp(
    dloss: Any,
    x: Any,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    labels_of: LabelsOf = labels_of,
) -> tuple[Reference]:
    """The gradient with respect to the logits."""
    xp = x.__array_namespace__()
    x, largest, differences, lse, weights, counts = _parts(
        x, labels_of, label_smoothing, ignore_index
    )
    p = xp.exp(differences - lse[..., None])
    whole = (lse + largest)[..., None]
    dloss = (dloss * counts)[..., None]
    gradient = dloss * (p * (1 + 2 * z_loss * whole) - weights)
    # An error of a difference d is eps |d|.
    size = (
        p
        * (2 + abs(differences))
        * (1 + 2 * z_loss * (abs(whole) + abs(x).max(-1, initial=0, keepdims=True)))
        + weights
    )
    return (Reference(gradient, abs(dloss) * size),)


# --- Of a linear layer ---------------------------------------------------------------------------

#: The number of classes of `matrix`.
CLASSES = 21


def matrix(scale: Any) -> Any:
    """A kernel [features, CLASSES]: `scale` [features] times fixed numbers."""
    features = scale.shape[0]
    angles = np.arange(features)[:, None] * np.arange(1, CLASSES + 1)[None]
    fixed = np.cos(angles) / math.sqrt(max(1, features))
    return scale[:, None] * scale.__array_namespace__().asarray(fixed, dtype=scale.dtype)


def class_of(labels: Any, ignore_index: int | None) -> Any:
    """Labels of any number of classes, as labels of `CLASSES` classes."""
    if ignore_index is None:
        return labels % CLASSES
    return labels.__array_namespace__().where(labels == ignore_index, labels, labels % CLASSES)


def _of(x: Any, labels_of: LabelsOf) -> LabelsOf:
    return lambda _, ignore_index: class_of(labels_of(x, ignore_index), ignore_index)


def linear_softmax_cross_entropy(
    x: Any, scale: Any, *, labels_of: LabelsOf = labels_of, **options: Any
) -> Reference:
    """The loss of each row of the logits ``x @ matrix(scale)``."""
    kernel = matrix(scale)
    loss = softmax_cross_entropy(x @ kernel, labels_of=_of(x, labels_of), **options)
    size = (abs(x) @ abs(kernel)).max(-1)
    return Reference(loss.value, loss.magnitude + 2 * size)


def linear_softmax_cross_entropy_vjp(
    dloss: Any, x: Any, scale: Any, *, labels_of: LabelsOf = labels_of, **options: Any
) -> tuple[Reference, Reference]:
    """The gradients with respect to x and scale."""
    kernel, fixed = matrix(scale), matrix(scale * 0 + 1)
    labels = _of(x, labels_of)
    (dlogits,) = softmax_cross_entropy_vjp(dloss, x @ kernel, labels_of=labels, **options)
    # An error of a logit changes all gradients of its row.
    size = (abs(x) @ abs(kernel)).max(-1)[..., None]
    magnitude = dlogits.magnitude * (1 + 2 * size)
    rows = math.prod(x.shape[:-1])
    wide, value, sizes = (a.reshape(rows, a.shape[-1]) for a in (x, dlogits.value, magnitude))
    return (
        Reference(dlogits.value @ kernel.T, magnitude @ abs(kernel).T),
        Reference((wide.T @ value * fixed).sum(-1), (abs(wide).T @ sizes * abs(fixed)).sum(-1)),
    )
