"""A run's results as comma-separated values. Each figure of each peer has one line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from jax_gradops._tools.bench.cases import shape_text
from jax_gradops._tools.bench.report import FIGURES

_OPS = ("op", "form", "direction", "dtype", "shape", "layout")
_CLIP = ("form", "tree", "dtype", "clipping")
_FIGURES = ("us", "p20", "p80", "gb_per_s", "fraction_of_copy", "host_bound")
_TRAIN = ("model", "dtype", "shape")
_VARIANT = (
    "examples_per_s", "memory_bytes", "temporary_bytes", "losses_off_by", "compile_seconds",
    "host_bound",
)  # fmt: skip
_SPREAD = ("median", "p20", "p80")


def text(content: dict[str, Any]) -> str:
    """The table of a run's content. `record` defines the content."""
    rows = list((_of_training if content["suite"] == "train" else _of_peers)(content))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else ["device"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _of_peers(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = _CLIP if content["suite"] == "clip" else _OPS
    for result in content["results"]:
        case = {name: result[name] for name in names}
        if "shape" in case:
            case["shape"] = shape_text(case["shape"])
        for figure in FIGURES:
            for peer, timing in result.get(figure, {}).get("peers", {}).items():
                yield {
                    "device": content["device"],
                    **case,
                    "bytes": result["bytes"],
                    "figure": figure,
                    "peer": peer,
                    **{name: timing[name] for name in _FIGURES},
                    "error": result["errors"].get(peer),
                    "wrong": result["wrong"].get(peer),
                }


def _of_training(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for result in content["results"]:
        for name, variant in result["variants"].items():
            ms, over = variant["ms"] or {}, variant["over_stock"] or {}
            yield {
                "device": content["device"],
                **{n: result[n] for n in _TRAIN},
                "shape": shape_text(result["shape"]),
                "vocabulary": result.get("vocabulary"),
                "variant": name,
                **{f"ms_{s}": ms.get(s) for s in _SPREAD},
                **{f"over_stock_{s}": over.get(s) for s in _SPREAD},
                **{n: variant.get(n) for n in _VARIANT},
                "wrong": result["wrong"].get(name),
            }
