"""Calls of kernels whose arrays have axes with letters (`spec.Kernel`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
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
from jax_gradops._kernel.call import Call, Compute, HandlerCall, scratch_type
from jax_gradops._kernel.layout import Layout, mesh_axes, padded
from jax_gradops._kernel.shards import Collectives, Shards
from jax_gradops._kernel.spec import Kernel, Named, Result, Stages


@dataclasses.dataclass(frozen=True)
class RowCall(Call):
    """A kernel with all static values: which operands are present, which results are wanted, how.

    Attributes:
      groups: as in `Call`. An operand without ``n`` may lack the group axes.
    """

    kernel: Kernel
    present: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    skip: frozenset[str] = frozenset()
    dtypes: tuple[tuple[str, str], ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    groups: int = 0

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def text(self) -> str:
        attributes = [(name, type(value).__name__, str(value)) for name, value in self.attributes]
        return repr((
            self.kernel.name, self.present, sorted(attributes), sorted(self.skip),
            sorted(self.dtypes), sorted(self.ranks), self.groups,
        ))  # fmt: skip

    # --- Axes ------------------------------------------------------------------------------------

    @functools.cached_property
    def dims(self) -> str:
        """All axes: those of the first operand."""
        return next(iter(self.kernel.operands.values()))

    @functools.cached_property
    def in_dims(self) -> tuple[str, ...]:
        """The axes of each operand that is present."""
        dims = self.kernel.operands.values()
        return tuple(d for d, p in zip(dims, self.present, strict=True) if p)

    def _rank(self, dims: str) -> int:
        """How many axes the letters other than ``n`` stand for."""
        return sum(dict(self.ranks).get(letter, 1) for letter in dims if letter != "n")

    def split(self, dims: str, items: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """Splits `items` by letter. It has one item for each axis of `dims`."""
        rows = len(items) - self._rank(dims)
        rest = iter(items)
        return {
            letter: tuple(itertools.islice(rest, rows if letter == "n" else self._rank(letter)))
            for letter in dims
        }

    def is_shared(self, ndim: int, dims: str) -> bool:
        """Whether an array lacks the group axes."""
        return "n" not in dims and ndim == self._rank(dims)

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
        if stages is None or any(self._operands(self.present)[name] for name in stages.given):
            return None
        return stages

    @functools.cached_property
    def _reduced(self) -> list[set[str]]:
        """For each result that is computed, the letters that it lacks and that may be sharded."""
        results = dict(self.wanted)
        if self.stages is not None:
            results |= self.first_stage().wanted
        may_be_sharded = set(self.dims) - set(self.kernel.whole)
        return [may_be_sharded - set(r.dims) for r in results.values()]

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

    def first_stage(self) -> RowCall:
        """The call that computes one shard's results for `Stages.combine`."""
        assert self.kernel.stages is not None
        over, results = set(self.kernel.stages.over), self.kernel.results
        skip = frozenset(name for name, r in results.items() if over & set(r.dims))
        return dataclasses.replace(self, skip=skip, dtypes=())

    def second_stage(self) -> RowCall:
        """The call that computes the other results, with the operands from `Stages.combine`."""
        assert self.kernel.stages is not None
        given = self.kernel.stages.given
        present = (p or n in given for n, p in self._operands(self.present).items())
        skip = self.skip.union(self.first_stage().wanted)
        return dataclasses.replace(self, present=tuple(present), skip=skip, dtypes=())

    # --- Operands --------------------------------------------------------------------------------

    def _operands(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.kernel.operands, values, strict=True))

    def _spread(self, arrays: Sequence[jax.Array], absent: Any = None) -> list[Any]:
        """All operands. `absent` stands for each absent one."""
        given = iter(arrays)
        return [next(given) if p else absent for p in self.present]

    def operands(self, arrays: Sequence[jax.Array], given: Named) -> list[jax.Array]:
        """The present operands and the `given` ones, in the kernel's order."""
        named = self._operands(self._spread(arrays)) | given
        return [a for a in named.values() if a is not None]

    def reference(self, *arrays: jax.Array) -> Arrays:
        ranks = {name: dict(self.ranks)[letter] for letter, name in self.kernel.ranks.items()}
        options = dict(self.attributes) | ranks
        results = self.kernel.reference(*self._spread(arrays), **options)
        return self.rounded(dict(zip(self.kernel.results, results, strict=True)))

    def handler_call(self, arrays: Sequence[jax.Array]) -> HandlerCall:
        kernel, x = self.kernel, arrays[0]
        lead, axes = x.shape[: self.groups], self.split(self.dims, x.shape[self.groups :])
        accum = accum_dtype(x.dtype)
        dtypes = dict(self.dtypes)

        def type_of(name: str, result: Result) -> Any:
            if name in self.skip:
                return result_type(x, (0,), accum)
            shape = (*lead, *(size for letter in result.dims for size in axes[letter]))
            return result_type(
                x, shape, dtypes.get(name, x.dtype if result.dtype == "x" else accum)
            )

        types = [type_of(name, result) for name, result in kernel.results.items()]
        if kernel.workspace is not None:
            sizes = {letter: math.prod(found) for letter, found in axes.items()}
            shape = kernel.workspace(math.prod(lead), sizes, sum(map(bool, self._reduced)))
            types.append(scratch_type(x, shape, accum))
        operands: Sequence[jax.Array] = arrays
        if not all(self.present):
            # Handlers have a fixed signature: an absent operand is an array without elements. It is
            # made from x: `jax.ensure_compile_time_eval` would turn `jnp.zeros` into a constant.
            nothing = lax.slice_in_dim(x, 0, 0).reshape(0).astype(accum)
            operands = self._spread(arrays, nothing)
        ranks = dict(self.ranks)
        inputs, outputs = list(kernel.operands), list(kernel.results)
        return HandlerCall(
            operands,
            types,
            {inputs.index(i): outputs.index(o) for o, i in kernel.in_place.items()},
            dict(self.attributes)
            | {f"{name}_rank": np.int64(ranks[letter]) for letter, name in kernel.ranks.items()},
            [outputs.index(name) for name in self.wanted],
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
        lead, letters = max(choices, key=lambda c: len(mesh_axes([*c[0], *_flat(c[1])])))
        if everywhere:
            sums = [r for r in self._reduced if any(mesh_axes(letters[letter]) for letter in r)]
            if sums:
                lead = (None,) * self.groups
                letters = _only(set.intersection(*sums), letters)

        def spec(dims: str, lead: Sequence[Any]) -> PartitionSpec:
            return PartitionSpec(*lead, *(e for letter in dims for e in letters[letter]))

        return Layout(
            tuple(
                spec(dims, () if self.is_shared(ndim, dims) else lead)
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
        def term(dims: str, ndim: int) -> str:
            lead = [] if self.is_shared(ndim, dims) else self.group_factors()
            axes = self.split(dims, range(ndim - len(lead)))
            return " ".join(lead + [f for letter in dims for f in _factors(letter, axes)])

        left = map(term, self.in_dims, ndims)
        right = map(term, (r.dims for r in self.wanted.values()), result_ndims)
        axes = self.split(self.dims, range(ndims[0] - self.groups))
        whole = tuple(f for letter in self.kernel.whole for f in _factors(letter, axes))
        options = {"need_replication_factors": whole} if whole else {}
        return f"{', '.join(left)} -> {', '.join(right)}", options


def _factors(letter: str, axes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of a letter's axes in Shardy's notation."""
    return [f"{letter}{i}" for i in range(len(axes[letter]))]


def _only(kept: set[str], entries: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """`entries` of a `PartitionSpec` by letter, without those of other letters."""
    return {
        letter: tuple(e if letter in kept else None for e in found)
        for letter, found in entries.items()
    }


def _flat(entries: Mapping[str, Sequence[Any]]) -> list[Any]:
    return [e for found in entries.values() for e in found]


def in_stages(
    call: RowCall,
    compute: Compute,
    collectives: Collectives,
    axes: Mapping[str, MeshAxes],
    *arrays: jax.Array,
    own_sums: bool = False,
) -> Arrays:
    """Runs the kernel on one shard of the arrays. Returns the results of all shards.

    This is the only place that combines shards: inside `custom_partitioning`, and where the caller
    names mapped axes.

    Args:
      call: the call on all shards.
      compute: runs a call on one shard.
      collectives: reductions over shards.
      axes: for letters, the names of the axes over which they are sharded.
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
    first, second = call.first_stage(), call.second_stage()
    found = run(first, *arrays)
    totals = shards.summed(found, first.wanted)
    combined, given = stages.combine(totals, shards, **dict(call.attributes))
    results = (found if own_sums else totals) | combined
    if second.wanted:
        # Totals are equal on all devices. In `shard_map`, the kernel's operands vary.
        operands = match_vma(*call.operands(arrays, given))
        results |= of_all(second, run(second, *operands))
    return call.rounded(results)
