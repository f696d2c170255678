"""What a kernel is: data, from which `invoke.py` makes everything else.

An op declares its kernels (`Kernel`) by the axes of their operands and results, in letters:

- ``n``: the row axes, any number of them;
- ``d``: the feature axis;
- ``m``: axes after it, which are row axes too: of ops whose features are channels.

A result without ``n`` must be a plain sum over the rows, or the kernel must say how those of shards
are put together (`Kernel.stages`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jax_gradops._kernel.array_types import Arrays


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


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel with all that is static: which operands are there, which results are wanted, how.

    Attributes:
      groups: how many leading group axes arrays have. An operand without ``n`` may lack them: then
        all groups share it. Not of a variadic kernel.
    """

    kernel: Kernel
    present: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    skip: frozenset[str] = frozenset()
    dtypes: tuple[tuple[str, str], ...] = ()
    inner: int = 0
    groups: int = 0

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

    def reference(self, *arrays: jax.Array) -> Arrays:
        """The reference on the operands that are there, with the wanted results only."""
        given = iter(arrays)
        operands = [next(given) if p else None for p in self.present]
        options = dict(self.attributes)
        if any("m" in dims for dims in self.kernel.operands.values()):
            options["inner"] = self.inner
        results = self.kernel.reference(*operands, **options)
        named = zip(self.named, results, strict=True)
        return self.rounded([r for (name, _), r in named if name not in self.skip])

    def is_shared(self, a: jax.Array, dims: str) -> bool:
        """Whether all groups share the operand."""
        return not self.kernel.variadic and "n" not in dims and a.ndim == len(dims)

    @property
    def text(self) -> str:
        """All that is static, in words that are the same in each process."""
        attributes = [(name, type(value).__name__, str(value)) for name, value in self.attributes]
        return repr((
            self.kernel.name, self.present, sorted(attributes), sorted(self.skip),
            sorted(self.dtypes), self.inner, self.groups,
        ))  # fmt: skip
