"""Programs that rules of `jax.custom_vjp`, `custom_vmap` or `custom_partitioning` would break.

Each test is a program that users write. Its source is a public report, or a fault found here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

import jax_gradops
from jax_gradops import backward
from jax_gradops._ops.batch_norm.axes import Axes
from jax_gradops._ops.batch_norm.kernels import ChannelNorm, _Normalize

pytestmark = pytest.mark.newest_jax

FEATURES = 16


def _vector(x: Any) -> jax.Array:
    return jnp.linspace(0.5, 2, FEATURES).astype(x.dtype)


#: Ops of [rows, FEATURES] with results of this shape.
OPS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, **k: jax_gradops.layer_norm(x, _vector(x), _vector(x), **k),
    "rms_norm": lambda x, **k: jax_gradops.rms_norm(x, _vector(x), **k),
    "from output": lambda x, **k: jax_gradops.rms_norm(x, _vector(x), residuals="output", **k),
    "gelu": lambda x, **k: jax_gradops.gelu(x, **k),
    "bias_gelu": lambda x, **k: jax_gradops.bias_gelu(x, _vector(x), False, **k),
    "batch_norm": lambda x, **k: jax_gradops.batch_norm(x, _vector(x), activation="relu", **k)[0],
    "group_norm": lambda x, **k: jax_gradops.group_norm(
        x, _vector(x), num_groups=4, activation="silu", **k
    ),
    "clip": lambda x, **k: jax_gradops.clip_tree_by_global_norm([x], 1.0, **k)[0][0],
    "in place": lambda x, **k: backward.inplace_clip_by_global_norm([x], 1.0, **k)[0][0],
}
each_op = pytest.mark.parametrize("op", OPS)


def loss_of(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jnp.sum(jnp.sin(f(x)))


def in_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


def twice(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(f(x))


SECOND: dict[str, Callable[..., Any]] = {
    "grad of grad": lambda f: jax.grad(lambda x: jnp.vdot(jax.grad(loss_of(f))(x), jnp.cos(x))),
    "hessian": lambda f: jax.hessian(loss_of(f)),
}


@pytest.mark.T1
@each_op
@pytest.mark.parametrize("second", SECOND)
def test_second_derivatives_through_loops(platform, op, second, implementation, rng):
    """JAX differentiates a loop's body without the rules of custom_jvp and custom_vjp."""
    x = rng.standard_normal((3, FEATURES))
    f = functools.partial(OPS[op], implementation=implementation)
    found, expected = (jax.jit(SECOND[second](g))(x) for g in (in_scan(f), twice(f)))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.T1
@each_op
def test_transposed_pullback(platform, op, implementation, rng):
    """The transposed pullback is the derivative in forward mode."""
    x, direction = rng.standard_normal((2, 3, FEATURES))
    f = functools.partial(OPS[op], implementation=implementation)
    y, pull = jax.vjp(f, x)
    (found,) = jax.linear_transpose(lambda ct: pull(ct)[0], y)(direction)
    expected = jax.jvp(f, (x,), (direction,))[1]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@each_op
def test_only_what_is_asked_for(op, rng):
    """If no parameter is differentiated, no kernel sums over rows for a parameter."""
    x = rng.standard_normal((3, FEATURES)).astype(np.float32)
    text = jax.jit(jax.grad(loss_of(OPS[op]))).lower(x).as_text()
    if op in ("layer_norm", "rms_norm", "from output", "bias_gelu"):
        call = next(line for line in text.splitlines() if "_bwd" in line and "custom_call" in line)
        results = call.rpartition("->")[2]
        assert f"tensor<{FEATURES}xf32>" not in results, results


@each_op
def test_compile_time_eval(op, rng):
    x = rng.standard_normal((3, FEATURES)).astype(np.float32)
    with jax.ensure_compile_time_eval():
        found = OPS[op](jnp.asarray(x))
    np.testing.assert_array_equal(found, OPS[op](x))


@each_op
def test_checkify(op, rng):
    """checkify finds a NaN of XLA's operations, but not a NaN inside a kernel."""
    x = rng.standard_normal((2, 3, FEATURES)).astype(np.float32)
    run = checkify.checkify(jax.jit(jax.vmap(OPS[op])), errors=checkify.all_checks)
    error, found = run(x)
    assert error.get() is None
    np.testing.assert_array_equal(found, jax.vmap(OPS[op])(x))


@each_op
def test_another_platform(op):
    """The error is this library's ValueError, not an error of MLIR."""
    x = jax.ShapeDtypeStruct((3, FEATURES), jnp.float32)
    traced = jax.jit(functools.partial(OPS[op], implementation="ffi")).trace(x)
    with pytest.raises(ValueError, match="jax_gradops: implementation='ffi' is not available.*tpu"):
        traced.lower(lowering_platforms=("tpu",))
    text = jax.jit(OPS[op]).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "jax_gradops." not in text


@each_op
@pytest.mark.parametrize("derivative", [False, True])
def test_spmd_axis_name(op, derivative, rng):
    """vmap over an Auto axis, around a shard_map over another axis: works as in jax.numpy."""
    devices = mesh("cpu", AxisType.Auto)
    f = jax.grad(loss_of(OPS[op])) if derivative else OPS[op]
    x = rng.standard_normal((4, 8, FEATURES))

    def local(x: jax.Array) -> jax.Array:
        return jax.vmap(f, spmd_axis_name="model")(x)

    spread = jax.shard_map(
        local, mesh=devices, in_specs=P(None, "data"), out_specs=P(None, "data"),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(devices):
        found = jax.jit(spread)(x)
    parts = np.split(x, devices.shape["data"], 1)
    expected = np.concatenate([jax.vmap(f)(part) for part in parts], 1)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@each_op
def test_abstract_mesh(op):
    """Only devices determine how a call is sharded. JAX's error says so. XLA's operations work."""
    abstract = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(abstract, P("data"))
    x = jax.ShapeDtypeStruct((4, FEATURES), jnp.float32, sharding=sharding)
    with pytest.raises(ValueError, match="AbstractMesh"):
        jax.jit(OPS[op]).trace(x).lower(lowering_platforms=("cpu",))
    by_xla = functools.partial(OPS[op], implementation="xla")
    jax.jit(by_xla).trace(x).lower(lowering_platforms=("cpu",))


CONTEXTS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > -9, f, lambda x: x, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.T2
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("derivative", ["grad", "hessian", "jvp"])
def test_named_axis_in_context(context, derivative, implementation, rng):
    """If a rule runs after the axis is mapped, the axis name is no longer bound."""
    x = rng.standard_normal((4, 3, FEATURES))[:, 0]
    normalized = functools.partial(jax_gradops.batch_norm, implementation=implementation)
    one = lambda x: normalized(x, _vector(x), axis_name="rows")[0]  # noqa: E731
    mapped = CONTEXTS[context](jax.vmap(one, axis_name="rows"))
    whole = lambda x: normalized(x, _vector(x))[0]  # noqa: E731
    of = {
        "grad": lambda f: jax.grad(loss_of(f)),
        "hessian": lambda f: jax.hessian(loss_of(f)),
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    }[derivative]
    jax.clear_caches()  # an earlier trace with the name bound would hide the error
    np.testing.assert_allclose(of(mapped)(x), of(whole)(x), rtol=1e-9, atol=1e-11)


def test_cotangent_of_common_result(rng):
    """All indices of a named axis share a result. The result's cotangent counts only once."""
    x = rng.standard_normal((4, FEATURES))
    operation = _Normalize(ChannelNorm(Axes(0), epsilon=1e-5, axis_name=("rows",)))
    mapped = jax.vmap(
        lambda x: operation(x, None, None, None)[:3], axis_name="rows", out_axes=(0, None, None)
    )
    whole = _Normalize(ChannelNorm(Axes(0), epsilon=1e-5))
    for f in (mapped, lambda x: whole(x, None, None, None)[:3]):
        y, mean, variance = f(x)
        assert mean.shape == variance.shape == (FEATURES,)
    loss = lambda f: lambda x: sum(jnp.sum(jnp.sin(r)) for r in f(x))  # noqa: E731
    expected = jax.grad(loss(lambda x: whole(x, None, None, None)[:3]))(x)
    np.testing.assert_allclose(jax.grad(loss(mapped))(x), expected, rtol=1e-9)


@pytest.mark.P6
@each_op
@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(None, "model")], ids=str)
def test_gspmd(platform, op, spec, rng):
    """GSPMD, the partitioner before Shardy, gives equal numbers and collectives."""
    devices = mesh(platform, AxisType.Auto)
    x = rng.standard_normal((8, FEATURES))
    spread = jax.device_put(x, NamedSharding(devices, spec))
    f = jax.value_and_grad(loss_of(OPS[op]))
    found = {}
    try:
        for shardy in (True, False):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            compiled = jax.jit(lambda x: f(x)).lower(spread).compile()
            found[shardy] = compiled(spread), collectives(compiled.as_text())
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12), *[r for r, _ in found.values()]
    )
    if spec == P("data"):
        assert found[True][1] == found[False][1]
    expected = f(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), found[True][0], expected)
