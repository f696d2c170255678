"""Batch norm: the suite of every op in both layouts, statistics across devices, and accuracy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from comparing import (
    OPTIMIZED,
    assert_a_thousand_runs_equal,
    assert_bitwise_equal,
    assert_matches,
    widen,
)
from conformance import IMPLEMENTATIONS_AND_DTYPES, OpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from transformations import vjp_of

import jax_gradops
from jax_gradops import backward

EPSILON = 0.25  # three rows have small variances, of which second derivatives are large


class BatchNormTests(OpTests):
    """With scale and bias; x is [..., channels], whatever the layout that the op is given."""

    kernels = ("batch_norm_fwd", "batch_norm_bwd")
    parameters = 2
    # Forward the mean, then squared distances from it; backward both sums.
    all_reduces = (3,)
    relu = False

    def op(self, x, scale, bias, *, implementation=None):
        if x.ndim == 1:  # as one row
            return self.op(x[None], scale, bias, implementation=implementation)[0]
        options = {"activation": "relu", "residual": self.residual(jnp, x)} if self.relu else {}
        return self.batch_norm(x, scale, bias, implementation=implementation, **options)

    def batch_norm(self, x, *parameters, **options):
        return jax_gradops.batch_norm(x, *parameters, epsilon=EPSILON, **options)[0]

    def residual(self, numpy: Any, x: Any) -> Any:
        """Of x, with a derivative of 0."""
        return numpy.where(x > 0.5, 0.75, -1.25).astype(x.dtype) if self.relu else None

    def options(self, x: np.ndarray) -> dict[str, Any]:
        return {"epsilon": EPSILON, "relu": self.relu, "residual": self.residual(np, x)}

    def oracle(self, x, scale, bias):
        if x.ndim == 1:
            y = self.oracle(x[None], scale, bias)
            return oracles.Reference(y.value[0], y.magnitude[0])
        return oracles.batch_norm(x, scale, bias, **self.options(x))

    def oracle_vjp(self, dy, x, scale, bias):
        if x.ndim == 1:
            dx, *rest = self.oracle_vjp(dy[None], x[None], scale, bias)
            return oracles.Reference(dx.value[0], dx.magnitude[0]), *rest
        return oracles.batch_norm_vjp(dy, x, scale, bias, **self.options(x))[:3]


class TestChannelsFirst(BatchNormTests):
    variant = True

    def batch_norm(self, x, *parameters, residual=None, **options):
        first = jnp.moveaxis(x, -1, 1)
        if residual is not None:
            residual = jnp.moveaxis(residual, -1, 1)
        y = jax_gradops.batch_norm(
            first, *parameters, axis=1, epsilon=EPSILON, residual=residual, **options
        )[0]
        return jnp.moveaxis(y, 1, -1)


class TestWithResidual(BatchNormTests):
    """relu(bn(x) + residual), channels last; `test_layouts` has all combinations."""

    relu = True

    def example(self, rng, shape, dtype, *parameter_dtypes):
        """Few numbers are drawn so that none is near to where the result has no derivative."""
        while True:
            dy, x, scale, bias = super().example(rng, shape, dtype, *parameter_dtypes)
            z = oracles.batch_norm(
                np.atleast_2d(widen(x)), widen(scale), widen(bias),
                epsilon=EPSILON, residual=np.atleast_2d(self.residual(np, widen(x))),
            )  # fmt: skip
            kinks = [widen(x) - 0.5, z.value]
            if x.size > 40 or all((np.abs(k) > 0.01).all() for k in kinks):
                return [dy, x, scale, bias]


# --- Arguments and results -----------------------------------------------------------------------


def ordinary(shape: tuple[int, ...], axis: int, dtype: Any, rng: np.random.Generator) -> Any:
    """dy, x, residual; scale and bias in float32."""
    arrays = [rng.standard_normal(shape).astype(dtype) for _ in range(3)]
    channels = shape[axis]
    return (*arrays, *(rng.uniform(0.5, 2, channels).astype(np.float32) for _ in range(2)))


def channels_last(x: Any, axis: int) -> np.ndarray:
    return np.moveaxis(widen(x), axis, -1)


@pytest.mark.B5
@pytest.mark.G4
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5, 3), 1), ((5, 3), 0), ((6, 4, 5), 1), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), -1),
        ((2, 3, 4, 5), 2), ((2, 3, 4, 5), 0), ((2, 3, 2, 4, 5), 1), ((2, 3, 2, 4, 5), -2),
        ((64, 5, 7, 7), 1), ((3, 70, 33, 33), 1), ((40, 9, 9, 130), -1), ((1, 8, 1, 1), 1),
        ((1, 1, 2000), 1), ((700, 1), 1), ((2, 3000), 1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_layouts(platform, implementation, shape, axis, activation, adds, rng):
    """y, statistics and all gradients, the residual's too."""
    dtypes = (np.float16, np.float32) if adds else (jnp.bfloat16, np.float32)
    if implementation == "xla":
        if shape not in ((2, 3, 4, 5), (3, 70, 33, 33)):
            return  # the same formula
        dtypes = dtypes[:1] if axis == 1 else dtypes[1:]
    for dtype in dtypes:
        dy, x, residual, scale, bias = ordinary(shape, axis, dtype, rng)
        operands = (x, scale, bias, *((residual,) if adds else ()))

        def f(*operands: Any) -> Any:
            x, scale, bias, *rest = operands
            return jax_gradops.batch_norm(
                x, scale, bias, axis=axis, epsilon=EPSILON, activation=activation,
                residual=rest[0] if rest else None, implementation=implementation,
            )  # fmt: skip

        options = OPTIMIZED if implementation == "xla" else None

        def both(dy: Any, *operands: Any) -> Any:
            (y, mean, var), pull = jax.vjp(f, *operands)
            return y, mean, var, pull((dy, jnp.ones_like(mean), jnp.ones_like(var)))

        y, mean, var, gradients = jax.jit(both, compiler_options=options)(dy, *operands)
        wide = [channels_last(a, axis) for a in (dy, x)]
        rest = {
            "epsilon": EPSILON, "relu": activation == "relu",
            "residual": channels_last(residual, axis) if adds else None,
        }  # fmt: skip
        parameters = (widen(scale), widen(bias))
        expected_y = oracles.batch_norm(wide[1], *parameters, **rest)
        assert_last(y, expected_y, axis, dtype, "y")
        rows = tuple(range(x.ndim - 1))
        np.testing.assert_allclose(mean, wide[1].mean(rows), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(var, wide[1].var(rows), rtol=3e-6, atol=1e-9)
        assert mean.dtype == var.dtype == np.float32
        expected = oracles.batch_norm_vjp(*wide, *parameters, **rest)
        assert_last(gradients[0], expected[0], axis, dtype, "dx")
        for name, got, want in zip(("dscale", "dbias"), gradients[1:3], expected[1:3], strict=True):
            assert_matches(got, want, np.float32, np.float32, name)
        if adds:
            assert_last(gradients[3], expected[3], axis, dtype, "dresidual")


def assert_last(actual: Any, expected: Any, axis: int, dtype: Any, what: str) -> None:
    moved = oracles.Reference(
        *(np.moveaxis(np.broadcast_to(part, expected.value.shape), -1, axis) for part in expected)
    )
    assert_matches(actual, moved, dtype, np.float32, what)


def test_statistics_are_constants(platform, implementation, rng):
    """Gradients flow through y alone."""
    _, x, _, scale, bias = ordinary((4, 5, 6), -1, np.float32, rng)

    def loss(x: Any) -> Any:
        _, mean, var = jax_gradops.batch_norm(x, scale, bias, implementation=implementation)
        return jnp.sum(mean) + jnp.sum(var)

    assert not np.asarray(jax.grad(loss)(x)).any()


@pytest.mark.parametrize("axis", [-1, 1])
def test_inference(platform, implementation, axis, dtype, rng):
    """Against float64, differentiable in all arrays, in forward mode too."""
    dy, x, _, scale, bias = ordinary((4, 6, 5, 3), axis, dtype, rng)
    mean = rng.standard_normal(scale.shape).astype(np.float32)
    var = rng.uniform(0.5, 2, scale.shape).astype(np.float32)

    def f(x: Any, mean: Any, var: Any, scale: Any, bias: Any, implementation: Any) -> Any:
        return jax_gradops.batch_norm_inference(
            x, mean, var, scale, bias, axis=axis, epsilon=EPSILON, implementation=implementation
        )

    def formula(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        along = [1] * x.ndim
        along[axis] = -1
        m, v, s, b = (jnp.reshape(a, along) for a in (mean, var, scale, bias))
        return (x - m) / jnp.sqrt(v + EPSILON) * s + b

    operands = (x, mean, var, scale, bias)
    wide = [widen(a) for a in operands]
    results = vjp_of(functools.partial(f, implementation=implementation))(dy, *operands)
    expected = vjp_of(formula)(widen(dy), *wide)
    for got, want in zip(results, expected, strict=True):
        eps = float(jnp.finfo(got.dtype).eps)
        np.testing.assert_allclose(
            widen(got), want, rtol=2 * eps, atol=40 * float(jnp.finfo(np.float32).eps)
        )
    assert results[0].dtype == dtype
    op = functools.partial(f, implementation=implementation)
    tangent = jax.jvp(op, operands, operands)[1]
    assert tangent.dtype == dtype and np.isfinite(widen(tangent)).all()


def test_inference_is_xlas_unless_asked_for(platform):
    x, one = jnp.ones((2, 3)), jnp.ones(3)
    op = jax_gradops.batch_norm_inference
    assert "jax_gradops." not in jax.jit(op).lower(x, one, one).as_text()
    insisting = functools.partial(op, implementation="ffi")
    assert "jax_gradops.batch_norm_fwd" in jax.jit(insisting).lower(x, one, one).as_text()
    in_use = jax_gradops.implementation_in_use("batch_norm_inference", "cpu")
    assert in_use.implementation == "xla" and "fuses" in in_use.reason
    with jax_gradops.use_implementation("ffi"):
        assert "jax_gradops." in jax.jit(lambda x: op(x, one, one)).lower(x).as_text()


# --- BatchNormalizationGrad ----------------------------------------------------------------------


def transcription(dy: Any, x: Any, scale: Any, mean: Any, rstd: Any) -> tuple[Any, Any, Any]:
    """The operator's published definition in float64; channels are the second axis."""
    dy, x, scale, mean, rstd = map(widen, (dy, x, scale, mean, rstd))
    axes = (0, *range(2, x.ndim))
    along = (-1, *[1] * (x.ndim - 2))
    n = x.size / x.shape[1]
    x_hat = (x - mean.reshape(along)) * rstd.reshape(along)
    dbias, dscale = dy.sum(axes), (dy * x_hat).sum(axes)
    inner = n * dy - dbias.reshape(along) - x_hat * dscale.reshape(along)
    return (scale * rstd).reshape(along) / n * inner, dscale, dbias


@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 7), (3, 5, 4, 6), (2, 5, 3, 2, 4)], ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "scale_dtype"),
    [("float32", "float32"), ("float64", "float64"), ("float16", "float16"),
     ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)  # fmt: skip
def test_gradient_operator(platform, implementation, shape, x_dtype, scale_dtype, rng):
    """With statistics in float32, or float64 for float64."""
    if implementation == "xla" and len(shape) != 4:
        return  # the same formula
    dtype, parameter = jnp.dtype(x_dtype), jnp.dtype(scale_dtype)
    dy, x = ((2 * rng.standard_normal(shape) + 0.5).astype(dtype) for _ in range(2))
    scale = rng.uniform(0.5, 2, 5).astype(parameter)
    run = functools.partial(
        backward.batch_norm_forward, axis=1, epsilon=EPSILON, implementation=implementation
    )
    y, mean, rstd = jax.jit(run)(x, scale)
    accum = np.float64 if x_dtype == "float64" else np.float32
    assert y.dtype == dtype and mean.dtype == rstd.dtype == accum
    axes = (0, *range(2, x.ndim))
    np.testing.assert_allclose(mean, widen(x).mean(axes), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(widen(x).var(axes) + EPSILON), rtol=1e-6)
    run = functools.partial(backward.batch_norm_backward, axis=1, implementation=implementation)
    results = jax.jit(run)(dy, x, scale, mean, rstd)
    for got, want, kind in zip(
        results, transcription(dy, x, scale, mean, rstd), (dtype, parameter, parameter), strict=True
    ):
        assert got.dtype == kind
        final = float(jnp.finfo(kind).eps)
        size = np.abs(want).max() + np.abs(widen(dy)).sum() / 5
        np.testing.assert_allclose(
            widen(got), want, rtol=0.6 * final, atol=8 * float(jnp.finfo(accum).eps) * size
        )
    alone = jax.jit(run)(dy, x, None, mean, rstd)
    assert alone[1] is None and alone[2].dtype == accum


# --- Accuracy ------------------------------------------------------------------------------------


def normalized(x: Any, axis: int, implementation: str) -> np.ndarray:
    f = functools.partial(
        jax_gradops.batch_norm, axis=axis, epsilon=0.0, implementation=implementation
    )
    return widen(jax.jit(lambda x: f(x)[0], compiler_options=OPTIMIZED)(x))


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_large_means(platform, implementation, axis, offset, rng):
    """float32 channels with |mean| up to 1e4 deviations are right to a few units in the last place
    of the largest |y|, forward and backward."""
    shape = (64, 9, 16, 16) if axis == 1 else (64, 16, 16, 9)
    x = (offset + rng.standard_normal(shape)).astype(np.float32)
    wide = channels_last(x, axis)
    want = oracles.batch_norm(wide, epsilon=0.0).value
    got = np.moveaxis(normalized(x, axis, implementation), axis, -1)
    assert np.abs(got - want).max() <= 4 * 2.0**-24 * np.abs(want).max()
    dy = rng.standard_normal(shape).astype(np.float32)

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, axis=axis, epsilon=0.0, implementation=implementation)[0]

    dx = jax.jit(vjp_of(op), compiler_options=OPTIMIZED)(dy, x)[1]
    expected = oracles.batch_norm_vjp(channels_last(dy, axis), wide, epsilon=0.0)[0]
    assert_last(dx, expected, axis, np.float32, f"dx, offset {offset}")


@pytest.mark.N4
@pytest.mark.N7
@pytest.mark.parametrize("axis", [-1, 1])
def test_constant_channels(platform, axis, dtype):
    """A constant channel gives exactly its bias, at any magnitude."""
    values = np.array([0, 1, -3, 0.1, 1e-3, 6e4, -6e4], dtype)
    bias = np.arange(7).astype(np.float32)
    shape = (33, 5, 7) if axis == -1 else (33, 7, 5)
    x = np.broadcast_to(values if axis == -1 else values[:, None], shape)
    y, mean, var = jax_gradops.batch_norm(x, None, bias, axis=axis, implementation="ffi")
    assert (channels_last(y, axis) == bias).all()
    assert (widen(mean) == widen(values)).all() and not np.asarray(var).any()


@pytest.mark.N8
@pytest.mark.N11
@pytest.mark.B3
@pytest.mark.B4
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    ("mean", "deviation", "dtype"),
    [(5, 0.1, "bfloat16"), (0, 3e4, "float16"), (6e4, 100, "float16"), (0, 1e-6, "float16")],
    ids=["large mean", "large", "saturated", "subnormal"],
)
def test_hard_halves(platform, implementation, axis, mean, deviation, dtype, rng):
    """16-bit data near the ends of its type's range: statistics are float32's, dx is finite."""
    shape = (32, 8, 8, 5) if axis == -1 else (32, 5, 8, 8)
    x, dy = mean + deviation * rng.standard_normal(shape), rng.standard_normal(shape)
    largest = float(jnp.finfo(dtype).max)
    x, dy = (np.clip(a, -largest, largest).astype(dtype) for a in (x, dy))
    epsilon = 1e-5 if deviation > 1 else 1e-12

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, axis=axis, epsilon=epsilon, implementation=implementation)

    _, mean_, var = op(x)
    assert mean_.dtype == var.dtype == np.float32
    y, dx = jax.jit(vjp_of(lambda x: op(x)[0]))(dy, x)
    wide, wide_dy = channels_last(x, axis), channels_last(dy, axis)
    assert_last(y, oracles.batch_norm(wide, epsilon=epsilon), axis, dtype, "y")
    expected = oracles.batch_norm_vjp(wide_dy, wide, epsilon=epsilon)[0]
    finite = np.abs(expected.value) < largest
    got = channels_last(dx, axis)
    assert np.isfinite(got[finite]).all()
    np.testing.assert_allclose(
        got[finite], expected.value[finite], rtol=2**-7, atol=2**-6 * expected.magnitude.min()
    )


@pytest.mark.R2
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_runs(platform, dtype, rng):
    """Bitwise equal, in one loop, in both layouts."""
    dtype = jnp.dtype(dtype)
    dy, x, residual, scale, bias = ordinary((20, 6, 7, 40), -1, dtype, rng)

    def run(x: Any) -> list[Any]:
        results = []
        for axis, channels in ((-1, 40), (1, 6)):
            op = functools.partial(
                jax_gradops.batch_norm, axis=axis, activation="relu", implementation="ffi"
            )
            (y, mean, var), pull = jax.vjp(
                lambda x, *p, op=op: op(x, *p, residual=residual),
                x,
                scale[:channels],
                bias[:channels],
            )
            results += [y, mean, var, *pull((dy, mean, var))]
        return results

    assert_a_thousand_runs_equal(run, x)


@pytest.mark.parametrize("others", ["random", "signs"])
@pytest.mark.parametrize(
    ("shape", "axis", "every"), [((65_536, 256), -1, 128), ((1, 16, 16_384), 1, 1024)], ids=str
)
def test_guess_of_the_mean_that_is_far_off(shape, axis, every, others, rng):
    """The elements that the CPU's kernel looks at first, to guess means, are unlike the others,
    whose squares all round in the same direction if they are 1 or -1."""
    values = rng.standard_normal(max(shape)).astype(np.float32)
    if others == "signs":
        values = np.sign(values)
    values[::every] = 1e4
    x = np.broadcast_to(values[:, None] if axis == -1 else values, shape)
    with jax.default_device(jax.devices("cpu")[0]):
        _, mean, var = jax_gradops.batch_norm(x, axis=axis, implementation="ffi")
    # Of numbers of which some are 128 times as large.
    np.testing.assert_allclose(mean, np.mean(values, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(var, np.var(values.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("axis", [-1, 1])
def test_outlier_at_the_beginning(platform, implementation, axis, rng):
    """What is taken off first is no good guess of the mean."""
    x = rng.standard_normal((2, 2048, 3)).astype(np.float32)
    x[0, 0] = 1e6
    want = oracles.batch_norm(widen(x), epsilon=0.0).value
    got = np.moveaxis(normalized(np.moveaxis(x, -1, axis), axis, implementation), axis, -1)
    assert np.abs(got - want).max() <= 8 * 2.0**-24 * np.abs(want).max()


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 63, 63, 117), -1), ((5, 70, 63, 63), 1), ((8, 4, 200, 250), 1)],
    ids=str,
)
def test_large_results(platform, shape, axis, rng):
    """So large that the CPU's kernels write them past the caches; images differ in their means."""
    dy, x, residual, scale, bias = ordinary(shape, axis, np.float32, rng)
    x += np.linspace(-9, 9, shape[0], dtype=np.float32).reshape(-1, 1, 1, 1)

    def op(x: Any, residual: Any) -> Any:
        return jax_gradops.batch_norm(
            x, scale, bias, axis=axis, epsilon=EPSILON, activation="relu", residual=residual,
            implementation="ffi",
        )[0]  # fmt: skip

    y, dx, dresidual = jax.jit(vjp_of(op))(dy, x, residual)
    wide = [*(channels_last(a, axis) for a in (dy, x)), widen(scale), widen(bias)]
    rest = {"epsilon": EPSILON, "relu": True, "residual": channels_last(residual, axis)}
    assert_last(y, oracles.batch_norm(*wide[1:], **rest), axis, np.float32, "y")
    expected = oracles.batch_norm_vjp(*wide, **rest)
    assert_last(dx, expected[0], axis, np.float32, "dx")
    assert_last(dresidual, expected[3], axis, np.float32, "dresidual")


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(("implementation", "dtype"), IMPLEMENTATIONS_AND_DTYPES)
def test_nonfinite(platform, implementation, axis, dtype, rng):
    """NaN or infinity spoils its channel and no other."""
    shape = (8, 5, 6)
    dy, clean, _, scale, bias = ordinary(shape, axis, dtype, rng)

    def op(x: Any, scale: Any, bias: Any) -> Any:
        return jax_gradops.batch_norm(x, scale, bias, axis=axis, implementation=implementation)[0]

    f = jax.jit(vjp_of(op))
    expected = f(dy, clean, scale, bias)
    for value in (np.nan, np.inf, -np.inf):
        x = clean.copy()
        np.moveaxis(x, axis, -1)[3, 2, 4] = value
        for got, want in zip(f(dy, x, scale, bias), expected, strict=True):
            got, want = np.asarray(got), np.asarray(want)
            if got.ndim > 1:
                got, want = np.moveaxis(got, axis, -1), np.moveaxis(want, axis, -1)
                assert np.isnan(widen(got[..., 4])).all()
            others = np.arange(got.shape[-1]) != 4
            assert_bitwise_equal(got[..., others], want[..., others])


@pytest.mark.parametrize("adds", [False, True], ids=["x", "x and residual"])
def test_relu_at_zero(platform, implementation, adds):
    """Its derivative is 0 there, as that of `jax.nn.relu`: of channels that are constant."""
    x, zeros = jnp.full((6, 5), 3.0, jnp.float32), jnp.zeros(5, jnp.float32)

    def op(x: Any, bias: Any) -> Any:
        residual = jnp.zeros_like(x) if adds else None
        return jax_gradops.batch_norm(
            x, None, bias, activation="relu", residual=residual, implementation=implementation
        )[0]

    y, dx, dbias = jax.jit(vjp_of(op))(jnp.ones_like(x), x, zeros)
    assert not np.any(y) and not np.any(dx) and not np.any(dbias)


def test_relu_keeps_nan(platform, implementation):
    x = np.array([[1.0, np.nan], [2.0, 1.0]], np.float32)
    y = jax_gradops.batch_norm(x, activation="relu", implementation=implementation)[0]
    assert np.isnan(y[:, 1]).all() and not np.isnan(y[:, 0]).any()


@pytest.mark.B1
@pytest.mark.B2
def test_batch_of_one(platform, implementation):
    """The biased variance of one element is 0: y is the bias, and x has no gradient."""
    x, bias = np.full((1, 3), 7, np.float32), np.arange(3).astype(np.float32)
    y, mean, var = jax_gradops.batch_norm(x, None, bias, implementation=implementation)
    assert (y[0] == bias).all() and (mean == 7).all() and not np.asarray(var).any()
    dx = jax.grad(lambda x: jnp.sum(jax_gradops.batch_norm(x)[0] ** 2))(x)
    assert not np.asarray(dx).any()


# --- Statistics across devices -------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("how", ["shard_map", "shard_map without check_vma", "vmap", "pmap"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "relu and residual"])
def test_axis_name(platform, implementation, how, axis, with_residual, rng):
    """Statistics over mapped axes are the whole batch's, and so are gradients."""
    shape = (8, 4, 3, 5)
    dy, x, residual, scale, bias = ordinary(shape, axis, np.float32, rng)
    operands = [x, residual] if with_residual else [x]
    devices = mesh(platform, AxisType.Auto)
    parts = devices.size
    options = {"activation": "relu"} if with_residual else {}

    def op(name: Any, scale: Any, bias: Any, x: Any, *residual: Any) -> Any:
        return jax_gradops.batch_norm(
            x, scale, bias, axis=axis, epsilon=EPSILON, axis_name=name,
            residual=residual[0] if residual else None, implementation=implementation, **options,
        )  # fmt: skip

    if how.startswith("shard_map"):
        rows = P(("data", "model"))
        mapped = jax.shard_map(
            functools.partial(op, ("data", "model")), mesh=devices,
            in_specs=(P(), P(), *[rows] * len(operands)), out_specs=(rows, P(), P()),
            check_vma=how == "shard_map",
        )  # fmt: skip
    else:
        over = {"axis_name": "batch", "in_axes": (None, None, *[0] * len(operands))}
        inside = functools.partial(op, "batch")
        if how == "vmap":
            each: Any = jax.vmap(inside, **over)
        else:
            each = jax.pmap(inside, devices=list(devices.devices.ravel()), **over)

        def mapped(scale: Any, bias: Any, *rows: Any) -> Any:
            split = [jnp.reshape(a, (parts, -1, *a.shape[1:])) for a in rows]
            y, mean, var = each(scale, bias, *split)
            return jnp.reshape(y, shape), mean[-1], var[0]

    def both(dy: Any, *arguments: Any) -> Any:
        (y, mean, var), pull = jax.vjp(mapped, *arguments)
        return y, mean, var, pull((dy, jnp.zeros_like(mean), jnp.zeros_like(var)))

    run = both if how == "pmap" else jax.jit(both)
    y, mean, var, (dscale, dbias, dx, *dresidual) = run(dy, scale, bias, *operands)
    rest = {
        "epsilon": EPSILON, "relu": with_residual,
        "residual": channels_last(residual, axis) if with_residual else None,
    }  # fmt: skip
    wide, parameters = [channels_last(a, axis) for a in (dy, x)], (widen(scale), widen(bias))
    assert_last(y, oracles.batch_norm(wide[1], *parameters, **rest), axis, np.float32, "y")
    axes = tuple(range(3))
    np.testing.assert_allclose(mean, wide[1].mean(axes), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(var, wide[1].var(axes), rtol=2e-6)
    expected = oracles.batch_norm_vjp(*wide, *parameters, **rest)
    assert_last(dx, expected[0], axis, np.float32, "dx")
    assert_matches(dscale, expected[1], np.float32, np.float32, "dscale")
    assert_matches(dbias, expected[2], np.float32, np.float32, "dbias")
    if with_residual:
        assert_last(dresidual[0], expected[3], axis, np.float32, "dresidual")


def test_without_axis_name_statistics_are_the_devices_own(platform, rng):
    """As Flax's, inside shard_map."""
    devices = mesh(platform, AxisType.Auto)
    _, x, _, scale, bias = ordinary((16, 5), -1, np.float32, rng)
    rows = P(("data", "model"))
    mapped = jax.shard_map(
        lambda x: jax_gradops.batch_norm(x, scale, bias, epsilon=EPSILON)[0],
        mesh=devices, in_specs=rows, out_specs=rows,
    )  # fmt: skip
    parts = [
        oracles.batch_norm(widen(part), widen(scale), widen(bias), epsilon=EPSILON).value
        for part in np.split(x, devices.size)
    ]
    np.testing.assert_allclose(jax.jit(mapped)(x), np.concatenate(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.R5
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data"), P("data", "model")], ids=str)
def test_images_spread(platform, spec, rng):
    """NCHW, spread over the batch, over the height, and over batch and channels: large means too.

    Only numbers per channel travel.
    """
    devices = mesh(platform, AxisType.Auto)
    dy, x, _, scale, bias = ordinary((8, 4, 8, 6), 1, np.float32, rng)
    x += 1e4

    def op(x: Any, scale: Any, bias: Any) -> Any:
        return jax_gradops.batch_norm(
            x, scale, bias, axis=1, epsilon=EPSILON, implementation="ffi"
        )[0]

    arrays = [jax.device_put(a, NamedSharding(devices, spec)) for a in (dy, x)]
    compiled = jax.jit(vjp_of(op)).lower(*arrays, scale, bias).compile()
    y, dx, dscale, dbias = compiled(*arrays, scale, bias)
    found = collectives(compiled.as_text())
    if spec != P("data", "model"):
        assert found.pop("all-reduce") == 3
        assert not found
    else:  # parameters are put where channels are, their gradients gathered
        assert "all-to-all" not in found and "collective-permute" not in found
    wide, parameters = [channels_last(a, 1) for a in (dy, x)], (widen(scale), widen(bias))
    assert_last(y, oracles.batch_norm(wide[1], *parameters, epsilon=EPSILON), 1, np.float32, "y")
    expected = oracles.batch_norm_vjp(*wide, *parameters, epsilon=EPSILON)
    assert_last(dx, expected[0], 1, np.float32, "dx")
    for got, want in zip((dscale, dbias), expected[1:3], strict=True):
        assert_matches(got, want, np.float32, np.float32, "a parameter's gradient")


# --- PyTorch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 5), (4, 6, 9, 9)], ids=str)
def test_pytorch(shape, rng):
    """native_batch_norm and its gradient, on the CPU."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dy, x, _, scale, bias = ordinary(shape, 1, np.float32, rng)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, scale, bias)]
    want, mean, rstd = torch.ops.aten.native_batch_norm(*tensors, None, None, True, 0.1, EPSILON)
    want.backward(torch.tensor(dy))

    def op(*operands: Any) -> Any:
        return jax_gradops.batch_norm(*operands, axis=1, epsilon=EPSILON, implementation="ffi")[0]

    results = vjp_of(op)(dy, x, scale, bias)
    expected = [want.detach(), *(t.grad for t in tensors)]
    _, our_mean, our_rstd = backward.batch_norm_forward(x, axis=1, epsilon=EPSILON)
    pairs = [*zip(results, expected, strict=True), (our_mean, mean), (our_rstd, rstd)]
    for got, theirs in pairs:
        np.testing.assert_allclose(got, theirs.detach().numpy(), rtol=2e-5, atol=2e-5)
