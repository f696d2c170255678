"""Derivatives, vmap and sharding of global norm and clipping, also for a traced `max_norm`."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_global_norm, assert_matches, widen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from transformations import all_errors_checked

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import clip_tree_by_global_norm

pytestmark = pytest.mark.newest_jax


@pytest.mark.C6
def test_gradients_at_the_edges(platform, clip):
    """Gradients are finite at norm 0, where the derivative is 0, and at norm == max_norm."""
    weights = np.array([1, 2, 3], np.float32)

    def loss(x: Any, limit: Any) -> Any:
        return jnp.sum(clip([x], limit)[0][0] * weights)

    zero = np.zeros(3, np.float32)
    for limit in (0.0, 1.0):
        np.testing.assert_array_equal(jax.grad(loss)(zero, limit), weights)
    for limit in (np.inf, 1e300):
        np.testing.assert_array_equal(jax.grad(loss)(weights, limit), weights)
    x = np.array([3, 0, 4], np.float32)  # norm 5
    for limit in (4.0, 5.0, 6.0):
        (expected,) = oracles.clip_vjp([widen(weights)], widen(x), max_norm=limit)
        assert_matches(jax.grad(loss)(x, limit), expected, np.float32, np.float32, f"limit {limit}")
    for power in (1, 2):
        norm_gradient = jax.grad(lambda x, p=power: jax_gradops.global_norm([x]) ** p)
        np.testing.assert_array_equal(norm_gradient(zero), zero)


@pytest.mark.C3
@pytest.mark.parametrize("size", [1e30, 1e-25])
def test_derivatives_far_from_one(platform, clip, size):
    """Squares of the norm exceed float32's range. First and second derivatives do not."""
    x = np.array([3, 4], np.float32) * np.float32(size)
    projection = np.array([[0.64, -0.48], [-0.48, 0.36]])  # onto the orthogonal complement of x
    jacobian = jax.jacrev(lambda x: clip([x], size)[0][0])(x)
    np.testing.assert_allclose(jacobian, projection / 5, rtol=1e-5)
    hessian = jax.hessian(lambda x: jax_gradops.global_norm([x]))(x)
    np.testing.assert_allclose(hessian, projection / (5 * np.float64(size)), rtol=1e-5)


def test_error_checks(platform, clip):
    optax = pytest.importorskip("optax")

    def step(x: Any) -> Any:
        (clipped,), norm = clip([x], 1.0)
        optimizer = jax_gradops.clip_by_global_norm(1.0)
        updates, state = optimizer.update([x], optimizer.init([x]))
        (of_optax,), _ = optax.clip_by_global_norm(1.0).update([x], None)
        return jnp.stack([clipped, updates[0], of_optax]), (norm, state.global_norm)

    with all_errors_checked():
        for f in (step, jax.jit(step)):
            (clipped, norms), pull = jax.vjp(f, jnp.array([3.0, 4.0]))
            np.testing.assert_allclose(clipped, [[0.6, 0.8]] * 3, rtol=1e-6)
            np.testing.assert_allclose(norms, [5, 5], rtol=1e-6)
            (gradient,) = pull((jnp.array([[1.0, 0], [0, 0], [-1, 0]]), (jnp.zeros(()),) * 2))
            np.testing.assert_allclose(gradient, [0, 0], atol=1e-6)


@pytest.mark.parametrize("in_axes", [(None, 0), (0, None), (0, 0)], ids=str)
def test_vmap_over_max_norm(platform, clip, in_axes, rng):
    leaves = rng.standard_normal((5, 7)).astype(np.float32)
    limits = np.linspace(0, 5, 5).astype(np.float32)
    leaves, limits = (
        a if axis == 0 else a[2] for a, axis in zip((leaves, limits), in_axes, strict=True)
    )
    clipped = jax.jit(jax.vmap(lambda x, limit: clip([x], limit)[0][0], in_axes))(leaves, limits)
    for i, actual in enumerate(clipped):
        x, limit = (
            a[i] if axis == 0 else a for a, axis in zip((leaves, limits), in_axes, strict=True)
        )
        (expected,) = oracles.clip(widen(x), max_norm=float(limit))
        assert_matches(actual, expected, np.float32, np.float32, f"limit {limit}")


def test_gradient_to_max_norm(platform, clip):
    x = np.array([3, 4], np.float32)
    gradient = jax.grad(lambda limit: clip([x], limit)[0][0].sum())
    np.testing.assert_allclose([gradient(1.0), gradient(9.0)], [7 / 5, 0], rtol=1e-6)


def test_traced_max_norm(platform, clip):
    tree = {"w": np.array([3, 4], np.float32)}
    f = jax.jit(lambda tree, limit: clip(tree, limit)[0]["w"])
    for limit in (1, 2.5, np.float64(2.5), jnp.float32(2.5), np.array(2), jnp.array(10.0)):
        expected = np.minimum(1, float(limit) / 5) * tree["w"]
        np.testing.assert_allclose(f(tree, limit), expected, rtol=1e-6)
        np.testing.assert_allclose(clip(tree, limit)[0]["w"], expected, rtol=1e-6)


def test_per_example(platform, clip, rng):
    """vmap clips each example by its own norm. All examples share one leaf."""
    tree = {"x": rng.standard_normal((5, 3, 4)), "y": rng.standard_normal((2, 5))}
    tree = {k: v.astype(np.float32) for k, v in tree.items()}
    shared = rng.standard_normal(3).astype(np.float32)

    def f(tree: Any) -> Any:
        return clip(tree | {"shared": shared}, 1.0)

    clipped, norms = jax.jit(jax.vmap(f, in_axes=({"x": 0, "y": 1},)))(tree)
    for i in range(5):
        leaves = tree["x"][i], tree["y"][:, i], shared
        assert_global_norm(norms[i], *leaves)
        reference = oracles.clip(*map(widen, leaves), max_norm=1.0)
        for name, expected in zip(("x", "y", "shared"), reference, strict=True):
            assert_matches(clipped[name][i], expected, np.float32, np.float32, name)


SPECS = {
    "a": P("data"),
    "b": P(None, "model"),
    "c": P(),
    "d": P(("data", "model")),
    "e": P("model", "data"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_tree(platform, clip, kind, rng):
    """Leaves are sharded differently. A replicated leaf counts once. Devices send only scalars."""
    devices = mesh(platform, kind)
    tree = {k: rng.standard_normal((16, 8)).astype(np.float32) for k in SPECS}
    with jax.set_mesh(devices):
        arrays = {k: jax.device_put(v, NamedSharding(devices, SPECS[k])) for k, v in tree.items()}
        compiled = jax.jit(lambda tree: clip(tree, 1.0)).lower(arrays).compile()
        clipped, norm = compiled(arrays)
    assert_global_norm(norm, *tree.values())
    references = oracles.clip(*map(widen, tree.values()), max_norm=1.0)
    for k, reference in zip(SPECS, references, strict=True):
        assert_matches(clipped[k], reference, np.float32, np.float32, k)
        assert clipped[k].sharding.is_equivalent_to(arrays[k].sharding, 2)
    if clip.keywords["implementation"] == "ffi":
        text = compiled.as_text()
        assert set(collectives(text)) <= {"all-reduce"}
        reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
        # On GPUs, XLA puts the three sums in arrays.
        assert reduced and all(set(re.findall(r"\[(.*?)\]", r)) <= {"", "3"} for r in reduced)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(platform, clip, check_vma, rng):
    """Inside shard_map, an op gets one device's part of the tree and clips this part."""
    devices = mesh(platform, AxisType.Auto)
    n = devices.shape["data"]
    x = rng.standard_normal((8, 4)).astype(np.float32)
    shared = rng.standard_normal(3).astype(np.float32)

    def local(x: Any, shared: Any) -> Any:
        (clipped, _), norm = clip((x, shared), 1.0)
        return clipped, norm[None]

    mapped = jax.shard_map(
        local, mesh=devices, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma
    )
    clipped, norms = jax.jit(mapped)(x, shared)
    for i, part in enumerate(np.split(x, n)):
        assert_global_norm(norms[i], part, shared)
        reference, _ = oracles.clip(widen(part), widen(shared), max_norm=1.0)
        assert_matches(np.split(clipped, n)[i], reference, np.float32, np.float32, f"device {i}")


def test_vmap_over_many_examples(platform, rng):
    """Scratch memory does not grow with the number of examples: each needs one partial sum."""
    x = rng.standard_normal((65_536, 3)).astype(np.float32)
    norm = functools.partial(clip_tree_by_global_norm, max_norm=1.0, implementation="ffi")
    norms = jax.jit(jax.vmap(lambda x: norm([x])[1])).lower(x).compile()
    assert norms.memory_analysis().temp_size_in_bytes < 8e6
    np.testing.assert_allclose(norms(x), np.linalg.norm(widen(x), axis=1), rtol=1e-6)
