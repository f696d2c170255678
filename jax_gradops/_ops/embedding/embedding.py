"""The lookup of embeddings, and the gradient of their table."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_gradops import _checks
from jax_gradops._implementation import Implementation, resolve_implementation
from jax_gradops._kernel.array_types import (
    Arrays,
    accum_dtype,
    axes_of,
    gathered,
    like_type,
    mesh_of,
)
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.layout import mesh_axes
from jax_gradops._kernel.primitive import Axis, Operands, Operation
from jax_gradops._kernel.spec import Kernel, Result

_MODES = ("fill", "clip", "wrap")
#: Counts that the kernel's 32-bit integers do not hold.
_MANY = 2**31 - 1

# --- The kernel ----------------------------------------------------------------------------------


def _reference(x: jax.Array, indices: jax.Array, numbers: jax.Array) -> Arrays:
    rows, wide = numbers.shape[0], accum_dtype(x.dtype)
    zeros = jnp.zeros((rows, x.shape[-1]), wide)
    if rows == 0:
        return (zeros,)
    row = indices - numbers[0]
    row = jnp.where((row < 0) | (row >= rows), rows, row)  # no row: nothing is added
    return (zeros.at[row].add(x.astype(wide), mode="drop"),)


def _workspace(groups: int, sizes: Mapping[str, int], sums: int) -> tuple[int, ...]:
    """Scratch of ffi/cuda/embedding: the sorted indices, and sums that blocks pass on."""
    del sums
    rows, features, table_rows = (sizes[letter] for letter in "ndv")
    if 0 in (groups, rows, features):
        return (0,)
    blocks = -(-(rows + table_rows + 1) // 128)
    bytes_ = 20 * rows + blocks * (2 * 8 * features + 4) + 2**13
    return (groups, -(-bytes_ // (4 * features * groups)), 1, features)


# `numbers` are the numbers of the table's rows. If they are sharded, each shard sees its own.
BWD = Kernel(
    name="embedding_bwd",
    operands={"x": "nd", "indices": "n", "numbers": "v"},
    results={"dtable": Result("vd")},
    reference=_reference,
    scatters=True,
    workspace=_workspace,
)

# --- Differentiation -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lookup(Operation):
    """The rows of a table with some numbers. The number after the last row stands for no row.

    Attributes:
      table: the shape of the table.
      dtype: of the table.
      to: the dtype of the result.
      fill: the elements for no row. None if each number is of a row.
    """

    table: tuple[int, ...]
    dtype: str
    to: str
    fill: float | None
    implementation: Implementation
    linear = (0,)

    def compute(self, *operands: Any) -> tuple[Any, ...]:
        take: Any = self._take
        mesh = mesh_of(operands)
        explicit = axes_of(AxisType.Explicit, mesh)
        if explicit:  # XLA finds out what to send
            table, rows = (jax.typeof(o).sharding.spec for o in operands)
            spec = NamedSharding(mesh, PartitionSpec(*rows, *_unused(table[1:], rows)))
            take = jax.sharding.auto_axes(take, axes=tuple(explicit), out_sharding=spec)
        return (take(*operands),)

    def _take(self, table: jax.Array, rows: jax.Array) -> jax.Array:
        mode = "clip" if self.fill is None else "fill"
        return jnp.take(table, rows, axis=0, mode=mode, fill_value=self.fill).astype(self.to)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        along = self if self.fill is None else dataclasses.replace(self, fill=0.0)
        return self(*operands), along(tangents[0], operands[1])

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        dy, rows, like = cotangents[0], operands[1], operands[0].aval
        spec = _unused(like.sharding.spec[:1], jax.typeof(rows).sharding.spec)
        sharding = like.sharding.update(spec=PartitionSpec(*spec))
        numbers = like_type(
            _numbers(self.table), like.update(shape=like.shape[:1], sharding=sharding)
        )
        found = _backward(dy, rows, numbers, self.table, self.dtype, self.implementation)
        return like_type(found, like), None

    def vmapped(
        self, axis: Axis, operands: Operands, mapped: Sequence[bool]
    ) -> tuple[Operation, Operands]:
        if not mapped[0]:  # all indices share the table
            return self, operands
        return super().vmapped(axis, operands, mapped)


def _unused(entries: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Entries of a `PartitionSpec`. An entry with a mesh axis of the others becomes None."""
    used = set(mesh_axes(others))
    return [None if used & set(mesh_axes([e])) else e for e in entries]


@functools.partial(jax.jit, static_argnames=("rows", "mode"))
def _rows_of(indices: jax.Array, rows: int, mode: str) -> jax.Array:
    """The number of the row that `jnp.take` takes, in int32. `rows` stands for no row."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    count = jnp.asarray(rows, indices.dtype)
    if mode == "clip":
        return jnp.clip(indices, 0, count - 1).astype(jnp.int32)
    if mode == "wrap":
        return (indices % count).astype(jnp.int32)
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        indices = jnp.where(indices < 0, indices + count, indices)
    return jnp.where((indices >= 0) & (indices < count), indices, count).astype(jnp.int32)


def _numbers(table: tuple[int, ...]) -> jax.Array:
    return jnp.arange(table[0], dtype=jnp.int32)


def lookup_by_gather(
    table: jax.Array, indices: jax.Array, *, mode: str, fill: float | None, to: str
) -> jax.Array:
    """The lookup with `jax.lax.gather`'s modes: negative indices do not count from the end.

    Args:
      table: as in `embedding_lookup`.
      indices: as there.
      mode: "fill": the elements of a row outside of the table are `fill`. "clip": the nearest row.
        "promise_in_bounds": the nearest row in the result, and no row in the gradient.
      fill: None stands for NaN.
      to: the dtype of the result.
    """
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    count = jnp.asarray(table.shape[0], indices.dtype)
    if mode == "clip":
        rows = jnp.clip(indices, 0, count - 1)
    elif mode == "fill":
        rows = jnp.where((indices >= 0) & (indices < count), indices, count)
        fill = float("nan") if fill is None else fill
    else:  # the kernel leaves out what is no row, and the lookup clips it
        low = -1 if jnp.issubdtype(indices.dtype, jnp.signedinteger) else 0
        rows = jnp.clip(indices, low, count)
    rows = rows.astype(jnp.int32)
    implementation = resolve_implementation(None, "embedding_lookup")
    fill = fill if mode == "fill" else None
    return _apply(table, rows, to=to, fill=fill, implementation=implementation)


def _backward(
    dy: jax.Array,
    rows: jax.Array,
    numbers: jax.Array,
    table: tuple[int, ...],
    dtype: Any,
    implementation: Implementation,
) -> jax.Array:
    """The gradient of a table from the rows' numbers."""
    if any(isinstance(size, int) and size > _MANY for size in (rows.size, table[0])):
        implementation = "xla"
    x = dy
    if len(table) != 2:
        x = gathered(dy, rows.ndim).reshape(*rows.shape, math.prod(table[1:]))
    operands = prepare(BWD, x, rows, numbers)
    wide = accum_dtype(dy.dtype)
    # The kernel rounds sums in float32 to 16 bits. It casts neither from nor to float64.
    to = dtype if accum_dtype(jnp.dtype(dtype)) == wide else wide
    (found,) = invoke(BWD, *operands, implementation=implementation, dtypes={"dtable": to})
    return found.astype(dtype).reshape(table)


@functools.partial(jax.jit, static_argnames=("to", "fill", "implementation"))
def _apply(table: jax.Array, rows: jax.Array, **static: Any) -> jax.Array:
    return _Lookup(table.shape, table.dtype.name, **static)(table, rows)[0]


@functools.partial(jax.jit, static_argnames=("table", "dtype", "implementation"))
def _apply_backward(dy: jax.Array, rows: jax.Array, *, table: Any, **static: Any) -> jax.Array:
    return _backward(dy, rows, _numbers(table), table, **static)


# --- Public functions ----------------------------------------------------------------------------


@_checks.with_hints
def embedding_lookup(
    table: ArrayLike,
    indices: ArrayLike,
    *,
    dtype: Any = None,
    mode: str = "fill",
    implementation: Implementation = None,
) -> jax.Array:
    r"""Looks up rows of a table. The gradient of the table is a sorted sum in float32.

    .. math:: y_i = \text{table}_{t_i}, \qquad d\text{table}_v = \sum_{i:\,t_i = v} dy_i

    It replaces ``jnp.take(table, indices, axis=0, mode=mode).astype(dtype)``. XLA adds the rows of
    the gradient with atomic operations: in 16 bits, tokens that occur often then wait for each
    other, and their sums lose digits.

    Args:
      table: an array [num_embeddings, \*features] in float16, bfloat16, float32 or float64.
      indices: integers of any shape and dtype.
      dtype: the dtype of the result. The default is the table's dtype. Only the rows that are
        looked up are cast.
      mode: what an index outside of the table means, as in `jax.numpy.take`. ``"fill"``: its row is
        NaN, and its cotangent is added to no row; a negative index counts from the end.
        ``"clip"``: the nearest row. ``"wrap"``: the index modulo `num_embeddings`.
      implementation: ``"ffi"`` selects the native kernel, ``"xla"`` selects `jax.numpy`. None
        selects the kernel if one is available.

    Returns:
      An array [\*indices.shape, \*features] in `dtype`.

    Raises:
      TypeError: if the indices are not integers, or for an unsupported dtype.
      ValueError: for a table without axes or without rows, or an unknown mode. Also for
        ``implementation="ffi"`` if no kernel is available.

    The gradient has the table's dtype. Each of its rows is added up in float32 (float64 for
    float64), in a fixed order, and rounded once. Equal inputs give equal bits. Rows that do not
    occur are zeros. XLA computes the forward pass, together with the operations around it.

    References:
      ONNX Runtime, GatherGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax, jax.numpy as jnp, jax_gradops
    >>> table, tokens = jnp.ones((5, 2)), jnp.array([[0, 3], [3, 3]])
    >>> loss = lambda table: jax_gradops.embedding_lookup(table, tokens).sum()
    >>> print(jax.grad(loss)(table)[:, 0])
    [1. 0. 0. 3. 0.]
    """
    op = "embedding_lookup"
    array = _checks.array(op, "table", table)
    if array.ndim == 0:
        raise ValueError(
            f"{op}: table must have the axes [num_embeddings, *features], got a scalar"
        )
    implementation = resolve_implementation(implementation, op)
    to = _checked_dtype(op, dtype, array.dtype)
    rows = _checked_rows(op, indices, array.shape[0], mode)
    fill = float("nan") if mode == "fill" else None
    return _apply(array, rows, to=to, fill=fill, implementation=implementation)


@_checks.with_hints
def embedding_backward(
    dy: ArrayLike,
    indices: ArrayLike,
    num_embeddings: int,
    *,
    dtype: Any = None,
    mode: str = "fill",
    implementation: Implementation = None,
) -> jax.Array:
    r"""The gradient of an embedding's table (GatherGrad for axis 0).

    .. math:: d\text{table}_v = \sum_{i:\,t_i = v} dy_i

    Args:
      dy: an array [\*indices.shape, \*features] in float16, bfloat16, float32 or float64.
      indices: integers of any dtype.
      num_embeddings: the number of the table's rows.
      dtype: the dtype of the result. The default is that of dy.
      mode: as in `jax_gradops.embedding_lookup`.
      implementation: as there.

    Returns:
      An array [num_embeddings, \*features] in `dtype`. Its rows are added up in float32 (float64
      for float64), in a fixed order, and rounded once.

    Raises:
      TypeError: if the indices are not integers, or for an unsupported dtype.
      ValueError: for a wrong shape, or an unknown mode. Also for ``implementation="ffi"`` if no
        kernel is available.

    References:
      ONNX Runtime, GatherGrad: https://github.com/microsoft/onnxruntime/blob/main/orttraining/orttraining/core/graph/training_op_defs.cc

    >>> import jax.numpy as jnp
    >>> from jax_gradops import backward
    >>> dy = jnp.ones((3, 2))
    >>> print(backward.embedding_backward(dy, jnp.array([1, 1, 9]), 3)[:, 0])
    [0. 2. 0.]
    """
    op = "embedding_backward"
    cotangent = _checks.array(op, "dy", dy)
    count = _checks.count(op, "num_embeddings", num_embeddings)
    implementation = resolve_implementation(implementation, op)
    to = _checked_dtype(op, dtype, cotangent.dtype)
    rows = _checked_rows(op, indices, count, mode)
    if cotangent.shape[: rows.ndim] != rows.shape:
        raise ValueError(
            f"{op}: dy must have the shape [*indices.shape, *features], with indices of shape "
            f"{rows.shape}, got {cotangent.shape}"
        )
    table = (count, *cotangent.shape[rows.ndim :])
    return _apply_backward(cotangent, rows, table=table, dtype=to, implementation=implementation)


def _checked_dtype(op: str, dtype: Any, default: Any) -> str:
    if dtype is None:
        return default.name
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in _checks.FLOAT_DTYPES:
        expected = "float16, bfloat16, float32 or float64"
        raise _checks.wrong(op, "dtype", expected, dtype, TypeError)
    return jax.dtypes.canonicalize_dtype(name).name


def _checked_rows(op: str, indices: Any, rows: int, mode: Any) -> jax.Array:
    mode = _checks.choice(op, "mode", mode, *_MODES)
    checked = _checks.array(op, "indices", indices, _checks.INTEGER_DTYPES)
    if rows == 0 and checked.size:
        raise ValueError(f"{op}: table must have rows, got none for {checked.size} indices")
    return _rows_of(checked, rows, mode)
