"""The output of the demo during training, and its stop by Ctrl-C."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from jax_gradops._tools.demo.settings import Settings
from jax_gradops._tools.demo.training import History

# Seconds between two printed lines if the output is not a terminal.
_INTERVAL = 10.0


def say(text: str = "", *, file: Any = None) -> None:
    """Prints a text. Characters that cannot be shown are replaced."""
    file = sys.stdout if file is None else file
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(shown.encode(encoding, "replace").decode(encoding), file=file, flush=True)


class Reporter:
    """Shows a progress bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, label: str, begin: int, settings: Settings) -> None:
        self._label = f"{label}  " if label else ""
        self._settings, self._begin = settings, begin
        self._started = self._shown = time.perf_counter()
        self._measured = 0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns: list[ProgressColumn] = [
                *([TextColumn(label)] if label else []),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            ]
            self._bar = Progress(*columns, console=Console(file=sys.stdout), expand=True)
            self._task = self._bar.add_task(
                label, total=settings.steps, completed=begin, numbers=""
            )

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, step: int, history: History, speed: float) -> None:
        """Shows one step. `jax_gradops._tools.demo.training.train` calls this function."""
        loss, norm, settings = history.losses[-1], history.gradient_norms[-1], self._settings
        measured = f"{list(history.measured.values())[-1]:.3f}" if history.measured else "-"
        rate = f"{speed:,.0f} {settings.unit}/s"
        if self._bar:  # the line must fit in 80 columns
            short = settings.measure_short
            numbers = f"loss {loss:.3f}  {short} {measured}  norm {norm:.2f}  {rate}"
            self._bar.update(self._task, completed=step, numbers=numbers)
            return
        now = time.perf_counter()
        evaluated = len(history.measured) > self._measured and step in history.measured
        if evaluated or now - self._shown >= _INTERVAL:
            self._shown, self._measured = now, len(history.measured)
            done = max(1, step - self._begin)
            left = (now - self._started) / done * (settings.steps - step)
            say(
                f"{self._label}step {step}/{settings.steps}  loss {loss:.3f}  {settings.measure} "
                f"{measured}  gradient norm {norm:.2f}  {rate}  {left:.0f} s left"
            )


class StopOnInterrupt:
    """The first Ctrl-C asks for a stop after the current step. A second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        try:
            self._previous = signal.signal(signal.SIGINT, self._interrupt)
        except ValueError:  # this is not the main thread: only the main thread gets signals
            self._previous = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
