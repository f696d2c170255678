"""GPUs for tests of plans, and plans without words. No test needs these GPUs."""

from __future__ import annotations

from typing import Any

from jax_gradops._cli import plan

GPUS = {name: plan.GPUS[name] for name in ("a100", "rtx 4090", "h200", "rtx 5090")}


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    """A plan's kernel and numbers."""
    return {"kernel": found["kernel"]} | {k: value for k, (value, _) in found["numbers"].items()}
