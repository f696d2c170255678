"""The ops as functions of Flax and Optax with their default options.

Batch norm, group norm and GELU are not here: the formulas that XLA is timed with are Flax's
already.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from jax_gradops._tools.bench import formulas
from jax_gradops._tools.bench.cases import Case


def _flax(name: str, case: Case) -> Callable[..., Any]:
    kind = getattr(importlib.import_module("flax.linen"), name)
    module = kind(epsilon=formulas.EPSILON, dtype=case.dtype)

    def norm(x: Any, *parameters: Any) -> Any:
        named = dict(zip(("scale", "bias"), parameters, strict=False))
        return module.apply({"params": named}, x)

    return norm


def _optax_global_norm(case: Case) -> Callable[..., Any]:
    del case
    optax = importlib.import_module("optax")
    norm = getattr(
        getattr(optax, "tree", None), "norm", None
    )  # the new name: optax.global_norm is deprecated
    return lambda x: (norm or optax.global_norm)([x])


def _optax_clip(case: Case) -> Callable[..., Any]:
    del case
    clip = importlib.import_module("optax").clip_by_global_norm(formulas.MAX_NORM)
    return lambda x: clip.update([x], clip.init([x]))[0][0]


#: Makers by competitor and op. A competitor's name is also the name of its package.
MAKERS: dict[str, dict[str, Callable[[Case], Callable[..., Any]]]] = {
    "flax": {
        "layer_norm": functools.partial(_flax, "LayerNorm"),
        "rms_norm": functools.partial(_flax, "RMSNorm"),
    },
    "optax": {"global_norm": _optax_global_norm, "clip": _optax_clip},
}
