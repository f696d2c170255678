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

import jax

from jax_gradops._tools.bench.cases import SHORT_DTYPES

STOCK = "stock"
#: Ops from Flax, Optax and XLA; this library's, fused with their neighbours; this library's, alone;
#: and fused, but the norms keep their results for the derivative, not what they were given.
VARIANTS = (STOCK, "jax_gradops", "unfused", "save_output")
#: Of resnet50: 0 is what comes before the first stage.
STAGES = ("0", "1", "2", "3", "4")
#: The first of them if none is named.
DTYPES = ("bfloat16", "float32")
STEPS, IMAGES, IMAGE_SIZE, WINDOWS, CONTEXT = 10, 256, 224, 32, 1024


@dataclasses.dataclass(frozen=True)
class Model:
    """What can be asked for of a model.

    Attributes:
      module: that makes it.
      shape: from what was asked for to the shape of a batch.
      variants: those that it has.
      options: those that not all models have.
    """

    module: str
    shape: Callable[[argparse.Namespace], tuple[int, ...]]
    variants: tuple[str, ...]
    options: tuple[str, ...]


def _images(args: argparse.Namespace) -> tuple[int, ...]:
    size = args.image_size or IMAGE_SIZE
    return (args.batch or IMAGES, size, size, 3)


def _windows(args: argparse.Namespace) -> tuple[int, ...]:
    return (args.batch or WINDOWS, args.context or CONTEXT)


_GPT2 = Model("train_gpt2", _windows, VARIANTS, ("context",))
#: By name.
MODELS = {
    "resnet50": Model("train_resnet", _images, VARIANTS[:3], ("image_size", "stages")),
    "gpt2": _GPT2,
    "gpt2-exact": _GPT2,
}


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """A model at one size and in one dtype, in all variants that are compared.

    Attributes:
      platform: "cpu" or "gpu".
      shape: of a batch; the first axis is that of examples.
      steps: of the loss curves.
      stages: of resnet50, those where the variants differ from `STOCK`.
      profile: where profiles are written, if any are.
    """

    model: str
    dtype: str
    platform: str
    shape: tuple[int, ...]
    variants: tuple[str, ...]
    steps: int = STEPS
    stages: tuple[str, ...] = STAGES
    profile: Path | None = None

    def __str__(self) -> str:
        return f"{self.model} {SHORT_DTYPES[self.dtype]} {'x'.join(map(str, self.shape))}"

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        left_out = {"platform", "profile"}
        if "stages" not in MODELS[self.model].options:
            left_out.add("stages")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def setup(self) -> Setup:
        """Makes the model."""
        module = f"jax_gradops._tools.bench.{MODELS[self.model].module}"
        return importlib.import_module(module).setup(self)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, ready to be trained: what all variants have in common, and what each has.

    Attributes:
      unit: what a batch is made of, in the plural.
      examples: of these in a batch.
      init: from a key to parameters, and to what else the loss carries from step to step: running
        averages, or the number of the step, from which it takes its part of the batch.
      batch: from a key to what each step is given.
      loss: from a variant to a function of parameters, what is carried and a batch, which returns
        the loss and what is carried to the next step.
      optimizer: from a variant to Optax's.
    """

    unit: str
    examples: int
    init: Callable[[Any], tuple[Any, Any]]
    batch: Callable[[Any], Any]
    loss: Callable[[str], Callable[[Any, Any, Any], tuple[Any, Any]]]
    optimizer: Callable[[str], Any]


def is_matrix(parameters: Any) -> Any:
    """Which parameters decay: scales and biases do not."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)


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
        ("batch", f"{IMAGES} images, {WINDOWS} windows of text", "examples of a step"),
        ("image-size", IMAGE_SIZE, "pixels of a side, of resnet50"),
        ("context", CONTEXT, "tokens of a window, of gpt2"),
        ("steps", STEPS, "steps of the loss curves; a sample has as many, or 10"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, help=f"suite train: {what} (default: {default})"
        )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="suite train: write jax.profiler traces there, and sum up their kernels",
    )


OPTIONS = ("model", "variant", "stages", "batch", "image_size", "context", "steps", "profile")


def why_not(args: argparse.Namespace) -> str:
    """What was asked for that no model has, or none of those asked for; "" if there is nothing."""
    dtypes = [d for d in args.dtype or () if d not in DTYPES]
    if dtypes:
        return f"no model is trained in {', '.join(dtypes)}"
    models = args.model or MODELS
    for option in OPTIONS:
        having = [name for name, model in MODELS.items() if option in model.options]
        if having and getattr(args, option) is not None and not {*having} & {*models}:
            return f"--{option.replace('_', '-')}: for {', '.join(having)} only"
    for variant in args.variant or ():
        having = [name for name, model in MODELS.items() if variant in model.variants]
        if not {*having} & {*models}:
            return f"--variant {variant}: for {', '.join(having)} only"
    return ""


def select(args: argparse.Namespace, platform: str) -> list[TrainCase]:
    """What was asked for; each model in those of the variants that it has."""
    wanted = {STOCK, *(args.variant or VARIANTS[:2])}
    return [
        TrainCase(
            name,
            dtype,
            platform,
            MODELS[name].shape(args),
            tuple(v for v in MODELS[name].variants if v in wanted),
            args.steps or STEPS,
            tuple(args.stages or STAGES),
            args.profile,
        )
        for name in args.model or MODELS
        for dtype in args.dtype or DTYPES[:1]
    ]
