"""The declaration of a kernel: data, from which `invoke.py` makes everything else.

An op declares its kernels (`Kernel`). Letters name the axes of operands and results:

- ``n``: the row axes, any number of them.
- ``d``: the feature axis.
- ``m``: the axes after ``d``. These are row axes too, in ops whose features are channels.

A result without ``n`` must be a plain sum over the rows. Otherwise the kernel must say how to
combine the results of shards (`Kernel.stages`).
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
    """A result's axes, and its dtype: "x" is the first operand's, "accum" the accumulation dtype.

    A sum over rows may be the gradient of a parameter. A call may want it in the parameter's dtype.
    """

    dims: str
    dtype: Literal["x", "accum"] = "accum"


def along_features(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` with x's rank. References need it: JAX can be set to refuse rank promotion."""
    return jnp.expand_dims(parameter, tuple(range(x.ndim - 1)))


def along_channels(parameter: jax.Array, x: jax.Array, inner: int) -> jax.Array:
    """Like `along_features`, for an x with `inner` axes after the parameter's axis."""
    axes = [i for i in range(x.ndim) if i != x.ndim - 1 - inner]
    return jnp.expand_dims(parameter, axes)


def column_sum_workspace(groups: int, rows: int, features: int, sums: int) -> tuple[int, ...]:
    """Shape of the scratch for partial column sums: [groups, partial rows, sums, features].

    There are at most 512 partial rows: a few for each multiprocessor of a large GPU. One sum has at
    most 2^23 elements: else wide rows would take hundreds of megabytes. The exception is a minimum
    for wide rows: CUDA's kernels need one value per row (ffi/cuda/row_norm/stream.cuh).
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


#: Sums each array over all shards.
Total: TypeAlias = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
#: Arrays by the name of a result or an operand.
Named: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One native handler: its operands, its results, and a reference that computes the same.

    Attributes:
      name: the handler's name; the custom call's target is ``jax_gradops.<name>``.
      operands: name and axes of each operand. The operand with ``nd`` axes that is sharded the most
        decides the sharding of all (`layout.py`). All but the first may be absent (None).
      results: name, axes and dtype of each result.
      reference: computes all results in `jax.numpy`, without group axes. It takes the operands
        (None where absent) and the attributes.
      whole: letters of axes that every device must hold whole.
      variadic: the first operand is any number of arrays, each with its own axes. All other
        operands must be present. A result without ``n`` is a sum over all these arrays. A result
        with ``n`` must be the only result. It has one array of equal dtype for each of them.
      workspace: shape of an extra scratch result. It takes the number of groups, of rows, of
        features, and of results that are sums over rows. The elements are as wide as the
        accumulation dtype.
      stages: for a kernel whose results with ``n`` need its results without ``n``. Batch norm's y
        needs the statistics, for example. If rows are sharded, the kernel is called twice. The
        first call computes one shard's results without ``n``. The function `stages` then takes
        these by name, the sum over all shards, the number of shards, one shard's number of rows,
        and the attributes. It returns the results for all shards and new operands, both by name.
        The second call computes the other results. The new operands replace its own statistics.
      in_place: result name to operand name. The result takes over the operand's memory. Both have
        equal axes and dtypes. XLA first copies an operand that is needed later. XLA also copies an
        argument that is not donated.
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
    """A kernel with all static values: which operands are present, which results are wanted, how.

    Attributes:
      groups: how many leading group axes the arrays have (`jax.vmap` adds them). An operand without
        ``n`` may lack them: all groups then share it. A variadic kernel has no shared operands.
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
        """The axes of each operand that is present."""
        first, *rest = self.kernel.operands.values()
        if self.kernel.variadic:
            return (*(first,) * self.arrays, *rest)
        return tuple(d for d, p in zip((first, *rest), self.present, strict=True) if p)

    @functools.cached_property
    def arrays(self) -> int:
        """How many arrays a variadic kernel has for its first operand."""
        return len(self.present) - len(self.kernel.operands) + 1

    @functools.cached_property
    def elementwise(self) -> bool:
        """Whether the kernel is variadic and has one result for each array."""
        return self.kernel.variadic and any("n" in r.dims for r in self.kernel.results.values())

    @functools.cached_property
    def named(self) -> tuple[tuple[str, Result], ...]:
        """All results, wanted or not. An elementwise call has one for each array."""
        return tuple(self.kernel.results.items()) * (self.arrays if self.elementwise else 1)

    @functools.cached_property
    def wanted(self) -> tuple[Result, ...]:
        return tuple(r for name, r in self.named if name not in self.skip)

    def partial(self) -> Call:
        """The call for one shard. Partial sums must be in the accumulation dtype."""
        return dataclasses.replace(self, dtypes=())

    def rounded(self, results: Sequence[jax.Array]) -> Arrays:
        """Casts the results of `partial`, summed over shards, to the dtypes of this call."""
        names = (name for name, _ in self.named if name not in self.skip)
        dtypes = dict(self.dtypes)
        return tuple(
            r.astype(dtypes.get(name, r.dtype)) for name, r in zip(names, results, strict=True)
        )

    def axes(self, of_x: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        """Splits `of_x` by letter. It has one item for each axis of x, without the group axes."""
        feature = len(of_x) - 1 - self.inner
        letters = {"n": of_x[:feature], "d": of_x[feature : feature + 1], "m": of_x[feature + 1 :]}
        return {letter: tuple(found) for letter, found in letters.items()}

    def stage(self, given: Sequence[str] | None) -> Call:
        """The call of the first stage; with `given` operands, the call of the second stage."""
        results = self.kernel.results
        if given is None:
            skip = frozenset(name for name, r in results.items() if "n" in r.dims)
            return dataclasses.replace(self, skip=skip, dtypes=())
        there = zip(self.kernel.operands, self.present, strict=True)
        present = tuple(p or name in given for name, p in there)
        skip = self.skip | {name for name, r in results.items() if "n" not in r.dims}
        return dataclasses.replace(self, present=present, skip=skip, dtypes=())

    def operands(self, arrays: Sequence[jax.Array], given: Named) -> list[jax.Array]:
        """The present operands and the `given` ones, in the kernel's order."""
        found = iter(arrays)
        there = zip(self.kernel.operands, self.present, strict=True)
        named = {name: next(found) for name, p in there if p} | given
        return [named[name] for name in self.kernel.operands if name in named]

    def reference(self, *arrays: jax.Array) -> Arrays:
        """Runs the reference on the present operands, and returns only the wanted results."""
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
        """All static values as text. The text is equal in every process."""
        attributes = [(name, type(value).__name__, str(value)) for name, value in self.attributes]
        return repr((
            self.kernel.name, self.present, sorted(attributes), sorted(self.skip),
            sorted(self.dtypes), self.inner, self.groups,
        ))  # fmt: skip
