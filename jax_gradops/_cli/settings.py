"""What a run of the demo is made of: its settings, their defaults, and what is wrong with them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

# Exit status after Ctrl-C, as shells have it: 128 + SIGINT.
INTERRUPTED = 130
DEFAULT_OUTPUT = Path("demo_output")


class DemoError(Exception):
    """Something that the user can put right; shown as one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """With the same settings and the same text, the same run."""

    text: str | None
    seed: int
    steps: int
    precision: str
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    learning_rate: float

    @property
    def tokens_per_step(self) -> int:
        """How many characters one step predicts."""
        return self.batch * self.context


# Two minutes on two cores. On a GPU the text, not the time, is the limit: more steps overfit.
_COMMON = {"text": None, "seed": 0, "precision": "float32"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": _COMMON
    | dict(steps=1500, width=96, layers=3, heads=3, context=64, batch=16, learning_rate=4e-3),
    "gpu": _COMMON
    | dict(steps=400, width=384, layers=6, heads=6, context=256, batch=64, learning_rate=1e-3),
}

_AT_LEAST = {"seed": 0, "steps": 1, "width": 1, "layers": 1, "heads": 1, "context": 2, "batch": 1}


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that are on the command line, checked one by one."""
    chosen = {
        field.name: value
        for field in dataclasses.fields(Settings)
        if (value := getattr(args, field.name, None)) is not None
    }
    for name, least in _AT_LEAST.items():
        if chosen.get(name, least) < least:
            raise DemoError(f"--{name} must be at least {least}, got {chosen[name]}")
    if chosen.get("seed", 0) >= 2**32:
        raise DemoError(f"--seed must be less than 2**32, got {chosen['seed']}")
    if "text" in chosen:
        chosen["text"] = os.path.abspath(chosen["text"])
    return chosen


def new_run(chosen: dict[str, Any], platform: str) -> Settings:
    """`chosen`, and the platform's defaults for the rest."""
    return _checked(Settings(**DEFAULTS["cpu" if platform == "cpu" else "gpu"] | chosen))


def resumed_run(chosen: dict[str, Any], saved: dict[str, Any], folder: Path) -> Settings:
    """The settings of the checkpoint `saved`; of those in `chosen`, only ``steps`` may differ."""
    before, step = saved["settings"], len(saved["history"]["losses"])
    for name, value in chosen.items():
        if name != "steps" and value != before[name]:
            was = before[name] if before[name] is not None else "the Python language reference"
            raise DemoError(
                f"the run in {folder} has --{name} {was}, not {value}; --resume cannot change it"
            )
    if chosen.get("steps", step) < step:
        raise DemoError(f"the run in {folder} is at step {step}, beyond --steps {chosen['steps']}")
    return _checked(Settings(**before | chosen))


def _checked(settings: Settings) -> Settings:
    if settings.width % settings.heads:
        raise DemoError(
            f"--heads must divide --width, got {settings.heads} heads and width {settings.width}"
        )
    return settings
