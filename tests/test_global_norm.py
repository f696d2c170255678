"""Global norm and clip-by-global-norm. `catalogue.py` explains marks such as C1."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_bitwise_equal, assert_global_norm, assert_matches, widen
from conformance import RANKS, WIDE, OpTests

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import clip_tree_by_global_norm
from jax_gradops._ops.clip.spec import CLIP_TREE, GLOBAL_NORM, INPLACE_CLIP
from jax_gradops.backward import inplace_clip_by_global_norm

LIMIT = 0.5


class TestGlobalNorm(OpTests):
    """The global norm of a tree of two leaves."""

    variant = True  # of the clip
    form = GLOBAL_NORM.forms[0]
    parameters = 1

    def op(self, x, p, *, implementation=None):
        with jax_gradops.use_implementation(implementation):
            return jax_gradops.global_norm({"x": x, "p": [p, None]})

    def sizes(self, implementation, dtype):
        shapes = super().sizes(implementation, dtype)
        return shapes if implementation == "xla" else [*shapes[::5], *RANKS, WIDE]

    def output_shape(self, shape):
        return ()

    def output_dtype(self, *operands):
        return self.accum_dtype(*operands)

    def accum_dtype(self, *operands):
        return jnp.dtype("float64" if "float64" in {a.dtype.name for a in operands} else "float32")


@pytest.mark.newest_jax
class TestClip(TestGlobalNorm):
    """The first leaf after clipping. The second leaf changes the norm."""

    variant = False
    form = CLIP_TREE.forms[0]
    options = {"max_norm": LIMIT}
    # One all-reduce for the norm. The inner product of dy and x needs one, or one per mesh axis.
    all_reduces = (2, 3)

    def op(self, x, p, *, implementation=None):
        return OpTests.op(self, x, p, implementation=implementation)[0]

    def oracle_vjp(self, dy, x, p):
        return super().oracle_vjp((dy, np.zeros_like(p)), x, p)

    def output_shape(self, shape):
        return shape

    def output_dtype(self, *operands):
        return operands[0].dtype

    def gradient_accum_dtype(self, *operands):
        # JAX adds the gradient through the norm to the other gradient, in the leaf's dtype.
        return operands[0].dtype


class TestInplaceClip(TestClip):
    """The clip with native scaling."""

    variant = True
    form = INPLACE_CLIP.forms[0]
    forward_kernels = 2


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
    """Squares exceed the range of the leaves' dtype, or of float32."""
    leaf = np.full((300, 100), value).astype(jnp.dtype(dtype))
    (clipped,), norm = clip([leaf], 1.0)
    assert_global_norm(norm, leaf)
    np.testing.assert_allclose(widen(clipped), 30_000**-0.5 if norm >= 1 else value, rtol=1e-2)


@pytest.mark.C3
def test_gradient_of_a_norm_beyond_float16(platform, implementation):
    """The norm of 300 * 100 elements of 300 is float32. Its gradient is not 0."""
    leaf = np.full((300, 100), 300, np.float16)
    with jax_gradops.use_implementation(implementation):
        norm, gradient = jax.value_and_grad(lambda x: jax_gradops.global_norm([x]))(leaf)
    np.testing.assert_allclose(norm, 300 * 30_000**0.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.float16(30_000**-0.5), rtol=1e-3)


@pytest.mark.C2
def test_range_in_one_tree(platform, clip):
    """Leaves of all magnitudes. Each may determine the norm."""
    sizes = [1e-36, 1e-20, 1.0, 1e20, 1e35]
    for n in range(1, len(sizes) + 1):
        leaves = [np.full(7, s, np.float32) for s in sizes[:n]]
        assert_global_norm(clip(leaves, 1.0)[1], *leaves)


@pytest.mark.C4
def test_grouping(platform, clip, rng):
    """The norm does not depend on the distribution of elements over leaves."""
    x = rng.standard_normal(30_000).astype(jnp.bfloat16)
    norms = [float(clip(np.split(x, n), 1.0)[1]) for n in (1, 10, 60)]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-6)


def test_exact(platform, implementation):
    with jax_gradops.use_implementation(implementation):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            tree = {"a": jnp.full((3, 3), 2, dtype), "b": jnp.full(7, -4, dtype), "c": 1}
            tree["c"] = jnp.array(-4.0, dtype)  # sum of squares: 36 + 112 + 16 = 164
            norm = jax_gradops.global_norm(tree | {"d": jnp.full(5, 1, dtype)})
            assert norm == 13 and norm.dtype == ("float64" if dtype == "float64" else "float32")


def test_python_scalars(platform):
    clipped, norm = clip_tree_by_global_norm({"a": 3.0, "b": np.float32(4)}, 1)
    assert norm == 5 and norm.dtype == jnp.float64
    np.testing.assert_allclose(clipped["a"], 0.6)


@pytest.mark.C7
@pytest.mark.C8
def test_many_leaves(platform):
    """3,000 leaves in one call: of all dtypes and sizes, some without elements."""
    dtypes = [jnp.dtype(d) for d in ("float32", "bfloat16", "float16")]
    norm = jax.jit(lambda leaves: jax_gradops.global_norm(leaves))
    for sizes in ((1, 2, 3), (1e15, 1e18, 6e4)):
        leaves = [np.full(i % 5, sizes[i % 3]).astype(dtypes[i % 3]) for i in range(3000)]
        assert_global_norm(norm(leaves), *leaves)


def test_large_leaves(platform, clip, rng):
    """Leaves larger than the part of one thread or block, with odd sizes."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        leaves = [
            rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in (300_007, (1001, 999), 3)
        ]
        assert_global_norm(clip(leaves, 1.0)[1], *leaves)


def test_float64_norm_of_16_bit_leaves(platform, clip, rng):
    """A few squares may be added in float32 only if the norm is float32."""
    leaves = [rng.standard_normal(4097).astype(jnp.dtype(d)) for d in ("float16", "bfloat16")]
    assert_global_norm(clip([*leaves, np.ones(1)], 1.0)[1], *leaves, np.ones(1))


# --- What passes through, and what is not clipped ------------------------------------------------


@pytest.mark.C7
def test_mixed_dtypes(platform, clip, rng):
    """Each leaf keeps its dtype. The norm is float64 if one leaf is."""
    names = ("float16", "bfloat16", "float32")
    for dtypes in (names, (*names, "float64")):
        leaves = [rng.standard_normal((5, 7)).astype(jnp.dtype(d)) for d in dtypes]
        clipped, norm = clip(leaves, 1.0)
        assert_global_norm(norm, *leaves)
        accum = norm.dtype
        for leaf, actual, reference in zip(
            leaves, clipped, oracles.clip(*map(widen, leaves), max_norm=1.0), strict=True
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
    """Includes subnormal numbers and -0."""
    tiny = jnp.finfo(dtype).smallest_subnormal
    leaf = np.array([0.25, -0.0, 0.0, tiny, -tiny, 1 / 3], dtype)
    clipped, norm = clip({"w": leaf}, 1.0)
    assert 0 < norm < 1
    assert_bitwise_equal(clipped["w"], leaf)
    assert_bitwise_equal(clip({"w": leaf}, np.inf)[0]["w"], leaf)


@pytest.mark.C1
def test_zero_norm(platform, clip):
    """No division 0/0."""
    leaf = np.array([0.0, -0.0], np.float32)
    for max_norm in (0.0, 1.0):
        (clipped,), norm = clip([leaf], max_norm)
        assert norm == 0
        assert_bitwise_equal(clipped, leaf)
    # The derivative is that of leaves that are not clipped.
    _, pull = jax.vjp(lambda leaf: clip([leaf], 0.5)[0][0], leaf)
    np.testing.assert_array_equal(pull(np.float32([1, 2]))[0], [1, 2])


def test_limits(platform, clip, rng):
    """max_norm 0 makes everything 0. Tiny norms are clipped with the exact quotient."""
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
    """The result is Optax's, or all leaves are 0."""
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


@pytest.mark.newest_jax
def test_as_optax(platform, clip, rng):
    for size in (1e-3, 1.0, 1e3):
        tree = {k: size * rng.standard_normal((5, 7)).astype(np.float32) for k in "abc"}
        expected, _ = optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())
        clipped, norm = clip(tree, 1.0)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), clipped, expected)
        np.testing.assert_allclose(norm, optax.tree.norm(tree), rtol=1e-6)


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_reads_the_gradient_before_its_conversion(platform, dtype, rng):
    """The gradient of a matrix product in 16 bits is not written in float32 for the norm."""

    def step(parameters: Any, x: Any) -> Any:
        def loss(parameters: Any) -> Any:
            y = x @ parameters["w"].astype(x.dtype)
            return jnp.sum(y.astype(np.float32) ** 2) + jnp.sum(parameters["b"] ** 2)

        gradients = jax.grad(loss)(parameters)
        return *clip_tree_by_global_norm(gradients, 1.0), gradients

    shapes = {"w": (64, 32), "b": (8,)}
    parameters = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    x = rng.standard_normal((16, 64)).astype(jnp.dtype(dtype)) / 64
    lowered = jax.jit(step).lower(parameters, x)
    name = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    calls = [line for line in lowered.as_text().splitlines() if ".sum_of_squares(" in line]
    assert calls and all(f": (tensor<8xf32>, tensor<64x32x{name}>)" in line for line in calls)
    clipped, norm, gradients = lowered.compile()(parameters, x)
    expected = oracles.global_norm(*map(widen, jax.tree.leaves(gradients)))
    assert_matches(norm, expected, np.dtype(np.float32), np.dtype(np.float32), "norm")
    for name in shapes:
        np.testing.assert_allclose(clipped[name], gradients[name] / norm, rtol=1e-6, atol=1e-12)


def test_rounded_once(platform):
    """16-bit leaves beside a float64 leaf: each result is the number closest to the product."""
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
    """The product is close to the middle of two numbers. float32 cannot tell them apart."""
    eps = float(jnp.finfo(dtype).eps)
    leaves = [np.ones(3, jnp.dtype(dtype)), np.ones(1)]  # the norm is 2
    for factor in (0.5 + eps / 4 + 2.0**-40, 0.5 + 3 * eps / 4 - 2.0**-40):
        (clipped, _), norm = inplace_clip_by_global_norm(leaves, 2 * factor, implementation="ffi")
        assert norm == 2
        np.testing.assert_array_equal(widen(clipped), 0.5 + eps / 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ties_go_to_even(platform, dtype):
    eps = float(jnp.finfo(dtype).eps)
    leaf = np.ones(4, jnp.dtype(dtype))  # the norm is 2
    for factor, even in ((0.5 + eps / 4, 0.5), (0.5 + 3 * eps / 4, 0.5 + eps)):
        (clipped,), _ = inplace_clip_by_global_norm([leaf], 2 * factor, implementation="ffi")
        np.testing.assert_array_equal(widen(clipped), even)
