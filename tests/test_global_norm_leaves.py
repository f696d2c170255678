"""Global norm and clipping of leaves that are complex, big-endian, or no gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_bitwise_equal, assert_global_norm

import jax_gradops
from jax_gradops import clip_tree_by_global_norm


def tree_of(rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
    z = (rng.standard_normal((5, 7)) + 1j * rng.standard_normal((5, 7))).astype(dtype)
    return {"z": z, "x": rng.standard_normal(3).astype(np.float32), "none": np.zeros(0, dtype)}


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex(platform, clip, dtype, rng):
    """The norm is the norm of the absolute values. Each leaf keeps its dtype."""
    tree = tree_of(rng, dtype)
    clipped, norm = clip(tree, 0.5)
    assert_global_norm(norm, tree["z"].real, tree["z"].imag, tree["x"])
    for name, leaf in tree.items():
        assert (clipped[name].dtype, clipped[name].shape) == (leaf.dtype, leaf.shape)
        np.testing.assert_allclose(clipped[name], leaf * (0.5 / float(norm)), rtol=1e-6)
    kept, _ = clip(tree, 1e3)
    jax.tree.map(assert_bitwise_equal, kept, tree)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_norm_of_integers(dtype):
    """As Optax's. A clip of integers is an error in both."""
    leaf = np.array([3, 0, 100], dtype)
    for tree in ([leaf], [leaf, np.float32([0.5, -2])], [leaf, 4]):
        expected = np.sqrt(sum(np.sum(np.square(np.float64(a))) for a in tree))
        norm = jax_gradops.global_norm(tree)
        wide = any(np.asarray(a).dtype.itemsize == 8 for a in tree)
        assert norm.dtype == (np.float64 if wide else np.float32)
        np.testing.assert_allclose(norm, expected, rtol=1e-6)


def test_range_of_complex(platform, clip):
    """Squares, or the norm, exceed float32's range."""
    for value, limit in ((1e30, 1.0), (3e38, 1.0), (1e-30, 1e-31)):
        (clipped,), _ = clip([np.full(2, value * (1 + 1j), np.complex64)], limit)
        np.testing.assert_allclose(clipped, limit * (1 + 1j) / 2, rtol=1e-6)


@pytest.mark.newest_jax
def test_gradient_of_complex(platform, clip, rng):
    """Gradients follow JAX's convention. They equal gradients of Optax in complex128."""
    tree = tree_of(rng, "complex64")
    weights = tree_of(rng, "complex64")

    def loss(clip: Any, tree: Any) -> Any:
        pairs = zip(jax.tree.leaves(clip(tree)), jax.tree.leaves(weights), strict=True)
        return sum(jnp.sum(jnp.real(c) * w.real + jnp.imag(c) * w.imag) for c, w in pairs)

    actual = jax.grad(lambda tree: loss(lambda t: clip(t, 0.5)[0], tree))(tree)
    with jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: x.astype(np.result_type(x, np.float64)), tree)
        by_optax = optax.clip_by_global_norm(0.5)
        expected = jax.grad(lambda t: loss(lambda t: by_optax.update(t, None)[0], t))(wide)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_big_endian(platform, clip):
    """NumPy arrays with the opposite byte order, which JAX refuses."""
    for dtype in (">f4", ">f2", ">f8", ">c8"):
        leaf = np.array([3, 4]).astype(dtype)
        (clipped,), norm = clip([leaf], 2.5)
        assert norm == 5 and clipped.dtype == leaf.dtype.newbyteorder("=")
        np.testing.assert_allclose(clipped, [1.5, 2], rtol=1e-3)
    assert jax_gradops.rms_norm(np.array([3, 4], ">f4")).dtype == jnp.float32


@pytest.mark.newest_jax
@pytest.mark.C11
def test_float0(platform):
    """Gradients of integers (float0). The advice in the error message works."""
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(
        {"w": np.array([1.5, 2.0]), "i": np.arange(2)}
    )
    with pytest.raises(TypeError, match=r"tree\['i'\].*float0.*Put None in its place"):
        jax_gradops.global_norm(grads)
    assert jax_gradops.global_norm(grads | {"i": None}) == 5


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_max_norm_of_one_element(platform, clip, shape):
    """max_norm may be an array, as in Optax: known, on the device, or traced. Gradients fit it."""
    x = np.array([3, 4], np.float32)
    limit = np.full(shape, 2.5, np.float32)
    f = jax.jit(lambda limit: clip([x], limit)[0][0])
    for clipped in (clip([x], limit)[0][0], clip([x], jnp.asarray(limit))[0][0], f(limit)):
        np.testing.assert_allclose(clipped, [1.5, 2], rtol=1e-6)
    gradient = jax.grad(lambda limit: f(limit).sum())(limit)
    np.testing.assert_allclose(gradient, np.full(shape, 1.4), rtol=1e-6)
    transform = jax_gradops.clip_by_global_norm(limit)
    np.testing.assert_allclose(transform.update([x], None)[0][0], [1.5, 2], rtol=1e-6)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        clip_tree_by_global_norm([x], -np.ones(shape))
