"""Lookups of rows of a table: embeddings."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jax_gradops._fuse.program import Program, Site, is_float
from jax_gradops._ops.embedding.embedding import lookup_by_gather

# A table may be scaled, cast, moved, or put together from others. Whatever has other equations
# before it, such as a matrix product or a lookup, is no parameter.
_OF_PARAMETERS = {"convert_element_type", "copy", "reshape", "squeeze", "transpose", "slice", "pad"}
_OF_PARAMETERS |= {"broadcast_in_dim", "concatenate", "stack", "mul", "div", "neg", "name"}
_OF_PARAMETERS |= {"pvary", "pcast", "sharding_constraint", "reshard", "optimization_barrier"}
_MODES = {"CLIP": "clip", "FILL_OR_DROP": "fill", "PROMISE_IN_BOUNDS": "promise_in_bounds"}


def axis_of_lookup(program: Program, equation: JaxprEqn) -> int | None:
    """The axis of a table along which a gather takes whole slices by an array of indices.

    None if it is no lookup of an embedding: the table is not computed from parameters alone, is of
    integers or has one axis, the index is a scalar, or each index occurs once.
    """
    if equation.primitive.name != "gather":
        return None
    (table, indices), params = equation.invars, equation.params
    how, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    if not how.start_index_map:
        return None
    mode = params["mode"].name
    axis, rank = int(how.start_index_map[0]), table.aval.ndim
    batch, collapsed = how.operand_batching_dims, how.collapsed_slice_dims
    features = [i for i in range(rank) if i != axis and i not in batch]
    whole = tuple(n if i in features else 1 for i, n in enumerate(table.aval.shape))
    # jax.vmap of a slice of one row has an index for each axis: 0, or clipped to 0.
    known = mode == "CLIP" or (mode in _MODES and len(how.start_index_map) == 1)
    fits = known and sizes == whole and all(i == axis for i in collapsed)
    fits = fits and all(i < axis for i in batch)
    if not fits or params["unique_indices"] or indices.aval.ndim < 2 or not features:
        return None
    # The table's axes before `axis` are the first ones of the result, the others the last ones.
    first = [i for i in features if i < axis]
    last = equation.outvars[0].aval.ndim
    kept = rank - axis - len(collapsed)
    if tuple(how.offset_dims) != (*first, *range(last - kept, last)):
        return None
    return axis if is_float(table.aval.dtype) and is_parameter(program, table) else None


def is_parameter(program: Program, v: Any) -> bool:
    """Whether an array is an argument or a constant, or is made of some by simple operations."""
    waiting, seen = [v], set()
    found = False
    while waiting:
        u = waiting.pop()
        if isinstance(u, Literal) or u in seen:
            continue
        seen.add(u)
        equation = program.equation_of(u)
        if equation is None:
            found = True
        elif equation.primitive.name not in _OF_PARAMETERS:
            return False
        else:
            waiting += equation.invars
    return found


def lookup(program: Program, i: int, taken: set[int]) -> Site | None:
    """The lookup by equation i, with the casts of the table and of the rows, if it is one."""
    equation = program.items[i].equation
    if axis_of_lookup(program, equation) != 0:
        return None
    (table, indices), params = equation.invars, equation.params
    fill = params["fill_value"]
    if fill is None or fill == 0 or math.isnan(fill):  # no dtype rounds it
        table = _before_casts(program, table)
    joined = program.equation_of(indices)
    if joined is not None and joined.primitive.name == "concatenate":
        indices = joined.invars[0]
    output, region = equation.outvars[0], {i}
    if _is_exact(table.aval.dtype, output.aval.dtype):
        last, cast = _cast_after(program, output)
        if not taken & cast:
            output, region = last, region | cast
    options = {
        "mode": _MODES[params["mode"].name],
        "fill": fill,
        "to": output.aval.dtype.name,
    }
    return Site(
        "embedding_lookup",
        functools.partial(_call, **options),
        (table, indices),
        (output,),
        frozenset(region),
        program.producer[output],
        ("embedding_lookup", *map(str, options.values())),
    )


def _call(table: jax.Array, indices: jax.Array, **options: Any) -> jax.Array:
    return lookup_by_gather(table, lax.index_in_dim(indices, 0, -1, keepdims=False), **options)


def _is_exact(dtype: Any, to: Any) -> bool:
    """Whether a cast rounds nothing."""
    return jnp.promote_types(dtype, to) == to


def _before_casts(program: Program, table: Any) -> Any:
    """The array whose rows, cast once, are the rows of a table."""
    to = table.aval.dtype
    while (equation := program.equation_of(table)) is not None:
        if equation.primitive.name != "convert_element_type":
            break
        before: Any = equation.invars[0]
        exact = table.aval.dtype == to or _is_exact(before.aval.dtype, table.aval.dtype)
        if isinstance(before, Literal) or not is_float(before.aval.dtype) or not exact:
            break
        table = before
    return table


def _cast_after(program: Program, v: Var) -> tuple[Var, set[int]]:
    """The only result that is computed from `v`, if it is a cast, and the equations up to it."""
    last, region = v, set[int]()
    while last not in program.results and len(users := program.users.get(last, ())) == 1:
        equation = program.items[users[0]].equation
        region.add(users[0])
        (last,) = equation.outvars
        if equation.primitive.name == "convert_element_type" and is_float(last.aval.dtype):
            return last, region
        if equation.primitive.name not in ("squeeze", "reshape"):
            break
    return v, set()
