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
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_gradops._kernel.array_types import Arrays, MeshAxes, accum_dtype, axes_of
from jax_gradops._kernel.layout import Layout, even, layout_of
from jax_gradops._kernel.primitive import Operation
from jax_gradops._kernel.spec import Call

#: Runs a call on one device's arrays: (call, *arrays) -> results.
Compute: TypeAlias = Callable[..., Arrays]
#: (partial sums of one device, mesh axes over which their rows are sharded) -> sums of all shards.
SumOver: TypeAlias = Callable[[list[jax.Array], MeshAxes], list[jax.Array]]

# --- The call of one device ----------------------------------------------------------------------


def _psum(parts: list[jax.Array], axes: MeshAxes) -> list[jax.Array]:
    return lax.psum(parts, axes) if axes else parts


def _local(
    call: Call, compute: Compute, layout: Layout, over: _Partitions
) -> Callable[..., Arrays]:
    """The computation of one device. `over.total` adds up the partial sums of all devices."""
    if call.elementwise:
        return functools.partial(compute, call)
    if call.kernel.variadic:
        return _local_variadic(call, compute, layout, over.total)
    has_sums = any("n" not in r.dims for r in call.wanted)
    if call.kernel.stages is not None and has_sums and layout.row_axes[0]:
        return _local_in_stages(call, compute, layout, over)

    def local(*arrays: jax.Array) -> Arrays:
        results = compute(call.partial(), *arrays)
        is_sum = ["n" not in t.dims for t in call.wanted]
        parts = [r for r, summed in zip(results, is_sum, strict=True) if summed]
        sums = iter(over.total(parts, layout.row_axes[0]) if parts else [])
        whole = [next(sums) if s else r for r, s in zip(results, is_sum, strict=True)]
        return call.rounded(whole)

    return local


def _local_in_stages(
    call: Call, compute: Compute, layout: Layout, over: _Partitions
) -> Callable[..., Arrays]:
    """First computes the shard's results without ``n``. Their totals then give the others."""
    stages, spread = call.kernel.stages, layout.row_axes[0]
    assert stages is not None

    def wanted(stage: Call) -> list[str]:
        return [name for name, _ in stage.named if name not in stage.skip]

    def local(*arrays: jax.Array) -> Arrays:
        first = call.stage(None)
        partial = dict(zip(wanted(first), compute(first, *arrays), strict=True))
        with_rows = (a for a, dims in zip(arrays, call.in_dims, strict=True) if "n" in dims)
        axes = call.axes(next(with_rows).shape[call.groups :])
        results, given = stages(
            partial,
            lambda parts: over.total(list(parts), spread),
            math.prod(over.axes[a] for a in spread),
            math.prod((*axes["n"], *axes["m"])),
            **dict(call.attributes),
        )
        second = call.stage(list(given))
        if second.wanted:
            others = compute(second, *call.operands(arrays, given))
            results |= dict(zip(wanted(second), others, strict=True))
        return call.rounded([results[name] for name in wanted(call)])

    return local


def _local_variadic(
    call: Call, compute: Compute, layout: Layout, total: SumOver
) -> Callable[..., Arrays]:
    """Sums up arrays with equal mesh axes in one kernel call. A replicated array counts once."""

    def local(*arrays: jax.Array) -> Arrays:
        dtype = accum_dtype(*(a.dtype for a in arrays))
        sums: list[jax.Array] = []
        for axes in dict.fromkeys(layout.row_axes):
            members = [a for a, r in zip(arrays, layout.row_axes, strict=True) if r == axes]
            parts = [r.astype(dtype) for r in compute(call, *members)]
            parts = total(parts, axes)
            sums = list(map(jnp.add, sums, parts)) if sums else parts
        return tuple(sums)

    return local


# --- The call of all devices ---------------------------------------------------------------------


class _Partitions(NamedTuple):
    """The devices over which XLA spreads a call, as axes."""

    # Prime factors of mesh axes: a reshape may shard over a part of data=4, which is 2 x 2 here.
    axes: dict[str, int]
    # The mesh with the axes above, for shardings.
    mesh: Mesh | AbstractMesh
    # The mesh with the axes that `total` names.
    lowering_mesh: Mesh | AbstractMesh
    total: SumOver
    # Whether a call with sums may be sharded along its rows only.
    rows_only: bool


def _of_whole_mesh(mesh: Mesh, sharding: Any) -> _Partitions:
    """For a mesh without Manual axes: XLA numbers the devices in the mesh's order."""
    axes = _factors(dict(mesh.shape) or {"devices": sharding.num_devices})
    devices = np.array(sharding._device_assignment).reshape(tuple(axes.values()))
    fine = Mesh(devices, tuple(axes))
    return _Partitions(axes, fine, fine, _psum, rows_only=False)


def _beside_manual(context: AbstractMesh) -> _Partitions:
    """Inside a shard_map over other axes: XLA partitions over the Auto axes only.

    XLA numbers the devices of the Auto axes in an unknown order. The axis names in the shardings
    here may be wrong. Only a sum over all these devices is sure to be over the right ones. Each
    partial sum occurs several times in that sum.
    """
    auto = axes_of(AxisType.Auto, context)
    axes = _factors(auto)
    everywhere = tuple(auto)

    def total(parts: list[jax.Array], spread: MeshAxes) -> list[jax.Array]:
        copies = math.prod(axes.values()) // math.prod(axes[a] for a in spread)
        return lax.psum([part / copies for part in parts], everywhere)

    names = AbstractMesh(context.axis_sizes, context.axis_names)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return _Partitions(axes, mesh, names, total, rows_only=True)


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
        has_sums = any("n" not in r.dims for r in self.call.wanted)
        specs = [_decoded(o.sharding, over.axes, len(o.shape)) for o in operands]
        if has_sums:
            # XLA pads shards of unequal sizes, and sums must not contain the padding.
            specs = [even(s, o.shape, over.axes) for s, o in zip(specs, operands, strict=True)]
        ndims = [len(o.shape) for o in operands]
        return layout_of(self.call, specs, ndims, rows_only=has_sums and over.rows_only), over

    def _partition(self, mesh: Any, operands: Any, results: Any) -> Any:
        del results
        layout, over = self._layout(mesh, operands)
        local = _local(self.call, self.compute_shard, layout, over)

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
        # Shardy's notation, for example `n0 n1 d, d, d -> n0 n1 d, n0 n1, n0 n1`.
        del mesh
        call = self.call
        group_factors = [f"g{i}" for i in range(call.groups)]

        def term(dims: str, ndim: int, prefix: str = "") -> str:
            if "n" not in dims and ndim == len(dims):  # shared by all groups
                return " ".join(dims)
            sizes = {"d": 1, "m": call.inner}
            sizes["n"] = ndim - call.groups - sum(sizes[c] for c in dims if c != "n")
            factors = [f"{prefix}{c}{i}" if c in "nm" else c for c in dims for i in range(sizes[c])]
            return " ".join(group_factors + factors)

        ndims = [len(o.shape) for o in operands]
        prefixes = [_letters(i) if call.kernel.variadic else "" for i in range(len(ndims))]
        left = map(term, call.in_dims, ndims, prefixes)
        of_results = prefixes[: call.arrays] if call.elementwise else [""] * len(results)
        ndims = [len(t.shape) for t in results]
        right = map(term, (r.dims for r in call.wanted), ndims, of_results)
        whole = tuple(call.kernel.whole)
        return f"{', '.join(left)} -> {', '.join(right)}", {
            "need_replication_factors": whole
        } if whole else {}


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


def _letters(i: int) -> str:
    """The number in letters (26 is "ba"): Shardy's factor names have digits at their end only."""
    return ("" if i < 26 else _letters(i // 26)) + chr(ord("a") + i % 26)
