"""Our modules inside Flax's transformations, train states, checkpoints and bridges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.nnx import bridge
from flax.training.train_state import TrainState
from flax_models import (
    WIDTH,
    Model,
    Partitioned,
    Plain,
    Scanned,
    Synchronised,
    Vmapped,
    assert_close,
    kernels,
    loss_of,
    result_of,
    x_of,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx
from jax_gradops.nnx import fuse

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("flax_settings")]
FLAX, OURS = (linen, nnx), (jax_gradops.linen, jax_gradops.nnx)


# --- linen ---------------------------------------------------------------------------------------


def gradient(model: Any, variables: Any, x: jax.Array) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        rest = {name: v for name, v in variables.items() if name != "params"}
        y, after = model.apply({**rest, "params": params}, x, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y)), (y, after)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables["params"], x)


@pytest.mark.parametrize("model", [Plain, Scanned, Vmapped, Synchronised, Partitioned])
def test_linen_transformations(model: Any, platform: str) -> None:
    x = x_of()
    flax, ours = (model(modules) for modules in (linen, jax_gradops.linen))
    variables = flax.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables, ours.init(jax.random.key(0), x))
    assert_close(gradient(flax, variables, x), gradient(ours, variables, x))
    assert kernels(lambda v, x: ours.apply(v, x, mutable=["batch_stats"]), variables, x)


def test_linen_train_state() -> None:
    x = x_of()
    curves = []
    for modules in (linen, jax_gradops.linen):
        model = Plain(modules)
        variables = model.init(jax.random.key(0), x)
        state = TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2)
        )
        stats, losses = variables["batch_stats"], []
        for _ in range(3):
            (loss, (_, after)), (gradients, _) = gradient(
                model, {"params": state.params, "batch_stats": stats}, x
            )
            state, stats = state.apply_gradients(grads=gradients), after["batch_stats"]
            losses.append(loss)
        curves.append((losses, stats))
    assert_close(*curves)


def test_linen_dense_gelu(platform: str) -> None:
    x = x_of()
    for approximate in (True, False):
        for options in ({}, {"use_bias": False}, {"dtype": jnp.bfloat16}):
            dense = linen.Dense(5, bias_init=linen.initializers.ones, **options)
            ours = jax_gradops.linen.DenseGelu(
                5, bias_init=linen.initializers.ones, approximate=approximate, **options
            )
            variables = dense.init(jax.random.key(0), x)
            jax.tree.map(np.testing.assert_array_equal, variables, ours.init(jax.random.key(0), x))

            def flax(v: Any, x: Any, dense: Any = dense, approximate: bool = approximate) -> Any:
                return jax.nn.gelu(dense.apply(v, x), approximate)

            results = [
                jax.jit(jax.value_and_grad(lambda v, x, f=f: jnp.sum(jnp.sin(f(v, x))), (0, 1)))(
                    variables, x
                )
                for f in (flax, ours.apply)
            ]
            assert_close(*results, options.get("dtype", jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [True, False])
def test_linen_add_norm(dtype: Any, use_bias: bool, platform: str) -> None:
    x, r = x_of().astype(dtype), 2 * x_of().astype(dtype)
    some = linen.initializers.normal()

    class Model(linen.Module):
        modules: Any

        @linen.compact
        def __call__(self, x: jax.Array, r: jax.Array) -> Any:
            norms: Any = self.modules
            add_norm = jax_gradops.linen.add_norm
            y, s = add_norm(norms.LayerNorm(dtype=dtype, name="a"), x, r)
            options: Any = {"use_bias": use_bias, "bias_init": some, "dtype": dtype, "name": "c"}
            if norms is linen:
                update = (linen.Dense(WIDTH, **options)(y),)
            else:
                update = jax_gradops.linen.DeferredBiasDense(WIDTH, **options)(y)
            return add_norm(norms.RMSNorm(dtype=dtype, name="b"), s, *update)

    flax, ours = (Model(modules) for modules in (linen, jax_gradops.linen))
    variables = flax.init(jax.random.key(0), x, r)
    jax.tree.map(np.testing.assert_array_equal, variables, ours.init(jax.random.key(0), x, r))

    def run(model: Any) -> Any:
        def loss(v: Any, x: Any, r: Any) -> Any:
            z, s = model.apply(v, x, r)
            assert z.dtype == s.dtype == dtype
            return jnp.sum(jnp.sin(z)) + jnp.sum(jnp.cos(s)), (z, s)

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, values), gradients = gradient(variables, x, r)
        # 16-bit gradients are rounded three times per layer
        return values, gradients if dtype == jnp.float32 else ()

    assert_close(run(flax), run(ours), dtype)
    assert kernels(ours.apply, variables, x, r) == {"row_norm_fwd"}
    assert "stablehlo.add" not in jax.jit(ours.apply).lower(variables, x, r).as_text()


# --- NNX -----------------------------------------------------------------------------------------


def stacked(modules: Any) -> Any:
    """Three models in one: NNX's users stack layers in this way."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return Model(rngs, modules)

    return make(nnx.Rngs(0))


@pytest.mark.parametrize("how", ["plain", "scan", "vmap", "split", "remat", "fused"])
def test_nnx_transformations(how: str, platform: str) -> None:
    x = x_of()

    def run(modules: Any) -> Any:
        if how == "scan":
            model = stacked(modules)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: jax.Array, layer: Any) -> jax.Array:
                return layer(x)

            loss = nnx.value_and_grad(lambda model, x: jnp.sum(jnp.sin(forward(x, model))))
            return nnx.to_pure_dict(nnx.jit(loss)(model, x)[1])
        if how == "vmap":
            model = stacked(modules)
            y = nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(model, x)
            return y, nnx.to_pure_dict(nnx.state(model))
        model = Model(nnx.Rngs(0), modules)
        if how == "split":
            graph, parameters, rest = nnx.split(model, nnx.Param, ...)

            def loss(parameters: Any, rest: Any, x: jax.Array) -> jax.Array:
                return loss_of(nnx.merge(graph, parameters, rest, copy=True), x)

            return nnx.to_pure_dict(jax.jit(jax.grad(loss))(parameters, rest, x))
        if how == "remat":
            forward = nnx.remat(lambda model, x: model(x))
            return nnx.to_pure_dict(
                nnx.jit(nnx.grad(lambda m, x: jnp.sum(jnp.sin(forward(m, x)))))(model, x)
            )
        if how == "fused" and modules is not nnx:
            model = fuse(Model(nnx.Rngs(0)), gelu=True, linear=True)
        return result_of(model, x)

    assert_close(run(nnx), run(jax_gradops.nnx))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("approximate", [True, False])
def test_nnx_dense_gelu(use_bias: bool, approximate: bool, platform: str) -> None:
    options: Any = {"use_bias": use_bias, "bias_init": nnx.initializers.ones}
    flax = nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0), **options)
    ours = jax_gradops.nnx.DenseGelu(WIDTH, 5, approximate=approximate, rngs=nnx.Rngs(0), **options)
    assert isinstance(ours, nnx.Linear)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(flax), nnx.state(ours))
    x = x_of()

    def run(model: Any, after: Callable[..., Any]) -> Any:
        loss = nnx.grad(lambda model, x: jnp.sum(jnp.sin(after(model(x)))), argnums=(0, 1))
        gradients = nnx.jit(loss)(model, x)
        return after(model(x)), nnx.to_pure_dict(gradients[0]), gradients[1]

    gelu = functools.partial(jax.nn.gelu, approximate=approximate)
    assert_close(run(flax, gelu), run(ours, lambda y: y))


# --- Checkpoints, bridges, meshes ----------------------------------------------------------------


@pytest.mark.parametrize(("saved", "loaded"), [(FLAX, OURS), (OURS, FLAX)])
def test_orbax_in_both_directions(saved: Any, loaded: Any, tmp_path: Path) -> None:
    x = x_of()
    with ocp.StandardCheckpointer() as checkpointer:
        variables = Plain(saved[0]).init(jax.random.key(0), x)
        checkpointer.save(tmp_path / "linen", variables)
        model = Model(nnx.Rngs(0), saved[1])
        checkpointer.save(tmp_path / "nnx", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        other = Plain(loaded[0])
        target = jax.eval_shape(other.init, jax.random.key(1), x)
        restored = checkpointer.restore(tmp_path / "linen", target)
        assert_close(gradient(Plain(saved[0]), variables, x), gradient(other, restored, x))
        copy = Model(nnx.Rngs(1), loaded[1])
        state = nnx.state(copy)
        nnx.replace_by_pure_dict(
            state, checkpointer.restore(tmp_path / "nnx", nnx.to_pure_dict(state))
        )
        nnx.update(copy, state)
    assert_close(result_of(model, x), result_of(copy, x))


def test_bridges() -> None:
    x = x_of()
    results = []
    for modules in (linen, jax_gradops.linen):
        model = bridge.lazy_init(bridge.ToNNX(Plain(modules), rngs=nnx.Rngs(0)), x)
        y = model(x, mutable=["batch_stats"])
        results.append(y)
    assert_close(*results)
    results = []
    for modules in (nnx, jax_gradops.nnx):
        model = bridge.to_linen(modules.LayerNorm, WIDTH)
        variables = model.init(jax.random.key(0), x)
        results.append((model.apply(variables, x), variables["params"]))
    assert_close(*results)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_sharding_metadata(api: str) -> None:
    devices = jax.devices("cpu")[:2]
    mesh = Mesh(np.asarray(devices), ("model",))
    x = jax.device_put(x_of(), NamedSharding(mesh, PartitionSpec("model")))
    if api == "linen":
        model = Partitioned(jax_gradops.linen)
        variables = model.init(jax.random.key(0), x)
        specs = linen.get_partition_spec(variables)
        assert specs["params"]["LayerNorm_0"] == {
            "scale": PartitionSpec("model"),
            "bias": PartitionSpec("model"),
        }
        y = jax.jit(model.apply)(variables, x)
        expected = Partitioned(linen).apply(variables, x)
    else:
        with jax.set_mesh(mesh):
            flax, ours = (
                modules.LayerNorm(
                    WIDTH,
                    scale_metadata={"out_sharding": ("model",), "mine": 3},
                    bias_metadata={"out_sharding": ("model",)},
                    rngs=nnx.Rngs(0),
                )
                for modules in (nnx, jax_gradops.nnx)
            )
        assert ours.scale.get_metadata() == flax.scale.get_metadata()
        assert ours.scale.get_metadata("mine") == 3
        y, expected = nnx.jit(lambda m, x: m(x))(ours, x), flax(x)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
