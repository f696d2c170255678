"""What is the same for every kernel: platform choice, fallback, vmap, sharding, second order.

An op declares its kernels (`Kernel`) by the axes of their operands and results, in letters:

- ``n``: the row axes, any number of them;
- ``d``: the feature axis, the last one.

A result without ``n`` must be a plain sum over the rows: then the sum over shards is a `psum`, and
everything else follows from the letters too. The layers, from the outside in::

    Kernel.__call__      custom_vjp: its derivative is that of the reference (for second order)
      platform_dependent   the reference where a platform has no kernel
        custom_vmap          mapped axes become leading group axes, or further row axes
          sharding             by the kind of mesh: custom_partitioning, shard_map, or a plain call
            ffi_call
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_gradops import _registry

Implementation: TypeAlias = Literal["ffi", "xla"] | None
Arrays: TypeAlias = tuple[jax.Array, ...]
OptionalArrays: TypeAlias = tuple[jax.Array | None, ...]

# --- Choosing the implementation --------------------------------------------------------------

_default_implementation: contextvars.ContextVar[Implementation] = contextvars.ContextVar(
    "jax_gradops_implementation", default=None
)


@contextlib.contextmanager
def use_implementation(implementation: Implementation) -> Iterator[None]:
    """Sets what ``implementation=None`` means inside the ``with`` block, for every op.

    It is read when an op is traced: a function that was jitted and called before keeps its choice.

    Args:
      implementation: ``"ffi"`` (the native kernels), ``"xla"`` (the reference in `jax.numpy`), or
        None (the kernel where there is one).

    Raises:
      ValueError: if `implementation` is none of these.

    >>> import jax, jax.numpy as jnp, jax_gradops
    >>> with jax_gradops.use_implementation("xla"):
    ...     text = jax.jit(jax_gradops.layer_norm).lower(jnp.ones((2, 8))).as_text()
    >>> "jax_gradops.layer_norm_fwd" in text
    False
    """
    token = _default_implementation.set(check_implementation(implementation, "use_implementation"))
    try:
        yield
    finally:
        _default_implementation.reset(token)


def check_implementation(implementation: object, op: str) -> Implementation:
    """Returns `implementation`, or raises ValueError if it is none of the three."""
    if implementation is None or implementation == "ffi" or implementation == "xla":
        return implementation  # type: ignore[return-value]
    raise ValueError(f"{op}: implementation must be 'ffi', 'xla' or None, got {implementation!r}")


def default_platform() -> str:
    """The platform that JAX computes on unless told otherwise."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def resolve_implementation(implementation: Implementation, op: str) -> Implementation:
    """Applies `use_implementation`'s default, and insists on a kernel where ``"ffi"`` is asked for."""
    implementation = check_implementation(implementation, op)
    if implementation is None:
        implementation = _default_implementation.get()
    if implementation == "ffi" and (reason := _registry.why_unavailable(default_platform())):
        raise ValueError(
            f"{op}: implementation='ffi' is not available: {reason}. Use implementation=None, which "
            "takes XLA's operations where there is no kernel"
        )
    return implementation


class ImplementationInUse(NamedTuple):
    """What an op runs on a platform, and why."""

    implementation: Literal["ffi", "xla"]
    reason: str


# --- Types of results ---------------------------------------------------------------------------


def accum_dtype(*dtypes: Any) -> jnp.dtype:
    """The dtype of sums, statistics and parameters: float32, or float64 if one of `dtypes` is."""
    return jnp.dtype(jnp.float64 if any(d == jnp.float64 for d in dtypes) else jnp.float32)


def _varying(x: jax.Array) -> frozenset[str]:
    # jax 0.10 to 0.12: the mesh axes over which a value varies inside shard_map(check_vma=True).
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _match_vma(*arrays: jax.Array | None) -> OptionalArrays:
    """Inside `shard_map`, makes all arrays vary over the same mesh axes."""
    axes = frozenset().union(*(_varying(a) for a in arrays if a is not None))

    def cast(a: jax.Array | None) -> jax.Array | None:
        missing = () if a is None else tuple(sorted(axes - _varying(a)))
        return lax.pcast(a, missing, to="varying") if missing else a

    return tuple(map(cast, arrays))


def _result_type(like: jax.Array, shape: Sequence[int], dtype: Any) -> Any:
    """The type of a result of the local computation: as `like` in everything but shape and dtype."""
    type_ = jax.typeof(like)
    spec = PartitionSpec(*[None] * len(shape))
    return type_.update(
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        sharding=type_.sharding.update(spec=spec),
        weak_type=False,
    )


# --- Kernels ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """A kernel's result: its axes, and its dtype: that of the first operand, or the accumulation's."""

    dims: str
    dtype: Literal["x", "accum"] = "accum"


def column_sum_workspace(groups: int, rows: int, features: int, sums: int) -> tuple[int, ...]:
    """Shape of the scratch for partial column sums: [groups, partial rows, sums, features].

    At most 512 partial rows (every multiprocessor of a large GPU gets a few), and at most 2^23
    elements for one sum, so that wide rows do not take hundreds of megabytes.
    """
    if sums == 0 or groups * rows * features == 0:
        return (0,)
    partial_rows = max(1, min(rows, 512 // groups, 2**23 // (features * groups)))
    return (groups, partial_rows, sums, features)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One native handler: what it takes, what it returns, and the reference that means the same.

    Attributes:
      name: the handler's name; the custom call's target is ``jax_gradops.<name>``.
      operands: name and axes of each operand. The first one that has a letter decides how its axes
        are sharded. None may be passed for an operand that has no ``n``.
      results: name, axes and dtype of each result.
      reference: the same function in `jax.numpy`, for operands without group axes; takes the
        operands (None where absent) and the attributes, and returns all results.
      whole: letters of axes that every device must hold whole.
      variadic: there is one operand in `operands`, and any number of arrays may be passed for it,
        each with axes of its own; the results are sums over all of them.
      workspace: shape of an extra scratch result (in the accumulation dtype) from the number of
        groups, rows and features and the number of results that are sums over rows.
    """

    name: str
    operands: Mapping[str, str]
    results: Mapping[str, Result]
    reference: Callable[..., Arrays]
    whole: str = ""
    variadic: bool = False
    workspace: Callable[[int, int, int, int], tuple[int, ...]] | None = None

    def __call__(
        self,
        *operands: jax.Array | None,
        implementation: Implementation = None,
        skip: Sequence[str] = (),
        **attributes: Any,
    ) -> Any:
        """Runs the kernel, or its reference.

        Args:
          *operands: in the order of `self.operands`; None for one that is absent.
          implementation: as in the public functions, resolved.
          skip: results that are not wanted; None is returned in their place.
          **attributes: static, each of one NumPy type (`numpy.float64`, `numpy.int64`, `bool`):
            handlers are strict about types, and JAX caches lowerings by equality.
        """
        present = tuple(a is not None for a in operands)
        call = _Call(self, present, tuple(attributes.items()), frozenset(skip))
        arrays = [a for a in operands if a is not None]
        if implementation == "xla":
            results = call.reference(*arrays)
        else:
            results = _differentiable(call, implementation)(*arrays)
        wanted = iter(results)
        return tuple(None if name in call.skip else next(wanted) for name in self.results)

    def prepare(self, *operands: jax.Array | None) -> Any:
        """Gives operands the types that belong together; for the op to call before its custom_vjp.

        Inside `shard_map`, a parameter that is replicated over a mesh axis over which x varies
        becomes varying; on an Explicit mesh, parameters are sharded as x's axes are, and axes that
        must be whole are. JAX transposes these casts: that gives the parameters' gradients their
        `psum` and their sharding. Elsewhere nothing changes.
        """
        kinds = _mesh_kinds()
        if AxisType.Manual in kinds:
            return _match_vma(*operands)
        if kinds != {AxisType.Explicit} or self.variadic:
            return operands
        call = _Call(self, tuple(a is not None for a in operands), (), frozenset())
        arrays = iter(_reshard_operands(call, 0, [a for a in operands if a is not None])[0])
        return tuple(None if a is None else next(arrays) for a in operands)


def reshard_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """On an Explicit mesh, shards y as x is, which `Kernel.prepare` may have changed."""
    if _mesh_kinds() != {AxisType.Explicit}:
        return y
    return jax.sharding.reshard(y, jax.typeof(x).sharding.spec)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel with all that is static: which operands are there, attributes, unwanted results."""

    kernel: Kernel
    present: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...]
    skip: frozenset[str]

    @functools.cached_property
    def in_dims(self) -> tuple[str, ...]:
        """Axes of the operands that are there; for a variadic kernel, of each."""
        if self.kernel.variadic:
            return tuple(self.kernel.operands.values()) * len(self.present)
        return tuple(
            d for d, p in zip(self.kernel.operands.values(), self.present, strict=True) if p
        )

    @functools.cached_property
    def wanted(self) -> tuple[Result, ...]:
        return tuple(r for name, r in self.kernel.results.items() if name not in self.skip)

    def reference(self, *arrays: jax.Array) -> Arrays:
        """The reference on the operands that are there, with the wanted results only."""
        given = iter(arrays)
        operands = [next(given) if p else None for p in self.present]
        results = self.kernel.reference(*operands, **dict(self.attributes))
        named = zip(self.kernel.results, results, strict=True)
        return tuple(r for name, r in named if name not in self.skip)


# Built once for each (call, ...): a new function each time would make JAX compile again on every
# eager call, as its caches go by the identity of functions.
_cached = functools.lru_cache(maxsize=4096)


@_cached
def _differentiable(call: _Call, implementation: Implementation) -> Callable[..., Arrays]:
    """The kernel with the derivative of its reference."""

    @jax.custom_vjp
    def op(*arrays: jax.Array) -> Arrays:
        if len(_mesh_kinds()) > 1:
            # What custom_partitioning is told there (jax 0.10 to 0.12) does not say how the
            # operands are sharded over the axes that are not manual.
            if implementation == "ffi":
                raise ValueError(
                    f"{call.kernel.name}: implementation='ffi' is not available on a mesh that mixes "
                    f"kinds of axes: {jax.sharding.get_abstract_mesh()}"
                )
            return call.reference(*arrays)
        ffi = _vmappable(call, 0)
        branches = {p: ffi for p in _registry.PLATFORMS}
        if implementation == "ffi":
            return lax.platform_dependent(*arrays, **branches)
        return lax.platform_dependent(*arrays, default=call.reference, **branches)

    def forward(*arrays: jax.Array) -> tuple[Arrays, Arrays]:
        return op(*arrays), arrays

    def backward(arrays: Arrays, cotangents: Arrays) -> Arrays:
        return jax.vjp(call.reference, *arrays)[1](cotangents)

    op.defvjp(forward, backward)
    return op


# --- vmap ---------------------------------------------------------------------------------------


@_cached
def _vmappable(call: _Call, groups: int) -> Callable[..., Arrays]:
    """The kernel for operands with `groups` leading group axes.

    An operand without ``n`` may lack the group axes: then all groups share it.
    """

    @custom_vmap
    def op(*arrays: jax.Array) -> Arrays:
        return _sharded(call, groups)(*arrays)

    @op.def_vmap
    def rule(
        size: int, batched: Sequence[bool], *arrays: jax.Array
    ) -> tuple[Arrays, tuple[bool, ...]]:
        def shared(a: jax.Array, dims: str) -> bool:
            return "n" not in dims and a.ndim == len(dims)

        operands = list(zip(arrays, batched, call.in_dims, strict=True))
        more_rows = (
            groups == 0
            and not call.kernel.variadic
            and all("n" in r.dims for r in call.wanted)
            and not any(b for _, b, dims in operands if "n" not in dims)
        )
        mapped = [
            a
            if b or ("n" not in dims and (more_rows or shared(a, dims)))
            else jnp.broadcast_to(a, (size, *a.shape))
            for a, b, dims in operands
        ]
        # A parameter that was shared so far and is mapped now needs all group axes.
        if not more_rows:
            lead = next(
                a.shape[: groups + 1] for a, d in zip(mapped, call.in_dims, strict=True) if "n" in d
            )
            mapped = [
                jnp.broadcast_to(a.reshape(size, *[1] * groups, a.shape[-1]), (*lead, a.shape[-1]))
                if b and "n" not in dims and a.ndim == 1 + len(dims) and groups
                else a
                for a, (_, b, dims) in zip(mapped, operands, strict=True)
            ]
        results = _vmappable(call, groups if more_rows else groups + 1)(*mapped)
        return results, (True,) * len(results)

    return op


# --- Sharding -----------------------------------------------------------------------------------

_MeshAxes: TypeAlias = tuple[str, ...]


def _mesh_kinds() -> set[AxisType]:
    """The kinds of the context's mesh axes; empty without a mesh."""
    return set(jax.sharding.get_abstract_mesh().axis_types)


class _Layout(NamedTuple):
    """How a call is laid out on a mesh."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    # For each operand, the mesh axes over which its rows are spread.
    row_axes: tuple[_MeshAxes, ...]


def _as_axes(entry: Any) -> _MeshAxes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _padded(spec: Sequence[Any], ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


def _layout(
    call: _Call, groups: int, specs: Sequence[Sequence[Any]], ndims: Sequence[int]
) -> _Layout:
    """The shardings that the kernel can work with, nearest to those its operands have."""
    if call.kernel.variadic:
        # Every array stays as it is.
        operands = tuple(
            PartitionSpec(*[None] * groups, *_padded(s, n)[groups:])
            for s, n in zip(specs, ndims, strict=True)
        )
        rows = tuple(tuple(a for e in spec for a in _as_axes(e)) for spec in operands)
        return _Layout(operands, tuple(PartitionSpec(*[None] * groups) for _ in call.wanted), rows)
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
    return _Layout(
        operands, tuple(spec(r.dims, lead) for r in call.wanted), (row_axes,) * len(operands)
    )


def _local(
    call: _Call, groups: int, row_axes: Sequence[_MeshAxes] | None = None
) -> Callable[..., Arrays]:
    """The computation of one device; sums over rows are completed over `row_axes`."""
    if call.kernel.variadic and row_axes is not None:
        # Arrays that are spread over the same mesh axes are summed together; a replicated one once.
        def local(*arrays: jax.Array) -> Arrays:
            totals = None
            for axes in dict.fromkeys(row_axes):
                part = _ffi_call(
                    call, groups, *(a for a, r in zip(arrays, row_axes, strict=True) if r == axes)
                )
                part = lax.psum(part, axes) if axes else part
                totals = part if totals is None else tuple(map(jnp.add, totals, part))
            assert totals is not None
            return totals

        return local

    def local(*arrays: jax.Array) -> Arrays:
        results = _ffi_call(call, groups, *arrays)
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


def _sharded(call: _Call, groups: int) -> Callable[..., Arrays]:
    """The kernel on arrays that may be sharded, by the kind of mesh in the context."""
    kinds = _mesh_kinds()
    if AxisType.Manual in kinds:  # inside shard_map: arrays are one device's already
        return _local(call, groups)
    if AxisType.Explicit in kinds:
        return _explicit(call, groups)
    return _auto(call, groups)


def _reshard_operands(
    call: _Call, groups: int, arrays: Sequence[jax.Array]
) -> tuple[list[jax.Array], _Layout]:
    """On an Explicit mesh: the operands sharded as the kernel can work with them, and the layout."""
    types = [jax.typeof(a) for a in arrays]
    layout = _layout(call, groups, [t.sharding.spec for t in types], [t.ndim for t in types])
    return [
        jax.sharding.reshard(a, s) for a, s in zip(arrays, layout.operands, strict=True)
    ], layout


def _explicit(call: _Call, groups: int) -> Callable[..., Arrays]:
    def op(*arrays: jax.Array) -> Arrays:
        operands, layout = _reshard_operands(call, groups, arrays)
        local = _local(call, groups, layout.row_axes)
        return jax.shard_map(
            local, in_specs=layout.operands, out_specs=layout.results, check_vma=False
        )(*operands)

    return op


@_cached
def _auto(call: _Call, groups: int) -> Callable[..., Arrays]:
    op = custom_partitioning(_local(call, groups))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        layout = _layout(
            call, groups, [o.sharding.spec for o in operands], [len(o.shape) for o in operands]
        )
        shardings = [tuple(NamedSharding(mesh, s) for s in specs) for specs in layout[:2]]
        return mesh, _local(call, groups, layout.row_axes), shardings[1], shardings[0]

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
    """0, 1, … as a, b, …, z, ba, …: factor names of Shardy rules hold no digits but at their end."""
    return ("" if i < 26 else _letters(i // 26)) + chr(ord("a") + i % 26)


# --- The call -----------------------------------------------------------------------------------


def _ffi_call(call: _Call, groups: int, *arrays: jax.Array) -> Arrays:
    """The native call on one device's arrays, each with `groups` leading group axes."""
    kernel = call.kernel
    x = arrays[0]
    lead, rows, features = x.shape[:groups], x.shape[groups:-1], x.shape[-1:]
    axes = {"n": rows, "d": features}
    dtypes = {
        "x": x.dtype,
        "accum": accum_dtype(*(a.dtype for a in (arrays if kernel.variadic else (x,)))),
    }

    def type_of(result: Result) -> Any:
        shape = (*lead, *(size for letter in result.dims for size in axes[letter]))
        return _result_type(x, shape, dtypes[result.dtype])

    absent = _result_type(x, (0,), dtypes["accum"])
    types = [absent if name in call.skip else type_of(r) for name, r in kernel.results.items()]
    if kernel.workspace is not None:
        sums = sum("n" not in r.dims for r in call.wanted)
        shape = kernel.workspace(math.prod(lead), math.prod(rows), math.prod(features), sums)
        types.append(_result_type(x, shape, dtypes["accum"]))

    # An absent operand is an array without elements, so that handlers have a fixed signature.
    given = iter(arrays)
    nothing = _match_vma(x, jnp.zeros((0,), dtypes["accum"]))[1]
    operands = arrays if kernel.variadic else [next(given) if p else nothing for p in call.present]
    target = _registry.TARGET_PREFIX + kernel.name
    attributes = {"group_rank": np.int64(groups), **dict(call.attributes)}
    results = jax.ffi.ffi_call(target, types)(*operands, **attributes)
    named = zip(kernel.results, results, strict=False)  # the workspace has no name, and is dropped
    return tuple(r for name, r in named if name not in call.skip)
