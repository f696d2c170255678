"""Kernels of trees: any number of arrays, each with its own axes.

`TreeKernel` declares such a kernel, and `invoke` runs it. Only the declaration and the class of
calls differ from kernels of rows: the layers in `invoke.py` serve both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import Arrays, MeshAxes, accum_dtype, for_each, result_type
from jax_gradops._kernel.call import Compute, HandlerCall, scratch_type
from jax_gradops._kernel.invoke import run
from jax_gradops._kernel.layout import Layout, mesh_axes, padded
from jax_gradops._kernel.shards import Collectives


@dataclasses.dataclass(frozen=True, eq=False)
class TreeKernel:
    """One native handler: its operands, its results, and a reference that computes the same.

    The first operands are the tree's arrays.

    Attributes:
      name: the handler's name; the custom call's target is ``jax_gradops.<name>``.
      reference: computes all results in `jax.numpy`, without group axes.
      scalars: names of the operands that follow the arrays.
      sums: names of the results, which are sums over all elements of all arrays, in the
        accumulation dtype. Without names, each array has one result of its type. The result takes
        over the array's memory (see `Kernel.in_place`).
      workspace: shape of an extra scratch result. It takes the number of groups. The elements are
        as wide as the accumulation dtype.
    """

    name: str
    reference: Callable[..., Arrays]
    scalars: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    workspace: Callable[[int], tuple[int, ...]] | None = None


def invoke(
    kernel: TreeKernel, *operands: jax.Array, implementation: Implementation = None
) -> Arrays:
    """Runs the kernel, or its reference. `implementation` is as in the public functions."""
    call = TreeCall(kernel, len(operands) - len(kernel.scalars))
    return run(call, *operands, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class TreeCall:
    """A kernel with all static values: the number of arrays in the tree, and of group axes."""

    kernel: TreeKernel
    arrays: int
    groups: int = 0

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def text(self) -> str:
        return repr((self.kernel.name, self.arrays, self.groups))

    @property
    def has_sums(self) -> bool:
        return bool(self.kernel.sums)

    def reference(self, *arrays: jax.Array) -> Arrays:
        return tuple(self.kernel.reference(*arrays))

    def shared(self, arrays: Sequence[jax.Array]) -> list[bool]:
        return [False] * len(arrays)

    def vmapped(
        self, size: int, arrays: Sequence[jax.Array], mapped: Sequence[bool]
    ) -> tuple[TreeCall, list[jax.Array]]:
        like = next(a for a, m in zip(arrays, mapped, strict=True) if m)
        lifted = [a if m else for_each(a, size, like) for a, m in zip(arrays, mapped, strict=True)]
        return dataclasses.replace(self, groups=self.groups + 1), lifted

    def handler_call(self, arrays: Sequence[jax.Array]) -> HandlerCall:
        x, sums = arrays[0], self.kernel.sums
        lead, accum = x.shape[: self.groups], accum_dtype(*(a.dtype for a in arrays))
        if sums:
            types = [result_type(x, lead, accum)] * len(sums)
        else:
            types = [result_type(a, a.shape, a.dtype) for a in arrays[: self.arrays]]
        wanted = [(i, found.shape) for i, found in enumerate(types)]
        aliases = {} if sums else {i: i for i, _ in wanted}
        if self.kernel.workspace is not None:
            shape = self.kernel.workspace(math.prod(lead))
            types = [*types, scratch_type(x, shape, accum)]
        return HandlerCall(arrays, types, aliases, {}, wanted)

    def layout(
        self, specs: Sequence[Any], ndims: Sequence[int], *, everywhere: bool = False
    ) -> Layout:
        # Each array keeps its sharding, but all arrays get one common sharding of the group axes.
        entries = list(map(padded, specs, ndims))
        lead = max((spec[: self.groups] for spec in entries), key=lambda e: len(mesh_axes(e)))
        if everywhere and self.has_sums:
            lead = (None,) * self.groups
        taken = set(mesh_axes(lead))
        free = (
            [e if taken.isdisjoint(mesh_axes([e])) else None for e in spec[self.groups :]]
            for spec in entries
        )
        operands = tuple(PartitionSpec(*lead, *spec) for spec in free)
        sums = tuple(PartitionSpec(*lead) for _ in self.kernel.sums)
        return Layout(operands, sums or operands[: self.arrays])

    def local(
        self, compute: Compute, layout: Layout, collectives: Collectives
    ) -> Callable[..., Arrays]:
        spread = [mesh_axes(spec[self.groups :]) for spec in layout.operands]

        def of_mesh_axes(axes: MeshAxes, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            """The sums of the arrays that are sharded over these mesh axes, in one kernel call."""
            members = [a for a, s in zip(arrays, spread, strict=True) if s == axes]
            dtype = accum_dtype(*(a.dtype for a in arrays))
            call = dataclasses.replace(self, arrays=len(members))
            parts = [r.astype(dtype) for r in compute(call, *members)]
            return collectives.total(parts, axes) if axes else parts

        def local(*arrays: jax.Array) -> Arrays:
            if not self.has_sums:
                return compute(self, *arrays)
            parts = [of_mesh_axes(axes, arrays) for axes in dict.fromkeys(spread)]
            return tuple(functools.reduce(jnp.add, some) for some in zip(*parts, strict=True))

        return local

    def sharding_rule(self, ndims: Sequence[int], result_ndims: Sequence[int]) -> tuple[str, dict]:
        del result_ndims
        lead = [f"vmap{i}" for i in range(self.groups)]
        terms = [
            " ".join([*lead, *(f"{_letters(i)}n{j}" for j in range(ndim - len(lead)))])
            for i, ndim in enumerate(ndims)
        ]
        results = [" ".join(lead)] * len(self.kernel.sums) or terms[: self.arrays]
        return f"{', '.join(terms)} -> {', '.join(results)}", {}


def _letters(i: int) -> str:
    """The number in letters (26 is "ba"): Shardy's factor names have digits at their end only."""
    return ("" if i < 26 else _letters(i // 26)) + chr(ord("a") + i % 26)
