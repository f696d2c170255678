"""Trees of gradients to clip: trees of models, and trees of many small leaves."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

Leaves = list[jax.ShapeDtypeStruct]
Shapes = list[tuple[int, ...]]

FORMATS = "gpt2-124m, gpt2-1.5b, LEAVESxELEMENTS, as in 2000x1024, or mixedLEAVES, as in mixed10000"
DEFAULT = ("gpt2-124m", "2000x1024")
MIXED = "mixed"  # is used as the dtype of a tree that has several dtypes

# Mixed trees repeat these shapes and dtypes. The lengths of the two lists are coprime, so that each
# shape comes in each dtype.
_MIXED_SHAPES: Shapes = [
    (), (768,), (0,), (33,), (64, 64), (1,), (127, 31), (3, 5, 7), (2048,), (17, 129), (4096,),
    (100, 100), (256,),
]  # fmt: skip
_MIXED_DTYPES = ("float32", "bfloat16", "float16")


def _gpt2(layers: int, width: int) -> Shapes:
    layer: Shapes = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *layer * layers, (width,), (width,)]


_MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2-124m": lambda: _gpt2(12, 768),
    "gpt2-1.5b": lambda: _gpt2(48, 1600),
}


def is_known(name: str) -> bool:
    """Whether a tree has this name."""
    return name in _MODELS or bool(re.fullmatch(r"([1-9]\d*x|mixed)[1-9]\d*", name, re.ASCII))


def is_mixed(name: str) -> bool:
    """Whether the tree has leaves of several dtypes."""
    return name.startswith(MIXED)


def leaves(name: str, dtype: str) -> Leaves:
    """The types of the leaves of a known tree. All have `dtype`, except in a mixed tree."""
    if is_mixed(name):
        cycles = zip(itertools.cycle(_MIXED_SHAPES), itertools.cycle(_MIXED_DTYPES), strict=False)
        count = int(name.removeprefix(MIXED))
        return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in itertools.islice(cycles, count)]
    if name in _MODELS:
        shapes = _MODELS[name]()
    else:
        count, elements = map(int, name.split("x"))
        shapes = [(elements,)] * count
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def size_in_bytes(types: Leaves) -> int:
    """The bytes of all leaves together."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in types)
