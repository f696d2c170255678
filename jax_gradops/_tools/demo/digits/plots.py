"""Plots of the digits task: loss and accuracy over steps, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps

from jax_gradops._tools.demo.plots import STYLES, Figure, curve, png, points
from jax_gradops._tools.demo.training import History


def training(runs: Mapping[str, History], title: str) -> bytes:
    """A PNG with the curves of one or more runs; the mapping gives their names."""
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    losses, accuracies = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title)
    for (name, history), (color, style) in zip(runs.items(), STYLES, strict=False):
        prefix = f"{name}: " if len(runs) > 1 else ""
        curve(losses, history.losses, color, style, f"{prefix}training")
        percent = {step: 100 * value for step, value in history.measured.items()}
        points(
            accuracies, percent, color, style, f"{prefix}test, {list(percent.values())[-1]:.1f} %"
        )
    accuracies.axhline(98, color="0.3", linestyle=":", label="98 %")
    losses.set_ylabel("cross-entropy (nats per image)")
    losses.set_yscale("log")
    accuracies.set_ylabel("accuracy (%)")
    accuracies.set_xlabel("step")
    losses.legend(loc="upper right")
    accuracies.legend(loc="lower right")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
    return png(figure)


def confusion(counts: np.ndarray, title: str) -> bytes:
    """A PNG of the confusion matrix: correct classifications are blue, mistakes orange."""
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    right = np.eye(len(counts), dtype=bool)
    wrong = np.where(right, 0, counts)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    shade = np.where(right, 0.75 * shares, 0.25 + 0.5 * wrong / max(1, wrong.max()))
    blue, orange = colormaps["Blues"](shade), colormaps["Oranges"](shade)
    colors = np.where(right[..., None], blue, orange)
    colors[counts == 0] = 1
    axes.imshow(colors)
    for (row, column), count in np.ndenumerate(counts):
        dark = shade[row, column] > 0.5 and count
        axes.text(
            column,
            row,
            f"{count}" if count else "·",
            color="white" if dark else "black" if count else "0.6",
            ha="center",
            va="center",
            fontsize=13,
        )
    axes.set(xticks=range(len(counts)), yticks=range(len(counts)))
    axes.set_xticks(np.arange(0.5, len(counts) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(counts) - 1), minor=True)
    axes.grid(which="minor", color="0.9")
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("taken for")
    axes.set_ylabel("digit")
    total = np.sum(counts)
    axes.set_title(f"{title}\n{np.trace(counts)} of {total} test images right (blue)")
    return png(figure)
