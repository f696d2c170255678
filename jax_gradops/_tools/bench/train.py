"""The cases of the suite "train": models, their sizes, and their variants.

Each model has a module with a function `setup(case)`. The module is imported only on use, because
it needs Flax.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_gradops
from jax_gradops._tools.bench.cases import SHORT_DTYPES

STOCK = "stock"
#: "stock" has ops of Flax, Optax and XLA. "jax_gradops" has this library's ops, fused with their
#: neighbours. Three variants are like "jax_gradops" but for one thing. "linear_loss" computes loss
#: and last matrix product chunk by chunk: no array has all logits. "stock_loss" has Optax's loss.
#: Norms of "save_output" save their results for the backward pass, not their inputs. "unfused" has
#: this library's ops without fusion. "fuse" is stock's loss as `jax_gradops.fuse` changes it.
VARIANTS = (STOCK, "jax_gradops", "linear_loss", "stock_loss", "unfused", "save_output", "fuse")
#: Stages of resnet50. Stage 0 is the part before the first stage.
STAGES = ("0", "1", "2", "3", "4")
#: The first one is the default.
DTYPES = ("bfloat16", "float32")
STEPS = 10
#: The number of different tokens of llama and gemma, if no option gives another one.
VOCABULARY = 32000


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and the options that it supports.

    Attributes:
      module: the name of the module that makes the model.
      shape: maps the arguments to the shape of a batch.
      variants: the variants that the model supports.
      options: the options that only some models have.
    """

    module: str
    shape: Callable[[argparse.Namespace], tuple[int, ...]]
    variants: tuple[str, ...]
    options: tuple[str, ...]


def _images(batch: int, side: int, channels: int) -> Callable[[argparse.Namespace], Any]:
    def shape(args: argparse.Namespace) -> tuple[int, ...]:
        size = args.image_size or side
        return (args.batch or batch, size, size, channels)

    return shape


def _windows(batch: int, context: int) -> Callable[[argparse.Namespace], tuple[int, ...]]:
    return lambda args: (args.batch or batch, args.context or context)


_GPT2 = Model("train_gpt2", _windows(32, 1024), VARIANTS, ("context",))
_LLAMA = Model(
    "train_llama",
    _windows(4, 2048),
    tuple(variant for variant in VARIANTS if variant != "save_output"),
    ("context", "vocabulary"),
)
# The variants of a model that has no kernel for its loss.
_NO_LOSS = (STOCK, "jax_gradops", "unfused", "fuse")
#: Models by name.
MODELS = {
    "resnet50": Model("train_resnet", _images(256, 224, 3), _NO_LOSS, ("image_size", "stages")),
    "gpt2": _GPT2,
    "gpt2-exact": _GPT2,
    "gpt2-float32-rows": _GPT2,
    "gpt2-padded": _GPT2,
    "llama": _LLAMA,
    "gemma": _LLAMA,
    "vit": Model(
        "train_vit",
        _images(256, 224, 3),
        tuple(variant for variant in VARIANTS if variant != "linear_loss"),
        ("image_size",),
    ),
    "unet": Model("train_unet", _images(16, 64, 4), _NO_LOSS, ("image_size",)),
}


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """A model at one size and in one dtype, in all variants that are compared.

    Attributes:
      platform: "cpu" or "gpu".
      shape: of a batch; the first axis is the axis of examples.
      steps: of the loss curves.
      stages: of resnet50: the stages that differ between variants.
      profile: the folder for profiles, or None.
      vocabulary: of llama and gemma: the number of different tokens.
    """

    model: str
    dtype: str
    platform: str
    shape: tuple[int, ...]
    variants: tuple[str, ...]
    steps: int = STEPS
    stages: tuple[str, ...] = STAGES
    profile: Path | None = None
    vocabulary: int = VOCABULARY

    def __str__(self) -> str:
        name = f"{self.model} {SHORT_DTYPES[self.dtype]} {'x'.join(map(str, self.shape))}"
        words = "vocabulary" in MODELS[self.model].options
        return f"{name} {self.vocabulary} words" if words else name

    def describe(self) -> dict[str, Any]:
        """The values that identify the case, for JSON."""
        of_some_models = {"stages", "vocabulary"}
        left_out = {"platform", "profile"} | of_some_models - {*MODELS[self.model].options}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def setup(self) -> Setup:
        """Makes the model."""
        module = f"jax_gradops._tools.bench.{MODELS[self.model].module}"
        setup: Setup = importlib.import_module(module).setup(self)

        def loss(variant: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
            if variant == "fuse":
                return jax_gradops.fuse(setup.loss(STOCK))
            return setup.loss(variant)

        return dataclasses.replace(setup, loss=loss)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model that is ready for training: the parts that variants share, and the parts that differ.

    Attributes:
      unit: the items of a batch, in the plural.
      examples: the number of these items in a batch.
      init: maps a key to parameters and to carried values. These values go from step to step:
        running averages, or the step number that selects the part of the batch.
      batch: maps a key to the data that each step gets.
      loss: maps a variant to a function. This function takes parameters, carried values and a
        batch. It returns the loss and the next carried values.
      optimizer: maps a variant to an Optax optimizer.
    """

    unit: str
    examples: int
    init: Callable[[Any], tuple[Any, Any]]
    batch: Callable[[Any], Any]
    loss: Callable[[str], Callable[[Any, Any, Any], tuple[Any, Any]]]
    optimizer: Callable[[str], Any]


def is_matrix(parameters: Any) -> Any:
    """Says which parameters decay: matrices do, scales and biases do not."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, parameters)


def add_arguments(
    add: Callable[[str, Sequence[str], str, str], None],
    parser: argparse.ArgumentParser,
    positive: Any,
) -> None:
    """Adds the suite's options. `add` adds an option whose values are names."""
    add("model", tuple(MODELS), "all", "suite train: models")
    others = "stock and jax_gradops; stock is always there"
    add("variant", VARIANTS, others, "suite train: where ops come from")
    add("stages", STAGES, "all", "suite train: where resnet50 has jax_gradops's batch norm")
    for name, default, what in (
        (
            "batch",
            "256 images; 16 of unet; 32 windows of gpt2, 4 of llama and gemma",
            "examples of a step",
        ),
        ("image-size", "224; 64 of unet", "pixels of a side, of resnet50, vit and unet"),
        ("context", "1024 of gpt2, 2048 of llama and gemma", "tokens of a window"),
        ("vocabulary", VOCABULARY, "different tokens of llama and gemma"),
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


OPTIONS = (
    "model", "variant", "stages", "batch", "image_size", "context", "vocabulary", "steps",
    "profile",
)  # fmt: skip


def why_not(args: argparse.Namespace) -> str:
    """Why no requested model supports the arguments; "" if one does."""
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
    """The requested cases. Each model has the wanted variants that it supports."""
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
            args.vocabulary or VOCABULARY,
        )
        for name in args.model or MODELS
        for dtype in args.dtype or DTYPES[:1]
    ]
