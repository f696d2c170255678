"""Helpers for array types: the dtype of sums, shardings, and the axes of meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

Arrays: TypeAlias = tuple[jax.Array, ...]
#: Names of axes of a mesh.
MeshAxes: TypeAlias = tuple[str, ...]


def accum_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype of sums, statistics and parameters: float64 if in `dtypes`, else float32."""
    return jnp.dtype(jnp.float64 if any(d == jnp.float64 for d in dtypes) else jnp.float32)


def axes_of(kind: AxisType, mesh: AbstractMesh) -> dict[str, int]:
    """Names and sizes of the mesh axes of one kind."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, k in axes if k == kind}


def mesh_of(arrays: Sequence[jax.Array]) -> AbstractMesh:
    """The mesh in the types of arrays (it may differ from the context's), or the context's mesh."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays)
    return next((m for m in meshes if not m.empty), jax.sharding.get_abstract_mesh())


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which a value varies inside `shard_map`."""
    # The attribute exists in jax 0.10 to 0.12. With check_vma=False the set is empty.
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_vma(
    *arrays: jax.Array | None, sums: Sequence[Any] | None = None
) -> tuple[jax.Array | None, ...]:
    """Inside `shard_map`, makes all arrays vary over the same mesh axes.

    The transpose of this cast is a sum over the added axes. `sums` has the dtype of this sum for
    each array: a narrower array is cast to it first. None keeps the array's own dtype.
    """
    axes = frozenset().union(*(varying(a) for a in arrays if a is not None))

    def cast(a: jax.Array | None, dtype: Any) -> jax.Array | None:
        missing = () if a is None else tuple(sorted(axes - varying(a)))
        if a is None or not missing:
            return a
        is_float = jnp.issubdtype(a.dtype, jnp.floating)
        if dtype is not None and is_float and a.dtype.itemsize < dtype.itemsize:
            a = a.astype(dtype)
        return lax.pcast(a, missing, to="varying")

    return tuple(map(cast, arrays, sums or [None] * len(arrays)))


def result_type(like: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
    """The type of one device's result: the type of `like`, with this shape and dtype, unsharded."""
    type_ = jax.typeof(like)
    spec = PartitionSpec(*[None] * len(shape))
    return type_.update(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        sharding=type_.sharding.update(spec=spec),
        weak_type=False,
    )


def for_each(a: jax.Array, size: int, like: jax.Array | None) -> jax.Array:
    """Repeats `a` along a new leading axis, sharded as the leading axis of `like`."""
    if like is None:
        return jnp.broadcast_to(a, (size, *a.shape))
    sharding = jax.typeof(like).sharding
    spec = PartitionSpec(sharding.spec[0], *jax.typeof(a).sharding.spec)
    return lax.broadcast(a, (size,), out_sharding=sharding.update(spec=spec))


def gathered(x: jax.Array, begin: int) -> jax.Array:
    """Gathers the axes of x from `begin` on (Explicit mesh). A reshape can then merge them."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec[begin:]):
        return x
    spec = PartitionSpec(*sharding.spec[:begin], *[None] * (x.ndim - begin))
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def reshard_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Shards y as x (Explicit mesh). `invoke.prepare` may have resharded what y is made of."""
    return like_type(y, jax.typeof(x))


def like_type(y: jax.Array, type_of_x: Any) -> jax.Array:
    """Shards y as an array of a type is (Explicit mesh)."""
    sharding = type_of_x.sharding
    return jax.sharding.reshard(y, sharding) if axes_of(AxisType.Explicit, sharding.mesh) else y
