"""GELU and bias + GELU: accuracy on all values of the small dtypes, and many of float32.

The gradient operator is tested too.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import (
    OPTIMIZED,
    assert_bitwise_equal,
    assert_matches,
    small_integers,
    sums_of_small_integers,
    widen,
)
from conformance import RowOpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward
from jax_gradops._ops.gelu.spec import BIAS_GELU, GELU


@pytest.mark.newest_jax
class TestBiasGelu(RowOpTests):
    """bias + GELU in the tanh form."""

    form = BIAS_GELU.forms[0]


class TestGelu(RowOpTests):
    """GELU in the exact form."""

    variant = True
    form = GELU.forms[1]
    all_reduces = (0,)


# --- Accuracy ------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["tanh", "exact"])
def approximate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_third_derivatives_inside_shard_map(platform, approximate, dtype, rng):
    devices = mesh(platform, AxisType.Auto)
    x = jnp.asarray(rng.standard_normal(64) * 2, dtype)

    def third(x: Any) -> Any:
        f = functools.partial(jax_gradops.gelu, approximate=approximate)
        for _ in range(3):
            f = jax.grad(lambda x, f=f: jnp.sum(f(x)))
        return f(x)

    spread = jax.shard_map(third, mesh=devices, in_specs=P("data"), out_specs=P("data"))
    x64 = np.asarray(x, np.float64)
    density = np.exp(-(x64**2) / 2) / np.sqrt(2 * np.pi)
    expected = density * x64 * (x64**2 - 4)
    limit = 1e-2 if approximate else 1e-5  # the tanh form is not exact
    np.testing.assert_allclose(jax.jit(spread)(x), expected, atol=limit)


def value_and_derivative(x: Any, approximate: bool, implementation: str) -> tuple[Any, Any]:
    """GELU and its derivative as float64, from one program."""

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def f(x: Any) -> tuple[Any, Any]:
        op = functools.partial(
            jax_gradops.gelu, approximate=approximate, implementation=implementation
        )
        y, pull = jax.vjp(op, x)
        return y, pull(jnp.ones_like(y))[0]

    y, dy = f(x)
    return widen(y), widen(dy)


def spacing(x: np.ndarray, dtype: Any) -> np.ndarray:
    """One unit in the last place of the nearest normal number."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(x), float(info.tiny)))
    return np.ldexp(float(info.eps), exponent - 1)


def flushed(implementation: str) -> float:
    """The error from underflow: the result becomes 0. With XLA, a factor of x may become 0."""
    return float(jnp.finfo(np.float32).tiny) * (1 if implementation == "ffi" else 16)


def float32_sweep() -> np.ndarray:
    rng = np.random.default_rng(0)
    dense = np.linspace(-15, 15, 300_001)
    powers = 2.0 ** rng.uniform(-126, 127, 50_000)
    # Results may be subnormal, their factors are not.
    small = np.linspace(2.0**-126, 2.0**-123, 1001)
    return np.concatenate([dense, powers, -powers, small, -small]).astype(np.float32)


def test_float32_value(platform, implementation, approximate):
    x = float32_sweep()
    y, _ = value_and_derivative(x, approximate, implementation)
    expected = oracles.gelu_value(widen(x), approximate)
    error = np.maximum(0, np.abs(y - expected) - flushed(implementation))
    near = x > -3
    ulps = (error / spacing(expected, np.float32))[near]
    # XLA's erfc is less accurate: 13 units at -2.86.
    limit = 8 if implementation == "ffi" and not approximate else 16
    assert ulps.max() <= limit, f"{ulps.max()} ulp at {x[near][ulps.argmax()]}"
    tail = ~near
    relative = (error / np.maximum(np.abs(expected), 1e-300))[tail]
    limit = 1e-6 if implementation == "ffi" and not approximate else 2e-5
    assert relative.max() <= limit, f"{relative.max()} at {x[tail][relative.argmax()]}"


def test_float32_derivative(platform, implementation, approximate):
    x = float32_sweep()
    _, dx = value_and_derivative(x, approximate, implementation)
    expected = oracles.gelu_derivative(widen(x), approximate)
    ulps = np.abs(dx - expected) / spacing(np.maximum(np.abs(expected), 1 / 8), np.float32)
    assert ulps.max() <= 8, f"{ulps.max()} ulp at {x[ulps.argmax()]}"


def test_float64(platform, implementation, approximate):
    x = np.concatenate([np.linspace(-37, 37, 20_001), np.logspace(-300, 300, 1000)])
    y, dx = value_and_derivative(x, approximate, implementation)
    expected = oracles.gelu_value(x, approximate), oracles.gelu_derivative(x, approximate)
    # Otherwise the exponent's rounding adds to the error.
    exact = implementation == "ffi" and not approximate
    np.testing.assert_allclose(y, expected[0], rtol=4e-15 if exact else 6e-13, atol=1e-300)
    np.testing.assert_allclose(dx, expected[1], rtol=0, atol=2e-15)
    tail = x < -4
    np.testing.assert_allclose(
        dx[tail], expected[1][tail], rtol=2e-15 if exact else 6e-13, atol=1e-300
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_small_float(platform, implementation, approximate, dtype):
    """All 2^16 values, NaN and infinities too: the error is at most one unit in the last place."""
    dtype = jnp.dtype(dtype)
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    y, dx = value_and_derivative(x, approximate, implementation)
    with np.errstate(invalid="ignore"):
        wide = widen(x)
        expected = oracles.gelu_value(wide, approximate), oracles.gelu_derivative(wide, approximate)
        for actual, exact, floor in ((y, expected[0], 0.0), (dx, expected[1], 1 / 8)):
            assert_nan = np.isnan(actual) == np.isnan(exact)
            assert assert_nan.all(), x[~assert_nan]
            finite = np.isfinite(exact)
            np.testing.assert_array_equal(actual[~finite], exact[~finite])
            allowed = spacing(np.maximum(np.abs(exact), floor), dtype)
            if dtype == jnp.bfloat16:
                allowed = allowed + flushed(implementation)
            wrong = finite & ~(np.abs(actual - exact) <= allowed)
            assert not wrong.any(), (x[wrong][:5], actual[wrong][:5], exact[wrong][:5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values(platform, implementation, approximate, dtype):
    """`jax.nn.gelu` gives NaN here. The right values are 0 and x, with derivatives 0 and 1."""
    x = np.array([-np.inf, -1e38, -1e20, -100, 100, 1e20, 1e38, np.inf], dtype)
    y, dx = value_and_derivative(x, approximate, implementation)
    np.testing.assert_array_equal(y, np.where(x < 0, 0, x))
    np.testing.assert_array_equal(dx, np.where(x < 0, 0, 1))
    y, dx = value_and_derivative(np.array([np.nan, 0, -0.0], dtype), approximate, implementation)
    assert np.isnan([y[0], dx[0]]).all()
    np.testing.assert_array_equal(y[1:], 0)
    np.testing.assert_array_equal(dx[1:], 0.5)


WIDTHS = (1, 3, 5, 8, 17, 24, 40, 100, 129, 200, 257, 1000, 4097)


@pytest.mark.M6
@pytest.mark.G10
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("groups", [0, 3])
def test_widths(platform, groups, dtype):
    """Rows start anywhere, end in the middle of a vector, or are few. So do groups of rows."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(dtype)
    accum = np.float64 if dtype == np.float64 else np.float32
    lead = (groups,) if groups else ()
    shapes = list(itertools.product((1, 7, 300), WIDTHS))

    @functools.partial(jax.vmap if groups else lambda f: f)
    def gradients(dy: Any, x: Any, bias: Any) -> Any:
        op = functools.partial(jax_gradops.bias_gelu, implementation="ffi")
        y, pull = jax.vjp(op, x, bias)
        return (y, *pull(dy))

    arguments = [
        [
            rng.standard_normal((*lead, *s)).astype(dtype)
            for s in ((rows, features), (rows, features), (features,))
        ]
        for rows, features in shapes
    ]
    results = jax.jit(lambda all_: [gradients(*one) for one in all_])(arguments)
    results = jax.tree.map(np.asarray, results)  # NumPy slices them: JAX would compile the slicing
    for shape, one, result in zip(shapes, arguments, results, strict=True):
        for group in range(groups) if groups else [()]:
            wide = [widen(a[group]) for a in one]
            references = [
                oracles.bias_gelu(*wide[1:], approximate=True),
                *oracles.bias_gelu_vjp(*wide, approximate=True),
            ]
            for name, actual, reference in zip(
                "y dx dbias".split(), result, references, strict=True
            ):
                assert_matches(actual[group], reference, dtype, accum, f"{name} {shape}")


@jax.jit
@jax.vmap
def gradients_of_groups(dy: Any, x: Any, bias: Any) -> Any:
    """dx and dbias."""
    op = functools.partial(jax_gradops.bias_gelu, implementation="ffi")
    return jax.vjp(op, x, bias)[1](dy)


@pytest.mark.parametrize("shape", [(300, 3, 11), (100, 16, 129)], ids=str)
def test_many_groups(platform, shape, rng):
    """There are more groups than partial rows, or more than partial rows per row of a span."""
    dy, x = (rng.standard_normal(shape).astype(jnp.bfloat16) for _ in range(2))
    bias = rng.standard_normal(shape[::2]).astype(jnp.bfloat16)
    dx, dbias = gradients_of_groups(dy, x, bias)
    for group in range(shape[0]):
        references = oracles.bias_gelu_vjp(
            *(widen(a[group]) for a in (dy, x, bias)), approximate=True
        )
        for actual, reference in zip((dx, dbias), references, strict=True):
            assert_matches(actual[group], reference, x.dtype, np.float32, f"group {group}")


def test_more_groups_than_blocks(platform, rng):
    """A grid has at most 65,535 blocks in this direction: a block works on several groups."""
    groups, rows, features = 70_000, 32, 8
    dy, x = (rng.standard_normal((groups, rows, features), np.float32) for _ in range(2))
    bias = rng.standard_normal((groups, features), np.float32)
    dx, dbias = gradients_of_groups(dy, x, bias)
    expected = widen(dy) * oracles.gelu_derivative(widen(x) + widen(bias)[:, None], True)
    np.testing.assert_allclose(dx, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(dbias, expected.sum(1), rtol=2e-6, atol=2e-5)


@pytest.mark.M6
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape", [(200_003, 33), (6_601, 1_001), (7_801, 840), (1_951, 3_336)], ids=str
)
def test_many_rows(platform, shape, dtype, rng):
    """CUDA's blocks take complete spans of rows, or spans that end at a cache line."""
    if platform == "cpu":  # an eighth is enough for its threads
        shape = shape[0] // 8, shape[1]
    dtype = jnp.dtype(dtype)
    accum = np.float64 if dtype == np.float64 else np.float32
    dy, x = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    bias = rng.standard_normal(shape[1:]).astype(dtype)

    @jax.jit
    def gradients(dy: Any, x: Any, bias: Any) -> Any:
        y, pull = jax.vjp(functools.partial(jax_gradops.bias_gelu, implementation="ffi"), x, bias)
        return (y, *pull(2 * dy))  # dx takes over the buffer of 2 * dy

    wide = [widen(a) for a in (2 * dy, x, bias)]
    references = [
        oracles.bias_gelu(*wide[1:], approximate=True),
        *oracles.bias_gelu_vjp(*wide, approximate=True),
    ]
    for name, actual, reference in zip(
        "y dx dbias".split(), gradients(dy, x, bias), references, strict=True
    ):
        assert_matches(actual, reference, dtype, accum, name)


def test_long_sums(platform):
    """Rounding errors of the bias gradient do not grow with the number of rows."""
    dy = np.full((60_000, 256), 0.1, np.float32)
    x, bias = np.full(dy.shape, 20, np.float32), np.zeros(256, np.float32)  # the slope is 1
    op = functools.partial(jax_gradops.bias_gelu, implementation="ffi")
    (dbias,) = jax.jit(lambda dy, x: jax.vjp(functools.partial(op, x), bias)[1](dy))(dy, x)
    np.testing.assert_allclose(dbias, len(dy) * float(np.float32(0.1)), rtol=5e-6)


@pytest.mark.parametrize("shape", [(1_000_000, 17), (400_000, 256)], ids=str)
def test_exact_sums(platform, shape):
    """Sums of small integers. On a GPU, a thread has more rows than it adds up at a time."""
    rows, features = shape
    shape = (min(rows, 20_000_000 // features) if platform == "cpu" else rows, features)

    @jax.jit
    def dbias() -> Any:
        dy = small_integers(shape)
        x = jnp.full_like(dy, 20)  # the slope is 1
        f = functools.partial(jax_gradops.bias_gelu, x, implementation="ffi")
        return jax.vjp(f, jnp.zeros(features, jnp.float32))[1](dy)[0]

    assert_bitwise_equal(dbias(), sums_of_small_integers(shape).astype(np.float32))


def test_scalar_and_defaults(platform):
    """A scalar is an array too. The default is the tanh form, as in `jax.nn.gelu`."""
    x = jnp.float32(0.7)
    assert jax_gradops.gelu(x).shape == ()
    assert (
        jax_gradops.gelu(x) == jax_gradops.gelu(x, True) != jax_gradops.gelu(x, approximate=False)
    )
    np.testing.assert_allclose(jax_gradops.gelu(x), jax.nn.gelu(x), rtol=1e-6)
    assert jax.grad(jax_gradops.gelu)(x).shape == ()


# --- BiasGeluGrad_dX and BiasFastGeluGrad_dX ------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("approximate", [False, True])
def test_bias_gelu(platform, implementation, dtype, approximate, rng):
    """Each dtype of the bias, in shapes of all kinds."""
    dtype = jnp.dtype(dtype)
    examples = []
    for shape in (2, 3, 5), (64,), (9, 256):
        dy, x = ((2 * rng.standard_normal(shape)).astype(dtype) for _ in range(2))
        for bias_dtype in map(jnp.dtype, ("float16", "bfloat16", "float32")):
            examples.append((dy, x, rng.standard_normal(shape[-1:]).astype(bias_dtype)))
    f = functools.partial(
        backward.bias_gelu_backward, approximate=approximate, implementation=implementation
    )
    accum = jnp.float64 if dtype == jnp.float64 else jnp.float32
    results = jax.jit(lambda examples: [f(*e) for e in examples])(examples)
    for (dx, dbias), (dy, x, bias) in zip(results, examples, strict=True):
        rows = (-1, x.shape[-1])
        wide = (widen(dy).reshape(rows), widen(x).reshape(rows), widen(bias))
        expected = oracles.bias_gelu_vjp(*wide, approximate=approximate)
        assert dx.shape == x.shape
        what = f"x {list(x.shape)}, bias {bias.dtype}"
        assert_matches(np.reshape(dx, rows), expected[0], dtype, accum, f"dx, {what}")
        sums = expected[1]
        if dtype.itemsize == 2:  # the formula is exact enough for dx
            sums = sums._replace(error=sums.error + 1e-5 * sums.magnitude)
        assert_matches(dbias, sums, bias.dtype, accum, f"dbias, {what}")


def test_bias_gelu_is_the_derivative(platform, rng):
    """The results are bitwise `jax.vjp`'s. On a mesh and inside vmap they are equal numbers."""
    dy, x = (rng.standard_normal((16, 40)).astype(np.float32) for _ in range(2))
    bias = rng.standard_normal(40).astype(np.float32)

    def derivative(dy: Any, x: Any, bias: Any) -> Any:
        return jax.vjp(jax_gradops.bias_gelu, x, bias)[1](dy)

    f = functools.partial(backward.bias_gelu_backward, approximate=True)
    for a, e in zip(jax.jit(f)(dy, x, bias), jax.jit(derivative)(dy, x, bias), strict=True):
        assert_bitwise_equal(a, e)
    mapped = jax.vmap(f, in_axes=(0, 0, None))(dy[:, None], x[:, None], bias)
    np.testing.assert_allclose(mapped[0][:, 0], f(dy, x, bias)[0], rtol=1e-6)
    np.testing.assert_allclose(mapped[1], mapped[0][:, 0], rtol=1e-6)
    devices = mesh(platform, AxisType.Auto)
    spread = [jax.device_put(a, NamedSharding(devices, P("data"))) for a in (dy, x)]
    for a, e in zip(jax.jit(f)(*spread, bias), f(dy, x, bias), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_bias_gelu_in_place(platform, rng):
    """If dy is donated, dx takes its memory. There is no copy and no further array of this size."""
    shape = (4096, 256)
    dy, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    bias = jnp.zeros(shape[1], jnp.float32)
    f = functools.partial(backward.bias_gelu_backward, approximate=True, implementation="ffi")
    size = dy.nbytes

    donating = jax.jit(f, donate_argnums=0).lower(dy, x, bias).compile()
    memory = donating.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size
    call = next(line for line in donating.as_text().splitlines() if "bias_gelu_bwd" in line)
    assert "output_to_operand_aliasing={{0}: (0, {})}" in call
    assert "copy" not in donating.as_text()

    # An intermediate result gives its memory too. An argument that the caller keeps is copied.
    weight = jnp.ones((shape[1], shape[1]), jnp.float32)
    inner = jax.jit(lambda w, dy, *rest: f(dy @ w, *rest)).lower(weight, dy, x, bias).compile()
    assert "copy" not in inner.as_text()
    kept = np.array(dy)
    expected = jax.jit(f)(dy, x, bias)
    assert_bitwise_equal(dy, kept)
    for a, e in zip(donating(dy, x, bias), expected, strict=True):
        assert_bitwise_equal(a, e)
