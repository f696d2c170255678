"""The declaration of a kernel: data, from which `invoke.py` makes everything else.

An op declares its kernels (`Kernel`). Letters name the axes of operands and results. ``n`` stands
for the row axes, any number of them. A letter in `Kernel.ranks` stands for a number of axes that
the call gives. Every other letter stands for one axis. For example, batch norm has an x with axes
``ndm`` and a scale with axis ``d``, the channels.

A result that lacks a letter is reduced over the axes of that letter. If these axes are sharded, the
results of the shards are added up. `Stages` combines results that are not sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from jax_gradops._kernel.array_types import Arrays

#: Arrays by the name of a result or an operand.
Named: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a kernel.

    Attributes:
      dims: the axes.
      dtype: "x" is the first operand's dtype, "accum" the accumulation dtype. A sum may be the
        gradient of a parameter. A call may want it in the parameter's dtype.
      sum: whether the result of all shards is the sum of their results.
    """

    dims: str
    dtype: Literal["x", "accum"] = "accum"
    sum: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """For a kernel with results that other results need. Batch norm's y needs the statistics.

    If an axis of `over` is sharded, the kernel is called twice. The first call computes the results
    that have no letter of `over`, from one shard. The function `combine` then makes the results of
    all shards, and new operands. The second call computes the other results with these operands. A
    call that already has such an operand runs once.

    Attributes:
      over: letters of the axes.
      given: names of the new operands. They are absent from other calls.
      combine: takes the first call's results by name, `Shards`, and the reference's static
        arguments. A result that is a sum (`Result.sum`) is already the sum over all shards.
        `combine` returns the results that are not sums and the new operands, both by name.
    """

    over: str
    given: tuple[str, ...]
    combine: Callable[..., tuple[Named, Named]]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """One native handler: its operands, its results, and a reference that computes the same.

    Attributes:
      name: the handler's name; the custom call's target is ``jax_gradops.<name>``.
      operands: name and axes of each operand. ``n`` comes first. The operand with the first one's
        axes that is sharded the most decides the sharding of these axes. An axis that the first
        operand lacks keeps the sharding of its own operand. All operands but the first may be
        absent (None).
      results: name, axes and dtype of each result.
      reference: computes all results in `jax.numpy`, without group axes. It takes the operands
        (None where absent). Its static arguments are the attributes and the numbers of axes in
        `ranks`.
      scatters: whether the reference has an operation that JAX does not run on Explicit axes.
      features: letters of the features' axes, side by side. The handler has one axis, ``d``, in
        their place, in each array that has all of them. An array with only some keeps these.
      whole: letters of axes that every device must hold whole.
      ranks: letters that stand for a number of axes, and the name of this number. The handler has
        it as the attribute ``<name>_rank``.
      workspace: shape of an extra scratch result. It takes the number of groups, the number of
        elements along the axes of each letter that the handler has, and the number of wanted
        results that are reduced. The elements are as wide as the accumulation dtype.
      stages: for results that need other results of all shards.
      in_place: result name to operand name. The result takes over the operand's memory. Both have
        equal axes and dtypes. XLA first copies an operand that is needed later. XLA also copies an
        argument that is not donated.
      program: for a kernel without a handler. It computes all results by calls of other kernels, on
        one device and without group axes. It takes a function that runs a call, and then what the
        reference takes. It must have no loop that runs once: XLA's compiler (jaxlib 0.10) may then
        never end on a mesh.
    """

    name: str
    operands: Mapping[str, str]
    results: Mapping[str, Result]
    reference: Callable[..., Arrays]
    scatters: bool = False
    features: str = "d"
    whole: str = ""
    ranks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace: Callable[[int, Mapping[str, int], int], tuple[int, ...]] | None = None
    stages: Stages | None = None
    in_place: Mapping[str, str] = dataclasses.field(default_factory=dict)
    program: Callable[..., Arrays] | None = None


# --- For declarations ----------------------------------------------------------------------------


def along_features(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` with x's rank. References need it: JAX can be set to refuse rank promotion."""
    return jnp.expand_dims(parameter, tuple(range(x.ndim - 1)))


def column_sum_workspace(groups: int, sizes: Mapping[str, int], sums: int) -> tuple[int, ...]:
    """Shape of the scratch for partial column sums: [groups, partial rows, sums, features].

    The features are the axis ``d``; all other axes are rows. There are at most 512 partial rows: a
    few for each multiprocessor of a large GPU. One sum has at most 2^23 elements: else wide rows
    would take hundreds of megabytes.
    """
    if sums == 0:
        return (0,)
    features = sizes["d"]
    rows = math.prod(size for letter, size in sizes.items() if letter != "d")
    if not all(isinstance(size, int) for size in (groups, rows, features)):
        return (groups, 64, sums, features)  # symbolic dimensions of jax.export
    if groups * rows * features == 0:
        return (0,)
    partial_rows = max(1, min(rows, 512 // groups, 2**23 // (features * groups)))
    return (groups, partial_rows, sums, features)
