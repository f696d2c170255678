"""Plots of a run's results. A peer has one colour and one marker in all plots."""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_gradops._tools.bench import record
from jax_gradops._tools.bench.cases import DTYPES, SHORT_DTYPES, shape_text
from jax_gradops._tools.bench.errors import BenchError

FORMATS = (".svg", ".png", ".pdf")


class Style(NamedTuple):
    """The label, colour and marker of a peer."""

    label: str
    color: str
    marker: str


# The palette of Okabe and Ito, olive and grey: colour-blind readers can tell the colours apart.
STYLES = {
    "ours": Style("jax_gradops", "#E69F00", "o"),
    "xla": Style("XLA", "#CC79A7", "s"),
    "flax": Style("Flax", "#0072B2", "^"),
    "optax": Style("Optax", "#0072B2", "v"),
    "torch": Style("PyTorch", "#D55E00", "D"),
    "cudnn": Style("cuDNN", "#000000", "P"),
    "triton": Style("Triton", "#009E73", "X"),
    "liger": Style("Liger", "#999933", "<"),
    "quack": Style("QuACK", "#666666", ">"),
    # Variants of training steps.
    "stock": Style("Flax and Optax", "#0072B2", "^"),
    "jax_gradops": Style("jax_gradops", "#E69F00", "o"),
    "linear_loss": Style("jax_gradops, no array of logits", "#56B4E9", "P"),
    "stock_loss": Style("jax_gradops, Optax's loss", "#D55E00", "v"),
    "unfused": Style("jax_gradops, not fused", "#009E73", "s"),
    "save_output": Style("jax_gradops, from results", "#CC79A7", "D"),
    "fuse": Style("Flax, jax_gradops.fuse", "#000000", "X"),
}
_SHOWN = ("jax_gradops", "jax", "flax", "optax", "torch", "triton", "liger_kernel", "quack_kernels")
_COPY = {"color": "0.35", "linestyle": (0, (5, 3)), "linewidth": 1.0, "zorder": 1}
_INCHES = 9.2  # the width of a README on GitHub; letters have about its size
_SMALL: Any = {"font.size": 8.5, "axes.titlesize": 9, "axes.labelsize": 8.5, "axes.linewidth": 0.6}
_SVG: Any = {"svg.hashsalt": "jax_gradops"}  # equal figures give equal files


def check(path: Path) -> None:
    """Raises BenchError if the plot could not be written."""
    if path.suffix.lower() not in FORMATS:
        raise BenchError(f"--plot {path}: expected a name that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs Matplotlib: pip install matplotlib")


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes the plot of a run's content. `record` defines the content."""
    import matplotlib

    kind = path.suffix.lower().removeprefix(".")
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SVG):
        metadata = {"Date": None} if kind == "svg" else {"CreationDate": None}
        options = {} if kind == "png" else {"metadata": metadata}
        draw(content).savefig(buffer, format=kind, dpi=150, **options)
    record.write(path, buffer.getvalue())


def draw(content: dict[str, Any]) -> Any:
    """The plot as a Matplotlib figure; raises BenchError if there is nothing to plot."""
    # Matplotlib logs a message when it builds its font cache. The message is not shown.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    draw_suite = {"ops": _draw_ops, "clip": _draw_clips, "train": _draw_training}
    with matplotlib.rc_context(_SMALL):
        return draw_suite[content["suite"]](content)


def _figure(height: float, **options: Any) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(
        figsize=(_INCHES, height), layout="constrained", **options
    )


def _finish(
    figure: Any, content: dict[str, Any], title: str, drawn: Sequence[Any], note: str = ""
) -> Any:
    """Adds the title, the legend, and a line with the note, the machine and the versions."""
    versions = content["versions"]
    shown = (
        "jax_gradops",
        "jax",
        "flax",
        "optax",
        "torch",
        "triton",
        "liger_kernel",
        "quack_kernels",
    )
    device = content["processor"] if content["platform"] == "cpu" else content["device"]
    text = ", ".join([device, *(f"{p} {versions[p]}" for p in shown if versions.get(p))])
    text = f"{note}; {text}" if note else text
    figure.suptitle(f"{title}\n", fontsize=10.5, fontweight="bold")
    figure.text(
        0.5, 0.995 - 0.26 / figure.get_figheight(), text, ha="center", va="top", color="0.35"
    )
    figure.legend(
        handles=drawn, loc="outside lower center", ncols=max(1, len(drawn)), frameon=False
    )
    return figure


# --- Ops: rates over widths ----------------------------------------------------------------------


def _draw_ops(content: dict[str, Any]) -> Any:
    """Draws a row of panels for each op, and a column for each dtype and direction."""
    found = {f: [r for r in content["results"] if f in r] for f in ("cold", "warm")}
    figure_name = max(found, key=lambda f: len(found[f]))  # large arrays on a GPU have only "cold"
    results = found[figure_name]
    if not results:
        raise BenchError("nothing to plot: no case was measured")
    rows = list(dict.fromkeys((r["op"], r["form"], r["layout"]) for r in results))
    columns = sorted(
        {(r["dtype"], r["direction"]) for r in results},
        key=lambda column: (DTYPES.index(column[0]), column[1] != "fwd"),
    )
    figure = _figure(1.05 + 1.45 * len(rows))
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    peers = {}
    for i, row in enumerate(rows):
        for j, (dtype, direction) in enumerate(columns):
            axes = panels[i][j]
            chosen = [
                r
                for r in results
                if (r["op"], r["form"], r["layout"]) == row
                and (r["dtype"], r["direction"]) == (dtype, direction)
            ]
            if not chosen:
                axes.set_axis_off()
                continue
            peers |= _draw_panel(axes, chosen, figure_name)
            if i == 0 or not panels[i - 1][j].axison:
                way = {"fwd": "forward", "bwd": "backward"}[direction]
                axes.set_title(f"{SHORT_DTYPES[dtype]} {way}")
            if i == len(rows) - 1:
                axes.set_xlabel("channels" if row[2] else "width")
        first = next(axes for axes in panels[i] if axes.axison)
        first.set_ylabel("\n".join(filter(None, row)))
        first.tick_params(labelleft=True)
    panels[0][0].set_ylim(0, max(1.12, *(panel.get_ylim()[1] for panel in panels.flat)))
    note = {"cold": "nothing is in the cache", "warm": "all is in the cache"}[figure_name]
    title = "Fraction of memory bandwidth, copy = 1"
    order = [name for name in STYLES if name in peers]
    return _finish(figure, content, title, [*(peers[n] for n in order), peers["copy"]], note)


def _draw_panel(axes: Any, results: Sequence[dict[str, Any]], figure: str) -> dict[str, Any]:
    """Draws the largest shape of each width: a line per peer, or bars if there is one width.

    Returns the lines or bars by name.
    """
    largest: dict[int, dict[str, Any]] = {}
    for result in sorted(results, key=lambda r: r["bytes"]):
        largest[result["shape"][1 if result["layout"] == "nchw" else -1]] = result
    widths = sorted(largest)
    drawn = {"copy": axes.axhline(1.0, label="a copy", **_COPY)}
    all_timed = {}
    for name in STYLES:
        timed = {w: largest[w][figure]["peers"].get(name) for w in widths}
        timed = {w: t for w, t in timed.items() if t and t["fraction_of_copy"]}
        if timed:
            all_timed[name] = timed
    if len(widths) == 1:
        drawn |= _draw_bars(axes, {name: t[widths[0]] for name, t in all_timed.items()})
        axes.set_xticks([(len(all_timed) - 1) / 2], [f"{widths[0]}"])
        axes.tick_params(axis="x", length=0)
        return drawn
    for name, timed in all_timed.items():
        drawn[name] = _draw_line(axes, name, timed)
    axes.set_xscale("log", base=2)
    every = -(-len(widths) // 4)
    axes.set_xticks(widths[::every], [f"{w}" for w in widths[::every]])
    axes.set_xticks(widths, minor=True, labels=[""] * len(widths))
    axes.grid(alpha=0.25, linewidth=0.5)
    return drawn


def _spread(timed: dict[str, Any]) -> tuple[float, float]:
    """The fractions of copy at the 80th and at the 20th percentile of the times."""
    scaled = timed["fraction_of_copy"] * timed["us"]
    return scaled / timed["p80"], scaled / timed["p20"]


def _draw_line(axes: Any, name: str, timed: dict[int, dict[str, Any]]) -> Any:
    style, own = STYLES[name], name == "ours"
    low, high = zip(*map(_spread, timed.values()), strict=True)
    axes.fill_between(list(timed), low, high, color=style.color, alpha=0.2, linewidth=0)
    (line,) = axes.plot(
        list(timed),
        [t["fraction_of_copy"] for t in timed.values()],
        color=style.color,
        marker=style.marker,
        markersize=4.5 if own else 3.5,
        linewidth=2.0 if own else 1.1,
        zorder=4 if own else 3,
        label=style.label,
    )
    return line


def _draw_bars(axes: Any, timed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    drawn = {}
    for i, (name, time) in enumerate(timed.items()):
        middle, (low, high) = time["fraction_of_copy"], _spread(time)
        drawn[name] = axes.bar(
            i,
            middle,
            0.8,
            yerr=[[middle - low], [high - middle]],
            ecolor="0.3",
            color=STYLES[name].color,
            label=STYLES[name].label,
            zorder=2,
        )
        axes.text(
            i, 0.03, f"{middle:.2f}", ha="center", va="bottom", rotation=90, fontsize=7, zorder=3
        )
    axes.grid(axis="y", alpha=0.25, linewidth=0.5)
    return drawn


# --- Clipping: bars of rates ---------------------------------------------------------------------


def _draw_clips(content: dict[str, Any]) -> Any:
    results = [r for r in content["results"] if "cold" in r or "warm" in r]
    if not results:
        raise BenchError("nothing to plot: no case was measured")
    figure = _figure(1.3 + 0.42 * len(results))
    axes = figure.subplots()
    labels = []
    drawn = {"copy": axes.axvline(1.0, label="a copy", **_COPY)}

    def peers_of(result: dict[str, Any]) -> dict[str, Any]:
        return result.get("cold", result.get("warm", {}))["peers"]

    for i, result in enumerate(results):
        what = "" if result["clipping"] else ", nothing to clip"
        dtype = SHORT_DTYPES.get(result["dtype"], result["dtype"])
        labels.append(f"{result['form']}{what}\n{result['tree']} {dtype}")
        bars = [n for n in STYLES if peers_of(result).get(n, {}).get("fraction_of_copy")]
        for j, name in enumerate(bars):
            height = 0.8 / len(bars)
            wrong = name in result["wrong"]
            # For clips, the peer "xla" is Optax's clip.
            style = STYLES["optax" if name == "xla" else name]
            bar = axes.barh(
                i - 0.4 + (j + 0.5) * height,
                peers_of(result)[name]["fraction_of_copy"],
                height,
                color=style.color,
                hatch="////" if wrong else None,
                edgecolor="white",
                label=style.label,
            )
            if name not in drawn or not wrong:
                drawn[name] = bar
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("fraction of copy (hatched: the result is wrong)")
    axes.grid(axis="x", alpha=0.25, linewidth=0.5)
    title = "Clipping by global norm: fraction of memory bandwidth, copy = 1"
    return _finish(figure, content, title, list(drawn.values()))


# --- Training: speed and losses ------------------------------------------------------------------


def _draw_training(content: dict[str, Any]) -> Any:
    results = [r for r in content["results"] if any(v["ms"] for v in r["variants"].values())]
    if not results:
        raise BenchError("nothing to plot: no case was measured")
    figure = _figure(0.9 + 2.4 * len(results))
    drawn: dict[str, Any] = {}
    all_panels = figure.subplots(len(results), 2, squeeze=False)
    for (bars, curves), result in zip(all_panels, results, strict=True):
        variants = {n: v for n, v in result["variants"].items() if v["ms"]}
        for i, (name, variant) in enumerate(variants.items()):
            ms, style = variant["ms"], STYLES[name]
            spread = [[ms["median"] - ms["p20"]], [ms["p80"] - ms["median"]]]
            bars.barh(i, ms["median"], 0.7, color=style.color, xerr=spread, ecolor="0.3")
            over = variant["over_stock"]
            text = f" {over['median']:.3f}×" if over and name != "stock" else ""
            bars.text(0, i, f"  {ms['median']:.4g} ms{text}", va="center", color="black")
            steps = range(1, 1 + len(variant["losses"]))
            dashes = (0, (4, 1 + i)) if i else "-"
            (drawn[name],) = curves.plot(
                steps, variant["losses"], color=style.color, linestyle=dashes, label=style.label,
                linewidth=2.2 - 0.4 * i,
            )  # fmt: skip
        dtype = SHORT_DTYPES[result["dtype"]]
        words = f", {result['vocabulary']} words" if "vocabulary" in result else ""
        bars.set_title(f"{result['model']} {dtype}, batch {shape_text(result['shape'])}{words}")
        bars.set_yticks([])
        bars.invert_yaxis()
        bars.set_xlabel("milliseconds of a step; over Flax and Optax")
        curves.set_title("loss")
        curves.set_xlabel("step")
        curves.xaxis.get_major_locator().set_params(integer=True)
        curves.grid(alpha=0.25, linewidth=0.5)
    title = "Training steps; shorter is better"
    return _finish(figure, content, title, list(drawn.values()))
