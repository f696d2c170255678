"""The optimizer of the suite's models in Flax NNX: a clip by the global norm, then AdamW."""

from __future__ import annotations

import optax

import jax_gradops
from jax_gradops._tools.bench.train import STOCK, is_matrix

_MAX_NORM = 1.0
_WEIGHT_DECAY = 0.1
_LEARNING_RATE = 3e-4
_WARM_UP = 100  # steps of the learning rate's warm-up


def adamw(variant: str) -> optax.GradientTransformation:
    """The variant's clip, then Optax's AdamW."""
    library = optax if variant == STOCK else jax_gradops
    rate = optax.linear_schedule(_LEARNING_RATE / _WARM_UP, _LEARNING_RATE, _WARM_UP - 1)
    return optax.chain(
        library.clip_by_global_norm(_MAX_NORM),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=_WEIGHT_DECAY, mask=is_matrix),
    )
