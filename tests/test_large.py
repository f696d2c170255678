"""Arrays of more than 2^31 elements on GPUs. On the CPU there are fewer rows.

Rows repeat, because a row's result does not depend on its place. So the expected results need only
a few rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_matches, widen

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops._ops.cross_entropy import oracle as cross_entropy_oracle
from jax_gradops.backward import inplace_clip_by_global_norm

# Each test takes most of a GPU's memory. There, `make test-gpu` runs them alone.
pytestmark = pytest.mark.large

FEATURES = 1024
DISTINCT = 257  # not a power of two, so that a wrapped offset gives another row


# Elements: one row less than 2^31, exactly 2^31, one row more, and more than 2^32.
ROWS = [2**21 - 1, 2**21, 2**21 + 1, 2**22 + 3]


@pytest.fixture(params=ROWS, ids=lambda rows: f"{rows} rows")
def rows(platform, request):
    if platform == "cpu":
        if request.param != ROWS[0]:
            pytest.skip("for GPUs")
        return 2**11 + 3
    memory = jax.devices("gpu")[0].memory_stats() or {}
    if memory.get("bytes_limit", 0) < (needed := 22e3 * request.param):
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")
    return request.param


@pytest.fixture
def distinct(rng):
    """dy and x of the distinct rows."""
    return (0.3 + rng.standard_normal((2, DISTINCT, FEATURES))).astype(jnp.bfloat16)


def repeated_sum(terms: np.ndarray, rows: int) -> oracles.Reference:
    """Column sums over `rows` rows. `terms` holds the distinct rows."""
    counts = rows // DISTINCT + (np.arange(DISTINCT) < rows % DISTINCT)
    total, magnitude = (np.sum(counts[:, None] * t, 0) for t in (terms, np.abs(terms)))
    return oracles.Reference(total, magnitude)


@pytest.mark.M1
@pytest.mark.M2
@pytest.mark.parametrize("op", ["layer_norm", "bias_gelu"])
def test_rows(platform, rows, distinct, op):
    """Every row of y and dx is right, and so are the parameters' gradients."""
    check_rows(op, rows, distinct)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "bias_gelu"])
def test_float32_rows(platform, distinct, op):
    """On GPUs there are enough rows that threads add their sums in parts."""
    rows = 2**11 + 3 if platform == "cpu" else 2**17 + 3
    check_rows(op, rows, distinct.astype(np.float32))


def check_rows(op: str, rows: int, distinct: np.ndarray) -> None:
    parameter = np.linspace(0.5, 2, FEATURES, dtype=np.float32)

    def apply(x: Any, p: Any) -> Any:
        if op == "bias_gelu":
            return jax_gradops.bias_gelu(x, p, implementation="ffi")
        if op == "rms_norm":
            return jax_gradops.rms_norm(x, p, epsilon=1e-2, implementation="ffi")
        return jax_gradops.layer_norm(x, p, p, epsilon=1e-2, implementation="ffi")

    @jax.jit
    def f(distinct: Any) -> Any:
        dy, x = distinct
        y, pull = jax.vjp(apply, x, parameter)
        return y, *pull(dy)

    @jax.jit
    def f_repeated(distinct: Any) -> Any:
        index = jnp.arange(rows) % DISTINCT
        y, dx, gradient = f(distinct[:, index])
        expected_y, expected_dx, _ = f(distinct)
        wrong = [
            jnp.sum(jnp.any(actual != expected[index], 1))
            for actual, expected in ((y, expected_y), (dx, expected_dx))
        ]
        return wrong, gradient

    (wrong_y, wrong_dx), gradient = f_repeated(distinct)
    assert wrong_y == wrong_dx == 0
    dy, x = map(widen, distinct)
    if op == "bias_gelu":
        terms = dy * oracles.gelu_derivative(x + parameter, True)
    else:
        x_hat = oracles.norm(x, epsilon=1e-2, centered=op == "layer_norm").value
        terms = dy * x_hat + (dy if op == "layer_norm" else 0)
    assert_matches(gradient, repeated_sum(terms, rows), np.float32, np.float32, "gradient")


@pytest.mark.M1
@pytest.mark.M2
@pytest.mark.E5
@pytest.mark.parametrize("classes", [FEATURES, FEATURES * DISTINCT])
def test_cross_entropy(platform, rows, distinct, classes):
    """Every row's loss and gradient is right. Long rows share blocks, too."""
    if classes > FEATURES:
        rows, distinct = rows // DISTINCT, distinct.reshape(2, 1, -1)
        distinct = np.concatenate([np.roll(distinct, shift, -1) for shift in range(5)], 1)
    x, weights = distinct[1], distinct[0, :, 0].astype(np.float32)
    labels = np.arange(len(x), dtype=np.int32) * 97 % classes
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def f(weights: Any, x: Any, labels: Any) -> Any:
        loss, pull = jax.vjp(
            lambda x: jax_gradops.softmax_cross_entropy_with_integer_labels(
                x, labels, **options, implementation="ffi"
            ),
            x,
        )
        return loss, *pull(weights)

    @jax.jit
    def f_repeated(*few: Any) -> Any:
        index = jnp.arange(rows) % len(x)
        loss, dx = f(*(a[index] for a in few))
        expected_loss, expected_dx = f(*few)
        # XLA may round the loss of other numbers of rows in other ways.
        wrong_loss = jnp.sum(jnp.abs(loss - expected_loss[index]) > np.float32(1e-5))
        one = jnp.finfo(dx.dtype).eps * jnp.abs(expected_dx)[index]
        wrong_dx = jnp.sum(jnp.any(jnp.abs(dx - expected_dx[index]) > one, 1))
        return (wrong_loss, wrong_dx), (expected_loss, expected_dx)

    wrong, results = f_repeated(weights, x, labels)
    assert wrong == (0, 0)
    options["labels_of"] = lambda *_: labels
    loss = cross_entropy_oracle.softmax_cross_entropy(widen(x), **options)
    (dx,) = cross_entropy_oracle.softmax_cross_entropy_vjp(widen(weights), widen(x), **options)
    assert_matches(results[0], loss, np.float32, np.float32, "loss")
    assert_matches(results[1], dx, x.dtype, np.float32, "dx")


@pytest.mark.M1
@pytest.mark.M2
@pytest.mark.parametrize(("axis", "channels"), [(-1, FEATURES), (1, 4), (1, 64)])
def test_batch_norm(platform, rows, distinct, axis, channels):
    """Checks statistics, every element of y and dx, and the parameters' gradients."""
    shape = (FEATURES,) if axis == -1 else (channels, FEATURES // channels)
    distinct = distinct.reshape(2, DISTINCT, *shape)
    scale, bias = np.linspace(0.5, 2, shape[0]), np.linspace(-1, 1, shape[0])

    def apply(x: Any, scale: Any, bias: Any) -> Any:
        return jax_gradops.batch_norm(x, scale, bias, axis=axis, implementation="ffi")

    @jax.jit
    def f(distinct: Any) -> Any:
        index = jnp.arange(rows) % DISTINCT
        dy, x = distinct[:, index]
        parameters = (p.astype(np.float32) for p in (scale, bias))
        y, pull, statistics = jax.vjp(lambda *args: (lambda y, *s: (y, s))(*apply(*args)), x,
                                      *parameters, has_aux=True)  # fmt: skip
        dx, *gradients = pull(dy)
        wrong = [jnp.sum(a != a[:DISTINCT][index]) for a in (y, dx)]
        return wrong, (*statistics, *gradients), (y[:DISTINCT], dx[:DISTINCT])

    wrong, of_channels, few = f(distinct)
    assert wrong == [0, 0]
    # The float64 results. Each distinct row is weighted with its count. Channels are last.
    counts = rows // DISTINCT + (np.arange(DISTINCT) < rows % DISTINCT)
    dy, x = (np.moveaxis(widen(a).reshape(DISTINCT, *shape), axis, -1) for a in distinct)
    weights = np.broadcast_to(counts.reshape(-1, *[1] * (x.ndim - 1)), x.shape)

    def mean_of(a: np.ndarray) -> np.ndarray:
        return np.average(a.reshape(-1, a.shape[-1]), 0, weights.reshape(-1, a.shape[-1]))

    mean = mean_of(x)
    var = mean_of((x - mean) ** 2)
    x_hat = (x - mean) / np.sqrt(var + 1e-5)
    terms = weights.sum() / weights.shape[-1]
    dscale, dbias = mean_of(dy * x_hat) * terms, mean_of(dy) * terms
    dx = scale / np.sqrt(var + 1e-5) * (dy - dbias / terms - x_hat * dscale / terms)
    size = np.sqrt(terms)  # grows as the sums' rounding errors do
    for actual, expected, atol in zip(
        of_channels, (mean, var, dscale, dbias), (1e-6, 1e-6, 1e-3 * size, 1e-3 * size), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol)
    for actual, expected in zip(few, (x_hat * scale + bias, dx), strict=True):
        actual = np.moveaxis(widen(actual), axis, -1)
        np.testing.assert_allclose(actual, expected, rtol=2**-8, atol=1e-4)


@pytest.mark.M1
@pytest.mark.M2
@pytest.mark.parametrize("one_sample", [False, True])
@pytest.mark.parametrize("axis", [-1, 1])
def test_group_norm(platform, rows, distinct, axis, one_sample):
    """Samples of [groups, channels, points]: every one is right. Or one sample of all elements."""
    channels, groups = 64, 4
    shape = (FEATURES // channels, channels) if axis == -1 else (channels, FEATURES // channels)
    scale, bias = (np.linspace(*ends, channels, dtype=np.float32) for ends in ((0.5, 2), (-1, 1)))
    options: dict[str, Any] = {"num_groups": groups, "axis": axis, "epsilon": 1e-2}
    options["activation"] = "silu"

    def joined(a: Any) -> Any:
        """All samples as one: the points of each are points of the whole."""
        if not one_sample:
            return a.reshape(-1, *shape)
        if axis == 1:  # [channels, samples, points]
            return jnp.moveaxis(a.reshape(-1, *shape), 0, 1)[None]
        return a.reshape(1, -1, channels)

    def apply(x: Any, *parameters: Any) -> Any:
        return jax_gradops.group_norm(x, *parameters, **options, implementation="ffi")

    def by_sample(a: Any) -> Any:
        if one_sample and axis == 1:
            a = jnp.moveaxis(a[0], 0, 1)
        return a.reshape(-1, FEATURES)

    @jax.jit
    def f_repeated(distinct: Any) -> Any:
        index = jnp.arange(rows) % DISTINCT
        y, pull = jax.vjp(apply, joined(distinct[1][index]), scale, bias)
        dx, *gradients = pull(joined(distinct[0][index]))
        y, dx = by_sample(y), by_sample(dx)
        wrong = [jnp.sum(a != a[:DISTINCT][index]) for a in (y, dx)]
        return wrong, gradients, (y[:DISTINCT], dx[:DISTINCT])

    wrong, gradients, few = f_repeated(distinct)
    assert wrong == [0, 0]
    expected = _expected_group_norm(distinct, rows, (scale, bias), shape, one_sample, options)
    size = np.sqrt(rows * FEATURES / channels)  # grows as the sums' rounding errors do
    for actual, wanted in zip(few, expected[:2], strict=True):
        np.testing.assert_allclose(widen(actual), wanted, rtol=2**-7, atol=2e-3)
    for actual, wanted in zip(gradients, expected[2:], strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-3 * size)


def _expected_group_norm(
    distinct: np.ndarray,
    rows: int,
    parameters: tuple[np.ndarray, np.ndarray],
    shape: tuple[int, ...],
    one_sample: bool,
    options: dict[str, Any],
) -> list[np.ndarray]:
    """y and dx of the distinct rows, and dscale and dbias of all rows, in float64."""
    counts = rows // DISTINCT + (np.arange(DISTINCT) < rows % DISTINCT)
    axis, groups = options["axis"], options["num_groups"]
    # Channels are second: [samples, groups, channels of a group, points].
    dy, x = (np.moveaxis(widen(a).reshape(DISTINCT, *shape), axis, 1) for a in distinct)
    channels = x.shape[1]
    dy, x = (a.reshape(DISTINCT, groups, channels // groups, -1) for a in (dy, x))
    scale, bias = (widen(p).reshape(groups, -1, 1) for p in parameters)

    def mean_of(a: np.ndarray) -> np.ndarray:
        """By sample and group; or by group, where a row counts as often as it occurs."""
        means = a.mean((2, 3), keepdims=True)
        return np.average(means, 0, counts, keepdims=True) if one_sample else means

    mean = mean_of(x)
    rstd = 1 / np.sqrt(mean_of((x - mean) ** 2) + options["epsilon"])
    x_hat = (x - mean) * rstd
    z = x_hat * scale + bias
    sigmoid = 1 / (1 + np.exp(-z))
    dz = dy * sigmoid * (1 + z * (1 - sigmoid))
    weighted = dz * scale
    dx = rstd * (weighted - mean_of(weighted) - x_hat * mean_of(weighted * x_hat))
    sums = [np.einsum("n,ngcp->gc", counts, a).reshape(-1) for a in (dz * x_hat, dz)]
    laid_out = [
        np.moveaxis(a.reshape(DISTINCT, channels, -1), 1, axis).reshape(DISTINCT, FEATURES)
        for a in (z * sigmoid, dx)
    ]
    return [*laid_out, *sums]


@pytest.mark.M1
@pytest.mark.M2
@pytest.mark.M4
def test_norm(platform, rows, distinct):
    """One leaf of more than 2^31 elements."""
    x = distinct[1]
    # Checks the norm of the leaf clipped in place, and its last rows.
    clip = functools.partial(inplace_clip_by_global_norm, max_norm=1.0)

    @jax.jit
    def clipped(x: Any) -> Any:
        (y,), norm = clip([x[jnp.arange(rows) % DISTINCT]])
        return norm, jnp.sum(jnp.square(y.astype(np.float32))), y[-3:]

    norm, squares, last = clipped(x)
    np.testing.assert_allclose(squares, 1, rtol=2**-7)
    expected = widen(x)[np.arange(rows - 3, rows) % DISTINCT] / float(norm)
    np.testing.assert_allclose(widen(last), expected, rtol=2**-8)
    norm = jax.jit(lambda x: jax_gradops.global_norm(x[jnp.arange(rows) % DISTINCT]))(x)
    expected = np.sqrt(np.sum(repeated_sum(widen(x) ** 2, rows).value))
    assert_matches(norm, oracles.Reference(expected, expected), np.float32, np.float32, "norm")


@pytest.mark.M1
def test_norms_of_many(platform):
    """There are more trees than a grid has blocks in one direction."""
    trees = 1000 if platform == "cpu" else 2**31 + 8
    memory = 0 if platform == "cpu" else (jax.devices("gpu")[0].memory_stats() or {})["bytes_limit"]
    if platform != "cpu" and memory < (needed := 32 * trees):
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")

    @jax.jit
    def wrong() -> Any:
        numbers = jax.lax.iota(np.uint32, trees) % 3 + 1
        norms = jax.vmap(lambda v: jax_gradops.global_norm([v]))(numbers.astype(jnp.bfloat16))
        return jnp.sum(norms != numbers.astype(np.float32)), norms[-3:]

    count, last = wrong()
    assert count == 0
    np.testing.assert_array_equal(last, (np.arange(trees - 3, trees) % 3 + 1).astype(np.float32))
