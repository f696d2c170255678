"""Global norm: reference, kernels, differentiation; what the public functions trace."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_gradops._array_types import Arrays, accum_dtype, match_vma
from jax_gradops._core import Kernel, Result
from jax_gradops._implementation import Implementation

Nonfinite: TypeAlias = Literal["propagate", "zero"]

# What is done for each leaf, but for the norm's derivative, is written in `lax`, which is traced in
# a tenth of `jax.numpy`'s time: of thousands of leaves that is seconds.

# --- Reference: the meaning of the kernel in jax.numpy -------------------------------------------


def _like(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """An array of x's shape and sharding."""
    return lax.broadcast(scalar, x.shape, out_sharding=jax.typeof(x).sharding)


def _sum_of_squares_reference(*leaves: jax.Array) -> Arrays:
    """The sum of squares in three ranges, as ffi/ops/global_norm.h defines them.

    Squares of float32 reach from 2^-298 to 2^256: where their sum leaves float32's range, the
    leaves are scaled by a power of two before they are squared.
    """
    dtype = accum_dtype(*(leaf.dtype for leaf in leaves))

    def sum_of_squares(factor: float) -> jax.Array:
        def of_leaf(leaf: jax.Array) -> jax.Array:
            wide = lax.convert_element_type(leaf, dtype)
            if factor != 1:
                wide = lax.mul(wide, _like(wide, scalar))
            return lax.reduce_sum(lax.square(wide), range(wide.ndim))

        scalar = jnp.asarray(factor, dtype)
        return functools.reduce(lax.add, map(of_leaf, leaves))

    normal = sum_of_squares(1)
    _, zero = match_vma(normal, jnp.zeros_like(normal))
    assert zero is not None
    if dtype == jnp.float64:
        return zero, normal, zero
    is_huge, is_tiny = normal == jnp.inf, normal < 2.0**-96
    # At most one turn. It is no `cond`, whose vmap would choose between leaves on a mesh.
    _, huge, tiny = lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (carry[0] & False, sum_of_squares(2.0**-96), sum_of_squares(2.0**96)),
        (is_huge | is_tiny, zero, zero),
    )
    return (
        jnp.where(is_huge, huge, 0),
        jnp.where(is_huge | is_tiny, 0, normal),
        jnp.where(is_tiny, tiny, 0),
    )


# --- Kernel --------------------------------------------------------------------------------------

SUM_OF_SQUARES = Kernel(
    name="sum_of_squares",
    operands={"leaves": "n"},
    results={"huge": Result(""), "normal": Result(""), "tiny": Result("")},
    reference=_sum_of_squares_reference,
    variadic=True,
    # 2,048 partial sums in double, a dtype that JAX may not know; at least one for each group.
    workspace=lambda groups, rows, features, sums: (
        groups,
        -(-2048 // max(1, groups)) if isinstance(groups, int) else 2048,
        2,
    ),
)


def _wide_product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """X * factor, a scalar, in the accumulation dtype of both."""
    dtype = accum_dtype(x.dtype, factor.dtype)
    wide = lax.convert_element_type(x, dtype)
    return lax.mul(wide, _like(wide, lax.convert_element_type(factor, dtype)))


def _product(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The same, rounded once to x's dtype."""
    return lax.convert_element_type(_wide_product(x, factor), x.dtype)


@jax.custom_jvp
def _scale_reference(*operands: jax.Array) -> Arrays:
    """Leaves times the last operand, rounded once; as they are where it is 1."""
    *leaves, factor = operands
    # A choice rather than a product with 1: that would flush subnormals where the hardware does.
    return tuple(lax.select(factor == 1, x, _product(x, factor)) for x in leaves)


# The choice has no derivative by a factor of 1, which may come of norm == max_norm.
@_scale_reference.defjvp
def _scale_reference_jvp(primals: Any, tangents: Any) -> Any:
    (*leaves, factor), (*dleaves, dfactor) = primals, tangents

    def change(x: jax.Array, dx: jax.Array) -> jax.Array:
        wide = lax.add(_wide_product(dx, factor), _wide_product(x, dfactor))
        return lax.convert_element_type(wide, x.dtype)

    return _scale_reference(*primals), tuple(map(change, leaves, dleaves))


# XLA compares all pairs of a call's results and operands: 10,000 in one call compile for minutes.
_LEAVES_PER_CALL = 250

# Where the factor is 1, no leaf is written.
SCALE = Kernel(
    name="scale",
    operands={"leaves": "n", "factor": ""},
    results={"scaled": Result("n", "x")},
    reference=_scale_reference,
    variadic=True,
    in_place={"scaled": "leaves"},
)


# --- Differentiation -----------------------------------------------------------------------------


def _norm_of(leaves: tuple[jax.Array, ...], implementation: Implementation) -> jax.Array:
    huge, normal, tiny = SUM_OF_SQUARES(*leaves, implementation=implementation)
    # The root of each part has float32's range; scalars only, so that XLA makes one small kernel.
    parts = (jnp.sqrt(huge) * 2.0**96, jnp.sqrt(normal), jnp.sqrt(tiny) * 2.0**-96)
    largest = functools.reduce(jnp.maximum, parts)
    scalable = (largest > 0) & (largest < jnp.inf)
    divisor = jnp.where(scalable, largest, 1)
    total = sum(jnp.square(part / divisor) for part in parts)
    return jnp.where(scalable, largest * jnp.sqrt(total), largest)


@jax.custom_jvp
def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """A / b, for a scalar b, whose derivative does not need b² (JAX's leaves float32's range)."""
    return a / b


@_quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    q = _quotient(a, b)
    return q, _quotient(da, b) - q * _quotient(db, b)


# The rule does not differentiate the kernel, so it serves every implementation, order and mode.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _norm(leaves: tuple[jax.Array, ...], implementation: Implementation) -> jax.Array:
    return _norm_of(leaves, implementation)


@_norm.defjvp
def _norm_jvp(implementation: Implementation, primals: Any, tangents: Any) -> Any:
    (leaves,), (dleaves,) = primals, tangents
    norm = _norm(leaves, implementation)
    safe = jnp.where(norm == 0, 1, norm)  # the gradient at norm 0 is 0
    pairs = zip(leaves, dleaves, strict=True)
    return norm, sum(
        jnp.sum(_quotient(x.astype(norm.dtype), safe) * d.astype(norm.dtype)) for x, d in pairs
    )


# --- What is traced ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="implementation")
def traced_norm(leaves: tuple[jax.Array, ...], *, implementation: Implementation) -> jax.Array:
    """The norm of one leaf or more; differentiable."""
    norm: Any = _norm(SUM_OF_SQUARES.prepare(*leaves), implementation)
    return norm


def _factor(norm: jax.Array, max_norm: ArrayLike) -> jax.Array:
    """By what leaves are multiplied, at most 1; 2 if they are kept as they are."""
    max_norm = jnp.asarray(max_norm, norm.dtype)
    # NaN if it is negative, as gradients would be turned round. With a root, as a NaN written here
    # would stop jax_debug_nans.
    max_norm += jnp.sqrt(jnp.where(max_norm < 0, -1, 0).astype(norm.dtype))
    keep = (norm < max_norm) | (norm == 0)
    # Where it is not used it is constant, so that no derivative is infinite times 0. The choice is
    # in the quotient because XLA computes what is cheaper than that again for each element.
    return _quotient(jnp.where(keep, 2, max_norm), jnp.where(keep, 1, norm))


@functools.partial(jax.jit, static_argnames="nonfinite")
def scale(
    leaves: tuple[jax.Array, ...], norm: jax.Array, max_norm: ArrayLike, *, nonfinite: Nonfinite
) -> tuple[jax.Array, ...]:
    """Clipped leaves, by XLA."""
    factor = _factor(norm, max_norm)
    drop = ~jnp.isfinite(norm) if nonfinite == "zero" else None
    keep = factor > 1

    def scaled(x: jax.Array) -> jax.Array:
        # A choice rather than a factor of 1: that would flush subnormals where the hardware does.
        y = lax.select(keep, x, _product(x, factor))
        return y if drop is None else lax.select(drop, lax.full_like(y, 0), y)

    return tuple(map(scaled, leaves))


@functools.partial(jax.jit, static_argnames="implementation")
def scale_in_place(
    leaves: tuple[jax.Array, ...],
    norm: jax.Array,
    max_norm: ArrayLike,
    *,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """Clipped leaves, by the kernel, in the memory of these."""
    factor = _factor(norm, max_norm)
    *operands, factor = SCALE.prepare(*leaves, jnp.where(factor > 1, 1, factor))
    calls = (operands[i : i + _LEAVES_PER_CALL] for i in range(0, len(leaves), _LEAVES_PER_CALL))
    return tuple(x for some in calls for x in SCALE(*some, factor, implementation=implementation))
