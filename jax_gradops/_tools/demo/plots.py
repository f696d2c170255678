"""Plots of the training curves. For the GPT: loss and gradient norm over steps."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping

import numpy as np

# Matplotlib logs a message when it builds its font cache. The demo does not show the message.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from jax_gradops._tools.demo.training import History  # noqa: E402

#: Colour and line style of the first and of the second run in a plot.
STYLES = (("#1f6fb4", "-"), ("#d1495b", (0, (4, 3))))


def plot(runs: Mapping[str, History], bigram_entropy: float, title: str) -> bytes:
    """A PNG with the curves of one or more runs; the mapping gives their names."""
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    losses, norms = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title)
    for (name, history), (color, style) in zip(runs.items(), STYLES, strict=False):
        prefix = f"{name}: " if len(runs) > 1 else ""
        curve(losses, history.losses, color, style, f"{prefix}training")
        curve(norms, history.gradient_norms, color, style, f"{prefix}gradient norm")
        points(losses, history.measured, color, style, f"{prefix}validation")
    losses.axhline(
        bigram_entropy,
        color="0.3",
        linestyle=":",
        label=f"bigram entropy of the validation text ({bigram_entropy:.2f})",
    )
    norms.axhline(1.0, color="0.3", linestyle=":", label="clipped to 1")
    losses.set_ylabel("loss (nats per character)")
    norms.set_ylabel("gradient norm before clipping")
    norms.set_xlabel("step")
    norms.set_yscale("log")
    for set_formatter in (norms.yaxis.set_major_formatter, norms.yaxis.set_minor_formatter):
        set_formatter("{x:g}")
    for axes in (losses, norms):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    return png(figure)


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def points(axes: Axes, values: Mapping[int, float], color: str, style: object, label: str) -> None:
    """Draws a marker at some steps. The second run's markers are smaller, so that both are seen."""
    axes.plot(
        list(values),
        list(values.values()),
        marker="o",
        markersize=6 if style == "-" else 3,
        linestyle="none",
        color=color,
        markeredgecolor="black",
        label=label,
    )


def curve(axes: Axes, values: list[float], color: str, style: object, label: str) -> None:
    """Draws each step's value as a thin line, and the running mean as a thick line."""
    steps = np.arange(1, len(values) + 1)
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    width = max(1, len(values) // 50)
    if len(values) >= width:
        sums = np.cumsum(np.concatenate([np.zeros(1), values]))
        means = (sums[width:] - sums[:-width]) / width
        middle = steps[width // 2 :][: len(means)]
        axes.plot(middle, means, color=color, linestyle=style, linewidth=1.6, label=label)  # pyright: ignore[reportArgumentType]
