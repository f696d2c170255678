"""Arrays for batch norm, with channels on any axis."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparing import assert_matches, widen

from jax_gradops import _oracles as oracles

EPSILON = 0.25  # large, because three rows can have a small variance, with large second derivatives


def ordinary(shape: tuple[int, ...], axis: int, dtype: Any, rng: np.random.Generator) -> Any:
    """dy, x, residual; scale and bias in float32."""
    arrays = [rng.standard_normal(shape).astype(dtype) for _ in range(3)]
    channels = shape[axis]
    return (*arrays, *(rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(2)))


def channels_last(x: Any, axis: int) -> np.ndarray:
    return np.moveaxis(widen(x), axis, -1)


def assert_last(actual: Any, expected: Any, axis: int, dtype: Any, what: str) -> None:
    moved = oracles.Reference(
        *(np.moveaxis(np.broadcast_to(part, expected.value.shape), -1, axis) for part in expected)
    )
    assert_matches(actual, moved, dtype, np.float32, what)
