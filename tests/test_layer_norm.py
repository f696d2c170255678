"""Layer norm and RMS norm. Rows such as N3 are those of the catalogue of other projects' bugs."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from comparing import assert_bitwise_equal, assert_matches, widen
from conformance import RowOpTests

import jax_gradops

# Not the default: then where it is added makes a difference (N14).
EPSILON = 1e-2


class TestLayerNorm(RowOpTests):
    kernels = ("layer_norm_fwd", "layer_norm_bwd")
    parameters = 2

    def op(self, x, scale, bias, *, implementation=None):
        return jax_gradops.layer_norm(
            x, scale, bias, epsilon=EPSILON, implementation=implementation
        )

    def oracle(self, x, scale, bias):
        return oracles.norm(x, scale, bias, epsilon=EPSILON, centered=True)

    def oracle_vjp(self, dy, x, scale, bias):
        return oracles.norm_vjp(dy, x, scale, epsilon=EPSILON, centered=True)


class TestRmsNorm(RowOpTests):
    kernels = ("rms_norm_fwd", "rms_norm_bwd")
    parameters = 1

    def op(self, x, scale, *, implementation=None):
        return jax_gradops.rms_norm(x, scale, epsilon=EPSILON, implementation=implementation)

    def oracle(self, x, scale):
        return oracles.norm(x, scale, epsilon=EPSILON, centered=False)

    def oracle_vjp(self, dy, x, scale):
        return oracles.norm_vjp(dy, x, scale, epsilon=EPSILON, centered=False)[:2]


# --- Options: compared with the oracle of the flattened problem ----------------------------------


@pytest.fixture(params=["layer_norm", "rms_norm"])
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def run(op: str, dy: Any, parameters: dict[str, Any], **options: Any) -> dict[str, Any]:
    """y and the gradients of x and of the parameters that are not None, in one program."""
    given = {k: v for k, v in parameters.items() if v is not None}

    @jax.jit
    def f(dy: Any, given: dict[str, Any]) -> dict[str, Any]:
        y, pull = jax.vjp(lambda given: getattr(jax_gradops, op)(**given, **options), given)
        return {"y": y, **pull(dy)[0]}

    return f(dy, given)


def check(op: str, dy: Any, x: Any, scale: Any = None, bias: Any = None, **options: Any) -> None:
    """Compares y and all gradients with the oracle."""
    parameters = {"x": x, "scale": scale} | ({"bias": bias} if op == "layer_norm" else {})
    results = run(op, dy, parameters, **options)

    begin = options.get("begin_norm_axis", -1) % x.ndim
    inner = x.shape[begin:]
    flat = (math.prod(x.shape[:begin]), math.prod(inner))

    def flat_parameter(p: Any) -> Any:
        return None if p is None else np.broadcast_to(widen(p), inner).reshape(-1)

    settings = {
        "epsilon": options.get("epsilon", 1e-6),
        "centered": op == "layer_norm",
        "scale_offset": options.get("scale_offset", 0.0),
    }
    wide_x, wide_dy = widen(x).reshape(flat), widen(dy).reshape(flat)
    y = oracles.norm(wide_x, flat_parameter(scale), flat_parameter(bias), **settings)
    dx, dscale, dbias = oracles.norm_vjp(wide_dy, wide_x, flat_parameter(scale), **settings)
    for name, reference in {"y": y, "x": dx, "scale": dscale, "bias": dbias}.items():
        if name not in results:
            continue
        like = parameters.get(name, x)
        value, magnitude = (
            a.reshape(inner if name in ("scale", "bias") else x.shape) for a in reference[:2]
        )
        extra = tuple(range(value.ndim - like.ndim))  # a parameter of the last axis alone
        reference = oracles.Reference(value.sum(extra), magnitude.sum(extra), reference.reduced)
        accum = jnp.promote_types(x.dtype, jnp.float32)
        what = f"{op}, {x.dtype}{list(x.shape)}, {options}: {name}"
        assert_matches(results[name], reference, like.dtype, accum, what)


def example(rng: Any, shape: Any, dtype: Any = np.float32, inner: Any = None) -> list[Any]:
    """dy, x, scale and bias."""
    inner = shape[-1:] if inner is None else inner
    dy, x = 0.3 + rng.standard_normal(shape), 0.5 + 1.5 * rng.standard_normal(shape)
    scale, bias = 1 + 0.5 * rng.standard_normal(inner), rng.standard_normal(inner)
    return [a.astype(dtype) for a in (dy, x, scale, bias)]


@pytest.mark.parametrize("has_scale", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_absent_parameters_and_many_rows(platform, op, implementation, has_scale, has_bias, rng):
    """G6, M5: more rows than a grid may have blocks in y; each parameter absent."""
    if op == "rms_norm" and has_bias:
        return
    for shape in [(5, 33), (65_535, 2), (65_536, 3), (70_001, 4)]:
        dy, x, scale, bias = example(rng, shape)
        check(op, dy, x, scale if has_scale else None, bias if has_bias else None,
              epsilon=EPSILON, implementation=implementation)  # fmt: skip


@pytest.mark.parametrize("begin", [-1, -2, 1, 0, -4, 3])
def test_begin_norm_axis(platform, op, implementation, begin, rng):
    """G4, G5; parameters of all normalised axes, and of the last one alone."""
    shape = (2, 3, 4, 5)
    for inner in {shape[begin:], shape[-1:]}:
        check(op, *example(rng, shape, inner=inner), begin_norm_axis=begin, epsilon=EPSILON,
              implementation=implementation)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_epsilon(platform, op, implementation, dtype, rng):
    """N14: var + epsilon under the root; also where epsilon is far larger than the variance."""
    for epsilon in (0.0, 1e-12, 1e-6, 1.0, 1e3):
        check(op, *example(rng, (5, 33), dtype), epsilon=epsilon, implementation=implementation)


def test_scale_offset(platform, op, implementation, rng):
    """G8: also in the backward pass."""
    for offset in (1.0, -0.5):
        check(op, *example(rng, (5, 33)), scale_offset=offset, implementation=implementation)


# --- Values that are hard on the numerics --------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "std", "shape", "dtype"),
    [
        (1e4, 1, (64, 1024), "float32"),
        (1e4, 1, (33, 4097), "float32"),
        (2e3, 1, (64, 4), "float32"),  # N1
        (2e3, 1, (64, 1024), "float32"),
        (100, 0.01, (64, 1000), "float32"),  # N2
        (1449, 0.5, (64, 768), "float32"),  # N5
        (5, 0.1, (64, 768), "bfloat16"),  # N8
        (1e8, 1, (64, 1024), "float64"),
    ],
    ids=str,
)
def test_large_mean(platform, implementation, mean, std, shape, dtype, rng):
    """Forward and backward as accurate as for mean 0, to the tolerance of every other test."""
    dy, x, scale, bias = example(rng, shape)
    x = mean + std * rng.standard_normal(shape)
    dtype = jnp.dtype(dtype)
    check("layer_norm", *(a.astype(dtype) for a in (dy, x, scale, bias)),
          implementation=implementation)  # fmt: skip


def test_consecutive_integers(platform, implementation):
    """N3."""
    x = np.arange(40_000, 40_004, dtype=np.float32).reshape(1, 4)
    check("layer_norm", np.ones_like(x) + np.eye(4, dtype=np.float32)[:1], x,
          implementation=implementation)  # fmt: skip


def test_constant_rows(platform, implementation, dtype, rng):
    """N4, N7: exactly the bias, at any magnitude and width; and gradients without NaN."""
    values = [0, 1, 1 / 3, -1234.0, 1e-7, 5e4, -6e4, 1e-20, 1e18, -1e30]
    values = np.array(values[:7] if dtype == jnp.float16 else values).astype(dtype)
    for features in (1, 3, 127, 1000, 4097):
        x = np.repeat(values[:, None], features, 1)
        dy, _, scale, bias = example(rng, x.shape, dtype)
        parameters = {"x": x, "scale": scale, "bias": bias}
        results = run("layer_norm", dy, parameters, implementation=implementation)
        assert_bitwise_equal(results["y"], np.broadcast_to(bias, x.shape), f"{features} features")
        assert np.isfinite(widen(results["x"])[:7]).all()
        assert not widen(results["scale"]).any()


def test_zero_variance_without_epsilon(platform, implementation):
    """As the formula says, 0 * inf: NaN in that row and in no other."""
    x = np.array([[2, 2, 2, 2], [1, 2, 3, 4]], np.float32)
    y = jax_gradops.layer_norm(x, epsilon=0, implementation=implementation)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_large_half_precision(platform, op, implementation, rng):
    """N11, N12: sums of squares of float16 that float16 cannot hold."""
    for size in (7e3, 6e4):
        dy, _, scale, bias = example(rng, (8, 1024), np.float16)
        x = (size * np.where(rng.random((8, 1024)) < 0.5, -1, 1)).astype(np.float16)
        dy = (dy.astype(np.float32) * 100).astype(np.float16)  # dx is a tiny fraction of it
        check(op, dy, x, scale, bias, implementation=implementation)


@pytest.mark.parametrize("size", [1e-4, 1e-10, 1e-20, 1e-30])
def test_tiny_rows(platform, op, implementation, size, rng):
    """N15: under a large epsilon they are just scaled."""
    dy, x, scale, _ = example(rng, (8, 129))
    bias = np.zeros_like(scale)
    check(op, dy, x * np.float32(size), scale, bias, implementation=implementation)


@pytest.mark.parametrize("size", [1e-14, 1e-10, 1e10, 1e16])
def test_scale_invariance(platform, op, implementation, size, rng):
    """N9, N10: without epsilon, far from 1."""
    dy, x, scale, bias = example(rng, (8, 129))
    check(op, dy, x * np.float32(size), scale, bias, epsilon=0.0, implementation=implementation)


def test_overflowing_variance(platform, op, implementation, rng):
    """N9: where squares overflow, 1/sqrt(inf) = 0 remains: rows of the bias, with no NaN."""
    _, x, scale, bias = example(rng, (8, 129))
    parameters = (scale, bias) if op == "layer_norm" else (scale,)
    y = getattr(jax_gradops, op)(x * np.float32(1e30), *parameters, implementation=implementation)
    expected = bias if op == "layer_norm" else np.zeros_like(bias)
    np.testing.assert_array_equal(y, np.broadcast_to(expected, x.shape))


def test_exact_sums(platform, implementation, rng):
    """The gradient of the bias is a plain sum: of small integers, it is exact."""
    dy = rng.integers(-2, 3, (4099, 129)).astype(np.float32)
    _, x, scale, bias = example(rng, dy.shape)
    results = run("layer_norm", dy, {"x": x, "scale": scale, "bias": bias},
                  implementation=implementation)  # fmt: skip
    assert_bitwise_equal(results["bias"], dy.sum(0))


@hypothesis.given(
    shape=st.sampled_from([(1, 1), (5, 2), (3, 64), (7, 129)]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    log_std=st.floats(-4, 2),
    mean=st.floats(-10, 10),
    seed=st.integers(0, 2**32),
)
def test_any_values(shape, dtype, log_std, mean, seed):
    rng = np.random.default_rng(seed)
    dy, x, scale, bias = example(rng, shape, jnp.dtype(dtype))
    x = (10.0**log_std * (mean + rng.standard_normal(shape))).astype(x.dtype)
    for op in ("layer_norm", "rms_norm"):
        check(op, dy, x, scale, bias, epsilon=1e-6, implementation="ffi")


# --- Errors --------------------------------------------------------------------------------------

X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "exception", "message"),
    [
        (np.float32(1), {}, ValueError, r"x must have at least one axis.*scalar"),
        (X.astype(int), {}, TypeError, r"x must have dtype.*float64.*got int"),
        (X.astype(bool), {}, TypeError, r"x must have dtype.*got bool"),
        (X.astype(complex), {}, TypeError, r"x must have dtype.*got complex"),
        ("x", {}, TypeError, r"x must be an array.*str"),
        (None, {}, TypeError, r"x must be an array.*NoneType"),
        (X, {"scale": np.ones(3)}, ValueError, r"scale must have shape.*\(4,\).*got \(3,\)"),
        (X, {"scale": np.ones((1, 4))}, ValueError, r"scale must have shape.*got \(1, 4\)"),
        (X, {"scale": np.float32(1)}, ValueError, r"scale must have shape.*got \(\)"),
        (X, {"scale": np.ones(4, int)}, TypeError, r"scale must have dtype.*got int"),
        (
            X,
            {"scale": np.ones(3), "begin_norm_axis": 1},
            ValueError,
            r"scale must have shape.*\(3, 4\).*\(4,\).*got \(3,\)",
        ),
        (X, {"begin_norm_axis": 3}, ValueError, r"begin_norm_axis must be in \[-3, 3\).*got 3"),
        (X, {"begin_norm_axis": -4}, ValueError, r"begin_norm_axis must be in.*got -4"),
        (X, {"begin_norm_axis": 1.0}, TypeError, r"begin_norm_axis must be an integer.*1\.0"),
        (X, {"begin_norm_axis": True}, TypeError, r"begin_norm_axis must be an integer.*True"),
        (X, {"begin_norm_axis": (1, 2)}, TypeError, r"begin_norm_axis must be an integer"),
        (X, {"epsilon": -1e-6}, ValueError, r"epsilon must be finite and >= 0.*-1e-06"),
        (X, {"epsilon": math.nan}, ValueError, r"epsilon must be finite and >= 0.*nan"),
        (X, {"epsilon": math.inf}, ValueError, r"epsilon must be finite and >= 0.*inf"),
        (X, {"epsilon": "1"}, TypeError, r"epsilon must be a number.*'1'"),
        (X, {"epsilon": True}, TypeError, r"epsilon must be a number.*True"),
        (X, {"epsilon": np.ones(2)}, TypeError, r"epsilon must be a number.*\(2,\)"),
        (X, {"scale_offset": math.nan}, ValueError, r"scale_offset must be finite.*nan"),
        (X, {"scale_offset": None}, TypeError, r"scale_offset must be a number.*None"),
        (X, {"implementation": "cuda"}, ValueError, r"implementation must be.*None, got 'cuda'"),
    ],
)  # fmt: skip
def test_errors(op, x, options, exception, message):
    with pytest.raises(exception, match=rf"^{op}: {message}"):
        getattr(jax_gradops, op)(x, **options)


def test_errors_of_layer_norm_alone():
    with pytest.raises(ValueError, match=r"^layer_norm: bias must have shape.*\(4,\).*got \(5,\)"):
        jax_gradops.layer_norm(X, np.ones(4), np.ones(5))
    with pytest.raises(TypeError, match=r"epsilon must be a static number, got a traced"):
        jax.jit(lambda e: jax_gradops.layer_norm(X, epsilon=e))(1e-6)
    with pytest.raises(TypeError, match="positional"):
        jax_gradops.layer_norm(X, None, None, -1)


def test_numbers_of_any_type_are_the_same_option(platform, op):
    """They reach the handler, which is strict, as one NumPy type."""
    f = functools.partial(getattr(jax_gradops, op), X + np.arange(4, dtype=np.float32))
    expected = f(epsilon=1.0)
    for one in (1, np.float64(1), np.float32(1), np.int64(1), jnp.float32(1), np.array(1.0)):
        assert_bitwise_equal(f(epsilon=one), expected)
