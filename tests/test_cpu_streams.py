"""Results that the CPU's kernels store past its caches: large ones, in memory that has been used.

Other tests' arrays are smaller (`kStreamedBytes` in ffi/cpu/stream.h), but `tests/native` builds
kernels, with sanitizers, that also stream small ones.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal

import jax_gradops
from jax_gradops import _registry

pytestmark = pytest.mark.skipif("cpu" not in _registry.MODULES, reason="no kernels")
STREAMED_BYTES = 16 << 20
LEVELS = _registry.MODULES["cpu"].cpu_levels if "cpu" in _registry.MODULES else {}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def array(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(1 << 16, np.float32)
    return jnp.asarray(np.resize(values, shape), dtype)


def in_used_memory(f: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """f(x, *others), stored where another array as large as x has been."""
    spare = x + 1  # its memory has been written
    place = spare.unsafe_buffer_pointer()
    reusing = jax.jit(lambda _, *a: f(*a), donate_argnums=0, keep_unused=True)
    result = reusing(spare, x, *others)
    assert result.unsafe_buffer_pointer() == place and result.nbytes > STREAMED_BYTES
    return result


def assert_same_in_pieces(
    f: Callable[..., jax.Array], pieces: int, *by_row: jax.Array, rest: tuple[Any, ...] = ()
) -> None:
    """Of f, whose rows depend on no other rows: large, and in pieces too small to be streamed."""
    large = in_used_memory(f, *by_row, *rest)
    parts = []
    for part in zip(*(np.array_split(np.asarray(a), pieces) for a in by_row), strict=True):
        parts.append(jax.jit(f)(*part, *rest))
        assert parts[-1].nbytes < STREAMED_BYTES
    assert_bitwise_equal(large, jnp.concatenate(parts))


# Rows that begin with a line of the cache, at its multiples of 8 bytes, and anywhere.
@pytest.mark.parametrize("features", [2048, 1002, 333])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_norms(dtype, features):
    rows = STREAMED_BYTES // (features * np.dtype(jnp.dtype(dtype)).itemsize) + 5
    with jax.enable_x64(dtype == "float64"):
        x, dy = (array(seed, (rows, features), dtype) for seed in (1, 2))
        accum = "float64" if dtype == "float64" else "float32"
        scale, bias = (array(seed, (features,), accum) for seed in (3, 4))

        def gradient(x: jax.Array, dy: jax.Array, norm: Any, *parameters: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: norm(x, *parameters), x)[1](dy)[0]

        layer_norm, rms_norm = jax_gradops.layer_norm, jax_gradops.rms_norm
        assert_same_in_pieces(layer_norm, 3, x, rest=(scale, bias))
        assert_same_in_pieces(rms_norm, 3, x, rest=(scale,))
        assert_same_in_pieces(
            lambda x, dy, *p: gradient(x, dy, layer_norm, *p), 3, x, dy, rest=(scale, bias)
        )
        assert_same_in_pieces(
            lambda x, dy, *p: gradient(x, dy, rms_norm, *p), 3, x, dy, rest=(scale,)
        )


@pytest.mark.parametrize("features", [2048, 1002, 333, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_gelu(dtype, features):
    rows = STREAMED_BYTES // (features * np.dtype(jnp.dtype(dtype)).itemsize) + 5
    with jax.enable_x64(dtype == "float64"):
        x, dy = (array(seed, (rows, features), dtype) for seed in (1, 2))
        bias = array(3, (features,), "float64" if dtype == "float64" else "float32")

        for rest, approximate in itertools.product(((bias,), ()), (True, False)):

            def forward(x: jax.Array, *bias: jax.Array, approximate: bool = approximate) -> Any:
                if bias:
                    return jax_gradops.bias_gelu(x, *bias, approximate=approximate)
                return jax_gradops.gelu(x, approximate=approximate)

            def gradient(x: jax.Array, dy: jax.Array, *bias: jax.Array, f: Any = forward) -> Any:
                return jax.vjp(f, x, *bias)[1](dy)[0]  # the bias's gradient is summed, too

            assert_same_in_pieces(forward, 3, x, rest=rest)
            assert_same_in_pieces(gradient, 3, x, dy, rest=rest)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_norm(dtype, axis):
    """Forward by given statistics, image by image; backward against XLA's operations."""
    shape = (45, 46, 47, 99) if axis == -1 else (45, 99, 46, 47)
    x, dy = (array(seed, shape, dtype) for seed in (1, 2))
    mean, scale, bias = (array(seed, (99,), "float32") for seed in (4, 5, 6))

    def inference(x: jax.Array) -> jax.Array:
        return jax_gradops.batch_norm_inference(x, mean, mean * mean + 1, scale, bias, axis=axis)

    assert_same_in_pieces(inference, 3, x)

    def gradient(x: jax.Array, dy: jax.Array, implementation: Any) -> jax.Array:
        def f(x: jax.Array) -> jax.Array:
            return jax_gradops.batch_norm(x, scale, bias, axis=axis, implementation=implementation)[
                0
            ]

        return jax.vjp(f, x)[1](dy)[0]

    results = (
        in_used_memory(lambda x, dy: gradient(x, dy, "ffi"), x, dy),
        jax.jit(lambda x, dy: gradient(x, dy, "xla"))(x, dy),
    )
    ours, xla = (np.asarray(a, np.float32) for a in results)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        ours, xla, rtol=2 * eps, atol=1e-4 if dtype == "float32" else 4 * eps
    )


@pytest.mark.parametrize("level", [level for level, usable in LEVELS.items() if usable][:-1])
def test_other_levels(level):
    """Those that this process does not use: their stores have other sizes."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {_registry.CPU_LEVEL: level}
    done = subprocess.run(
        [*command, "-k", "(test_norms or test_gelu) and 1002"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr
