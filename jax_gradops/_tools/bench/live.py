"""The output during a run: lines of results. On a terminal, also the progress and the time left."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any


class Display:
    """Prints lines and the progress. With Rich, on a terminal, `above` makes a table over these.

    Nothing is redrawn during a measurement, because this work would change the times.
    """

    def __init__(self, names: Sequence[str], above: Callable[[int], Any] | None = None) -> None:
        """Takes all names, and a function that makes a table of at most a number of lines."""
        self._names, self._above = names, above
        self._done, self._live = 0, None
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)

    @property
    def console(self) -> Any:
        """Rich's console, or None if Rich is not in use."""
        return self._live and self._live.console

    def __enter__(self) -> Display:
        self._started = time.perf_counter()
        if self._live:
            self._live.start()
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self._clear()

    def print(self, text: str) -> None:
        """Prints a line above the progress."""
        if self._live:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._clear()
            print(text, flush=True)

    def done(self) -> None:
        """Counts one more finished case."""
        self._done += 1
        self._show()

    def status(self) -> str:
        """A text that says how many cases are finished, and the time left."""
        done, total = self._done, len(self._names)
        if done == total:
            return f"{done}/{total}"
        text = f"{done}/{total}  now {self._names[done]}"
        if done:
            seconds = (time.perf_counter() - self._started) / done * (total - done)
            text += f"  {duration(seconds)} left"
        return text

    def _show(self) -> None:
        if self._live:
            from rich.console import Group
            from rich.progress_bar import ProgressBar
            from rich.text import Text

            bar = ProgressBar(max(1, len(self._names)), self._done, width=40)
            lines = [bar, Text(self.status(), no_wrap=True, overflow="ellipsis")]
            if self._above:
                lines.insert(0, self._above(self.console.height - len(lines) - 1))
            self._live.update(Group(*lines), refresh=True)
        elif sys.stderr.isatty():
            print(f"\r{self.status()}\033[K", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if not self._live and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds as a text."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
