"""`jax_gradops.fuse` on code as other projects write it: how they cast, mask, and share values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fuse import names, summary_of, wide

import jax_gradops

pytestmark = pytest.mark.newest_jax

D = 32


@pytest.fixture(autouse=True)
def promotion() -> Any:
    """Outside code relies on JAX's promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def equal(function: Any, *arrays: Any, limit: float = 2e-5) -> None:
    """Result and gradients of the fused function are the function's own, up to rounding."""
    floats = tuple(i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating))

    def loss(f):
        def of(*arrays):
            y = f(*arrays)
            w = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return jnp.sum(wide(y) * w)

        return jax.jit(jax.value_and_grad(of, floats))

    expected, got = loss(function)(*arrays), loss(jax_gradops.fuse(function))(*arrays)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        np.testing.assert_allclose(b, a, rtol=limit, atol=limit * (np.abs(a).max() + 1e-3))


def arrays_of(dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 6, D)), rng.standard_normal((3, D, D)) / 6
    return [
        jnp.asarray(x, dtype),
        jnp.asarray(rng.uniform(0.5, 1.5, D), jnp.float32),
        *jnp.asarray(w),
    ]


def normalize(x: Any, scale: Any) -> Any:
    """A layer norm that is float32 because of its scale."""
    mean = jnp.mean(wide(x), -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(wide(x)), -1, keepdims=True) - mean**2)
    return (wide(x) - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale)


def test_each_layer_rounds_the_norm():
    """A float32 norm of a bfloat16 array, which query, key and value each cast to bfloat16."""

    def attention(x, scale, q, k, v):
        y = normalize(x, scale)
        q, k, v = (y.astype(x.dtype) @ w.astype(x.dtype) for w in (q, k, v))
        return q * jnp.tanh(k) + v

    arrays = arrays_of(jnp.bfloat16)
    assert names(attention, *arrays) == ["layer_norm"]
    equal(attention, *arrays, limit=0.05)


def test_float32_norm_of_a_bfloat16_array_is_left():
    def pooled(x, scale):
        return jnp.mean(normalize(x, scale), 1)

    arrays = arrays_of(jnp.bfloat16)[:2]
    summary = summary_of(pooled, *arrays)
    assert not summary.replaced
    assert "float32" in summary.left[0].why and "bfloat16" in summary.left[0].why


def rms_by_einsum(x, scale):
    x32 = wide(x)
    y = (x32 * jax.lax.rsqrt(jnp.mean(jax.lax.square(x32), -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    )
    return jnp.einsum("...k,k->...k", y, scale.astype(x.dtype) + 1.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scale_by_einsum(dtype):
    """A product without a sum is a `dot_general` with a batch axis only."""
    x, scale, *_ = arrays_of(dtype)
    (found,) = summary_of(rms_by_einsum, x, scale).replaced
    assert found.op == "rms_norm" and "float32[32]" in found.shapes
    equal(rms_by_einsum, x, scale, limit=2e-5 if dtype == jnp.float32 else 0.05)


def test_outer_products_and_matrix_products_stay():
    def outer(x, scale):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return jnp.einsum("abc,d->abcd", y, scale)

    x, scale, w, *_ = arrays_of(jnp.float32)
    assert names(outer, x, scale) == ["rms_norm"]
    equal(outer, x, scale)
    by_matrix = lambda x, scale, w: rms_by_einsum(x, scale) @ w  # noqa: E731
    assert names(by_matrix, x, scale, w) == ["rms_norm"]


def one_hot_by_select(labels, classes, on, off):
    hot = labels[..., None] == jnp.arange(classes).reshape((1,) * labels.ndim + (-1,))
    return jax.lax.select(hot, jnp.full(hot.shape, on), jnp.full(hot.shape, off)).astype(
        jnp.float32
    )


def soft_cross_entropy(logits, labels, on=1.0, off=0.0):
    soft = one_hot_by_select(labels, logits.shape[-1], on, off)
    return -jnp.sum(soft * jax.nn.log_softmax(logits), -1)


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (0.9, 0.1 / 31)])
def test_one_hot_by_select(numbers):
    """One-hot labels by a selection between two numbers, as for smoothed labels."""

    def loss(logits, labels):
        return soft_cross_entropy(logits, labels, *numbers)

    logits = arrays_of(jnp.float32)[0]
    labels = jnp.asarray([[0, 3, 31, 5, 5, 1], [7, -1, 32, 2, 9, 8]], jnp.int32)
    assert names(loss, logits, labels) == ["softmax_cross_entropy_with_integer_labels"]
    equal(loss, logits, labels)


@pytest.mark.parametrize("numbers", [(0.9, 0.0), (0.0, 1.0), (2.0, 0.0)])
def test_other_soft_labels(numbers):
    def loss(logits, labels):
        return soft_cross_entropy(logits, labels, *numbers)

    logits = arrays_of(jnp.float32)[0]
    labels = jnp.asarray([[0, 3, 31, 5, 5, 1], [7, -1, 32, 2, 9, 8]], jnp.int32)
    assert not names(loss, logits, labels)
    equal(loss, logits, labels)


def test_statistics_over_devices_are_named():
    """Batch norm whose statistics are means over a mapped axis is left, and the report says so."""

    def batch_norm(x, scale):
        mean, square = jax.lax.pmean(jnp.stack([jnp.mean(x, 0), jnp.mean(x * x, 0)]), "batch")
        return (x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * scale

    def loss(x, scale):
        return jax.vmap(batch_norm, in_axes=(0, None), axis_name="batch")(x, scale)

    def of_shards(x, scale):
        found = []
        fused = jax_gradops.fuse(batch_norm, report=found.append)
        jax.eval_shape(jax.vmap(fused, in_axes=(0, None), axis_name="batch"), x, scale)
        return found[0]

    x, scale, *_ = arrays_of(jnp.float32)
    summary = of_shards(x, scale)
    assert not summary.replaced and "axis_name" in summary.left[0].why
    equal(loss, x, scale)


def test_random_streams_that_stay_as_they_are():
    """NNX lets a differentiated function read a random stream of the code around it."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.LayerNorm(D, rngs=nnx.Rngs(0)), nnx.Dropout(0.0))
    graph, params = nnx.split(model)
    x = arrays_of(jnp.float32)[0]

    def loss(params, rngs):
        assert isinstance(rngs, nnx.Rngs)
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    def step(params):
        rngs = nnx.Rngs(1)
        return jax.grad(jax_gradops.fuse(loss))(params, rngs.fork())

    expected = jax.grad(loss)(params, nnx.Rngs(1))
    got = jax.jit(step)(params)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_changed_random_streams_go_on():
    nnx = pytest.importorskip("flax.nnx")
    x = arrays_of(jnp.float32)[0]

    def drawn(function):
        rngs = nnx.Rngs(1)
        return function(rngs), int(rngs.default.count[...])

    def loss(rngs):
        return jnp.sum(jax.random.normal(rngs(), x.shape) * x)

    assert drawn(loss) == drawn(jax_gradops.fuse(loss)) and drawn(loss)[1] == 1
