"""Scikit-learn's handwritten digits: https://archive.ics.uci.edu/dataset/80."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
from sklearn.model_selection import train_test_split  # pyright: ignore[reportMissingImports]

from jax_gradops._tools.demo.settings import DemoError

CLASSES = 10
_TEST_SHARE = 0.25
_SIZE = 8
_WHITE = 16  # the largest pixel value


@dataclasses.dataclass(frozen=True)
class Digits:
    """Grey images [images, 8, 8], float32 from 0 to 1, and their labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(seed: int, batch: int) -> Digits:
    """Loads images and splits them by the seed. Each digit has an equal share in the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, _SIZE, _SIZE) / _WHITE).astype(np.float32)
    parts: list[Any] = train_test_split(
        images,
        labels.astype(np.int32),
        test_size=_TEST_SHARE,
        random_state=seed,
        stratify=labels,
    )
    train_images, test_images, train_labels, test_labels = parts
    count = len(train_images)
    if batch > count:
        raise DemoError(f"--batch must be at most {count}, the images to train on; got {batch}")
    return Digits(train_images, train_labels, test_images, test_labels)


def sample_batch(
    images: jax.Array, labels: jax.Array, key: jax.Array, batch: int
) -> tuple[jax.Array, jax.Array]:
    """A random batch of different images and their labels. Each is shifted by up to one pixel."""
    which, shifts = jax.random.split(key)
    chosen = jax.random.choice(which, len(images), (batch,), replace=False)
    padded = jnp.pad(images[chosen], ((0, 0), (1, 1), (1, 1)))
    starts = jax.random.randint(shifts, (batch, 2), 0, 3)
    shifted = jax.vmap(lambda x, start: jax.lax.dynamic_slice(x, start, images.shape[1:]))
    return shifted(padded, starts), labels[chosen]
