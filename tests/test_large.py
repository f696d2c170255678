"""More than 2^31 elements: offsets are 64-bit. On GPUs only, where it takes moments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gradops

FEATURES = 4096
ROWS = 2**31 // FEATURES + 3
LAST = 5

OPS = {
    "layer_norm": lambda x, p: jax_gradops.layer_norm(x, p, p),
    "rms_norm": lambda x, p: jax_gradops.rms_norm(x, p),
    "bias_gelu": lambda x, p: jax_gradops.bias_gelu(x, p),
    "gelu": lambda x, p: jax_gradops.gelu(x),
}


@pytest.fixture
def device():
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("no CUDA device")
    with jax.default_device(device), jax_gradops.use_implementation("ffi"):
        yield


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("op", OPS)
def test_last_rows(device, op: str) -> None:
    """Rows do not depend on each other, so the last ones alone must give the same bits."""
    function = OPS[op]

    @jax.jit
    def run(x, p):
        y, vjp = jax.vjp(function, x, p)
        dx, _ = vjp(x)
        return y[-LAST:], dx[-LAST:], y[:LAST], dx[:LAST]

    x = jax.random.normal(jax.random.key(0), (ROWS, FEATURES), jnp.bfloat16)
    p = jnp.linspace(0.5, 2, FEATURES, dtype=jnp.float32)
    y, dx, y_first, dx_first = run(x, p)
    for rows, outputs in ((x[-LAST:], (y, dx)), (x[:LAST], (y_first, dx_first))):
        alone, vjp = jax.vjp(function, rows, p)
        for actual, expected in zip(outputs, (alone, vjp(rows)[0]), strict=True):
            np.testing.assert_array_equal(actual, expected)
            assert np.abs(np.asarray(expected, np.float32)).max() > 0.1


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
def test_norm_of_a_large_leaf(device) -> None:
    x = jnp.zeros((ROWS, FEATURES), jnp.bfloat16).at[-1, -1].set(3).at[0, 0].set(4)
    assert float(jax_gradops.global_norm([x, jnp.full(1, 12.0)])) == 13
