"""Layer and RMS norm of numerically hard values. `catalogue.py` explains marks such as N3."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, small_integers, sums_of_small_integers, widen
from conformance import IMPLEMENTATIONS_AND_DTYPES
from jax.experimental import checkify
from norm_problems import check, example, problem, references, run

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward

# On GPUs: several threads per row; a block per row, in registers; a block per row, streamed.
WIDTHS = (129, 4096, 20_000)


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.N3
@pytest.mark.N5
@pytest.mark.N8
def test_large_mean(platform, implementation, rng):
    """Forward and backward are as accurate as with mean 0, within every other test's tolerance."""
    problems = []
    for mean, std, shape, dtype in [
        (1e4, 1, (64, 1024), "float32"),
        (1e4, 1, (33, 4097), "float32"),
        (2e3, 1, (64, 4), "float32"),  # N1
        (2e3, 1, (64, 1024), "float32"),
        (100, 0.01, (64, 1000), "float32"),  # N2
        (1449, 0.5, (64, 768), "float32"),  # N5
        (5, 0.1, (64, 768), "bfloat16"),  # N8
        (1e8, 1, (64, 1024), "float64"),
        # On GPUs, sums over these rows are made of partial sums.
        (1e4, 1, (300, 129), "float32"),
        (1e4, 1, (300, 768), "float32"),
        (5, 0.1, (300, 33), "bfloat16"),
    ]:
        dy, _, scale, bias = example(rng, shape)
        x = mean + std * rng.standard_normal(shape)
        arrays = (a.astype(jnp.dtype(dtype)) for a in (dy, x, scale, bias))
        problems.append(problem("layer_norm", *arrays, implementation=implementation))
    x = np.arange(40_000, 40_004, dtype=np.float32).reshape(1, 4)  # N3
    dy = np.array([[2, 1, 1, 1]], np.float32)
    check(*problems, problem("layer_norm", dy, x, implementation=implementation))


@pytest.mark.parametrize("features", WIDTHS)
@pytest.mark.parametrize("where", [0, 1, -1])
def test_outlier(platform, implementation, features, where, rng):
    """The other elements are as accurate as float32 allows, wherever the outlier is.

    The error is relative to an element's own size. Differences from the outlier are rounded to the
    outlier's ulp.
    """
    x = rng.standard_normal((8, features)).astype(np.float32)
    x[:, where] = [1e4, -1e4, 1e5, 3e3, 1e6, -1e3, 1e4, 1e4]
    y = jax_gradops.layer_norm(x, implementation=implementation)
    expected = oracles.norm(widen(x), epsilon=1e-6, centered=True).value
    others = np.delete(np.arange(features), where)
    size = np.sqrt(np.mean(expected[:, others] ** 2, 1, keepdims=True))
    error = np.max(np.abs(widen(y) - expected)[:, others] / size, 1)
    # The error of both sums: they hold the outlier, and little of the other elements.
    assert (error <= 24 * float(np.finfo(np.float32).eps)).all(), error


@pytest.mark.N4
@pytest.mark.N7
@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
def test_constant_rows(platform, implementation, dtype, rng):
    """Constant rows give exactly the bias, at any magnitude and width. Gradients have no NaN."""
    kind = jnp.finfo(dtype)
    exponents = np.linspace(*np.log2([float(kind.smallest_subnormal), float(kind.max) / 2]), 40)
    powers = np.exp2(exponents) * np.resize([1, -1], 40)
    limits = [kind.smallest_subnormal, kind.tiny, kind.max, -kind.max]
    values = np.array([0, 1, -1234, 1e-7, 6e4, -6e4, *map(float, limits), *powers]).astype(dtype)
    problems = []
    for features in (1, 3, 127, 1000, 4097, 20_000):
        x = np.repeat(values[:, None], features, 1)
        dy, _, scale, bias = example(rng, x.shape, dtype)
        arrays = (dy, x, scale, bias)
        problems.append(problem("layer_norm", *arrays, implementation=implementation))
    for p, results in zip(problems, run(problems), strict=True):
        expected = np.broadcast_to(p.parameters["bias"], p.dy.shape)
        assert_bitwise_equal(results["y"], expected, f"{p.dy.shape[1]} features")
        assert np.isfinite(widen(results["x"])[:6]).all()
        assert not widen(results["scale"]).any()


@pytest.mark.N11
@pytest.mark.N12
def test_large_half_precision(platform, op, implementation, rng):
    """Sums of squares of float16 exceed float16's range."""
    problems = []
    for size in (7e3, 6e4):
        dy, _, scale, bias = example(rng, (8, 1024), np.float16)
        x = np.where(rng.random((8, 1024)) < 0.4, -size, size).astype(np.float16)
        dy = (dy.astype(np.float32) * 1000).astype(np.float16)  # dx is a tiny fraction of dy
        problems.append(problem(op, dy, x, scale, bias, implementation=implementation))
    check(*problems)


@pytest.mark.N15
def test_tiny_rows(platform, op, implementation, rng):
    """With a large epsilon, tiny rows are only scaled."""
    problems = []
    for size in (1e-4, 1e-10, 1e-20, 1e-30):
        dy, x, scale, bias = example(rng, (8, 129))
        arrays = (dy, x * np.float32(size), scale, np.zeros_like(bias))
        problems.append(problem(op, *arrays, implementation=implementation))
    check(*problems)


@pytest.mark.N15
def test_subnormal_rows(platform, op, implementation, rng):
    """Subnormal numbers may be flushed to 0.

    Results have no infinity, no NaN and no other error.
    """
    problems, sizes = [], []
    for dtype in map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")):
        tiny = float(jnp.finfo(dtype).tiny)
        x = rng.uniform(-4, 4, (8, 129)) * tiny * 0.25 ** np.arange(8)[:, None]
        dy, _, scale, _ = example(rng, x.shape, dtype)
        problems.append(problem(op, dy, x.astype(dtype), scale, implementation=implementation))
        # Subnormal float16 numbers are normal in float32, so none is flushed.
        sizes.append(0 if dtype == jnp.float16 else 2 * tiny)
    for p, flushed, results in zip(problems, sizes, run(problems), strict=True):
        for name, reference in references(p).items():
            actual = widen(results[name])
            cost = 1e3 * flushed * (np.abs(widen(p.dy)).sum(0) if name == "scale" else 4)
            bound = 0.01 * reference.magnitude + cost + 1e-7
            assert (np.abs(actual - reference.value) <= bound).all(), (p.dy.dtype, name)


@pytest.mark.N9
@pytest.mark.N10
def test_far_from_one(platform, op, implementation, rng):
    """Without epsilon, over the range in which squares can be represented.

    XLA's derivative of 1/sqrt is -1/2 rstd^3, which overflows or vanishes sooner.
    """
    sizes = (1e-16, 1e-10, 1e10, 1e16) if implementation == "ffi" else (1e-10, 1e10)
    problems = []
    for size, features in itertools.product(sizes, WIDTHS):
        dy, x, scale, bias = example(rng, (8, features))
        arrays = (dy, x * np.float32(size), scale, bias)
        problems.append(problem(op, *arrays, epsilon=0.0, implementation=implementation))
    check(*problems)


def test_deviation_far_below_epsilon(platform, implementation, rng):
    """The mean's rounding error matters as without epsilon, though rstd does not show this."""
    problems = []
    for deviation, features in itertools.product((1e-3, 1e-5, 1e-8), (64, 1000, 4097)):
        dy, x, scale, bias = example(rng, (16, features))
        for rows in (1, 16):
            shifted = np.float32(0.0125) + x[:rows] * np.float32(deviation)
            arrays = (dy[:rows], shifted, scale, bias)
            problems.append(
                problem("layer_norm", *arrays, epsilon=1e-5, implementation=implementation)
            )
    check(*problems)


@pytest.mark.parametrize(
    "shape",
    [(48, 40), (48, 64), (48, 129), (48, 1000), (300, 129), (300, 1000), (9000, 129), (5000, 1000)],
    ids=str,
)
def test_rows_of_several_kinds(platform, op, shape, rng):
    """Rows with large means, tiny rows and huge rows are right beside each other.

    Each row is bitwise equal beside other neighbours, though kernels have special code for some
    rows.
    """
    if platform == "cpu" and shape[0] > 300:
        pytest.skip("only for GPUs: in arrays this large, a block has several rows")
    dy, x, scale, bias = example(rng, shape)
    kind = rng.integers(4, size=(shape[0], 1))
    sizes, means = np.float32([1, 1, 1e-9, 1e9])[kind], np.float32([0, 30, 0, 0])[kind]
    mixed = means + sizes * x
    alone = np.where(kind == 1, mixed, x), np.where(kind >= 2, mixed, x)
    problems = [problem(op, dy, a, scale, bias, epsilon=0.0) for a in (mixed, *alone)]
    check(problems[0])
    results = run(problems)
    for other, rows in zip(results[1:], (kind[:, 0] < 2, kind[:, 0] != 1), strict=True):
        for name in ("y", "x"):
            assert_bitwise_equal(results[0][name][rows], other[name][rows], name)


@pytest.mark.N9
@pytest.mark.N10
@pytest.mark.parametrize("features", WIDTHS)
@pytest.mark.parametrize("large", [1e30, np.inf])
def test_overflowing_variance(platform, op, implementation, features, large, rng):
    """If squares overflow, y and dx of the whole row are NaN, never 0. Other rows are not NaN."""
    dy, x, scale, bias = example(rng, (4, features))
    if large == np.inf:
        x[2, features // 2] = large  # a single element
    else:
        x[2] *= np.float32(large)
    (results,) = run([problem(op, dy, x, scale, bias, implementation=implementation)])
    for name in ("y", "x"):
        nan = np.isnan(results[name])
        assert nan[2].all() and not nan[[0, 1, 3]].any()
    assert np.isnan(results["scale"]).all()


@pytest.mark.N9
@pytest.mark.N10
@pytest.mark.parametrize("dtype", ["float32", "float64"])
# On GPUs, the results of other widths depend on the row's place.
@pytest.mark.parametrize("features", [132, 4100])
def test_every_power_of_two(platform, op, dtype, features, rng):
    """A row times a power of two has the same y until its variance overflows. Then y is NaN.

    Equality is bitwise while sums of squares do not overflow.
    """
    half = jnp.finfo(dtype).maxexp // 2
    powers = np.arange(half - 44, half + 63)
    x = (rng.uniform(1, 2, features) * np.resize([1, -1], features)).astype(dtype)
    rows = np.ldexp(x, powers[:, None]).astype(dtype)
    y = np.asarray(jax.jit(getattr(jax_gradops, op))(rows))
    np.testing.assert_array_equal(y[:37], y[:1].repeat(37, 0))
    np.testing.assert_allclose(y[:44], y[:1].repeat(44, 0), rtol=1e-6)
    assert np.isnan(y[44:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("features", [6, 10, 12, 14, 33, 100, 257, 769])
def test_neighbours_of_nan(platform, op, dtype, features, rng):
    """A NaN in any column of x or dy stays in its row. Other rows are bitwise equal."""
    dy, x, scale, bias = example(rng, (37, features))
    arrays = [a.astype(jnp.dtype(dtype)) for a in (dy, x)]
    nan = [a.copy() for a in arrays]
    for a, rows in zip(nan, ((3, 31), (11, 35)), strict=True):
        a[rows[0], 0] = a[rows[1], -1] = np.nan
    clean, dirty = run([problem(op, *a, scale, bias) for a in (arrays, nan)])
    for name, rows in (("y", (11, 35)), ("x", (3, 11, 31, 35))):
        others = np.setdiff1d(np.arange(37), rows)
        assert np.isnan(widen(dirty[name])[list(rows)]).all()
        assert_bitwise_equal(dirty[name][others], clean[name][others], name)


def test_infinity_in_rms_norm(platform, implementation):
    """An infinity gives NaN in the whole row, where 1/sqrt(inf) would give 0. Other rows stay."""
    x = np.array([[3, 4, 0], [1, np.inf, 2], [3, 4, 0]], np.float32)
    y = jax_gradops.rms_norm(x, epsilon=0, implementation=implementation)
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[::2], x[::2] / np.sqrt(np.float32(25 / 3)), rtol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [(200, 129), (4099, 129), (2_500_000, 4), (2_500_000, 33), (80_000, 513), (40_000, 4096)],
    ids=str,
)
def test_exact_sums(platform, shape):
    """The gradient of the bias is a plain sum. For small integers, the sum is exact.

    On a GPU, some shapes give a thread more rows than it adds up at a time.
    """
    rows, features = shape
    shape = (min(rows, 20_000_000 // features) if platform == "cpu" else rows, features)

    @jax.jit
    def dbias() -> Any:
        dy = small_integers(shape)
        f = functools.partial(jax_gradops.layer_norm, dy + 0.5, None, implementation="ffi")
        return jax.vjp(f, jnp.zeros(features, jnp.float32))[1](dy)[0]

    assert_bitwise_equal(dbias(), sums_of_small_integers(shape).astype(np.float32))


def test_gradient_summed_over_axes_is_rounded_once(platform, implementation, rng):
    """One bias per channel, several normalised axes: bfloat16 cannot hold the terms, 259."""
    x = rng.standard_normal((7, 48, 4)).astype(np.float32)
    scale, bias = jnp.ones(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)
    options = {"begin_norm_axis": 1, "implementation": implementation}
    f = functools.partial(jax_gradops.layer_norm, x, scale, **options)
    (dbias,) = jax.vjp(f, bias)[1](jnp.full(x.shape, 37, jnp.float32))
    assert dbias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dbias.astype(jnp.float32), 12_416)  # 48 * 259, rounded


def test_float16_overflows_to_infinity(platform, implementation):
    """Numbers from 65,520 on overflow: the middle between the largest number and 2^16."""
    scale = np.array([65_504, 65_519, 65_520, 65_536, 7e4, 131_071, 131_072, 1e30], np.float32)
    x = np.ones((2, len(scale)), np.float16)
    y = jax_gradops.rms_norm(x, scale, epsilon=0.0, implementation=implementation)
    np.testing.assert_array_equal(y, [[65_504] * 2 + [np.inf] * 6] * 2)


def test_bfloat16_is_rounded_to_even(platform, implementation):
    """NaN stays NaN, even if its bits would overflow in rounding."""
    nan = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0xFFFF8001, 0x7FC00000, 0xFF800001, 0x7F800001]
    # A quarter are ties between two bfloat16 numbers; one of these two is even.
    scale = 1 + np.arange(64, dtype=np.float32) / 512
    scale = np.concatenate([scale, np.array(nan, np.uint32).view(np.float32), -scale])
    x = np.ones((2, len(scale)), jnp.bfloat16)
    y = jax_gradops.rms_norm(x, scale, epsilon=0.0, implementation=implementation)
    with np.errstate(invalid="ignore"):
        expected = widen(scale.astype(jnp.bfloat16))
    np.testing.assert_array_equal(widen(y), [expected] * 2)


def test_partial_sums_on_the_cpu():
    """Sums of slices of rows are added in double. In float32, the ones would be lost."""
    dy = np.zeros((3200, 129), np.float32)  # in 64 slices
    dy[0], dy[100::50] = 2**24, 1
    x, bias = np.ones_like(dy), np.zeros(129, np.float32)
    f = functools.partial(jax_gradops.layer_norm, x, None, implementation="ffi")
    with jax.default_device(jax.devices("cpu")[0]):
        (dbias,) = jax.vjp(f, bias)[1](dy)
    np.testing.assert_array_equal(dbias, np.float32(2**24 + 62))


def test_long_sums(platform, op):
    """Rounding errors of the parameters' gradients do not grow with the number of rows."""
    dy = np.full((1_000_000, 4), 0.1, np.float32)
    x = np.tile(np.array([1, -1, 1, -1], np.float32), (len(dy), 1))
    scale, bias = np.ones(4, np.float32), np.zeros(4, np.float32)
    (results,) = run([problem(op, dy, x, scale, bias, epsilon=0.0, implementation="ffi")])
    expected = 1e6 * float(np.float32(0.1))
    np.testing.assert_allclose(results["scale"], expected * x[0], rtol=1e-5)
    if op == "layer_norm":
        np.testing.assert_allclose(results["bias"], expected, rtol=1e-5)


@pytest.mark.newest_jax
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_what_debuggers_see_of_a_nan(implementation: str) -> None:
    """README's statements about checkify and jax_debug_nans."""
    x = jnp.array([[jnp.inf, 1, 2, 3]])

    def found(function: Any) -> str:
        checked = checkify.checkify(function, errors=checkify.nan_checks)
        return jax.jit(checked)(x)[0].get() or ""

    def norm(x: jax.Array) -> jax.Array:
        return jax_gradops.rms_norm(x, implementation=implementation)

    kernel = implementation == "ffi"
    assert ("sqrt" in found(norm)) == (not kernel) and bool(found(norm)) == (not kernel)
    assert ("add" if kernel else "sqrt") in found(lambda x: norm(x) + 1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="jit|sqrt"):
        norm(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("features", [1, 2, 7, 33, 64, 100, 1000, 4097, 70_000])
def test_forward_without_statistics(platform, op, dtype, features, rng):
    """Without a gradient, no statistics are stored, and y is bitwise equal."""
    x = rng.standard_normal((70 if features < 5000 else 3, features)).astype(jnp.dtype(dtype))
    alone = jax.jit(functools.partial(getattr(jax_gradops, op), implementation="ffi"))
    forward = functools.partial(getattr(backward, f"{op}_forward"), implementation="ffi")
    assert_bitwise_equal(alone(x), jax.jit(forward)(x)[0], "y")
    call = next(t for t in alone.lower(x).as_text().splitlines() if "jax_gradops." in t)
    results = call.rpartition("->")[2]
    assert results.count("tensor<0x") == 3, results  # sum, mean and rstd
