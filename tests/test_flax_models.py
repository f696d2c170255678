"""Our modules inside Flax's transformations, train states, checkpoints and bridges; and `fuse`."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx
from jax_gradops.nnx import add_norm, fuse, unfuse

WIDTH = 8
FLAX, OURS = (linen, nnx), (jax_gradops.linen, jax_gradops.nnx)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Promotion as users have it, which Flax's own code counts on; no TensorFloat-32."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("highest"),
    ):
        yield


def x_of(*shape: int) -> jax.Array:
    x = np.random.default_rng(0).standard_normal(shape or (4, 6, WIDTH))
    return jnp.asarray(x, jnp.float32)


def assert_close(expected: Any, actual: Any, dtype: Any = jnp.float32) -> None:
    """Equal but for roundings; each model has several layers, which multiply them."""
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        allowed = 2000 * float(jnp.finfo(dtype).eps) * np.max(np.abs(a), initial=1)
        np.testing.assert_allclose(b, a, rtol=0, atol=allowed)


def kernels(function: Callable[..., Any], *arguments: Any) -> set[str]:
    """Those that the lowered program calls."""
    text = jax.jit(function).lower(*arguments).as_text()
    return set(re.findall(r"custom_call @jax_gradops[.\w]*?\.(\w+)", text))


# --- linen ---------------------------------------------------------------------------------------


class Block(linen.Module):
    """One of everything; `modules` are Flax's or ours."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        y = self.modules.LayerNorm(name="layer")(x)
        y = self.modules.RMSNorm(name="rms")(linen.Dense(WIDTH, name="dense")(y))
        y = self.modules.BatchNorm(use_running_average=False, name="batch")(y)
        return x + y, None


class Plain(linen.Module):
    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block(self.modules)(x)[0]


class Scanned(linen.Module):
    """Layers under `linen.scan`, each rematerialised."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = linen.remat(Block, prevent_cse=False)
        axes: Any = {"params": 0, "batch_stats": 0}
        layers = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return layers(self.modules)(x, None)[0]


class Vmapped(linen.Module):
    """A module for each of the batch; the last one's variables are shared."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        own: Any = {"params": 0, "batch_stats": 0}
        each = linen.vmap(Plain, variable_axes=own, split_rngs={"params": True})
        shared = linen.vmap(
            self.modules.LayerNorm, variable_axes={"params": None}, split_rngs={"params": False}
        )
        return shared()(each(self.modules)(x))


class Synchronised(linen.Module):
    """Statistics over the axis that `x` is mapped over."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"params": None, "batch_stats": None}
        norm = linen.vmap(
            self.modules.BatchNorm,
            variable_axes=axes,
            split_rngs={"params": False},
            axis_name="devices",
        )
        return norm(use_running_average=False, axis_name="devices")(x)


class Partitioned(linen.Module):
    """Parameters with names of mesh axes."""

    modules: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.ones, ("model",))
        return self.modules.LayerNorm(scale_init=init, bias_init=init)(x)


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


def test_linen_add_norm(platform: str) -> None:
    x, r = x_of(), 2 * x_of()

    class Model(linen.Module):
        modules: Any

        @linen.compact
        def __call__(self, x: jax.Array, r: jax.Array) -> Any:
            y, s = jax_gradops.linen.add_norm(self.modules.LayerNorm(name="a"), x, r)
            z, s = jax_gradops.linen.add_norm(self.modules.RMSNorm(name="b"), s, y)
            return z, s

    flax, ours = (Model(modules) for modules in (linen, jax_gradops.linen))
    variables = flax.init(jax.random.key(0), x, r)

    def run(model: Any) -> Any:
        def loss(v: Any, x: Any, r: Any) -> Any:
            z, s = model.apply(v, x, r)
            return jnp.sum(jnp.sin(z)) + jnp.sum(jnp.cos(s))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(variables, x, r)

    assert_close(run(flax), run(ours))
    assert kernels(ours.apply, variables, x, r) == {"layer_norm_fwd", "rms_norm_fwd"}
    assert "stablehlo.add" not in jax.jit(ours.apply).lower(variables, x, r).as_text()


# --- NNX -----------------------------------------------------------------------------------------


class Model(nnx.Module):
    """One of everything that `fuse` knows, with norms of a module given."""

    def __init__(self, rngs: nnx.Rngs, modules: Any = nnx) -> None:
        self.layer = modules.LayerNorm(WIDTH, rngs=rngs)
        self.blocks = nnx.List([modules.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.batch = modules.BatchNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 16, rngs=rngs), jax.nn.gelu, nnx.Linear(16, WIDTH, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y, x = add_norm(self.layer, x, jnp.sin(x))
        for norm in self.blocks:
            y = norm(y + 1)
        return x + self.batch(self.mlp(y))


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(model(x)))


def result_of(model: Any, x: jax.Array) -> Any:
    result = nnx.jit(nnx.value_and_grad(loss_of))(model, x)
    return nnx.to_pure_dict(result[1]), result[0], nnx.to_pure_dict(nnx.state(model))


def stacked(modules: Any) -> Any:
    """Three models in one, as NNX's users stack layers."""

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
            model = fuse(Model(nnx.Rngs(0)), gelu=True)
        return result_of(model, x)

    assert_close(run(nnx), run(jax_gradops.nnx))


def test_training_goes_on_after_fuse() -> None:
    x = x_of()

    def train(fuse_at: int | None) -> Any:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
            loss, gradients = nnx.value_and_grad(loss_of)(model, x)
            optimizer.update(model, gradients)
            return loss

        losses = []
        for i in range(4):
            if i == fuse_at:
                fuse(model, gelu=True)
            losses.append(step(model, optimizer, x))
        return losses, nnx.to_pure_dict(nnx.state(optimizer))

    expected = train(None)
    assert_close(expected, train(0))
    assert_close(expected, train(2))


def test_fuse_and_unfuse() -> None:
    model = Model(nnx.Rngs(0))
    modules = {path: m for path, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)}
    variables = jax.tree.leaves(nnx.variables(model), is_leaf=lambda v: isinstance(v, nnx.Variable))
    before = nnx.graphdef(model)
    reports: list[Any] = []
    assert fuse(model, gelu=True, residuals="output", report=reports.append) is model
    after = {path: m for path, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)}
    assert all(after[path] is m for path, m in modules.items()) and len(after) == len(modules)
    now = jax.tree.leaves(nnx.variables(model), is_leaf=lambda v: isinstance(v, nnx.Variable))
    assert all(a is b for a, b in zip(variables, now, strict=True))
    assert reports[0].changed == {
        "batch": "jax_gradops.nnx.BatchNorm",
        "blocks.0": "jax_gradops.nnx.RMSNorm",
        "blocks.1": "jax_gradops.nnx.RMSNorm",
        "layer": "jax_gradops.nnx.LayerNorm",
        "mlp": "jax_gradops.nnx.Sequential",
    }
    assert not reports[0].left
    assert isinstance(model.layer, nnx.LayerNorm) and model.layer.residuals == "output"
    graph, state = nnx.split(model)
    found = kernels(lambda s, x: nnx.merge(graph, s)(x), state, x_of())
    assert found == {"layer_norm_fwd", "rms_norm_fwd", "batch_norm_fwd", "bias_gelu_fwd"}
    assert unfuse(model) is model
    assert nnx.graphdef(model) == before


class Own(nnx.LayerNorm):
    """A user's."""


def test_fuse_says_what_it_leaves() -> None:
    rngs = nnx.Rngs(0)
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=rngs)
    model = nnx.Dict(
        own=Own(WIDTH, rngs=rngs),
        group=nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs),
        axis=nnx.LayerNorm(WIDTH, axis_name="devices", rngs=rngs),
        other=nnx.RMSNorm(WIDTH, reduction_axes=-2, feature_axes=-2, rngs=rngs),
        differ=nnx.RMSNorm(WIDTH, reduction_axes=(-2, -1), rngs=rngs),
        groups=nnx.BatchNorm(WIDTH, axis_name="d", axis_index_groups=[[0], [1]], rngs=rngs),
        complex=nnx.LayerNorm(WIDTH, param_dtype=jnp.complex64, rngs=rngs),
        relu=nnx.Sequential(linear(), jax.nn.relu),
        exact=nnx.Sequential(linear(), gelu, linear(), jax_gradops.gelu, jax.nn.gelu),
        sure=nnx.LayerNorm(WIDTH, reduction_axes=2, feature_axes=2, rngs=rngs),
    )
    reports: list[Any] = []
    fuse(model, gelu=True, report=reports.append)
    assert reports[0].changed == {
        "exact": "jax_gradops.nnx.Sequential",
        "sure": "jax_gradops.nnx.LayerNorm",
    }
    assert reports[0].left == {
        "axis": "axis_name is set",
        "complex": "no kernel for complex64",
        "differ": "reduction_axes and feature_axes differ",
        "group": "no kernel for GroupNorm",
        "groups": "axis_index_groups is set",
        "other": "reduction_axes are not the last ones",
        "own": "Own is a subclass of LayerNorm, with code of its own",
    }
    assert str(reports[0]).splitlines()[:2] == [
        "fused 2, left 7",
        "  exact: now jax_gradops.nnx.Sequential",
    ]
    x = x_of()
    ours = model["exact"](x)
    assert kernels(lambda x: model["exact"](x), x) == {"bias_gelu_fwd"}
    assert_close(unfuse(model)["exact"](x), ours)
    again: list[Any] = []
    fuse(fuse(model), report=again.append)
    assert not again[0].changed


def test_fuse_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match=r"fuse: model must be a flax.nnx.Module, got dict"):
        fuse({})  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"unfuse: model must be a flax.nnx.Module, got Dense"):
        unfuse(linen.Dense(3))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="residuals must be .* got 'both'"):
        fuse(Model(nnx.Rngs(0)), residuals="both")  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="jax_gradops"):
        fuse(Model(nnx.Rngs(0)))
    assert "fused 4, left 0" in caplog.text


def test_saving_the_output_takes_less_memory() -> None:
    x, weight = np.asarray(x_of(64, 32, WIDTH)), np.ones((WIDTH, WIDTH), np.float32)
    layers = 6

    def memory(residuals: Any) -> int:
        """Of a program with norms that matrices follow: they keep the input, or the result."""
        norm = fuse(nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), residuals=residuals)

        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = x + jnp.sin(norm(x)) @ weight
            return jnp.sum(x)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.default_device(jax.devices("cpu")[0]):  # GPUs have workspaces that are larger
        assert memory("output") <= memory("input") - (layers - 2) * x.nbytes


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
