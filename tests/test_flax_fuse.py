"""`fuse` and `unfuse`: their changes, messages and errors, and what they leave unchanged."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.nnx import bridge
from flax_models import WIDTH, Model, assert_close, kernels, loss_of, x_of

import jax_gradops
import jax_gradops.nnx
from jax_gradops._flax import nnx_fuse
from jax_gradops.nnx import fuse, unfuse

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("flax_settings")]


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
        "batch": "BatchNorm -> jax_gradops.nnx.BatchNorm",
        "blocks[0]": "RMSNorm -> jax_gradops.nnx.RMSNorm, residuals='output'",
        "blocks[1]": "RMSNorm -> jax_gradops.nnx.RMSNorm, residuals='output'",
        "group": "GroupNorm -> jax_gradops.nnx.GroupNorm",
        "instance": "InstanceNorm -> jax_gradops.nnx.InstanceNorm",
        "layer": "LayerNorm -> jax_gradops.nnx.LayerNorm, residuals='output'",
        "mlp.layers[1]": "gelu -> jax_gradops.bias_gelu, with the bias of layers[0]",
    }
    assert not reports[0].left
    assert isinstance(model.layer, nnx.LayerNorm) and model.layer.residuals == "output"
    graph, state = nnx.split(model)
    found = kernels(lambda s, x: nnx.merge(graph, s)(x), state, x_of())
    assert found == {"row_norm_fwd", "batch_norm_fwd", "group_norm_fwd", "bias_gelu_fwd"}
    assert unfuse(model) is model
    assert nnx.graphdef(model) == before


class Own(nnx.LayerNorm):
    """A user's subclass."""


def test_fuse_says_what_it_leaves() -> None:
    rngs = nnx.Rngs(0)
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=rngs)
    model = nnx.Dict(
        own=Own(WIDTH, rngs=rngs),
        group=nnx.GroupNorm(WIDTH, num_groups=2, reduction_axes=(-2, -1), rngs=rngs),
        rows=nnx.GroupNorm(WIDTH, num_groups=2, reduction_axes=(0, -1), rngs=rngs),
        devices=nnx.GroupNorm(WIDTH, num_groups=2, axis_name="devices", rngs=rngs),
        instance=nnx.InstanceNorm(WIDTH, feature_axes=(-1, 1), rngs=rngs),
        weight=nnx.WeightNorm(linear(), rngs=rngs),
        axis=nnx.LayerNorm(WIDTH, axis_name="devices", rngs=rngs),
        other=nnx.RMSNorm(WIDTH, reduction_axes=-2, feature_axes=-2, rngs=rngs),
        differ=nnx.RMSNorm(WIDTH, reduction_axes=(-2, -1), rngs=rngs),
        groups=nnx.BatchNorm(WIDTH, axis_name="d", axis_index_groups=[[0], [1]], rngs=rngs),
        complex=nnx.LayerNorm(WIDTH, param_dtype=jnp.complex64, rngs=rngs),
        complexes=nnx.Embed(5, WIDTH, param_dtype=jnp.complex64, rngs=rngs),
        tokens=nnx.Embed(5, WIDTH, rngs=rngs),
        relu=nnx.Sequential(linear(), jax.nn.relu),
        exact=nnx.Sequential(linear(), gelu, linear(), jax_gradops.gelu, jax.nn.gelu),
        sure=nnx.LayerNorm(WIDTH, reduction_axes=2, feature_axes=2, rngs=rngs),
    )
    reports: list[Any] = []
    fuse(model, gelu=True, report=reports.append)
    assert reports[0].changed == {
        "exact.layers[1]": "gelu -> jax_gradops.bias_gelu, with the bias of layers[0]",
        "exact.layers[3]": "gelu -> jax_gradops.bias_gelu, with the bias of layers[2]",
        "group": "GroupNorm -> jax_gradops.nnx.GroupNorm",
        "sure": "LayerNorm -> jax_gradops.nnx.LayerNorm",
        "tokens": "Embed -> jax_gradops.nnx.Embed",
    }
    assert reports[0].left == {
        "axis": "axis_name is set",
        "complex": "no kernel for complex64",
        "complexes": "no kernel for complex64",
        "devices": "axis_name is set",
        "differ": "reduction_axes and feature_axes differ",
        "exact.layers[4]": "a GELU that follows no Linear",
        "groups": "axis_index_groups is set",
        "instance": "more than one axis",
        "other": "reduction_axes are not the last ones",
        "own": "Own is a subclass of LayerNorm, maybe with code of its own",
        "rows": "reduction_axes are not all axes but the first",
        "weight": "no kernel for WeightNorm",
    }
    assert str(reports[0]).splitlines()[:2] == [
        "fused 5, left 12",
        "  exact.layers[1]: gelu -> jax_gradops.bias_gelu, with the bias of layers[0]",
    ]
    x = x_of()
    ours = model["exact"](x)
    assert kernels(lambda x: model["exact"](x), x) == {"bias_gelu_fwd"}
    assert_close(unfuse(model)["exact"](x), ours)
    again: list[Any] = []
    fuse(fuse(model), report=again.append)
    assert not again[0].changed


class RMSNorm(nnx.Module):
    """As in Flax's Gemma example."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.scale = nnx.Param(jnp.zeros(shape))


class WithEpsilon(nnx.Module):
    """A norm by its attributes, if the parameter has one axis."""

    def __init__(self, name: str, epsilon: str, shape: tuple[int, ...] = (3,)) -> None:
        setattr(self, name, nnx.Param(jnp.ones(shape)))
        setattr(self, epsilon, 1e-6)


class PreNorm(nnx.Module):
    """No norm, but a module around one."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm


class TanhNormal(nnx.Module):
    """A distribution."""


class LinenNorm(linen.Module):
    """A norm of a user's own in linen."""


def test_fuse_names_norms_of_unknown_classes() -> None:
    rngs = nnx.Rngs(0)
    gamma, weight = WithEpsilon("gamma", "epsilon"), WithEpsilon("weight", "rms_norm_eps")
    model = nnx.Dict(
        flax=nnx.LayerNorm(WIDTH, rngs=rngs),
        gemma=PreNorm(RMSNorm((WIDTH,))),
        gamma=gamma,
        weight=weight,
        linen=bridge.ToNNX(LinenNorm(), rngs=rngs),
        outer=PreNorm(nnx.RMSNorm(WIDTH, rngs=rngs)),
        normal=TanhNormal(),
        steps=WithEpsilon("scale", "number_of_steps"),
        matrix=WithEpsilon("weight", "epsilon", (3, 3)),
        other=WithEpsilon("shift", "epsilon"),
    )
    reports: list[Any] = []
    fuse(model, report=reports.append)
    assert reports[0].changed.keys() == {"flax", "outer.norm"}
    assert reports[0].left == {
        "gamma": "fuse does not know the class WithEpsilon",
        "gemma.norm": "fuse does not know the class RMSNorm",
        "linen": "fuse does not know the class LinenNorm",
        "weight": "fuse does not know the class WithEpsilon",
    }
    assert str(reports[0]).splitlines()[-1] == (
        "  For classes that fuse does not know, use jax_gradops.fuse(function), or call "
        "jax_gradops.rms_norm or layer_norm in them"
    )
    abstract = nnx.eval_shape(lambda: WithEpsilon("gamma", "epsilon"))
    fuse(abstract, report=reports.append)
    assert reports[1].left == {"the model": "fuse does not know the class WithEpsilon"}


def test_fuse_says_what_is_fused_already() -> None:
    class Subclass(jax_gradops.nnx.LayerNorm):
        pass

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.LayerNorm(WIDTH, rngs=rngs), Subclass(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
    )
    reports: list[Any] = []
    fuse(fuse(model), report=reports.append)
    already = {"layers[0]": "LayerNorm", "layers[1]": "Subclass", "layers[2]": "RMSNorm"}
    assert reports[0].already == already and not reports[0].changed
    assert str(reports[0]) == "fused 0, left 0, already fused 3"
    fuse(model, residuals="output", report=reports.append)
    assert reports[1].already.keys() == {"layers[1]"}
    fuse(unfuse(model), report=reports.append)
    assert str(reports[2]).startswith("fused 2, left 0, already fused 1\n")


def test_fuse_does_not_count_layers_without_bias() -> None:
    rngs = nnx.Rngs(0)
    with_bias, without = (nnx.Linear(3, 3, use_bias=b, rngs=rngs) for b in (True, False))
    reports: list[Any] = []
    fuse(nnx.Dict(one=with_bias, two=without), linear=True, report=reports.append)
    assert reports[0] == nnx_fuse.FuseReport({"one": "Linear -> jax_gradops.nnx.Linear"}, {})
    assert type(without) is nnx.Linear


def test_a_call_without_effect_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for model in (nnx.Dict(norm=RMSNorm((WIDTH,))), nnx.Linear(3, 3, rngs=nnx.Rngs(0))):
        caplog.clear()
        fuse(model)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert (
            "fused 0" in record.getMessage() and "jax_gradops.fuse(function)" in record.getMessage()
        )
    fuse(fuse(Model(nnx.Rngs(0))))
    assert len(caplog.records) == 1


def test_fuse_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match=r"fuse: model must be a flax.nnx.Module, got dict"):
        fuse({})  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"unfuse: .* got Dense, which is a flax.linen.Module"):
        unfuse(linen.Dense(3))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="residuals must be .* got 'both'"):
        fuse(Model(nnx.Rngs(0)), residuals="both")  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="jax_gradops"):
        fuse(Model(nnx.Rngs(0)))
    assert "fused 6, left 1" in caplog.text


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


def test_saving_the_output_takes_less_memory() -> None:
    x, weight = np.asarray(x_of(64, 32, WIDTH)), np.ones((WIDTH, WIDTH), np.float32)
    layers = 6

    def memory(residuals: Any) -> int:
        """The memory of a program in which matrices follow norms.

        Norms save the input or the result.
        """
        norm = fuse(nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), residuals=residuals)

        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = x + jnp.sin(norm(x)) @ weight
            return jnp.sum(x)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.default_device(jax.devices("cpu")[0]):  # workspaces on GPUs are larger
        assert memory("output") <= memory("input") - (layers - 2) * x.nbytes


def small() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    norm, linear = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 5, rngs=rngs)
    return nnx.Sequential(norm, linear, jax.nn.gelu)


ZEROS = "residuals='output' is not set: its scale has zeros"


def test_scales_of_zero_keep_the_input() -> None:
    zeros = nnx.LayerNorm(WIDTH, scale_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    model = nnx.Sequential(zeros, nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)))
    reports: list[Any] = []
    fuse(model, residuals="output", report=reports.append)
    assert reports[0].changed == {
        "layers[0]": f"LayerNorm -> jax_gradops.nnx.LayerNorm, {ZEROS}",
        "layers[1]": "LayerNorm -> jax_gradops.nnx.LayerNorm, residuals='output'",
    }
    fuse(model, residuals="output", report=reports.append)
    assert reports[1].left == {"layers[0]": ZEROS}
    gradient = nnx.grad(lambda norm, x: jnp.sum(jnp.sin(norm(x) + x)))(model.layers[0], x_of())
    assert np.all(np.asarray(gradient["scale"][...]) != 0)


def test_fuse_of_an_abstract_model() -> None:
    model = fuse(nnx.eval_shape(small), gelu=True, residuals="output")
    assert model.layers[0].residuals == "output"
    _, state = nnx.split(small())
    expected = small()(x_of())
    assert_close(expected, nnx.merge(nnx.graphdef(model), state)(x_of()))


def test_fuse_leaves_residuals_that_are_set() -> None:
    reports: list[Any] = []
    model = fuse(small(), residuals="output")
    fuse(model, gelu=True, report=reports.append)
    assert model.layers[0].residuals == "output" and list(reports[0].changed) == ["layers[2]"]
    fuse(model, residuals="input", report=reports.append)
    assert reports[1].changed == {"layers[0]": "jax_gradops.nnx.LayerNorm, residuals='input'"}


def test_fuse_of_linen_modules() -> None:
    model = nnx.Dict(
        norm=bridge.ToNNX(linen.LayerNorm(), rngs=nnx.Rngs(0)),
        ours=jax_gradops.nnx.LayerNorm(3, rngs=nnx.Rngs(0)),
    )
    reports: list[Any] = []
    fuse(model, report=reports.append)
    assert reports[0].left == {"norm": "a linen module: jax_gradops.linen has its like"}
    assert not reports[0].changed
