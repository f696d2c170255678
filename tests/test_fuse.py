"""`jax_gradops.fuse`: which code is replaced, which is left, and that nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gradops

EPSILON = 1e-5
N = 24


def summary_of(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What is found when a function is traced."""
    found: list[Any] = []
    jax.eval_shape(jax_gradops.fuse(function, report=found.append), *args, **kwargs)
    assert len(found) == 1
    return found[0]


def names(function: Any, *args: Any) -> list[str]:
    return [each.op for each in summary_of(function, *args).replaced]


def operands(dtype: Any = jnp.float32, shape: tuple[int, ...] = (2, 3, N)) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 1.5 + 0.25
    scale, bias = rng.uniform(0.5, 1.5, (2, shape[-1]))
    return [jnp.asarray(x, dtype), *(jnp.asarray(a, jnp.float32) for a in (scale, bias))]


def wide(x: Any) -> Any:
    return x.astype(jnp.float32)


def mean(x: Any) -> Any:
    return jnp.mean(x, -1, keepdims=True)


def full(vector: Any, x: Any) -> Any:
    """A vector with as many axes as x."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


# --- Layer norm: code that is replaced -----------------------------------------------------------


def two_passes(x, scale, bias):
    x32 = wide(x)
    centered = x32 - mean(x32)
    y = centered * jax.lax.rsqrt(mean(jnp.square(centered)) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def one_pass(x, scale, bias):
    x32 = wide(x)
    variance = jnp.maximum(0.0, mean(x32 * x32) - mean(x32) ** 2)
    y = (x32 - mean(x32)) / jnp.sqrt(variance + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def one_pass_without_maximum(x, scale, bias):
    x32 = wide(x)
    variance = mean(x32 * x32) - jnp.square(mean(x32))
    y = (x32 - mean(x32)) * (variance + EPSILON) ** -0.5
    return (full(bias, x) + full(scale, x) * y).astype(x.dtype)


def by_var(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) / jnp.sqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def by_standardize(x, scale, bias):
    y = jax.nn.standardize(wide(x), epsilon=EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def by_sums(x, scale, bias):
    x32, n = wide(x), x.shape[-1]
    centered = x32 - jnp.sum(x32, -1, keepdims=True) / n
    deviation = jnp.sqrt(jnp.sum(centered**2, -1, keepdims=True) * (1 / n) + EPSILON)
    return (centered / deviation * full(scale, x) + full(bias, x)).astype(x.dtype)


def scale_in_the_factor(x, scale, bias):
    x32 = wide(x)
    m = mean(x32)
    factor = jax.lax.rsqrt(jnp.var(x32, -1, keepdims=True) + EPSILON) * full(scale, x)
    return (x32 * factor - m * factor + full(bias, x)).astype(x.dtype)


def folded_into_a_shift(x, scale, bias):
    x32 = wide(x)
    factor = full(scale, x) / jnp.sqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    return (x32 * factor + (full(bias, x) - mean(x32) * factor)).astype(x.dtype)


def scale_after_the_cast(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) * jax.lax.rsqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    y = y.astype(x.dtype)
    return y * full(scale, x).astype(x.dtype) + full(bias, x).astype(x.dtype)


def of_one_row(x, scale, bias):
    def row(x):
        x32 = x.astype(jnp.float32)
        y = (x32 - x32.mean()) * jax.lax.rsqrt(x32.var() + EPSILON)
        return (y * scale + bias).astype(x.dtype)

    return jax.vmap(jax.vmap(row))(x)


def in_an_inner_jit(x, scale, bias):
    return jax.jit(two_passes)(x, scale, bias)


def in_the_inputs_dtype(x, scale, bias):
    y = (x - mean(x)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPSILON)
    return y * full(scale, x).astype(x.dtype) + full(bias, x).astype(x.dtype)


LAYER_NORMS = [
    two_passes, one_pass, one_pass_without_maximum, by_var, by_standardize, by_sums,
    scale_in_the_factor, folded_into_a_shift, scale_after_the_cast, of_one_row, in_an_inner_jit,
    in_the_inputs_dtype,
]  # fmt: skip


# --- RMS norm ------------------------------------------------------------------------------------


def rms(x, scale, bias):
    del bias
    x32 = wide(x)
    return (x32 * jax.lax.rsqrt(mean(x32**2) + EPSILON) * full(scale, x)).astype(x.dtype)


def rms_by_division(x, scale, bias):
    del bias
    x32 = wide(x)
    return (x32 / jnp.sqrt(mean(jnp.square(x32)) + EPSILON) * full(scale, x)).astype(x.dtype)


def rms_one_more(x, scale, bias):
    del bias
    x32 = wide(x)
    y = x32 * jax.lax.rsqrt(mean(x32 * x32) + EPSILON)
    return (y * (1 + full(scale, x))).astype(x.dtype)


def rms_of_a_sum(x, scale, bias):
    del bias
    x32, n = wide(x), x.shape[-1]
    total = jnp.sum(x32 * x32, -1, keepdims=True)
    y = x32 * (jax.lax.rsqrt(total + n * EPSILON) * math.sqrt(n))
    return (full(scale, x) * y).astype(x.dtype)


def rms_scale_after_the_cast(x, scale, bias):
    del bias
    x32 = wide(x)
    y = (x32 * jax.lax.rsqrt(mean(x32**2) + EPSILON)).astype(x.dtype)
    return full(scale, x).astype(x.dtype) * y


def rms_without_scale(x, scale, bias):
    del scale, bias
    x32 = wide(x)
    return (x32 * jax.lax.rsqrt(mean(x32**2) + EPSILON)).astype(x.dtype)


RMS_NORMS = [
    rms, rms_by_division, rms_one_more, rms_of_a_sum, rms_scale_after_the_cast, rms_without_scale,
]  # fmt: skip


# --- Code that only looks like a norm ------------------------------------------------------------


def stopped_statistics(x, scale, bias):
    x32 = wide(x)
    m, v = (jax.lax.stop_gradient(a) for a in (mean(x32), jnp.var(x32, -1, keepdims=True)))
    y = (x32 - m) * jax.lax.rsqrt(v + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def epsilon_outside(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) / (jnp.std(x32, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def unbiased(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) / jnp.sqrt(jnp.var(x32, -1, keepdims=True, ddof=1) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def mean_of_another(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(jnp.sin(x32))) / jnp.sqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def variance_of_another(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) / jnp.sqrt(jnp.var(jnp.sin(x32), -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def part_of_the_row(x, scale, bias):
    x32 = wide(x)
    part = x32[..., : N // 2]
    y = (x32 - mean(part)) / jnp.sqrt(jnp.var(part, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def masked(x, scale, bias):
    x32, mask = wide(x), jnp.arange(N) < N - 2
    v = jnp.var(x32, -1, keepdims=True, where=mask)
    y = (x32 - jnp.mean(x32, -1, keepdims=True, where=mask)) / jnp.sqrt(v + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def epsilon_of_an_array(x, scale, bias):
    x32 = wide(x)
    v = jnp.var(x32, -1, keepdims=True) + jnp.abs(bias[0])
    return ((x32 - mean(x32)) / jnp.sqrt(v) * full(scale, x)).astype(x.dtype)


def variance_by_mean_of_all(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) / jnp.sqrt(jnp.var(x32) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def not_centered(x, scale, bias):
    x32 = wide(x)
    y = x32 / jnp.sqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def first_axis(x, scale, bias):
    x32 = wide(x)
    v = jnp.var(x32, 0, keepdims=True)
    y = (x32 - jnp.mean(x32, 0, keepdims=True)) / jnp.sqrt(v + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def cube_root(x, scale, bias):
    x32 = wide(x)
    y = (x32 - mean(x32)) * (jnp.var(x32, -1, keepdims=True) + EPSILON) ** (-1 / 3)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


def more_of_the_mean(x, scale, bias):
    x32 = wide(x)
    y = (x32 - 1.01 * mean(x32)) / jnp.sqrt(jnp.var(x32, -1, keepdims=True) + EPSILON)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


LOOKALIKES = [
    stopped_statistics, epsilon_outside, unbiased, mean_of_another, variance_of_another,
    part_of_the_row, masked, epsilon_of_an_array, variance_by_mean_of_all, not_centered, first_axis,
    cube_root, more_of_the_mean,
]  # fmt: skip


def check(function: Any, arrays: Any, limit: float) -> None:
    """Results and gradients of the fused function equal the function's own."""

    def loss(f):
        def of(*arrays):
            y = f(*arrays)
            w = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return jnp.sum(y.astype(jnp.float32) * w), y

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True))

    expected = loss(function)(*arrays)
    got = loss(jax_gradops.fuse(function))(*arrays)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        np.testing.assert_allclose(b, a, rtol=limit, atol=limit * (np.abs(a).max() + 1e-3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", LAYER_NORMS + RMS_NORMS, ids=lambda f: f.__name__)
def test_norms(function, dtype):
    """All ways to write a norm are found. Results and gradients are the same up to rounding."""
    arrays = operands(jnp.dtype(dtype))
    assert names(function, *arrays) == ["layer_norm" if function in LAYER_NORMS else "rms_norm"]
    check(function, arrays, 2e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("function", LOOKALIKES, ids=lambda f: f.__name__)
def test_code_that_only_looks_like_a_norm(function):
    arrays = operands()
    summary = summary_of(function, *arrays)
    assert not summary.replaced
    text = str(jax.make_jaxpr(function)(*arrays))
    assert str(jax.make_jaxpr(jax_gradops.fuse(function))(*arrays)).count("\n") == text.count("\n")
