"""Softmax cross-entropy of hard values and odd sizes. `catalogue.py` explains marks such as E1."""

from __future__ import annotations

import mmap
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparing import assert_bitwise_equal, assert_matches, widen

import jax_gradops
from jax_gradops import backward
from jax_gradops._ops.cross_entropy import oracle

cross_entropy = jax_gradops.softmax_cross_entropy_with_integer_labels


def run(weights: Any, logits: Any, labels: Any, **options: Any) -> tuple[Any, Any]:
    """The losses, and the gradient of their weighted sum."""
    loss, pull = jax.vjp(lambda x: cross_entropy(x, labels, **options), logits)
    return loss, pull(weights)[0]


def check(results: Any, weights: Any, logits: Any, labels: Any, **options: Any) -> None:
    """Compares loss and gradient with float64."""
    accum = np.float64 if logits.dtype == np.float64 else np.float32
    options |= {"labels_of": lambda x, ignore_index: labels}
    loss = oracle.softmax_cross_entropy(widen(logits), **options)
    (gradient,) = oracle.softmax_cross_entropy_vjp(widen(weights), widen(logits), **options)
    assert_matches(results[0], loss, accum, accum, "loss")
    assert_matches(results[1], gradient, logits.dtype, accum, "gradient")


# --- Ignored rows --------------------------------------------------------------------------------


@pytest.mark.E1
@pytest.mark.E2
def test_mean_over_counted_rows(platform, implementation, rng):
    """Ignored rows change neither sum, mean nor gradient. Label smoothing does not count them."""
    logits = rng.standard_normal((9, 33))
    labels = rng.integers(0, 33, 9)
    ignored = np.array([0, 4, 8])
    labels[ignored] = -100
    logits[0], logits[4] = np.nan, np.inf
    counted = np.delete(np.arange(9), ignored)

    def mean(x: Any, labels: Any) -> Any:
        loss = cross_entropy(
            x, labels, label_smoothing=0.2, z_loss=1e-2, ignore_index=-100,
            implementation=implementation,
        )  # fmt: skip
        return loss.sum() / (labels != -100).sum().astype(loss.dtype)

    value, gradient = jax.jit(jax.value_and_grad(mean))(logits, labels)
    expected, of_counted = jax.jit(jax.value_and_grad(mean))(logits[counted], labels[counted])
    np.testing.assert_allclose(value, expected, rtol=1e-14)
    np.testing.assert_allclose(gradient[counted], of_counted, rtol=1e-13, atol=1e-15)
    assert_bitwise_equal(np.asarray(gradient)[ignored], np.zeros((3, 33)))
    check(
        run(np.full(6, 1 / 6), logits[counted], labels[counted], label_smoothing=0.2, z_loss=1e-2,
            implementation=implementation),
        np.full(6, 1 / 6), logits[counted], labels[counted], label_smoothing=0.2, z_loss=1e-2,
    )  # fmt: skip


@pytest.mark.E2
def test_all_rows_ignored(platform, implementation, dtype):
    """Loss and gradient are 0, not NaN."""
    logits = np.array([[np.nan, np.inf, -np.inf], [1, 2, 3]]).astype(dtype)
    weights = np.array([np.nan, np.inf], np.float64 if dtype == np.float64 else np.float32)
    labels, options = np.full(2, -1), {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 1.0}
    options |= {"implementation": implementation}
    loss, gradient = run(weights, logits, labels, **options)
    assert_bitwise_equal(np.asarray(loss), np.zeros(2, loss.dtype))
    lse = np.full(2, np.nan, weights.dtype)
    direct = backward.softmax_cross_entropy_backward(weights, logits, labels, lse, **options)
    for result in (gradient, direct):
        assert_bitwise_equal(np.asarray(result), np.zeros((2, 3), dtype))


# --- Infinite logits and NaN ---------------------------------------------------------------------


@pytest.mark.E3
def test_rows_of_minus_infinity(platform, implementation, dtype):
    """A class that cannot be has no part in the row, even where a whole part of a row has none.

    The largest logit so far is then -inf, and a difference to this logit is NaN.
    """
    classes = 9001  # several blocks of the CPU's kernels, and several turns of a thread on GPUs
    logits = np.full((6, classes), -np.inf)
    for row, possible in enumerate(([0], [9000], [4500, 8999], [0, 9000], range(5000, 9001), [])):
        logits[row, list(possible)] = np.linspace(-1, 1, len(possible))
    labels = np.array([0, 9000, 4500, 1, 5000, 0])
    logits = logits.astype(dtype)
    accum = np.float64 if dtype == np.float64 else np.float32
    loss, gradient = (
        np.asarray(a) for a in run(np.ones(6, accum), logits, labels, implementation=implementation)
    )
    assert loss[0] == 0 and loss[1] == 0  # there is one class
    assert loss[3] == np.inf  # the label is a class that cannot be
    assert np.isnan(loss[5]) and np.isnan(widen(gradient)[5]).all()  # there is no class
    gradient = widen(gradient)[:5]
    assert np.isfinite(gradient).all()
    assert not gradient[:2].any()
    impossible = np.isneginf(widen(logits)[[2, 4]])
    assert not gradient[[2, 4]][impossible].any()
    for row in (2, 4):
        possible = ~np.isneginf(widen(logits)[row])
        column = int(np.flatnonzero(possible).searchsorted(labels[row]))
        check(
            (loss[row : row + 1], gradient[row : row + 1, possible].astype(dtype)),
            np.ones(1, accum), logits[row : row + 1, possible], np.array([column]),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"], indirect=True)
def test_nan_of_any_bits(platform, implementation, dtype, rng):
    """A NaN is found by its value. Arithmetic on its bits may give the bits of a number."""
    logits = rng.standard_normal((64, 9)).astype(dtype)
    bits = logits.view(f"uint{8 * dtype.itemsize}")
    quiet = np.array(np.nan, dtype).view(bits.dtype)
    rows = np.arange(64)
    payloads = rng.integers(0, 2**22, 64).astype(bits.dtype)
    signs = (rows % 2).astype(bits.dtype) << np.array(8 * dtype.itemsize - 1, bits.dtype)
    bits[rows, rows % 9] = quiet | payloads | signs
    bits[0, 0] = np.iinfo(bits.dtype).max
    assert np.isnan(logits).sum() == 64
    loss, gradient = run(np.ones(64, dtype), logits, rows % 9, implementation=implementation)
    assert np.isnan(loss).all() and np.isnan(gradient).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], indirect=True)
def test_backward_of_a_nan(platform, implementation, dtype, rng):
    """The given lse may be finite although a logit is NaN. Then its gradient is NaN."""
    logits = rng.standard_normal((3, 70)).astype(dtype)
    logits[1, 3:70:33] = np.nan
    found = backward.softmax_cross_entropy_backward(
        np.ones(3, np.float32), logits, np.zeros(3, np.int32), np.full(3, 5.0, np.float32),
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_array_equal(np.isnan(found), np.isnan(logits))


# --- Sizes ---------------------------------------------------------------------------------------


@pytest.mark.E4
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"], indirect=True)
def test_odd_numbers_of_classes(platform, dtype, rng):
    """Rows begin at any element, and no lane beyond a row's end takes part."""
    problems = []
    for classes in (1, 2, 3, 31, 33, 127, 129, 1001, 4097, 32_003, 50_257):
        logits = (3 * rng.standard_normal((5, classes))).astype(dtype)
        labels = np.array([0, classes - 1, *rng.integers(0, classes, 3)])
        problems.append((rng.standard_normal(5).astype(np.float32), logits, labels))
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    f = jax.jit(lambda ps: [run(*p, **options, implementation="ffi") for p in ps])
    for results, problem in zip(f(problems), problems, strict=True):
        check(results, *problem, **options)


@pytest.mark.E4
def test_padded_classes(platform, implementation, rng):
    """Classes that pad a vocabulary have the logit -inf. They change nothing."""
    weights, logits = rng.standard_normal(7), rng.standard_normal((7, 50_257))
    labels = rng.integers(0, 50_257, 7)
    padded = np.pad(logits, ((0, 0), (0, 50_304 - 50_257)), constant_values=-np.inf)
    f = jax.jit(lambda x: run(weights, x, labels, implementation=implementation))
    loss, gradient = f(padded)
    assert not np.asarray(gradient)[:, 50_257:].any()
    check((loss, gradient[:, :50_257]), weights, logits, labels)


@pytest.mark.E5
def test_offsets_beyond_32_bits():
    """The last row begins at element 2^31. Ignored rows are not read, so they take no memory."""
    rows, classes = 2**11 + 1, 2**20
    pages = mmap.mmap(-1, 2 * rows * classes)  # JAX does not copy an array at a page's start
    logits = np.frombuffer(pages, ml_dtypes.bfloat16).reshape(rows, classes)
    labels = np.full(rows, -100)
    logits[-1], labels[-1] = np.linspace(-4, 4, classes), classes - 1
    with jax.default_device(jax.devices("cpu")[0]):
        loss = jax.jit(lambda x: cross_entropy(x, labels, ignore_index=-100, implementation="ffi"))(
            logits
        )
    of_last = oracle.softmax_cross_entropy(widen(logits[-1:]), labels_of=lambda *_: labels[-1:])
    assert not np.asarray(loss)[:-1].any()
    assert_matches(np.asarray(loss)[-1:], of_last, np.float32, np.float32, "loss")


# --- Programs ------------------------------------------------------------------------------------


@pytest.mark.E6
def test_tied_embedding(platform, rng):
    """A table that makes inputs and logits gets the sum of two gradients.

    The logits are a result, too: the gradient must not take over their memory.
    """
    table = rng.standard_normal((129, 16))
    tokens, labels = rng.integers(0, 129, (2, 4, 7))

    def loss(table: Any, implementation: Any) -> tuple[Any, Any]:
        logits = jnp.einsum("...d,cd->...c", jnp.tanh(table[tokens]), table)
        return cross_entropy(logits, labels, implementation=implementation).mean(), logits

    f = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    ((value, logits), gradient), ((expected, same), of_xla) = f(table, "ffi"), f(table, "xla")
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    np.testing.assert_allclose(logits, same, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradient, of_xla, rtol=1e-10, atol=1e-13)
    # Independent of any derivative: the loss along the gradient's direction.
    step = 1e-6 * np.asarray(gradient)
    slope = f(table + step, "ffi")[0][0] - f(table - step, "ffi")[0][0]
    np.testing.assert_allclose(slope, 2e-6 * np.sum(np.square(gradient)), rtol=1e-6)


@pytest.mark.E7
def test_any_cotangent(platform, implementation, dtype, rng):
    """Each row has its own weight: 0, negative and large ones too."""
    logits = rng.standard_normal((6, 257)).astype(dtype)
    labels = rng.integers(0, 257, 6)
    weights = np.array([0, 1, -1, 2.5, -1e-3, 1e3])
    weights = weights.astype(np.float64 if dtype == np.float64 else np.float32)
    results = run(weights, logits, labels, z_loss=0.1, implementation=implementation)
    check(results, weights, logits, labels, z_loss=0.1)
    assert not np.asarray(results[1], np.float32)[0].any()


@pytest.mark.E8
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"], indirect=True)
def test_narrow_logits(platform, implementation, dtype, rng):
    """Sums and losses of 16-bit logits are in float32. 70,000 ones are more than float16 holds."""
    weights = rng.standard_normal(3).astype(np.float32)
    logits = np.stack(
        [np.zeros(70_000), rng.standard_normal(70_000), np.linspace(-3e4, 6e4, 70_000)]
    ).astype(dtype)
    labels = np.array([0, 69_999, 3])
    results = run(weights, logits, labels, implementation=implementation)
    assert results[0].dtype == np.float32
    check(results, weights, logits, labels)
