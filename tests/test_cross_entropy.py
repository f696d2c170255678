"""Softmax cross-entropy with integer labels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from conformance import IMPLEMENTATIONS_AND_DTYPES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import LossTests, as_columns
from meshes import collectives, mesh

import jax_gradops
from jax_gradops import backward
from jax_gradops._ops.cross_entropy.spec import PLAIN, SMOOTHED

cross_entropy = jax_gradops.softmax_cross_entropy_with_integer_labels


@pytest.mark.newest_jax
class TestCrossEntropy(LossTests):
    """Without options."""

    form = as_columns(PLAIN)
    all_reduces = (0,)

    @pytest.mark.values
    @pytest.mark.parametrize("features", [128, 129])
    def test_rows_are_independent(self, platform, features, dtype, rng):
        """Up to a rounding: XLA compiles the loss in other ways for other numbers of rows."""
        dy, x = self.example(rng, (300, features), dtype)
        picks = [*(slice(0, n) for n in (1, 2, 3, 5, 37)), slice(8, 10), rng.permutation(300)]
        f = jax.jit(lambda rows: [self.value_and_vjp("ffi")(*r) for r in rows])
        whole, *parts = f([(dy, x), *((dy[p], x[p]) for p in picks)])
        for part, pick in zip(parts, picks, strict=True):
            for actual, all_rows in zip(part, whole, strict=True):
                eps = 4 * float(jnp.finfo(actual.dtype).eps)
                expected = np.asarray(all_rows)[pick].astype(np.float64)
                np.testing.assert_allclose(np.float64(actual), expected, rtol=eps, atol=eps)

    @pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
    def test_nonfinite(self, platform, implementation, dtype, rng):
        """NaN or infinity in a row changes only this row. -inf is a class that cannot be."""
        dy, clean = self.example(rng, (37, 129), dtype)
        f = jax.jit(self.value_and_vjp(implementation))
        expected, others = f(dy, clean), np.arange(37) != 11
        for value in (np.nan, np.inf, -np.inf):
            x = clean.copy()
            x[11, 128] = value
            results = f(dy, x)
            for actual, unspoilt in zip(results, expected, strict=True):
                assert_bitwise_equal(np.asarray(actual)[others], np.asarray(unspoilt)[others])
            if np.isnan(value) or value > 0:
                assert all(np.isnan(np.asarray(r, np.float32)[11]).all() for r in results)
            else:  # the class of -inf is the smallest logit: the label
                assert np.isinf(results[0][11])
                assert np.isfinite(np.asarray(results[1], np.float32)[11]).all()

    @pytest.mark.parametrize("spec", [P("data"), P(("data", "model"))], ids=str)
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_explicit_mesh(self, platform, spec, kind, rng):
        """Rows are sharded. `test_collectives` shards classes, too."""
        devices = mesh(platform, kind)
        example = self.example(rng, self.mesh_shape, jnp.float32)
        with jax.set_mesh(devices):
            results = jax.jit(self.value_and_vjp(None))(*self.placed(devices, spec, example))
        self.check(results, example, str(spec))
        assert results[1].sharding.is_equivalent_to(NamedSharding(devices, spec), 3)

    def test_features_spread(self, platform, rng):
        """Classes are sharded: the results are right, and the gradient is sharded as x."""
        devices = mesh(platform, AxisType.Auto)
        dy, x = self.example(rng, self.mesh_shape, jnp.float32)
        for spec in (P(None, None, "model"), P("data", None, "model")):
            placed = jax.device_put(x, NamedSharding(devices, spec))
            results = jax.jit(self.value_and_vjp("ffi"))(dy, placed)
            self.check(results, (dy, x), str(spec))
            assert results[1].sharding.is_equivalent_to(placed.sharding, 3)


class TestSmoothed(TestCrossEntropy):
    """The loss has label smoothing, z-loss and ignored rows."""

    variant = True
    form = as_columns(SMOOTHED)

    # Smoothing makes the loss of a row with -inf infinite. `TestCrossEntropy` tests the rest.
    test_nonfinite = None  # type: ignore[assignment]


# --- Classes on several devices -------------------------------------------------------------------


def problem(rng: Any, classes: int = 32, dtype: Any = np.float64) -> tuple[Any, ...]:
    """Weights of the losses, logits and labels.

    One label is ignored. Two are no class, and the loss of one of these has the weight 0.
    """
    logits = 3 * rng.standard_normal((8, 4, classes))
    labels = rng.integers(0, classes, (8, 4))
    labels[1, 2], labels[3, 3], labels[5, 0] = -100, classes, -1
    weights = rng.standard_normal((8, 4))
    weights[5, 0] = 0
    return weights.astype(dtype), logits.astype(dtype), labels.astype(np.int32)


OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": -100}


def loss_and_gradient(weights: Any, logits: Any, labels: Any, **options: Any) -> Any:
    loss, pull = jax.vjp(lambda x: cross_entropy(x, labels, **OPTIONS, **options), logits)
    return loss, pull(weights)[0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("spec", "reductions"),
    [(P("data"), 0), (P(None, None, "model"), 2), (P("data", None, "model"), 2)],
    ids=str,
)
def test_collectives(platform, kind, spec, reductions, rng):
    """Sharded rows send nothing. Sharded classes need two all-reduces of numbers per row."""
    devices = mesh(platform, kind)
    arrays = problem(rng)
    specs = (P(*spec[:2]), spec, P(*spec[:2]))
    with jax.set_mesh(devices):
        placed = [
            jax.device_put(a, NamedSharding(devices, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        compiled = jax.jit(loss_and_gradient).lower(*placed).compile()
        found = compiled(*placed)
    for a, b in zip(found, loss_and_gradient(*arrays, implementation="xla"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    sent = collectives(str(compiled.as_text()))
    assert sent == ({"all-reduce": reductions} if reductions and devices.shape["model"] > 1 else {})
    assert found[1].sharding.is_equivalent_to(placed[1].sharding, 3)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_name_of_shard_map(platform, implementation, check_vma, rng):
    """The gradient of a loss that is computed inside, and of one that is computed outside."""
    devices = mesh(platform, AxisType.Auto)
    weights, logits, labels = problem(rng)
    names = {"axis_name": "model", "implementation": implementation}
    spec = P("data", None, "model")

    def local(logits: Any, labels: Any) -> Any:
        return cross_entropy(logits, labels, **OPTIONS, **names)

    mapped = jax.shard_map(
        local, mesh=devices, in_specs=(spec, P("data")), out_specs=P("data"), check_vma=check_vma
    )
    loss, pull = jax.vjp(lambda x: jax.jit(mapped)(x, labels), logits)
    found = [loss, pull(weights)[0]]
    if check_vma:
        inside = jax.shard_map(
            lambda w, x, t: loss_and_gradient(w, x, t, **names),
            mesh=devices, in_specs=(P("data"), spec, P("data")), out_specs=(P("data"), spec),
        )  # fmt: skip
        found += jax.jit(inside)(weights, logits, labels)
    expected = loss_and_gradient(weights, logits, labels, implementation="xla")
    for a, b in zip(found, (*expected, *expected), strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_axis_name_of_vmap(platform, implementation, rng):
    """Classes along an axis of vmap. A second derivative, too."""
    weights, logits, labels = problem(rng)
    parts = np.stack(np.split(logits, 4, -1))

    def total(parts: Any, **options: Any) -> Any:
        def local(x: Any) -> Any:
            return cross_entropy(x, labels, **OPTIONS, **options)

        loss = jax.vmap(local, axis_name="classes", out_axes=None)(parts)
        return jnp.nansum(loss * weights)

    def whole(logits: Any) -> Any:
        loss = cross_entropy(logits, labels, **OPTIONS, implementation="xla")
        return jnp.nansum(loss * weights)

    names = {"axis_name": "classes", "implementation": implementation}
    value, gradient = jax.jit(jax.value_and_grad(lambda x: total(x, **names)))(parts)
    expected, of_whole = jax.value_and_grad(whole)(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate(list(gradient), -1), of_whole, rtol=1e-12, atol=1e-13)


# --- Options and values ---------------------------------------------------------------------------


def test_equals_optax(platform, implementation, rng):
    """In float32 to rounding. Optax's loss of bfloat16 logits is in bfloat16."""
    optax = pytest.importorskip("optax")
    _, logits, labels = problem(rng, 1000, np.float32)
    labels = labels.clip(0)
    expected = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    found = cross_entropy(logits, labels, implementation=implementation)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    other = np.moveaxis(logits, -1, 1)
    found = cross_entropy(other, labels, axis=1, implementation=implementation)
    np.testing.assert_allclose(found, cross_entropy(logits, labels), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "where"),
    [
        ((7, 7), -1, (7,)),
        ((7, 7), -1, (7, 1)),
        ((7, 7), 1, (1, 7)),
        ((5, 7), -1, (5, 7)),
        ((5, 7, 3), 0, (7, 3)),
        ((5, 7, 3), 0, (7, 1)),
        ((5, 7, 7), -2, (5, 7)),
        ((5, 2, 3), (1, 2), None),
        ((5, 2, 3, 2), (3, -3), (5, 3)),
        ((5, 2, 3, 2), (1, 3), (5, 2, 3, 2)),
    ],
    ids=str,
)
def test_axes_and_masks_of_optax(implementation, shape, axis, where, rng):
    """A mask is of rows or of logits. What does not count may be NaN, and its label no class."""
    optax = pytest.importorskip("optax")
    axes = tuple(a % len(shape) for a in np.atleast_1d(axis))
    rows = [n for i, n in enumerate(shape) if i not in axes]
    logits = rng.standard_normal(shape)
    logits.flat[-1] = -np.inf  # a class that cannot be
    labels = rng.integers(0, logits.size // np.prod(rows, dtype=int), rows)
    if where is not None:
        where = (np.arange(np.prod(where)) % 3 != 1).reshape(where)
        where[3:4] = False
        whole = np.expand_dims(where, axes) if where.ndim == len(rows) else where
        out = ~np.broadcast_to(whole, shape).any(axes)
        labels[out] = -5
        logits = np.where(np.expand_dims(out, axes), np.nan, logits)
    run = lambda f: jax.vjp(lambda x: f(x, labels, axis, where), logits)  # noqa: E731
    (expected, of_optax), (found, pull) = (
        run(optax.losses.softmax_cross_entropy_with_integer_labels),
        run(lambda *args: cross_entropy(*args, implementation=implementation)),
    )
    weights = rng.standard_normal(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(pull(weights)[0], of_optax(weights)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("value", [1e38, -3e38, 3e-39])
def test_equal_logits_of_any_size(platform, implementation, value):
    logits = jnp.full((2, 11), value, jnp.float32)
    loss, gradient = jax.value_and_grad(
        lambda x: cross_entropy(x, jnp.array([3, 10]), implementation=implementation).sum()
    )(logits)
    np.testing.assert_allclose(loss, 2 * np.log(11), rtol=1e-6)
    np.testing.assert_allclose(gradient[0, 0], 1 / 11, rtol=1e-5)
    np.testing.assert_allclose(gradient[0, 3], 1 / 11 - 1, rtol=1e-5)


@pytest.mark.E9
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_labels(platform, implementation, dtype):
    """Labels of every dtype: classes, ignored ones, and ones that are no class."""
    limits = np.iinfo(dtype)
    labels = np.array([0, 4, 5, limits.max, limits.min], dtype)
    loss, pull = jax.vjp(
        lambda x: cross_entropy(x, labels, implementation=implementation), jnp.zeros((5, 5))
    )
    (gradient,) = pull(jnp.ones(5))
    no_class = [False, False, True, True, limits.min < 0]
    np.testing.assert_array_equal(np.isnan(loss), no_class)
    np.testing.assert_array_equal(np.isnan(gradient).all(-1), no_class)
    ignored = cross_entropy(
        jnp.full((5, 5), jnp.nan), labels, ignore_index=int(limits.max),
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(ignored == 0, np.arange(5) == 3)


@pytest.mark.parametrize("where", [None, np.ones((1, 7), bool)], ids=["all", "where"])
def test_masked_labels(platform, implementation, where, rng):
    """A label that is no class adds 0 to a gradient if the cotangent of its loss is 0, else NaN."""
    logits = rng.standard_normal((5, 7))
    labels, mask = np.array([3, -1, 7, 2, -1]), np.array([True, False, False, True, True])
    options = {"where": where, "z_loss": 0.1, "implementation": implementation}

    def masked(logits: Any, labels: Any = labels, mask: Any = mask) -> Any:
        return jnp.where(mask, cross_entropy(logits, labels, **options), 0)

    def gradient(logits: Any, *rest: Any) -> Any:
        return jax.grad(lambda x: masked(x, *rest).sum())(logits)

    def second(logits: Any, *rest: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(gradient(x, *rest)[mask] ** 2))(logits)

    loss = cross_entropy(logits, labels, **options)
    np.testing.assert_array_equal(np.isnan(loss), labels % 7 != labels)
    # With one class, the loss would be 0.
    assert np.isnan(cross_entropy(np.zeros((1, 1)), np.array([1]), implementation=implementation))
    expected = (f(logits[mask], labels[mask], True) for f in (masked, gradient))
    found = jax.jit(lambda x: (masked(x), gradient(x)))(logits)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a)[mask], b, rtol=1e-12)
        assert (np.asarray(a)[~mask] == 0).all()
    assert np.isnan(found[1][4]).all()
    # Each row alone, and further derivatives.
    each = jax.vmap(lambda x, t, m: gradient(x[None], t[None], m[None])[0])(logits, labels, mask)
    np.testing.assert_allclose(each, found[1], rtol=1e-12)
    tangent = jax.jvp(masked, [logits], [np.ones_like(logits)])[1]
    twice = jax.jvp(gradient, [logits], [np.ones_like(logits)])[1]
    for a in map(np.asarray, (tangent, twice, jax.jit(second)(logits))):
        assert (a[~mask] == 0).all() and np.isnan(a[4]).all() and np.isfinite(a[[0, 3]]).all()


def test_no_class_can_be(platform, implementation):
    """A row of -inf alone is NaN. -inf beside other logits is a class that cannot be."""
    logits = jnp.array([[-jnp.inf] * 3, [-jnp.inf, 0, 0]])
    loss, gradient = jax.vjp(
        lambda x: cross_entropy(x, jnp.array([0, 1]), implementation=implementation), logits
    )
    assert np.isnan(loss[0]) and np.isclose(loss[1], np.log(2))
    np.testing.assert_allclose(gradient(jnp.array([0.0, 1.0]))[0][1], [0, -0.5, 0.5])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_backward_operator(platform, implementation, dtype, rng):
    """Equals the gradient of the loss."""
    weights, logits, labels = problem(rng, 257, dtype)
    weights = weights.astype(np.float64 if dtype == "float64" else np.float32)
    expected = loss_and_gradient(weights, logits, labels, implementation=implementation)[1]
    wide = logits.astype(weights.dtype)
    found = backward.softmax_cross_entropy_backward(
        weights, logits, labels, jax.nn.logsumexp(wide, -1), **OPTIONS,
        implementation=implementation,
    )  # fmt: skip
    assert found.dtype == logits.dtype
    tolerance = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 1e-2)
    np.testing.assert_allclose(
        np.float64(found), np.float64(expected), rtol=tolerance, atol=tolerance / 10
    )


def test_gradient_in_the_logits_memory(platform, rng):
    """The gradient takes over the memory of logits that nothing needs later."""
    hidden, kernel = rng.standard_normal((64, 32)), rng.standard_normal((32, 4096))
    labels = rng.integers(0, 4096, 64)

    def loss(hidden: Any, kernel: Any) -> Any:
        return cross_entropy(hidden @ kernel, labels).mean()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, kernel).compile()
    one_array = 64 * 4096 * 8
    assert one_array <= compiled.memory_analysis().temp_size_in_bytes < 1.1 * one_array
