"""Layer norm and RMS norm. `catalogue.py` explains marks and comments such as N3."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from conformance import RowOpTests
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from norm_problems import check, example, problem

import jax_gradops
from jax_gradops._ops.row_norm.spec import LAYER_NORM, RMS_NORM

# Large, so that the place where it is added makes a difference (N14).
EPSILON = 1e-2


@pytest.mark.newest_jax
class TestLayerNorm(RowOpTests):
    form = LAYER_NORM.forms[0]
    options = {"epsilon": EPSILON}


class TestRmsNorm(RowOpTests):
    variant = True  # of layer norm
    form = RMS_NORM.forms[0]
    options = {"epsilon": EPSILON}


# --- Options: compared with the oracle of the flattened problem ----------------------------------


@pytest.mark.G6
@pytest.mark.M5
def test_absent_parameters_and_many_rows(platform, op, implementation, rng):
    """More rows than the y dimension of a grid has blocks. Each parameter may be absent."""
    problems = []
    shapes = [(5, 33), (65_535, 2), (65_536, 3), (70_001, 4)]
    for shape, has in itertools.product(
        shapes if implementation == "ffi" else shapes[:1],
        itertools.product([True, False], repeat=2),
    ):
        dy, x, *parameters = example(rng, shape)
        given = (p if there else None for p, there in zip(parameters, has, strict=True))
        problems.append(problem(op, dy, x, *given, epsilon=EPSILON, implementation=implementation))
    if implementation == "ffi":
        problems += [problem(op, *example(rng, shape)) for shape in [(131_072, 3), (1_000_000, 2)]]
    check(*problems)


@pytest.mark.G3
@pytest.mark.G4
@pytest.mark.G5
def test_begin_norm_axis(platform, op, implementation, rng):
    """Parameters of all normalised axes, and of the last axis only."""
    shape = (2, 3, 4, 5)
    options = {"epsilon": EPSILON, "implementation": implementation}
    check(
        *(
            problem(op, *example(rng, shape, inner=inner), begin_norm_axis=begin, **options)
            for begin in (-1, -2, 1, 0, -4, 3)
            for inner in {shape[begin:], shape[-1:]}
        )
    )


@pytest.mark.N14
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_epsilon(platform, op, implementation, dtype, rng):
    """epsilon is added to the variance, under the root. It may be far larger than the variance."""
    dy_x_and_parameters = example(rng, (5, 33), dtype)
    check(
        *(
            problem(op, *dy_x_and_parameters, epsilon=epsilon, implementation=implementation)
            for epsilon in (0.0, 1e-12, 1e-6, 1.0, 1e3)
        )
    )


@pytest.mark.G8
def test_scale_offset(platform, op, implementation, rng):
    """The offset also affects the backward pass. Without a scale it has no effect.

    Widths are of several kernels.
    """
    problems = []
    for shape, offset in itertools.product([(5, 33), (5, 64), (3, 20_000)], (1.0, -0.5)):
        dy, x, scale, bias = example(rng, shape)
        options = {"scale_offset": offset, "implementation": implementation}
        problems.append(problem(op, dy, x, scale, bias, **options))
        problems.append(problem(op, dy, x, None, bias, **options))
    check(*problems)


# --- Options of other kinds, and axes that are spread -------------------------------------------

X = np.ones((2, 3, 4), np.float32)


def test_numbers_of_any_type_are_the_same_option(platform, op):
    """Numbers of any type reach the handler as one NumPy type, the only one that it accepts."""
    f = functools.partial(getattr(jax_gradops, op), X + np.arange(4, dtype=np.float32))
    expected = f(epsilon=1.0)
    for one in (1, np.float64(1), np.float32(1), np.int64(1), jnp.float32(1), np.array(1.0)):
        assert_bitwise_equal(f(epsilon=one), expected)


@pytest.mark.newest_jax
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("data", None, "model"), P("data", "model")], ids=str)
def test_normalised_axes_spread(platform, op, implementation, kind, spec, rng):
    """Normalised axes are gathered, and y is sharded as x is."""
    devices = mesh(platform, kind)
    dy, x, scale, _ = example(rng, (8, 4, 32), inner=(4, 32))
    options = {"begin_norm_axis": 1, "implementation": implementation}

    def f(dy: Any, x: Any, scale: Any) -> Any:
        y, pull = jax.vjp(lambda x, s: getattr(jax_gradops, op)(x, s, **options), x, scale)
        return y, *pull(dy)

    expected = jax.jit(f)(dy, x, scale)
    with jax.set_mesh(devices):
        spread = NamedSharding(devices, spec)
        arrays = [jax.device_put(dy, spread), jax.device_put(x, spread)]
        inner = NamedSharding(devices, P(*spec[1:]))
        results = jax.jit(f)(*arrays, jax.device_put(scale, inner))
    for actual, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-5)
