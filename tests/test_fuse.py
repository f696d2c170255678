"""`jax_gradops.fuse`: which code is replaced, which is left, and that nothing else changes."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops

pytestmark = pytest.mark.newest_jax
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
    """The program stays as it is, and the report says why."""
    arrays = operands()
    summary = summary_of(function, *arrays)
    assert not summary.replaced
    if function not in (masked, cube_root):
        (left,) = summary.left
        assert left.kind == "norm" and left.why and left.where.startswith(__file__)
    text = str(jax.make_jaxpr(function)(*arrays))
    assert str(jax.make_jaxpr(jax_gradops.fuse(function))(*arrays)).count("\n") == text.count("\n")


# --- NaN and names -------------------------------------------------------------------------------


def std_of(x):
    return (x - mean(x)) / jnp.std(x, -1, keepdims=True)


NO_VARIANCE = {
    "l2": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "rms": lambda x: x * jax.lax.rsqrt(mean(x * x)),
    "std": std_of,
    "transposed": lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).T,
    "denormal": lambda x: x * jax.lax.rsqrt(mean(x * x) + 1e-40),
    "infinite derivative": lambda x: x * jax.lax.rsqrt(mean(x * x) + 1e-30),
    "batch": lambda x: (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True),
    "cosine": lambda x: optax.losses.cosine_similarity(x, x + 1)[:, None],
}


@pytest.mark.parametrize("name", NO_VARIANCE)
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_rows_without_a_variance(name, value):
    """NaN is where the code has it, in results and gradients. The report says why."""
    function = NO_VARIANCE[name]
    x = operands(shape=(4, N))[0].at[1].set(value).at[:, 1].set(value)
    summary = summary_of(function, x)
    assert not summary.replaced
    assert "is NaN, and the op is not" in summary.left[0].why
    for f in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))):
        found, expected = f(jax_gradops.fuse(function))(x), f(function)(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)  # NaN equals NaN


def over_rows(x, scale, bias):
    x32 = wide(x).reshape(-1, N)
    centered = x32 - x32.mean(0, keepdims=True)
    y = centered * jax.lax.rsqrt(x32.var(0, keepdims=True) + EPSILON) * full(scale, x32)
    return y.astype(x.dtype).reshape(x.shape)


def over_groups(x, scale, bias):
    x32 = wide(x).reshape(-1, 2, 2, N // 4, 2)
    centered = x32 - x32.mean((1, 3, 4), keepdims=True)
    variance = jnp.square(centered).mean((1, 3, 4), keepdims=True)
    y = (centered * jax.lax.rsqrt(variance + EPSILON)).astype(x.dtype)
    return y.reshape(-1, 2, N)


INFINITE = [
    rms, by_var, one_pass, one_pass_without_maximum, over_rows, over_groups,
    lambda x, s, b: jax.nn.gelu(x), lambda x, s, b: jax.nn.gelu(x, approximate=False),
    lambda x, s, b: jax.nn.gelu(jnp.sin(x) + x + full(b, x).astype(x.dtype)),
]  # fmt: skip


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", INFINITE)
def test_infinities_are_where_the_code_has_them(function, dtype, implementation):
    """The same results and gradients are infinite, NaN or zero: 0 * inf, squares that overflow."""
    x, scale, bias = operands(dtype, (6, 2, N))
    x = x.at[0, 0, 3].set(jnp.inf).at[1, 0, 3].set(-jnp.inf).at[2, 0].set(1e20).at[3].set(jnp.nan)
    x = x.at[2, 0, 5].set(-1e20).at[4, 0, :3].set(jnp.asarray([2e19, -1.2e19, 5e18], dtype))
    assert names(function, x, scale, bias)
    with jax_gradops.use_implementation(implementation):
        found, pullback = jax.vjp(jax.jit(jax_gradops.fuse(function)), x, scale, bias)
        found = found, *pullback(jnp.ones_like(found))
    expected, pullback = jax.vjp(jax.jit(function), x, scale, bias)
    for a, b in zip(found, (expected, *pullback(jnp.ones_like(expected))), strict=True):
        for kind in (jnp.isnan, jnp.isposinf, jnp.isneginf):
            np.testing.assert_array_equal(kind(a), kind(b))


def test_statistics_in_float16():
    """The square of 300 is infinite in float16. Then the code's result is 0, the op's is 1."""
    by_hand = lambda x: x / jnp.sqrt(mean(jnp.square(x)) + 1e-3)  # noqa: E731
    x = jnp.full((2, N), 300, jnp.float16)
    (left,) = summary_of(by_hand, x).left
    assert "float16" in left.why
    assert not jnp.any(jax_gradops.fuse(by_hand)(x))
    assert names(lambda x: by_hand(wide(x)).astype(x.dtype), x) == ["rms_norm"]


def named(x):
    return checkpoint_name(x, "kept")


NAMED = {  # how it is found, and how many of the named values a policy still saves
    "mean square": (lambda x, s, b: x * jax.lax.rsqrt(named(mean(x * x)) + EPSILON), 0),
    "variance": (lambda x, s, b: (x - mean(x)) * jax.lax.rsqrt(
        named(jnp.var(x, -1, keepdims=True)) + EPSILON), 0),
    "sum": (lambda x, s, b: rms(named(x + jnp.sin(x)), s, b), 1),
    "result": (lambda x, s, b: jnp.sin(named(rms(x, s, b))), 1),
    "scale": (lambda x, s, b: rms(x, named(jnp.exp(s)), b), 1),
    "before a GELU": (lambda x, s, b: jax.nn.gelu(named(jnp.exp(x) + full(b, x))), 1),
    "before a bias": (lambda x, s, b: jax.nn.gelu(named(jnp.exp(x)) + full(b, x)), 1),
    "in a GELU": (lambda x, s, b: 0.5 * x * (1 + named(jax.lax.erf(x * math.sqrt(0.5)))), 0),
    "loss": (lambda x, s, b: named(
        -picked(jax.nn.log_softmax(x), jnp.argmax(jnp.sin(x), -1))) ** 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_checkpoint_names(name, capsys):
    """Ops are found through names. A policy saves named values outside of an op as before."""
    function, saved = NAMED[name]
    arrays = operands()
    (entry,) = summary_of(function, *arrays).replaced
    assert ("checkpoint_name 'kept' on a value inside has no effect" in entry.shapes) == (not saved)
    check(function, arrays, 2e-5)
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    kept = jax.checkpoint(jax_gradops.fuse(function), policy=policy)
    jax.ad_checkpoint.print_saved_residuals(kept, *arrays)
    assert capsys.readouterr().out.count("named 'kept'") == saved


POOLS = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(0),
    "mean twice": lambda x: jnp.exp(x).mean(0).mean(0, keepdims=True),
    "attention": lambda x: (x * jax.nn.softmax(jnp.sum(jnp.sin(x), -1, keepdims=True), 1)).sum(1),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("norm", [two_passes, rms], ids=lambda f: f.__name__)
def test_norms_after_a_pool(norm, pool):
    function = lambda x, scale, bias: norm(POOLS[pool](x), scale, bias)  # noqa: E731
    assert names(function, *operands()) == ["layer_norm" if norm is two_passes else "rms_norm"]
    check(function, operands(), 2e-5)


# --- Parameters that are not vectors of a row ----------------------------------------------------


def folded(x, scale, bias, keep=lambda a: a):
    """The scale stands beside 1/sqrt(variance)."""
    factor = jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPSILON) * scale
    return (x - mean(x)) * keep(factor) + bias


def modulated(x, scale, bias):
    return jax.nn.standardize(x, epsilon=EPSILON) * (1 + scale) + bias


def folded_rms(x, scale, bias):
    return x * (jax.lax.rsqrt(mean(x * x) + EPSILON) * (1 + scale)) + 0 * bias


def whole(x, scale, bias):
    return folded(x, full(scale, x), full(bias, x))


OUTSIDE = "without the scale and the bias"
# The function, the shapes of x and of the parameters, and how the norm is found.
VARYING = {
    "of a sample": (folded, (2, 3, N), (2, 1, N), "group"),
    "of a sample, rms": (folded_rms, (2, 3, N), (2, 1, N), "group"),
    "modulation": (modulated, (2, 3, N), (2, 1, N), "group"),
    "modulation of a sum": (
        lambda x, s, b: modulated(x + jnp.sin(x), s, b), (2, 3, N), (2, 1, N), "group"),
    "of two axes": (folded, (2, 3, 4, N), (2, 3, 1, N), "group"),
    "of rows in one axis": (
        lambda x, s, b: modulated(x, *(jnp.repeat(a, 3, 0) for a in (s, b))),
        (6, N), (2, N), "group"),
    "ensemble": (jax.vmap(whole), (2, 3, N), (2, N), "group"),
    "ensemble of one x": (jax.vmap(whole, (None, 0, 0)), (3, N), (2, N), OUTSIDE),
    "ensemble, last": (jax.vmap(whole, (None, 0, 0), 2), (3, N), (2, N), OUTSIDE),
    "of a position": (folded, (2, 3, N), (1, 3, N), OUTSIDE),
    "of a position, after the norm": (modulated, (2, 3, N), (1, 3, N), "norm"),
    "of each element": (folded, (2, 3, N), (2, 3, N), OUTSIDE),
    "of each element, after the norm": (modulated, (2, 3, N), (2, 3, N), "norm"),
    "of a row": (folded, (2, 3, N), (2, 3, 1), OUTSIDE),
    "mask after the norm": (modulated, (2, 3, N), (2, 3, 1), "norm"),
    "factor that is used elsewhere": (
        lambda x, s, b: folded(x, s, b, lambda a: jnp.sin(a) + a), (2, 3, N), (2, 1, N), None),
}  # fmt: skip


@pytest.mark.parametrize("name", VARYING)
def test_parameters_that_vary_along_rows(name):
    function, shape, of_parameters, how = VARYING[name]
    x = operands(shape=shape)[0]
    arrays = [x, *operands(shape=(2, *of_parameters))[0]]
    shapes = [each.shapes for each in summary_of(function, *arrays).replaced]
    assert len(shapes) == (how is not None)
    for each in shapes:
        assert (OUTSIDE in each) == (how == OUTSIDE)
        assert (each.count("float32") == 1) == (how == "norm")
    check(function, arrays, 2e-5)


def rms_with_shift(x, shift):
    """pi0.5's adaptive RMS norm: the result in float32 gets a shift before the cast."""
    y = wide(x) / jnp.sqrt(mean(jnp.square(wide(x))) + 1e-6)
    return (y + shift).astype(x.dtype)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: jnp.linalg.norm(x), None),
        (lambda x: {"rms": jnp.sqrt(jnp.mean(x * x)), "log": jnp.log(jnp.std(x, -1))}, None),
        (lambda x: jnp.linalg.norm(x[:, 1:] - x[:, :-1], axis=-1), None),
        (lambda x: x / (jnp.std(x) + EPSILON), "a number is added to the square root"),
        (
            lambda x: jax.lax.stop_gradient(x) / (jnp.std(jax.lax.stop_gradient(x)) + EPSILON),
            "a number is added to the square root",
        ),
        (lambda x: rms_with_shift(x.astype(jnp.bfloat16), mean(jnp.sin(x))), "used in float32"),
        (lambda x: jax.nn.standardize(x, 0), "the means are not over the last axes"),
        (
            lambda x: jax.vmap(
                lambda x, s: (
                    (x - x.mean(0, keepdims=True))
                    * (jax.lax.rsqrt(x.var(0, keepdims=True) + EPSILON) * full(s, x))
                )
            )(x, x[:, 0]),
            "vary along other axes than the channels'",
        ),
    ],
    ids=[
        "of all",
        "logged",
        "distances",
        "epsilon outside",
        "behind stop_gradient",
        "shift",
        "first axis",
        "batch norms",
    ],
)
def test_why_a_norm_is_left(function, why):
    summary = summary_of(function, operands()[0])
    assert not summary.replaced
    assert (why in summary.left[0].why) if why else not summary.left


# --- The addition before a norm ------------------------------------------------------------------


def test_addition_before_a_norm():
    """The op returns the sum too, if the sum goes on."""

    def block(x, update, scale):
        x = x + update
        return x + jnp.sin(rms(x, scale, None))

    x, scale, _ = operands()
    arrays = x, jnp.cos(x), scale
    assert names(block, *arrays) == ["add_rms_norm"]
    check(block, arrays, 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", ["x", "update"])
def test_bias_in_the_addition_before_a_norm(first, dtype):
    """The op adds the bias of the layer before it. The bias may be added to either array."""

    def block(x, scale, bias):
        update = jnp.cos(x) + full(bias.astype(x.dtype), x)
        x = x + update if first == "x" else update + x
        return x + jnp.sin(rms(x, scale, None))

    arrays = operands(jnp.dtype(dtype))
    (found,) = summary_of(block, *arrays).replaced
    assert found.op == "add_rms_norm"
    assert found.shapes == f"{dtype}[2,3,24], {dtype}[2,3,24], float32[24], float32[24]"
    check(block, arrays, 2e-5 if dtype == "float32" else 0.05)


def both_used(x, update):
    return x + update, update


def repeated_along_rows(x, update):
    return x + (jnp.cos(update) + jnp.cos(update[..., :1])), x


def twice(x, update):
    return update + update, x


@pytest.mark.parametrize("add", [both_used, repeated_along_rows, twice], ids=lambda f: f.__name__)
def test_bias_that_stays_where_it_is(add):
    """The sum with the bias is used elsewhere, or it has no bias along the last axis."""

    def block(x, scale, bias):
        total, other = add(x, jnp.cos(x) + full(bias, x))
        return rms(total, scale, None) * jnp.sin(other)

    arrays = operands()
    shapes = [each.shapes for each in summary_of(block, *arrays).replaced]
    assert shapes in (
        ["float32[2,3,24], float32[2,3,24], float32[24]"],  # no bias
        ["float32[2,3,24], float32[24]"],  # no addition
    )
    check(block, arrays, 2e-5)


def test_a_call_whose_unused_result_needs_the_sum():
    """The call stays without the result that nothing uses."""

    @jax.jit
    def with_statistic(y, extra):
        return jnp.sin(y), jnp.sum(extra * 3)

    def block(x, scale, bias):
        update = jnp.cos(x) + full(bias, x)
        return with_statistic(rms(x + update, scale, None), jnp.sin(update))[0]

    arrays = operands()
    summary = summary_of(block, *arrays)
    assert [each.op for each in summary.replaced] == ["add_rms_norm"] and not summary.left
    check(block, arrays, 2e-5)


def test_addition_with_a_scale_that_is_computed_from_the_sum():
    """The op cannot take such a scale, which is multiplied afterwards."""

    def block(x, update, weights):
        x = x + update
        return rms(x, jnp.tanh(x.reshape(-1, N).sum(0) * weights), None)

    x, scale, _ = operands()
    arrays = x, jnp.cos(x), scale
    (found,) = summary_of(block, *arrays).replaced
    assert found.op == "add_rms_norm" and found.shapes == "float32[2,3,24], float32[2,3,24]"
    check(block, arrays, 2e-5)


# --- The bias of a matrix product ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bias_of_a_matrix_product(dtype):
    """In 16 bits, the bias's gradient is computed as by `jax_gradops.nnx.Linear`."""

    def layer(x, scale, bias):
        weights = jnp.cos(jnp.outer(scale, scale)).astype(x.dtype)
        return jnp.tanh(x @ weights + full(bias.astype(x.dtype), x))

    arrays = operands(jnp.dtype(dtype))
    assert names(layer, *arrays) == ([] if dtype == "float32" else ["linear_bias"])
    check(layer, arrays, 2e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("shape", [(1, 1, 4, 6), (4, 6), (4, 1, 6), (4, 6, 1)])
def test_bias_of_several_axes(shape):
    """linen's DenseGeneral has such a bias."""

    def layer(x, kernel, bias):
        y = jnp.einsum("bti,ihj->bthj", x, kernel.astype(x.dtype))
        return jnp.tanh(y + bias.reshape(1, 1, 4, 6).astype(x.dtype))

    rng = np.random.default_rng(0)
    kernel, bias = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((N, 4, 6), shape))
    arrays = operands(jnp.bfloat16)[0], kernel, bias
    (site,) = summary_of(layer, *arrays).replaced
    assert site.op == "linear_bias"
    check(layer, arrays, 0.05)


@pytest.mark.parametrize("shape", [(4, 1), (6,), (2, 1, 4, 6), (3, 4, 6), (24,)])
def test_biases_of_other_axes(shape):
    """Such as positions, or a bias that is reshaped. A bias of the last axis alone is taken."""

    def layer(x, kernel, bias):
        y = jnp.einsum("bti,ihj->bthj", x, kernel.astype(x.dtype))
        full = (1, 1, 4, 6) if shape == (24,) else (1,) * (4 - len(shape)) + shape
        return jnp.tanh(y + bias.reshape(full).astype(x.dtype))

    arrays = operands(jnp.bfloat16)[0], jnp.ones((N, 4, 6)), jnp.ones(shape)
    assert names(layer, *arrays) == (["linear_bias"] if shape == (6,) else [])


def test_bias_of_attention_scores():
    """Such as relative positions. They are added to a batch of products."""

    def scores(q, k, bias):
        y = jnp.einsum("bthd,bshd->bhts", q, k)
        return jax.nn.softmax(y + bias[None].astype(q.dtype))

    q = jnp.ones((2, 3, 4, 6), jnp.bfloat16)
    assert names(scores, q, q, jnp.ones((4, 3, 3))) == []


def test_sums_that_are_no_bias_of_a_matrix_product():
    """A sum without a matrix product, or with an array that varies over rows."""

    def layer(x, scale, bias):
        product = x @ jnp.outer(scale, bias).astype(x.dtype)
        return jnp.tanh(product + product[..., :1]) * (jnp.sin(x) + full(bias.astype(x.dtype), x))

    assert names(layer, *operands(jnp.bfloat16)) == []


# --- GELU ----------------------------------------------------------------------------------------


def gelu_by_erf(x):
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


def gelu_by_erfc(x):
    return x * 0.5 * jax.lax.erfc(-x * math.sqrt(0.5))


def gelu_by_cdf(x):
    return x * (0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5)))


def gelu_by_tanh(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + jnp.tanh(inner))


def gelu_by_logistic(x):
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def gelu_factored(x):
    inner = x * math.sqrt(2 / math.pi) * (1 + 0.044715 * jnp.square(x))
    return x * ((1 + jnp.tanh(inner)) / 2)


GELUS = [gelu_by_erf, gelu_by_erfc, gelu_by_cdf, gelu_by_tanh, gelu_by_logistic, gelu_factored]
GELUS += [jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(len(GELUS)))
def test_gelu(index, dtype):
    gelu = GELUS[index]
    x, _, bias = operands(jnp.dtype(dtype))

    def with_bias(x, bias, weight):
        y = x + full(bias.astype(x.dtype), x)
        return jnp.einsum("...i,i->...i", gelu(y), weight.astype(x.dtype))

    arrays = x, bias, bias
    assert names(with_bias, *arrays) == ["bias_gelu"]
    assert names(gelu, x) == ["gelu"]
    check(with_bias, arrays, 2e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.0448 * x**3))),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.798 * (x + 0.044715 * x**3))),
        lambda x: x * jax.nn.sigmoid(1.702 * x),
        lambda x: 0.5 * x * (1 + jax.lax.erf(x)),
        lambda x: 0.5 * x * (1 - jax.lax.erf(x / math.sqrt(2))),
        jax.nn.silu,
        jnp.tanh,
    ],
    ids=["0.0448", "0.798", "quick", "erf(x)", "minus", "silu", "tanh"],
)
def test_code_that_only_looks_like_a_gelu(function):
    assert names(function, operands()[0]) == []


def test_gated_gelu_is_left():
    """XLA computes the product with the GELU."""
    x, gate, _ = operands()[0], *operands()[1:]
    summary = summary_of(lambda x: jax.nn.gelu(x + full(gate, x)) * jnp.sin(x), x)
    assert not summary.replaced and "multiplied by another array" in summary.left[0].why


# --- Cross-entropy -------------------------------------------------------------------------------


def picked(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def one_hot(labels):
    return jax.nn.one_hot(labels, N, dtype=jnp.float32)


def smoothed(x, labels):
    log_probabilities = jax.nn.log_softmax(x)
    of_all = jnp.mean(log_probabilities, -1)
    return -0.9 * picked(log_probabilities, labels) - 0.1 * of_all


def with_z_loss(x, labels, z_loss=1e-3, power=2):
    lse = jax.nn.logsumexp(x, -1)
    return lse - picked(x, labels) + z_loss * lse**power


def top(x):
    return jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))


LOSSES = {
    "optax": optax.losses.softmax_cross_entropy_with_integer_labels,
    "log_softmax": lambda x, i: -picked(jax.nn.log_softmax(x), i),
    "logsumexp": lambda x, i: jax.nn.logsumexp(x, -1) - picked(x, i),
    "by hand": lambda x, i: (
        jnp.log(jnp.sum(jnp.exp(x - top(x)), -1)) + (top(x)[..., 0] - picked(x, i))
    ),
    "differences": lambda x, i: (
        jnp.log(jnp.sum(jnp.exp(shifted := x - top(x)), -1)) - picked(shifted, i)
    ),
    "one_hot": lambda x, i: (
        -jnp.sum(jax.nn.one_hot(i, x.shape[-1], dtype=x.dtype) * jax.nn.log_softmax(x), -1)
    ),
    "optax one_hot": lambda x, i: optax.losses.softmax_cross_entropy(
        x, jax.nn.one_hot(i, x.shape[-1], dtype=x.dtype)
    ),
    "one_hot with weights": lambda x, i: (
        -jnp.sum(one_hot(i) * jnp.cos(wide(i))[..., None] * jax.nn.log_softmax(x), -1)
    ),
    "einsum": lambda x, i: -jnp.einsum("...i,...i->...", jax.nn.log_softmax(x), one_hot(i)),
    "indices": lambda x, i: (
        -jax.nn.log_softmax(x)[jnp.arange(len(x))[:, None], jnp.arange(x.shape[1]), i]
    ),
    "one row": lambda x, i: jax.vmap(jax.vmap(lambda x, i: -jax.nn.log_softmax(x)[i]))(x, i),
    "label_smoothing=0.1": smoothed,
    "label_smoothing=0.1 of one_hot": lambda x, i: optax.losses.softmax_cross_entropy(
        x, optax.smooth_labels(one_hot(i), 0.1)
    ),
    "one_hot logits": lambda x, i: jax.nn.logsumexp(x, -1) - jnp.sum(x * one_hot(i), -1),
    "z_loss=0.001": with_z_loss,
    "label_smoothing=0.1, z_loss=0.01": lambda x, i: (
        smoothed(x, i) + 0.01 * jax.nn.logsumexp(x, -1) ** 2
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    """Labels that are no class give what the code gives: NaN, the nearest class, or zero.

    So do their gradients, whether the loss is masked or not.
    """
    loss = LOSSES[name]
    fused = jax_gradops.fuse(loss)
    masked = jax_gradops.fuse(lambda x, i: jnp.where(i >= 0, loss(x, i), 0))
    logits = operands()[0]
    # The logit of a class is -inf. In one row, this class is the label. With weights, the code's
    # 0 * -inf stays NaN under `jit`.
    impossible = logits.at[(0, 1), (1, 0), 7].set(0 if "weights" in name else -jnp.inf)
    limits = jnp.iinfo(jnp.int32)
    for x, labels in (
        (logits, [[0, 5, 23], [7, 1, 11]]),
        (impossible, [[0, 5, 23], [7, 1, 11]]),
        (logits, [[0, -1, 23], [24, 1, -25]]),
        (logits, [[limits.min, limits.max, -24], [2**20, -2, 3]]),
    ):
        labels = jnp.asarray(labels)
        (site,) = summary_of(loss, x, labels).replaced
        assert site.op == "softmax_cross_entropy_with_integer_labels"
        assert (
            (f"; {name.split(' of ')[0]}" in site.shapes) is ("=" in name) is ("; " in site.shapes)
        )
        # Under `jit`, XLA turns products with one-hot labels into selections: 0 * -inf is 0.
        expected = jax.jit(loss)(x, labels)
        np.testing.assert_allclose(fused(x, labels), expected, rtol=2e-6, atol=2e-6)
        for of in ([[1.0, 2, 0], [0, 3, 0]], [[1.0, 2, 3], [4, 5, 6]]):
            of = jnp.asarray(of, x.dtype)
            pulls = [jax.vjp(lambda x, f=f, i=labels: f(x, i), x)[1] for f in (loss, fused, masked)]
            plain, (found,), (of_masked,) = *pulls[0](of), pulls[1](of), pulls[2](of)
            np.testing.assert_allclose(found, plain, atol=2e-6)
            (counted,) = pulls[0](jnp.where(labels >= 0, of, 0))
            np.testing.assert_allclose(of_masked, counted, atol=2e-6)


def test_losses_in_bfloat16():
    """The rows of a loss are rounded once more than a comparison in float32 has it."""
    x, labels = operands(jnp.bfloat16, (2, 3, 10))[0], jnp.asarray([[0, 5, 9], [7, 1, 3]])
    for name in ("optax", "log_softmax"):

        def rows_and_sum(x, labels, loss=LOSSES[name]):
            rows = loss(x, labels)
            return rows, rows.sum()

        found = names(rows_and_sum, x, labels)
        assert found == ["softmax_cross_entropy_with_integer_labels"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("name", ["optax", "log_softmax", "one row"])
def test_labels_of_few_bits(name, dtype):
    """There are more classes than numbers of 8 bits."""
    loss, x = LOSSES[name], operands(shape=(2, 3, 300))[0]
    labels = jnp.asarray([[0, 5, 23], [31, 1, 11]], dtype)
    assert names(loss, x, labels) == ["softmax_cross_entropy_with_integer_labels"]
    got, expected = (
        jax.value_and_grad(lambda x, f=f: jnp.sum(f(x, labels)))(x)
        for f in (jax_gradops.fuse(loss), loss)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_infinite_logits(name, dtype, implementation):
    """The same losses and gradients are infinite, NaN or zero as in the code.

    The label's logit may be infinite. A logit beside an infinity may be NaN, or so large that its
    exponential overflows.
    """
    loss = LOSSES[name]
    if dtype == "bfloat16":
        loss = lambda x, i: LOSSES[name](wide(x), i)  # noqa: E731
    rows = np.asarray(operands(shape=(1, 8, N))[0]).copy()
    rows[0, 1, 3] = rows[0, 2, :2] = rows[0, 3, 4] = rows[0, 4, 4] = rows[0, 5, 4] = np.inf
    rows[0, 4, 5], rows[0, 5, 5], rows[0, 6, 5], rows[0, 6, 7] = np.nan, 100, 70, 100
    x, labels = jnp.asarray(rows, dtype), jnp.asarray([[0, 1, 1, 4, 4, 2, 3, 3]])
    assert names(loss, x, labels) == ["softmax_cross_entropy_with_integer_labels"]
    with jax_gradops.use_implementation(implementation):
        found, pullback = jax.vjp(jax.jit(lambda x: jax_gradops.fuse(loss)(x, labels)), x)
        found = found, *pullback(jnp.ones_like(found))
    expected, pullback = jax.vjp(jax.jit(lambda x: loss(x, labels)), x)
    for a, b in zip(found, (expected, *pullback(jnp.ones_like(expected))), strict=True):
        for kind in (jnp.isnan, jnp.isposinf, jnp.isneginf):
            np.testing.assert_array_equal(kind(a), kind(b))


SUMMED = {
    "all": lambda lp, i: -jnp.sum(lp * one_hot(i)),
    "mean": lambda lp, i: jnp.mean(-lp * one_hot(i)),
    "two axes": lambda lp, i: -jnp.tanh(jnp.sum(one_hot(i) * lp, (1, 2))),
    "weights": lambda lp, i: -jnp.sum(lp * (one_hot(i) * jnp.cos(wide(i))[..., None])),
    "einsum": lambda lp, i: -jnp.einsum("btv,btv->", lp, one_hot(i)),
    "jit": jax.jit(lambda lp, i: -jnp.sum(lp * one_hot(i)) + jnp.sum(jnp.sin(lp) * one_hot(i))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SUMMED)
def test_losses_in_one_sum(name, dtype):
    """A sum over the classes and the rows at once, of log-probabilities times one-hot labels."""

    def loss(x, i):
        return SUMMED[name](jax.nn.log_softmax(wide(x)), i)

    x, i = operands(jnp.dtype(dtype))[0], jnp.asarray([[0, 5, 23], [7, -1, 11]])
    assert names(loss, x, i) == (
        [] if name == "jit" else ["softmax_cross_entropy_with_integer_labels"]
    )
    fused = jax_gradops.fuse(loss)
    for f in (lambda f: f, lambda f: jax.grad(lambda x, i: jnp.sum(f(x, i)))):
        np.testing.assert_allclose(
            *(f(each)(x, i).astype(float) for each in (fused, loss)), atol=2e-5, rtol=2e-5
        )


def test_what_is_listed_in_parts_stays_whole():
    """Sums, products and indexing that belong to no op are the code's own equations."""

    def f(x, i, j):
        a = jnp.sum(jnp.sin(x) * one_hot(i)) + jnp.einsum("btv,btv->bt", jnp.sin(x), one_hot(i))
        b = jnp.sin(x)[jnp.arange(2)[:, None], jnp.arange(3), i] + jnp.sin(x)[j, jnp.arange(3), i]
        return jax.nn.gelu(x), a * b

    x, i = operands()[0], jnp.asarray([[0, 5, 23], [7, -1, 11]])

    def counts(f):
        text = str(jax.make_jaxpr(f)(x, i, i[:, :1] % 2))
        return [text.count(f" {name}[") for name in ("reduce_sum", "dot_general", "gather")]

    assert names(f, x, i, i[:, :1] % 2) == ["gelu"]
    assert counts(jax_gradops.fuse(f)) == counts(f) == [1, 1, 2]
    # An op in the same jitted function does not change this.
    assert counts(jax_gradops.fuse(jax.jit(f))) == [1, 1, 2]


@pytest.mark.parametrize(
    "function, primitive",
    [
        (lambda x, i: jnp.einsum("btv,btv->bt", x, one_hot(i)), "dot_general"),
        (lambda x, i: jnp.einsum("ts,tsv->tv", x[0, :2, :3], one_hot(i)), "dot_general"),
        (lambda x, i: jnp.sum(jnp.sin(x) * one_hot(i), (1, 2)), "reduce_sum"),
        (lambda x, i: x[jnp.arange(2)[:, None], jnp.arange(3), i], "gather"),
    ],
    ids=["product", "product with columns", "sum", "indices"],
)
def test_op_of_what_is_listed_in_parts(function, primitive):
    """A GELU of the result of such an equation is replaced. The equation is not."""
    f = jax.jit(lambda x, i: jax.nn.gelu(function(x, i)))
    x, i = operands()[0], jnp.asarray([[0, 5, 23], [7, 1, 11]])
    fused = jax_gradops.fuse(f)
    assert names(f, x, i) == ["gelu"]
    assert str(jax.make_jaxpr(fused)(x, i)).count(f" {primitive}[") == 1
    np.testing.assert_allclose(fused(x, i), f(x, i), atol=2e-6)


@pytest.mark.parametrize(
    "of",
    [
        lambda lp, i: lp[jnp.arange(2)[:, None], jnp.arange(3)[::-1], i],
        lambda lp, i: lp[jnp.arange(2)[:, None], jnp.arange(1, 4) % 3, i],
        lambda lp, i: lp[jnp.arange(3) % 2, jnp.arange(3), i[0]],
        lambda lp, i: lp[i % 2, jnp.arange(3), i],
        lambda lp, i: jnp.sum(jnp.where(lp * one_hot(i) < -0.1, lp * one_hot(i), 0)),
        lambda lp, i: jnp.sum(lp * one_hot(i) * jnp.cos(lp)),
    ],
    ids=["reversed", "shifted", "fewer", "not counted", "where", "of cos"],
)
def test_sums_and_indices_that_are_no_loss(of):
    x, i = operands()[0], jnp.asarray([[0, 5, 23], [7, 1, 11]])
    assert names(lambda x, i: of(jax.nn.log_softmax(x), i), x, i) == []


def test_indices_of_other_rows():
    """The indices count along the wrong axes."""

    def transposed(x, i):
        first, second = (jax.lax.broadcasted_iota(jnp.int32, (3, 3), axis) for axis in (1, 0))
        return jax.nn.log_softmax(x)[first, second, i]

    assert names(transposed, operands(shape=(3, 3, N))[0], jnp.zeros((3, 3), int)) == []


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bfloat16", "int16", "float16"])
def test_numbers_that_a_dtype_has_not(dtype):
    """The numbers to 299, in dtypes that do not have all of them."""

    def indexed(x, i):
        rows = jnp.arange(300).astype(dtype).astype(jnp.int32)
        return jax.nn.log_softmax(x)[rows, i]

    def compared(x, i):
        classes = jax.lax.iota(jnp.dtype(dtype), 300).astype(jnp.int32)
        return jnp.sum(jax.nn.log_softmax(x) * wide(i[:, None] == classes[None]), -1)

    found = ["softmax_cross_entropy_with_integer_labels"] * (dtype in ("int16", "float16"))
    x = operands(shape=(300, 300))[0]
    for f in (indexed, compared):
        assert names(f, x, jnp.zeros(300, jnp.int32)) == found


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, i: jax.nn.logsumexp(2 * x, -1) - picked(x, i),
        lambda x, i: jax.nn.logsumexp(x, -1) - 0.9 * picked(x, i),
        lambda x, i: jax.nn.logsumexp(x[..., 1:], -1) - picked(x, i),
        lambda x, i: jax.nn.logsumexp(x, -1) - picked(jnp.sin(x), i),
        lambda x, i: jax.nn.logsumexp(x, -1, where=x > 0) - picked(x, i),
        lambda x, i: with_z_loss(x, i, -1e-3),
        lambda x, i: with_z_loss(x, i, power=1),
        lambda x, i: jax.nn.logsumexp(x, -1) - 0.9 * picked(x, i) - 0.2 * jnp.mean(x, -1),
    ],
    ids=["of twice x", "0.9", "fewer classes", "of another", "masked", "negative z_loss",
         "z_loss of lse", "smoothing of 0.1 and 0.2"],
)  # fmt: skip
def test_code_that_only_looks_like_a_loss(loss):
    x, labels = operands()[0], jnp.zeros((2, 3), int)
    assert names(loss, x, labels) == []


def test_why_a_loss_is_left():
    x, labels = operands()[0], jnp.zeros((2, 3), int)
    loss = lambda x, i: jax.nn.logsumexp(x, -1) - 0.9 * picked(x, i)  # noqa: E731
    (left,) = summary_of(loss, x, labels).left
    assert left.kind == "loss" and "the result is not log(sum(exp(x))) - x[label]" in left.why
    assert not summary_of(lambda x: jax.nn.log_softmax(x) * x, x).left


@pytest.mark.parametrize(
    "labels, why",
    [
        (lambda i: jnp.where(one_hot(i) == 1, 0.9, 0.1 / N), "probabilities of all classes"),
        (lambda i: one_hot(i) * 0.75 + one_hot(i + 1) * 0.25, "probabilities of all classes"),
        (lambda i: jnp.cos(one_hot(i)), "probabilities of all classes"),
        (lambda i: wide(i[..., None] == jnp.arange(1, N + 1)[None, None]), "0, 1, 2, and so on"),
    ],
    ids=["by where", "of two classes", "probabilities", "from 1"],
)
def test_labels_that_are_not_integers(labels, why):
    """The report says why such a loss is left."""
    loss = lambda x, i: -jnp.sum(labels(i) * jax.nn.log_softmax(x), -1)  # noqa: E731
    summary = summary_of(loss, operands()[0], jnp.zeros((2, 3), int))
    assert not summary.replaced and why in summary.left[0].why


# --- Norms of channels ---------------------------------------------------------------------------

IMAGES = (4, 3, 2, N)


def batch(x, scale, bias, axes=(0, 1, 2)):
    x32 = wide(x)
    m = jnp.mean(x32, axes, keepdims=True)
    v = jnp.mean(jnp.square(x32), axes, keepdims=True) - jnp.square(m)
    y = (x32 - m) * (jax.lax.rsqrt(v + EPSILON) * full(scale, x)) + full(bias, x)
    return y.astype(x.dtype), m.reshape(-1), v.reshape(-1)


def grouped(x, scale, bias, groups):
    shape = (x.shape[0], -1, groups, x.shape[-1] // groups)
    x32 = wide(x).reshape(shape)
    m, v = (f(x32, (1, 3), keepdims=True) for f in (jnp.mean, jnp.var))
    y = ((x32 - m) * jax.lax.rsqrt(v + EPSILON)).reshape(x.shape)
    return (y * full(scale, x) + full(bias, x)).astype(x.dtype)


CHANNEL_NORMS = {
    "batch_norm": lambda *a: batch(*a)[0],
    "batch_norm, relu": lambda *a: jax.nn.relu(batch(*a)[0]),
    "batch_norm, residual, relu": lambda x, *a: jax.nn.relu(batch(x, *a)[0] + jnp.sin(x)),
    "batch_norm, residual from relu, relu": lambda x, *a: jax.nn.relu(
        batch(x, *a)[0] + jax.nn.relu(jnp.sin(x))
    ),
    "batch_norm, residual times a number, relu": lambda x, *a: jax.nn.relu(
        batch(x, *a)[0] + 2 * jnp.sin(x)
    ),
    "batch_norm, residual from another norm, relu": lambda x, *a: jax.nn.relu(
        batch(x, *a)[0] + batch(jnp.sin(x), *a)[0]
    ),
    "batch_norm, before a group norm": lambda x, *a: grouped(batch(x, *a)[0], *a, 4),
    "group_norm": lambda *a: grouped(*a, 4),
    "group_norm, silu": lambda *a: jax.nn.silu(grouped(*a, 4)),
    "group_norm, one group": lambda *a: grouped(*a, 1),
    "group_norm, relu": lambda *a: jax.nn.relu(grouped(*a, 3)),
    "group_norm, instances": lambda *a: grouped(*a, N),
}


@pytest.mark.parametrize("name", CHANNEL_NORMS)
def test_channel_norms(name):
    arrays = operands(shape=IMAGES)
    found, *_ = summary_of(CHANNEL_NORMS[name], *arrays).replaced
    assert found.op == name.split(",")[0]
    assert found.shapes.count("[4,3,2,") == 1 + ("residual" in name)
    activation = name.split(" ")[-1]
    assert found.shapes.endswith(activation) == (activation in ("relu", "silu"))
    check(CHANNEL_NORMS[name], arrays, 5e-5)


def test_norm_of_a_sum_with_numbers_that_are_counted():
    """The numbers are equal along the normalised axis, so that they drop out of the formula."""

    def of(x, scale, bias):
        return two_passes(jnp.tanh(x) + jnp.arange(4, dtype=x.dtype)[:, None, None], scale, bias)

    arrays = operands(shape=(4, 3, N))
    assert names(of, *arrays) == ["layer_norm"]
    check(of, arrays, 5e-5)


def test_batch_statistics_are_kept():
    """Mean and variance come from the op, with their derivatives."""

    def of(x, scale, bias):
        y, m, v = batch(x, scale, bias)
        return jnp.concatenate([y.reshape(-1), jnp.sin(m), v * v])

    arrays = operands(shape=IMAGES)
    assert names(of, *arrays) == ["batch_norm"]
    check(of, arrays, 5e-5)
    forward = [jax.jvp(f, arrays, [jnp.cos(a) for a in arrays]) for f in (of, jax_gradops.fuse(of))]
    for a, b in zip(*map(jax.tree.leaves, forward), strict=True):
        np.testing.assert_allclose(b, a, rtol=5e-5, atol=1e-5)


def test_masked_statistics_are_left():
    """The report says so, for a mean with `where=`."""

    def of(x, scale, bias):
        valid = (jnp.arange(N) < 20)[None, None]
        m, v = (f(x, -1, keepdims=True, where=valid) for f in (jnp.mean, jnp.var))
        return (x - m) * jax.lax.rsqrt(v + EPSILON)

    summary = summary_of(of, *operands())
    assert not summary.replaced and "mask" in summary.left[0].why


@pytest.mark.parametrize("epsilon", [np.float32(EPSILON), jnp.float32(EPSILON)], ids=type)
def test_epsilon_from_outside(epsilon):
    """A number of NumPy or JAX that the function closes over is known when it is traced."""

    def of(x, scale, bias):
        return (x - mean(x)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + epsilon)

    arrays = operands()
    assert names(of, *arrays) == ["layer_norm"]
    check(of, arrays, 2e-5)
    outer = lambda *a: jax.jit(of)(*a)  # noqa: E731
    assert names(outer, *arrays) == ["layer_norm"]

    def traced(epsilon, *arrays):
        return (lambda x: x * jax.lax.rsqrt(mean(x * x) + epsilon))(arrays[0])

    summary = summary_of(traced, epsilon, *arrays)
    assert not summary.replaced and "epsilon" in summary.left[0].why


def test_numbers_from_outside_that_matter():
    """The code's own arrays stay where a result's dtype, device or last digits depend on them."""
    x = operands()[0] * 0.03
    of = lambda x, e: x * jax.lax.rsqrt(mean(x * x) + e)  # noqa: E731
    weak = jnp.asarray(2.0)
    inner = jax.jit(lambda x: (of(x, EPSILON), weak * 3))
    assert jax_gradops.fuse(lambda x: inner(x))(x)[1].weak_type == inner(x)[1].weak_type
    second = jax.device_put(jnp.float32(EPSILON), jax.devices()[-1])
    fused = jax_gradops.fuse(lambda x: of(x, second))
    assert fused(x).devices() == of(x, second).devices()
    rounded = jnp.bfloat16(1e-3)
    fused = jax_gradops.fuse(lambda x: of(x, rounded.astype(x.dtype)))
    np.testing.assert_allclose(fused(x), of(x, rounded.astype(x.dtype)), rtol=2e-6)


def test_without_jit(monkeypatch):
    from jax_gradops._fuse import check as comparison

    monkeypatch.setattr(comparison, "_comparisons", {})
    arrays = operands()
    with jax.disable_jit():
        assert names(by_var, *arrays) == ["layer_norm"]
        check(by_var, arrays, 2e-5)


def test_loss_on_an_explicit_mesh():
    """The labels are not sharded. The loss is sharded as the logits, as the code's is."""
    cpu = jax.devices("cpu")[:4]
    devices = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=cpu)
    with jax.set_mesh(devices):
        x = jax.device_put(operands(shape=(8, N))[0], NamedSharding(devices, P("a")))
        loss = lambda x: LOSSES["log_softmax"](x, jnp.arange(8))  # noqa: E731

        def doubled(x):
            twice = jax.shard_map(lambda y: 2 * y, in_specs=P("a"), out_specs=P("a"))
            return twice(loss(x))

        assert names(doubled, x) == ["softmax_cross_entropy_with_integer_labels"]
        for f in (loss, doubled):
            result = jax.jit(jax_gradops.fuse(f))(x)
            np.testing.assert_allclose(result, f(x), rtol=2e-6)
            assert jax.typeof(result) == jax.typeof(f(x))
            gradient = lambda f: jax.grad(lambda x: jnp.sum(f(x)))(x)  # noqa: E731
            np.testing.assert_allclose(gradient(jax_gradops.fuse(f)), gradient(f), atol=2e-6)


def test_relu_by_maximum_is_left():
    """Its derivative at 0 is 1/2. The op's is 0."""
    arrays = operands(shape=IMAGES)
    summary = summary_of(lambda *a: jnp.maximum(batch(*a)[0], 0), *arrays)
    assert [each.shapes for each in summary.replaced if "relu" in each.shapes] == []


# --- Clip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip(max_norm):
    gradients = dict(zip("abc", operands(), strict=True))
    optimizer = optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(0.1))
    state = optimizer.init(gradients)
    assert names(optimizer.update, gradients, state) == ["clip_tree_by_global_norm"]
    expected, _ = optimizer.update(gradients, state)
    got, _ = jax.jit(jax_gradops.fuse(optimizer.update))(gradients, state)
    for a, b in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)


def test_report_of_many_arrays():
    """It names a few."""
    gradients, clip = [jnp.ones((2, 3))] * 40 + [jnp.ones(3)] * 40, optax.clip_by_global_norm(1.0)
    (each,) = summary_of(clip.update, gradients, clip.init(gradients)).replaced
    assert each.shapes == "float64[2,3], float64[2,3], … (80 arrays)"
    assert "_clipping.py:" in each.where


def test_clip_of_some_arrays_is_left():
    def update(a, b):
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return jnp.where(norm < 1.0, a, a / norm * 1.0), b

    summary = summary_of(update, *operands()[1:])
    assert not summary.replaced and "not all arrays" in summary.left[0].why


# --- Everything else stays -----------------------------------------------------------------------


def test_values_that_are_used_elsewhere():
    """A norm whose inner value is returned too is left, and the report says so."""

    def of(x, scale, bias):
        x32 = wide(x)
        mean_square = mean(x32**2)
        return x32 * jax.lax.rsqrt(mean_square + EPSILON) * full(scale, x), mean_square

    summary = summary_of(of, *operands())
    assert not summary.replaced and "used elsewhere" in summary.left[0].why


def divided(f):
    """Two arrays that are divided by a function of their own norms."""
    norm = lambda a: jnp.sqrt(jnp.sum(a**2))  # noqa: E731
    return lambda x, y, i: (x * f(norm(x)), y * f(norm(y)))


def clipped_by_all(x, y, i):
    norm = jnp.sqrt(jnp.sum(x**2) + jnp.sum(y**2))
    return [a * jnp.minimum(1.0, 1.0 / (norm + 1e-6)) for a in (x, y)]


def norm(x):
    return jnp.linalg.norm(x, axis=-1, keepdims=True)


def norm_of_mask(x, y, i):
    mask = (y > 0).astype(x.dtype)
    square = jnp.sum(x**2 * mask, -1, keepdims=True) / jnp.sum(mask, -1, keepdims=True)
    return x * jax.lax.rsqrt(square + EPSILON)


def norm_in_inference(x, y, i):
    variance = full(jnp.asarray(np.ones(N, np.float32)), x)
    return (x - y[:1]) * jax.lax.rsqrt(variance + EPSILON)


@jax.custom_vjp
def custom_norm(x):
    return plain_rms(x)


custom_norm.defvjp(lambda x: (plain_rms(x), x), lambda x, dy: (dy,))
log_softmax, sigmoid, silu = jax.nn.log_softmax, jax.nn.sigmoid, jax.nn.silu


@jax.custom_jvp
def product(x, y):
    return x * y


product.defjvp(lambda p, t: (product(*p), t[0] * p[1] + p[0] * t[1]))

# Functions of two arrays and of labels; the kind of code, and a part of the reason.
SKIPPED = {
    "returned": (lambda x, y, i: (-picked(z := log_softmax(x), i), z), "loss", "elsewhere"),
    "biased": (lambda x, y, i: (-jnp.sum(one_hot(i) * (z := log_softmax(x + y[:1] * 0)), -1), z),
               "loss", "log-probabilities"),
    "log_prob": (lambda x, y, i: jnp.sum(product(log_softmax(x), one_hot(i)), -1), "loss",
                 "custom_jvp"),
    "entropy": (lambda x, y, i: jnp.sum(jnp.exp(log_softmax(x)) * log_softmax(x), -1), "loss",
                "entropy"),
    "entropy by softmax": (lambda x, y, i: jnp.sum(jax.nn.softmax(x) * log_softmax(x), -1), "loss",
                           "entropy"),
    "divergence": (lambda x, y, i: jnp.sum(jnp.exp(log_softmax(x)) * (log_softmax(x)
                   - log_softmax(y)), -1), "loss", "divergence"),
    "teacher": (lambda x, y, i: -jnp.sum(jax.nn.softmax(y) * log_softmax(x)), "loss",
                "probabilities"),
    "safe": (lambda x, y, i: optax.losses.safe_softmax_cross_entropy(x, y), "loss", "custom_jvp"),
    "softmax": (lambda x, y, i: -jnp.log(picked(jax.nn.softmax(x), i)), "loss", "log_softmax"),
    "overflow": (lambda x, y, i: jnp.log(jnp.sum(jnp.exp(x), -1)) - picked(x, i), "loss",
                 "overflows"),
    "diagonal": (lambda x, y, i: jnp.diag(log_softmax(x @ y.T)), "loss", "diagonal"),
    "eye": (lambda x, y, i: jnp.sum(log_softmax(x @ y.T) * jnp.eye(6, dtype=x.dtype)), "loss",
            "diagonal"),
    "sigmoid": (lambda x, y, i: jnp.mean(optax.losses.sigmoid_binary_cross_entropy(x, y)), "loss",
                "sigmoid"),
    "sigmoid by hand": (lambda x, y, i: jnp.sum(jnp.maximum(x, 0) - x * y
                        + jnp.log1p(jnp.exp(-jnp.abs(x)))), "loss", "sigmoid"),
    "log of sigmoid": (lambda x, y, i: jnp.sum(y * jnp.log(sigmoid(x)) + (1 - y)
                       * jnp.log(1 - sigmoid(x))), "loss", "sigmoid"),
    "pairs": (lambda x, y, i: jax.nn.log_sigmoid((2 * jnp.eye(6, dtype=x.dtype) - 1) * (x @ y.T)),
              "loss", "sigmoid"),
    "gated": (lambda x, y, i: silu(x) * y, "activation", "gated SiLU"),
    "silu": (lambda x, y, i: silu(x) @ y.T, "activation", "SiLU"),
    "silu by hand": (lambda x, y, i: x / (1 + jnp.exp(-x)), "activation", "SiLU"),
    "gate": (lambda x, y, i: sigmoid(x) * y, "activation", "gate"),
    "halves": (lambda x, y, i: jax.nn.glu(x), "activation", "gate"),
    "mish": (lambda x, y, i: jax.nn.mish(x), "activation", "Mish"),
    "softplus": (lambda x, y, i: jax.nn.softplus(x), "activation", "softplus"),
    "tanh": (lambda x, y, i: jnp.tanh(x), "activation", "tanh"),
    "quick gelu": (lambda x, y, i: x * sigmoid(1.702 * x), "gelu", "1.702"),
    "0.05": (lambda x, y, i: x * (1 + jnp.tanh(0.8 * (x + 0.05 * x**3))), "gelu", "not x * (1"),
    "masked norm": (norm_of_mask, "norm", "mask"),
    "custom norm": (lambda x, y, i: custom_norm(x), "norm", "custom_vjp"),
    "weights": (lambda x, y, i: (x - jnp.mean(x, 0)[None]) * jax.lax.rsqrt(jnp.maximum(
                jnp.var(x, 0) * 6, 1e-4))[None], "norm", "a maximum"),
    "inference": (norm_in_inference, "norm", "inference"),
    "clip": (clipped_by_all, "clip", "Optax"),
    "clip of each": (divided(lambda n: 1 / jnp.maximum(n, 1.0)), "clip", "its own norm"),
    "classes by a mask": (lambda x, y, i: optax.softmax_cross_entropy_with_integer_labels(
                          x, i, where=jnp.arange(N)[None] < 9), "loss", "mask"),
    "one class": (lambda x, y, i: -log_softmax(x)[:, 3], "loss", "one class"),
    "labels of one class": (lambda x, y, i: optax.softmax_cross_entropy_with_integer_labels(
                            x, jnp.zeros(6, int)), "loss", "one class"),
    "z-loss": (lambda x, y, i: jnp.mean(jax.nn.logsumexp(x, -1) ** 2), "loss", "z-loss"),
    "mix": (lambda x, y, i: -jnp.log(picked(0.9 * jax.nn.softmax(x) + 0.1 / N, i)), "loss",
            "logarithm of probabilities"),
    "tanh's logarithm": (lambda x, y, i: 2 * (1 - (x * y + 1) - jax.nn.softplus(
                         -2 * (x * y + 1))), "activation", "softplus"),
    "least norm": (lambda x, y, i: x / jnp.where((n := norm(x)) > 1e-6, n, 1), "norm", "a choice"),
    "no norm": (lambda x, y, i: jnp.where((n := norm(x)) == 0, x, x / n), "norm", "a choice"),
    "safe norm": (lambda x, y, i: x / optax.safe_norm(x, 1e-6, axis=-1, keepdims=True), "norm",
                  "a choice"),
    "least square": (lambda x, y, i: x * jax.lax.rsqrt(jnp.clip(jnp.sum(x * x, -1, keepdims=True),
                     1e-6)), "norm", "a maximum"),
    "clip of rows": (lambda x, y, i: jnp.where((n := norm(x)) > 1.0, x / n, x), "clip",
                     "its own norm"),
    "focal": (lambda x, y, i: optax.sigmoid_focal_loss(x, y), "loss", "sigmoid"),
    "one feature": (lambda x, y, i: plain_rms(x[:, :1]), "norm", "one element"),
    "batch norm of one row": (lambda x, y, i: (lambda x: (x - x.mean(0)[None]) * jax.lax.rsqrt(
                              x.var(0) + EPSILON)[None])(x[:1]), "norm", "one element"),
    "only class": (lambda x, y, i: -picked(log_softmax(x[:, :1]), i), "loss", "one class"),
    "element of a vector": (lambda x, y, i: -log_softmax(x[0])[i[0]], "loss", "sliced"),
    "entropy of one row": (lambda x, y, i: jnp.sum(jnp.exp(z := log_softmax(x[:1])) * z), "loss",
                           "entropy"),
    "sigmoid of one number": (lambda x, y, i: jax.nn.log_sigmoid(x[0, 0]), "loss", "sigmoid"),
    "adaptive clip": (lambda x, y, i: optax.adaptive_grad_clip(1.0).update(
                      x, optax.EmptyState(), y)[0], "clip", "its own norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
def test_code_that_is_named(name):
    """There is one line for what a reader would call a norm, an activation, a loss or a clip."""
    function, kind, why = SKIPPED[name]
    x, y = operands(shape=(6, N))[0], jnp.cos(operands(shape=(6, N))[0])
    summary = summary_of(function, x, y, jnp.arange(6))
    assert not summary.replaced
    (left,) = summary.left
    assert left.kind == kind and why in left.why


def bce(x):
    return -jax.nn.log_sigmoid(x) / 3 - 2 * jax.nn.log_sigmoid(-x) / 3


SEVERAL = {
    "sigmoid losses": (lambda x, y: jnp.mean(bce(x) + bce(y)), 2),
    "joined losses": (lambda x, y: jnp.mean(jnp.concatenate([bce(x), bce(y)])), 2),
    "gates": (lambda x, y: sigmoid(x @ y.T) * sigmoid(y @ y.T), 2),
    "joined": (lambda x, y: jnp.concatenate([silu(x), silu(y)], -1), 2),
    "cell": (lambda x, y: sigmoid(x[:, :8]) * y[:, :8] + sigmoid(x[:, 8:16]) * jnp.tanh(
             x[:, 16:]), 3),
    "reset": (lambda x, y: jnp.tanh(sigmoid(x) * y) * sigmoid(y - 1), 3),
    "entropy beside": (lambda x, y: (lambda lp: -lp[:, 3].mean() - jnp.sum(jnp.exp(lp) * lp))(
                       log_softmax(x)), 2),
    "distillation": (lambda x, y: (lambda p: jnp.sum(p * (jnp.log(p) - log_softmax(x))))(
                     jax.nn.softmax(y)), 1),
    "soft cap": (lambda x, y: -jnp.sum(y * log_softmax(30 * jnp.tanh(x / 30))), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_pieces_that_meet(name):
    """Each of several losses and activations counts, also if their results are combined."""
    function, count = SEVERAL[name]
    x, y = operands(shape=(6, N))[0], jnp.cos(operands(shape=(6, N))[0])
    assert sum(each.times for each in summary_of(function, x, y).left) == count


def attention(x, y, i):
    scores = jnp.where(x @ y.T > 0, x @ y.T / math.sqrt(N), -1e9)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
    return jax.nn.softmax(scores) @ y + weights @ y, weights * x[:, :6]


def rotated(x, y, i):
    t = jnp.arange(6.0)[:, None] * 10000 ** (-jnp.arange(12.0) / 12)[None]
    a, b = jnp.split(x.astype(t.dtype), 2, -1)
    return jnp.concatenate([a * jnp.cos(t) - b * jnp.sin(t), a * jnp.sin(t) + b * jnp.cos(t)], -1)


def updates(name):
    optimizer = getattr(optax, name)(1e-3)
    return lambda x, y, i: optimizer.update({"a": x}, optimizer.init({"a": y}), {"a": y})


UNNAMED = {
    "attention": attention,
    "dropout": lambda x, y, i: jnp.where(jax.random.normal(jax.random.key(0), x.shape) < 1, x, 0),
    "rotation": rotated,
    "for a log": lambda x, y, i: (optax.tree.norm([x, y]), jnp.std(x), jnp.linalg.norm(y, axis=1)),
    "distances": lambda x, y, i: jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1)),
    "random": lambda x, y, i: [
        each(jax.random.key(0), (6, N)) for each in
        (jax.nn.initializers.truncated_normal(), jax.nn.initializers.he_normal(), jax.random.gumbel)
    ],
    "schedule": lambda x, y, i: optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100)(x[0, 0]),
    "logits": lambda x, y, i: (log_softmax(x), jax.nn.logsumexp(y), jnp.argmax(log_softmax(y))),
    "mean square": lambda x, y, i: jnp.mean((x - y) ** 2),
    "new logits": lambda x, y, i: jax.nn.softmax(jnp.log(0.9 * jax.nn.softmax(x) + 0.1 / N)),
    "numbers": lambda x, y, i: (jnp.tanh(x[0, 0]), sigmoid(y[0, 0]), jnp.log(jnp.abs(x) + 1)),
    "effects": lambda x, y, i: jax.debug.print("{}", x[0, 0]),
} | {name: updates(name) for name in ("adam", "lamb", "novograd", "lars", "adagrad")}  # fmt: skip


@pytest.mark.parametrize("name", UNNAMED)
def test_code_that_is_not_named(name):
    x, y = operands(shape=(6, N))[0], jnp.cos(operands(shape=(6, N))[0])
    with jax.numpy_dtype_promotion("standard"):
        summary = summary_of(UNNAMED[name], x, y, jnp.arange(6))
    assert not summary.replaced and not summary.left


def test_log_probabilities_beside_a_loss():
    """They are no loss, although they are computed from the same logits."""
    x = operands()[0]
    both = lambda x, i: (-picked(log_softmax(x), i), log_softmax(x))  # noqa: E731
    summary = summary_of(both, x, jnp.zeros((2, 3), int))
    assert len(summary.replaced) == 1 and not summary.left


def loop(x, scale, bias):
    return jax.lax.scan(lambda c, _: (by_var(c, scale, bias), None), x, None, 3)[0]


def branch(x, scale, bias):
    return jax.lax.cond(x[0, 0, 0] > 0, lambda x: by_var(x, scale, bias), jnp.sin, x)


def rematerialized(x, scale, bias):
    return jax.checkpoint(by_var)(x, scale, bias)


def while_loop(x, scale, bias):
    body = lambda c: (c[0] + 1, by_var(c[1], scale, bias))  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]


@pytest.mark.parametrize("function", [loop, branch, rematerialized, while_loop])
def test_inner_functions(function):
    arrays = operands()
    assert names(function, *arrays) == ["layer_norm"]
    if function is while_loop:
        np.testing.assert_allclose(
            jax_gradops.fuse(function)(*arrays), function(*arrays), rtol=2e-5, atol=2e-5
        )
    else:
        check(function, arrays, 2e-5)


def test_custom_derivatives_are_left():
    @jax.custom_vjp
    def norm(x):
        return by_var(x, *operands()[1:])

    norm.defvjp(lambda x: (norm(x), x), lambda x, dy: (jnp.ones_like(x),))
    x = operands()[0]
    assert names(norm, x) == []
    np.testing.assert_array_equal(
        jax.grad(lambda x: jnp.sum(jax_gradops.fuse(norm)(x)))(x), jnp.ones_like(x)
    )


def test_arguments_and_results_of_all_kinds():
    """Strings, None, bools, keywords and nested results stay what they are."""

    def of(x, how, *, train, scale=None):
        assert train is True and how == "rms"
        return {"y": rms(x, scale, None), "how": how, "none": None, "train": train, "n": 3}

    x, scale, _ = operands()
    got = jax_gradops.fuse(of)(x, "rms", train=True, scale=scale)
    assert {k: v for k, v in got.items() if k != "y"} == {
        "how": "rms", "none": None, "train": True, "n": 3,
    }  # fmt: skip
    np.testing.assert_allclose(got["y"], rms(x, scale, None), rtol=2e-6)


def test_report():
    """It has the file and the line, and is called at each trace."""
    found: list[Any] = []
    twice = jax.jit(
        jax_gradops.fuse(lambda *a: two_passes(two_passes(*a), *a[1:]), report=found.append)
    )
    for _ in range(2):
        twice(*operands())
    (summary,) = found
    (each,) = summary.replaced
    line = two_passes.__code__.co_firstlineno + 4
    assert each.where == f"{__file__}:{line}" and each.times == 2
    assert each.shapes == "float32[2,3,24], float32[24], float32[24]"
    assert "layer_norm(float32[2,3,24], float32[24], float32[24]) (2 times)" in str(summary)


MODEL = """
import jax, jax.numpy as jnp, optax
from flax import linen as nn

@jax.jit
def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)  # rms_norm

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return rms_norm(jnp.sin(nn.LayerNorm()(x)))  # layer_norm

def loss(x, labels):
    rows = x.reshape(-1, x.shape[-1])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels  # not here
    return losses(rows, labels.reshape(-1)).mean()  # softmax_cross_entropy_with_integer_labels
"""


def test_lines_of_an_installed_model(tmp_path, monkeypatch):
    """The report names neither the caller's line nor a framework's."""
    pytest.importorskip("flax")
    file = tmp_path / "site-packages" / "model_for_fuse" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODEL)
    monkeypatch.syspath_prepend(str(file.parents[1]))
    model = importlib.import_module("model_for_fuse.model")
    x, labels, block = operands()[0], jnp.zeros((2, 3), int), model.Block()
    params = block.init(jax.random.key(0), x)
    summary = summary_of(lambda p, x, i: model.loss(block.apply(p, x), i), params, x, labels)
    lines = MODEL.splitlines()
    assert len(summary.replaced) == 3 and not summary.left
    for each in summary.replaced:
        path, _, line = each.where.rpartition(":")
        assert path == str(file) and lines[int(line) - 1].endswith(f"# {each.op}")
    assert "float32[6,24], int64[6]" in summary.replaced[-1].shapes


@pytest.mark.parametrize(
    "function, shape, labels, shapes",
    [
        (LOSSES["log_softmax"], (6, N), (6,), "float32[6,24], int8[6]"),
        (lambda x, i: LOSSES["optax"](x.reshape(-1, N), i.reshape(-1)), (2, 3, N), (2, 3),
         "float32[6,24], int8[6]"),
        (lambda x, i: LOSSES["optax"](x.reshape(2, 3, N), i), (6, N), (2, 3),
         "float32[2,3,24], int8[2,3]"),
        (lambda x, i: LOSSES["optax"](wide(x.astype(jnp.bfloat16)).reshape(-1, N), i.reshape(-1)),
         (2, 3, N), (2, 3), "float32[6,24], int8[6]"),
        (lambda x, i: LOSSES["log_softmax"](x, jnp.where(i > 5, 0, i)), (6, N), (6,),
         "float32[6,24], int8[6]"),
        (lambda x, i: LOSSES["one row"](x[None], i[None]), (6, N), (6,), "float32[6,24], int8[6]"),
        (lambda x, i: by_var(x.reshape(2, 3, N), *[wide(i)] * 2), (6, N), (N,),
         "float32[2,3,24], float32[24]"),
        (lambda x, i: plain_rms(x.reshape(6, 2 * N)), (6, 2, N), (6,), "float32[6,48]"),
    ],
    ids=["expanded", "flattened", "divided", "cast", "where", "of one row", "norm", "other rows"],
)  # fmt: skip
def test_shapes_in_a_report(function, shape, labels, shapes):
    """The report shows the code's own arrays, before the code adds axes of size 1."""
    arrays = jnp.ones(shape, jnp.float32), jnp.ones(labels, jnp.int8)
    (site,) = summary_of(function, *arrays).replaced
    assert site.shapes == shapes


def test_implementation_in_use():
    """`use_implementation` decides, as for the ops."""
    with jax_gradops.use_implementation("xla"):
        text = jax.jit(jax_gradops.fuse(two_passes)).lower(*operands()).as_text()
    assert "jax_gradops.row_norm_fwd" not in text
    text = jax.jit(jax_gradops.fuse(two_passes)).lower(*operands()).as_text()
    assert "jax_gradops.row_norm_fwd" in text


def test_comparison_on_random_numbers(monkeypatch):
    """A wrong pattern does not get through: here, an RMS norm is taken for a layer norm."""
    from jax_gradops._fuse import check as comparison
    from jax_gradops._fuse.patterns import norms

    monkeypatch.setattr(comparison, "_comparisons", {})
    monkeypatch.setattr(norms.layer_norm, "rms_norm", jax_gradops.layer_norm)
    summary = summary_of(rms, *operands())
    assert not summary.replaced and "differ on random numbers" in summary.left[0].why


def test_nnx_modules_are_updated():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.dropout = nnx.BatchNorm(N, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(nnx.relu(self.norm(x)))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    results = []
    for function in (loss, jax_gradops.fuse(loss)):
        model = Model(nnx.Rngs(0))
        step = nnx.jit(lambda model, x, f=function: nnx.value_and_grad(f)(model, x))
        step(model, operands()[0])
        results.append(
            jax.tree.leaves((step(model, operands()[0]), nnx.state(model, nnx.Not(nnx.RngState))))
        )
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6)


# --- Programs that once gave wrong numbers or errors ---------------------------------------------


def plain_rms(x):
    return x * jax.lax.rsqrt(mean(x * x) + EPSILON)


def pairs(x):
    return plain_rms(x) + jnp.sum(
        x[..., :, None] - 2 * jnp.sin(x)[..., None, :] * x[..., :, None], -1
    )


def pairs_of_a_row(x):
    return plain_rms(x) + jnp.sum(x[..., :, None] - x[..., None, :], -1)


def products_of_rows(x):
    loss = jax.nn.logsumexp(x, -1) - x[..., 0]
    return loss + jnp.mean(jnp.sum((x[:, None] - x[None]) ** 2, -1), 1)


def statistics_in_another_order(x):
    y = x.reshape(-1, 2, N // 2).transpose(0, 2, 1)
    m = y.mean(0)
    v = (y**2).mean(0) - m**2
    y = (y - m[None]) * jax.lax.rsqrt(v + EPSILON)[None]
    return jnp.concatenate([y.transpose(0, 2, 1).reshape(-1), jnp.sin(m).reshape(-1)])


def gelu_then_norm(x):
    h = x * (1 + jax.lax.erf(x / math.sqrt(2))) * 0.5
    return plain_rms(h) + jnp.sin(h)


def norms_of_reshaped_rows(x):
    norm = lambda x: plain_rms(x.reshape(-1, N)).reshape(x.shape)  # noqa: E731
    h = norm(x)
    return norm(h) + jnp.sin(h)


def numbers_from_calls(x):
    inner = jax.jit(lambda x: (x * 2.0, 0.5))
    outer = jax.jit(lambda x: (*inner(x), True))
    y, number, flag = outer(x)
    body = lambda c, _: ((c[0] + number, plain_rms(c[1])), None)  # noqa: E731
    (number, y), _ = jax.lax.scan(body, (number, y), None, 2)
    return jnp.where(flag, plain_rms(y), y) * number


def complex_number(x):
    return plain_rms(x + full(jnp.real(np.complex128(2 + 1j) * jnp.ones(N, complex)), x))


def unused_result_of_a_call(x):
    call = jax.jit(lambda a, b: (jnp.sin(a), b * 2))
    mean_square = mean(x * x)
    return call(x * jax.lax.rsqrt(mean_square + EPSILON), mean_square)[0]


def tanh_of_zero(x):
    return plain_rms(x) + jnp.tanh(x - x)


@pytest.mark.parametrize(
    "function",
    [
        pairs, pairs_of_a_row, products_of_rows, statistics_in_another_order, gelu_then_norm,
        norms_of_reshaped_rows, unused_result_of_a_call, tanh_of_zero, numbers_from_calls,
        complex_number,
    ],
)  # fmt: skip
def test_unusual_programs(function):
    x = operands(jnp.float64, (3, N))[0]
    w = jnp.cos(jnp.arange(function(x).size, dtype=x.dtype))
    value_and_grad = [
        jax.value_and_grad(lambda x, f=f: jnp.sum(f(x).reshape(-1) * w))(x)
        for f in (function, jax_gradops.fuse(function))
    ]
    for a, b in zip(*value_and_grad, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9)


def test_statistics_that_another_op_needs():
    """The order of the equations is that of the values."""

    def of(x, s, r):
        m = x.mean(0)
        scale = jnp.sin(s)
        h = m + r
        z = plain_rms(h)
        v = jnp.mean(x * x, 0) - m * m
        return (x - m[None]) * (jax.lax.rsqrt(v + EPSILON) * scale)[None] + z[None]

    check(of, operands(shape=(5, N)), 5e-5)


def test_labels_with_a_value_for_no_class():
    def of(x, i):
        return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(
            x, i[..., None], -1, mode="fill", fill_value=0.0
        ).squeeze(-1)

    assert names(of, operands()[0], jnp.zeros((2, 3), int)) == []


def test_gelu_of_float32_with_an_input_in_bfloat16():
    """Its literals are not rounded to bfloat16, so that the constant must be exact."""
    for constant, found in ((math.sqrt(0.5), ["gelu"]), (0.7025, [])):

        def of(x, constant=constant):
            x32 = wide(x)
            return (x32 * 0.5 * (1 + jax.lax.erf(x32 * constant))).astype(x.dtype)

        assert names(of, operands(jnp.bfloat16)[0]) == found


def test_clips_that_differ_in_a_cast():
    def clip(inner):
        def of(a, b):
            total = jnp.sum(a**2) + jnp.sum(b**2)
            norm = jnp.sqrt(total.astype(inner).astype(jnp.float32))
            return [jnp.where(norm < 1.0, x, x / norm * 1.0) for x in (a, b)]

        return of

    arrays = operands()[1:]
    for inner, count in ((jnp.float64, 1), (jnp.int32, 0)):
        assert len(names(clip(inner), *arrays)) == count


def test_additions_on_random_numbers(monkeypatch):
    """Wrong forms of the ops that add something first do not get through."""
    from jax_gradops._fuse import additions
    from jax_gradops._fuse import check as comparison
    from jax_gradops._fuse.patterns import gelu, norms

    def without_bias(x, residual, residual_bias=None, **options):
        return jax_gradops.add_layer_norm(x, residual, **options)

    def wrong_sum(*arrays, **options):
        y, total = jax_gradops.add_layer_norm(*arrays, **options)
        return y, 1.01 * total

    def bias_gelu(x, bias, approximate):
        return jax_gradops.bias_gelu(x, bias.astype(jnp.bfloat16), approximate)

    def add_norm(x, residual, added, scale, bias):
        return two_passes(x + (residual + added[None, None]), scale, bias)

    def add_norm_in_float32(x, residual, added, scale, bias):
        total = x + (residual + added[None, None])
        return two_passes(total.astype(jnp.float32), scale, bias).astype(x.dtype)

    def gelu_of_sum(x, bias):
        return jax.nn.gelu(x + bias[None, None])

    def product(x, kernel, bias):
        return x @ kernel + bias[None, None]

    monkeypatch.setattr(comparison, "_comparisons", {})
    x, scale, bias = operands()
    wide = jax.random.normal(jax.random.key(5), (24, 24)).astype(jnp.bfloat16)
    half = x.astype(jnp.bfloat16), wide, bias.astype(jnp.bfloat16)
    norm = half[0], half[0], half[2], scale, bias
    cases = [
        ("add_layer_norm", add_norm, (x, x, bias, scale, bias)),
        ("add_layer_norm", add_norm_in_float32, norm),
        ("bias_gelu", gelu_of_sum, (x, bias)),
        ("linear_bias", product, half),
    ]

    def found(function, arrays):
        return {each.op for each in summary_of(function, *arrays).replaced}

    for op, function, arrays in cases:
        assert op in found(function, arrays)
    monkeypatch.setattr(gelu.bias_gelu, "bias_gelu", bias_gelu)
    monkeypatch.setattr(additions, "linear_bias", lambda y, bias, exact: y + 0.9 * bias[None, None])
    for add_layer_norm in (without_bias, wrong_sum):
        monkeypatch.setattr(norms.layer_norm, "add_layer_norm", add_layer_norm)
        comparison._comparisons.clear()
        for op, function, arrays in cases:
            alone = {
                "add_layer_norm": {"layer_norm"},
                "bias_gelu": {"gelu"},
            }  # without the addition
            assert found(function, arrays) == alone.get(op, set())
    (left,) = summary_of(product, *half).left
    assert "differ on random numbers" in left.why


def test_terms_used_twice():
    """The derivative of x + (x + bias) is that of one array."""
    x, scale, bias = operands()

    def twice(x, bias, scale):
        return two_passes(x + (x + bias[None, None]), scale, bias)

    arrays = x, bias, scale
    (found,) = summary_of(twice, *arrays).replaced
    assert found.op == "add_layer_norm"
    expected, ours = (
        jax.vjp(f, *arrays)[1](jnp.ones_like(x)) for f in (twice, jax_gradops.fuse(twice))
    )
    for a, b in zip(expected, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
