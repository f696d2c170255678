"""The bias of a linear layer: its addition, and a backward pass that reads the cotangent once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_gradops import _checks
from jax_gradops._implementation import default_implementation
from jax_gradops._kernel.array_types import accum_dtype, match_vma
from jax_gradops._kernel.primitive import Operands, Operation, Unknown

_FLOATS = tuple(map(jnp.dtype, _checks.FLOAT_DTYPES))


def plus(y: Any, bias: Any) -> Any:
    """Adds the bias, an array of the last axes, to a matrix product."""
    return y + jnp.reshape(bias, (1,) * (jnp.ndim(y) - jnp.ndim(bias)) + jnp.shape(bias))


@dataclasses.dataclass(frozen=True)
class _PlusBias(Operation):
    """y + bias, with its own backward pass.

    Attributes:
      dtype: the dtype of the bias.
      axes: the number of its axes.
    """

    dtype: str
    axes: int
    linear = (0, 1)

    def compute(self, *operands: Any) -> tuple[jax.Array]:
        y, bias = operands
        return (plus(y, bias.astype(y.dtype)),)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        dy, dbias = tangents
        if dbias is None:
            return self(*operands), (dy,)
        return self(*operands), self(jnp.zeros_like(operands[0]) if dy is None else dy, dbias)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        wants_dy, wants_dbias = (isinstance(o, Unknown) for o in operands)
        dy = lax.optimization_barrier(cotangents[0])
        dbias = _column_sums(dy, self.axes).astype(self.dtype) if wants_dbias else None
        return dy if wants_dy else None, dbias


def plus_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds the bias to a matrix product. The bias is rounded to y's dtype.

    The bias is an array of y's last axes, and must be sharded as these. XLA reads the cotangent of
    a plain sum too often. The cotangent may be a concatenation (the gradients of queries, keys and
    values). XLA then makes it again for each of two products and the bias's gradient. Here it is
    made once, before all three. XLA's column sums take twice the time of reading the cotangent. A
    product with ones takes only the time of reading (benchmarks/tuning/results.md).
    """
    return _PlusBias(bias.dtype.name, bias.ndim)(y, bias)[0]


def _column_sums(dy: jax.Array, kept: int) -> jax.Array:
    """Sums over all axes but the last ones, in float32 or wider."""

    def sums(dy: jax.Array) -> jax.Array:
        return jnp.sum(dy, tuple(range(dy.ndim - kept)), accum_dtype(dy.dtype))

    # A product would round wider elements (TF32). It also fails for Explicitly sharded rows.
    if dy.dtype.itemsize > 2 or any(jax.typeof(dy).sharding.spec):
        return sums(dy)
    by_product = functools.partial(column_sums_by_product, kept=kept)
    return lax.platform_dependent(dy, cuda=by_product, default=sums)


def column_sums_by_product(dy: jax.Array, kept: int = 1) -> jax.Array:
    """Column sums of 16-bit elements, in float32. Products with one are exact."""
    rows = tuple(range(dy.ndim - kept))
    # Eight rows of ones: XLA would turn a product with a single row into a reduction.
    ones = jnp.ones((8, *dy.shape[: dy.ndim - kept]), dy.dtype)
    return lax.dot_general(
        ones,
        dy,
        ((tuple(axis + 1 for axis in rows), rows), ((), ())),
        precision=lax.Precision.DEFAULT,  # not a user's setting for other products
        preferred_element_type=jnp.float32,
    )[0]


def linear_bias(y: jax.Array, bias: jax.Array, exact: jax.Array) -> jax.Array:
    """Adds a bias to a matrix product. `bias` is the bias in y's dtype, `exact` is not rounded."""
    plain = default_implementation() == "xla" or y.dtype not in _FLOATS or y.dtype != bias.dtype
    of_y, of_bias = (tuple(jax.typeof(a).sharding.spec) for a in (y, exact))
    if plain or of_y[y.ndim - exact.ndim :] != of_bias:  # JAX shards the sum and both gradients
        return plus(y, bias)
    matched: Any = match_vma(y, exact, sums=(None, accum_dtype(y.dtype)))
    return plus_bias(*matched)
