"""Reductions over the shards of arrays, wherever the shards are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_gradops._kernel.array_types import MeshAxes
from jax_gradops._kernel.spec import Named, Result

#: Arrays with at most this many elements together are small.
SMALL = 2**16
#: `Shards.gathered` works for at most this many shards.
FEW = 8


class Collectives(NamedTuple):
    """Reductions over devices, or over the indices of a mapped axis. Each takes names of axes.

    `index_of` gives the index of this shard. It is None where nobody knows the index.
    """

    size: Callable[[MeshAxes], int]
    total: Callable[[list[jax.Array], MeshAxes], list[jax.Array]] = lax.psum
    largest: Callable[[list[jax.Array], MeshAxes], list[jax.Array]] = lax.pmax
    index_of: Callable[[MeshAxes], jax.Array] | None = lax.axis_index


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
        alike = len({(part.shape, part.dtype) for part in parts}) == 1
        if len(parts) == 1 or not alike or _size(parts) > SMALL:
            return self.collectives.total(parts, axes)
        # On GPUs, XLA has a fast kernel for one small array, but not for several arrays.
        return list(self.collectives.total([jnp.stack(parts)], axes)[0])

    def gathered(self, dims: str, parts: list[jax.Array]) -> list[jax.Array] | None:
        """The arrays of all shards along a new first axis, by one sum.

        Each shard adds its arrays to zeros, so that the sum is exact. The result is None if nothing
        is reduced, if there are many shards or large arrays, or if the shard's index is unknown.
        """
        axes, number = self._over(dims), self.number(dims)
        if not axes or number > FEW or number * _size(parts) > SMALL:
            return None
        if self.collectives.index_of is None:
            return None
        own = jnp.arange(number, dtype=jnp.int32) == self.collectives.index_of(axes)

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


def _size(arrays: list[jax.Array]) -> int:
    """The number of elements of all arrays."""
    return sum(array.size for array in arrays)
