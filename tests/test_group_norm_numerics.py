"""Group norm of values that are numerically hard. `catalogue.py` explains marks such as N3."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import (
    OPTIMIZED,
    assert_a_thousand_runs_equal,
    assert_bitwise_equal,
    assert_matches,
    close,
    widen,
)
from conformance import IMPLEMENTATIONS_AND_DTYPES
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward

#: x has the shape (2, 16, 9, 12) with channels last, and 3 groups of 4 channels. On a GPU, the
#: other spaces have other kernels: for smaller groups, for larger images, and with channels first
#: for groups that several blocks share.
GROUPS, CHANNELS = 3, 12
SPACES = (16, 9), (2, 5), (64, 40), (128, 64)


def shape_of(axis: int, space: tuple[int, int] = SPACES[0]) -> tuple[int, ...]:
    return (2, CHANNELS, *space) if axis == 1 else (2, *space, CHANNELS)


def along_groups(values: Any, axis: int) -> np.ndarray:
    """One value per group, in a shape that broadcasts over x."""
    channels = np.repeat(np.asarray(values), CHANNELS // GROUPS)
    return channels.reshape([-1 if i == axis % 4 else 1 for i in range(4)])


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("spread", ["groups", "channels"])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("space", [SPACES[0], SPACES[2], SPACES[3]], ids=str)
def test_large_means(platform, implementation, space, axis, offset, spread, rng):
    """float32 groups with |mean| up to 1e4 deviations. Forward and backward must be accurate.

    The channels of a group may have different means. The limit for y is a few units in the last
    place of the largest |y|.
    """
    shape = shape_of(axis, space)
    x = offset + rng.standard_normal(shape)
    if spread == "channels":
        x += np.linspace(-2, 2, CHANNELS).reshape([-1 if i == axis % 4 else 1 for i in range(4)])
    x, dy = x.astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    options = {"num_groups": GROUPS, "axis": axis, "epsilon": 0.0}
    op = functools.partial(jax_gradops.group_norm, **options, implementation=implementation)
    y, dx = jax.jit(vjp_of(op), compiler_options=OPTIMIZED)(dy, x)
    want = oracles.group_norm(widen(x), **options).value
    limit = 5 if implementation == "ffi" else 12
    assert np.abs(widen(y) - want).max() <= limit * 2.0**-24 * np.abs(want).max()
    expected = oracles.group_norm_vjp(widen(dy), widen(x), **options)[0]
    assert_matches(dx, expected, np.float32, np.float32, f"dx, offset {offset}")


@pytest.mark.N4
@pytest.mark.N7
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_constant_groups(platform, space, axis, dtype):
    """A constant group gives exactly its bias, at any magnitude."""
    bias = np.arange(CHANNELS).astype(np.float32)
    each = bias.reshape([-1 if i == axis % 4 else 1 for i in range(4)])
    for values in ([0, 1, -3], [0.1, 1e-3, 6e4], [-6e4, 7, 0.3]):
        x = np.broadcast_to(along_groups(values, axis).astype(dtype), shape_of(axis, space))
        options = {"num_groups": GROUPS, "axis": axis, "implementation": "ffi"}
        y, mean, rstd = backward.group_norm_forward(x, None, bias, **options, epsilon=0.25)
        np.testing.assert_array_equal(widen(y), np.broadcast_to(each, y.shape))
        np.testing.assert_array_equal(widen(mean), [widen(np.asarray(values).astype(dtype))] * 2)
        np.testing.assert_array_equal(widen(rstd), 2.0)


@pytest.mark.parametrize("epsilon", [0, 1e-45, 1e-12, 1.0, 2e38, 1e39, 1e300])
def test_constant_group_of_every_epsilon(platform, implementation, epsilon):
    x, bias = np.full((2, 6, 4), 3, np.float32), np.float32([-1, 0, 2, 5])
    y = jax_gradops.group_norm(
        x, None, bias, num_groups=2, epsilon=epsilon, implementation=implementation
    )
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))


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
    shape = shape_of(axis)
    x, dy = mean + deviation * rng.standard_normal(shape), rng.standard_normal(shape)
    largest = float(jnp.finfo(dtype).max)
    x, dy = (np.clip(a, -largest, largest).astype(dtype) for a in (x, dy))
    options = {"num_groups": GROUPS, "axis": axis, "epsilon": 1e-5 if deviation > 1 else 1e-12}
    op = functools.partial(jax_gradops.group_norm, **options, implementation=implementation)
    _, found, rstd = backward.group_norm_forward(x, **options, implementation=implementation)
    assert found.dtype == rstd.dtype == np.float32
    y, dx = jax.jit(vjp_of(op))(dy, x)
    assert_matches(y, oracles.group_norm(widen(x), **options), y.dtype, np.float32, "y")
    expected = oracles.group_norm_vjp(widen(dy), widen(x), **options)[0]
    finite = np.abs(expected.value) < largest
    assert np.isfinite(widen(dx)[finite]).all()
    np.testing.assert_allclose(
        widen(dx)[finite], expected.value[finite], rtol=2**-7,
        atol=2**-6 * expected.magnitude.min(),
    )  # fmt: skip


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
def test_nonfinite(platform, implementation, space, axis, dtype, rng):
    """NaN or infinity changes only the group of its own sample, and sums for its channels."""
    dy, clean = (rng.standard_normal(shape_of(axis, space)).astype(dtype) for _ in range(2))
    scale, bias = rng.uniform(0.5, 2, (2, CHANNELS)).astype(np.float32)
    op = functools.partial(
        jax_gradops.group_norm, num_groups=GROUPS, axis=axis, activation="silu",
        implementation=implementation,
    )  # fmt: skip
    f = jax.jit(vjp_of(op))
    expected = f(dy, clean, scale, bias)
    for value in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        np.moveaxis(x, axis, -1)[1, 1, 4, 6] = value
        for got, want in zip(f(dy, x, scale, bias), expected, strict=True):
            got, want = np.asarray(got), np.asarray(want)
            others = np.ones(CHANNELS, bool)
            others[4:8] = False
            if got.ndim == 1:
                assert np.isnan(widen(got)[~others]).all()
                assert_bitwise_equal(got[others], want[others])
                continue
            got, want = np.moveaxis(got, axis, -1), np.moveaxis(want, axis, -1)
            assert np.isnan(widen(got)[1][..., ~others]).all()
            assert_bitwise_equal(got[0], want[0])
            assert_bitwise_equal(got[1][..., others], want[1][..., others])


def test_relu_at_zero(platform, implementation):
    """The derivative of relu at 0 is 0, as in `jax.nn.relu`. Constant groups test this."""
    x, zeros = jnp.full((2, 6, 4), 3.0, jnp.float32), jnp.zeros(4, jnp.float32)
    op = functools.partial(
        jax_gradops.group_norm, num_groups=2, activation="relu", implementation=implementation
    )
    y, dx, _, dbias = jax.jit(vjp_of(op))(jnp.ones_like(x), x, jnp.ones_like(zeros), zeros)
    assert not np.any(y) and not np.any(dx) and not np.any(dbias)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_large_arguments_of_silu(platform, implementation, dtype):
    """exp(-z) overflows for z < -88 in float32. The derivative is then 0, and 1 for large z."""
    x = np.tile(np.array([-1.0, 1.0]), 8).reshape(1, 8, 2).astype(dtype)
    bias = np.array([-200.0, 200.0], np.float32)
    for shift in (0, 600, 1e30):
        beta = (bias + np.sign(bias) * shift).astype(np.float32)
        op = functools.partial(
            jax_gradops.group_norm, num_groups=2, activation="silu", implementation=implementation
        )
        y, _, _, dbias = jax.jit(vjp_of(op))(np.ones_like(x), x, np.ones_like(beta), beta)
        np.testing.assert_allclose(widen(y)[..., 0], 0, atol=1e-80)
        np.testing.assert_allclose(widen(y)[..., 1], beta[1], rtol=2**-7)
        np.testing.assert_allclose(dbias, [0, 8], atol=1e-80)


@pytest.mark.B1
@pytest.mark.B2
def test_groups_of_one_element(platform, implementation):
    """The variance of one element is 0: y is the bias, and the gradient of x is 0."""
    x, bias = np.full((2, 3), 7, np.float32), np.arange(3).astype(np.float32)
    for shape, axis in (((2, 3), 1), ((2, 3, 1, 1), 1), ((2, 1, 1, 3), -1)):
        options = {"axis": axis, "implementation": implementation}
        op = functools.partial(jax_gradops.instance_norm, bias=bias, **options)
        y, dx = vjp_of(op)(x.reshape(shape), x.reshape(shape))
        np.testing.assert_array_equal(np.reshape(y, (2, 3)), [bias] * 2)
        assert not np.asarray(dx).any()


@pytest.mark.parametrize("axis", [-1, 1])
def test_samples_are_independent(platform, axis, dtype, rng):
    """A sample's y and dx do not depend on the number or order of samples: on CPUs bitwise.

    On GPUs, the number of blocks of a sample sets the order of its sums. Fewer samples
    have more blocks each.
    """
    shape = (17, *shape_of(axis)[1:])
    dy, x = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    op = functools.partial(
        jax_gradops.group_norm, num_groups=GROUPS, axis=axis, activation="silu",
        implementation="ffi",
    )  # fmt: skip
    order = rng.permutation(17)
    picks = [slice(0, 1), slice(3, 8), order]
    f = jax.jit(lambda pairs: [vjp_of(op)(*p) for p in pairs])
    whole, *parts = f([(dy, x), *((dy[p], x[p]) for p in picks)])
    for part, pick in zip(parts, picks, strict=True):
        for actual, all_samples in zip(part, whole, strict=True):
            expected = np.asarray(all_samples)[pick]
            if platform == "cpu":
                assert_bitwise_equal(actual, expected, str(pick))
            else:
                close(actual, expected, 1 + np.abs(widen(expected)), str(pick), roundings=2)


@pytest.mark.R2
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_runs(platform, dtype, rng):
    """Runs in a loop are bitwise equal, in both layouts.

    On a GPU, x is larger: with channels first, clusters of blocks share its groups.
    """
    shape = (6, 20, 7, 40) if platform == "cpu" else (2, 8, 120, 160)
    dtype = jnp.dtype(dtype)
    x = rng.standard_normal(shape).astype(dtype)
    scale = rng.uniform(0.5, 2, max(shape)).astype(np.float32)

    def run(x: Any) -> list[Any]:
        results = []
        for axis in (-1, 1):
            op = functools.partial(
                jax_gradops.group_norm, num_groups=4, axis=axis, activation="silu",
                implementation="ffi",
            )  # fmt: skip
            parameter = scale[: x.shape[axis]]
            results += vjp_of(op)(x, x, parameter, parameter)
        return results

    assert_a_thousand_runs_equal(run, x)
