"""Equations that are listed as simpler ones, so that an op may end between these.

- A sum over several axes is one over the last axis, and one over the others.
- A matrix product that sums each pair of rows is an elementwise product and a sum. An example is
  ``einsum("...v,...v->...", x, one_hot)``.
- ``x[i, j, labels]`` is `take_along_axis` if the indices i and j count from 0.

Of sums, this is done for those of one-hot arrays times others. They may be losses.
"""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

EquationOf = Callable[[Any], JaxprEqn | None]
Function = Callable[..., Any]


def parts_of(equation: JaxprEqn, of: EquationOf) -> tuple[Function, Sequence[Any]] | None:
    """A function that does the same in several equations, and its operands.

    Args:
      equation: any equation.
      of: returns the equation that computes a variable.
    """
    rule = _RULES.get(equation.primitive.name)
    symbolic = [n for v in equation.invars for n in v.aval.shape if not isinstance(n, int)]
    return None if rule is None or symbolic else rule(equation, of)


def _sum(equation: JaxprEqn, of: EquationOf) -> tuple[Function, Sequence[Any]] | None:
    params, (x,) = equation.params, equation.invars
    axes, last = params["axes"], len(x.aval.shape) - 1
    if len(axes) < 2 or last not in axes or params.get("out_sharding") is not None:
        return None
    if not _has_one_hot(x, of):
        return None

    def sums(x: jax.Array) -> jax.Array:
        for some in ((last,), tuple(i for i in axes if i != last)):
            x = equation.primitive.bind(x, **(params | {"axes": some}))
        return x

    return sums, (x,)


def _product(equation: JaxprEqn, of: EquationOf) -> tuple[Function, Sequence[Any]] | None:
    contracted, batch = equation.params["dimension_numbers"]
    rank = len(equation.invars[0].aval.shape)
    axes = tuple(contracted[0])
    same = axes == tuple(contracted[1]) and (*batch[0],) == (*batch[1],) == (*range(len(batch[0])),)
    if not same or len(batch[0]) + len(axes) < rank or rank - 1 not in axes:
        return None
    if equation.params.get("out_sharding") is not None:
        return None
    if not any(_has_one_hot(v, of) for v in equation.invars):
        return None
    wide = jnp.promote_types(equation.outvars[0].aval.dtype, jnp.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        terms = jnp.sum(x.astype(wide) * y.astype(wide), rank - 1)
        terms = jnp.sum(terms, tuple(i for i in axes if i != rank - 1)) if axes[1:] else terms
        return terms.astype(equation.outvars[0].aval.dtype)

    return product, equation.invars


def _gather(equation: JaxprEqn, of: EquationOf) -> tuple[Function, Sequence[Any]] | None:
    x, index = equation.invars
    how, shape = equation.params["dimension_numbers"], x.aval.shape
    every = tuple(range(len(shape)))
    last = len(shape) - 1
    joined = of(index)
    if joined is None or joined.primitive.name != "concatenate" or len(shape) < 2:
        return None
    if any(any(v.aval.sharding.spec) for v in (x, index)):  # of an Explicit mesh
        return None
    if how.start_index_map != every or how.collapsed_slice_dims != every or how.offset_dims:
        return None
    if index.aval.shape != (*shape[:-1], len(shape)) or len(joined.invars) != len(shape):
        return None
    if not all(_counts(v, axis, of) for axis, v in enumerate(joined.invars[:last])):
        return None
    rows = every[:last]

    def gather(x: jax.Array, index: jax.Array) -> jax.Array:
        return lax.gather(
            x,
            index,
            lax.GatherDimensionNumbers(
                offset_dims=(),
                collapsed_slice_dims=(last,),
                start_index_map=(last,),
                operand_batching_dims=rows,
                start_indices_batching_dims=rows,
            ),
            (1,) * len(shape),
            mode=equation.params["mode"],
            fill_value=equation.params["fill_value"],
        )

    return gather, (x, joined.invars[last])


_RULES = {"reduce_sum": _sum, "dot_general": _product, "gather": _gather}


def _has_one_hot(v: Any, of: EquationOf, depth: int = 8) -> bool:
    """Whether an array is a comparison of equality, or a product with one."""
    equation = of(v)
    if equation is None or not depth:
        return False
    name = equation.primitive.name
    passed = name in ("mul", "neg", "convert_element_type", "broadcast_in_dim")
    return name == "eq" or (passed and any(_has_one_hot(u, of, depth - 1) for u in equation.invars))


def _counts(v: Any, axis: int, of: EquationOf) -> bool:
    """Whether an array's elements are their own indices along an axis."""
    equation = of(v)
    if equation is None:
        return False
    name, params, x = equation.primitive.name, equation.params, equation.invars
    if name == "iota":
        return params["dimension"] == axis
    if name == "select_n":  # numpy's negative indices
        test, counted = of(equation.invars[0]), equation.invars[1]
        if test is None or test.primitive.name != "lt" or test.invars[0] is not counted:
            return False
        zero = test.invars[1]
        return isinstance(zero, Literal) and zero.val == 0 and _counts(counted, axis, of)
    if name == "convert_element_type":
        return _counts(x[0], axis, of)
    if name == "broadcast_in_dim" and axis in params["broadcast_dimensions"]:
        own = params["broadcast_dimensions"].index(axis)
        return x[0].aval.shape[own] == v.aval.shape[axis] and _counts(x[0], own, of)
    if name == "reshape":  # it adds axes of size 1
        shape, size = x[0].aval.shape, v.aval.shape[axis]
        only = math.prod(v.aval.shape) == size and size in shape
        return only and _counts(x[0], shape.index(size), of)
    return False
