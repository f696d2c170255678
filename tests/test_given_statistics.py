"""Gradient operators with arguments that do not occur in the derivative of an op.

ONNX Runtime and oneDNN register such operators. Examples are statistics that are not the row's, a
cotangent of another dtype, a scale offset, relu and a residual.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import accum, assert_bitwise_equal, assert_matches, widen
from operators import layer_normalization_grad

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops import backward

# On GPUs these are narrow rows, even ones, ones that start anywhere, and streamed ones.
SHAPES = [(3, 7), (40, 64), (300, 33), (5, 1000), (37, 4096), (300, 1001), (3, 20_000)]
NAMES = ("dx", "dscale", "dbias")


def check(results: Any, references: Any, like: Any, what: str) -> None:
    for name, a, r in zip(NAMES, results, references, strict=True):
        assert_matches(a, r, a.dtype, accum(like.dtype), f"{what}: {name}")


def test_a_mean_that_is_not_the_rows(platform, implementation):
    """A small version of a case of oneDNN's benchdnn."""
    x, dy = np.float32([[0, 2, 0]]), np.float32([[1, 2, 4]])
    mean, variance = np.float32([1]), np.float32([0.9375])
    options = {"variance": variance, "epsilon": 0.0625, "implementation": implementation}
    dx, dscale, dbias = backward.layer_norm_backward(dy, x, np.ones(3, np.float32), mean, **options)
    np.testing.assert_allclose(dx, [[-7 / 3, 2 / 3, 2 / 3]], rtol=1e-6)
    np.testing.assert_array_equal(dscale, [-1, 2, -4])
    np.testing.assert_array_equal(dbias, [1, 2, 4])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_as_given(platform, implementation, shape, dtype, rng):
    """The given mean is far off, or off by a few units in the last place, or the row's own."""
    dtype = jnp.dtype(dtype)
    dy, x = (a.astype(dtype) for a in (0.3 + rng.standard_normal(shape), rng.normal(2, 1, shape)))
    scale = rng.uniform(0.5, 2, shape[1]).astype(accum(dtype))
    kind = np.arange(shape[0])[:, None] % 3
    own = widen(x).mean(1, keepdims=True)
    off = np.where(kind == 0, rng.normal(0, 3, kind.shape), 0)
    off += np.where(kind == 1, 2e3 * float(jnp.finfo(accum(dtype)).eps), 0)
    mean = (own + off).astype(accum(dtype))
    rstd = rng.uniform(0.3, 1.5, kind.shape).astype(accum(dtype))
    f = jax.jit(functools.partial(backward.layer_norm_backward, implementation=implementation))
    results = f(dy, x, scale, mean[:, 0], rstd[:, 0])
    expected = layer_normalization_grad(*map(widen, (dy, x, scale, mean, rstd)))
    # The test would see a mean of 2 that is 2,000 units off: the limit is the rounding error of x -
    # mean.
    size = (np.abs(widen(x) - widen(mean)) + 1) * widen(rstd)
    tight = oracles_of(widen(dy), size, widen(scale), widen(rstd))
    expected = [e._replace(magnitude=m) for e, m in zip(expected, tight, strict=True)]
    check(results, expected, x, f"{dtype} {shape}")


def oracles_of(dy: Any, size: Any, scale: Any, rstd: Any) -> list[Any]:
    """Magnitudes of dx, dscale and dbias for an x_hat of this size."""
    wdy = np.abs(dy * scale)
    mean = functools.partial(np.mean, axis=1, keepdims=True)
    dx = rstd * (wdy + size * mean(wdy * size) + mean(wdy))
    return [dx, np.sum(np.abs(dy) * size, 0), np.sum(np.abs(dy), 0)]


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rounded_mean_of_the_row(platform, implementation, shape, ratio, rng):
    """A mean's rounding error has no influence, even if it is large compared to the deviation."""
    dy, x, scale = (
        rng.standard_normal(shape),
        rng.standard_normal(shape),
        rng.uniform(1, 2, shape[1]),
    )
    dy, x, scale = (a.astype(np.float32) for a in (dy, ratio + x, scale))
    wide = widen(x)
    mean = wide.mean(1).astype(np.float32)
    rstd = (1 / np.sqrt(wide.var(1) + 1e-6)).astype(np.float32)
    f = jax.jit(functools.partial(backward.layer_norm_backward, implementation=implementation))
    expected = oracles.norm_vjp(*map(widen, (dy, x, scale)), epsilon=1e-6, centered=True)
    check(f(dy, x, scale, mean, rstd), expected, x, f"{shape}, {ratio}")


def test_derivative_in_the_mean(platform, implementation, rng):
    """The derivative of the formula with respect to the mean, which is an ordinary argument."""
    x, dy = rng.standard_normal((2, 3, 8))
    scale, mean, rstd = rng.standard_normal(8), x.mean(1), 1 + rng.random(3)
    f = functools.partial(backward.layer_norm_backward, dy, x, scale, implementation=implementation)
    (_, dscale, _), pull = jax.vjp(f, mean, rstd)
    of_mean, of_rstd = pull((np.zeros_like(x), np.ones(8), np.zeros(8)))
    np.testing.assert_allclose(dscale, (dy * (x - mean[:, None]) * rstd[:, None]).sum(0))
    np.testing.assert_allclose(of_mean, -(dy * rstd[:, None]).sum(1), rtol=1e-12)
    np.testing.assert_allclose(of_rstd, (dy * (x - mean[:, None])).sum(1), rtol=1e-12)


def calls(x: Any, scale: Any, bias: Any, **options: Any) -> dict[str, Any]:
    """Backward operators as functions of dy."""
    statistics = np.full(len(x), 0.5, np.float32), np.full(len(x), 0.75, np.float32)
    return {
        name: functools.partial(getattr(backward, name), **{array: x}, **given, **options)
        for name, array, given in (
            ("layer_norm_backward", "x", {"scale": scale, "mean": statistics[0]}),
            ("rms_norm_backward", "x", {"scale": scale}),
            ("layer_norm_backward_from_output", "y", {"scale": scale, "bias": bias}),
            ("rms_norm_backward_from_output", "y", {"scale": scale}),
        )
        for given in [given | {"rstd": statistics[1]}]
    }


def test_scale_offset(platform, implementation, rng):
    """Equals a call with scale + offset, and the forward operator's offset. Kernels: bitwise."""
    dy, x = (rng.standard_normal((6, 33)).astype(np.float32) for _ in range(2))
    scale = (rng.integers(-8, 9, 33) / 8).astype(np.float32)
    bias = rng.standard_normal(33).astype(np.float32)
    ours = calls(x, scale, bias, scale_offset=1.0, implementation=implementation)
    summed = calls(x, scale + 1, bias, implementation=implementation)
    for name, f in ours.items():
        for a, e in zip(f(dy), summed[name](dy), strict=True):
            if implementation == "ffi":
                assert_bitwise_equal(a, e, name)
            else:  # XLA fuses the addition on GPUs
                np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("of_dy", "of_x", "wide"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("float64", "float32", "float64"),
        ("float16", "float64", "float64"),
    ],
)
def test_cotangent_of_another_dtype(platform, implementation, of_dy, of_x, wide, rng):
    """Equals a call with both in the wider dtype. dx is then rounded to x's dtype."""
    dy, x = (rng.standard_normal((6, 33)).astype(jnp.dtype(d)) for d in (of_dy, of_x))
    scale, bias = (rng.standard_normal(33).astype(jnp.dtype(of_dy)) for _ in range(2))
    ours = calls(x, scale, bias, implementation=implementation)
    widened = calls(x.astype(wide), scale, bias, implementation=implementation)
    for name, f in ours.items():
        dx, *gradients = f(dy)
        expected, *others = widened[name](dy.astype(wide))
        assert_bitwise_equal(dx, expected.astype(x.dtype), name)
        for a, e in zip(gradients, others, strict=True):
            assert a is None or a.dtype == scale.dtype
            assert_bitwise_equal(a, e, name)


@pytest.mark.parametrize("begin", [-1, 1])
def test_forward_by_given_statistics(platform, dtype, begin, rng):
    """Given statistics are used and returned. All arrays have derivatives, in forward mode too."""
    wide = accum(dtype)
    x = rng.standard_normal((2, 3, 8)).astype(dtype)
    rows, inner = x.shape[:begin], x.shape[begin:]
    kept = (*rows, *[1] * len(inner))
    mean, variance = rng.standard_normal(rows).astype(wide), rng.random(rows).astype(wide)
    scale, bias = (rng.standard_normal(inner).astype(np.float32) for _ in range(2))
    options = {"begin_norm_axis": begin, "epsilon": 1e-2, "scale_offset": 0.5}

    def f(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        given = {"mean": mean, "variance": variance}
        return backward.layer_norm_forward(x, scale, bias, **given, **options)

    def formula(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
        rstd = 1 / jnp.sqrt(variance.reshape(kept) + 1e-2)
        scale, bias = (jnp.broadcast_to(p, x.shape) for p in (scale, bias))
        return (x - mean.reshape(kept)) * rstd * (scale + 0.5) + bias

    operands = (x, scale, bias, mean.reshape(kept), variance)
    y, returned, rstd = jax.jit(f)(*operands)
    np.testing.assert_array_equal(returned, mean)
    assert y.dtype == dtype and rstd.dtype == wide
    np.testing.assert_allclose(rstd, 1 / np.sqrt(widen(variance) + 1e-2), rtol=1e-6)
    exact = tuple(map(widen, operands))
    size = 20 + 0 * x.astype(np.float64)
    reference = oracles.Reference(np.asarray(formula(*exact)), size)
    assert_matches(y, reference, dtype, wide, "y")
    tangents = tuple(np.ones_like(a) for a in operands)
    ours = jax.jvp(lambda *a: f(*a)[0], operands, tangents)[1]
    expected = jax.jvp(formula, exact, tuple(map(widen, tangents)))[1]
    np.testing.assert_allclose(widen(ours), expected, rtol=0.02, atol=0.1)
    cotangent = np.ones_like(x)
    ours = jax.vjp(lambda *given: f(*given)[0], *operands)[1](cotangent)
    expected = jax.vjp(formula, *exact)[1](widen(cotangent))
    for a, o, e in zip(operands, ours, expected, strict=True):
        assert (o.dtype, o.shape) == (a.dtype, a.shape)
        np.testing.assert_allclose(widen(o), e, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 33), (0, 4)], ids=str)
def test_gelu_backward(platform, implementation, dtype, approximate, shape, rng):
    dy, x = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    f = functools.partial(
        backward.gelu_backward, approximate=approximate, implementation=implementation
    )
    dx = jax.jit(f)(dy, x)
    reference = oracles.bias_gelu_vjp(
        *(np.atleast_1d(widen(a)) for a in (dy, x)), approximate=approximate
    )[0]
    value, magnitude = (a.reshape(shape) for a in reference[:2])
    assert_matches(dx, oracles.Reference(value, magnitude), dtype, accum(dtype), "dx")


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("axis", [-1, 1])
def test_batch_norm_backward(platform, implementation, axis, activation, rng):
    """The derivative of the op. relu's comes from x and the bias, or, with a residual, from y."""
    x, dy, residual = rng.standard_normal((3, 6, 5, 4)).astype(np.float32)
    scale = rng.uniform(0.5, 1, x.shape[axis]).astype(np.float32)
    bias = rng.standard_normal(scale.shape).astype(jnp.bfloat16)
    options = {"axis": axis, "implementation": implementation}
    _, mean, rstd = backward.batch_norm_forward(x, scale, bias, **options)
    for rest in (None, residual):

        def op(x: Any, scale: Any, bias: Any, rest: Any) -> Any:
            given = {"activation": activation, "residual": rest}
            return jax_gradops.batch_norm(x, scale, bias, **given, **options)[0]

        y, pull = jax.vjp(op, x, scale, bias, rest)
        expected = [g for g in pull(dy) if g is not None]
        given = {"bias": bias, "activation": activation, "y": None if rest is None else y}
        run = jax.jit(
            functools.partial(backward.batch_norm_backward, axis=axis),
            static_argnames=("activation", "implementation"),
        )
        results = run(dy, x, scale, mean, rstd, **given, implementation=implementation)
        assert len(results) == len(expected)
        for a, e in zip(results, expected, strict=True):
            assert a.dtype == e.dtype
            np.testing.assert_allclose(widen(a), widen(e), rtol=1e-2, atol=1e-5)
        if rest is None and activation is None:
            without = run(dy, x, scale, mean, rstd, implementation=implementation)
            assert without[2].dtype == scale.dtype
            assert_bitwise_equal(without[0], results[0])
