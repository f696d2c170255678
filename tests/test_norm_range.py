"""Layer and RMS norm with epsilon or the variance near the ends of the dtype's range."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, assert_matches
from norm_problems import check, example, problem, references, run

# In float32, these are 0, subnormal, ordinary, or infinite.
EPSILONS = (0, 1e-45, 1e-39, 1e-30, 1e-12, 1.0, 1e30, 2e38, 1e39, 1e300)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_constant_rows_of_every_epsilon(platform, op, implementation, epsilon, rng):
    """Layer norm gives exactly the bias. RMS norm of zeros gives 0. Gradients are finite."""
    problems = []
    for features in (4, 129):
        dy, _, scale, bias = example(rng, (2, features))
        x = np.full_like(dy, 3 if op == "layer_norm" else 0)
        options = {"epsilon": epsilon, "implementation": implementation}
        problems.append(problem(op, dy, x, scale, bias, **options))
    for p, results in zip(problems, run(problems), strict=True):
        expected = np.broadcast_to(p.parameters.get("bias", np.float32(0)), p.dy.shape)
        np.testing.assert_array_equal(results["y"], expected)
        assert np.isfinite(results["x"]).all() and not results["scale"].any()


@pytest.mark.parametrize("epsilon", [0, 1e39])
def test_epsilon_hides_no_overflow(platform, op, implementation, epsilon, rng):
    """NaN in rows with an infinity, a NaN or an infinite variance, and in no other row."""
    dy, x, scale, bias = example(rng, (5, 129))
    x[1, 5], x[2, 6], x[3] = np.inf, np.nan, x[3] * np.float32(1e20)
    options = {"epsilon": epsilon, "implementation": implementation}
    (results,) = run([problem(op, dy, x, scale, bias, **options)])
    for name in ("y", "x"):
        nan = np.isnan(results[name])
        assert nan[1:4].all() and not nan[[0, 4]].any(), name


def test_large_epsilon(platform, op, implementation, rng):
    """The sum of epsilon and the variance may exceed the dtype's range.

    JAX's derivative of a root needs the square. The square is out of range for these values.
    """
    problems = []
    for size, epsilon in itertools.product((1, 1e15, 7e18), (1e30, 1.1e31, 2e38, 3.4e38)):
        dy, x, scale, bias = example(rng, (3, 129))
        arrays = (dy, x * np.float32(size), scale, bias)
        problems.append(problem(op, *arrays, epsilon=epsilon, implementation=implementation))
    if implementation == "ffi":
        return check(*problems)
    for p, results in zip(problems, run(problems), strict=True):
        assert_matches(results["y"], references(p)["y"], np.float32, np.float32, str(p.options))


@pytest.mark.N9
@pytest.mark.N10
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # float64 is the oracle's dtype
@pytest.mark.parametrize("features", [7, 64, 1000, 4096, 4097, 20_000])
def test_variance_far_above_the_root_of_overflow(
    platform, op, implementation, dtype, features, rng
):
    """Results are right until the variance itself overflows. Sums of squares overflow before.

    Neighbouring rows are bitwise equal to their results without such rows.
    """
    dtype = jnp.dtype(dtype)
    largest = float(jnp.finfo(dtype).max) ** 0.5
    # JAX's derivative of a root needs the square. The square is out of range for the last size.
    sizes = np.array([0.9, 1e-2, 1e-4, 0.3, 1 / largest]) * largest / 2.5
    dy, x, scale, bias = example(rng, (5, features), np.float64)
    arrays = [a.astype(dtype) for a in (dy, x * sizes[:, None], scale, bias)]
    usual = problem(op, arrays[0][4:], arrays[1][4:], *arrays[2:], implementation=implementation)
    first = slice(0 if implementation == "ffi" else 1, 5)
    large = problem(op, *(a[first] for a in arrays[:2]), *arrays[2:], implementation=implementation)
    check(large)
    results, alone = run([large, usual])
    if implementation == "ffi" and features * dtype.itemsize % 16 == 0:
        for name in ("y", "x"):
            assert_bitwise_equal(results[name][-1], alone[name][0], name)
