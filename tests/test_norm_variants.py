"""Norms after the addition of a residual, and backward passes from the output."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from comparing import OPTIMIZED, assert_bitwise_equal, assert_matches, widen
from conformance import RowOpTests
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from transformations import vjp_of

import jax_gradops

EPSILON = 1e-2
OFFSET = 0.25


class AddNormTests(RowOpTests):
    """The residual is x itself: then the sum is exact, and x's gradient twice the sum's, exactly.

    The result is y and the sum, side by side. Different operands: `check_all`, and below.
    """

    variant = True
    centered: bool

    def both(self, x, residual, *parameters, implementation=None):
        name = "add_layer_norm" if self.centered else "add_rms_norm"
        return getattr(jax_gradops, name)(
            x, residual, *parameters, epsilon=EPSILON, implementation=implementation
        )

    def op(self, x, *parameters, implementation=None):
        return jnp.concatenate(self.both(x, x, *parameters, implementation=implementation), -1)

    def check_all(self, examples, implementation):
        """With two operands, of the same sum, and two results.

        To make one result of two, and one gradient, takes XLA longer to compile than all the rest.
        """
        f = vjp_of(functools.partial(self.both, implementation=implementation))
        parts = [(tuple(np.split(dy, 2, -1)), 4 * x, -2 * x, *rest) for dy, x, *rest in examples]
        options = OPTIMIZED if implementation == "xla" else None
        run = jax.jit(lambda parts: [f(*p) for p in parts], compiler_options=options)
        results = run(parts)
        for (y, dx, dresidual, *sums), example in zip(results, examples, strict=True):
            y, dx = np.concatenate(y, -1), np.asarray(dx) + np.asarray(dresidual)
            self.check([y, dx, *sums], example)

    def output_shape(self, shape):
        return (*shape[:-1], 2 * shape[-1])

    def oracle(self, x, *parameters):
        return oracles.add_norm(x, x, *parameters, epsilon=EPSILON, centered=self.centered)

    def oracle_vjp(self, dy, x, scale, *bias):
        settings = {"epsilon": EPSILON, "centered": self.centered}
        dx, *sums = oracles.add_norm_vjp(dy, x, x, scale, **settings)
        return oracles.total([dx, dx]), *sums[: self.parameters]


class TestAddLayerNorm(AddNormTests):
    kernels = ("layer_norm_fwd", "layer_norm_bwd")
    parameters = 2
    centered = True


class TestAddRmsNorm(AddNormTests):
    kernels = ("rms_norm_fwd", "rms_norm_bwd")
    parameters = 1
    centered = False


class FromOutputTests(RowOpTests):
    variant = True
    centered: bool

    @pytest.fixture(autouse=True)
    def not_the_reference(self, request):
        """It has no backward pass from the output: with it, this is TestLayerNorm once more."""
        if request.node.callspec.params.get("implementation") == "xla":
            pytest.skip('with "xla", `residuals` has no effect')

    test_transformation_of_reference: Any = None  # as there

    def op(self, x, *parameters, implementation=None):
        return getattr(jax_gradops, "layer_norm" if self.centered else "rms_norm")(
            x,
            *parameters,
            epsilon=EPSILON,
            scale_offset=OFFSET,
            residuals="output",
            implementation=implementation,
        )

    @property
    def settings(self):
        return {"epsilon": EPSILON, "centered": self.centered, "scale_offset": OFFSET}

    def example(self, rng, shape, dtype, *parameter_dtypes):
        """No small scale, which makes the rounding of y large."""
        dy, x, scale, *bias = super().example(rng, shape, dtype, *parameter_dtypes)
        wide = widen(scale) + OFFSET
        scale = (wide + np.copysign(0.5, wide) - OFFSET).astype(scale.dtype)
        return [dy, x, scale, *bias]

    def oracle(self, x, *parameters):
        return oracles.norm(x, *parameters, **self.settings)

    def oracle_vjp(self, dy, x, *parameters):
        return oracles.norm_vjp(dy, x, parameters[0], **self.settings)[: 1 + self.parameters]

    def expected(self, dy, x, *parameters):
        y, *gradients = super().expected(dy, x, *parameters)
        kind = jnp.finfo(x.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = oracles.norm_vjp_of_rounded(
                *map(widen, (dy, x, *parameters)),
                unit=float(kind.eps) / 2,
                smallest=float(kind.smallest_subnormal),
                **self.settings,
            )
        return [y, *rounded[: len(gradients)]]


class TestLayerNormFromOutput(FromOutputTests):
    kernels = ("layer_norm_fwd", "layer_norm_bwd_from_output")
    parameters = 2
    centered = True


class TestRmsNormFromOutput(FromOutputTests):
    kernels = ("rms_norm_fwd", "rms_norm_bwd_from_output")
    parameters = 1
    centered = False


# --- The sum with the residual -------------------------------------------------------------------


@pytest.fixture(params=["layer_norm", "rms_norm"])
def op(request: pytest.FixtureRequest) -> str:
    return request.param


def normal(rng: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (0.5 + 1.5 * rng.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("residuals", ["input", "output"])
def test_sum_is_rounded(platform, op, implementation, dtype, residuals, rng):
    """What is normalised is the sum that is returned; with gradients through both results."""
    shape = (5, 129)
    x, residual, dy, dsum = (normal(rng, *shape, dtype=dtype) for _ in range(4))
    scale = np.abs(normal(rng, 129)) + 0.5
    f = functools.partial(
        getattr(jax_gradops, f"add_{op}"), residuals=residuals, implementation=implementation
    )

    def both(*operands: Any) -> Any:
        (y, total), pull = jax.vjp(f, *operands)
        return y, total, *pull((dy, dsum))

    y, total, dx, dresidual, dscale = jax.jit(both)(x, residual, scale)
    assert_bitwise_equal(total, (widen(x) + widen(residual)).astype(dtype))
    assert_bitwise_equal(dx, dresidual)
    accum = jnp.float64 if dtype == jnp.float64 else jnp.float32
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}
    assert_matches(y, oracles.norm(widen(total), widen(scale), **settings), dtype, accum, "y")
    kind = jnp.finfo(dtype)
    settings |= {"unit": float(kind.eps) / 2, "smallest": float(kind.smallest_subnormal)}
    ref_dx, ref_dscale, _ = oracles.norm_vjp_of_rounded(
        widen(dy), widen(total), widen(scale), **settings
    )
    if residuals == "input" or implementation == "xla":
        ref_dx, ref_dscale = ref_dx._replace(error=0.0), ref_dscale._replace(error=0.0)
    ref_dx = ref_dx._replace(
        value=ref_dx.value + widen(dsum), magnitude=ref_dx.magnitude + np.abs(widen(dsum))
    )
    assert_matches(dx, ref_dx, dtype, accum, "dx")
    assert_matches(dscale, ref_dscale, np.float32, accum, "dscale")


@pytest.mark.parametrize("mapped", [0, 1], ids=["x", "residual"])
def test_vmap_of_one_operand(platform, op, implementation, mapped, rng):
    """The gradient of the other one is that of each slice."""
    operands, dy = [normal(rng, 5, 33), normal(rng, 5, 33)], normal(rng, 3, 5, 33)
    operands[mapped] = normal(rng, 3, 5, 33)
    scale = normal(rng, 33)
    f = vjp_of(functools.partial(getattr(jax_gradops, f"add_{op}"), implementation=implementation))
    in_axes = [0, None, None, None]
    in_axes[1 + mapped] = 0
    results = jax.jit(jax.vmap(f, in_axes=(*in_axes,)))((dy, dy), *operands, scale)
    results = jax.tree.map(np.asarray, results)  # JAX would compile the slicing
    settings = {"epsilon": 1e-6, "centered": op == "layer_norm"}
    for i in range(3):
        x, residual = (widen(a[i] if k == mapped else a) for k, a in enumerate(operands))
        (y, total), dx, dresidual, dscale = jax.tree.map(lambda a, i=i: a[i], results)
        assert_bitwise_equal(total, (x + residual).astype(np.float32))
        assert_bitwise_equal(dx, dresidual)
        wide = widen(total)
        reference = oracles.norm(wide, widen(scale), **settings)
        assert_matches(y, reference, np.float32, np.float32, "y")
        ref_dx, ref_dscale, _ = oracles.norm_vjp(widen(dy[i]), wide, widen(scale), **settings)
        ref_dx = oracles.total([ref_dx, oracles.Reference(widen(dy[i]), np.abs(widen(dy[i])))])
        assert_matches(dx, ref_dx, np.float32, np.float32, "dx")
        assert_matches(dscale, ref_dscale, np.float32, np.float32, "dscale")


def test_normalised_axes_of_a_sum(platform, op, implementation, rng):
    x, residual = normal(rng, 2, 3, 4, 5), normal(rng, 2, 3, 4, 5)
    scale = normal(rng, 5)
    options = {"begin_norm_axis": 2, "implementation": implementation}
    y, total = getattr(jax_gradops, f"add_{op}")(x, residual, scale, **options)
    assert_bitwise_equal(total, x + residual)
    expected = getattr(jax_gradops, op)(x + residual, scale, **options)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


# --- From the output -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["ffi", None])
def test_zero_scale(platform, op, implementation, rng):
    """x_hat is 0 there, and so is the gradient of scale; the other columns do not change."""
    dy, x, scale = normal(rng, 7, 33), normal(rng, 7, 33), np.abs(normal(rng, 33)) + 0.5
    scale[[3, 20]] = 0, -0.0

    def gradients(residuals: str, x: Any, scale: Any) -> Any:
        f = functools.partial(
            getattr(jax_gradops, op), residuals=residuals, implementation=implementation
        )
        return jax.vjp(f, x, scale)[1](dy)

    dx, dscale = gradients("output", x, scale)
    expected_dx, expected_dscale = gradients("input", x, scale)
    assert not np.asarray(dscale)[[3, 20]].any() and np.asarray(expected_dscale)[[3, 20]].all()
    others = np.delete(np.arange(33), [3, 20])
    np.testing.assert_allclose(dx[:, others], expected_dx[:, others], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dscale[others], expected_dscale[others], rtol=1e-5, atol=1e-5)

    def curvature(x: Any, scale: Any) -> Any:
        return sum(jnp.sum(jnp.square(g)) for g in gradients("output", x, scale))

    assert all(np.isfinite(g).all() for g in jax.grad(curvature, argnums=(0, 1))(x, scale))


def test_what_is_saved(op, capsys):
    """The output, and one number a row; not the input."""
    x, scale = jnp.ones((3, 8), jnp.bfloat16), jnp.ones(8, jnp.float32)

    def saved(residuals: str, name: str, *operands: Any) -> list[str]:
        f = functools.partial(getattr(jax_gradops, name), residuals=residuals)
        print_saved_residuals(lambda *a: jax.tree.leaves(f(*a, scale))[0], *operands)
        lines = capsys.readouterr().out.splitlines()
        assert any("argument" in line for line in lines) == (residuals == "input" and name == op)
        return [line.split()[0] for line in lines if not line.startswith("f32[8]")]

    statistics = ["f32[3]"] * (2 if op == "layer_norm" else 1)
    for name, operands in ((op, (x,)), (f"add_{op}", (x, x))):
        assert sorted(saved("input", name, *operands)) == ["bf16[3,8]", *statistics]
        assert sorted(saved("output", name, *operands)) == ["bf16[3,8]", "f32[3]"]


def test_memory(op):
    """Of each layer of a chain, one array is kept in place of two."""
    layers, shape = 8, (8192, 512)  # large beside what XLA takes for itself

    def loss(residuals: str, x: Any, weights: Any, scale: Any) -> Any:
        for w in weights:
            x = getattr(jax_gradops, op)(x, scale, residuals=residuals) @ w
        return jnp.sum(jnp.square(x))

    def size(residuals: str) -> float:
        """In arrays of x's size."""
        weights = [jnp.ones((shape[-1], shape[-1]))] * layers
        arguments = jnp.ones(shape), weights, jnp.ones(shape[-1])
        gradient = jax.jit(jax.grad(functools.partial(loss, residuals), argnums=(0, 1, 2)))
        analysis = gradient.lower(*arguments).compile().memory_analysis()
        return analysis.temp_size_in_bytes / arguments[0].nbytes

    assert size("output") <= size("input") - (layers - 2)


# --- Parameters keep their dtypes ----------------------------------------------------------------


def gradients_of_parameters(op: str, dy: Any, x: Any, *parameters: Any) -> Any:
    f = functools.partial(getattr(jax_gradops, op), x, scale_offset=1.0, implementation="ffi")
    return jax.vjp(f, *parameters)[1](dy)


def operands_of(op: str, rng: Any, shape: Any = (64, 32)) -> list[Any]:
    parameters = [normal(rng, shape[-1], dtype=jnp.bfloat16)] * (2 if op == "layer_norm" else 1)
    return [normal(rng, *shape, dtype=jnp.bfloat16) for _ in range(2)] + parameters


def test_nothing_is_converted(platform, op, rng):
    """scale_offset and dtypes are the kernels' business: there is no operation beside them."""
    f = jax.jit(functools.partial(gradients_of_parameters, op))
    text = f.lower(*operands_of(op, rng)).compile().as_text()
    assert "convert(" not in text and " add(" not in text


@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_sums_over_shards_are_wide(platform, op, inside, rng):
    """Rounded once, after the sum: it is the sum in float32 that travels."""
    devices = mesh(platform, AxisType.Auto)
    operands = operands_of(op, rng)
    expected = jax.jit(functools.partial(gradients_of_parameters, op))(*operands)

    def f(dy: Any, x: Any, *parameters: Any) -> Any:
        def apply(x: Any, *parameters: Any) -> Any:
            return getattr(jax_gradops, op)(x, *parameters, scale_offset=1.0)

        if inside:
            specs = (P("data"), *[P()] * len(parameters))
            apply = jax.shard_map(apply, mesh=devices, in_specs=specs, out_specs=P("data"))
        return jax.vjp(functools.partial(apply, x), *parameters)[1](dy)

    spread = NamedSharding(devices, P("data"))
    arrays = [jax.device_put(a, spread) for a in operands[:2]] + operands[2:]
    compiled = jax.jit(f).lower(*arrays).compile()
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
    assert reduced and all("f32[" in t and "bf16[" not in t for t in reduced)
    for actual, reference in zip(compiled(*arrays), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(widen(actual), widen(reference), rtol=2**-8, atol=1e-6)
