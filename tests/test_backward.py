"""The gradient operators, each compared with a direct transcription of its published definition.

The operators are ONNX Runtime's contrib operators for training, and oneDNN Graph's
LayerNormBackward. Gradient operators of other ops are tested in test_batch_norm.py,
test_bias_gelu.py and test_global_norm_in_place.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_a_thousand_runs_equal, assert_bitwise_equal, assert_matches, widen
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from operators import (
    invertible_layer_normalization_grad,
    layer_norm_backward,
    layer_normalization_grad,
    simplified_layer_normalization_grad,
)

import jax_gradops
from jax_gradops import backward
from jax_gradops._oracles import Reference

# --- Every combination of dtypes that the originals register --------------------------------------

# Dtypes of x, statistics and scale. They are ONNX Runtime's, and oneDNN's where oneDNN has others.
DTYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float16", "float32", "float16"),
    ("float16", "float32", "float32"),
    ("float32", "float32", "float16"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
]
SHAPE = (2, 3, 4, 5)
EPSILON = 1e-2


@pytest.fixture(params=DTYPES, ids="-".join)
def dtypes(request: pytest.FixtureRequest) -> list[Any]:
    return list(map(jnp.dtype, request.param))


class Problem:
    """Random arguments for one axis. `flat` returns them in the shapes of the definitions."""

    def __init__(self, rng: Any, begin: int, dtypes: Any, *, affine: bool, zeros: bool = False):
        x_dtype, stats_dtype, scale_dtype = dtypes
        self.begin, self.inner = begin, SHAPE[begin:]
        rows, features = math.prod(SHAPE[:begin]), math.prod(self.inner)
        # Multiples of 1/8 with a mean of 1/2. A 16-bit dtype holds this mean exactly.
        x = np.round(8 * rng.standard_normal((rows, features))) / 8
        x = np.concatenate([x[:, : features // 2], -x[:, : features // 2]], 1)
        x = np.pad(x, ((0, 0), (0, features % 2))) + 0.5
        scale = np.copysign(0.5, rng.standard_normal(features)) + rng.standard_normal(features) / 8
        if zeros:
            scale[:: max(2, features // 3)] = 0
        self.x = x.astype(x_dtype)
        self.dy = (0.3 + rng.standard_normal(x.shape)).astype(x_dtype)
        self.y = rng.standard_normal(x.shape).astype(x_dtype)
        self.scale = scale.astype(scale_dtype) if affine else None
        self.bias = rng.standard_normal(features).astype(scale_dtype) if affine else None
        wide = widen(self.x)
        self.mean = wide.mean(1, keepdims=True).astype(stats_dtype)
        self.variance = wide.var(1, keepdims=True).astype(stats_dtype)
        self.rstd = (1 / np.sqrt(widen(self.variance) + EPSILON)).astype(stats_dtype)

    def flat(self, *names: str) -> list[Any]:
        """Arrays in float64, [rows, features]."""
        arrays = [getattr(self, name) for name in names]
        return [None if a is None else widen(a) for a in arrays]

    def shaped(self, *names: str, kept: bool = False) -> list[Any]:
        """Arrays in the users' shapes. Statistics have trailing axes if `kept`."""
        rows = SHAPE[: self.begin]
        shapes = {n: SHAPE for n in ("dy", "x", "y")} | {n: self.inner for n in ("scale", "bias")}
        statistic = (*rows, *[1] * len(self.inner)) if kept else rows
        return [
            None if getattr(self, n) is None else getattr(self, n).reshape(shapes.get(n, statistic))
            for n in names
        ]


def check(actual: Any, references: list[Reference], dtypes: list[Any], what: str) -> None:
    """Checks each wanted result and its dtype. An unwanted result (dtype None) must be None."""
    accum = np.float64 if dtypes[0] == np.float64 else np.float32
    for i, (result, reference, dtype) in enumerate(zip(actual, references, dtypes, strict=True)):
        name = f"{what}: {('dx', 'dscale', 'dbias')[i]}"
        if dtype is None:
            assert result is None, name
        else:
            shape = result.shape
            reference = reference._replace(
                value=reference.value.reshape(shape), magnitude=reference.magnitude.reshape(shape)
            )
            assert_matches(result, reference, dtype, accum, name)


@pytest.mark.G4
@pytest.mark.G6
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_operators(platform, implementation, dtypes, affine, rng):
    """Tests every axis, also with zeros in scale. XLA's operations are tested at two axes."""
    problems = [
        Problem(rng, begin, dtypes, affine=affine, zeros=affine and begin % 3 == 1)
        for begin in (range(len(SHAPE)) if implementation == "ffi" else (1, 2))
    ]

    @jax.jit
    def f(arrays: Any) -> Any:
        results = []
        for p, (dy, x, y, scale, bias, mean, variance, rstd) in zip(problems, arrays, strict=True):
            options = {
                "begin_norm_axis": p.begin - (len(SHAPE) if p.begin % 2 else 0),
                "implementation": implementation,
            }
            onednn = {"variance": variance, "epsilon": EPSILON, "has_bias": affine}
            results.append([
                backward.layer_norm_backward(dy, x, scale, mean, rstd, **options),
                backward.layer_norm_backward(dy, x, scale, mean, **onednn, **options),
                backward.rms_norm_backward(dy, x, scale, rstd, **options),
                backward.layer_norm_backward_from_output(dy, y, scale, bias, rstd, **options),
                backward.rms_norm_backward_from_output(dy, y, scale, rstd, **options),
            ])  # fmt: skip
        return results

    names = ("dy", "x", "y", "scale", "bias", "mean", "variance", "rstd")
    arrays = [p.shaped(*names, kept=i % 2 == 1) for i, p in enumerate(problems)]
    x_dtype, _, scale_dtype = dtypes
    of_scale = scale_dtype if affine else None
    for p, results in zip(problems, f(arrays), strict=True):
        from_input = p.flat("dy", "x", "scale", "mean")
        (rstd,), (variance,) = p.flat("rstd"), p.flat("variance")
        from_output = p.flat("dy", "y", "scale", "bias", "rstd")
        invertible = invertible_layer_normalization_grad
        without_bias = [*from_output[:3], None, rstd]
        expected = [
            layer_normalization_grad(*from_input, rstd),
            layer_norm_backward(*from_input, variance, EPSILON),
            simplified_layer_normalization_grad(*from_input[:3], rstd)[:2],
            invertible(*from_output),
            invertible(*without_bias, mean=False)[:2],
        ]
        # Without a scale, dbias has x's dtype. Without a bias there is no dbias.
        of_bias = [scale_dtype if affine else x_dtype, of_scale, None, of_scale, None]
        for i, (actual, references, dbias) in enumerate(
            zip(results, expected, of_bias, strict=True)
        ):
            wanted = [x_dtype, of_scale, dbias][: len(references)]
            check(actual, references, wanted, f"operator {i}, axis {p.begin}")


def test_forward(platform, implementation, dtypes, rng):
    """Statistics have the accumulation dtype and the shape of the rows."""
    p = Problem(rng, 2, dtypes, affine=True)
    x, scale, bias = p.shaped("x", "scale", "bias")
    options = {"begin_norm_axis": 2, "epsilon": EPSILON, "implementation": implementation}
    y, mean, rstd = backward.layer_norm_forward(x, scale, bias, **options)
    y2, rstd2 = backward.rms_norm_forward(x, scale, **options)
    accum = jnp.float64 if dtypes[0] == jnp.float64 else jnp.float32
    assert {a.dtype for a in (mean, rstd, rstd2)} == {jnp.dtype(accum)}
    assert {a.shape for a in (mean, rstd, rstd2)} == {SHAPE[:2]}
    wide, gamma, beta = (a[0] for a in (p.flat("x"), p.flat("scale"), p.flat("bias")))
    expected = 1 / np.sqrt(wide.var(1) + EPSILON), 1 / np.sqrt((wide**2).mean(1) + EPSILON)
    tolerance = 8 * float(jnp.finfo(accum).eps)
    for actual, reference in zip((mean, rstd, rstd2), (wide.mean(1), *expected), strict=True):
        np.testing.assert_allclose(np.ravel(actual), reference, rtol=tolerance)
    centered = wide - wide.mean(1, keepdims=True)
    for actual, x_hat, shift in (
        (y, centered * expected[0][:, None], beta),
        (y2, wide * expected[1][:, None], 0 * beta),
    ):
        value = x_hat * gamma + shift
        size = np.abs(x_hat * gamma) + np.abs(gamma) + np.abs(shift)
        reference = Reference(value.reshape(SHAPE), size.reshape(SHAPE))
        assert_matches(actual, reference, dtypes[0], accum, "y")


def test_per_channel(platform, implementation, rng):
    """oneDNN's gamma may have only the last axis. Its gradient is summed further, then rounded."""
    dtypes = list(map(jnp.dtype, ("float32", "float32", "bfloat16")))
    p = Problem(rng, 2, dtypes, affine=True)
    scale, bias = (np.tile(a[:5], 4) for a in (p.scale, p.bias))
    dy, x, y, mean, rstd = p.shaped("dy", "x", "y", "mean", "rstd")
    options = {"begin_norm_axis": 2, "implementation": implementation}
    results = (
        backward.layer_norm_backward(dy, x, scale[:5], mean, rstd, **options),
        backward.layer_norm_backward_from_output(dy, y, scale[:5], bias[:5], rstd, **options),
    )
    flat = p.flat("dy", "x", "y", "mean", "rstd")
    expected = (
        layer_normalization_grad(*flat[:2], widen(scale), *flat[3:]),
        invertible_layer_normalization_grad(flat[0], flat[2], widen(scale), widen(bias), flat[4]),
    )
    for actual, references in zip(results, expected, strict=True):
        summed = [
            r._replace(
                value=r.value.reshape(4, 5).sum(0), magnitude=r.magnitude.reshape(4, 5).sum(0)
            )
            for r in references[1:]
        ]
        wanted = [dtypes[0], dtypes[2], dtypes[2]]
        check(actual, [references[0], *summed], wanted, "per channel")


# --- Sums, runs, transformations -----------------------------------------------------------------


def calls(dtype: Any, shape: tuple[int, int], rng: Any) -> dict[str, Any]:
    """Each backward operator as a function of dy. Its other operands are small integers."""
    rows, features = shape
    x = rng.integers(-3, 4, (rows, features // 2))
    x = np.concatenate([x, -x], 1).astype(dtype)  # the mean is exactly 0
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    scale, bias = np.ones(features, np.float32), np.zeros(features, np.float32)
    partial = functools.partial
    return {
        "layer_norm": partial(
            backward.layer_norm_backward, x=x, scale=scale, mean=zeros, rstd=ones
        ),
        "rms_norm": partial(backward.rms_norm_backward, x=x, scale=scale, rstd=ones),
        "layer_norm from output": partial(
            backward.layer_norm_backward_from_output, y=x, scale=scale, bias=bias, rstd=ones
        ),
        "rms_norm from output": partial(
            backward.rms_norm_backward_from_output, y=x, scale=scale, rstd=ones
        ),
    }


@pytest.mark.G6
@pytest.mark.G10
@pytest.mark.parametrize("shape", [(3001, 130), (70_000, 4), (517, 8192)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_exact_sums(platform, shape, dtype, rng):
    """Column sums of small integers have no rounding errors."""
    dy = rng.integers(-1, 4, shape)
    operators = calls(jnp.dtype(dtype), shape, rng)
    f = jax.jit(lambda dy: [op(dy, implementation="ffi") for op in operators.values()])
    for (name, op), results in zip(operators.items(), f(dy.astype(jnp.dtype(dtype))), strict=True):
        x = np.asarray(op.keywords.get("x", op.keywords.get("y"))).astype(np.int64)
        sums = [(dy * x).sum(0), dy.sum(0)]
        for actual, expected in zip(results[1:], sums, strict=False):
            assert_bitwise_equal(actual, expected.astype(np.float32), name)


@pytest.mark.R2
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_runs(platform, dtype, rng):
    """Norms, GELU and clipping: all runs in a loop are bitwise equal."""
    dtype = jnp.dtype(dtype)
    operators = calls(dtype, (300, 130), rng)
    dy = rng.standard_normal((300, 130)).astype(dtype)

    def run(dy: Any) -> list[Any]:
        x = operators["rms_norm"].keywords["x"]
        y, mean, rstd = backward.layer_norm_forward(x + dy, implementation="ffi")
        results = [op(dy + y, implementation="ffi") for op in operators.values()]
        for approximate in (True, False):
            gelu = functools.partial(jax_gradops.bias_gelu, approximate=approximate)
            results.append(jax.vjp(gelu, dy, mean[:130])[1](y))
        results.append(backward.inplace_clip_by_global_norm([dy + y, mean, rstd], 1.0))
        return [y, mean, rstd, *jax.tree.leaves(results)]

    assert_a_thousand_runs_equal(run, dy)


@pytest.mark.newest_jax
def test_derivatives(platform, rng):
    """The operators' own derivatives, in both modes, equal the derivatives of the reference."""
    p = Problem(rng, 3, [jnp.dtype("float64")] * 3, affine=True, zeros=True)
    dy, x, scale, bias, mean, rstd = p.shaped("dy", "x", "scale", "bias", "mean", "rstd")

    def f(implementation: str, *operands: Any) -> Any:
        dy, x, scale, bias, mean, rstd = operands
        options = {"implementation": implementation}
        return (
            backward.layer_norm_backward(dy, x, scale, mean, rstd, **options),
            backward.rms_norm_backward(dy, x, scale, rstd, **options),
            backward.layer_norm_backward_from_output(dy, x, scale, bias, rstd, **options),
            backward.rms_norm_backward_from_output(dy, x, scale, rstd, **options),
            backward.layer_norm_forward(x, scale, bias, **options),
        )

    operands = (dy, x, scale, bias, mean, rstd)

    def derivatives(implementation: str) -> Any:
        g = functools.partial(f, implementation)
        results, pull = jax.vjp(g, *operands)
        return jax.jvp(g, operands, operands)[1], pull(results)

    ours, expected = (jax.jit(functools.partial(derivatives, i))() for i in ("ffi", "xla"))
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.newest_jax
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_spread(platform, kind, rng):
    """On a mesh, and on each device inside shard_map."""
    devices = mesh(platform, kind)
    x, dy = (rng.standard_normal((16, 32)).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal(32).astype(jnp.bfloat16)

    def f(dy: Any, x: Any, scale: Any) -> Any:
        y, mean, rstd = backward.layer_norm_forward(x, scale)
        return y, *backward.layer_norm_backward(dy, x, scale, mean, rstd)

    def local(dy: Any, x: Any, scale: Any) -> Any:
        *rows, dscale, dbias = f(dy, x, scale.astype(jnp.float32))
        sums = lax.psum((dscale, dbias), "data")
        return *rows, *(g.astype(scale.dtype) for g in sums)

    expected = jax.jit(f)(dy, x, scale)
    with jax.set_mesh(devices):
        spread = [jax.device_put(a, NamedSharding(devices, P("data"))) for a in (dy, x)]
        rows = P("data")
        mapped = jax.shard_map(
            local, in_specs=(rows, rows, P()), out_specs=(rows, rows, P(), P()), axis_names={"data"}
        )
        for g in (f, mapped) if kind == AxisType.Auto else (f,):
            results = jax.jit(g)(*spread, scale)
            for a, e in zip(results, expected, strict=True):
                assert a.dtype == e.dtype
                tolerance = 2**-5 if e.dtype == jnp.bfloat16 else 1e-5
                np.testing.assert_allclose(widen(a), widen(e), rtol=tolerance, atol=tolerance)


@pytest.mark.newest_jax
def test_vmap(platform, rng):
    """Statistics and dy are mapped, scale is not. The result equals a loop."""
    x, dy = (rng.standard_normal((3, 5, 8)).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal(8).astype(np.float32)
    rstd = np.abs(rng.standard_normal((3, 5))).astype(np.float32)
    f = functools.partial(backward.rms_norm_backward_from_output, implementation="ffi")
    mapped = jax.vmap(f, in_axes=(0, 0, None, 0))(dy, x, scale, rstd)
    for i, (dx, dscale) in enumerate(zip(*mapped, strict=True)):
        for actual, expected in zip((dx, dscale), f(dy[i], x[i], scale, rstd[i]), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
