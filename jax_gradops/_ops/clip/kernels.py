"""Global norm and clipping: reference, kernels, differentiation and traced functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_gradops._implementation import Implementation
from jax_gradops._kernel.array_types import Arrays, accum_dtype, match_vma
from jax_gradops._kernel.primitive import Operands, Operation
from jax_gradops._kernel.trees import TreeKernel, invoke

Nonfinite: TypeAlias = Literal["propagate", "zero"]

# Code that runs for each leaf uses `lax`, except in the norm's derivative. JAX traces `lax` in a
# tenth of the time of `jax.numpy`. For thousands of leaves, this saves seconds.

# --- Reference: the meaning of the kernel in jax.numpy -------------------------------------------


def _like(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """Broadcasts a scalar to x's shape and sharding."""
    return lax.broadcast(scalar, x.shape, out_sharding=jax.typeof(x).sharding)


def _scalar_beside(x: jax.Array, value: Any) -> jax.Array:
    """A constant whose type has x's mesh. One of JAX's batching rules requires this mesh."""
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    return lax.full((), value, sharding=sharding)


def _sum_of_squares_reference(*leaves: jax.Array) -> Arrays:
    """Returns the sum of squares as three numbers: huge, normal and tiny (ffi/ops/global_norm.h).

    Squares of float32 reach from 2^-298 to 2^256. If their sum leaves float32's range, the leaves
    are multiplied by a power of two before they are squared.
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

    # The loop runs once or twice. It puts the leaves' reductions into the program only once: this
    # halves the compile time. `cond` fails under vmap: it would select between leaves on a mesh.
    scalars = (_scalar_beside(leaves[0], value) for value in (dtype.type(1), dtype.type(0), True))
    start: Any = match_vma(*leaves, *scalars)[len(leaves) :]
    factor, total, _ = lax.while_loop(lambda carry: carry[2], turn, start)
    parts = (jnp.where(factor == power, total, 0) for power in (2.0**-96, 1, 2.0**96))
    return tuple(parts)


# --- Kernel --------------------------------------------------------------------------------------

SUM_OF_SQUARES = TreeKernel(
    name="sum_of_squares",
    sums=("huge", "normal", "tiny"),
    reference=_sum_of_squares_reference,
    # 2,048 partial sums in double, at least one per group. JAX may lack double: 2 floats make one.
    workspace=lambda groups: (
        groups,
        -(-2048 // max(1, groups)) if isinstance(groups, int) else 2048,
        2,
    ),
)


def _times(x: jax.Array, *factors: jax.Array) -> jax.Array:
    """Multiplies x by scalars one by one, in the accumulation dtype of x and the scalars."""
    dtype = accum_dtype(x.dtype, *(factor.dtype for factor in factors))
    wide = lax.convert_element_type(x, dtype)
    for factor in factors:
        wide = lax.mul(wide, _like(wide, lax.convert_element_type(factor, dtype)))
    return wide


def _rounded_like(x: jax.Array, wide: jax.Array) -> jax.Array:
    return lax.convert_element_type(wide, x.dtype)


def _scale_reference(*operands: jax.Array) -> Arrays:
    """Leaves times the last two operands, rounded once. Unchanged if both operands are 1."""
    *leaves, a, b = operands
    keep = (a == 1) & (b == 1)
    # `select` keeps subnormals. A product with 1 flushes them to zero on some hardware.
    return tuple(lax.select(keep, x, _rounded_like(x, _times(x, a, b))) for x in leaves)


# XLA compares all pairs of a call's results and operands: 10,000 leaves take minutes to compile.
_LEAVES_PER_CALL = 250

# If both factors are 1, the kernel writes no leaf.
SCALE = TreeKernel(name="scale", scalars=("factor", "second_factor"), reference=_scale_reference)


# --- The norm ------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """A norm as two numbers: `plain` is the norm, and `scaled` is the norm times 2^-64.

    `plain` may leave float32's range. `scaled` never overflows: it is infinite only if a leaf is
    infinite. For small norms, `scaled` is 0.
    """

    plain: jax.Array
    scaled: jax.Array


_POWER = 2.0**-64


def _root_of_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """The root of the sum of squares of three scalars. The squares may leave float32's range."""
    largest = functools.reduce(jnp.maximum, parts)
    scalable = (largest > 0) & (largest < jnp.inf)
    divisor = jnp.where(scalable, largest, 1)
    total = sum(jnp.square(part / divisor) for part in parts)
    return jnp.where(scalable, largest * jnp.sqrt(total), largest)


def _norm_of(leaves: Arrays, implementation: Implementation) -> Norm:
    huge, normal, tiny = map(
        jnp.sqrt, invoke(SUM_OF_SQUARES, *leaves, implementation=implementation)
    )
    # All operands are scalars: XLA makes one small kernel.
    plain = _root_of_sum([huge * 2.0**96, normal, tiny * 2.0**-96])
    scaled = _root_of_sum([huge * (2.0**96 * _POWER), normal * _POWER, tiny * 2.0**-96 * _POWER])
    return Norm(plain, scaled)


def _is_big(norm: Norm) -> jax.Array:
    """Whether the norm is above 2^100. Then computations use the scaled norm."""
    return norm.scaled > 2.0**100 * _POWER


def _divisor(norm: Norm) -> tuple[jax.Array, jax.Array]:
    """A power of two, and the norm times this power. The product is in range, or 1 for norm 0."""
    big = _is_big(norm)
    power = jnp.where(big, _POWER, 1).astype(norm.plain.dtype)
    return power, jnp.where(big, norm.scaled, jnp.where(norm.plain == 0, 1, norm.plain))


@dataclasses.dataclass(frozen=True)
class _Quotient(Operation):
    """a / b for a scalar b, with a derivative that does not use b².

    JAX's own derivative uses b², which may leave float32's range.
    """

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


@jax.jit
def _change(pairs: Sequence[tuple[jax.Array, jax.Array]], norm: Norm) -> Any:
    """The change of both numbers of the norm by changes of leaves."""
    change = sum(jnp.sum(_unit(x, norm) * d.astype(norm.plain.dtype)) for x, d in pairs)
    return change, change * _POWER


@dataclasses.dataclass(frozen=True)
class _GlobalNorm(Operation):
    """The `Norm` of leaves. The derivative rule is the same for every implementation."""

    implementation: Implementation
    widens = True

    def compute(self, *leaves: Any) -> tuple[jax.Array, ...]:
        return tuple(_norm_of(leaves, self.implementation))

    def jvp(self, operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        norm = Norm(*self(*operands))
        pairs = [(x, d) for x, d in zip(operands, tangents, strict=True) if d is not None]
        return norm, _change(pairs, norm)


def _differentiable_norm(leaves: Arrays, implementation: Implementation) -> Norm:
    return Norm(*_GlobalNorm(implementation)(*match_vma(*leaves)))


_jitted_norm = jax.jit(_differentiable_norm, static_argnames="implementation")


def traced_norm(leaves: Arrays, *, implementation: Implementation) -> Norm:
    """The norm of one leaf or more. It is differentiable."""
    # A function of its own would hide from `_GlobalNorm` what computes the leaves.
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    return (_differentiable_norm if traced else _jitted_norm)(leaves, implementation)


# --- Scaling -------------------------------------------------------------------------------------


def _factors(norm: Norm, max_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two factors of all leaves. Factors 2 and 1 mean that leaves are kept unchanged.

    The product of the factors is max_norm / norm, at most 1. Usually the second factor is 1. A
    quotient below 2^-100 may leave float32's range. Then the first factor is c / norm, and the
    second factor is max_norm / c, for a power of two c > max_norm. No element is larger than the
    norm, so an element times the first factor is at most c. If this product rounds to 0, the
    result would be 0 anyway.
    """
    power, divisor = _divisor(norm)
    limit = max_norm * power
    keep = (divisor < limit) | (norm.plain == 0)
    # For norms from 2^100 to 2^134, c / norm is in range with c = 2^8.
    c = jnp.where(_is_big(norm), 2.0**8, 1).astype(limit.dtype)
    small = limit / divisor < jnp.finfo(limit.dtype).tiny * 2.0**26
    small &= ~keep & (max_norm > 0) & (max_norm < c)
    # A quotient that is not used is constant: its derivative is not infinite times 0. The choice is
    # an operand of the quotient: XLA would compute a cheaper last operation for each element again.
    dividend = jnp.where(keep, 2, jnp.where(small, c * power, limit))
    first = _quotient(dividend, jnp.where(keep, 1, divisor))
    return first, _quotient(jnp.where(small, max_norm, 1), jnp.where(small, c, 1))


def _checked_limit(norm: Norm, max_norm: ArrayLike) -> jax.Array:
    """max_norm in the norm's dtype. A negative one becomes NaN: it would reverse gradients."""
    limit = jnp.asarray(max_norm, norm.plain.dtype)
    # The root of -1 makes the NaN. A NaN constant would always stop jax_debug_nans.
    return limit + jnp.sqrt(jnp.where(limit < 0, -1, 0).astype(limit.dtype))


def _scaled_by_xla(leaves: Arrays, first: jax.Array, second: jax.Array) -> Arrays:
    keep = first > 1
    # `select` keeps subnormals. A factor of 1 flushes them to zero on some hardware.
    return tuple(lax.select(keep, x, _rounded_like(x, _times(x, first, second))) for x in leaves)


def _scaled_in_place(
    leaves: Arrays, first: jax.Array, second: jax.Array, implementation: Implementation
) -> Arrays:
    operands: Any = match_vma(*leaves, jnp.where(first > 1, 1, first), second)
    *scaled, first, second = operands
    calls = (scaled[i : i + _LEAVES_PER_CALL] for i in range(0, len(scaled), _LEAVES_PER_CALL))
    return tuple(
        x
        for some in calls
        for x in invoke(SCALE, *some, first, second, implementation=implementation)
    )


@dataclasses.dataclass(frozen=True)
class _Clipped(Operation):
    """Clips leaves. The operands are the leaves, both numbers of their `Norm`, and the limit.

    The derivative rule serves both ways of scaling. JAX's own rule would multiply a leaf by a
    factor's derivative. This product may leave float32's range.
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
    """Clips leaves by XLA's operations."""
    clipped = _Clipped()(*leaves, *norm, _checked_limit(norm, max_norm))
    if nonfinite == "propagate":
        return clipped
    drop = ~jnp.isfinite(norm.scaled)
    return tuple(lax.select(drop, lax.full_like(y, 0), y) for y in clipped)


@functools.partial(jax.jit, static_argnames="implementation")
def scale_in_place(
    leaves: Arrays, norm: Norm, max_norm: ArrayLike, *, implementation: Implementation
) -> tuple[jax.Array, ...]:
    """Clips leaves by the kernel, in the leaves' memory."""
    limit = _checked_limit(norm, max_norm)
    return _Clipped(in_place=True, implementation=implementation)(*leaves, *norm, limit)
