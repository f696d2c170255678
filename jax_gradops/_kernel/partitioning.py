"""One kernel call on arrays that XLA shards (Auto axes, or no mesh in the context).

XLA says at compile time how the operands are sharded. The kernel chooses the nearest shardings that
it can work with. Each device then runs the kernel on its own shards.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_gradops._kernel.array_types import Arrays, MeshAxes, axes_of
from jax_gradops._kernel.call import Call, Compute
from jax_gradops._kernel.error_checks import without_error_checks
from jax_gradops._kernel.layout import Layout, even
from jax_gradops._kernel.primitive import Operation
from jax_gradops._kernel.shards import Collectives


class _Partitions(NamedTuple):
    """The devices over which XLA spreads a call, as axes."""

    # Prime factors of mesh axes: a reshape may shard over a part of data=4, which is 2 x 2 here.
    axes: dict[str, int]
    # The mesh with the axes above, for shardings.
    mesh: Mesh | AbstractMesh
    # The mesh with the axes that `collectives` name.
    lowering_mesh: Mesh | AbstractMesh
    collectives: Collectives
    # Whether `collectives` reduce over all devices only.
    everywhere: bool


def _of_whole_mesh(mesh: Mesh, sharding: Any) -> _Partitions:
    """For a mesh without Manual axes: XLA numbers the devices in the mesh's order."""
    axes = _factors(dict(mesh.shape) or {"devices": sharding.num_devices})
    devices = np.array(sharding._device_assignment).reshape(tuple(axes.values()))
    fine = Mesh(devices, tuple(axes))
    return _Partitions(axes, fine, fine, Collectives(_size_of(axes)), everywhere=False)


def _beside_manual(context: AbstractMesh) -> _Partitions:
    """Inside a shard_map over other axes: XLA partitions over the Auto axes only.

    XLA numbers the devices of the Auto axes in an unknown order. The axis names in the shardings
    here may be wrong. Only a sum over all these devices is sure to be over the right ones. Each
    partial sum occurs several times in that sum.
    """
    auto = axes_of(AxisType.Auto, context)
    axes = _factors(auto)
    everywhere, size = tuple(auto), _size_of(axes)

    def total(parts: list[jax.Array], spread: MeshAxes) -> list[jax.Array]:
        copies = math.prod(axes.values()) // size(spread)
        return lax.psum([part / copies for part in parts], everywhere)

    def largest(parts: list[jax.Array], spread: MeshAxes) -> list[jax.Array]:
        del spread
        return lax.pmax(parts, everywhere)

    names = AbstractMesh(context.axis_sizes, context.axis_names)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return _Partitions(axes, mesh, names, Collectives(size, total, largest, None), everywhere=True)


def _size_of(axes: Mapping[str, int]) -> Callable[[MeshAxes], int]:
    return lambda names: math.prod(axes[name] for name in names)


def _factors(axes: Mapping[str, int]) -> dict[str, int]:
    """Splits each mesh axis into axes of prime sizes."""
    factors = {}
    for name, size in axes.items():
        prime = 2
        while size > 1:
            while size % prime:
                prime += 1
            size //= prime
            factors[f"{name}.{len(factors)}"] = prime
    return factors or {"one": 1}


@dataclasses.dataclass(frozen=True)
class Partitioned(Operation):
    """A call whose operands XLA may spread over the Auto axes of the mesh.

    Attributes:
      compute_shard: runs a call on one device's arrays.
      context: the mesh around the call.
      name: identifies the call with all its static values.
    """

    call: Call
    compute_shard: Compute
    context: AbstractMesh
    name: str

    def compute(self, *arrays: jax.Array) -> Arrays:
        op = custom_partitioning(functools.partial(self.compute_shard, self.call))
        op.def_partition(
            partition=self._partition,
            sharding_rule=self._sharding_rule,
            infer_sharding_from_operands=self._infer,
            decode_shardings=False,
        )
        return op(*arrays)

    def lower(self, lowering: Callable[[], Sequence[Any]], context: Any) -> Sequence[Any]:
        results = lowering()
        _name_partitioning(results, context.module_context, self.name)
        return results

    def _layout(self, mesh: Any, operands: Sequence[Any]) -> tuple[Layout, _Partitions]:
        """The layout that is nearest to the operands' shardings."""
        if axes_of(AxisType.Manual, self.context):
            over = _beside_manual(self.context)
        else:
            over = _of_whole_mesh(mesh, operands[0].sharding)
        specs = [_decoded(o.sharding, over.axes, len(o.shape)) for o in operands]
        if self.call.has_sums:
            # XLA pads shards of unequal sizes, and sums must not contain the padding.
            specs = [even(s, o.shape, over.axes) for s, o in zip(specs, operands, strict=True)]
        ndims = [len(o.shape) for o in operands]
        return self.call.layout(specs, ndims, everywhere=over.everywhere), over

    def _partition(self, mesh: Any, operands: Any, results: Any) -> Any:
        del results
        layout, over = self._layout(mesh, operands)
        local = self.call.local(self.compute_shard, layout, over.collectives)

        @without_error_checks()
        def lowered(*arrays: jax.Array) -> Arrays:
            # Hides the caller's mesh: for its Explicit axes, JAX would annotate operations with
            # shardings. XLA no longer accepts shardings here.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return local(*arrays)

        shardings = [tuple(NamedSharding(over.mesh, s) for s in specs) for specs in layout[:2]]
        return over.lowering_mesh, lowered, shardings[1], shardings[0]

    def _infer(self, mesh: Any, operands: Any, results: Any) -> Any:
        """The results' shardings, for GSPMD: the partitioner before Shardy."""
        del results
        layout, over = self._layout(mesh, operands)
        return tuple(NamedSharding(over.mesh, s) for s in layout.results)

    def _sharding_rule(self, mesh: Any, operands: Any, results: Any) -> Any:
        del mesh
        ndims = ([len(t.shape) for t in types] for types in (operands, results))
        return self.call.sharding_rule(*ndims)


def _name_partitioning(results: Sequence[Any], module: Any, name: str) -> None:
    """Gives a custom_partitioning call a name that is the same in each process.

    A Python object says how to partition. JAX names this object by its address, and the name is
    part of the key of the persistent compilation cache. No other process finds the program then. If
    addresses are equal (after a fork), a process finds a wrong program. The name here identifies
    everything that the object depends on. JAX 0.10 to 0.12 keep these objects in a dictionary of a
    private module. Without this dictionary, the address stays.
    """
    private = sys.modules.get("jax._src.custom_partitioning")
    objects = getattr(private, "_sharding_callbacks", None)
    operation: Any = getattr(results[0], "owner", None)
    attributes: Any = getattr(operation, "attributes", ())
    if objects is None or "call_target_name" not in attributes:
        return
    if attributes["call_target_name"].value != "CustomSPMDPartitioning":
        return  # on one device there is nothing to partition
    found = objects[attributes["backend_config"].value.encode()]
    where = module.axis_context
    devices = getattr(where, "device_assignment", None) or where.mesh.devices.flat
    depends_on = (
        module.platforms,
        [getattr(d, "id", None) for d in devices],
        (found.mesh.axis_names, found.mesh.devices.shape),
        [getattr(d, "id", None) for d in found.mesh.devices.flat],
        sorted(getattr(where, "manual_axes", ())),
        str(getattr(where, "abstract_mesh", None)),
        found.infer_sharding_from_operands is None,  # with Shardy
        [str(v.type) for v in (*operation.operands, *results)],
    )
    digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:24]
    key = f"{name}_{digest}"
    same = objects.get(key.encode())
    if same is None or same.module_context.backend is not found.module_context.backend:
        objects[key.encode()] = found
    else:
        module.add_keepalive(same)  # else it may be gone before this program is compiled
    attributes["backend_config"] = mlir.ir.StringAttr.get(key)


def _decoded(sharding: Any, axes: dict[str, int], ndim: int) -> Any:
    """Turns XLA's description of a sharding over a mesh with these axes into axis names.

    What axis names cannot express (half of an axis, say) becomes replicated.
    """
    if sharding is None:  # GSPMD knows no sharding
        return PartitionSpec(*[None] * ndim)
    tiling = sharding._to_xla_hlo_sharding(ndim)
    if tiling.is_replicated():
        return PartitionSpec(*[None] * ndim)
    tiles = np.reshape(tiling.tile_assignment_devices(), tiling.tile_assignment_dimensions())
    devices = np.arange(tiles.size).reshape(tuple(axes.values()))
    position = np.empty((tiles.size, tiles.ndim), np.int64)
    position[tiles.ravel()] = np.stack(np.unravel_index(np.arange(tiles.size), tiles.shape), -1)
    # By how many tiles does one step along a mesh axis move, along each axis of the array?
    spec: list[list[tuple[int, str]]] = [[] for _ in range(tiles.ndim)]
    for i, (name, size) in enumerate(axes.items()):
        if size > 1:
            step = position[devices.take(1, i).flat[0]] - position[devices.take(0, i).flat[0]]
            spec[int(np.argmax(np.abs(step)))].append((int(np.max(step)), name))
    named = PartitionSpec(*(tuple(n for _, n in sorted(e, reverse=True)) for e in spec[:ndim]))
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    same = NamedSharding(mesh, named)._to_xla_hlo_sharding(ndim) == tiling
    return named if same else PartitionSpec(*[None] * ndim)
