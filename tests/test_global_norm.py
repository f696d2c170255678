"""Global norm and clip-by-global-norm. Marks such as C1: `catalogue.py`."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from comparing import assert_bitwise_equal, assert_matches, widen
from conformance import RANKS, WIDE, OpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

import jax_gradops
from jax_gradops import clip_tree_by_global_norm
from jax_gradops.backward import inplace_clip_by_global_norm

LIMIT = 0.5


class TestGlobalNorm(OpTests):
    """Of a tree of two leaves."""

    kernels = ("sum_of_squares",)
    parameters = 1

    forward_mode_of_kernels = True

    def op(self, x, p, *, implementation=None):
        with jax_gradops.use_implementation(implementation):
            return jax_gradops.global_norm({"x": x, "p": [p, None]})

    def oracle(self, x, p):
        return oracles.global_norm(x, p)

    def oracle_vjp(self, dy, x, p):
        return oracles.global_norm_vjp(dy, x, p)

    def sizes(self, implementation, dtype):
        shapes = super().sizes(implementation, dtype)
        return shapes if implementation == "xla" else [*shapes[::5], *RANKS, WIDE]

    def output_shape(self, shape):
        return ()

    def output_dtype(self, *operands):
        return self.accum_dtype(*operands)

    def accum_dtype(self, *operands):
        return jnp.dtype("float64" if "float64" in {a.dtype.name for a in operands} else "float32")


class TestClip(TestGlobalNorm):
    """The first leaf after clipping; the second one takes part through the norm."""

    # One for the norm; one, or one for each mesh axis, for the inner product of dy and x.
    all_reduces = (2, 3)

    def op(self, x, p, *, implementation=None):
        clipped, _ = clip_tree_by_global_norm((x, p), LIMIT, implementation=implementation)
        return clipped[0]

    def oracle(self, x, p):
        return oracles.clip(LIMIT, x, p)[0]

    def oracle_vjp(self, dy, x, p):
        return oracles.clip_first_vjp(dy, LIMIT, x, p)

    def output_shape(self, shape):
        return shape

    def output_dtype(self, *operands):
        return operands[0].dtype

    def gradient_accum_dtype(self, *operands):
        # By way of the norm and past it: JAX adds up the two in the leaf's dtype.
        return operands[0].dtype


class TestInplaceClip(TestClip):
    """The same by the native scaling."""

    variant = True
    kernels = ("sum_of_squares", "scale")
    forward_kernels = 2
    # One for both; two, and one for each mesh axis.
    all_reduces = (1, 3)

    def op(self, x, p, *, implementation=None):
        clipped, _ = inplace_clip_by_global_norm((x, p), LIMIT, implementation=implementation)
        return clipped[0]


@pytest.fixture(params=["xla", "ffi", "in place"])
def clip(request):
    """clip_tree_by_global_norm with each implementation, and inplace_clip_by_global_norm."""
    if request.param == "in place":
        return functools.partial(inplace_clip_by_global_norm, implementation="ffi")
    return functools.partial(clip_tree_by_global_norm, implementation=request.param)


def check_norm(norm: Any, *leaves: Any) -> None:
    float64 = any(leaf.dtype == np.float64 for leaf in leaves)
    dtype = np.dtype("float64" if float64 else "float32")
    assert_matches(norm, oracles.global_norm(*map(widen, leaves)), dtype, dtype, "norm")


# --- The norm ------------------------------------------------------------------------------------


@pytest.mark.C2
@pytest.mark.C3
@pytest.mark.C8
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(17.0, "float16"), (6e4, "float16"), (6e-8, "float16"), (1e20, "float32"), (1e-25, "float32"),
     (1e35, "float32"), (1e-36, "float32"), (1e15, "bfloat16"), (1e-30, "bfloat16"),
     (1e150, "float64")],
)  # fmt: skip
def test_range(platform, clip, value, dtype):
    """Squares that the leaves' dtype, or float32, cannot hold."""
    leaf = np.full((300, 100), value).astype(jnp.dtype(dtype))
    (clipped,), norm = clip([leaf], 1.0)
    check_norm(norm, leaf)
    np.testing.assert_allclose(widen(clipped), 30_000**-0.5 if norm >= 1 else value, rtol=1e-2)


@pytest.mark.C3
def test_gradient_of_a_norm_beyond_float16(platform, implementation):
    """The norm is float32's, 300 · 100 elements of 300; its gradient is not 0."""
    leaf = np.full((300, 100), 300, np.float16)
    with jax_gradops.use_implementation(implementation):
        norm, gradient = jax.value_and_grad(lambda x: jax_gradops.global_norm([x]))(leaf)
    np.testing.assert_allclose(norm, 300 * 30_000**0.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.float16(30_000**-0.5), rtol=1e-3)


@pytest.mark.C2
def test_range_in_one_tree(platform, clip):
    """Leaves of all magnitudes; each may be the one that counts."""
    sizes = [1e-36, 1e-20, 1.0, 1e20, 1e35]
    for n in range(1, len(sizes) + 1):
        leaves = [np.full(7, s, np.float32) for s in sizes[:n]]
        check_norm(clip(leaves, 1.0)[1], *leaves)


@pytest.mark.C4
def test_grouping(platform, clip, rng):
    """The norm does not depend on how elements are spread over leaves."""
    x = rng.standard_normal(30_000).astype(jnp.bfloat16)
    norms = [float(clip(np.split(x, n), 1.0)[1]) for n in (1, 10, 60)]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-6)


def test_exact(platform, implementation):
    with jax_gradops.use_implementation(implementation):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            tree = {"a": jnp.full((3, 3), 2, dtype), "b": jnp.full(7, -4, dtype), "c": 1}
            tree["c"] = jnp.array(-4.0, dtype)  # 36 + 112 + 16 = 164
            norm = jax_gradops.global_norm(tree | {"d": jnp.full(5, 1, dtype)})
            assert norm == 13 and norm.dtype == ("float64" if dtype == "float64" else "float32")


def test_python_scalars(platform):
    clipped, norm = clip_tree_by_global_norm({"a": 3.0, "b": np.float32(4)}, 1)
    assert norm == 5 and norm.dtype == jnp.float64
    np.testing.assert_allclose(clipped["a"], 0.6)


@pytest.mark.C7
@pytest.mark.C8
def test_many_leaves(platform):
    """3,000 in one call: of all dtypes and sizes, some without elements."""
    dtypes = [jnp.dtype(d) for d in ("float32", "bfloat16", "float16")]
    norm = jax.jit(lambda leaves: jax_gradops.global_norm(leaves))
    for sizes in ((1, 2, 3), (1e15, 1e18, 6e4)):
        leaves = [np.full(i % 5, sizes[i % 3]).astype(dtypes[i % 3]) for i in range(3000)]
        check_norm(norm(leaves), *leaves)


def test_large_leaves(platform, clip, rng):
    """Larger than what one thread or block takes; odd sizes."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        leaves = [
            rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in (300_007, (1001, 999), 3)
        ]
        check_norm(clip(leaves, 1.0)[1], *leaves)


def test_float64_norm_of_16_bit_leaves(platform, clip, rng):
    """A few squares may be added up in float32 only where the norm is float32 itself."""
    leaves = [rng.standard_normal(4097).astype(jnp.dtype(d)) for d in ("float16", "bfloat16")]
    check_norm(clip([*leaves, np.ones(1)], 1.0)[1], *leaves, np.ones(1))


# --- What passes through, and what is not clipped ------------------------------------------------


@pytest.mark.C7
def test_mixed_dtypes(platform, clip, rng):
    """Each leaf comes back in its dtype, and the norm is float64 if one of them is."""
    names = ("float16", "bfloat16", "float32")
    for dtypes in (names, (*names, "float64")):
        leaves = [rng.standard_normal((5, 7)).astype(jnp.dtype(d)) for d in dtypes]
        clipped, norm = clip(leaves, 1.0)
        check_norm(norm, *leaves)
        accum = norm.dtype
        for leaf, actual, reference in zip(
            leaves, clipped, oracles.clip(1.0, *map(widen, leaves)), strict=True
        ):
            assert_matches(actual, reference, leaf.dtype, accum, leaf.dtype.name)


def test_structure(platform, clip):
    """None, MaskedNode, scalars and leaves without elements pass through."""
    tree = {
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((3, 0), jnp.bfloat16),
        "nested": [jnp.float32(3), (np.float32(4), {})],
    }
    clipped, norm = clip(tree, 1.0)
    assert jax.tree.structure(clipped) == jax.tree.structure(tree)
    assert (clipped["empty"].shape, clipped["empty"].dtype) == ((3, 0), jnp.bfloat16)
    assert norm == 5
    np.testing.assert_allclose(clipped["nested"][0], 0.6, rtol=1e-6)
    assert clipped["nested"][0].shape == ()


@pytest.mark.parametrize(
    "tree", [{}, None, [None], [jnp.zeros((0, 3))], optax.MaskedNode()], ids=str
)
def test_empty_tree(platform, clip, tree):
    for max_norm in (0.0, 1.0):
        clipped, norm = clip(tree, max_norm)
        assert jax.tree.structure(clipped) == jax.tree.structure(tree)
        assert norm == 0 and norm.shape == ()


def test_not_clipped_is_bitwise_unchanged(platform, clip, dtype):
    """Subnormals and -0 too."""
    tiny = jnp.finfo(dtype).smallest_subnormal
    leaf = np.array([0.25, -0.0, 0.0, tiny, -tiny, 1 / 3], dtype)
    clipped, norm = clip({"w": leaf}, 1.0)
    assert 0 < norm < 1
    assert_bitwise_equal(clipped["w"], leaf)
    assert_bitwise_equal(clip({"w": leaf}, np.inf)[0]["w"], leaf)


@pytest.mark.C1
def test_zero_norm(platform, clip):
    """Never 0/0."""
    leaf = np.array([0.0, -0.0], np.float32)
    for max_norm in (0.0, 1.0):
        (clipped,), norm = clip([leaf], max_norm)
        assert norm == 0
        assert_bitwise_equal(clipped, leaf)


def test_limits(platform, clip, rng):
    """max_norm 0 makes everything 0; tiny norms are clipped with the true quotient."""
    leaf = rng.standard_normal(100).astype(np.float32)
    assert not clip([leaf], 0.0)[0][0].any()
    norm = np.linalg.norm(widen(leaf))
    small = leaf * np.float32(1e-10 / norm)
    np.testing.assert_allclose(clip([small], 1e-12)[0][0], small * 1e-2, rtol=1e-5)
    for limit in (norm * 0.99, norm * 1e-3, norm * 1e-6):
        clipped, _ = clip([leaf], limit)
        assert np.linalg.norm(widen(clipped[0])) <= limit * (1 + 1e-6)


@pytest.mark.C5
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nonfinite(platform, clip, value, dtype):
    """As Optax, or all leaves 0."""
    tree = {"a": np.array([1, value, -2]), "b": np.array([[3.0, 0.0]])}
    tree = {k: v.astype(jnp.dtype(dtype)) for k, v in tree.items()}
    clipped, norm = clip(tree, 1.0)
    with np.errstate(invalid="ignore"):
        expected, _ = optax.clip_by_global_norm(1.0).update(
            jax.tree.map(lambda x: x.astype(np.float64), tree), optax.EmptyState()
        )
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(widen(a), e), clipped, expected)
    assert np.isnan(norm) if np.isnan(value) else norm == np.inf
    if clip.func is inplace_clip_by_global_norm:
        return
    zeros, _ = clip(tree, 1.0, nonfinite="zero")
    assert not any(map(jnp.any, jax.tree.leaves(zeros)))
    assert jax.tree.map(lambda x: x.dtype, zeros) == jax.tree.map(lambda x: x.dtype, tree)


def test_as_optax(platform, clip, rng):
    for size in (1e-3, 1.0, 1e3):
        tree = {k: size * rng.standard_normal((5, 7)).astype(np.float32) for k in "abc"}
        expected, _ = optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())
        clipped, norm = clip(tree, 1.0)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), clipped, expected)
        np.testing.assert_allclose(norm, optax.tree.norm(tree), rtol=1e-6)


def test_rounded_once(platform):
    """16-bit leaves beside a float64 one: no number of the dtype is nearer to the product."""
    bits = np.arange(2**11, 2**14, dtype=np.uint16)  # normal numbers
    for dtype in ("float16", "bfloat16"):
        x = bits.view(jnp.dtype(dtype))
        limit = 1e5 * (1 + 2.0**-20) / 2
        (clipped, _), norm = inplace_clip_by_global_norm(
            [x, np.full(3, 1e5)], limit, implementation="ffi"
        )
        exact = widen(x) * (limit / np.float64(norm))
        clipped = np.asarray(clipped)
        for step in (1, -1):
            neighbour = (clipped.view(np.uint16).astype(int) + step).astype(np.uint16)
            off = np.abs(widen(neighbour.view(x.dtype)) - exact)
            assert np.all(np.abs(widen(clipped) - exact) <= off)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_once_beside_a_tie(platform, dtype):
    """A product so near to the middle of two numbers that float32 has no number between."""
    eps = float(jnp.finfo(dtype).eps)
    leaves = [np.ones(3, jnp.dtype(dtype)), np.ones(1)]  # of norm 2
    for factor in (0.5 + eps / 4 + 2.0**-40, 0.5 + 3 * eps / 4 - 2.0**-40):
        (clipped, _), norm = inplace_clip_by_global_norm(leaves, 2 * factor, implementation="ffi")
        assert norm == 2
        np.testing.assert_array_equal(widen(clipped), 0.5 + eps / 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ties_go_to_even(platform, dtype):
    eps = float(jnp.finfo(dtype).eps)
    leaf = np.ones(4, jnp.dtype(dtype))  # of norm 2
    for factor, even in ((0.5 + eps / 4, 0.5), (0.5 + 3 * eps / 4, 0.5 + eps)):
        (clipped,), _ = inplace_clip_by_global_norm([leaf], 2 * factor, implementation="ffi")
        np.testing.assert_array_equal(widen(clipped), even)


# --- In place ------------------------------------------------------------------------------------


def tree_of(*sizes: int) -> list[jax.Array]:
    """Leaves that own their memory, of norm sqrt(sum of sizes)."""
    return [jnp.ones(size, jnp.float32) + 0 for size in sizes]


def test_in_place(platform):
    """A donated tree is clipped where it lies, and so is an intermediate one: no copies."""
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
    """A tree that is not donated, eagerly and under jit, or is needed later, is as it was."""
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
    """Where nothing is clipped, not even the same values: the memory is write-protected."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", WRITE_PROTECTED, str(limit)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if limit == 1.0:  # the test can tell
        assert process.returncode == -signal.SIGSEGV, process.stderr
    else:
        assert "nothing was written" in process.stdout, process.stderr


@pytest.mark.C7
def test_operator(platform, rng):
    """InplaceClipGradNorm: a sequence in, the same sequence out, all its dtypes in one call."""
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
            rtol = max(float(info.eps), 1e-15)  # of float64: the norm has an error too
            atol = float(info.smallest_subnormal)
            np.testing.assert_allclose(widen(c), x * factor, rtol=rtol, atol=atol)


def test_in_place_many_leaves(platform):
    """More than one native call takes, of all dtypes and sizes."""
    dtypes = [jnp.dtype(d) for d in ("float32", "bfloat16", "float16")]
    leaves = [np.full(i % 71, 1 + i % 3).astype(dtypes[i % 3]) for i in range(800)]
    clip = jax.jit(inplace_clip_by_global_norm)
    clipped, norm = clip(leaves, 1.0)
    check_norm(norm, *leaves)
    for c, leaf in zip(clipped, leaves, strict=True):
        assert c.dtype == leaf.dtype
        np.testing.assert_allclose(widen(c), widen(leaf) / float(norm), rtol=2**-8)


def test_in_place_groups(platform, rng):
    """Under vmap, each example by its own factor: those that are not clipped are kept."""
    x = rng.standard_normal((300, 7, 33)).astype(np.float32)
    y = rng.standard_normal((300, 5)).astype(jnp.bfloat16)
    limits = np.where(np.arange(300) % 2, 1.0, np.inf).astype(np.float32)
    clipped, norms = jax.jit(jax.vmap(inplace_clip_by_global_norm))([x, y], limits)
    for leaf, c in zip((x, y), clipped, strict=True):
        assert_bitwise_equal(c[::2], leaf[::2])
        factors = np.asarray(1 / norms).reshape(-1, *[1] * (leaf.ndim - 1))
        np.testing.assert_allclose(widen(c[1::2]), (widen(leaf) * factors)[1::2], rtol=2**-8)


# --- Transformations -----------------------------------------------------------------------------


@pytest.mark.C6
def test_gradients_at_the_edges(platform, clip):
    """Finite at 0 (where the derivative of the norm is taken as 0) and at norm == max_norm."""
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
        (expected,) = oracles.clip_first_vjp(widen(weights), limit, widen(x))
        assert_matches(jax.grad(loss)(x, limit), expected, np.float32, np.float32, f"limit {limit}")
    for power in (1, 2):
        norm_gradient = jax.grad(lambda x, p=power: jax_gradops.global_norm([x]) ** p)
        np.testing.assert_array_equal(norm_gradient(zero), zero)


@pytest.mark.C3
@pytest.mark.parametrize("size", [1e30, 1e-25])
def test_derivatives_far_from_one(platform, clip, size):
    """Squares of the norm are not in float32's range; first and second derivatives are."""
    x = np.array([3, 4], np.float32) * np.float32(size)
    projection = np.array([[0.64, -0.48], [-0.48, 0.36]])  # on what is orthogonal to x
    jacobian = jax.jacrev(lambda x: clip([x], size)[0][0])(x)
    np.testing.assert_allclose(jacobian, projection / 5, rtol=1e-5)
    hessian = jax.hessian(lambda x: jax_gradops.global_norm([x]))(x)
    np.testing.assert_allclose(hessian, projection / (5 * np.float64(size)), rtol=1e-5)


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
        (expected,) = oracles.clip(float(limit), widen(x))
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
    """vmap clips each example by its own norm; one leaf is shared by all."""
    tree = {"x": rng.standard_normal((5, 3, 4)), "y": rng.standard_normal((2, 5))}
    tree = {k: v.astype(np.float32) for k, v in tree.items()}
    shared = rng.standard_normal(3).astype(np.float32)

    def f(tree: Any) -> Any:
        return clip(tree | {"shared": shared}, 1.0)

    clipped, norms = jax.jit(jax.vmap(f, in_axes=({"x": 0, "y": 1},)))(tree)
    for i in range(5):
        leaves = tree["x"][i], tree["y"][:, i], shared
        check_norm(norms[i], *leaves)
        reference = oracles.clip(1.0, *map(widen, leaves))
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
    """Leaves laid out in different ways; a replicated one counts once. Only scalars travel."""
    devices = mesh(platform, kind)
    tree = {k: rng.standard_normal((16, 8)).astype(np.float32) for k in SPECS}
    with jax.set_mesh(devices):
        arrays = {k: jax.device_put(v, NamedSharding(devices, SPECS[k])) for k, v in tree.items()}
        compiled = jax.jit(lambda tree: clip(tree, 1.0)).lower(arrays).compile()
        clipped, norm = compiled(arrays)
    check_norm(norm, *tree.values())
    for k, reference in zip(SPECS, oracles.clip(1.0, *map(widen, tree.values())), strict=True):
        assert_matches(clipped[k], reference, np.float32, np.float32, k)
        assert clipped[k].sharding.is_equivalent_to(arrays[k].sharding, 2)
    if clip.keywords["implementation"] == "ffi":
        text = compiled.as_text()
        assert set(collectives(text)) <= {"all-reduce"}
        reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
        # On GPUs, XLA makes arrays of the three sums.
        assert reduced and all(set(re.findall(r"\[(.*?)\]", r)) <= {"", "3"} for r in reduced)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(platform, clip, check_vma, rng):
    """There, an op sees one device's part of the tree and clips that."""
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
        check_norm(norms[i], part, shared)
        reference, _ = oracles.clip(1.0, widen(part), widen(shared))
        assert_matches(np.split(clipped, n)[i], reference, np.float32, np.float32, f"device {i}")


# --- Optax ---------------------------------------------------------------------------------------


def test_chain(platform, implementation, rng):
    """The same training as with Optax's own; the state holds the norm before clipping."""

    def train(clip: Any) -> Any:
        optimizer = optax.chain(clip, optax.adam(1e-2))
        params = {"w": jnp.full((4, 3), 0.5, jnp.float32), "b": jnp.zeros(3, jnp.float32)}

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, x: Any) -> Any:
            grads = jax.grad(lambda p: jnp.sum(jnp.sin(x @ p["w"]) * 30 + p["b"][None]))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

        state = optimizer.init(params)
        for x in data:
            params, state, norm = step(params, state, x)
        return params, state, norm

    data = rng.standard_normal((5, 8, 4)).astype(np.float32)
    clip = jax_gradops.clip_by_global_norm(1.0, implementation=implementation)
    with jax.numpy_dtype_promotion("standard"):  # which Optax needs
        ours, state, norm = train(clip)
        expected, _, _ = train(optax.clip_by_global_norm(1.0))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, expected
    )
    assert isinstance(state[0], jax_gradops.ClipByGlobalNormState)
    np.testing.assert_allclose(state[0].global_norm, norm, rtol=1e-6)
    assert state[0].global_norm.dtype == jnp.float32 and norm > 1


def test_inject_hyperparams(platform):
    """max_norm as a value that changes from step to step."""
    schedule = optax.linear_schedule(1.0, 0.5, 1)
    clip = optax.inject_hyperparams(jax_gradops.clip_by_global_norm)(max_norm=schedule)
    grads = {"w": jnp.array([3.0, 4.0], jnp.float32)}
    state = clip.init(grads)
    update = jax.jit(clip.update)
    for expected in (1.0, 0.5, 0.5):
        clipped, state = update(grads, state)
        np.testing.assert_allclose(np.linalg.norm(clipped["w"]), expected, rtol=1e-6)
        assert state.inner_state.global_norm == 5


def test_initial_state():
    init = jax_gradops.clip_by_global_norm(1.0).init
    assert init({"w": jnp.ones(3, jnp.bfloat16)}).global_norm.dtype == jnp.float32
    assert init({"w": jnp.ones(3, jnp.float64)}).global_norm.dtype == jnp.float64
    assert init({}).global_norm == 0


def test_vmap_over_many_examples(platform, rng):
    """Scratch memory does not grow with the number of examples: each needs one partial sum."""
    x = rng.standard_normal((65_536, 3)).astype(np.float32)
    norm = functools.partial(clip_tree_by_global_norm, max_norm=1.0, implementation="ffi")
    norms = jax.jit(jax.vmap(lambda x: norm([x])[1])).lower(x).compile()
    assert norms.memory_analysis().temp_size_in_bytes < 8e6
    np.testing.assert_allclose(norms(x), np.linalg.norm(widen(x), axis=1), rtol=1e-6)
