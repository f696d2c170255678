"""Shardings of a call's arrays, and arithmetic with `PartitionSpec`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jax_gradops._kernel.array_types import MeshAxes


class Layout(NamedTuple):
    """The shardings of one call on a mesh."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


def mesh_axes(entries: Iterable[Any]) -> MeshAxes:
    """All mesh axes in some entries of a `PartitionSpec`."""
    axes: list[str] = []
    for entry in entries:
        axes += () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(axes)


def padded(spec: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    """One entry for each axis of an array."""
    return (*spec, *[None] * (ndim - len(spec)))


def even(spec: Any, shape: Sequence[int], sizes: Mapping[str, int]) -> Any:
    """`spec` without the mesh axes that would give shards of unequal sizes."""
    entries = zip(padded(spec, len(shape)), shape, strict=True)
    return PartitionSpec(
        *(None if n % math.prod(sizes[a] for a in mesh_axes([e])) else e for e, n in entries)
    )
