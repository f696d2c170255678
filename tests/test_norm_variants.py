"""Norms after the addition of a residual, and backward passes from the output."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import OPTIMIZED, widen
from conformance import RowOpTests
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from norm_problems import normal
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops._ops.op_spec import OpSpec
from jax_gradops._ops.row_norm.spec import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM, SPECS

EPSILON = 1e-2
OFFSET = 0.25


class AddNormTests(RowOpTests):
    """The residual is x itself. The gradient of x is then exactly twice the sum's gradient.

    The result is y with the sum beside it. `check_all` and the tests below have different operands.
    """

    variant = True
    options = {"epsilon": EPSILON}
    residual_bias = True  # whether the last parameter is a bias of the residual

    @property
    def parameters(self):
        return self.form.parameters + self.residual_bias

    def both(self, x, residual, *parameters, implementation=None):
        affine, bias = self.affine_and_bias(parameters, None)
        options = {"residual_bias": bias, "implementation": implementation, **self.options}
        return self.form.call(x, residual, *affine, **options)

    def op(self, x, *parameters, implementation=None):
        return jnp.concatenate(self.both(x, x, *parameters, implementation=implementation), -1)

    def example(self, rng, shape, dtype, *parameter_dtypes):
        """Multiples of 1/8 below 16: their sums are exact in every dtype."""
        dy, x, *affine, bias = super().example(rng, shape, dtype, *parameter_dtypes)
        x, bias = ((np.round(8 * widen(a)) / 8).astype(a.dtype) for a in (x, bias))
        return [dy, x, *affine, bias]

    def check_all(self, examples, implementation):
        """Two operands with the given sum, and two results.

        Each example also runs without the bias.

        The results and gradients stay separate: XLA takes longest to compile their combination.
        """
        without = copy.copy(self)
        without.residual_bias = False
        cases = [(self, e) for e in examples] + [(without, e[:-1]) for e in examples]

        def run(cases_parts: Any) -> Any:
            suites = (suite for suite, _ in cases)
            return [
                vjp_of(functools.partial(suite.both, implementation=implementation))(*parts)
                for suite, parts in zip(suites, cases_parts, strict=True)
            ]

        parts = [(tuple(np.split(dy, 2, -1)), 4 * x, -2 * x, *rest) for _, (dy, x, *rest) in cases]
        options = OPTIMIZED if implementation == "xla" else None
        results = jax.jit(run, compiler_options=options)(parts)
        for (y, dx, dresidual, *sums), (suite, example) in zip(results, cases, strict=True):
            y, dx = np.concatenate(y, -1), np.asarray(dx) + np.asarray(dresidual)
            suite.check([y, dx, *sums], example)

    def output_shape(self, shape):
        return (*shape[:-1], 2 * shape[-1])

    def affine_and_bias(self, parameters, absent):
        """The norm's own parameters, and the residual's bias."""
        n = self.form.parameters
        return parameters[:n], parameters[n] if self.residual_bias else absent

    def oracle(self, x, *parameters):
        affine, bias = self.affine_and_bias(parameters, 0.0)
        y, total = self.form.expected(x, x + bias, *affine, **self.options)
        pairs = zip(y[:2], total[:2], strict=True)
        return oracles.Reference(*(np.concatenate(pair, -1) for pair in pairs))

    def oracle_vjp(self, dy, x, *parameters):
        affine, bias = self.affine_and_bias(parameters, 0.0)
        dx, _, *sums = self.form.expected_gradients(
            np.split(dy, 2, -1), x, x + bias, *affine, **self.options
        )
        return oracles.total([dx, dx]), *[*sums, oracles.over_rows(dx)][: self.parameters]


class TestAddLayerNorm(AddNormTests):
    form = ADD_LAYER_NORM.forms[0]


class TestAddRmsNorm(AddNormTests):
    form = ADD_RMS_NORM.forms[0]


class FromOutputTests(RowOpTests):
    variant = True
    backward_attribute = "from_output = true"
    options = {"epsilon": EPSILON, "scale_offset": OFFSET}

    @pytest.fixture(autouse=True)
    def not_the_reference(self, request):
        """XLA's formula has no backward pass from the output. It is tested in TestLayerNorm."""
        if request.node.callspec.params.get("implementation") == "xla":
            pytest.skip('with "xla", `residuals` has no effect')

    test_transformation_of_reference: Any = None  # not here, for the reason above

    def example(self, rng, shape, dtype, *parameter_dtypes):
        """Avoids small scales, because they make the rounding error of y large."""
        dy, x, scale, *bias = super().example(rng, shape, dtype, *parameter_dtypes)
        wide = widen(scale) + OFFSET
        scale = (wide + np.copysign(0.5, wide) - OFFSET).astype(scale.dtype)
        return [dy, x, scale, *bias]

    def expected(self, dy, x, *parameters):
        y, *gradients = super().expected(dy, x, *parameters)
        kind = jnp.finfo(x.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = oracles.norm_vjp_of_rounded(
                *map(widen, (dy, x, *parameters)),
                unit=float(kind.eps) / 2,
                smallest=float(kind.smallest_subnormal),
                **self.form.oracle.keywords,
                **self.options,
            )
        return [y, *rounded[: len(gradients)]]


class TestLayerNormFromOutput(FromOutputTests):
    form = LAYER_NORM.forms[1]


class TestRmsNormFromOutput(FromOutputTests):
    form = RMS_NORM.forms[1]


# --- From the output -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["ffi", None])
def test_zero_scale(platform, op, implementation, rng):
    """If scale is 0, x_hat and the gradient of scale are 0. Other columns do not change."""
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
    """Saves the output and one number per row, but not the input."""
    x, scale = jnp.ones((3, 8), jnp.bfloat16), jnp.ones(8, jnp.float32)

    def saved(residuals: str, name: str, *operands: Any) -> list[str]:
        f = functools.partial(getattr(jax_gradops, name), residuals=residuals)
        f = functools.partial(f, residual_bias=scale) if name != op else f
        print_saved_residuals(lambda *a: jax.tree.leaves(f(*a, scale))[0], *operands)
        lines = capsys.readouterr().out.splitlines()
        assert any("argument" in line for line in lines) == (residuals == "input" and name == op)
        return [line.split()[0] for line in lines if not line.startswith("f32[8]")]

    statistics = ["f32[3]"] * (2 if op == "layer_norm" else 1)
    for name, operands in ((op, (x,)), (f"add_{op}", (x, x))):
        assert sorted(saved("input", name, *operands)) == ["bf16[3,8]", *statistics]
        assert sorted(saved("output", name, *operands)) == ["bf16[3,8]", "f32[3]"]


def test_memory(op):
    """In a chain of layers, each layer keeps one array instead of two."""
    layers, shape = 8, (8192, 512)  # large compared to XLA's own memory

    def loss(residuals: str, x: Any, weights: Any, scale: Any) -> Any:
        for w in weights:
            x = getattr(jax_gradops, op)(x, scale, residuals=residuals) @ w
        return jnp.sum(jnp.square(x))

    def size(residuals: str) -> float:
        """Memory in units of x's size."""
        weights = [jnp.ones((shape[-1], shape[-1]))] * layers
        arguments = jnp.ones(shape), weights, jnp.ones(shape[-1])
        gradient = jax.jit(jax.grad(functools.partial(loss, residuals), argnums=(0, 1, 2)))
        analysis = gradient.lower(*arguments).compile().memory_analysis()
        return analysis.temp_size_in_bytes / arguments[0].nbytes

    assert size("output") <= size("input") - (layers - 2)


# --- Parameters keep their dtypes ----------------------------------------------------------------


NORMS = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def adds(spec: OpSpec) -> bool:
    return spec.forms[0].arrays == 2


def norm(spec: OpSpec, x: Any, *parameters: Any, **options: Any) -> Any:
    """y, and the sum or None. With a sum, the last parameter is a bias."""
    f = functools.partial(spec.forms[0].call, scale_offset=1.0, **options)
    if not adds(spec):
        return f(x, *parameters), None
    *affine, residual_bias = parameters
    return f(x, x, *affine, residual_bias=residual_bias)


def gradients_of_parameters(spec: OpSpec, dy: Any, x: Any, *parameters: Any) -> Any:
    _, pull = jax.vjp(functools.partial(norm, spec, x, implementation="ffi"), *parameters)
    return pull((dy, dy if adds(spec) else None))


def operands_of(spec: OpSpec, rng: Any, shape: Any = (64, 32)) -> list[Any]:
    count = spec.forms[0].parameters + adds(spec)
    parameters = [normal(rng, shape[-1], dtype=jnp.bfloat16)] * count
    return [normal(rng, *shape, dtype=jnp.bfloat16) for _ in range(2)] + parameters


@NORMS
def test_nothing_is_converted(platform, spec, rng):
    """Kernels handle scale_offset and dtypes. The program has no other operation for them."""
    f = jax.jit(functools.partial(gradients_of_parameters, spec))
    text = f.lower(*operands_of(spec, rng)).compile().as_text()
    assert "convert(" not in text and " add(" not in text


@NORMS
@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_sums_over_shards_are_wide(platform, spec, inside, rng):
    """Sums are sent between devices in float32, and rounded once after the last addition."""
    devices = mesh(platform, AxisType.Auto)
    operands = operands_of(spec, rng)
    expected = jax.jit(functools.partial(gradients_of_parameters, spec))(*operands)

    def f(dy: Any, x: Any, *parameters: Any) -> Any:
        apply = functools.partial(norm, spec)
        if inside:
            specs = (P("data"), *[P()] * len(parameters))
            apply = jax.shard_map(apply, mesh=devices, in_specs=specs, out_specs=P("data"))
        _, pull = jax.vjp(functools.partial(apply, x), *parameters)
        return pull((dy, dy if adds(spec) else None))

    spread = NamedSharding(devices, P("data"))
    arrays = [jax.device_put(a, spread) for a in operands[:2]] + operands[2:]
    compiled = jax.jit(f).lower(*arrays).compile()
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
    assert reduced and all("f32[" in t and "bf16[" not in t for t in reduced)
    for actual, reference in zip(compiled(*arrays), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(widen(actual), widen(reference), rtol=2**-8, atol=1e-6)
