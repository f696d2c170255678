"""Clipping where max_norm / norm, or the norm itself, exceeds float32's range."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, assert_global_norm, widen

import jax_gradops
from jax_gradops import clip_tree_by_global_norm
from jax_gradops.backward import inplace_clip_by_global_norm

#: The derivative of x / norm with respect to x at [3, 4], times the norm.
PROJECTION = np.array([[0.64, -0.48], [-0.48, 0.36]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("value", "max_norm"),
    [(1e38, 1.0), (1e37, 0.1), (1e10, 1e-30), (1e38, 1e-35), (3e38, 1.0), (3e38, 3e38)],
)
def test_small_factors(platform, clip, value, max_norm, dtype):
    """Four leaves: of 3e38, the norm is 1.2e39. The factor may be 1e-73. No element becomes 0."""
    leaves = [np.full(4, value).astype(jnp.dtype(dtype))] * 4
    clipped, norm = clip(leaves, max_norm)
    if 4 * value < 3.4e38:
        assert_global_norm(norm, *leaves)
    else:
        assert norm == np.inf
    for leaf in clipped:
        np.testing.assert_allclose(widen(leaf), max_norm / 4, rtol=2 * float(jnp.finfo(dtype).eps))


def test_small_factors_float64(platform, clip):
    """The factor would be 1e-400."""
    (clipped,), norm = clip([np.full(4, 1e150)], 1e-250)
    assert norm == 2e150
    np.testing.assert_allclose(clipped, 5e-251, rtol=1e-14)


def test_norm_beyond_float32(platform, clip):
    """Elements that are small beside such a norm keep their relative size."""
    leaves = [np.full(4, 3e38, np.float32), np.array([1.0, 1e-30, -0.0], np.float32)]
    (large, small), norm = clip(leaves, 3e38)  # half the norm
    assert norm == np.inf
    np.testing.assert_allclose(large, 1.5e38, rtol=1e-6)
    np.testing.assert_allclose(small, [0.5, 5e-31, 0], rtol=1e-6)
    for leaf, kept in zip(leaves, clip(leaves, np.inf)[0], strict=True):
        assert_bitwise_equal(kept, leaf)


def test_nonfinite_asks_for_the_leaves(platform, implementation):
    """A norm may overflow while all leaves are finite. Clipping then uses the true norm."""
    leaves = [np.full(4, 3e38, np.float32)]
    clipped, _ = clip_tree_by_global_norm(
        leaves, 1.0, nonfinite="zero", implementation=implementation
    )
    np.testing.assert_allclose(clipped[0], 0.5, rtol=1e-6)


def test_derivatives_of_small_factors(platform, clip):
    """In forward and reverse mode. 5 * 8e37 exceeds float32's range."""

    @jax.jit
    def derivatives(x: Any, limit: Any) -> Any:
        f = lambda x, limit: clip([x], limit)[0][0]  # noqa: E731
        by_limit = jax.grad(lambda limit: f(x, limit).sum())(limit)
        return jax.jacrev(f)(x, limit), jax.jacfwd(f)(x, limit), by_limit

    cases = (1e20, 1e3), (6e37, 1e20), (6e37, 1e3), (8e37, 1e20), (8e37, 1e3)
    for size, limit in (*cases, (1e20, 1e-12), (8e37, 200.0)):  # the last two have two factors
        x = np.array([3, 4], np.float32) * np.float32(size)
        factor = limit / (5 * np.float64(size))
        reverse, forward, by_limit = derivatives(x, np.float32(limit))
        for jacobian in (reverse, forward):
            np.testing.assert_allclose(widen(jacobian) / factor, PROJECTION, atol=1e-5)
        np.testing.assert_allclose(by_limit, 1.4, rtol=1e-5)


def test_derivative_of_a_norm_beyond_float32(platform, implementation):
    x = np.array([3, 4], np.float32) * np.float32(8e37)
    with jax_gradops.use_implementation(implementation):
        gradient = jax.grad(lambda x: jax_gradops.global_norm([x]))(x)
    np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)


def test_groups_of_all_ranges(platform, clip):
    """Under vmap, each example has its own factors."""
    sizes = np.array([8e37, 1e38 / 5, 1e10, 1.0, 1e-30, 1.0], np.float32)
    limits = np.array([1e-3, 1.0, 1e-30, 2.5, 1e-32, 10.0], np.float32)
    x = sizes[:, None] * np.array([3, 4], np.float32)
    clipped = jax.jit(jax.vmap(lambda x, limit: clip([x], limit)[0][0]))(x, limits)
    expected = np.minimum(limits, 5 * widen(sizes))[:, None] * [0.6, 0.8]
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)
    assert_bitwise_equal(clipped[-1], x[-1])


def test_first_factor_of_one(platform):
    """With a norm of 1, the first of two factors is 1. The leaves must be scaled all the same."""
    (clipped,), norm = inplace_clip_by_global_norm(
        [np.full(4, 0.5, np.float32)], 1e-32, implementation="ffi"
    )
    assert norm == 1
    np.testing.assert_allclose(clipped, 5e-33, rtol=1e-6)
