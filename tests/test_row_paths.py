"""The CUDA norms' kernels with every plan that tests can force, against float64 and each other.

test_row_plans.py tests which plan a row gets by default.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, assert_matches, widen
from limits import HAS_LIMITS, limited

import jax_gradops
from jax_gradops import _oracles as oracles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_LIMITS, reason="needs the CUDA module for tests"),
]


def gpus() -> list[Any]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


FORCED = {
    "as chosen": {},
    "sm_80": {"architecture": 80},
    "streamed": {"stream": True},
    "small clusters": {"max_threads": 32},
    "clusters of up to 8": {"max_threads": 64, "max_cluster": 8},
    "one row in flight": {"max_stages": 1},
    "two rows in flight": {"max_stages": 2},
    "2 vectors": {"vectors": 2},
    "3 vectors": {"vectors": 3},
    "4 vectors": {"vectors": 4},
}


@pytest.fixture(params=FORCED)
def forced(request: pytest.FixtureRequest) -> Iterator[str]:
    with limited(**FORCED[request.param]):
        yield request.param


@functools.cache
def norm(op: str, residuals: str) -> Any:
    """Maps dy, x, residual and parameters to y and all gradients."""

    @jax.jit
    def f(dy: Any, x: Any, *parameters: Any) -> Any:
        call = functools.partial(
            getattr(jax_gradops, op), epsilon=1e-2, residuals=residuals, implementation="ffi"
        )
        result, pull = jax.vjp(call, x, *parameters)
        return result, pull(dy)

    return f


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_paths(forced: str, op: str, dtype: str) -> None:
    """Each forced path against float64, at widths on both sides of every change of plan."""
    if not gpus():
        pytest.skip("needs a CUDA device")
    rng = np.random.default_rng(3)
    centered = op == "layer_norm"
    widths = (1, 6, 7, 10, 14, 15, 17, 33, 40, 64, 129, 256, 257, 479, 769, 1000, 1025)
    widths += (2560, 3000, 4096, 4097, 5120, 8200, 12_288)
    widths += (8193, 16_385, 32_768)
    with jax.default_device(gpus()[0]):
        for features, rows in itertools.product(widths, (3, 1000)):
            if rows == 1000 and features > 2000 and features not in (2560, 4096, 5120):
                continue
            dy, x = (0.3 + rng.standard_normal((2, rows, features))).astype(dtype)
            scale, bias = (1 + rng.standard_normal((2, features)) / 4).astype(np.float32)
            parameters = (scale, bias) if centered else (scale,)
            y, (dx, *gradients) = norm(op, "input")(dy, x, *parameters)
            wide = [widen(a) for a in (dy, x, *parameters)]
            settings = {"epsilon": 1e-2, "centered": centered}
            expected = oracles.norm(*wide[1:], **settings)
            what = f"{forced}: {op} {dtype}{[rows, features]}"
            accum = np.float64 if dtype == "float64" else np.float32
            assert_matches(y, expected, x.dtype, accum, what)
            of_x, *of_parameters = oracles.norm_vjp(*wide[:3], **settings)
            assert_matches(dx, of_x, x.dtype, accum, what + ": dx")
            for gradient, reference in zip(gradients, of_parameters, strict=False):
                assert_matches(gradient, reference, np.float32, accum, what + ": dscale, dbias")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_variants(forced: str, dtype: str) -> None:
    """Compares with XLA: a residual and its bias, backward from the output, other dtypes."""
    if not gpus():
        pytest.skip("needs a CUDA device")
    rng = np.random.default_rng(4)
    tolerance = {"bfloat16": 0.03, "float32": 3e-5, "float64": 1e-12}[dtype]
    with jax.default_device(gpus()[0]):
        for features, residuals in itertools.product(
            (7, 33, 64, 301, 768, 1000, 4097, 8200), ("input", "output")
        ):
            dy, ds, x, residual = rng.standard_normal((4, 37, features)).astype(dtype)
            scale = (1.5 + rng.random(features)).astype(jnp.bfloat16)
            bias = rng.standard_normal(features).astype(np.float16)
            residual_bias = rng.standard_normal(features).astype(np.float32)
            results = {}
            for implementation in ("ffi", "xla"):

                def call(x: Any, residual: Any, scale: Any, bias: Any, residual_bias: Any) -> Any:
                    return jax_gradops.add_layer_norm(
                        *(x, residual, scale, bias),
                        residual_bias=residual_bias,
                        residuals=residuals,  # noqa: B023 - called in this turn
                        scale_offset=0.5,
                        implementation=implementation,  # noqa: B023
                    )

                out, pull = jax.vjp(call, x, residual, scale, bias, residual_bias)
                results[implementation] = (out, pull((jnp.asarray(dy), jnp.asarray(ds))))
            ours, theirs = map(jax.tree.leaves, (results["ffi"], results["xla"]))
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                a, b = widen(a), widen(b)
                error = np.linalg.norm(a - b) / np.linalg.norm(b)
                limit = tolerance if a.ndim == 2 else max(tolerance, 0.01)
                assert error < limit, f"{forced}, {[37, features]}, {residuals}: {error}"


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16, 32])
def test_short_rows(op: str, dtype: str, threads: int) -> None:
    """A thread that has up to four short rows computes what it computes for one row, bitwise."""
    if not gpus():
        pytest.skip("needs a CUDA device")
    rng = np.random.default_rng(5)
    features = 16 // jnp.dtype(dtype).itemsize * threads
    rows = 2_400_001 // threads  # so many that a thread has four rows; most blocks are full
    x, residual = rng.standard_normal((2, rows, features), np.float32).astype(dtype)
    parameters = rng.standard_normal((3, features)).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="added")
    def f(x: Any, residual: Any, *, added: bool) -> Any:
        scale, bias, residual_bias = parameters
        given = (scale, bias) if op == "layer_norm" else (scale,)
        if not added:
            return getattr(jax_gradops, op)(x, *given, implementation="ffi")
        add = getattr(jax_gradops, f"add_{op}")
        return add(x, residual, *given, residual_bias=residual_bias, implementation="ffi")

    with jax.default_device(gpus()[0]):
        for added in (False, True):
            all_rows = f(x, residual, added=added)
            for some in (slice(0, 999), slice(rows // 2, rows // 2 + 999), slice(rows - 999, rows)):
                few_rows = f(x[some], residual[some], added=added)
                for a, b in zip(*map(jax.tree.leaves, (all_rows, few_rows)), strict=True):
                    assert_bitwise_equal(np.asarray(a)[some], b, f"{some}, added: {added}")


@pytest.mark.parametrize("features", [4096, 4097])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_large_arrays(dtype: str, stages: int, features: int) -> None:
    """Compares y and dx with XLA. Here memory is busy, so that copies arrive late."""
    if not gpus():
        pytest.skip("needs a CUDA device")

    @functools.partial(jax.jit, static_argnums=2)
    def f(dy: Any, x: Any, implementation: str) -> Any:
        call = functools.partial(jax_gradops.layer_norm, implementation=implementation)
        y, pull = jax.vjp(call, x, jnp.ones(features))
        return y, pull(dy)[0]

    with jax.default_device(gpus()[0]):
        dy, x = jax.random.normal(jax.random.key(6), (2, 16_384, features)).astype(dtype)
        expected = f(dy, x, "xla")
        with limited(max_stages=stages):
            found = f(dy, x, "ffi")
        for ours, xla in zip(found, expected, strict=True):
            difference = jnp.abs(ours.astype(jnp.float32) - xla.astype(jnp.float32))
            # Of bfloat16 numbers below 8, neighbours are 1/32 or less apart.
            assert difference.max() < (0.04 if dtype == "bfloat16" else 1e-4)


def test_rings_do_not_change_results() -> None:
    """The rings' depth and the architecture change no bit of y and dx, if a block holds a row."""
    if not gpus():
        pytest.skip("needs a CUDA device")
    rng = np.random.default_rng(5)
    with jax.default_device(gpus()[0]):
        for features in (64, 1000, 4096):
            dy, x = rng.standard_normal((2, 501, features)).astype(np.float32)
            expected = None
            for forced in ({}, {"max_stages": 1}, {"max_stages": 2}, {"architecture": 80}):
                with limited(**forced):
                    y, (dx,) = norm("layer_norm", "input")(dy, x)
                expected = expected or (y, dx)
                assert_bitwise_equal(y, expected[0], f"{forced}")
                assert_bitwise_equal(dx, expected[1], f"{forced}")


def test_few_rows_of_groups() -> None:
    """A team gets rows of one group after another. Each group gets only one block."""
    if not gpus():
        pytest.skip("needs a CUDA device")
    rng = np.random.default_rng(5)
    groups, rows, features = shape = (100, 10, 1024)
    dy, x = rng.standard_normal((2, *shape)).astype(jnp.bfloat16)
    scale, bias = rng.standard_normal((2, features), np.float32)

    def gradients(dy: Any, x: Any) -> Any:
        return norm("layer_norm", "input")(dy, x, scale, bias)[1]

    with jax.default_device(gpus()[0]):
        dx, dscale, dbias = jax.vmap(gradients)(dy, x)
        # More rows, so that more teams work.
        many = [np.concatenate([a.reshape(-1, features)] * 2) for a in (dy, x)]
        assert_bitwise_equal(dx, gradients(*many)[0][: groups * rows].reshape(shape))
        for group in range(0, groups, 33):
            wide = [widen(a) for a in (dy[group], x[group], scale)]
            _, *expected = oracles.norm_vjp(*wide, epsilon=1e-2, centered=True)
            for actual, reference in zip((dscale, dbias), expected, strict=False):
                assert_matches(actual[group], reference, np.float32, np.float32, f"group {group}")
