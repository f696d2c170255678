"""The lines that `bench --suite train` shows, and the JSON that it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_gradops._tools.bench.live import Display
from jax_gradops._tools.bench.timing import Timing
from jax_gradops._tools.bench.train_measuring import Result, Variant
from jax_gradops._tools.bench.train_profile import Group

_COLUMNS = {
    "case": 32, "variant": 12, "ms a step": 24, "rate": 17, "memory GB": 10,
    "temporary GB": 12, "over stock": 22, "losses off by": 14, "compile s": 10, "kernel calls": 0,
}  # fmt: skip
_SHOWN_LOSSES = 11  # points of a curve: the first, the last and some between; --json has all
_SHOWN_KERNELS = 20  # kernels of a profile


def as_json(result: Result) -> dict[str, Any]:
    """One case as JSON."""
    return {
        "case": str(result.case),
        **result.case.describe(),
        "unit": result.setup.unit,
        "variants": {name: _variant(result, v) for name, v in result.variants.items()},
        "noise": result.noise,
        "wrong": result.wrong,
        "failed": result.failed,
        "problem": result.problem,
    }


def _variant(result: Result, variant: Variant) -> dict[str, Any]:
    time, over = variant.time, variant.over_stock
    return {
        "ms": time and dict(zip(("median", "p20", "p80"), _ms(time), strict=True)),
        "host_bound": time and time.host_bound,
        "examples_per_s": _rate(result, variant),
        "over_stock": over and dict(zip(("median", "p20", "p80"), over, strict=True)),
        "memory_bytes": variant.memory and variant.memory.peak,
        "temporary_bytes": variant.memory and variant.memory.temporary,
        "kernel_calls": variant.kernel_calls,
        "compile_seconds": variant.compile_seconds,
        "losses": variant.losses,
        "losses_off_by": variant.off,
        "profile": variant.profile and [_group(group) for group in variant.profile],
    }


def _group(group: Group) -> dict[str, Any]:
    kernels = [dataclasses.asdict(kernel) for kernel in group.kernels]
    return {"group": group.name, "calls": group.calls, "ms": group.ms, "kernels": kernels}


def _ms(time: Timing) -> tuple[float, float, float]:
    return time.us / 1e3, time.p20 / 1e3, time.p80 / 1e3


def _rate(result: Result, variant: Variant) -> float | None:
    return result.setup.examples / variant.time.us * 1e6 if variant.time else None


class Report:
    """Prints a line for each result."""

    def __init__(
        self,
        competitors: Sequence[str],
        names: Sequence[str],
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Takes the names of the cases to run, and the results of an earlier run."""
        del competitors
        self._display, self._earlier = Display(names), earlier

    def __enter__(self) -> Report:
        self._row(list(_COLUMNS))
        for result in self._earlier:
            self._show(result)
        self._display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._display.__exit__(*error)

    def add(self, result: dict[str, Any]) -> None:
        """Shows a finished case."""
        self._show(result)
        self._display.done()

    def _show(self, result: dict[str, Any]) -> None:
        variants = result["variants"].items()
        for name, variant in variants:
            self._row(_cells(result, name, variant))
        for name, variant in variants:
            if variant["losses"]:
                self._curve(f"losses, {name}", variant["losses"])
        if result["noise"]:
            most = max(result["noise"])
            what = f"stock off by up to {most:.2g}, with its first parameters rounded"
            self._curve(what, result["noise"])
        for name, variant in variants:
            if variant["profile"] is not None:
                self._profile(f"{result['case']} {name}", variant["profile"])
        if result["problem"]:
            self._display.print(f"  {result['problem']}")

    def _row(self, row: Sequence[str]) -> None:
        first, second, *others, last = zip(row, _COLUMNS.values(), strict=True)
        left = "  ".join(f"{text:<{width}}" for text, width in (first, second))
        right = "  ".join(f"{text:>{width}}" for text, width in others)
        self._display.print(f"{left}  {right}  {last[0]}")

    def _curve(self, what: str, values: Sequence[float]) -> None:
        last = len(values) - 1
        count = min(_SHOWN_LOSSES, len(values))
        shown = [round(i * last / max(count - 1, 1)) for i in range(count)]
        where = f" (steps {', '.join(str(i + 1) for i in shown)})" if count <= last else ""
        self._display.print(f"  {what}{where}: {' '.join(f'{values[i]:.4g}' for i in shown)}")

    def _profile(self, what: str, groups: Sequence[dict[str, Any]]) -> None:
        """Prints the groups of kernels, then the slowest kernels."""
        total = sum(group["ms"] for group in groups)
        self._display.print(
            f"\n  {what}: kernels of a step{'' if groups else ': the trace has none'}"
        )
        self._display.print(f"  {'calls':>9} {'ms':>9} {'%':>6}  group, or kernel [group]")
        kernels = [
            (f"{kernel['name']} [{group['group']}]", kernel)
            for group in groups
            for kernel in group["kernels"]
        ]
        kernels.sort(key=lambda line: -line[1]["ms"])
        shown = [*((group["group"], group) for group in groups), *kernels[:_SHOWN_KERNELS]]
        for name, found in shown:
            share = 100 * found["ms"] / max(total, 1e-9)
            self._display.print(
                f"  {found['calls']:>9.1f} {found['ms']:>9.3f} {share:>6.1f}  {name}"
            )


def _cells(result: dict[str, Any], name: str, variant: dict[str, Any]) -> list[str]:
    ms, over, rate = variant["ms"], variant["over_stock"], variant["examples_per_s"]
    memory = (variant["memory_bytes"], variant.get("temporary_bytes"))  # old files have the first
    off = variant["losses_off_by"]
    calls = (f"{count} {kernel}" for kernel, count in variant["kernel_calls"].items())
    mark = "*" if variant["host_bound"] else ""
    return [
        result["case"],
        name,
        "{median:.2f}{mark} ({p20:.2f}–{p80:.2f})".format(**ms, mark=mark) if ms else "-",
        f"{rate:.0f} {result['unit']}/s" if rate else "-",
        *("-" if size is None else f"{size / 1e9:.2f}" for size in memory),
        "{median:.3f}× ({p20:.3f}–{p80:.3f})".format(**over) if over else "-",
        "-" if off is None else f"{off:.1e}",
        f"{variant['compile_seconds']:.1f}",
        ", ".join(calls) or "none",
    ]
