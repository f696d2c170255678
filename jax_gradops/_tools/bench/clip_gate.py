"""Whether clipped trees are right: all elements, in float64 on the device, leaf by leaf.

What is checked is what a timed program has left after its first run: alone, the gradients, which
all turns have clipped; in a step, the first moment of AdamW, a weighted sum of what the turns have
made of the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_gradops._tools.bench import formulas


@functools.cache
def _programs() -> tuple[Any, Any]:
    # Leaf by leaf: one program for all of a tree would take XLA minutes to compile.
    def sum_of_squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(jnp.float64)))

    def difference(got: jax.Array, pristine: jax.Array, factor: jax.Array) -> Any:
        want = pristine.astype(jnp.float64) * factor
        return sum_of_squares(got.astype(jnp.float64) - want), sum_of_squares(want)

    return jax.jit(sum_of_squares), jax.jit(difference)


def norm(leaves: Sequence[jax.Array]) -> float:
    """Of all leaves."""
    with jax.enable_x64(True):
        sums = [_programs()[0](leaf) for leaf in leaves]
    return math.sqrt(math.fsum(map(float, jax.device_get(sums))))


def mistakes(
    got: Sequence[jax.Array],
    pristine: Sequence[jax.Array],
    factor: float,
    roundings: int,
    slack: float,
) -> tuple[str, float]:
    """What is wrong with leaves that should be `factor` times the pristine, and the largest error.

    An error is the norm of the difference over that of the leaf. `roundings` says how often, one
    after the other, each element has been rounded to its dtype; by way of the norm, a turn's
    roundings in some leaves are in the next turn's factor for all.
    """
    if [(g.shape, g.dtype) for g in got] != [(p.shape, p.dtype) for p in pristine]:
        return "leaves have other shapes or dtypes", float("nan")
    with jax.enable_x64(True):
        scale = jnp.asarray(factor, jnp.float64)
        found = [_programs()[1](*pair, scale) for pair in zip(got, pristine, strict=True)]
    worst, eps = 0.0, max(float(jnp.finfo(p.dtype).eps) for p in pristine)
    for i, (error, want) in enumerate(jax.device_get(found)):
        relative = math.sqrt(error) / max(math.sqrt(want), 1e-30)
        sums = 1024 * float(jnp.finfo(formulas.wide_dtype(got[i].dtype)).eps)
        # Many in a row are not like steps to either side: of bfloat16 numbers that shrink by 1 % a
        # time, 128 roundings leave 8 % too much, in large leaves too.
        if not relative <= (2 + 0.25 * roundings) * eps + slack * sums:  # NaN as well
            return f"leaf {i} is off by {relative:.1e} of its norm", relative
        worst = max(worst, relative)
    return "", worst
