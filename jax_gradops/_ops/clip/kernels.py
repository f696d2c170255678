"""Global norm: reference, kernels, differentiation; what the public functions trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import Arrays, accum_dtype, match_vma
from jax_gradops._kernel.invoke import invoke, prepare
from jax_gradops._kernel.primitive import Operands, Operation
from jax_gradops._kernel.spec import Kernel, Result

Nonfinite: TypeAlias = Literal["propagate", "zero"]

# What is done for each leaf, but for the norm's derivative, is written in `lax`, which is traced in
# a tenth of `jax.numpy`'s time: of thousands of leaves that is seconds.

# --- Reference: the meaning of the kernel in jax.numpy -------------------------------------------


def _like(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """An array of x's shape and sharding."""
    return lax.broadcast(scalar, x.shape, out_sharding=jax.typeof(x).sharding)


def _scalar_beside(x: jax.Array, value: Any) -> jax.Array:
    """A constant whose type has x's mesh, which a batching rule asks for."""
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    return lax.full((), value, sharding=sharding)


def _sum_of_squares_reference(*leaves: jax.Array) -> Arrays:
    """The sum of squares in three ranges, as ffi/ops/global_norm.h defines them.

    Squares of float32 reach from 2^-298 to 2^256. Where their sum leaves float32's range, the
    leaves are scaled by a power of two before they are squared.
    """
    dtype = accum_dtype(*(leaf.dtype for leaf in leaves))

    def sum_of_squares(factor: jax.Array | None) -> jax.Array:
        def of_leaf(leaf: jax.Array) -> jax.Array:
            wide = lax.convert_element_type(leaf, dtype)
            if factor is not None:
                wide = lax.mul(wide, _like(wide, factor))
            return lax.reduce_sum(lax.square(wide), range(wide.ndim))

        return functools.reduce(lax.add, map(of_leaf, leaves))

    if dtype == jnp.float64:
        total = sum_of_squares(None)
        return jnp.zeros_like(total), total, jnp.zeros_like(total)

    def turn(carry: Arrays) -> Arrays:
        factor = carry[0]
        first, total = factor == 1, sum_of_squares(factor)
        is_huge, is_tiny = first & (total == jnp.inf), first & (total < 2.0**-96)
        factor = jnp.where(is_huge, 2.0**-96, jnp.where(is_tiny, 2.0**96, factor))
        return factor.astype(dtype), total, is_huge | is_tiny

    # One turn, or two. The leaves' reductions are in the program once, which halves the time to
    # compile it. A `cond` would not do: its vmap would choose between leaves on a mesh.
    scalars = (_scalar_beside(leaves[0], value) for value in (dtype.type(1), dtype.type(0), True))
    start: Any = match_vma(*leaves, *scalars)[len(leaves) :]
    factor, total, _ = lax.while_loop(lambda carry: carry[2], turn, start)
    parts = (jnp.where(factor == power, total, 0) for power in (2.0**-96, 1, 2.0**96))
    return tuple(parts)


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


def _times(x: jax.Array, *factors: jax.Array) -> jax.Array:
    """Multiplies x by scalars, one after the other, in the accumulation dtype of all."""
    dtype = accum_dtype(x.dtype, *(factor.dtype for factor in factors))
    wide = lax.convert_element_type(x, dtype)
    for factor in factors:
        wide = lax.mul(wide, _like(wide, lax.convert_element_type(factor, dtype)))
    return wide


def _rounded_like(x: jax.Array, wide: jax.Array) -> jax.Array:
    return lax.convert_element_type(wide, x.dtype)


def _scale_reference(*operands: jax.Array) -> Arrays:
    """Leaves times the last two operands, rounded once; as they are where both are 1."""
    *leaves, a, b = operands
    keep = (a == 1) & (b == 1)
    # A choice rather than a product with 1: that would flush subnormals where the hardware does.
    return tuple(lax.select(keep, x, _rounded_like(x, _times(x, a, b))) for x in leaves)


# XLA compares all pairs of a call's results and operands: 10,000 in one call compile for minutes.
_LEAVES_PER_CALL = 250

# Where both factors are 1, no leaf is written.
SCALE = Kernel(
    name="scale",
    operands={"leaves": "n", "factor": "", "second_factor": ""},
    results={"scaled": Result("n", "x")},
    reference=_scale_reference,
    variadic=True,
    in_place={"scaled": "leaves"},
)


# --- The norm ------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """A norm, which may leave float32's range, and its 2^-64th part, which never overflows.

    The second one is infinite only where a leaf is. Of small norms it is 0.
    """

    plain: jax.Array
    scaled: jax.Array


_POWER = 2.0**-64


def _root_of_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """The root of the sum of squares of three scalars; the squares may leave float32's range."""
    largest = functools.reduce(jnp.maximum, parts)
    scalable = (largest > 0) & (largest < jnp.inf)
    divisor = jnp.where(scalable, largest, 1)
    total = sum(jnp.square(part / divisor) for part in parts)
    return jnp.where(scalable, largest * jnp.sqrt(total), largest)


def _norm_of(leaves: Arrays, implementation: Implementation) -> Norm:
    huge, normal, tiny = map(
        jnp.sqrt, invoke(SUM_OF_SQUARES, *leaves, implementation=implementation)
    )
    # Scalars only, so that XLA makes one small kernel.
    plain = _root_of_sum([huge * 2.0**96, normal, tiny * 2.0**-96])
    scaled = _root_of_sum([huge * (2.0**96 * _POWER), normal * _POWER, tiny * 2.0**-96 * _POWER])
    return Norm(plain, scaled)


def _is_big(norm: Norm) -> jax.Array:
    """Whether computations take the scaled norm."""
    return norm.scaled > 2.0**100 * _POWER


def _divisor(norm: Norm) -> tuple[jax.Array, jax.Array]:
    """A power of two, and the norm times this power, which is in range; of norm 0, 1."""
    big = _is_big(norm)
    power = jnp.where(big, _POWER, 1).astype(norm.plain.dtype)
    return power, jnp.where(big, norm.scaled, jnp.where(norm.plain == 0, 1, norm.plain))


@dataclasses.dataclass(frozen=True)
class _Quotient(Operation):
    """a / b, for a scalar b, whose derivative does not need b² (JAX's leaves float32's range)."""

    linear = (0,)

    def compute(self, *operands: Any) -> tuple[jax.Array]:
        a, b = operands
        return (a / b,)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        b = operands[1]
        (q,), (da, db) = self(*operands), tangents
        parts = [] if da is None else [_quotient(da, b)]
        if db is not None:
            parts.append(-q * _quotient(db, b))
        return (q,), (sum(parts),)

    def transpose(self, operands: Operands, cotangents: Operands) -> Operands:
        return _quotient(cotangents[0], operands[1]), None


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    return _Quotient()(a, b)[0]


def _unit(x: jax.Array, norm: Norm) -> jax.Array:
    """The derivative of the norm by x: x / norm. It is 0 where the norm is 0."""
    power, divisor = _divisor(norm)
    return _quotient(_times(x, power), divisor.astype(accum_dtype(x.dtype, divisor.dtype)))


@dataclasses.dataclass(frozen=True)
class _GlobalNorm(Operation):
    """The `Norm` of leaves, by any implementation: the rule does not differentiate it."""

    implementation: Implementation

    def compute(self, *leaves: Any) -> tuple[jax.Array, ...]:
        return tuple(_norm_of(leaves, self.implementation))

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        norm = Norm(*self(*operands))
        pairs = [(x, d) for x, d in zip(operands, tangents, strict=True) if d is not None]
        change = sum(jnp.sum(_unit(x, norm) * d.astype(norm.plain.dtype)) for x, d in pairs)
        return norm, (change, change * _POWER)


@functools.partial(jax.jit, static_argnames="implementation")
def traced_norm(leaves: Arrays, *, implementation: Implementation) -> Norm:
    """The norm of one leaf or more; differentiable."""
    return Norm(*_GlobalNorm(implementation)(*prepare(SUM_OF_SQUARES, *leaves)))


# --- Scaling -------------------------------------------------------------------------------------


def _factors(norm: Norm, max_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers by which leaves are multiplied; 2 and 1 if they are kept as they are.

    Their product is max_norm / norm, at most 1, and the second one is 1 in the usual case. A
    quotient below 2^-100 may leave float32's range. Then the first factor is c / norm, and the
    second one is max_norm / c, for a power of two c > max_norm. No element is larger than the norm,
    so the product with the first factor is at most c. What becomes 0 in that product would be 0 in
    the result.
    """
    power, divisor = _divisor(norm)
    limit = max_norm * power
    keep = (divisor < limit) | (norm.plain == 0)
    # A norm of 2^100 and more times 2^-8 has a reciprocal in range, up to 2^134.
    c = jnp.where(_is_big(norm), 2.0**8, 1).astype(limit.dtype)
    small = limit / divisor < jnp.finfo(limit.dtype).tiny * 2.0**26
    small &= ~keep & (max_norm > 0) & (max_norm < c)
    # Where it is not used it is constant, so that no derivative is infinite times 0. The choice is
    # in the quotient because XLA computes what is cheaper than that again for each element.
    dividend = jnp.where(keep, 2, jnp.where(small, c * power, limit))
    first = _quotient(dividend, jnp.where(keep, 1, divisor))
    return first, _quotient(jnp.where(small, max_norm, 1), jnp.where(small, c, 1))


def _checked_limit(norm: Norm, max_norm: ArrayLike) -> jax.Array:
    """max_norm in the norm's dtype; NaN if it is negative, as gradients would be turned round."""
    limit = jnp.asarray(max_norm, norm.plain.dtype)
    # With a root, as a NaN written here would stop jax_debug_nans.
    return limit + jnp.sqrt(jnp.where(limit < 0, -1, 0).astype(limit.dtype))


def _scaled_by_xla(leaves: Arrays, first: jax.Array, second: jax.Array) -> Arrays:
    keep = first > 1
    # A choice rather than a factor of 1: that would flush subnormals where the hardware does.
    return tuple(lax.select(keep, x, _rounded_like(x, _times(x, first, second))) for x in leaves)


def _scaled_in_place(
    leaves: Arrays, first: jax.Array, second: jax.Array, implementation: Implementation
) -> Arrays:
    *operands, first, second = prepare(SCALE, *leaves, jnp.where(first > 1, 1, first), second)
    calls = (operands[i : i + _LEAVES_PER_CALL] for i in range(0, len(leaves), _LEAVES_PER_CALL))
    return tuple(
        x
        for some in calls
        for x in invoke(SCALE, *some, first, second, implementation=implementation)
    )


@dataclasses.dataclass(frozen=True)
class _Clipped(Operation):
    """Clipped leaves, of leaves, both numbers of their `Norm` and the limit.

    The rule is for whatever scales. Products of a leaf with a factor's derivative, which JAX's
    rules would make, leave float32's range.
    """

    in_place: bool = False
    implementation: Implementation = None

    def compute(self, *operands: Any) -> tuple[jax.Array, ...]:
        *leaves, plain, scaled, limit = operands
        factors = _factors(Norm(plain, scaled), limit)
        if self.in_place:
            return _scaled_in_place(tuple(leaves), *factors, self.implementation)
        return _scaled_by_xla(tuple(leaves), *factors)

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        *leaves, plain, scaled, limit = operands
        *dleaves, dplain, _, dlimit = tangents
        norm = Norm(plain, scaled)
        first, second = _factors(norm, limit)
        by_factor: Any = dlimit
        if dplain is not None:
            by_norm = -second * (first * dplain)
            by_factor = by_norm if dlimit is None else dlimit + by_norm

        def change(x: jax.Array, dx: jax.Array | None) -> jax.Array | None:
            parts = [] if dx is None else [_times(dx, first, second)]
            if by_factor is not None:
                parts.append(_times(_unit(x, norm), by_factor))
            if not parts:
                return None
            unchanged = lax.full_like(x, 0) if dx is None else dx
            return lax.select(
                first > 1, unchanged, _rounded_like(x, functools.reduce(lax.add, parts))
            )

        return self(*operands), tuple(map(change, leaves, dleaves))


@functools.partial(jax.jit, static_argnames="nonfinite")
def scale(
    leaves: Arrays, norm: Norm, max_norm: ArrayLike, *, nonfinite: Nonfinite
) -> tuple[jax.Array, ...]:
    """Clipped leaves, by XLA."""
    clipped = _Clipped()(*leaves, *norm, _checked_limit(norm, max_norm))
    if nonfinite == "propagate":
        return clipped
    drop = ~jnp.isfinite(norm.scaled)
    return tuple(lax.select(drop, lax.full_like(y, 0), y) for y in clipped)


@functools.partial(jax.jit, static_argnames="implementation")
def scale_in_place(
    leaves: Arrays, norm: Norm, max_norm: ArrayLike, *, implementation: Implementation
) -> tuple[jax.Array, ...]:
    """Clipped leaves, by the kernel, in the memory of these."""
    limit = _checked_limit(norm, max_norm)
    return _Clipped(in_place=True, implementation=implementation)(*leaves, *norm, limit)
