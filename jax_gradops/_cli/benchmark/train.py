"""What of whole training steps can be timed: models, their sizes, and variants of each.

A model is a module with `setup(case)`, which is imported only when it is wanted, as it needs Flax.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_gradops._cli.benchmark.cases import SHORT_DTYPES

#: By name, the module that makes the model.
MODELS = {"resnet50": "train_resnet"}
STOCK = "stock"
#: The ops from Flax and XLA; this library's, fused with their neighbours; this library's, alone.
VARIANTS = (STOCK, "jax_gradops", "unfused")
#: Of resnet50: 0 is what comes before the first stage.
STAGES = ("0", "1", "2", "3", "4")
#: The first of them if none is named.
DTYPES = ("bfloat16", "float32")
BATCH, STEPS, IMAGE_SIZE = 256, 10, 224


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """A model at one size and in one dtype, in all variants that are compared.

    Attributes:
      stages: those where the variants differ from `STOCK`.
      steps: of each sample, and of the loss curves.
      profile: where profiles are written, if any are.
    """

    model: str
    dtype: str
    batch: int = BATCH
    image_size: int = IMAGE_SIZE
    variants: tuple[str, ...] = VARIANTS[:2]
    stages: tuple[str, ...] = STAGES
    steps: int = STEPS
    profile: Path | None = None

    def __str__(self) -> str:
        size = f"{self.batch}x{self.image_size}x{self.image_size}x3"
        return f"{self.model} {SHORT_DTYPES[self.dtype]} {size}"

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in vars(self).items() if name != "profile"}

    def setup(self) -> Setup:
        """Makes the model."""
        module = f"jax_gradops._cli.benchmark.{MODELS[self.model]}"
        return importlib.import_module(module).setup(self)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, ready to be trained: what all variants have in common, and the loss of each.

    Attributes:
      unit: what a batch is made of, in the plural.
      examples: of these in a batch.
      optimizer: Optax's.
      init: from a key to parameters, and what else training changes (running averages).
      batch: from a key to a batch.
      loss: from a variant to a function of parameters, the rest and a batch, which returns the
        loss and the rest as it is after the step.
    """

    unit: str
    examples: int
    optimizer: Any
    init: Callable[[Any], tuple[Any, Any]]
    batch: Callable[[Any], Any]
    loss: Callable[[str], Callable[[Any, Any, Any], tuple[Any, Any]]]


def add_arguments(
    add: Callable[[str, Sequence[str], str, str], None],
    parser: argparse.ArgumentParser,
    positive: Any,
) -> None:
    """Adds the suite's options; `add` adds one whose values are names."""
    add("model", tuple(MODELS), "all", "suite train: models")
    others = "stock and jax_gradops; stock is always there"
    add("variant", VARIANTS, others, "suite train: where ops come from")
    add("stages", STAGES, "all", "suite train: where resnet50 has jax_gradops's batch norm")
    for name, default, what in (
        ("batch", BATCH, "examples of a step"),
        ("image-size", IMAGE_SIZE, "pixels of a side"),
        ("steps", STEPS, "steps of each sample, and of the loss curves"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, help=f"suite train: {what} (default: {default})"
        )
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="suite train: write jax.profiler traces there"
    )


OPTIONS = ("model", "variant", "stages", "batch", "image_size", "steps", "profile")


def select(args: argparse.Namespace) -> list[TrainCase]:
    """What was asked for."""
    wanted = {STOCK, *(args.variant or VARIANTS[:2])}
    return [
        TrainCase(
            model,
            dtype,
            args.batch or BATCH,
            args.image_size or IMAGE_SIZE,
            tuple(v for v in VARIANTS if v in wanted),
            tuple(args.stages or STAGES),
            args.steps or STEPS,
            args.profile,
        )
        for model in args.model or MODELS
        for dtype in args.dtype or DTYPES[:1]
    ]
