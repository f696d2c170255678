"""Norms of sums with a residual and its bias: rounding, vmap, options. See test_norm_variants."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import (
    accum,
    assert_bitwise_equal,
    assert_matches,
    small_integers,
    sums_of_small_integers,
    widen,
)
from norm_problems import check, exact_sum, example, normal, problem
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles

EPSILON = 1e-2


def sum_of(op: str, **options: Any) -> Any:
    """Maps (x, residual, residual_bias, scale) to the norm and the sum."""
    add_norm = functools.partial(getattr(jax_gradops, f"add_{op}"), **options)
    return lambda x, residual, bias, scale: add_norm(x, residual, scale, residual_bias=bias)


OF_BIAS = {"float16": "bfloat16", "bfloat16": "float32", "float32": "float64", "float64": "float16"}


@pytest.mark.parametrize("residuals", ["input", "output"])
def test_sum_is_rounded(platform, op, implementation, dtype, residuals, rng):
    """The returned sum is the one that is normalised. Gradients flow through both results."""
    shape = (5, 129)
    x, residual, dy, dsum = (normal(rng, *shape, dtype=dtype) for _ in range(4))
    scale, bias = np.abs(normal(rng, 129)) + 0.5, normal(rng, 129, dtype=OF_BIAS[dtype.name])
    f = vjp_of(sum_of(op, residuals=residuals, implementation=implementation))
    examples = [(x, residual, given, scale) for given in (bias, None)]
    run = jax.jit(lambda examples: [f((dy, dsum), *e) for e in examples])
    kind = jnp.finfo(dtype)
    for operands, results in zip(examples, run(examples), strict=True):
        (y, total), dx, dresidual, dbias, dscale = results
        assert_bitwise_equal(total, exact_sum(*operands[:3]))
        assert_bitwise_equal(dx, dresidual)
        wide, settings = widen(total), {"epsilon": 1e-6, "centered": op == "layer_norm"}
        assert_matches(y, oracles.norm(wide, widen(scale), **settings), dtype, accum(dtype), "y")
        settings |= {"unit": float(kind.eps) / 2, "smallest": float(kind.smallest_subnormal)}
        ref_dx, ref_dscale, _ = oracles.norm_vjp_of_rounded(
            widen(dy), wide, widen(scale), **settings
        )
        if residuals == "input" or implementation == "xla":
            ref_dx, ref_dscale = ref_dx._replace(error=0.0), ref_dscale._replace(error=0.0)
        ref_dx = oracles.total([ref_dx, oracles.exact(widen(dsum))])
        assert_matches(dx, ref_dx, dtype, accum(dtype), "dx")
        assert_matches(dscale, ref_dscale, np.float32, accum(dtype), "dscale")
        if dbias is not None:
            assert_matches(
                dbias, oracles.over_rows(ref_dx), bias.dtype, accum(dtype), "dresidual_bias"
            )


@pytest.mark.parametrize("mapped", [0, 1, 2], ids=["x", "residual", "residual_bias"])
def test_vmap_of_one_operand(platform, op, implementation, mapped, rng):
    """The gradients of unmapped operands equal the gradients of each slice."""
    operands = [normal(rng, 5, 33), normal(rng, 5, 33), normal(rng, 33), normal(rng, 33)]
    operands[mapped] = np.stack([operands[mapped], *normal(rng, 2, *operands[mapped].shape)])
    dy, dsum = normal(rng, 3, 5, 33), normal(rng, 3, 5, 33)
    f = vjp_of(sum_of(op, implementation=implementation))
    in_axes = (0, *(0 if i == mapped else None for i in range(4)))
    results = jax.jit(jax.vmap(f, in_axes=in_axes))((dy, dsum), *operands)
    results = jax.tree.map(np.asarray, results)  # NumPy slices them: JAX would compile the slicing
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}
    for i in range(3):
        *summed, scale = (a[i] if k == mapped else a for k, a in enumerate(operands))
        (y, total), dx, dresidual, dbias, dscale = jax.tree.map(lambda a, i=i: a[i], results)
        assert_bitwise_equal(total, exact_sum(*summed))
        assert_bitwise_equal(dx, dresidual)
        wide = widen(total), widen(scale)
        references = {"y": oracles.norm(*wide, **settings)}
        cotangents = widen(dy[i]), widen(dsum[i])
        gradients = oracles.add_norm_vjp(cotangents, wide[0], 0.0, wide[1], **settings)
        references |= {"dx": gradients[0], "dscale": gradients[2]}
        references["dresidual_bias"] = oracles.over_rows(gradients[0])
        actual = {"y": y, "dx": dx, "dscale": dscale, "dresidual_bias": dbias}
        for name, result in actual.items():
            assert_matches(result, references[name], np.float32, np.float32, name)


@pytest.mark.newest_jax
@pytest.mark.parametrize("begin", [-1, 2, 0])
def test_options_of_a_sum(platform, op, implementation, begin, rng):
    """Parameters of all normalised axes, and of the last axis only. Each may be absent."""
    shape = (2, 3, 4, 5)
    options = {"begin_norm_axis": begin, "epsilon": EPSILON, "implementation": implementation}
    problems = []
    for has_scale, inner in itertools.product([True, False], {shape[begin:], shape[-1:]}):
        dy, x, scale, bias = example(rng, shape, inner=inner)
        dsum, residual, *_, residual_bias = example(rng, shape, inner=inner)
        affine = (scale, bias) if has_scale else ()
        given = {"residual": residual, "residual_bias": residual_bias} | options
        problems.append(problem(f"add_{op}", (dy, dsum), x, *affine, **given))
    check(*problems)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(4099, 129), (2_500_000, 40), (220_000, 768), (40_000, 4096)])
def test_exact_sums_of_dx(platform, op, shape, dtype):
    """The gradient of residual_bias is a plain sum of the sum's cotangent, if y has no cotangent.

    On a GPU, some shapes give a thread more rows than it adds up at a time.
    """
    rows, features = shape
    shape = (min(rows, 5_000_000 // features) if platform == "cpu" else rows, features)

    @jax.jit
    def dbias() -> Any:
        dsum = small_integers(shape)
        x = (dsum + 0.5).astype(dtype)
        f = functools.partial(sum_of(op, implementation="ffi"), x, x, scale=None)
        pull = jax.vjp(lambda bias: f(bias=bias), jnp.zeros(features, jnp.float32))[1]
        return pull((jnp.zeros_like(x), dsum.astype(dtype)))[0]

    assert_bitwise_equal(dbias(), sums_of_small_integers(shape).astype(np.float32))
