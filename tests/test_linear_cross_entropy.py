"""Softmax cross-entropy of a linear layer, without an array of all logits."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import IMPLEMENTATIONS_AND_DTYPES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import LossTests, as_columns
from meshes import collectives, mesh

import jax_gradops
from jax_gradops._ops.cross_entropy.oracle import CLASSES
from jax_gradops._ops.cross_entropy.spec import LINEAR
from jax_gradops._oracles import Reference

linear = jax_gradops.linear_softmax_cross_entropy


@pytest.fixture(autouse=True)
def precise():
    """GPUs multiply float32 with fewer digits by default."""
    with jax.default_matmul_precision("float32"):
        yield


class TestLinearCrossEntropy(LossTests):
    """The kernel is made of a parameter of x's features."""

    variant = True
    # The gradient, its other computation and the comparison of the cotangents have one each.
    all_reduces = (0, 3, 4)
    largest_parameter = LossTests.mesh_shape[-1] * CLASSES
    form = as_columns(LINEAR)

    def expected(self, dy: Any, *operands: Any) -> list[Reference]:
        """The kernel, the logits and their gradients are rounded to x's dtype."""
        eps = float(jnp.finfo(operands[0].dtype).eps)
        found = super().expected(dy, *operands)
        return [r._replace(error=self.form.roundings * eps * r.magnitude) for r in found]

    # A product's rounding depends on the number of rows.
    test_rows_are_independent = None  # type: ignore[assignment]

    @pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
    def test_nonfinite(self, platform, implementation, dtype, rng):
        """NaN in a row of x changes its loss and its gradient, and the gradient of the kernel."""
        dy, clean, scale = self.example(rng, (37, 129), dtype)
        f, others = jax.jit(self.value_and_vjp(implementation)), np.arange(37) != 11
        x = clean.copy()
        x[11, 128] = np.nan
        for spoilt, unspoilt in zip(f(dy, x, scale), f(dy, clean, scale), strict=True):
            spoilt, unspoilt = (np.asarray(a, np.float64) for a in (spoilt, unspoilt))
            if spoilt.ndim == 1:
                assert np.isnan(spoilt).all()
            else:
                assert np.isnan(spoilt[11]).all()
                np.testing.assert_array_equal(spoilt[others], unspoilt[others])


# --- Beside the loss of all logits ----------------------------------------------------------------


def problem(rng: Any, rows: tuple[int, ...] = (3, 50), dtype: Any = np.float64) -> list[Any]:
    """X, kernel, bias and labels. One label is ignored."""
    shapes = (*rows, 16), (16, 37), (37,)
    labels = rng.integers(0, 37, rows).astype(np.int32)
    labels[0, 3] = -100
    return [*(rng.standard_normal(s).astype(dtype) for s in shapes), labels]


OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": -100}


def of_all_logits(x: Any, kernel: Any, bias: Any, labels: Any) -> Any:
    logits = x @ kernel + bias.reshape(1, 1, -1)
    loss = jax_gradops.softmax_cross_entropy_with_integer_labels
    return loss(logits, labels, **OPTIONS, implementation="xla")


def in_chunks(x: Any, kernel: Any, bias: Any, labels: Any, **options: Any) -> Any:
    return linear(x, kernel, labels, bias=bias, **OPTIONS, **options)


def assert_close(found: Any, wanted: Any, rtol: float = 1e-11) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 32, 150, 1000])
def test_chunks(platform, implementation, rows_per_chunk, weighted, rng):
    """Equal cotangents scale the gradients. Other ones need another computation."""
    *layer, labels = problem(rng)
    weights = rng.standard_normal(labels.shape) if weighted else np.ones(labels.shape)

    def mean(loss: Any, **options: Any) -> Any:
        weigh = lambda *layer: jnp.mean(loss(*layer, labels, **options) * weights)  # noqa: E731
        return jax.jit(jax.value_and_grad(weigh, (0, 1, 2)))(*layer)

    options = {"implementation": implementation, "rows_per_chunk": rows_per_chunk}
    assert_close(mean(in_chunks, **options), mean(of_all_logits))


def reduced(reduction: str, losses: Any, labels: Any) -> Any:
    total = jnp.sum(losses)
    return total / float(np.sum(labels != -100)) if reduction == "mean" else total


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(platform, implementation, reduction, rng):
    """Value, gradients, second derivatives, and one gradient for each of several cotangents."""
    *layer, labels = problem(rng)
    options = {"implementation": implementation, "rows_per_chunk": 32, "reduction": reduction}

    def derivatives(loss: Any) -> Any:
        def scaled(factor: Any, *layer: Any) -> Any:
            return factor * jnp.square(loss(*layer))

        gradients = jax.value_and_grad(scaled, (0, 1, 2, 3))
        along = jax.jvp(lambda *a: gradients(-1.5, *a), layer, [jnp.cos(a) for a in layer])
        factors = jnp.asarray([2.0, 0.0, -3.0])
        return along, jax.vmap(lambda f: gradients(f, *layer))(factors)

    found = jax.jit(lambda: derivatives(lambda *a: in_chunks(*a, labels, **options)))()
    wanted = derivatives(lambda *a: reduced(reduction, of_all_logits(*a, labels), labels))
    assert_close(found, wanted)
    assert found[0][0][0].shape == ()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_of_other_labels(platform, reduction, rng):
    """No rows count: 0. A label that is no class: NaN, unless the cotangent is 0."""
    *layer, labels = problem(rng)

    def gradients(factor: float, labels: Any) -> Any:
        loss = lambda *a: factor * in_chunks(*a, labels, reduction=reduction)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*layer)

    none = gradients(1.0, np.full_like(labels, -100))
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(none))
    labels[1, 2] = 37
    value, (dx, *others) = gradients(1.0, labels)
    assert np.isnan(value) and all(np.isnan(g).all() for g in others)
    assert np.isnan(dx[1, 2]).all() and not np.isnan(np.delete(dx[1], 2, 0)).any()
    _, zeros = gradients(0.0, labels)
    assert all((np.asarray(g) == 0).all() for g in zeros)


def test_reduction_has_no_condition(platform, rng):
    """With a reduction, nothing is decided when the program runs."""
    *layer, labels = problem(rng)

    def text(reduction: str) -> str:
        def loss(labels: Any, *layer: Any) -> Any:
            return jnp.mean(in_chunks(*layer, labels, reduction=reduction))

        return program(jax.grad(loss, (1, 2, 3)), labels, *layer)

    assert " conditional(" in text("none")
    assert " conditional(" not in text("sum") + text("mean")


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_masked_labels(platform, implementation, rng):
    """A label that is no class adds 0 to a gradient if the cotangent of its loss is 0, else NaN."""
    *layer, labels = problem(rng)
    labels[0, 5], labels[2, 49] = -1, 37
    ignored = np.where(labels % 37 != labels, -100, labels)

    def value(loss: Any, labels: Any, mask: Any) -> Any:
        def total(*layer: Any) -> Any:
            return jnp.where(mask, loss(*layer, labels), 0).sum()

        def twice(*layer: Any) -> Any:
            return jnp.sum(jax.grad(total, 1)(*layer)[0] ** 2)

        each = [jax.value_and_grad(f, (0, 1, 2)) for f in (total, twice)]
        return jax.jit(lambda *layer: [f(*layer) for f in each])(*layer)

    chunks = functools.partial(in_chunks, rows_per_chunk=32, implementation=implementation)
    good = ignored == labels
    assert_close(value(chunks, labels, good), value(of_all_logits, ignored, good))
    assert all((a == 0).all() for a in jax.tree.leaves(value(chunks, labels, good & False)))
    for mask in (good | (labels == -1), good | True):
        (loss, (dx, *others)), _ = value(chunks, labels, mask)
        assert all(np.isnan(a).all() for a in (loss, *others))
        np.testing.assert_array_equal(np.isnan(dx).all(-1), mask & ~good)
        np.testing.assert_array_equal(np.isnan(dx).any(-1), mask & ~good)


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_some_gradients(platform, argnums, rng):
    *layer, labels = problem(rng)

    def gradients(loss: Any) -> Any:
        return jax.jit(jax.grad(lambda *layer: jnp.mean(loss(*layer, labels)), argnums))(*layer)

    assert_close(gradients(in_chunks), gradients(of_all_logits))


def test_all_rows_ignored(platform, rng):
    *layer, labels = problem(rng)
    ignored = np.full_like(labels, -100)
    gradient = jax.grad(lambda *layer: jnp.mean(in_chunks(*layer, ignored)), (0, 1, 2))
    assert all((g == 0).all() for g in jax.jit(gradient)(*layer))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_ignored_rows_add_nothing(platform, implementation, value, weighted, rng):
    """Whatever their x and the cotangents of their losses are."""
    *layer, labels = problem(rng)
    labels[1, 40:] = labels[2] = -100
    ignored = labels == -100
    weights = np.where(ignored, value, rng.standard_normal(labels.shape) if weighted else 2.0)

    def derivatives(loss: Any, x: Any, weights: Any) -> Any:
        value, pull = jax.vjp(lambda *a: loss(*a, labels), x, *layer[1:])
        return value, pull(weights)

    options = {"implementation": implementation, "rows_per_chunk": 32}
    spoilt, clean = (np.where(ignored[..., None], v, layer[0]) for v in (value, 0))
    found = jax.jit(lambda: derivatives(functools.partial(in_chunks, **options), spoilt, weights))()
    wanted = derivatives(of_all_logits, clean, np.where(ignored, 0, weights))
    assert_close(found, wanted)
    for a in (found[0], found[1][0]):
        assert (np.asarray(a)[ignored] == 0).all()


def test_tied_embedding(platform, rng):
    """The gradient of an embedding that is looked up and, transposed, the kernel."""
    tokens = rng.integers(0, 37, (4, 9)).astype(np.int32)
    table = rng.standard_normal((37, 16))

    def loss(table: Any, of: Any) -> Any:
        return jnp.mean(of(jnp.take(table, tokens[:, :-1], 0), table.T, tokens[:, 1:]))

    def of_logits(x: Any, kernel: Any, labels: Any) -> Any:
        return jax_gradops.softmax_cross_entropy_with_integer_labels(x @ kernel, labels)

    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, of=f)))(table) for f in (linear, of_logits)
    )
    assert_close(found, wanted)


def test_mixed_dtypes(platform, rng):
    """A float32 kernel beside bfloat16 x: the product is x's, the gradient is the kernel's."""
    x, kernel, bias, labels = problem(rng, dtype=np.float32)
    narrow = jnp.asarray(x, jnp.bfloat16)
    value = jax.value_and_grad(lambda *a: jnp.mean(in_chunks(*a, labels)), (0, 1, 2))
    loss, gradients = jax.jit(value)(narrow, kernel, bias)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    wide = [np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (x, kernel, bias)]
    wanted = jax.value_and_grad(lambda *a: jnp.mean(of_all_logits(*a, labels)), (0, 1, 2))(*wide)
    for a, b in zip((loss, *gradients), (wanted[0], *wanted[1]), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() < 0.02 * np.abs(b).max()


# --- What a program has ---------------------------------------------------------------------------


def program(f: Any, *arguments: Any) -> str:
    return jax.jit(f).lower(*arguments).compile().as_text()


def dots(text: str) -> int:
    return len(re.findall(r"= \S+ (?:dot|custom-call)\([^)]*\).*(?:contracting_dims|matmul)", text))


def test_program(platform, rng):
    """No array of all logits exists, no product is computed twice, and no gradient in vain."""
    rows, features, classes, step = 512, 24, 320, 64
    x, kernel = rng.standard_normal((rows, features)), rng.standard_normal((features, classes))
    labels = rng.integers(0, classes, rows).astype(np.int32)

    def loss(x: Any, kernel: Any) -> Any:
        return jnp.mean(linear(x, kernel, labels, rows_per_chunk=step))

    forward = program(loss, x, kernel)
    assert "softmax_cross_entropy_fwd" in forward and "softmax_cross_entropy_bwd" not in forward
    both = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, kernel).compile()
    assert "softmax_cross_entropy_bwd" in both.as_text()
    assert f"[{rows},{classes}]" not in both.as_text()
    if platform == "cpu":
        # The labels are constants here, so that XLA leaves out the other computation.
        assert (dots(forward), dots(both.as_text())) == (1, 3)
    # A chunk's logits, the gradients, and what XLA adds to them.
    limit = 8 * (2 * step * classes + 3 * features * classes + 3 * rows * features)
    assert both.memory_analysis().temp_size_in_bytes < limit < 8 * rows * classes


def test_tied_embedding_is_not_copied(platform, rng):
    rows, features, classes = 512, 24, 320

    def loss(x: Any, table: Any, labels: Any) -> Any:
        return jnp.mean(linear(x, table.T, labels, rows_per_chunk=64))

    arrays = rng.standard_normal((rows, features)), rng.standard_normal((classes, features))
    labels = rng.integers(0, classes, rows).astype(np.int32)
    text = program(jax.grad(loss, (0, 1)), *arrays, labels)
    sizes = rf"\[(?:{classes},{features}|{features},{classes})\]"
    assert re.search(sizes, text)
    assert re.findall(rf"= \w+{sizes}\S* (?:copy|transpose)\(.*", text) == []


def test_remat(platform, rng):
    *layer, labels = problem(rng)

    def gradients(loss: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.mean(loss(*a, labels)), (0, 1, 2)))(*layer)

    assert_close(gradients(jax.checkpoint(in_chunks)), gradients(of_all_logits))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_reductions_of_sharded_rows(platform, kind, reduction, rng):
    devices = mesh(platform, kind)
    *layer, labels = problem(rng, (8, 6))

    def gradients(loss: Any) -> Any:
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    wanted = gradients(lambda *a: reduced(reduction, of_all_logits(*a, labels), labels))(*layer)
    with jax.set_mesh(devices):
        rows, whole = (NamedSharding(devices, p) for p in (P("data"), P()))
        placed = [jax.device_put(a, s) for a, s in zip(layer, (rows, whole, whole), strict=True)]
        spread = jax.device_put(labels, rows)
        f = gradients(lambda *a: in_chunks(*a, spread, reduction=reduction))
        compiled = f.lower(*placed).compile()
        assert_close(compiled(*placed), wanted)
    assert set(collectives(compiled.as_text())) <= {"all-reduce"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(platform, check_vma, rng):
    """Rows are sharded. The cotangents of the shards differ. One is 0: its label is no class."""
    devices = mesh(platform, AxisType.Auto)
    *layer, labels = problem(rng, (8, 6))
    labels[4, 1] = -1

    def local(x: Any, kernel: Any, bias: Any, labels: Any) -> Any:
        return in_chunks(x, kernel, bias, labels, rows_per_chunk=4)

    specs = P("data"), P(), P(), P("data")
    mapped = jax.shard_map(
        local, mesh=devices, in_specs=specs, out_specs=P("data"), check_vma=check_vma
    )
    weights = np.repeat(np.arange(1.0, 5.0), 12).reshape(8, 6)
    weights[4, 1] = 0

    def gradients(loss: Any) -> Any:
        weigh = lambda *layer: jnp.sum(loss(*layer, labels) * weights)  # noqa: E731
        return jax.jit(jax.grad(weigh, (0, 1, 2)))(*layer)

    assert_close(gradients(mapped), gradients(of_all_logits))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_precision_of_products(implementation):
    """Every product has the precision that was set when the loss was called."""
    x, kernel, labels = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.zeros(4, jnp.int32)

    def loss(x, kernel):
        with jax.default_matmul_precision("highest"):
            return linear(x, kernel, labels, implementation=implementation).mean()

    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 3 and all("[HIGHEST, HIGHEST]" in line for line in products), products
