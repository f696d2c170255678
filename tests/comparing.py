"""The allowed difference of a result from its float64 reference: all tolerances are set here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from jax_gradops import _oracles as oracles
from jax_gradops._oracles import Reference

# The allowed number of rounding errors in the accumulation dtype. Each is relative to the magnitude
# of the result's terms. The limit does not depend on the number of terms.
ROUNDINGS = 8.0

# A `jax.jit` option for tests of values that XLA's own operations compute. Users' programs are
# compiled with optimisations. conftest.py turns them off for all other programs.
OPTIMIZED: dict[str, Any] = {"xla_backend_optimization_level": 3}
if jaxlib.__version__.startswith("0.10."):
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True


def accum(dtype: Any) -> Any:
    """The dtype of sums."""
    return np.float64 if dtype == np.float64 else np.float32


def allowed_error(reference: Reference, dtype: Any, accum: Any) -> np.ndarray:
    """The allowed rounding of the result to `dtype`, and of its sums in `accum`.

    Numbers below the smallest normal number may be flushed to zero.
    """
    final = 0.5 * float(jnp.finfo(dtype).eps) * np.abs(reference.value)
    sums = ROUNDINGS * float(jnp.finfo(accum).eps) * reference.magnitude
    smallest = (
        jnp.finfo(dtype).smallest_subnormal if dtype == jnp.float16 else jnp.finfo(dtype).tiny
    )
    return final + sums + reference.error + float(smallest)


def assert_matches(actual: Any, reference: Reference, dtype: Any, accum: Any, what: str) -> None:
    """Compares shape, dtype, the positions of infinities and NaN, and all other values."""
    assert actual.dtype == dtype, f"{what}: dtype {actual.dtype}, expected {jnp.dtype(dtype)}"
    assert actual.shape == reference.value.shape, (
        f"{what}: shape {actual.shape}, expected {reference.value.shape}"
    )
    actual = widen(actual)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = reference.value.astype(dtype).astype(np.float64)
        special = ~np.isfinite(rounded)
        wrong = np.where(
            special,
            ~((actual == rounded) | (np.isnan(actual) & np.isnan(rounded))),
            ~(np.abs(actual - reference.value) <= allowed_error(reference, dtype, accum)),
        )
    if wrong.any():
        excess = np.abs(actual - reference.value) / allowed_error(reference, dtype, accum)
        worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(excess), -1)), wrong.shape)
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements are wrong; the worst, at "
            f"{tuple(map(int, worst))}, is {actual[worst]!r}, expected {reference.value[worst]!r}: "
            f"{excess[worst]:.3g} times the allowed error"
        )


def assert_all_match(results: Any, references: Any, x: np.ndarray, what: str) -> None:
    """As `assert_matches`, but a float64 oracle's own sums over many rows may have errors too."""
    rows = x.size // x.shape[-1]
    for i, (a, reference) in enumerate(zip(results, references, strict=True)):
        if x.dtype == np.float64 and np.ndim(a) < x.ndim:
            growth = 1 + math.sqrt(rows) / 16
            reference = reference._replace(magnitude=growth * reference.magnitude)
        assert_matches(a, reference, a.dtype, accum(x.dtype), f"{what}, result {i}")


def close(actual: Any, expected: Any, magnitude: Any, what: str, roundings: float = 16) -> None:
    """Checks that the error is at most some roundings of numbers of this magnitude."""
    kind = jnp.finfo(np.asarray(actual).dtype)
    error = np.abs(widen(actual) - widen(expected))
    bound = roundings * float(kind.eps) * np.broadcast_to(magnitude, error.shape) + float(kind.tiny)
    assert (error <= bound).all(), f"{what}: {np.max(error / bound)} times the bound"


def small_integers(shape: tuple[int, int]) -> jax.Array:
    """Float32 integers from -1 to 3, made on the device. Their sums have no rounding errors."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return ((row + 2 * column) % 5 - 1).astype(jnp.float32)


def sums_of_small_integers(shape: tuple[int, int]) -> np.ndarray:
    """The sums over the rows of `small_integers`. The rows repeat with period 5."""
    rows, features = shape
    period = (np.arange(5)[:, None] + 2 * np.arange(features)) % 5 - 1
    return (rows // 5 + (np.arange(5) < rows % 5)) @ period


def widen(x: Any) -> np.ndarray:
    """Converts to float64 without loss."""
    return np.asarray(x).astype(np.float64)


def assert_bitwise_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Compares bits. So NaN equals NaN, and -0 differs from 0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    same = np.frombuffer(actual.tobytes(), np.uint8) == np.frombuffer(expected.tobytes(), np.uint8)
    assert same.all(), f"{what}: results differ: {actual} and {expected}"


def assert_a_thousand_runs_equal(run: Callable[[Any], Sequence[Any]], x: Any) -> None:
    """Runs `run(x)` a thousand times in a loop of one program.

    All results must be bitwise equal. All runs are the same code in one loop. Elsewhere in the
    program, XLA may add up group norm's samples in another order.
    """
    bits = {2: jnp.uint16, 4: jnp.uint32}

    def bits_of(x: Any) -> list[Any]:
        return [lax.bitcast_convert_type(a, bits[a.dtype.itemsize]) for a in run(x)]

    @jax.jit
    def different(x: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            first, counts = carry
            # Without the barrier, XLA could move the run out of the loop.
            again = lax.optimization_barrier(bits_of(lax.optimization_barrier((x, i))[0]))
            first = [jnp.where(i == 0, b, a) for a, b in zip(first, again, strict=True)]
            pairs = zip(counts, first, again, strict=True)
            return first, [count + jnp.sum(a != b) for count, a, b in pairs]

        nothing = [jnp.zeros(a.shape, a.dtype) for a in jax.eval_shape(bits_of, x)]
        counts = [jnp.zeros((), jnp.int_)] * len(nothing)
        return lax.fori_loop(0, 1000, step, (nothing, counts))[1]

    assert [int(count) for count in different(x)] == [0] * len(jax.eval_shape(run, x))


def assert_global_norm(norm: Any, *leaves: Any) -> None:
    """Compares a norm with the norm of the leaves in float64."""
    float64 = any(leaf.dtype == np.float64 for leaf in leaves)
    dtype = np.dtype("float64" if float64 else "float32")
    assert_matches(norm, oracles.global_norm(*map(widen, leaves)), dtype, dtype, "norm")
