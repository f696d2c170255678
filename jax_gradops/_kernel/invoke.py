"""What is the same for every kernel: platform choice, fallback, vmap, sharding, second order.

An op declares its kernels (`Kernel`) by the axes of their operands and results, in letters:

- ``n``: the row axes, any number of them;
- ``d``: the feature axis;
- ``m``: axes after it, which are row axes too: of ops whose features are channels.

A result without ``n`` must be a plain sum over the rows, or the kernel must say how those of shards
are put together (`Kernel.stages`): then everything else follows from the letters. The layers, from
the outside in::

    Kernel.__call__
      Call                 a primitive (`primitive.py`): its derivatives are the reference's, and
                           mapped axes become leading group axes, or further row axes
        platform_dependent   the reference where a platform has no kernel
          jit                  its name tells apart what differs in anything but arrays
            sharding             by the mesh's axes: custom_partitioning, or a plain call
              ffi_call
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_gradops import _registry
from jax_gradops._implementation import Implementation
from jax_gradops._kernel import sharding
from jax_gradops._kernel.array_types import (
    Arrays,
    accum_dtype,
    for_each,
    match_vma,
    mesh_of,
    result_type,
)
from jax_gradops._kernel.primitive import Axis, Operands, Operation


@dataclasses.dataclass(frozen=True)
class Result:
    """A result's axes, and its dtype: that of the first operand, or the accumulation dtype.

    A call may want a sum over rows in another dtype: that of the parameter it is the gradient of.
    """

    dims: str
    dtype: Literal["x", "accum"] = "accum"


def along_features(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` with x's rank: for references, as JAX can be told to refuse rank promotion."""
    return jnp.expand_dims(parameter, tuple(range(x.ndim - 1)))


def along_channels(parameter: jax.Array, x: jax.Array, inner: int) -> jax.Array:
    """The same where x has `inner` axes after that of the parameter."""
    axes = [i for i in range(x.ndim) if i != x.ndim - 1 - inner]
    return jnp.expand_dims(parameter, axes)


def column_sum_workspace(groups: int, rows: int, features: int, sums: int) -> tuple[int, ...]:
    """Shape of the scratch for partial column sums: [groups, partial rows, sums, features].

    At most 512 partial rows (every multiprocessor of a large GPU gets a few), and at most 2^23
    elements for one sum, so that wide rows do not take hundreds of megabytes; but, where rows are
    wide, a value for each row: CUDA's kernels for those need that (ffi/cuda/layer_norm_stream.cuh).
    """
    if sums == 0:
        return (0,)
    if not all(isinstance(size, int) for size in (groups, rows, features)):
        return (groups, 64, sums, features)  # symbolic dimensions of jax.export
    if groups * rows * features == 0:
        return (0,)
    partial_rows = max(1, min(rows, 512 // groups, 2**23 // (features * groups)))
    if features >= 2048:
        partial_rows = max(partial_rows, math.ceil(rows / (features * sums)))
    return (groups, partial_rows, sums, features)


#: The sum over all shards of each of some arrays.
Total: TypeAlias = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
#: Arrays by the names of results, or of operands.
Named: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One native handler: what it takes, what it returns, and the reference that means the same.

    Attributes:
      name: the handler's name; the custom call's target is ``jax_gradops.<name>``.
      operands: name and axes of each operand. The first one that has a letter decides how its axes
        are sharded. None may be passed for any but the first.
      results: name, axes and dtype of each result.
      reference: the same function in `jax.numpy`, for operands without group axes; takes the
        operands (None where absent) and the attributes, and returns all results.
      whole: letters of axes that every device must hold whole.
      variadic: any number of arrays may be passed for the first operand, each with axes of its own,
        and every other operand must be there. A result without ``n`` is a sum over all of them; one
        with ``n``, which must be the only one, has an array for each of them, of its dtype.
      workspace: shape of an extra scratch result, whose elements are as wide as the accumulation
        dtype's, from the number of groups, rows and features and the number of results that are
        sums over rows.
      stages: of a kernel whose results with ``n`` need those without (as batch norm's y needs the
        statistics). Where rows are spread, it is called twice: for one shard's results without
        ``n``; and for the others, with operands that make it take what they say for what it would
        have found itself. What comes between is this function: from the former by name, the sum
        over all shards, how many these are and a shard's number of rows, to the results for all
        shards and to the operands, by name.
      in_place: operands, by the name of a result of the same axes and dtype, whose memory it takes
        over. Where the operand is needed later, or is an argument that is not donated, XLA copies
        it first.
    """

    name: str
    operands: Mapping[str, str]
    results: Mapping[str, Result]
    reference: Callable[..., Arrays]
    whole: str = ""
    variadic: bool = False
    workspace: Callable[[int, int, int, int], tuple[int, ...]] | None = None
    stages: Callable[..., tuple[Named, Named]] | None = None
    in_place: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        *operands: jax.Array | None,
        implementation: Implementation = None,
        skip: Sequence[str] = (),
        dtypes: Mapping[str, Any] | None = None,
        inner: int = 0,
        **attributes: Any,
    ) -> Any:
        """Runs the kernel, or its reference.

        Args:
          *operands: in the order of `self.operands`; None for one that is absent.
          implementation: as in the public functions, resolved.
          skip: results that are not wanted; None is returned in their place.
          dtypes: of results that are sums over rows, where these are not the accumulation dtype.
            They are rounded once: after the sum over shards.
          inner: how many axes ``m`` stands for.
          **attributes: static, each of one NumPy type (`numpy.float64`, `numpy.int64`, `bool`):
            handlers are strict about types, and JAX caches lowerings by equality.
        """
        present = tuple(a is not None for a in operands)
        names = {name: jnp.dtype(dtype).name for name, dtype in (dtypes or {}).items()}
        call = Call(
            self,
            present,
            tuple(attributes.items()),
            frozenset(skip),
            tuple(names.items()),
            inner,
            insist=implementation == "ffi",
        )
        arrays = [a for a in operands if a is not None]
        results = call.formula(*arrays) if implementation == "xla" else call(*arrays)
        if call.elementwise:
            return tuple(results)
        wanted = iter(results)
        return tuple(None if name in call.skip else next(wanted) for name in self.results)

    def prepare(self, *operands: jax.Array | None, inner: int = 0) -> Any:
        """Gives operands the types that belong together; for the op to call before it runs.

        Inside `shard_map`, a parameter that is replicated over a mesh axis over which x varies
        becomes varying, and as wide as sums are; on an Explicit mesh, parameters are sharded as x's
        axes are, and axes that must be whole are. JAX transposes these casts: that gives the
        parameters' gradients their `psum` and their sharding. Elsewhere nothing changes.
        """
        if self.variadic:
            return match_vma(*operands)
        wide = accum_dtype(*(a.dtype for a in operands[:1] if a is not None))
        sums = [wide if "n" not in dims else None for dims in self.operands.values()]
        operands = match_vma(*operands, sums=sums)
        call = Call(self, tuple(a is not None for a in operands), inner=inner)
        present = [a for a in operands if a is not None]
        arrays = iter(sharding.reshard_operands(call, present)[0])
        return tuple(None if a is None else next(arrays) for a in operands)


@dataclasses.dataclass(frozen=True)
class Call(Operation):
    """A kernel with all that is static: which operands are there, which results are wanted, how.

    Attributes:
      groups: how many leading group axes arrays have. An operand without ``n`` may lack them: then
        all groups share it. Not of a variadic kernel.
      insist: whether a platform without the kernel is an error.
    """

    kernel: Kernel
    present: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    skip: frozenset[str] = frozenset()
    dtypes: tuple[tuple[str, str], ...] = ()
    inner: int = 0
    groups: int = 0
    insist: bool = False

    @functools.cached_property
    def in_dims(self) -> tuple[str, ...]:
        """Axes of each of the operands that are there."""
        first, *rest = self.kernel.operands.values()
        if self.kernel.variadic:
            return (*(first,) * self.arrays, *rest)
        return tuple(d for d, p in zip((first, *rest), self.present, strict=True) if p)

    @functools.cached_property
    def arrays(self) -> int:
        """How many a variadic kernel has for its first operand."""
        return len(self.present) - len(self.kernel.operands) + 1

    @functools.cached_property
    def elementwise(self) -> bool:
        """Whether the kernel is variadic, and has a result for each array."""
        return self.kernel.variadic and any("n" in r.dims for r in self.kernel.results.values())

    @functools.cached_property
    def named(self) -> tuple[tuple[str, Result], ...]:
        """All results, also those that are not wanted; of an elementwise call, one for each."""
        return tuple(self.kernel.results.items()) * (self.arrays if self.elementwise else 1)

    @functools.cached_property
    def wanted(self) -> tuple[Result, ...]:
        return tuple(r for name, r in self.named if name not in self.skip)

    def partial(self) -> Call:
        """The same with sums in the accumulation dtype, as those of shards must be."""
        return dataclasses.replace(self, dtypes=())

    def rounded(self, results: Sequence[jax.Array]) -> Arrays:
        """What `partial` returned, summed over shards, in the dtypes of this call."""
        names = (name for name, _ in self.named if name not in self.skip)
        dtypes = dict(self.dtypes)
        return tuple(
            r.astype(dtypes.get(name, r.dtype)) for name, r in zip(names, results, strict=True)
        )

    def axes(self, of_x: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """By letter, what belongs to its axes, from what belongs to x's without the groups'."""
        feature = len(of_x) - 1 - self.inner
        letters = {"n": of_x[:feature], "d": of_x[feature : feature + 1], "m": of_x[feature + 1 :]}
        return {letter: tuple(found) for letter, found in letters.items()}

    def stage(self, given: Sequence[str] | None) -> Call:
        """The first stage, of all results without ``n``; or with these operands, of the others."""
        results = self.kernel.results
        if given is None:
            skip = frozenset(name for name, r in results.items() if "n" in r.dims)
            return dataclasses.replace(self, skip=skip, dtypes=())
        there = zip(self.kernel.operands, self.present, strict=True)
        present = tuple(p or name in given for name, p in there)
        skip = self.skip | {name for name, r in results.items() if "n" not in r.dims}
        return dataclasses.replace(self, present=present, skip=skip, dtypes=())

    def operands(self, arrays: Sequence[jax.Array], given: Named) -> list[jax.Array]:
        """The operands that are there, in order, with further ones."""
        found = iter(arrays)
        there = zip(self.kernel.operands, self.present, strict=True)
        named = {name: next(found) for name, p in there if p} | given
        return [named[name] for name in self.kernel.operands if name in named]

    # --- What it means, for any number of groups ---

    def _reference(self, *arrays: jax.Array) -> Arrays:
        """The reference on the operands that are there, with the wanted results only."""
        given = iter(arrays)
        operands = [next(given) if p else None for p in self.present]
        options = dict(self.attributes)
        if any("m" in dims for dims in self.kernel.operands.values()):
            options["inner"] = self.inner
        results = self.kernel.reference(*operands, **options)
        named = zip(self.named, results, strict=True)
        return self.rounded([r for (name, _), r in named if name not in self.skip])

    def _shared(self, a: jax.Array, dims: str) -> bool:
        """Whether all groups share the operand."""
        return not self.kernel.variadic and "n" not in dims and a.ndim == len(dims)

    def formula(self, *arrays: jax.Array) -> Arrays:
        """The results by the reference."""
        function = self._reference
        if self.groups:  # on an Explicit mesh, vmap wants all operands' groups spread alike
            arrays = tuple(sharding.reshard_operands(self, arrays)[0])
        pairs = zip(arrays, self.in_dims, strict=True)
        axes = tuple(None if self._shared(a, dims) else 0 for a, dims in pairs)
        for _ in range(self.groups):
            function = jax.vmap(function, in_axes=axes)
        return function(*arrays)

    # --- How it is computed ---

    def compute(self, *arrays: jax.Array) -> Arrays:
        """The results by the kernel, or by the reference where the platform has none."""
        branches = {p: self._on(p, mesh_of(arrays)) for p in _registry.platforms()}
        if self.insist:
            branches["default"] = Unavailable(self)
        else:
            branches["default"] = self.formula
        return lax.platform_dependent(*arrays, **branches)

    def _on(self, platform: str, mesh: Any) -> Callable[..., Arrays]:
        """The kernel of a platform, as a function with a name of its own.

        XLA is told how to spread a call by a Python function, of which the program's text has
        nothing: the persistent compilation cache would take programs for equal that differ in an
        attribute. The name has a digest of all that is static, and of the code.
        """
        shape = (mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        text = f"{self.text} {shape} {_registry.identity(platform)}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        name = f"jax_gradops_{self.kernel.name}_{digest}"

        def kernel(*arrays: jax.Array) -> Arrays:
            return sharding.sharded(self, _ffi_call, name)(*arrays)

        kernel.__name__ = name
        return jax.jit(kernel)

    @property
    def text(self) -> str:
        """All that is static, in words that are the same in each process."""
        attributes = [(name, type(value).__name__, str(value)) for name, value in self.attributes]
        return repr((
            self.kernel.name, self.present, sorted(attributes), sorted(self.skip),
            sorted(self.dtypes), self.inner, self.groups,
        ))  # fmt: skip

    # --- Rules ---

    def vmapped(
        self, axis: Axis, operands: Operands, mapped: Sequence[bool]
    ) -> tuple[Operation, Operands]:
        given = list(zip(operands, mapped, self.in_dims, strict=True))
        more_rows = (
            self.groups == 0
            and not self.kernel.variadic
            and all("n" in r.dims for r in self.wanted)
            and not any(m for _, m, dims in given if "n" not in dims)
        )
        x, x_mapped, _ = given[0]
        lead = (axis.size, *x.shape[x_mapped : x_mapped + self.groups])
        like = next(a for a, m, _ in given if m)
        lifted = [_lifted(a, m, dims, lead, self.kernel.variadic, like) for a, m, dims in given]
        groups = self.groups if more_rows else self.groups + 1
        return dataclasses.replace(self, groups=groups), lifted


@dataclasses.dataclass(frozen=True)
class Unavailable(Operation):
    """A call where there is no kernel, which is an error when it is lowered."""

    call: Call

    def compute(self, *arrays: jax.Array) -> Arrays:
        return self.call.formula(*arrays)

    def lower(self, lowering: Callable[[], Sequence[Any]], context: Any) -> Sequence[Any]:
        del lowering
        platforms = ", ".join(context.platforms or context.module_context.platforms)
        raise ValueError(
            f"jax_gradops: implementation='ffi' is not available: {self.call.kernel.name} has no "
            f"kernel for platform {platforms}. Use implementation=None, which takes XLA's "
            "operations where there is no kernel"
        )


# --- vmap ---------------------------------------------------------------------------------------


def _lifted(
    a: jax.Array, batched: bool, dims: str, lead: tuple[int, ...], variadic: bool, like: jax.Array
) -> jax.Array:
    """An operand with a further group axis; `lead` are all of them, the new one first.

    `like` is an array that has the new axis.
    """
    shared = not variadic and "n" not in dims and a.ndim == batched + len(dims)
    if not batched:
        return a if shared else for_each(a, lead[0], like)
    if not shared:
        return a
    # All groups shared it so far: now those of each index of the new axis do.
    features = a.shape[1:]
    return jnp.broadcast_to(a.reshape(lead[0], *[1] * len(lead[1:]), *features), lead + features)


# --- The call -----------------------------------------------------------------------------------


def _ffi_call(call: Call, *arrays: jax.Array) -> Arrays:
    """The native call on one device's arrays."""
    kernel, groups = call.kernel, call.groups
    x = arrays[0]
    lead, axes = x.shape[:groups], call.axes(x.shape[groups:])
    accum = accum_dtype(*(a.dtype for a in (arrays if kernel.variadic else (x,))))
    dtypes = {name: x.dtype if r.dtype == "x" else accum for name, r in kernel.results.items()}
    dtypes |= dict(call.dtypes)

    def type_of(name: str, result: Result) -> Any:
        if name in call.skip:
            return result_type(x, (0,), accum)
        shape = (*lead, *(size for letter in result.dims for size in axes[letter]))
        return result_type(x, shape, dtypes[name])

    if call.elementwise:
        types = [result_type(a, a.shape, a.dtype) for a in arrays[: call.arrays]]
    else:
        types = [type_of(name, result) for name, result in kernel.results.items()]
    if kernel.workspace is not None:
        sums = sum("n" not in r.dims for r in call.wanted)
        rows = math.prod((*axes["n"], *axes["m"]))
        shape = kernel.workspace(math.prod(lead), rows, math.prod(axes["d"]), sums)
        # Not floats: jax_debug_nans would look for NaN in what nobody has written.
        scratch = jnp.uint64 if accum == jnp.float64 else jnp.uint32
        types.append(result_type(x, shape, scratch))

    # An absent operand is an array without elements, so that handlers have a fixed signature.
    operands: Sequence[jax.Array] = arrays
    if not all(call.present):
        # It is made of x: `jax.ensure_compile_time_eval` would make a constant of `jnp.zeros`.
        nothing = lax.slice_in_dim(x, 0, 0).reshape(0).astype(accum)
        given = iter(arrays)
        operands = [next(given) if p else nothing for p in call.present]
    target = _registry.TARGET_PREFIX + kernel.name
    attributes = {"group_rank": np.int64(groups), **dict(call.attributes)}
    if any("m" in dims for dims in kernel.operands.values()):
        attributes["inner_rank"] = np.int64(call.inner)
    inputs, outputs = list(kernel.operands), list(kernel.results)
    aliases = {inputs.index(i): outputs.index(o) for o, i in kernel.in_place.items()}
    if call.elementwise and aliases:
        aliases = {i: i for i in range(call.arrays)}
    results = jax.ffi.ffi_call(target, types, input_output_aliases=aliases)(*operands, **attributes)
    named = zip(call.named, results, strict=False)  # the workspace has no name, and is dropped
    return tuple(r for (name, _), r in named if name not in call.skip)
