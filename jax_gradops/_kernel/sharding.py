"""Runs one kernel call on sharded arrays. The kinds of the mesh's axes decide how.

- Explicit axes: shardings are part of types. The operands are resharded, and the results'
  shardings are declared. Inside the call these axes are Auto.
- Auto axes, or no mesh in the context: `custom_partitioning` with a Shardy rule.
  `partitioning.py` has this case.
- Manual axes only (inside `shard_map`): a plain call, because the arrays are one device's.

A mesh may have axes of all three kinds. A bare `ffi_call` would gather the whole batch to every
device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jax_gradops._kernel.array_types import Arrays, axes_of, mesh_of
from jax_gradops._kernel.call import Call, Compute
from jax_gradops._kernel.layout import Layout
from jax_gradops._kernel.partitioning import Partitioned


def sharded(call: Call, compute: Compute, name: str) -> Callable[..., Arrays]:
    """The kernel as a function of arrays that may be sharded.

    `name` identifies the call with all its static values.
    """
    return with_auto_axes(call, lambda *arrays: _within_types(call, compute, name)(*arrays))


def with_auto_axes(call: Call, function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """A function of arrays on an Explicit mesh. Inside `function`, the Explicit axes are Auto."""

    def op(*arrays: jax.Array) -> Arrays:
        operands, layout = reshard_operands(call, arrays)
        if layout is None:
            return function(*arrays)
        mesh = mesh_of(arrays)
        within: Any = jax.sharding.auto_axes(
            function,
            axes=tuple(axes_of(AxisType.Explicit, mesh)),
            out_sharding=tuple(NamedSharding(mesh, s) for s in layout.results),
        )
        return within(*operands)

    return op


def _within_types(call: Call, compute: Compute, name: str) -> Callable[..., Arrays]:
    """The kernel as a function of arrays whose types have no sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(axes_of(AxisType.Auto, mesh).values()) > 1:
        return Partitioned(call, compute, mesh, name)
    return functools.partial(compute, call)  # the arrays are one device's


def reshard_operands(
    call: Call, arrays: Sequence[jax.Array]
) -> tuple[list[jax.Array], Layout | None]:
    """On an Explicit mesh: the operands, sharded as the kernel needs them, and the layout."""
    mesh = mesh_of(arrays)
    if not axes_of(AxisType.Explicit, mesh):
        return list(arrays), None
    types = [jax.typeof(a) for a in arrays]
    layout = call.layout([t.sharding.spec for t in types], [t.ndim for t in types])
    return [
        jax.sharding.reshard(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, layout.operands, strict=True)
    ], layout
