"""The random images and labels that the suite's classifiers learn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_gradops._tools.bench.train import TrainCase

CLASSES = 1000


def batch(case: TrainCase, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Images of the case's shape, and a label for each."""
    images, labels = jax.random.split(key)
    return (
        jax.random.normal(images, case.shape, jnp.dtype(case.dtype)),
        jax.random.randint(labels, case.shape[:1], 0, CLASSES),
    )
