"""Chooses the shardings that a kernel can work with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from jax_gradops._kernel.array_types import MeshAxes
from jax_gradops._kernel.spec import Call


class Layout(NamedTuple):
    """The shardings of one call on a mesh."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    # For each operand, the mesh axes over which its rows are sharded.
    row_axes: tuple[MeshAxes, ...]


def _as_axes(entry: Any) -> MeshAxes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _padded(spec: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


def _count_axes(spec: Sequence[Any]) -> int:
    return sum(len(_as_axes(e)) for e in spec)


def layout_of(
    call: Call,
    specs: Sequence[Any],
    ndims: Sequence[int],
    *,
    rows_only: bool = False,
) -> Layout:
    """The shardings that the kernel can work with and that are nearest to the operands' `specs`."""
    groups = call.groups
    padded = [_padded(s, n) for s, n in zip(specs, ndims, strict=True)]
    if rows_only:
        padded = [(*[None] * groups, *spec[groups:]) for spec in padded]
    if call.kernel.variadic:
        # Each array keeps its sharding, but all arrays get one common sharding of the group axes.
        lead = max((spec[:groups] for spec in padded), key=_count_axes)
        taken = {a for e in lead for a in _as_axes(e)}
        free = [
            [e if taken.isdisjoint(_as_axes(e)) else None for e in spec[groups:]] for spec in padded
        ]
        operands = tuple(PartitionSpec(*lead, *spec) for spec in free)
        rows = tuple(tuple(a for e in spec for a in _as_axes(e)) for spec in free)
        if call.elementwise:
            return Layout(operands, operands[: call.arrays], rows)
        return Layout(operands, tuple(PartitionSpec(*lead) for _ in call.wanted), rows)
    # The activation sharded over the most mesh axes decides: a cotangent may be replicated.
    kept = slice(None, -1) if "d" in call.kernel.whole else slice(None)
    first = max(
        (s for s, dims in zip(padded, call.in_dims, strict=True) if dims.startswith("nd")),
        key=lambda spec: _count_axes(spec[kept]),
    )
    lead, letters = first[:groups], call.axes(first[groups:])
    for letter in "d" if rows_only else call.kernel.whole:
        letters[letter] = tuple(None for _ in letters[letter])

    def spec(dims: str, lead: Sequence[Any]) -> PartitionSpec:
        return PartitionSpec(*lead, *(e for letter in dims for e in letters[letter]))

    operands = tuple(
        spec(dims, lead if "n" in dims or ndim > len(dims) else ())
        for dims, ndim in zip(call.in_dims, ndims, strict=True)
    )
    row_axes = tuple(a for e in (*letters["n"], *letters["m"]) for a in _as_axes(e))
    return Layout(
        operands, tuple(spec(r.dims, lead) for r in call.wanted), (row_axes,) * len(operands)
    )


def even(spec: Any, shape: Sequence[int], sizes: Mapping[str, int]) -> Any:
    """`spec` without the mesh axes that would give shards of unequal sizes."""
    entries = zip(_padded(spec, len(shape)), shape, strict=True)
    return PartitionSpec(
        *(None if n % math.prod(sizes[a] for a in _as_axes(e)) else e for e, n in entries)
    )
