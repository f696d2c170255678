"""Calls of kernels whose arrays have axes with letters (`spec.Kernel`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_gradops._kernel.array_types import (
    Arrays,
    MeshAxes,
    accum_dtype,
    for_each,
    match_vma,
    result_type,
)
from jax_gradops._kernel.call import Compute, HandlerCall, scratch_type
from jax_gradops._kernel.layout import Layout, mesh_axes, padded
from jax_gradops._kernel.shards import Collectives, Shards
from jax_gradops._kernel.spec import Kernel, Named, Result, Stages


@dataclasses.dataclass(frozen=True)
class RowCall:
    """A kernel with all static values: which operands are present, which results are wanted, how.

    Attributes:
      present: names of the operands that are present.
      static: attributes, and the numbers of axes in `Kernel.ranks`.
      skip: names of unwanted results.
      dtypes: by result name, the dtype of a sum. The default is the accumulation dtype.
      groups: as in `Call`. An operand without ``n`` may lack the group axes.
    """

    kernel: Kernel
    present: tuple[str, ...]
    static: tuple[tuple[str, Any], ...] = ()
    skip: frozenset[str] = frozenset()
    dtypes: tuple[tuple[str, str], ...] = ()
    groups: int = 0

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def text(self) -> str:
        static = [(name, type(value).__name__, str(value)) for name, value in self.static]
        return repr((
            self.kernel.name, self.present, sorted(static), sorted(self.skip),
            sorted(self.dtypes), self.groups,
        ))  # fmt: skip

    # --- Axes ------------------------------------------------------------------------------------

    @functools.cached_property
    def dims(self) -> str:
        """The axes of the first operand."""
        return next(iter(self.kernel.operands.values()))

    def _others(self, found: Iterable[tuple[str, Sequence[Any]]]) -> dict[str, tuple[Any, ...]]:
        """Items of the letters that the first operand lacks. `found` has each operand's items."""
        others: dict[str, tuple[Any, ...]] = {}
        for dims, items in found:
            if set(dims) - set(self.dims):
                split = self.split(dims, items)
                others |= {letter: split[letter] for letter in dims if letter not in self.dims}
        return others

    @functools.cached_property
    def in_dims(self) -> tuple[str, ...]:
        """The axes of each operand that is present."""
        return tuple(self.kernel.operands[name] for name in self.present)

    def _rank(self, dims: str) -> int:
        """How many axes the letters other than ``n`` stand for."""
        names = (self.kernel.ranks.get(letter, "") for letter in dims if letter != "n")
        return sum(dict(self.static).get(name, 1) for name in names)

    def split(self, dims: str, items: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """Splits `items` by letter. It has one item for each axis of `dims`."""
        rows = len(items) - self._rank(dims)
        rest = iter(items)
        return {
            letter: tuple(itertools.islice(rest, rows if letter == "n" else self._rank(letter)))
            for letter in dims
        }

    def _for_handler(self, dims: str, axes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Sizes by letter, with the features' axes as one axis.

        Before the call, a reshape splits the channels of a group norm into two axes. XLA removes
        it together with the reshape to this shape. If the call had the split shape, XLA on the CPU
        would copy arrays with axes of size 1.
        """
        features = self.kernel.features
        found = dict(axes)
        if features in dims:
            found["d"] = (math.prod(size for letter in features for size in axes[letter]),)
        return {letter: found[letter] for letter in dims.replace(features, "d")}

    def is_shared(self, ndim: int, dims: str) -> bool:
        """Whether an array lacks the group axes."""
        return "n" not in dims and ndim == self._rank(dims)

    def _lead(self, ndim: int, dims: str) -> int:
        """The number of group axes of an array."""
        return 0 if self.is_shared(ndim, dims) else self.groups

    def shared(self, arrays: Sequence[jax.Array]) -> list[bool]:
        pairs = zip(arrays, self.in_dims, strict=True)
        return [self.is_shared(a.ndim, dims) for a, dims in pairs]

    # --- Results ---------------------------------------------------------------------------------

    @functools.cached_property
    def wanted(self) -> dict[str, Result]:
        return {name: r for name, r in self.kernel.results.items() if name not in self.skip}

    @functools.cached_property
    def stages(self) -> Stages | None:
        """The stages of this call. It has none if it already has an operand that they give."""
        stages = self.kernel.stages
        return None if stages is None or set(stages.given) & set(self.present) else stages

    @functools.cached_property
    def _reduced(self) -> list[set[str]]:
        """For each result of shards, the letters that it lacks and that may be sharded."""
        results = dict(self.wanted)
        if self.stages is not None:
            results |= self.in_two(self.stages)[0].wanted
        return [self._lacking(r) for r in results.values()]

    def _lacking(self, result: Result) -> set[str]:
        """The letters that a result lacks and that may be sharded."""
        return set(self.dims) - set(self.kernel.whole) - set(result.dims)

    @property
    def has_sums(self) -> bool:
        return any(self._reduced)

    def partial(self) -> RowCall:
        """The call for one shard. Partial sums must be in the accumulation dtype."""
        return dataclasses.replace(self, dtypes=())

    def rounded(self, results: Named) -> Arrays:
        """The wanted results, cast from the dtypes of `partial` to the dtypes of this call."""
        dtypes = dict(self.dtypes)
        return tuple(results[n].astype(dtypes.get(n, results[n].dtype)) for n in self.wanted)

    def in_two(self, stages: Stages) -> tuple[RowCall, RowCall]:
        """The call that computes one shard's results for `combine`, and the call that follows."""
        over, results = set(stages.over), self.kernel.results
        others = frozenset(name for name, r in results.items() if over & set(r.dims))
        first = dataclasses.replace(self, skip=others, dtypes=())
        operands = {*self.present, *stages.given}
        present = tuple(name for name in self.kernel.operands if name in operands)
        skip = self.skip | (results.keys() - others)
        return first, dataclasses.replace(self, present=present, skip=skip, dtypes=())

    # --- Computation -----------------------------------------------------------------------------

    def reference(self, *arrays: jax.Array) -> Arrays:
        return self._results(self.kernel.reference, *arrays)

    def by_program(self, compute: Compute, *arrays: jax.Array) -> Arrays:
        """Runs `Kernel.program`. Groups run one after another."""
        assert self.kernel.program is not None
        function = functools.partial(self._results, functools.partial(self.kernel.program, compute))
        shared = self.shared(arrays)
        for _ in range(self.groups):
            function = functools.partial(_for_groups, function, shared)
        return function(*arrays)

    def _results(self, function: Callable[..., Arrays], *arrays: jax.Array) -> Arrays:
        named = dict(zip(self.present, arrays, strict=True))
        operands = map(named.get, self.kernel.operands)
        results = function(*operands, **dict(self.static))
        return self.rounded(dict(zip(self.kernel.results, results, strict=True)))

    def handler_call(self, arrays: Sequence[jax.Array]) -> HandlerCall:
        kernel, x = self.kernel, arrays[0]
        lead, axes = x.shape[: self.groups], self.split(self.dims, x.shape[self.groups :])
        axes |= self._others((dims, a.shape[self._lead(a.ndim, dims) :])
                             for a, dims in zip(arrays, self.in_dims, strict=True))  # fmt: skip
        accum = accum_dtype(x.dtype)

        def joined(groups: Sequence[int], sizes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
            return (*groups, *(size for found in sizes.values() for size in found))

        def of_handler(a: jax.Array, dims: str) -> jax.Array:
            groups = self._lead(a.ndim, dims)
            sizes = self._for_handler(dims, self.split(dims, a.shape[groups:]))
            return a.reshape(joined(a.shape[:groups], sizes))

        def type_of(name: str, result: Result) -> Any:
            if name in self.skip:
                return result_type(x, (0,), accum)
            sizes = self._for_handler(result.dims, axes)
            default = x.dtype if result.dtype == "x" else accum
            return result_type(x, joined(lead, sizes), dict(self.dtypes).get(name, default))

        types = [type_of(name, result) for name, result in kernel.results.items()]
        if kernel.workspace is not None:
            merged = self._for_handler("".join(axes), axes)
            sizes = {letter: math.prod(found) for letter, found in merged.items()}
            sums = sum(bool(self._lacking(r)) for r in self.wanted.values())
            shape = kernel.workspace(math.prod(lead), sizes, sums)
            types.append(scratch_type(x, shape, accum))
        named = dict(zip(self.present, map(of_handler, arrays, self.in_dims), strict=True))
        if len(named) < len(kernel.operands):
            # Handlers have a fixed signature: an absent operand is an array without elements. It is
            # made from x: `jax.ensure_compile_time_eval` would turn `jnp.zeros` into a constant.
            nothing = lax.slice_in_dim(x, 0, 0).reshape(0).astype(accum)
            named = dict.fromkeys(kernel.operands, nothing) | named
        inputs, outputs = list(kernel.operands), list(kernel.results)
        attributes = dict(self.static)
        for name in kernel.ranks.values():
            attributes[f"{name}_rank"] = np.int64(attributes.pop(name))
        return HandlerCall(
            operands=[named[name] for name in inputs],
            types=types,
            aliases={inputs.index(i): outputs.index(o) for o, i in kernel.in_place.items()},
            attributes=attributes,
            wanted=[
                (outputs.index(name), joined(lead, {n: axes[n] for n in result.dims}))
                for name, result in self.wanted.items()
            ],
        )

    # --- Transformations -------------------------------------------------------------------------

    def vmapped(
        self, size: int, arrays: Sequence[jax.Array], mapped: Sequence[bool]
    ) -> tuple[RowCall, list[jax.Array]]:
        given = list(zip(arrays, mapped, self.in_dims, strict=True))
        more_rows = (
            self.groups == 0
            and all("n" in r.dims for r in self.wanted.values())
            and not (self.stages is not None and "n" in self.stages.over)
            and not any(m for _, m, dims in given if "n" not in dims)
        )
        x, x_mapped, _ = given[0]
        lead = (size, *x.shape[x_mapped : x_mapped + self.groups])
        like = next(a for a, m, _ in given if m)
        lifted = [self._lifted(a, m, dims, lead, like) for a, m, dims in given]
        groups = self.groups if more_rows else self.groups + 1
        return dataclasses.replace(self, groups=groups), lifted

    def _lifted(
        self, a: jax.Array, mapped: bool, dims: str, lead: tuple[int, ...], like: jax.Array
    ) -> jax.Array:
        """Gives an array the mapped axis. `lead` has all leading sizes, the mapped axis first.

        `like` is an array that has the mapped axis already.
        """
        shared = self.is_shared(a.ndim - mapped, dims)
        if not mapped:
            return a if shared else for_each(a, lead[0], like)
        if not shared:
            return a
        # All groups shared the array so far. Now the groups of one mapped index share it.
        features = a.shape[1:]
        return jnp.broadcast_to(
            a.reshape(lead[0], *[1] * len(lead[1:]), *features), lead + features
        )

    # --- Shards ----------------------------------------------------------------------------------

    def layout(
        self, specs: Sequence[Any], ndims: Sequence[int], *, everywhere: bool = False
    ) -> Layout:
        kept = set(self.dims) - set(self.kernel.whole)
        choices = [
            (spec[: self.groups], _only(kept, self.split(self.dims, spec[self.groups :])))
            for spec, dims in zip(map(padded, specs, ndims), self.in_dims, strict=True)
            if dims == self.dims
        ]
        # The operand sharded over the most mesh axes decides: a cotangent may be replicated.
        lead, letters = max(
            choices,
            key=lambda c: sum(len(mesh_axes(entries)) for entries in (c[0], *c[1].values())),
        )
        sums = [r for r in self._reduced if any(mesh_axes(letters[letter]) for letter in r)]
        if everywhere and sums:
            lead, letters = (None,) * self.groups, _only(set.intersection(*sums), letters)
        # A mesh axis shards one axis of a result only.
        used = {name for found in (lead, *letters.values()) for name in mesh_axes(found)}
        given = zip(map(padded, specs, ndims), ndims, self.in_dims, strict=True)
        others = self._others((dims, spec[self._lead(n, dims) :]) for spec, n, dims in given)
        letters |= {
            letter: tuple(None if used & set(mesh_axes([e])) else e for e in found)
            for letter, found in others.items()
        }

        def spec(dims: str, lead: Sequence[Any]) -> PartitionSpec:
            entries = (letters.get(letter, (None,)) for letter in dims)
            return PartitionSpec(*lead, *(entry for found in entries for entry in found))

        return Layout(
            tuple(
                spec(dims, lead[: self._lead(ndim, dims)])
                for dims, ndim in zip(self.in_dims, ndims, strict=True)
            ),
            tuple(spec(r.dims, lead) for r in self.wanted.values()),
        )

    def local(
        self, compute: Compute, layout: Layout, collectives: Collectives
    ) -> Callable[..., Arrays]:
        entries = self.split(self.dims, layout.operands[0][self.groups :])
        axes = {letter: mesh_axes(found) for letter, found in entries.items()}
        return functools.partial(in_stages, self, compute, collectives, axes)

    def sharding_rule(self, ndims: Sequence[int], result_ndims: Sequence[int]) -> tuple[str, dict]:
        def term(dims: str, ndim: int, letters: str) -> list[str]:
            lead = self._lead(ndim, dims)
            axes = self.split(dims, range(ndim - lead))
            groups = [f"vmap{i}" for i in range(lead)]
            return groups + [f"{letter}{i}" for letter in letters for i in range(len(axes[letter]))]

        left = (" ".join(term(d, n, d)) for d, n in zip(self.in_dims, ndims, strict=True))
        results = zip(self.wanted.values(), result_ndims, strict=True)
        right = (" ".join(term(r.dims, n, r.dims)) for r, n in results)
        whole = dict.fromkeys(
            name
            for dims, ndim in zip(self.in_dims, ndims, strict=True)
            for name in term(dims, ndim, "".join(c for c in dims if c in self.kernel.whole))
            if not name.startswith("vmap")
        )
        options = {"need_replication_factors": tuple(whole)} if whole else {}
        return f"{', '.join(left)} -> {', '.join(right)}", options


def _for_groups(
    function: Callable[..., Arrays], shared: Sequence[bool], *arrays: jax.Array
) -> Arrays:
    """Calls the function for each index of the first axis of the arrays that are not shared."""

    def of_index(each: list[jax.Array]) -> Arrays:
        found = iter(each)
        return function(*(a if s else next(found) for a, s in zip(arrays, shared, strict=True)))

    mapped = [a for a, s in zip(arrays, shared, strict=True) if not s]
    if mapped[0].shape[0] == 1:  # see `Kernel.program`
        return tuple(r[None] for r in of_index([a[0] for a in mapped]))
    return lax.map(of_index, mapped)


def _only(kept: set[str], entries: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Entries of a `PartitionSpec` by letter. Axes of letters that are not `kept` are gathered."""
    return {
        letter: tuple(e if letter in kept else None for e in found)
        for letter, found in entries.items()
    }


def in_stages(
    call: RowCall,
    compute: Compute,
    collectives: Collectives,
    axes: Mapping[str, MeshAxes],
    *arrays: jax.Array,
    own_sums: bool = False,
) -> Arrays:
    """Runs the kernel on one shard, and returns the results of all shards.

    `local` and `invoke` with `axis_names` both use this function.

    Args:
      call: the call on all shards.
      compute: runs a call on one shard.
      collectives: reductions over shards.
      axes: by letter, the names of the axes over which it is sharded.
      *arrays: one shard.
      own_sums: whether a result that is a sum stays the sum of one shard.
    """
    x = call.split(call.dims, arrays[0].shape[call.groups :])
    lengths = {letter: math.prod(sizes) for letter, sizes in x.items()}
    shards = Shards(collectives, axes, lengths)

    def run(call: RowCall, *arrays: jax.Array) -> Named:
        return dict(zip(call.wanted, compute(call, *arrays), strict=True))

    def of_all(call: RowCall, found: Named) -> Named:
        return found if own_sums else shards.summed(found, call.wanted)

    stages = call.stages
    if stages is None or not any(axes.get(letter) for letter in stages.over):
        once = call.partial()
        return call.rounded(of_all(once, run(once, *arrays)))
    first, second = call.in_two(stages)
    found = run(first, *arrays)
    totals = shards.summed(found, first.wanted)
    combined, given = stages.combine(totals, shards, **dict(call.static))
    results = (found if own_sums else totals) | combined
    if second.wanted:
        # Totals are equal on all devices. In `shard_map`, the kernel's operands vary.
        named = dict(zip(call.present, arrays, strict=True)) | given
        operands: Any = match_vma(*(named[name] for name in second.present))
        results |= of_all(second, run(second, *operands))
    return call.rounded(results)
