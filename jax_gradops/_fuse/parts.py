"""Equations that are listed as simpler ones, so that an op may end between these.

- A sum over several axes becomes two sums. The first one is over the last axis.

- A matrix product that sums each pair of rows is an elementwise product and a sum. An example is
  ``einsum("...v,...v->...", x, one_hot)``.

- ``x[i, j, labels]`` is `take_along_axis` if the indices i and j count from 0.

Sums and products are divided only if an operand is a one-hot array, or a product with one. They may
be losses.
"""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

Producer: TypeAlias = Callable[[Any], JaxprEqn | None]
Parts: TypeAlias = tuple[Callable[..., Any], Sequence[Any]]


def parts_of(equation: JaxprEqn, producer: Producer) -> Parts | None:
    """A function that does the same in several equations, and its operands.

    Args:
      equation: any equation.
      producer: returns the equation that computes a variable.
    """
    rule = _RULES.get(equation.primitive.name)
    symbolic = [n for v in equation.invars for n in v.aval.shape if not isinstance(n, int)]
    return None if rule is None or symbolic else rule(equation, producer)


def _sum(equation: JaxprEqn, producer: Producer) -> Parts | None:
    params, (x,) = equation.params, equation.invars
    axes, last = params["axes"], len(x.aval.shape) - 1
    if len(axes) < 2 or last not in axes or params.get("out_sharding") is not None:
        return None
    if not _may_be_one_hot(x, producer):
        return None

    def sums(x: jax.Array) -> jax.Array:
        for some in ((last,), tuple(i for i in axes if i != last)):
            x = equation.primitive.bind(x, **(params | {"axes": some}))
        return x

    return sums, (x,)


def _product(equation: JaxprEqn, producer: Producer) -> Parts | None:
    """Only if each axis of both operands is summed, or is one of the first, which stay."""
    (axes, others), (batch, others_batch) = equation.params["dimension_numbers"]
    x, y = equation.invars
    last = len(x.aval.shape) - 1
    stay = tuple(range(len(batch)))
    if x.aval.shape != y.aval.shape or tuple(axes) != tuple(others) or last not in axes:
        return None
    if not stay == tuple(batch) == tuple(others_batch) or len(stay) + len(axes) <= last:
        return None
    if equation.params.get("out_sharding") is not None:
        return None
    if not _may_be_one_hot(x, producer) and not _may_be_one_hot(y, producer):
        return None
    dtype = equation.outvars[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        terms = jnp.sum(x.astype(wide) * y.astype(wide), last)
        terms = jnp.sum(terms, tuple(i for i in axes if i != last)) if axes[1:] else terms
        return terms.astype(dtype)

    return product, (x, y)


def _gather(equation: JaxprEqn, producer: Producer) -> Parts | None:
    x, index = equation.invars
    how, shape = equation.params["dimension_numbers"], x.aval.shape
    every = tuple(range(len(shape)))
    last = len(shape) - 1
    joined = producer(index)
    if joined is None or joined.primitive.name != "concatenate" or len(shape) < 2:
        return None
    if any(any(v.aval.sharding.spec) for v in (x, index)):  # of an Explicit mesh
        return None
    if how.start_index_map != every or how.collapsed_slice_dims != every or how.offset_dims:
        return None
    if index.aval.shape != (*shape[:-1], len(shape)) or len(joined.invars) != len(shape):
        return None
    if not all(counts(v, axis, producer) for axis, v in enumerate(joined.invars[:last])):
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


def _may_be_one_hot(v: Any, producer: Producer, depth: int = 8) -> bool:
    """Whether an array is a comparison of equality, or a product with one."""
    equation = producer(v)
    if equation is None or not depth:
        return False
    name = equation.primitive.name
    passed = name in ("mul", "neg", "convert_element_type", "broadcast_in_dim")
    return name == "eq" or (
        passed and any(_may_be_one_hot(u, producer, depth - 1) for u in equation.invars)
    )


def counts(v: Any, axis: int, producer: Producer) -> bool:
    """Whether an array's elements are their own indices along an axis."""
    equation = producer(v)
    if equation is None:
        return False
    name, params, x = equation.primitive.name, equation.params, equation.invars
    size = v.aval.shape[axis]
    if name == "iota":
        return params["dimension"] == axis and _has_numbers_up_to(v.aval.dtype, size)
    if name == "select_n":  # numpy's negative indices
        test, counted = producer(x[0]), x[1]
        if test is None or test.primitive.name != "lt" or test.invars[0] is not counted:
            return False
        zero = test.invars[1]
        return isinstance(zero, Literal) and zero.val == 0 and counts(counted, axis, producer)
    if name == "convert_element_type":
        return _has_numbers_up_to(v.aval.dtype, size) and counts(x[0], axis, producer)
    if name in ("pvary", "pcast"):
        return counts(x[0], axis, producer)
    if name == "broadcast_in_dim" and axis in params["broadcast_dimensions"]:
        own = params["broadcast_dimensions"].index(axis)
        return x[0].aval.shape[own] == size and counts(x[0], own, producer)
    if name == "reshape":  # it adds axes of size 1
        shape = x[0].aval.shape
        only = math.prod(v.aval.shape) == size and size in shape
        return only and counts(x[0], shape.index(size), producer)
    return False


def _has_numbers_up_to(dtype: Any, size: int) -> bool:
    """Whether a dtype has all integers from 0 to size - 1."""
    if jnp.issubdtype(dtype, jnp.integer):
        return size - 1 <= jnp.iinfo(dtype).max
    return jnp.issubdtype(dtype, jnp.floating) and size <= 2 ** (jnp.finfo(dtype).nmant + 1)
