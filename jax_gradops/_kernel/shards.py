"""Reductions over the shards of arrays, wherever the shards are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_gradops._kernel.array_types import MeshAxes
from jax_gradops._kernel.spec import Named, Result

#: Arrays that have at most this many elements together are sent as one.
PACKED = 2**16
#: `Shards.gathered` works for at most this many shards.
FEW = 8


class Collectives(NamedTuple):
    """Reductions over devices, or over the indices of a mapped axis. Each takes names of axes.

    `shard` is the number of this shard. None: nobody knows it.
    """

    size: Callable[[MeshAxes], int]
    total: Callable[[list[jax.Array], MeshAxes], list[jax.Array]] = lax.psum
    largest: Callable[[list[jax.Array], MeshAxes], list[jax.Array]] = lax.pmax
    shard: Callable[[MeshAxes], jax.Array] | None = lax.axis_index


#: For the axes of `jax.shard_map`, `jax.pmap` and `jax.vmap`.
MAPPED = Collectives(lambda axes: lax.psum(1, axes))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of one call. `Stages.combine` takes them.

    In all methods, `dims` are the axes of a result. They say what is reduced: all other axes.

    Attributes:
      axes: for each letter, the names of the axes over which it is sharded.
      lengths: for each letter, the number of elements along its axes in one shard.
    """

    collectives: Collectives
    axes: Mapping[str, MeshAxes]
    lengths: Mapping[str, Any]

    def _over(self, dims: str) -> MeshAxes:
        reduced = (axes for letter, axes in self.axes.items() if letter not in dims)
        return tuple(name for axes in reduced for name in axes)

    def number(self, dims: str) -> int:
        """The number of shards that are reduced to one."""
        axes = self._over(dims)
        return self.collectives.size(axes) if axes else 1

    def terms(self, dims: str) -> Any:
        """The number of elements that all shards together reduce to one."""
        reduced = (length for letter, length in self.lengths.items() if letter not in dims)
        return self.number(dims) * math.prod(reduced)

    def total(self, dims: str, parts: list[jax.Array]) -> list[jax.Array]:
        """The sum over shards, for each array."""
        axes = self._over(dims)
        if not axes or not parts:
            return parts
        if len({part.dtype for part in parts}) > 1 or sum(part.size for part in parts) > PACKED:
            return self.collectives.total(parts, axes)
        # On GPUs, XLA has a fast kernel for one small array, but not for several arrays.
        (packed,) = self.collectives.total([jnp.concatenate([p.ravel() for p in parts])], axes)
        ends = list(itertools.accumulate(part.size for part in parts))
        split = jnp.split(packed, ends[:-1])
        return [found.reshape(part.shape) for found, part in zip(split, parts, strict=True)]

    def gathered(self, dims: str, parts: list[jax.Array]) -> list[jax.Array] | None:
        """The arrays of all shards along a new first axis, by one sum. None if this is costly.

        Each shard adds its arrays to zeros, so that the sum is exact.
        """
        axes, number = self._over(dims), self.number(dims)
        if self.collectives.shard is None or not axes or number > FEW:
            return None
        own = jnp.arange(number, dtype=jnp.int32) == self.collectives.shard(axes)

        def place(part: jax.Array) -> jax.Array:
            return jnp.where(jnp.expand_dims(own, range(1, part.ndim + 1)), part[None], 0)

        return self.total(dims, list(map(place, parts)))

    def largest(self, dims: str, parts: list[jax.Array]) -> list[jax.Array]:
        """The maximum over shards, for each array."""
        axes = self._over(dims)
        return self.collectives.largest(parts, axes) if axes and parts else parts

    def summed(self, found: Named, results: Mapping[str, Result]) -> Named:
        """`found`, with the sum over shards for each result that is a sum."""
        totals = dict(found)
        for dims in dict.fromkeys(r.dims for r in results.values()):
            names = [name for name, r in results.items() if r.dims == dims and r.sum]
            totals |= zip(names, self.total(dims, [found[n] for n in names]), strict=True)
        return totals
