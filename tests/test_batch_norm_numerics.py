"""Batch norm of values that are numerically hard. `catalogue.py` explains marks such as N3."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import EPSILON, assert_last, channels_last, ordinary
from comparing import OPTIMIZED, assert_a_thousand_runs_equal, assert_bitwise_equal, widen
from conformance import IMPLEMENTATIONS_AND_DTYPES
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles


def normalized(x: Any, axis: int, implementation: str) -> np.ndarray:
    f = functools.partial(
        jax_gradops.batch_norm, axis=axis, epsilon=0.0, implementation=implementation
    )
    return widen(jax.jit(lambda x: f(x)[0], compiler_options=OPTIMIZED)(x))


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_large_means(platform, implementation, axis, offset, rng):
    """float32 channels with |mean| up to 1e4 deviations. Forward and backward must be accurate.

    The limit is a few units in the last place of the largest |y|.
    """
    shape = (64, 9, 16, 16) if axis == 1 else (64, 16, 16, 9)
    x = (offset + rng.standard_normal(shape)).astype(np.float32)
    wide = channels_last(x, axis)
    want = oracles.batch_norm(wide, epsilon=0.0).value
    got = np.moveaxis(normalized(x, axis, implementation), axis, -1)
    assert np.abs(got - want).max() <= 4 * 2.0**-24 * np.abs(want).max()
    dy = rng.standard_normal(shape).astype(np.float32)

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, axis=axis, epsilon=0.0, implementation=implementation)[0]

    dx = jax.jit(vjp_of(op), compiler_options=OPTIMIZED)(dy, x)[1]
    expected = oracles.batch_norm_vjp(channels_last(dy, axis), wide, epsilon=0.0)[0]
    assert_last(dx, expected, axis, np.float32, f"dx, offset {offset}")


@pytest.mark.N4
@pytest.mark.N7
@pytest.mark.parametrize("axis", [-1, 1])
def test_constant_channels(platform, axis, dtype):
    """A constant channel gives exactly its bias, at any magnitude."""
    values = np.array([0, 1, -3, 0.1, 1e-3, 6e4, -6e4], dtype)
    bias = np.arange(7).astype(np.float32)
    shape = (33, 5, 7) if axis == -1 else (33, 7, 5)
    x = np.broadcast_to(values if axis == -1 else values[:, None], shape)
    y, mean, var = jax_gradops.batch_norm(x, None, bias, axis=axis, implementation="ffi")
    assert (channels_last(y, axis) == bias).all()
    assert (widen(mean) == widen(values)).all() and not np.asarray(var).any()


@pytest.mark.N8
@pytest.mark.N11
@pytest.mark.B3
@pytest.mark.B4
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    ("mean", "deviation", "dtype"),
    [(5, 0.1, "bfloat16"), (0, 3e4, "float16"), (6e4, 100, "float16"), (0, 1e-6, "float16")],
    ids=["large mean", "large", "saturated", "subnormal"],
)
def test_hard_halves(platform, implementation, axis, mean, deviation, dtype, rng):
    """16-bit data near the ends of the dtype's range: statistics are float32, dx is finite."""
    shape = (32, 8, 8, 5) if axis == -1 else (32, 5, 8, 8)
    x, dy = mean + deviation * rng.standard_normal(shape), rng.standard_normal(shape)
    largest = float(jnp.finfo(dtype).max)
    x, dy = (np.clip(a, -largest, largest).astype(dtype) for a in (x, dy))
    epsilon = 1e-5 if deviation > 1 else 1e-12

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, axis=axis, epsilon=epsilon, implementation=implementation)

    _, mean_, var = op(x)
    assert mean_.dtype == var.dtype == np.float32
    y, dx = jax.jit(vjp_of(lambda x: op(x)[0]))(dy, x)
    wide, wide_dy = channels_last(x, axis), channels_last(dy, axis)
    assert_last(y, oracles.batch_norm(wide, epsilon=epsilon), axis, dtype, "y")
    expected = oracles.batch_norm_vjp(wide_dy, wide, epsilon=epsilon)[0]
    finite = np.abs(expected.value) < largest
    got = channels_last(dx, axis)
    assert np.isfinite(got[finite]).all()
    np.testing.assert_allclose(
        got[finite], expected.value[finite], rtol=2**-7, atol=2**-6 * expected.magnitude.min()
    )


@pytest.mark.parametrize("epsilon", [0, 1e-45, 1e-39, 1e-12, 1.0, 2e38, 1e39, 1e300])
def test_constant_channel_of_every_epsilon(platform, implementation, epsilon):
    """The result is exactly the bias, with the batch's statistics and with given ones."""
    x, bias = np.full((6, 3), 3, np.float32), np.float32([-1, 0, 2])
    options = {"epsilon": epsilon, "implementation": implementation}
    y, mean, var = jax_gradops.batch_norm(x, None, bias, **options)
    given = jax_gradops.batch_norm_inference(x, None, bias, mean=mean, var=var, **options)
    np.testing.assert_array_equal(y, [bias] * 6)
    np.testing.assert_array_equal(given, [bias] * 6)


@pytest.mark.parametrize("axis", [-1, 1])
def test_range_of_the_variance(platform, implementation, axis, rng):
    """The variance is right up to 1e34. If it overflows, y is NaN."""
    shape = (64, 33, 5) if axis == -1 else (64, 5, 33)
    sizes = np.float32([1, 1e10, 1e15, 1e17, 1e20]).reshape((5,) if axis == -1 else (5, 1))
    x = rng.standard_normal(shape).astype(np.float32) * sizes
    options = {"axis": axis, "epsilon": 0.0, "implementation": implementation}
    y, _, var = jax.jit(lambda x: jax_gradops.batch_norm(x, **options))(x)
    expected = oracles.batch_norm(channels_last(x, axis), epsilon=0.0)
    y, right = channels_last(y, axis), np.arange(5) < 4
    np.testing.assert_allclose(y[..., right], expected.value[..., right], atol=3e-6)
    assert np.isnan(y[..., 4]).all() and (np.isfinite(var) == right).all()


@pytest.mark.N9
@pytest.mark.N10
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # float64 is the oracle's dtype
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((6, 5), -1),
        ((40, 20), -1),
        ((64, 33, 5), -1),
        ((64, 5, 33), 1),
        ((40_000, 15), -1),
        ((2, 20, 60, 70), 1),
        ((3, 10, 300, 200), 1),
    ],
    ids=str,
)
def test_variance_far_above_the_root_of_overflow(platform, implementation, shape, axis, dtype, rng):
    """The results are right although sums of squares, or squares, overflow.

    Neighbouring channels are right too. dy has ordinary values: its products with x do not
    overflow.
    """
    dtype = jnp.dtype(dtype)
    channels = shape[axis]
    dy, x = (rng.standard_normal(shape) for _ in range(2))
    others = tuple(i for i in range(len(shape)) if i != axis % len(shape))
    x = (x - x.mean(others, keepdims=True)) / x.std(others, keepdims=True)
    along = [1] * len(shape)
    along[axis] = channels
    deviations = np.resize([1, 1e17, 2e18, 1e19, 1.5e19], channels).reshape(along)
    means = np.resize([0, 0, 1e19, 0, 3e19], channels).reshape(along)
    dy, x = dy.astype(dtype), (means + deviations * x).astype(dtype)
    wide, wide_dy = channels_last(x, axis), channels_last(dy, axis)

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, axis=axis, epsilon=0.0, implementation=implementation)

    _, mean, var = jax.jit(op)(x)
    y, dx = jax.jit(vjp_of(lambda x: op(x)[0]))(dy, x)
    summed = tuple(range(wide.ndim - 1))
    np.testing.assert_allclose(mean, wide.mean(summed), atol=2e-6 * deviations.max())
    np.testing.assert_allclose(var, wide.var(summed), rtol=2e-6)
    assert_last(y, oracles.batch_norm(wide, epsilon=0.0), axis, dtype, "y")
    if implementation == "ffi":  # JAX's derivative of a root needs the square, which overflows
        expected = oracles.batch_norm_vjp(wide_dy, wide, epsilon=0.0)[0]
        assert_last(dx, expected, axis, dtype, "dx")


@pytest.mark.R2
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_runs(platform, dtype, rng):
    """Runs in a loop are bitwise equal, in both layouts."""
    dtype = jnp.dtype(dtype)
    dy, x, residual, scale, bias = ordinary((20, 6, 7, 40), -1, dtype, rng)

    def run(x: Any) -> list[Any]:
        results = []
        for axis, channels in ((-1, 40), (1, 6)):
            op = functools.partial(
                jax_gradops.batch_norm, axis=axis, activation="relu", implementation="ffi"
            )
            (y, mean, var), pull = jax.vjp(
                lambda x, *p, op=op: op(x, *p, residual=residual),
                x,
                scale[:channels],
                bias[:channels],
            )
            results += [y, mean, var, *pull((dy, mean, var))]
        return results

    assert_a_thousand_runs_equal(run, x)


@pytest.mark.parametrize("others", ["random", "signs"])
@pytest.mark.parametrize(
    ("shape", "axis", "every"), [((65_536, 256), -1, 64), ((1, 16, 16_384), 1, 1024)], ids=str
)
def test_guess_of_the_mean_that_is_far_off(shape, axis, every, others, rng):
    """The CPU's kernel guesses means from its first elements. Here these are unlike all others.

    If the others are 1 or -1, all their squares are rounded in one direction.
    """
    values = rng.standard_normal(max(shape)).astype(np.float32)
    if others == "signs":
        values = np.sign(values)
    values[::every] = 1e4
    x = np.broadcast_to(values[:, None] if axis == -1 else values, shape)
    with jax.default_device(jax.devices("cpu")[0]):
        _, mean, var = jax_gradops.batch_norm(x, axis=axis, implementation="ffi")
    # Some values are at least 64 times as large as the mean.
    np.testing.assert_allclose(mean, np.mean(values, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(var, np.var(values.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("axis", [-1, 1])
def test_outlier_at_the_beginning(platform, implementation, axis, rng):
    """The first elements, which the kernel subtracts, are a bad guess of the mean."""
    x = rng.standard_normal((2, 2048, 3)).astype(np.float32)
    x[0, 0] = 1e6
    want = oracles.batch_norm(widen(x), epsilon=0.0).value
    got = np.moveaxis(normalized(np.moveaxis(x, -1, axis), axis, implementation), axis, -1)
    assert np.abs(got - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 63, 63, 117), -1), ((5, 70, 63, 63), 1), ((8, 4, 200, 250), 1)],
    ids=str,
)
def test_large_results(platform, shape, axis, rng):
    """The results need several blocks and tasks. Images have different means."""
    dy, x, residual, scale, bias = ordinary(shape, axis, np.float32, rng)
    x += np.linspace(-9, 9, shape[0], dtype=np.float32).reshape(-1, 1, 1, 1)

    def op(x: Any, residual: Any) -> Any:
        return jax_gradops.batch_norm(
            x, scale, bias, axis=axis, epsilon=EPSILON, activation="relu", residual=residual,
            implementation="ffi",
        )[0]  # fmt: skip

    y, dx, dresidual = jax.jit(vjp_of(op))(dy, x, residual)
    wide = [*(channels_last(a, axis) for a in (dy, x)), widen(scale), widen(bias)]
    rest = {"epsilon": EPSILON, "relu": True, "residual": channels_last(residual, axis)}
    assert_last(y, oracles.batch_norm(*wide[1:], **rest), axis, np.float32, "y")
    expected = oracles.batch_norm_vjp(*wide, **rest)
    assert_last(dx, expected[0], axis, np.float32, "dx")
    assert_last(dresidual, expected[3], axis, np.float32, "dresidual")


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
def test_nonfinite(platform, implementation, axis, dtype, rng):
    """NaN or infinity changes only its channel."""
    shape = (8, 5, 6)
    dy, clean, _, scale, bias = ordinary(shape, axis, dtype, rng)

    def op(x: Any, scale: Any, bias: Any) -> Any:
        return jax_gradops.batch_norm(x, scale, bias, axis=axis, implementation=implementation)[0]

    f = jax.jit(vjp_of(op))
    expected = f(dy, clean, scale, bias)
    for value in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        np.moveaxis(x, axis, -1)[3, 2, 4] = value
        for got, want in zip(f(dy, x, scale, bias), expected, strict=True):
            got, want = np.asarray(got), np.asarray(want)
            if got.ndim > 1:
                got, want = np.moveaxis(got, axis, -1), np.moveaxis(want, axis, -1)
                assert np.isnan(widen(got[..., 4])).all()
            others = np.arange(got.shape[-1]) != 4
            assert_bitwise_equal(got[..., others], want[..., others])


ROWS = [6, 1024]  # the CPU has other code for small arrays


@pytest.mark.parametrize("adds", [False, True], ids=["x", "x and residual"])
def test_relu_at_zero(platform, implementation, adds):
    """The derivative of relu at 0 is 0, as in `jax.nn.relu`. Constant channels test this."""

    def op(x: Any, bias: Any) -> Any:
        residual = jnp.zeros_like(x) if adds else None
        return jax_gradops.batch_norm(
            x, None, bias, activation="relu", residual=residual, implementation=implementation
        )[0]

    for rows in ROWS:
        x, zeros = jnp.full((rows, 5), 3.0, jnp.float32), jnp.zeros(5, jnp.float32)
        for result in jax.jit(vjp_of(op))(jnp.ones_like(x), x, zeros):
            assert not np.any(result)


@pytest.mark.parametrize("rows", ROWS)
def test_relu_keeps_nan(platform, implementation, rows):
    x = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
    x[0, 1] = np.nan
    y = jax_gradops.batch_norm(x, activation="relu", implementation=implementation)[0]
    np.testing.assert_array_equal(np.isnan(y).sum(0), [0, rows, 0, 0, 0])


@pytest.mark.parametrize("op", ["layer_norm", "batch_norm"])
def test_nan_of_any_bits(platform, op):
    """Rounding to bfloat16 keeps NaN, even if all its bits are 1: the next integer is -0."""
    ones = jnp.ones(5, jnp.bfloat16)
    x = np.arange(30, dtype=np.float32).reshape(6, 5)
    dy = np.ones_like(x)
    dy[2, 3] = np.uint32(0x7FFFFFFF).view(np.float32)

    def f(bias: Any) -> Any:
        return jax.tree.leaves(getattr(jax_gradops, op)(x, ones, bias, implementation="ffi"))[0]

    (dbias,) = jax.vjp(f, ones)[1](dy)
    np.testing.assert_array_equal(np.isnan(widen(dbias)), np.arange(5) == 3)


@pytest.mark.B1
@pytest.mark.B2
def test_batch_of_one(platform, implementation):
    """The biased variance of one element is 0: y is the bias, and the gradient of x is 0."""
    x, bias = np.full((1, 3), 7, np.float32), np.arange(3).astype(np.float32)
    y, mean, var = jax_gradops.batch_norm(x, None, bias, implementation=implementation)
    assert (y[0] == bias).all() and (mean == 7).all() and not np.asarray(var).any()
    dx = jax.grad(lambda x: jnp.sum(jax_gradops.batch_norm(x)[0] ** 2))(x)
    assert not np.asarray(dx).any()
