"""Errors of the norms against float64, in units in the last place, as the documentation promises.

The suite's tolerance (`comparing.py`) bounds rounding errors. These tests bound the errors that a
user sees.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import ROUNDINGS, widen

import jax_gradops
from jax_gradops import _oracles as oracles

# Rows in one or several blocks of the CPU's kernels, odd rows, and every kind of GPU kernel.
SHAPES = ((64, 64), (64, 129), (64, 1000), (64, 4096), (8, 20_000), (4, 65_536))
ULPS = 4


def ulp(x: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between numbers of `dtype` at |x|."""
    kind = jnp.finfo(dtype)
    exponent = np.frexp(np.maximum(np.abs(x), float(kind.smallest_normal)))[1] - 1
    return np.ldexp(float(kind.eps), exponent)


def example(rng: Any, op: str, shape: Any, dtype: Any, mean: float = 0.5) -> list[Any]:
    """dy, x, and parameters."""
    dy, x = rng.standard_normal((2, *shape))
    parameters = [1 + 0.5 * rng.standard_normal(shape[1]), rng.standard_normal(shape[1])]
    parameters = parameters[: 2 if op == "layer_norm" else 1]
    return [dy.astype(dtype), (mean + x).astype(dtype), *(p.astype(np.float32) for p in parameters)]


def size_of_y(op: str, x: Any, scale: Any, *bias: Any) -> tuple[np.ndarray, np.ndarray]:
    """y in float64, and the largest of |y|, its terms, and the row's root mean square."""
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}
    y = oracles.norm(*map(widen, (x, scale, *bias)), **settings).value
    shift = widen(bias[0]) if bias else np.zeros(y.shape[1])
    usual = np.sqrt(np.mean(y * y, 1, keepdims=True))
    return y, functools.reduce(np.maximum, (np.abs(y), np.abs(y - shift), np.abs(shift), usual))


@pytest.mark.N1
@pytest.mark.N2
@pytest.mark.N13
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
def test_float32(platform, op, mean, rng):
    """Forward, also if the mean is large compared to the deviation."""
    examples = [example(rng, op, shape, np.float32, mean)[1:] for shape in SHAPES]
    plain = [e[:1] for e in examples]
    f = functools.partial(getattr(jax_gradops, op), implementation="ffi")
    results = jax.jit(lambda examples: [f(*e) for e in examples])(examples + plain)
    for (x, *parameters), actual in zip(examples + plain, results, strict=True):
        y, size = size_of_y(op, x, *(parameters or [np.ones(x.shape[1])]))
        error = np.max(np.abs(widen(actual) - y) / ulp(size, np.float32))
        assert error <= ULPS, f"{x.shape}, {len(parameters)} parameters: {error} ulp"


@pytest.mark.N12
@pytest.mark.N16
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(platform, op, dtype, rng):
    """y and dx are within one unit of their dtype, apart from errors that float32 has too."""
    dtype = jnp.dtype(dtype)
    examples = [example(rng, op, shape, dtype) for shape in SHAPES]

    def f(dy: Any, *operands: Any) -> Any:
        op_ = functools.partial(getattr(jax_gradops, op), implementation="ffi")
        y, pull = jax.vjp(op_, *operands)
        return y, pull(dy)[0]

    results = jax.jit(lambda examples: [f(*e) for e in examples])(examples)
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}
    for (dy, x, *parameters), (actual_y, actual_dx) in zip(examples, results, strict=True):
        y, size = size_of_y(op, x, *parameters)
        error = np.abs(widen(actual_y) - y)
        assert (error <= ulp(y, dtype) + ULPS * ulp(size, np.float32)).all()
        dx = oracles.norm_vjp(*map(widen, (dy, x, parameters[0])), **settings)[0]
        error = np.abs(widen(actual_dx) - dx.value)
        bound = ROUNDINGS * float(np.finfo(np.float32).eps) * dx.magnitude
        assert (error <= ulp(dx.value, dtype) + bound).all()


def test_from_output_in_bfloat16(platform, op, rng):
    """The figures of the docstring: dx is as exact as bfloat16, dscale has three digits."""
    dtype = jnp.dtype("bfloat16")
    dy, x, *parameters = example(rng, op, (2048, 1024), dtype)
    scale = rng.uniform(0.5, 2, 1024).astype(np.float32)
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}

    def errors(scale: Any) -> tuple[float, float]:
        f = functools.partial(getattr(jax_gradops, op), residuals="output", implementation="ffi")
        dx, dscale, *_ = jax.vjp(f, x, scale, *parameters[1:])[1](dy)
        references = oracles.norm_vjp(*map(widen, (dy, x, scale)), **settings)
        return tuple(
            float(np.linalg.norm(widen(a) - r.value) / np.linalg.norm(r.value))
            for a, r in zip((dx, dscale), references, strict=False)
        )

    of_dx, of_dscale = errors(scale)
    assert of_dx <= 0.002 and of_dscale <= 0.003
    # With scale 1/100 beside a bias of size 1, y holds little of x_hat.
    of_dx, of_dscale = errors(scale / 100)
    if op == "layer_norm":
        assert 0.003 < of_dx <= 0.02 and 0.05 < of_dscale <= 0.3
    else:  # without a bias, the size of scale does not matter
        assert of_dx <= 0.002 and of_dscale <= 0.003
