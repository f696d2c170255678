"""The training loop, and the curves that it records."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jax_gradops._tools.demo.settings import Settings
from jax_gradops._tools.demo.trainable import Metrics, Trainable, TrainState

# How many steps are queued on the device before the oldest step's results are read.
_LAG = 4


@dataclasses.dataclass
class History:
    """The curves of a run so far."""

    losses: list[float] = dataclasses.field(default_factory=list)
    gradient_norms: list[float] = dataclasses.field(default_factory=list)
    # The measured values (`Settings.measure`) by step number.
    measured: dict[int, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, because JSON objects have no integer keys."""
        return dataclasses.asdict(self) | {"measured": list(self.measured.items())}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> History:
        """Reverses `to_json`."""
        return cls(data["losses"], data["gradient_norms"], dict(data["measured"]))


def train(
    program: Trainable[Any],
    state: TrainState,
    history: History,
    *,
    report: Callable[[int, History, float], None],
    stop: Callable[[], bool],
) -> tuple[TrainState, float]:
    """Trains until the last step, or until `stop` returns True.

    Args:
      program: the program to train.
      state: the first state. The training takes over its memory.
      history: the curves of the run so far. The training extends them.
      report: is called with each step's number, the curves, and the units per second.
      stop: is called before each step.

    Returns:
      The last state, and the units per second. This rate leaves out the time of compilation, of the
        first step and of evaluation.
    """
    settings = program.settings
    begin = step = timed = int(state.step)
    waiting: collections.deque[Metrics] = collections.deque()
    seconds, resumed = 0.0, time.perf_counter()

    def speed() -> float:
        elapsed = seconds + time.perf_counter() - resumed
        return (len(history.losses) - timed) * settings.units_per_step / max(elapsed, 1e-9)

    def read(allowed: int) -> None:
        while len(waiting) > allowed:
            metrics = waiting.popleft()
            history.losses.append(float(metrics.loss))
            history.gradient_norms.append(float(metrics.gradient_norm))
            report(len(history.losses), history, speed())

    while step < settings.steps and not stop():
        state, metrics = program.train_step(state)
        step += 1
        waiting.append(metrics)
        read(0 if step == begin + 1 else _LAG)
        if step == begin + 1:  # the clock starts after the first step, which may load kernels
            timed, resumed = step, time.perf_counter()
        if _evaluates(step, settings):
            read(0)
            seconds += time.perf_counter() - resumed
            history.measured[step] = program.evaluate(state)
            resumed = time.perf_counter()
            report(step, history, speed())
    read(0)
    return state, speed()


def _evaluates(step: int, settings: Settings) -> bool:
    interval = max(1, -(-settings.steps // settings.evaluations))
    return step == settings.steps or step % interval == 0
