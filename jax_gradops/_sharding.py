"""How one kernel call runs on sharded arrays, by the kind of mesh.

- Auto mesh, or no mesh in the context: `custom_partitioning` with a Shardy rule;
- Explicit mesh: shardings are part of types, so the operands are resharded and `shard_map` runs the
  call;
- inside `shard_map`: a plain call, as arrays are one device's already.

A bare `ffi_call` would gather the whole batch to every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jax_gradops._core import Call

Arrays: TypeAlias = tuple[jax.Array, ...]
#: Runs a call on one device's arrays: (call, number of group axes, *arrays) -> results.
Compute: TypeAlias = Callable[..., Arrays]


def accum_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype of sums, statistics and parameters: float32, or float64 if one of `dtypes` is."""
    return jnp.dtype(jnp.float64 if any(d == jnp.float64 for d in dtypes) else jnp.float32)


MeshAxes: TypeAlias = tuple[str, ...]


def mesh_kinds() -> set[AxisType]:
    """The kinds of the context's mesh axes; empty without a mesh."""
    return set(jax.sharding.get_abstract_mesh().axis_types)


def _varying(x: jax.Array) -> frozenset[str]:
    # jax 0.10 to 0.12: the mesh axes over which a value varies inside shard_map(check_vma=True).
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def match_vma(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Inside `shard_map`, makes all arrays vary over the same mesh axes."""
    axes = frozenset().union(*(_varying(a) for a in arrays if a is not None))

    def cast(a: jax.Array | None) -> jax.Array | None:
        missing = () if a is None else tuple(sorted(axes - _varying(a)))
        return lax.pcast(a, missing, to="varying") if missing else a

    return tuple(map(cast, arrays))


def result_type(like: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result of the local computation: `like`'s but for shape and dtype."""
    type_ = jax.typeof(like)
    spec = PartitionSpec(*[None] * len(shape))
    return type_.update(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        sharding=type_.sharding.update(spec=spec),
        weak_type=False,
    )


def reshard_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """On an Explicit mesh, shards y as x is, which `Kernel.prepare` may have changed."""
    if mesh_kinds() != {AxisType.Explicit}:
        return y
    return jax.sharding.reshard(y, jax.typeof(x).sharding.spec)


class Layout(NamedTuple):
    """How a call is laid out on a mesh."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    # For each operand, the mesh axes over which its rows are spread.
    row_axes: tuple[MeshAxes, ...]


def _as_axes(entry: Any) -> MeshAxes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _padded(spec: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


def _layout(
    call: Call, groups: int, specs: Sequence[Sequence[Any]], ndims: Sequence[int]
) -> Layout:
    """The shardings that the kernel can work with, nearest to those its operands have."""
    if call.kernel.variadic:
        # Every array stays as it is.
        operands = tuple(
            PartitionSpec(*[None] * groups, *_padded(s, n)[groups:])
            for s, n in zip(specs, ndims, strict=True)
        )
        rows = tuple(tuple(a for e in spec for a in _as_axes(e)) for spec in operands)
        return Layout(operands, tuple(PartitionSpec(*[None] * groups) for _ in call.wanted), rows)
    # The activation that is spread the most decides: a cotangent may come replicated.
    candidates = [
        _padded(s, n) for s, n, dims in zip(specs, ndims, call.in_dims, strict=True) if dims == "nd"
    ]
    first = max(candidates, key=lambda spec: sum(len(_as_axes(e)) for e in spec))
    lead = first[:groups]
    letters = {"n": first[groups:-1], "d": first[-1:]}
    for letter in call.kernel.whole:
        letters[letter] = tuple(None for _ in letters[letter])

    def spec(dims: str, lead: Sequence[Any]) -> PartitionSpec:
        return PartitionSpec(*lead, *(e for letter in dims for e in letters[letter]))

    operands = tuple(
        spec(dims, lead if "n" in dims or ndim > len(dims) else ())
        for dims, ndim in zip(call.in_dims, ndims, strict=True)
    )
    row_axes = tuple(a for e in letters["n"] for a in _as_axes(e))
    return Layout(
        operands, tuple(spec(r.dims, lead) for r in call.wanted), (row_axes,) * len(operands)
    )


def _local(
    call: Call, groups: int, compute: Compute, row_axes: Sequence[MeshAxes] | None = None
) -> Callable[..., Arrays]:
    """The computation of one device; sums over rows are completed over `row_axes`."""
    if call.kernel.variadic and row_axes is not None:
        # Arrays that are spread over the same mesh axes are summed together; a replicated one once.
        def local(*arrays: jax.Array) -> Arrays:
            totals = None
            dtype = accum_dtype(*(a.dtype for a in arrays))
            for axes in dict.fromkeys(row_axes):
                group = [a for a, r in zip(arrays, row_axes, strict=True) if r == axes]
                part = [r.astype(dtype) for r in compute(call, groups, *group)]
                part = lax.psum(part, axes) if axes else part
                totals = part if totals is None else list(map(jnp.add, totals, part))
            assert totals is not None
            return tuple(totals)

        return local

    def local(*arrays: jax.Array) -> Arrays:
        results = compute(call, groups, *arrays)
        axes = row_axes[0] if row_axes else ()
        if not axes:
            return results
        sums = lax.psum(
            [r for r, t in zip(results, call.wanted, strict=True) if "n" not in t.dims], axes
        )
        completed = iter(sums)
        return tuple(
            next(completed) if "n" not in t.dims else r
            for r, t in zip(results, call.wanted, strict=True)
        )

    return local


def sharded(call: Call, groups: int, compute: Compute) -> Callable[..., Arrays]:
    """The kernel on arrays that may be sharded, by the kind of mesh in the context."""
    kinds = mesh_kinds()
    if AxisType.Manual in kinds:  # inside shard_map: arrays are one device's already
        return _local(call, groups, compute)
    if AxisType.Explicit in kinds:
        return _explicit(call, groups, compute)
    return _auto(call, groups, compute)


def reshard_operands(
    call: Call, groups: int, arrays: Sequence[jax.Array]
) -> tuple[list[jax.Array], Layout]:
    """On an Explicit mesh: operands sharded as the kernel can work with them, and the layout."""
    types = [jax.typeof(a) for a in arrays]
    layout = _layout(call, groups, [t.sharding.spec for t in types], [t.ndim for t in types])
    return [
        jax.sharding.reshard(a, s) for a, s in zip(arrays, layout.operands, strict=True)
    ], layout


def _explicit(call: Call, groups: int, compute: Compute) -> Callable[..., Arrays]:
    def op(*arrays: jax.Array) -> Arrays:
        operands, layout = reshard_operands(call, groups, arrays)
        local = _local(call, groups, compute, layout.row_axes)
        return jax.shard_map(
            local, in_specs=layout.operands, out_specs=layout.results, check_vma=False
        )(*operands)

    return op


@functools.lru_cache(maxsize=4096)  # JAX's caches go by the identity of functions
def _auto(call: Call, groups: int, compute: Compute) -> Callable[..., Arrays]:
    op = custom_partitioning(_local(call, groups, compute))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        layout = _layout(
            call, groups, [o.sharding.spec for o in operands], [len(o.shape) for o in operands]
        )
        shardings = [tuple(NamedSharding(mesh, s) for s in specs) for specs in layout[:2]]
        return mesh, _local(call, groups, compute, layout.row_axes), shardings[1], shardings[0]

    def sharding_rule(mesh: Any, operands: Any, results: Any) -> Any:
        # Shardy's notation, as in "n0 n1 d, d, d -> n0 n1 d, n0 n1, n0 n1".
        group_factors = [f"g{i}" for i in range(groups)]

        def term(dims: str, ndim: int, prefix: str = "") -> str:
            if "n" not in dims and ndim == len(dims):  # shared by all groups
                return " ".join(dims)
            rows = ndim - groups - len(dims.replace("n", ""))
            factors = [[f"{prefix}n{i}" for i in range(rows)] if c == "n" else [c] for c in dims]
            return " ".join(group_factors + [f for fs in factors for f in fs])

        ndims = [len(o.shape) for o in operands]
        prefixes = [_letters(i) if call.kernel.variadic else "" for i in range(len(ndims))]
        left = map(term, call.in_dims, ndims, prefixes)
        right = (term(r.dims, len(t.shape)) for r, t in zip(call.wanted, results, strict=True))
        whole = tuple(call.kernel.whole)
        return f"{', '.join(left)} -> {', '.join(right)}", {
            "need_replication_factors": whole
        } if whole else {}

    op.def_partition(partition=partition, sharding_rule=sharding_rule)
    return op


def _letters(i: int) -> str:
    """0, 1, … as a, b, …, z, ba, …: factor names in Shardy rules have digits at their end only."""
    return ("" if i < 26 else _letters(i // 26)) + chr(ord("a") + i % 26)
