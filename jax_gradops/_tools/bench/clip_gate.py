"""Checks clipped trees: all elements, in float64 on the device, leaf by leaf.

The check reads the state that a timed program has left after its first run. If the program only
clips, the state has the gradients that all turns have clipped. A step's state has the first moment
of AdamW: a weighted sum of each turn's clipped gradients.
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
    # One program per leaf: XLA would take minutes to compile one program for the whole tree.
    def sum_of_squares(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(jnp.float64)))

    def difference(got: jax.Array, pristine: jax.Array, factor: jax.Array) -> Any:
        want = pristine.astype(jnp.float64) * factor
        return sum_of_squares(got.astype(jnp.float64) - want), sum_of_squares(want)

    return jax.jit(sum_of_squares), jax.jit(difference)


def norm(leaves: Sequence[jax.Array]) -> float:
    """The L2 norm of all leaves together."""
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
    """The mistake in leaves that should be `factor` times the pristine ones; the largest error.

    An error is the norm of the difference divided by the leaf's norm. `roundings` is the number of
    times that each element has been rounded to its dtype, one after another. A turn's roundings in
    one leaf change the norm, and so the next turn's factor of all leaves.
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
        # Errors of repeated rounding need not cancel. Example: bfloat16 numbers that shrink by 1 %
        # a turn. After 128 roundings they are 8 % too large, in large leaves too.
        if not relative <= (2 + 0.25 * roundings) * eps + slack * sums:  # NaN fails too
            return f"leaf {i} is off by {relative:.1e} of its norm", relative
        worst = max(worst, relative)
    return "", worst
