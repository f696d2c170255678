"""The settings of a run of the demo: their defaults, and the checks of their values."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

#: The default output folder of each task.
OUTPUTS = {"text": Path("demo_output"), "digits": Path("demo_output/digits")}


class DemoError(Exception):
    """An error that the user can fix. The demo prints it as one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every task. Equal settings and equal data give equal runs."""

    task: ClassVar[str]
    unit: ClassVar[str]  # the items that a step processes, in the plural
    measure: ClassVar[str]  # how the model is judged on held-out data
    measure_short: ClassVar[str]
    evaluations: ClassVar[int]  # how often a run evaluates the measure

    seed: int
    steps: int
    precision: str
    width: int
    batch: int
    learning_rate: float

    @property
    def units_per_step(self) -> int:
        """How many of the `unit` one step processes."""
        return self.batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """A GPT that predicts each character of a text from the characters before it."""

    task, unit = "text", "tokens"
    measure, measure_short, evaluations = "validation loss", "val", 8

    text: str | None
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise DemoError(
                f"--heads must divide --width, got {self.heads} heads and width {self.width}"
            )

    @property
    def units_per_step(self) -> int:
        """How many characters one step predicts."""
        return self.batch * self.context


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsSettings(Settings):
    """A ResNet that classifies handwritten digits."""

    task, unit = "digits", "images"
    measure, measure_short, evaluations = "test accuracy", "acc", 10


KINDS: dict[str, type[Settings]] = {kind.task: kind for kind in (TextSettings, DigitsSettings)}

_COMMON = {"seed": 0, "precision": "float32"}
_TEXT = _COMMON | {"text": None}
_DIGITS = _COMMON | dict(steps=300, width=16, batch=128, learning_rate=4e-3)
#: The default settings of each task and platform.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    # Takes two minutes on two CPU cores. On a GPU, more steps would overfit the text.
    "text": {
        "cpu": _TEXT
        | dict(steps=1500, width=96, layers=3, heads=3, context=64, batch=16, learning_rate=4e-3),
        "gpu": _TEXT
        | dict(steps=400, width=384, layers=6, heads=6, context=256, batch=64, learning_rate=1e-3),
    },
    # Takes half a minute on two CPU cores.
    "digits": {"cpu": _DIGITS, "gpu": _DIGITS},
}

_AT_LEAST = {"seed": 0, "steps": 1, "width": 1, "layers": 1, "heads": 1, "context": 2, "batch": 1}


def _names(kind: type[Settings]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that are on the command line. Each value is checked."""
    kind = KINDS[args.task]
    chosen = {name: value for name, value in vars(args).items() if value is not None}
    for other in KINDS.values():
        for name in chosen:
            if name in _names(other) - _names(kind):
                raise DemoError(
                    f"--{name} is an option of --task {other.task}, not of --task {kind.task}"
                )
    chosen = {name: value for name, value in chosen.items() if name in _names(kind)}
    _check_ranges(chosen)
    if "text" in chosen:
        chosen["text"] = os.path.abspath(chosen["text"])
    return chosen


def _check_ranges(values: dict[str, Any]) -> None:
    for name, least in _AT_LEAST.items():
        if values.get(name, least) < least:
            raise DemoError(f"--{name} must be at least {least}, got {values[name]}")
    if values.get("seed", 0) >= 2**32:
        raise DemoError(f"--seed must be less than 2**32, got {values['seed']}")


def new_run(chosen: dict[str, Any], platform: str, task: str = "text") -> Any:
    """Makes the task's `Settings` from `chosen`, with the platform's defaults for the rest."""
    defaults = DEFAULTS[task]["cpu" if platform == "cpu" else "gpu"]
    return KINDS[task](**defaults | chosen)


def resumed_run(chosen: dict[str, Any], saved: dict[str, Any], folder: Path, task: str) -> Any:
    """The settings of the checkpoint `saved`. Only ``steps`` may be chosen differently."""
    saved_task = saved.get("task", "text")  # old checkpoints have no task: "text" was the only one
    if saved_task != task:
        raise DemoError(f"the run in {folder} has --task {saved_task}, not {task}")
    try:
        before, step = saved["settings"], len(saved["history"]["losses"])
        _check_ranges(before)
        KINDS[task](**before)
    except (AttributeError, KeyError, TypeError) as error:
        raise DemoError(f"the checkpoint in {folder} is not one of this demo: {error!r}") from None
    for name, value in chosen.items():
        if name != "steps" and value != before[name]:
            was = before[name] if before[name] is not None else "the Python language reference"
            raise DemoError(
                f"the run in {folder} has --{name} {was}, not {value}; --resume cannot change it"
            )
    if chosen.get("steps", step) < step:
        raise DemoError(f"the run in {folder} is at step {step}, beyond --steps {chosen['steps']}")
    return KINDS[task](**before | chosen)
