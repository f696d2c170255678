"""Large results, which the CPU's kernels stream past the caches, and new memory.

Arrays of other tests are too small (`kStreamedBytes` in ffi/cpu/stream.h). But `tests/native`
builds kernels with sanitizers that stream small arrays too.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from fresh_process import run_python

import jax_gradops
from jax_gradops import _registry

pytestmark = pytest.mark.skipif("cpu" not in _registry.MODULES, reason="no kernels")
STREAMED_BYTES = 16 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEVELS = _registry.MODULES["cpu"].cpu_levels if "cpu" in _registry.MODULES else {}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def array(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(1 << 16, np.float32)
    return jnp.asarray(np.resize(values, shape), dtype)


def in_used_memory(f: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """Computes f(x, *others) into the memory of another array of x's size."""
    spare = x + 1  # the memory has been written
    place = spare.unsafe_buffer_pointer()
    reusing = jax.jit(lambda _, *a: f(*a), donate_argnums=0, keep_unused=True)
    result = reusing(spare, x, *others)
    assert result.unsafe_buffer_pointer() == place and result.nbytes > STREAMED_BYTES
    return result


def assert_same_in_pieces(
    f: Callable[..., jax.Array], pieces: int, *by_row: jax.Array, rest: tuple[Any, ...] = ()
) -> None:
    """Computes f, whose rows are independent, at once and in pieces too small for streaming."""
    large = in_used_memory(f, *by_row, *rest)
    parts = []
    for part in zip(*(np.array_split(np.asarray(a), pieces) for a in by_row), strict=True):
        parts.append(jax.jit(f)(*part, *rest))
        assert parts[-1].nbytes < STREAMED_BYTES
    assert_bitwise_equal(large, jnp.concatenate(parts))


@pytest.mark.parametrize("features", [1024, 333])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding(dtype, features):
    """Memory that has been written is streamed past the caches. New memory is not."""
    rows = STREAMED_BYTES // (features * np.dtype(jnp.dtype(dtype)).itemsize) + 5
    dy, tokens = array(1, (rows, features), dtype), jnp.arange(rows) ** 2 % rows // 3

    def gradient(dy: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax_gradops.backward.embedding_backward(dy, tokens, rows)

    streamed = in_used_memory(gradient, dy, tokens)
    assert_bitwise_equal(streamed, jax.jit(gradient)(dy, tokens))
    by_xla = jnp.zeros(dy.shape, "float32").at[tokens].add(dy.astype("float32"))
    np.testing.assert_allclose(streamed.astype("float32"), by_xla, rtol=0.01, atol=0.05)


# Rows begin at a cache line, at multiples of 8 bytes, or anywhere.
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
                # The bias's gradient is left out: it is a sum over all rows.
                return jax.vjp(f, x, *bias)[1](dy)[0]

            assert_same_in_pieces(forward, 3, x, rest=rest)
            assert_same_in_pieces(gradient, 3, x, dy, rest=rest)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_group_norm(dtype, axis):
    """Sample by sample. In float32, dx holds dz between the two sweeps."""
    shape = (5, 99, 99, 192) if axis == -1 else (5, 192, 99, 99)
    x, dy = (array(seed, shape, dtype) for seed in (1, 2))
    scale, bias = (array(seed, (192,), "float32") for seed in (3, 4))

    def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        norm = functools.partial(
            jax_gradops.group_norm, scale=scale, bias=bias, num_groups=6, axis=axis,
            activation="silu", implementation="ffi",
        )  # fmt: skip
        return jax.vjp(norm, x)[1](dy)[0]

    large = in_used_memory(gradient, x, dy)
    with jax.enable_x64(True):
        wide = jax.jit(gradient)(x.astype("float64"), dy.astype("float64"))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(large.astype("float64"), wide, rtol=tolerance, atol=tolerance)


# Rows begin anywhere in a cache line, or at its start.
@pytest.mark.parametrize("channels", [99, 128])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_norm(dtype, axis, channels):
    """Inference image by image. Forward with a residual, and backward, are compared with XLA."""
    shape = (45, 46, 47, channels) if axis == -1 else (45, channels, 46, 47)
    x, other = (array(seed, shape, dtype) for seed in (1, 2))
    mean, scale, bias = (array(seed, (channels,), "float32") for seed in (4, 5, 6))

    def inference(x: jax.Array) -> jax.Array:
        return jax_gradops.batch_norm_inference(
            x, scale, bias, mean=mean, var=mean * mean + 1, axis=axis, implementation="ffi"
        )

    assert_same_in_pieces(inference, 3, x)

    def forward(x: jax.Array, residual: jax.Array, implementation: Any) -> jax.Array:
        return jax_gradops.batch_norm(
            x, scale, bias, residual=residual, activation="relu", axis=axis,
            implementation=implementation,
        )[0]  # fmt: skip

    def gradient(x: jax.Array, dy: jax.Array, implementation: Any) -> jax.Array:
        def f(x: jax.Array) -> jax.Array:
            return jax_gradops.batch_norm(x, scale, bias, axis=axis, implementation=implementation)[
                0
            ]

        return jax.vjp(f, x)[1](dy)[0]

    eps = float(jnp.finfo(dtype).eps)
    for f in (forward, gradient):
        results = (
            in_used_memory(functools.partial(f, implementation="ffi"), x, other),
            jax.jit(functools.partial(f, implementation="xla"))(x, other),
        )
        ours, xla = (np.asarray(a, np.float32) for a in results)
        np.testing.assert_allclose(
            ours, xla, rtol=2 * eps, atol=1e-4 if dtype == "float32" else 4 * eps
        )


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages"
)
def test_new_memory(tmp_path):
    """Large results request huge pages. Small ones do not change the memory's settings."""
    found = run_python(
        """
import json, pathlib, re
import jax, jax.numpy as jnp
import jax_gradops

def is_advised(array):
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if ends := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(ends[1], 16) <= middle < int(ends[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()

@jax.jit
def results(x, other):
    ffi = {"implementation": "ffi"}
    scale = x[0]
    y, vjp = jax.vjp(lambda x: jax_gradops.layer_norm(x, scale, **ffi), x)
    added, total = jax_gradops.add_rms_norm(x, other, scale, **ffi)
    z, of_z = jax.vjp(
        lambda x, r: jax_gradops.batch_norm(x, scale, residual=r, activation="relu", **ffi)[0],
        x, other,
    )
    dx, dresidual = of_z(z)
    return {
        "gelu": jax_gradops.gelu(x, **ffi), "layer_norm": y, "dx of layer_norm": vjp(other)[0],
        "add_rms_norm": added, "sum": total,
        "batch_norm": z, "dx of batch_norm": dx, "dresidual": dresidual,
    }

found = {}
for rows in 1 << 9, 1 << 14:
    x = jnp.ones((rows, 1000))
    written = jax.block_until_ready(results(x, x + 1))
    found[rows] = {name: is_advised(y) for name, y in written.items()}
print(json.dumps(found))
""",
        tmp_path,
    )
    small, large = found.values()
    assert len(large) == 8 and all(large.values()) and not any(small.values()), found


@pytest.mark.parametrize("level", [level for level, usable in LEVELS.items() if usable][:-1])
def test_other_levels(level):
    """Levels that this process does not use: their stores have other sizes."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command.append("--all-combinations")
    environment = os.environ | {_registry.CPU_LEVEL: level}
    some = "(test_norms or test_gelu) and 1002 or test_batch_norm and float32--1-128"
    done = subprocess.run(
        [*command, "-k", some],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout + done.stderr
