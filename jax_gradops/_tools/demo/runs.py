"""A run of the demo from its settings to its results."""

from __future__ import annotations

import abc
import csv
import dataclasses
import io
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias

import jax
import numpy as np

import jax_gradops
from jax_gradops._cli import INTERRUPTED
from jax_gradops._tools.demo import checkpoint, files
from jax_gradops._tools.demo.progress import Reporter, StopOnInterrupt, say
from jax_gradops._tools.demo.settings import OUTPUTS
from jax_gradops._tools.demo.trainable import S, Trainable, TrainState
from jax_gradops._tools.demo.training import History, train

Implementation: TypeAlias = Literal["ffi", "xla"] | None
_CALL = 'custom_call_target="jax_gradops.'


class Run(abc.ABC, Generic[S]):
    """A run whose settings have been checked and whose folder exists."""

    def __init__(
        self, folder: Path, settings: S, data: str, platform: str, mesh: jax.sharding.Mesh | None
    ) -> None:
        self._folder, self._settings, self._mesh = folder, settings, mesh
        self._platform = platform
        self._title = f"{data}, on {platform}, {settings.precision}"

    @abc.abstractmethod
    def _introduce(self) -> None:
        """Prints what the run will do."""

    @abc.abstractmethod
    def _program(self, implementation: Implementation) -> Trainable[S]:
        """The program that is trained."""

    @abc.abstractmethod
    def _judgement(self, history: History) -> str:
        """A sentence that says how good the last measured value is."""

    @abc.abstractmethod
    def _plot(self, histories: Mapping[str, History]) -> bytes:
        """A PNG with the curves of one or more runs; the mapping gives their names."""

    @abc.abstractmethod
    def _write_examples(self, program: Any, state: TrainState) -> None:
        """Writes files that show what the trained model does."""

    def _about_data(self) -> dict[str, Any]:
        """The facts about the data that a checkpoint records."""
        return {}

    def train(self, implementation: Implementation, saved: dict[str, Any] | None) -> int:
        """Trains from the start or from the checkpoint `saved`; returns the exit status."""
        self._introduce()
        if not saved and checkpoint.exists(self._folder):
            say(
                f"{self._folder} has the checkpoint of an earlier run. --resume goes on with that "
                f"run. This run keeps the checkpoint as {checkpoint.previous(self._folder)}"
            )
        unit = self._settings.unit
        program, state = self._compile(implementation)
        history = History()
        if saved:
            history = History.from_json(saved["history"])
            state = checkpoint.load_state(self._folder, state)
            say(f"Resuming at step {len(history.losses)} of {self._settings.steps}")
        with StopOnInterrupt() as interrupt:
            with Reporter("", len(history.losses), self._settings) as report:
                state, speed = train(
                    program, state, history, report=report, stop=lambda: interrupt.requested
                )
            path = checkpoint.save(self._folder, state, self._about(history), keep=not saved)
        if interrupt.requested:
            say(f"Stopped at step {len(history.losses)} of {self._settings.steps}; saved {path}")
            again = resume_command(
                self._folder, implementation, self._mesh, task=self._settings.task
            )
            say(f"To go on: {again}")
            return INTERRUPTED
        if speed:
            say(f"{speed:,.0f} {unit}/s")
        say(f"{self._settings.measure}: {self._judgement(history)}")
        self._write_examples(program, state)
        self._write("metrics.csv", self._table({"": history}))
        self._write("training.png", self._plot({"": history}))
        say(f"Wrote {path}")
        return 0

    def compare(self) -> int:
        """Trains with both implementations from the same seed; returns the exit status."""
        self._introduce()
        unit = self._settings.unit
        implementations: tuple[Literal["ffi", "xla"], ...] = ("ffi", "xla")
        histories: dict[str, History] = {}
        speeds: dict[str, float] = {}
        for name in implementations:
            histories[name] = history = History()
            program, state = self._compile(name)
            with StopOnInterrupt() as interrupt:
                with Reporter(name, 0, self._settings) as report:
                    _, speeds[name] = train(
                        program, state, history, report=report, stop=lambda: interrupt.requested
                    )
            if interrupt.requested:
                say("Stopped; a comparison is not saved")
                return INTERRUPTED
            say(f"{name}: {speeds[name]:,.0f} {unit}/s")
            say(f"{name}: {self._settings.measure}: {self._judgement(history)}")
        ffi, xla = (np.array(history.losses) for history in histories.values())
        difference = np.abs(ffi - xla)
        say(
            f"ffi has {speeds['ffi'] / speeds['xla']:.2f} times xla's {unit}/s; their training "
            f"losses differ by at most {difference.max():.2g} (mean {difference.mean():.2g})"
        )
        self._write("comparison.csv", self._table(histories))
        self._write("comparison.png", self._plot(histories))
        return 0

    def _compile(self, implementation: Implementation) -> tuple[Trainable[S], TrainState]:
        say("Compiling …")
        program = self._program(implementation)
        state = program.initial_state()
        parameters = sum(p.size for p in jax.tree.leaves(state.params))
        what = describe_calls(program.train_step_hlo(), implementation)
        where = self._platform
        if self._mesh is not None:
            where += f" on a mesh of {_axes(self._mesh)}"
        say(f"{parameters:,} parameters on {where}; the training step has {what}")
        return program, state

    def _about(self, history: History) -> dict[str, Any]:
        return self._about_data() | {
            "task": self._settings.task,
            "settings": dataclasses.asdict(self._settings),
            "history": history.to_json(),
        }

    def _write(self, name: str, data: str | bytes) -> None:
        files.write(self._folder / name, data)
        say(f"Wrote {self._folder / name}")

    def _table(self, runs: Mapping[str, History]) -> str:
        """The curves as CSV, with one line per step."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        columns = ("loss", "gradient_norm", self._settings.measure.replace(" ", "_"))
        writer.writerow(["step", *(f"{name}_{c}" if name else c for name in runs for c in columns)])
        for i in range(min(len(h.losses) for h in runs.values())):
            row: list[Any] = [i + 1]
            for h in runs.values():
                row += [h.losses[i], h.gradient_norms[i], h.measured.get(i + 1, "")]
            writer.writerow(row)
        return buffer.getvalue()


def _axes(mesh: jax.sharding.Mesh) -> str:
    """The mesh's axes in the format of --mesh."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def describe_calls(hlo: str, implementation: Implementation) -> str:
    """Says what runs in a compiled program. If XLA's operations replaced the kernels, says why."""
    if calls := hlo.count(_CALL):
        return f"{calls} native kernel calls"
    reason = jax_gradops.implementation_in_use("layer_norm").reason
    return "XLA's own operations only" + (f": {reason}" if implementation is None else "")


def resume_command(
    folder: Path,
    implementation: Implementation,
    mesh: jax.sharding.Mesh | None = None,
    *,
    task: str = "text",
) -> str:
    """The shell command that continues the run in `folder`.

    The command names this process's Python, because the shell's Python may be another one. Settings
    are read from the checkpoint.
    """
    python = Path(sys.executable or "python")
    if python.is_relative_to(Path.cwd()) and python.parent != Path.cwd():
        python = python.relative_to(Path.cwd())
    command = [str(python), "-m", "jax_gradops", "demo", "--resume"]
    if task != "text":
        command += ["--task", task]
    if folder != OUTPUTS[task]:
        command += ["--output", str(folder)]
    if implementation is not None:
        command += ["--implementation", implementation]
    if mesh is not None:
        command += ["--mesh", _axes(mesh)]
    return shlex.join(command)
