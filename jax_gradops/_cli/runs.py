"""A run of the demo from its settings to its results."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

import jax_gradops
from jax_gradops._cli import checkpoint, files, plots
from jax_gradops._cli.program import Program, TrainState
from jax_gradops._cli.progress import Reporter, StopOnInterrupt, say
from jax_gradops._cli.settings import DEFAULT_OUTPUT, INTERRUPTED, Settings
from jax_gradops._cli.text import Corpus, bigram_entropy
from jax_gradops._cli.training import History, train

Implementation: TypeAlias = Literal["ffi", "xla"] | None
_CALL = 'custom_call_target="jax_gradops.'


class Run:
    """A run whose settings have been checked and whose folder is there."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        corpus: Corpus,
        platform: str,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        self._folder, self._settings, self._corpus, self._mesh = folder, settings, corpus, mesh
        self._entropy = bigram_entropy(corpus.validation)
        self._platform = platform
        self._title = f"{corpus.name}, on {platform}, {settings.precision}"

    def train(self, implementation: Implementation, saved: dict[str, Any] | None) -> int:
        """Trains, or goes on from the checkpoint that `saved` is of; returns the exit status."""
        self._introduce()
        program, state = self._compile(implementation)
        history = History()
        if saved:
            history = History.from_json(saved["history"])
            state = checkpoint.load_state(self._folder, state)
            say(f"Resuming at step {len(history.losses)} of {self._settings.steps}")
        with StopOnInterrupt() as interrupt:
            with Reporter("", len(history.losses), self._settings.steps) as report:
                state, speed = train(
                    program, state, history, report=report, stop=lambda: interrupt.requested
                )
            path = checkpoint.save(self._folder, state, self._about(history))
        if interrupt.requested:
            say(f"Stopped at step {len(history.losses)} of {self._settings.steps}; saved {path}")
            say(f"To go on: {resume_command(self._folder, implementation, self._mesh)}")
            return INTERRUPTED
        if speed:
            say(f"{speed:,.0f} tokens/s")
        self._judge("validation loss", list(history.validation.values())[-1])
        self._write_sample(program, state)
        self._write("metrics.csv", _table({"": history}))
        self._write("training.png", plots.plot({"": history}, self._entropy, self._title))
        say(f"Wrote {path}")
        return 0

    def compare(self) -> int:
        """Trains with both implementations from the same seed; returns the exit status."""
        self._introduce()
        implementations: tuple[Literal["ffi", "xla"], ...] = ("ffi", "xla")
        histories: dict[str, History] = {}
        speeds: dict[str, float] = {}
        for name in implementations:
            histories[name] = history = History()
            program, state = self._compile(name)
            with StopOnInterrupt() as interrupt:
                with Reporter(name, 0, self._settings.steps) as report:
                    _, speeds[name] = train(
                        program, state, history, report=report, stop=lambda: interrupt.requested
                    )
            if interrupt.requested:
                say("Stopped; a comparison is not saved")
                return INTERRUPTED
            say(f"{name}: {speeds[name]:,.0f} tokens/s")
            self._judge(f"{name}: validation loss", list(history.validation.values())[-1])
        ffi, xla = (np.array(history.losses) for history in histories.values())
        difference = np.abs(ffi - xla)
        say(
            f"ffi has {speeds['ffi'] / speeds['xla']:.2f} times xla's tokens/s; their training "
            f"losses differ by at most {difference.max():.2g} (mean {difference.mean():.2g})"
        )
        self._write("comparison.csv", _table(histories))
        self._write("comparison.png", plots.plot(histories, self._entropy, self._title))
        return 0

    def _introduce(self) -> None:
        corpus, s = self._corpus, self._settings
        say(
            f"Text: {corpus.name}, {len(corpus.train):,} characters to train on and "
            f"{len(corpus.validation):,} for validation, {len(corpus.charset)} different ones"
        )
        say(
            f"GPT: width {s.width}, {s.layers} layers, {s.heads} heads, context {s.context}; "
            f"{s.steps} steps of {s.batch} windows, {s.precision}, seed {s.seed}"
        )

    def _compile(self, implementation: Implementation) -> tuple[Program, TrainState]:
        say("Compiling …")
        program = Program(self._settings, self._corpus, implementation, mesh=self._mesh)
        state = program.initial_state()
        parameters = sum(p.size for p in jax.tree.leaves(state.params))
        what = describe_calls(program.train_step_hlo(), implementation)
        where = self._platform
        if self._mesh is not None:
            where += f" on a mesh of {_axes(self._mesh)}"
        say(f"{parameters:,} parameters on {where}; the training step has {what}")
        return program, state

    def _about(self, history: History) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self._settings),
            "history": history.to_json(),
            "charset": self._corpus.charset,
            "digest": self._corpus.digest,
        }

    def _judge(self, what: str, loss: float) -> None:
        entropy, side = self._entropy, "below" if loss < self._entropy else "NOT below"
        say(
            f"{what}: {loss:.3f} nats per character, {side} the validation text's own bigram "
            f"entropy H(next | current) of {entropy:.3f}"
        )

    def _write_sample(self, program: Program, state: TrainState) -> None:
        start = self._corpus.charset.find("\n")
        sample = self._corpus.decode(program.generate(state, max(0, start)))
        say(f"\nA sample:\n{'-' * 80}\n{sample.strip()}\n{'-' * 80}")
        self._write("sample.txt", sample)

    def _write(self, name: str, data: str | bytes) -> None:
        files.write(self._folder / name, data)
        say(f"Wrote {self._folder / name}")


def _axes(mesh: jax.sharding.Mesh) -> str:
    """As --mesh takes them."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def describe_calls(hlo: str, implementation: Implementation) -> str:
    """What runs in a compiled program, and if it is not the kernels that were expected, why."""
    if calls := hlo.count(_CALL):
        return f"{calls} native kernel calls"
    reason = jax_gradops.implementation_in_use("layer_norm").reason
    return "XLA's own operations only" + (f": {reason}" if implementation is None else "")


def resume_command(
    folder: Path, implementation: Implementation, mesh: jax.sharding.Mesh | None = None
) -> str:
    """What goes on with the run in `folder`, for a shell where this process began.

    With this process's Python, which need not be the shell's. Settings are in the checkpoint.
    """
    python = Path(sys.executable or "python")
    if python.is_relative_to(Path.cwd()) and python.parent != Path.cwd():
        python = python.relative_to(Path.cwd())
    command = [str(python), "-m", "jax_gradops", "demo", "--resume"]
    if folder != DEFAULT_OUTPUT:
        command += ["--output", str(folder)]
    if implementation is not None:
        command += ["--implementation", implementation]
    if mesh is not None:
        command += ["--mesh", _axes(mesh)]
    return shlex.join(command)


def _table(runs: Mapping[str, History]) -> str:
    """The curves as CSV, one line for each step."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = ("loss", "gradient_norm", "validation_loss")
    writer.writerow(["step", *(f"{name}_{c}" if name else c for name in runs for c in columns)])
    for i in range(min(len(h.losses) for h in runs.values())):
        row: list[Any] = [i + 1]
        for h in runs.values():
            row += [h.losses[i], h.gradient_norms[i], h.validation.get(i + 1, "")]
        writer.writerow(row)
    return buffer.getvalue()
