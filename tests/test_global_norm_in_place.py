"""In-place clipping: the leaves' memory, InplaceClipGradNorm, and trees of very many leaves."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal, assert_global_norm, widen

from jax_gradops.backward import inplace_clip_by_global_norm

pytestmark = pytest.mark.newest_jax


def tree_of(*sizes: int) -> list[jax.Array]:
    """Leaves that own their memory. Their norm is sqrt(sum of sizes)."""
    return [jnp.ones(size, jnp.float32) + 0 for size in sizes]


def test_in_place(platform):
    """Donated trees and intermediate trees are clipped in their memory, without copies."""
    f = functools.partial(inplace_clip_by_global_norm, implementation="ffi")
    tree = tree_of(30_000, 7, 100_000)
    size = sum(leaf.nbytes for leaf in tree)
    compiled = jax.jit(f, donate_argnums=0).lower(tree, 1.0).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size
    assert " copy(" not in compiled.as_text()
    call = next(line for line in compiled.as_text().splitlines() if "jax_gradops.scale" in line)
    assert "{0}: (0, {}), {1}: (1, {}), {2}: (2, {})" in call

    def gradients(weights: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])))(weights)

    inner = jax.jit(lambda weights, x: f(gradients(weights, x), 1.0))
    weights, x = [jnp.ones((300, 200), jnp.float32)] * 2, jnp.ones((64, 300), jnp.float32)
    weights[1] = weights[1].T
    assert " copy(" not in inner.lower(weights, x).compile().as_text()
    for limit in (1.0, 1e9):
        tree = tree_of(30_000, 7, 100_000)
        places = [leaf.unsafe_buffer_pointer() for leaf in tree]
        clipped, norm = compiled(tree, limit)
        assert [leaf.unsafe_buffer_pointer() for leaf in clipped] == places
        np.testing.assert_allclose(clipped[2], min(1, limit / float(norm)), rtol=1e-6)


def test_what_is_kept_is_not_changed(platform, rng):
    """A tree does not change if it is not donated, eagerly or under jit, or is needed later."""
    tree = [jnp.asarray(rng.standard_normal(n), jnp.float32) for n in (1000, 3)]
    before = [np.array(leaf) for leaf in tree]
    f = functools.partial(inplace_clip_by_global_norm, implementation="ffi")
    for run in (f, jax.jit(f)):
        clipped, _ = run(tree, 1.0)
        assert np.linalg.norm(np.concatenate(clipped)) < 1.001
        jax.tree.map(assert_bitwise_equal, tree, before)
    both = jax.jit(lambda tree: (f(tree, 1.0)[0], [x + 1 for x in tree]), donate_argnums=0)
    clipped, more = both([leaf + 0 for leaf in tree])
    for c, m, b in zip(clipped, more, before, strict=True):
        np.testing.assert_array_equal(m, b + 1)
        np.testing.assert_allclose(c, b / np.sqrt(sum((x**2).sum() for x in before)), rtol=1e-5)


WRITE_PROTECTED = """
import ctypes, mmap, sys
import jax, jax.numpy as jnp, numpy as np
from jax_gradops.backward import inplace_clip_by_global_norm

clip = jax.jit(inplace_clip_by_global_norm, donate_argnums=0)
leaf = jnp.ones(1 << 20, jnp.float32) + 0
compiled = clip.lower([leaf], 1.0).compile()
limit = jnp.float32(sys.argv[1])
begin, page = leaf.unsafe_buffer_pointer(), mmap.PAGESIZE
first = -(-begin // page) * page
length = (begin + leaf.nbytes - first) // page * page
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
assert libc.mprotect(first, length, 1) == 0  # PROT_READ
(clipped,), norm = compiled([leaf], limit)
jax.block_until_ready(clipped)
assert libc.mprotect(first, length, 3) == 0  # PROT_READ | PROT_WRITE
assert clipped.unsafe_buffer_pointer() == begin and norm == 1024
print("nothing was written")
"""


@pytest.mark.parametrize("limit", [2000.0, 1.0])
def test_nothing_is_written(limit):
    """If nothing is clipped, not even equal values are written. The memory is protected."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", WRITE_PROTECTED, str(limit)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if limit == 1.0:  # shows that the test detects a write
        assert process.returncode == -signal.SIGSEGV, process.stderr
    else:
        assert "nothing was written" in process.stdout, process.stderr


@pytest.mark.C7
def test_operator(platform, rng):
    """InplaceClipGradNorm: maps a sequence to a sequence, with all dtypes in one call."""
    names = ("float16", "bfloat16", "float32", "float64")
    sizes = (1, 17, 4096, 65_537, 0)
    gradients = [
        (3 * rng.standard_normal(size)).astype(jnp.dtype(name)) for name in names for size in sizes
    ]
    wide = [widen(g) for g in gradients]
    for max_norm in (1.0, 1e9):
        clipped, norm = inplace_clip_by_global_norm(gradients, max_norm)
        total = np.sqrt(sum(np.sum(g * g) for g in wide))
        factor = max_norm / max(total, 1e-6) if total > max_norm else 1.0
        np.testing.assert_allclose(norm, total, rtol=1e-12)
        assert isinstance(clipped, list) and len(clipped) == len(gradients)
        for g, c, x in zip(gradients, clipped, wide, strict=True):
            assert (c.dtype, c.shape) == (g.dtype, g.shape)
            info = jnp.finfo(g.dtype)
            rtol = max(float(info.eps), 1e-15)  # for float64, the norm has an error too
            atol = float(info.smallest_subnormal)
            np.testing.assert_allclose(widen(c), x * factor, rtol=rtol, atol=atol)


def test_in_place_many_leaves(platform):
    """More leaves than one native call takes, of all dtypes and sizes."""
    dtypes = [jnp.dtype(d) for d in ("float32", "bfloat16", "float16")]
    leaves = [np.full(i % 71, 1 + i % 3).astype(dtypes[i % 3]) for i in range(800)]
    clip = jax.jit(inplace_clip_by_global_norm)
    clipped, norm = clip(leaves, 1.0)
    assert_global_norm(norm, *leaves)
    for c, leaf in zip(clipped, leaves, strict=True):
        assert c.dtype == leaf.dtype
        np.testing.assert_allclose(widen(c), widen(leaf) / float(norm), rtol=2**-8)


def test_in_place_groups(platform, rng):
    """Under vmap, each example has its own factor. Unclipped examples do not change."""
    x = rng.standard_normal((300, 7, 33)).astype(np.float32)
    y = rng.standard_normal((300, 5)).astype(jnp.bfloat16)
    limits = np.where(np.arange(300) % 2, 1.0, np.inf).astype(np.float32)
    clipped, norms = jax.jit(jax.vmap(inplace_clip_by_global_norm))([x, y], limits)
    for leaf, c in zip((x, y), clipped, strict=True):
        assert_bitwise_equal(c[::2], leaf[::2])
        factors = np.asarray(1 / norms).reshape(-1, *[1] * (leaf.ndim - 1))
        np.testing.assert_allclose(widen(c[1::2]), (widen(leaf) * factors)[1::2], rtol=2**-8)
