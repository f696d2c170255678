"""What `bench` shows and writes: the table, the progress, the JSON."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from jax_gradops._cli.benchmark import peers
from jax_gradops._cli.benchmark.cases import Timed
from jax_gradops._cli.benchmark.measuring import Result
from jax_gradops._cli.benchmark.timing import Timing


def of_copy(result: Result, figure: peers.Figure, name: str) -> float | None:
    """A peer's rate over the copy's, both for the case's minimum of bytes."""
    timings = result.timings.get(figure, {})
    if figure == "latency" or name not in timings or "copy" not in timings:
        return None
    if _is_noise(timings[name]):
        return None
    # The copy moves two whole arrays of float32, at most 8 bytes less than the case.
    return timings["copy"].us / timings[name].us


def best_peer(result: Result, figure: peers.Figure) -> str | None:
    """The fastest competitor of those that are right."""
    others = {
        name: timing
        for name, timing in result.timings.get(figure, {}).items()
        if name not in ("ours", "copy", *result.wrong) and not _is_noise(timing)
    }
    return min(others, key=lambda n: others[n].us) if others else None


def speed_up(result: Result, figure: peers.Figure, peer: str | None) -> float | None:
    """A competitor's time over ours."""
    timings = result.timings.get(figure, {})
    if peer is None or not {"ours", peer} <= timings.keys():
        return None
    if _is_noise(timings["ours"]) or _is_noise(timings[peer]):
        return None
    return timings[peer].us / timings["ours"].us


def _is_noise(timing: Timing) -> bool:
    """Whether a difference of two times is none."""
    return timing.us <= 0


# --- JSON ----------------------------------------------------------------------------------------


def as_json(result: Result) -> dict[str, Any]:
    """One case."""
    case = result.case
    return {
        **case.describe(),
        "bytes": case.bytes,
        "calls": {"cold": result.plan.calls, "warm": result.plan.warm_calls},
        **{
            figure: {
                "peers": {name: _timing(result, figure, name, t) for name, t in timings.items()},
                "best_peer": best_peer(result, figure),
                "speed_up_over_best": speed_up(result, figure, best_peer(result, figure)),
                "speed_up_over_xla": speed_up(result, figure, "xla"),
            }
            for figure, timings in result.timings.items()
        },
        **({"steps": {n: t.us for n, t in result.steps.items()}} if result.steps else {}),
        "errors": result.errors,
        "wrong": result.wrong,
        "failed": result.failed,
    }


def _timing(result: Result, figure: peers.Figure, name: str, timing: Timing) -> dict[str, Any]:
    has_rate = figure != "latency" and not _is_noise(timing)
    return {
        "us": timing.us,
        "p20": timing.p20,
        "p80": timing.p80,
        "gb_per_s": result.case.bytes / timing.us / 1e3 if has_rate else None,
        "fraction_of_copy": of_copy(result, figure, name),
        "host_bound": timing.host_bound,
    }


# --- Table ---------------------------------------------------------------------------------------


class Report:
    """Lines as they come; on a terminal with Rich a bar, and a table at the end."""

    def __init__(self, competitors: Sequence[str], cases: Sequence[Timed]) -> None:
        self._competitors, self._cases = competitors, len(cases)
        self._columns = [
            "case", "figure", "ours µs", "of copy", "copy GB/s",
            *(f"{c} µs" for c in competitors), "best of copy", "over XLA",
        ]  # fmt: skip
        self._widths = [
            max(len(str(c)) for c in cases),
            7,
            18,
            7,
            9,
            *(18 for _ in competitors),
            12,
            8,
        ]
        self._rows: list[list[str]] = []
        self._started, self._done, self._bar = time.perf_counter(), 0, None
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.progress import Progress

            self._bar = Progress(transient=True)
            self._task = self._bar.add_task("compiling", total=len(cases))

    def __enter__(self) -> Report:
        if self._bar:
            self._bar.start()
        else:
            self._print(self._columns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._bar:
            from rich import box
            from rich.table import Table

            self._bar.stop()
            table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
            for i, column in enumerate(self._columns):
                title = column.replace(" ", "\n", 1)
                table.add_column(title, justify="right" if i else "left", no_wrap=True)
            for case, *others in self._rows:  # in two lines each, which fit in 80 columns
                op, dtype, shape = case.rsplit(" ", 2)
                cells = (cell.replace(" (", "\n").rstrip(")") for cell in others)
                table.add_row(f"{op}\n{dtype} {shape}", *cells)
            self._bar.console.print(table)
        elif sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)

    def add(self, result: Result) -> None:
        """Shows a case that is done."""
        self._done += 1
        notes = [result.problem] if result.problem else []
        for what, found in (("is wrong", result.wrong), ("did not run", result.failed)):
            others = ((name, why) for name, why in found.items() if name != "ours")
            notes += [f"{result.case}: {name} {what}: {why}" for name, why in others]
        for figure in result.timings:
            self._add_row(self._row(result, figure))
        if result.steps:
            steps = ", ".join(f"{name} {_spread(t)}" for name, t in result.steps.items())
            notes.append(f"{result.case}: whole steps, µs: {steps}")
        for note in notes:
            self._note(f"  {note}")
        self._show_progress(str(result.case))

    def _note(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def _row(self, result: Result, figure: peers.Figure) -> list[str]:
        timings = result.timings[figure]
        best = best_peer(result, figure)
        best_share = None if best is None else of_copy(result, figure, best)
        over_xla = speed_up(result, figure, "xla")
        ours_share = of_copy(result, figure, "ours")
        return [
            str(result.case),
            figure,
            _spread(timings.get("ours")),
            "" if ours_share is None else f"{ours_share:.2f}",
            _copy_rate(result, figure),
            *(
                ("wrong " if c in result.wrong else "")
                + ("" if c in result.wrong and c not in timings else _spread(timings.get(c)))
                for c in self._competitors
            ),
            "" if best_share is None else f"{best_share:.2f} {best}",
            "" if over_xla is None else f"{over_xla:.2f}×",
        ]

    def _add_row(self, row: list[str]) -> None:
        self._rows.append(row)
        if not self._bar:
            self._print(row)

    def _print(self, row: Sequence[str]) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        first, *others = (f"{c:>{w}}" for c, w in zip(row, self._widths, strict=True))
        print("  ".join([f"{first.strip():<{self._widths[0]}}", *others]), flush=True)

    def _show_progress(self, text: str) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=text)
        elif sys.stderr.isatty():
            left = (time.perf_counter() - self._started) / self._done * (self._cases - self._done)
            print(f"\r{self._done}/{self._cases}, {left:.0f} s left\033[K", end="", file=sys.stderr)


def _copy_rate(result: Result, figure: peers.Figure) -> str:
    copy = result.timings[figure].get("copy")
    return "" if copy is None or figure == "latency" else f"{result.case.bytes / copy.us / 1e3:.0f}"


def _spread(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    digits, fewer = (0 if abs(timing.us) >= limit else 1 for limit in (1000, 100))
    mark = "*" if timing.host_bound else ""
    spread = f"({timing.p20:.{fewer}f}–{timing.p80:.{fewer}f})"
    return f"{timing.us:.{digits}f}{mark} {spread}"
