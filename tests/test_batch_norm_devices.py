"""Batch norm's statistics across devices."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import EPSILON, assert_last, channels_last, ordinary
from comparing import assert_matches, widen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from transformations import vjp_of

import jax_gradops
from jax_gradops import _oracles as oracles
from jax_gradops._kernel.shards import FEW, SMALL

pytestmark = pytest.mark.newest_jax


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("how", ["shard_map", "shard_map without check_vma", "vmap", "pmap"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "relu and residual"])
def test_axis_name(platform, implementation, how, axis, with_residual, rng):
    """Statistics over mapped axes, and gradients, are equal to the whole batch's."""
    devices = mesh(platform, AxisType.Auto)
    parts = 2 * FEW if how == "vmap" else devices.size
    shape = (2 * FEW, 4, 3, 5)
    dy, x, residual, scale, bias = ordinary(shape, axis, np.float32, rng)
    operands = [x, residual] if with_residual else [x]
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
    """Each device has its own statistics inside shard_map, as in Flax."""
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


@pytest.mark.parametrize("parts", [FEW, FEW + 1])
def test_axis_name_of_large_variances(platform, implementation, parts, rng):
    """The variance is right although the sum of the parts' variances overflows."""
    x = (1.3e19 * rng.standard_normal((parts, 256, 5))).astype(np.float32)
    op = functools.partial(
        jax_gradops.batch_norm, epsilon=0.0, axis_name="batch", implementation=implementation
    )
    y, _, var = jax.jit(jax.vmap(op, axis_name="batch"))(x)
    assert_last(y, oracles.batch_norm(widen(x), epsilon=0.0), -1, np.float32, "y")
    np.testing.assert_allclose(var[0], widen(x).var((0, 1)), rtol=2e-6)


@pytest.mark.T1
@pytest.mark.parametrize("vmapped", [False, True], ids=["plain", "vmapped"])
def test_second_derivatives_inside_shard_map(platform, implementation, vmapped, rng):
    """Every mixture of modes gives the second derivatives of the whole batch."""
    devices = mesh(platform, AxisType.Auto)
    axes = ("data", "model")
    shape = (2, 8, 3) if vmapped else (8, 3)
    x, weights = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    scale = np.linspace(0.5, 2, 3, dtype=np.float32)

    def functions(name: Any) -> Any:
        def total(value: Any) -> Any:
            return value if name is None else jax.lax.psum(value, name)

        def op(x: Any, scale: Any) -> Any:
            return jax_gradops.batch_norm(
                x, scale, scale, axis_name=name, implementation=implementation
            )[0]

        def loss(x: Any, scale: Any, weights: Any) -> Any:
            y = jax.vmap(op, (0, None))(x, scale) if vmapped else op(x, scale)
            return total(jnp.sum(jnp.sin(y) * weights))

        gradient = jax.grad(loss, (0, 1))

        def forward_over_reverse(x: Any, scale: Any, weights: Any) -> Any:
            return jax.jvp(lambda x: gradient(x, scale, weights), (x,), (weights,))[1]

        def reverse_over_reverse(x: Any, scale: Any, weights: Any) -> Any:
            def sines(x: Any, scale: Any) -> Any:
                dx, dscale = gradient(x, scale, weights)
                return total(jnp.sum(jnp.sin(dx))) + jnp.sum(jnp.sin(dscale))

            return jax.grad(sines, (0, 1))(x, scale)

        def forward_over_forward(x: Any, scale: Any, weights: Any) -> Any:
            def slope(x: Any) -> Any:
                return jax.jvp(lambda x: loss(x, scale, weights), (x,), (weights,))[1]

            return jax.jvp(slope, (x,), (weights,))[1]

        return forward_over_reverse, reverse_over_reverse, forward_over_forward

    rows = P(None, axes) if vmapped else P(axes)
    for mapped, whole in zip(functions(axes), functions(None), strict=True):
        results = (rows, P()) if whole.__name__ != "forward_over_forward" else P()
        spread = jax.shard_map(mapped, mesh=devices, in_specs=(rows, P(), rows), out_specs=results)
        got, want = jax.jit(spread)(x, scale, weights), jax.jit(whole)(x, scale, weights)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            limit = 2e-5 * np.abs(b).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=whole.__name__)


def test_linearized_where_an_index_may_take_another_branch(platform, implementation, rng):
    """The saved statistics, and their tangents, then differ between indices."""
    x, weights = (rng.standard_normal((2, 4, 3)).astype(np.float32) for _ in range(2))

    def derivative(x: Any, takes_norm: Any, weights: Any) -> Any:
        def norm(x: Any) -> Any:
            y = jax_gradops.batch_norm(x, axis_name="i", implementation=implementation)[0]
            return jnp.sum(y * weights)

        def loss(x: Any) -> Any:
            return jax.lax.cond(takes_norm, norm, lambda x: jnp.sum(x * weights), x)

        return jax.linearize(loss, x)[1](weights)

    both = jax.jit(jax.vmap(derivative, axis_name="i"))
    plain = np.square(weights).sum((1, 2))
    np.testing.assert_allclose(both(x, np.array([False, False]), weights), plain, rtol=1e-5)
    mixed = both(x, np.array([True, False]), weights)
    np.testing.assert_allclose(mixed[1], plain[1], rtol=1e-5)
    assert np.isfinite(mixed).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_axis_name_beside_sharded_channels(platform, implementation, kind, rng):
    """shard_map over the batch. Another axis of the mesh shards the channels."""
    devices = mesh(platform, AxisType.Auto, kind)
    dy, x, _, scale, bias = ordinary((8, 4, 2, 6), 1, np.float32, rng)

    def op(x: Any, scale: Any, bias: Any) -> Any:
        return jax_gradops.batch_norm(
            x, scale, bias, axis=1, epsilon=EPSILON, axis_name="data",
            implementation=implementation,
        )[0]  # fmt: skip

    mapped = jax.shard_map(
        op, mesh=devices, axis_names={"data"}, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )
    specs = P("data", "model"), P("data", "model"), P("model"), P("model")
    with jax.set_mesh(devices):
        placed = [
            jax.device_put(a, NamedSharding(devices, s))
            for a, s in zip((dy, x, scale, bias), specs, strict=True)
        ]
        compiled = jax.jit(vjp_of(mapped)).lower(*placed).compile()
        y, dx, dscale, dbias = compiled(*placed)
    if kind == AxisType.Auto:  # inside shard_map, JAX gathers what an Explicit axis shards
        assert set(collectives(compiled.as_text())) == {"all-reduce"}
    wide, parameters = [channels_last(a, 1) for a in (dy, x)], (widen(scale), widen(bias))
    assert_last(y, oracles.batch_norm(wide[1], *parameters, epsilon=EPSILON), 1, np.float32, "y")
    expected = oracles.batch_norm_vjp(*wide, *parameters, epsilon=EPSILON)
    assert_last(dx, expected[0], 1, np.float32, "dx")
    assert_matches(dscale, expected[1], np.float32, np.float32, "dscale")
    assert_matches(dbias, expected[2], np.float32, np.float32, "dbias")


@pytest.mark.parametrize(
    ("channels", "sums", "of_one_array"), [(16, 1, 1), (SMALL // 3, 2, 2), (SMALL, 2, 1)]
)
def test_statistics_in_one_or_two_sums(channels, sums, of_one_array):
    """Small statistics need one all-reduce, and small arrays are sent as one."""
    devices = mesh("cpu", AxisType.Auto)
    rows = NamedSharding(devices, P(("data", "model")))
    x = jax.device_put(np.ones((16, channels), np.float32), rows)

    def op(x: Any) -> Any:
        return jax_gradops.batch_norm(x, epsilon=EPSILON, implementation="ffi")

    compiled = jax.jit(op).lower(x).compile()
    text, (y, mean, var) = str(compiled.as_text()), compiled(x)
    single = re.findall(r"= f32\[[\d,]*\]\S* all-reduce(?:-start)?\(", text)
    assert (collectives(text)["all-reduce"], len(single)) == (sums, of_one_array)
    assert (mean == 1).all() and (var == 0).all() and (y == 0).all()


@pytest.mark.R5
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data"), P("data", "model")], ids=str)
def test_images_spread(platform, spec, rng):
    """NCHW images, sharded over the batch, the height, or batch and channels. Means are large.

    Devices send only values per channel.
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
        assert found.pop("all-reduce") == 2
        assert not found
    else:  # parameters are sharded as channels are, and their gradients are gathered
        assert "all-to-all" not in found and "collective-permute" not in found
    wide, parameters = [channels_last(a, 1) for a in (dy, x)], (widen(scale), widen(bias))
    assert_last(y, oracles.batch_norm(wide[1], *parameters, epsilon=EPSILON), 1, np.float32, "y")
    expected = oracles.batch_norm_vjp(*wide, *parameters, epsilon=EPSILON)
    assert_last(dx, expected[0], 1, np.float32, "dx")
    for got, want in zip((dscale, dbias), expected[1:3], strict=True):
        assert_matches(got, want, np.float32, np.float32, "a parameter's gradient")
