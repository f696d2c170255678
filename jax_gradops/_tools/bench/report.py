"""The table of `bench` for the suites "ops" and "clip", made from the JSON results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_gradops._tools.bench.live import Display

FIGURES = ("cold", "warm", "latency")
_LINES_OF_ROW = 2  # each row takes two lines, to fit in 80 columns
_LINES_OF_HEAD = 4


class Report:
    """Prints a line for each result. On a terminal with Rich, shows a growing table."""

    def __init__(
        self,
        competitors: Sequence[str],
        names: Sequence[str],
        earlier: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Takes the names of the cases to run, and the results of an earlier run."""
        self._competitors = competitors
        self._columns = [
            "case", "figure", "ours µs", "of copy", "copy GB/s",
            *(f"{c} µs" for c in competitors), "best of copy", "over XLA",
        ]  # fmt: skip
        self._widths = [
            max(map(len, [*names, *(r["case"] for r in earlier)]), default=4),
            7,
            18,
            7,
            9,
            *(18 for _ in competitors),
            12,
            8,
        ]
        self._rows: list[list[str]] = []
        self._earlier = earlier
        self._display = Display(names, self._last_rows)

    def __enter__(self) -> Report:
        if not self._display.console:
            self._print(self._columns)
        for result in self._earlier:
            self._show(result)
        self._display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._display.__exit__(*error)
        if self._display.console:
            self._display.console.print(self._table(self._rows))

    def add(self, result: dict[str, Any]) -> None:
        """Shows a finished case."""
        self._show(result)
        self._display.done()

    def _show(self, result: dict[str, Any]) -> None:
        case = result["case"]
        notes = [result["problem"]] if result["problem"] else []
        for what, found in (("is wrong", result["wrong"]), ("did not run", result["failed"])):
            others = ((name, why) for name, why in found.items() if name != "ours")
            notes += [f"{case}: {name} {what}: {why}" for name, why in others]
        for figure in FIGURES:
            if figure in result:
                self._rows.append(self._row(result, figure))
                if not self._display.console:
                    self._print(self._rows[-1])
        if "steps" in result:
            steps = ", ".join(f"{name} {_spread(t)}" for name, t in result["steps"].items())
            notes.append(f"{case}: whole steps, µs: {steps}")
        for note in notes:
            self._display.print(f"  {note}")

    def _last_rows(self, lines: int) -> Any:
        count = max(1, (lines - _LINES_OF_HEAD) // _LINES_OF_ROW)
        return self._table(self._rows[-count:])

    def _table(self, rows: Sequence[Sequence[str]]) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for i, column in enumerate(self._columns):
            title = column.replace(" ", "\n", 1)
            table.add_column(title, justify="right" if i else "left", no_wrap=True)
        for case, *others in rows:
            op, dtype, shape = case.rsplit(" ", 2)
            cells = (cell.replace(" (", "\n").rstrip(")") for cell in others)
            table.add_row(f"{op}\n{dtype} {shape}", *cells)
        return table

    def _row(self, result: dict[str, Any], figure: str) -> list[str]:
        timed, wrong = result[figure], result["wrong"]
        peers = timed["peers"]
        shown = [
            c for c in self._competitors if c not in wrong and peers.get(c, {"us": 0})["us"] > 0
        ]
        best = min(shown, key=lambda c: peers[c]["us"], default=None)

        def share(name: str | None) -> float | None:
            return peers.get(name, {}).get("fraction_of_copy")

        rate = peers.get("copy", {}).get("gb_per_s")
        best_share, over_xla = share(best), timed["speed_up_over_xla"]
        return [
            result["case"],
            figure,
            _spread(peers.get("ours")),
            "" if (own := share("ours")) is None else f"{own:.2f}",
            "" if rate is None else f"{rate:.0f}",
            *(
                ("wrong " if c in wrong else "")
                + ("" if c in wrong and c not in peers else _spread(peers.get(c)))
                for c in self._competitors
            ),
            "" if best_share is None else f"{best_share:.2f} {best}",
            "" if over_xla is None else f"{over_xla:.2f}×",
        ]

    def _print(self, row: Sequence[str]) -> None:
        first, *others = (f"{c:>{w}}" for c, w in zip(row, self._widths, strict=True))
        self._display.print("  ".join([f"{first.strip():<{self._widths[0]}}", *others]))


def _spread(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return "-"
    us, p20, p80 = timing["us"], timing["p20"], timing["p80"]
    digits, fewer = (0 if abs(us) >= limit else 1 for limit in (1000, 100))
    mark = "*" if timing["host_bound"] else ""
    return f"{us:.{digits}f}{mark} ({p20:.{fewer}f}–{p80:.{fewer}f})"
