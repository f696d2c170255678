"""Activations and residuals of the Flax modules, and pairs of norm and activation."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.nnx import bridge
from flax_cases import APIS
from flax_models import WIDTH, assert_close, kernels, loss_of, x_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_gradops.linen
import jax_gradops.nnx
from jax_gradops.nnx import fuse, unfuse

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("flax_settings")]

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    None: lambda y: y,
}
NORMS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "BatchNorm": ({"use_running_average": False}, ("relu", None)),
    "GroupNorm": ({"num_groups": 2}, ("silu", "relu", None)),
    "InstanceNorm": ({}, ("silu", "relu", None)),
}
BOTH = [(name, activation) for name, (_, known) in NORMS.items() for activation in known]


def some(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(key, shape, dtype) + 1


def module_of(
    api: str, name: str, activation: Any = None, *, ours: bool, **options: Any
) -> tuple[Any, Any, Callable[..., Any]]:
    """A module's variables, and a function of these, arrays and options of the call.

    It returns the result and the variables after the call. For a module of Flax, it also computes
    the activation and the residual.
    """
    options = {**NORMS[name][0], "scale_init": some, "bias_init": some, **options}
    norm_class = getattr(APIS[api][ours], name)
    if ours:
        options["activation"] = activation
    if api == "nnx":
        module = norm_class(WIDTH, **options, rngs=nnx.Rngs(1))
        graph, variables = nnx.split(module)
    else:
        module = norm_class(**options)
        variables = module.init(jax.random.key(1), x_of())

    def call(variables: Any, x: Any, residual: Any = None, **given: Any) -> Any:
        if ours and residual is not None:
            given["residual"] = residual
        if api == "nnx":
            merged = nnx.merge(graph, variables)
            y, after = merged(x, **given), nnx.state(merged)
        else:
            y, after = module.apply(variables, x, mutable=["batch_stats"], **given)
        if not ours:
            y = FUNCTIONS[activation](y if residual is None else y + residual)
        return y, after

    return module, variables, call


def gradients(call: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    def loss(*arguments: Any) -> Any:
        y, after = call(*arguments, **given)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, after)

    wanted = tuple(range(len(arguments)))
    (_, values), found = jax.jit(jax.value_and_grad(loss, wanted, has_aux=True))(*arguments)
    return values, found


# --- Activations and residuals -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "activation"), BOTH)
@pytest.mark.parametrize("api", APIS)
def test_activations(api: str, name: str, activation: Any, dtype: Any, platform: str) -> None:
    x = x_of().astype(dtype)
    (_, variables, flax), (_, same, ours) = (
        module_of(api, name, activation, ours=own, dtype=dtype) for own in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, variables, same)
    (expected, wanted), (values, found) = gradients(flax, variables, x), gradients(ours, same, x)
    assert_close(expected, values, dtype)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, wanted)
    if dtype == "float32":  # Flax rounds a 16-bit result before the activation, and its gradient
        assert_close(wanted, found)
    found = kernels(ours, same, x)
    assert len(found) == 1
    text = jax.jit(ours).lower(same, x).as_text()
    assert activation is None or not {"maximum", "logistic"} & set(text.replace(".", " ").split())


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize(("dtype", "of_residual"), [(None, "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("api", APIS)
def test_residuals(api: str, dtype: Any, of_residual: str, activation: Any, platform: str) -> None:
    """Of the result's dtype: the op adds it, also if it reads x in another dtype."""
    for of_x in ("float32", "bfloat16"):
        x, residual = x_of().astype(of_x), jnp.cos(x_of()).astype(of_residual)
        (_, variables, flax), (_, _, ours) = (
            module_of(api, "BatchNorm", activation, ours=own, dtype=dtype) for own in (False, True)
        )
        allowed = jnp.bfloat16 if "bfloat16" in (of_x, dtype) else jnp.float32
        flax_values, flax_gradients = gradients(flax, variables, x, residual)
        values, found = gradients(ours, variables, x, residual)
        assert_close(flax_values, values, allowed)
        assert_close(flax_gradients, found, allowed)
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, flax_gradients)


@pytest.mark.parametrize("api", APIS)
def test_a_residual_in_training_is_one_operation(api: str) -> None:
    _, variables, ours = module_of(api, "BatchNorm", "relu", ours=True)
    lowered = jax.jit(lambda *arrays: ours(*arrays)[0]).lower(variables, x_of(), x_of())
    text = lowered.compile().as_text()
    assert text is not None and "batch_norm_fwd" in text and " maximum(" not in text


@pytest.mark.parametrize("of_residual", ["float32", "float64", "bfloat16", "int32"])
@pytest.mark.parametrize("api", APIS)
def test_residuals_of_other_dtypes(api: str, of_residual: str) -> None:
    x, residual = x_of().astype(jnp.float16), (3 * jnp.cos(x_of())).astype(of_residual)
    for training in (True, False):
        (_, variables, flax), (_, _, ours) = (
            module_of(api, "BatchNorm", "relu", ours=own, dtype="float16") for own in (False, True)
        )
        given = {} if api == "linen" else {"use_running_average": not training}
        expected, got = (call(variables, x, residual, **given)[0] for call in (flax, ours))
        assert expected.dtype == got.dtype
        assert_close(expected, got, jnp.float16)


@pytest.mark.parametrize("api", APIS)
def test_evaluation_is_plain(api: str) -> None:
    options = {"use_running_average": True}
    (_, variables, flax), (_, _, ours) = (
        module_of(api, "BatchNorm", "relu", ours=own, **options) for own in (False, True)
    )
    assert_close(*(gradients(call, variables, x_of(), jnp.cos(x_of())) for call in (flax, ours)))
    assert not kernels(ours, variables, x_of(), x_of())


@pytest.mark.parametrize(("name", "activation"), BOTH)
@pytest.mark.parametrize("api", APIS)
def test_what_flax_computes_has_the_activation(api: str, name: str, activation: Any) -> None:
    mask = np.random.default_rng(5).random((4, 6, WIDTH)) > 0.3
    (_, variables, flax), (_, _, ours) = (
        module_of(api, name, activation, ours=own) for own in (False, True)
    )
    assert_close(*(gradients(call, variables, x_of(), mask=mask) for call in (flax, ours)))
    assert not kernels(functools.partial(ours, mask=mask), variables, x_of())


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm"])
@pytest.mark.parametrize("api", APIS)
def test_statistics_over_a_mapped_axis_are_flaxs(api: str, name: str) -> None:
    results = []
    for ours in (False, True):
        options: Any = {**NORMS[name][0], "axis_name": "devices"}
        cls = getattr(APIS[api][ours], name)
        if api == "nnx":
            results.append(
                jax.vmap(cls(WIDTH, **options, rngs=nnx.Rngs(0)), axis_name="devices")(x_of())
            )
        else:
            mapped = jax.vmap(
                lambda x, cls=cls, options=options: cls(**options).init_with_output(
                    jax.random.key(0), x
                )[0],
                axis_name="devices",
            )
            results.append(mapped(x_of()))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm"])
@pytest.mark.parametrize("api", APIS)
def test_vmap(api: str, name: str) -> None:
    (_, variables, flax), (_, _, ours) = (module_of(api, name, "silu", ours=o) for o in (0, 1))

    def mapped(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda variables, x: (jax.vmap(lambda x: call(variables, x)[0])(x), None)

    x = x_of(2, 3, 5, WIDTH)
    assert_close(*(gradients(mapped(call), variables, x) for call in (flax, ours)))


def test_activations_in_linens_transformations() -> None:
    class Model(linen.Module):
        norm: Any

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(num_groups=2, activation="silu", name="norm")(x)

    ours = jax_gradops.linen.GroupNorm
    y, variables = Model(ours).init_with_output(jax.random.key(0), x_of())
    flax = linen.GroupNorm(num_groups=2).apply({"params": variables["params"]["norm"]}, x_of())
    assert_close(jax.nn.silu(jnp.asarray(flax)), y)
    for norm in (linen.remat(ours), linen.jit(ours)):
        assert_close(y, Model(norm).apply(variables, x_of()))


def test_abstract_and_lazy_modules() -> None:
    x = x_of()
    for name, (options, _) in NORMS.items():
        flax, ours = (getattr(modules, name)(**options) for modules in APIS["linen"])
        shapes = jax.eval_shape(flax.init, jax.random.key(0), x)
        assert jax.eval_shape(ours.init, jax.random.key(0), x) == shapes
        if name != "BatchNorm":  # its bridge would have to update the averages
            lazy = bridge.lazy_init(bridge.ToNNX(ours, rngs=nnx.Rngs(0)), x)
            assert_close(flax.init_with_output(jax.random.key(0), x)[0], lazy(x))

        def make(name: str = name, options: Any = options) -> Any:
            cls = getattr(jax_gradops.nnx, name)
            return cls(WIDTH, activation="relu", **options, rngs=nnx.Rngs(0))

        abstract, concrete = nnx.eval_shape(make), make()
        graph, state = nnx.split(concrete)
        assert nnx.graphdef(abstract) == graph and abstract.activation == "relu"
        assert_close(concrete(x), nnx.merge(graph, state)(x))
        for other in (copy.deepcopy(concrete), pickle.loads(pickle.dumps(concrete))):
            assert other.activation == "relu"


@pytest.mark.parametrize("name", NORMS)
def test_checkpoints_of_flax(name: str, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        for api in APIS:
            _, variables, flax = module_of(api, name, "relu", ours=False)
            _, _, ours = module_of(api, name, "relu", ours=True)
            plain = nnx.to_pure_dict(variables) if api == "nnx" else variables
            checkpointer.save(tmp_path / api, plain)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / api, plain)
            if api == "nnx":
                nnx.replace_by_pure_dict(variables, restored)
                restored = variables
            assert_close(flax(variables, x_of())[0], ours(restored, x_of())[0])


@pytest.mark.parametrize("api", APIS)
def test_sharded_parameters(api: str) -> None:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("model",))
    x = jax.device_put(x_of(), NamedSharding(mesh, PartitionSpec("model")))
    results = []
    for modules in APIS[api]:
        if api == "linen":
            init = linen.with_partitioning(linen.initializers.ones, ("model",))
            model = modules.GroupNorm(num_groups=2, scale_init=init, bias_init=init)
            variables = model.init(jax.random.key(0), x)
            spec = linen.get_partition_spec(variables)["params"]["scale"]
            assert spec == PartitionSpec("model")
            results.append(jax.jit(model.apply)(variables, x))
        else:
            with jax.set_mesh(mesh):
                metadata = {"out_sharding": ("model",), "mine": 3}
                norm = modules.GroupNorm(
                    WIDTH, num_groups=2, scale_metadata=metadata, rngs=nnx.Rngs(0)
                )
            assert norm.scale.get_metadata("mine") == 3
            results.append(nnx.jit(lambda norm, x: norm(x))(norm, x))
    assert_close(*results)


def test_wrong_groups_are_flaxs_errors() -> None:
    x = x_of()
    for options in ({"num_groups": 3}, {"num_groups": 0}, {"group_size": 4}, {"num_groups": None}):
        messages = []
        for modules in APIS["linen"]:
            with pytest.raises(ValueError, match="group") as linen_error:
                modules.GroupNorm(**options).init(jax.random.key(0), x)
            messages.append(str(linen_error.value))
        for modules in APIS["nnx"]:
            with pytest.raises(ValueError, match="group") as nnx_error:
                modules.GroupNorm(WIDTH, **options, rngs=nnx.Rngs(0))
            messages.append(str(nnx_error.value))
        assert messages[0] == messages[1] and messages[2] == messages[3]


# --- Pairs in a Sequential -----------------------------------------------------------------------


def convolutions(*activations: Any) -> nnx.Sequential:
    """A linear layer and a norm before each activation."""
    rngs = nnx.Rngs(0)
    norms = (
        functools.partial(nnx.GroupNorm, num_groups=2),
        functools.partial(nnx.BatchNorm, scale_init=some),
        nnx.InstanceNorm,
    )
    layers: list[Any] = []
    for norm, activation in zip(norms, activations, strict=False):
        layers += [nnx.Linear(WIDTH, WIDTH, rngs=rngs), norm(WIDTH, rngs=rngs), activation]
    return nnx.Sequential(*layers)


def trained(model: Any, x: jax.Array) -> Any:
    loss, found = nnx.jit(nnx.value_and_grad(loss_of))(model, x)
    return loss, nnx.to_pure_dict(found), nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize(
    "activations",
    [(nnx.silu, nnx.relu, nnx.swish), (jax.nn.relu, jax.nn.relu, jax.nn.relu)],
    ids=["silu", "relu"],
)
def test_pairs(activations: Any, platform: str) -> None:
    x, model = x_of(), convolutions(*activations)
    before = nnx.graphdef(model)
    names = {i: "relu" if model.layers[i] is nnx.relu else "silu" for i in (2, 5, 8)}
    expected = trained(convolutions(*activations), x)
    reports: list[Any] = []
    assert fuse(model, report=reports.append) is model
    assert reports[0].changed == {
        "layers[1]": "GroupNorm -> jax_gradops.nnx.GroupNorm",
        "layers[4]": "BatchNorm -> jax_gradops.nnx.BatchNorm",
        "layers[7]": "InstanceNorm -> jax_gradops.nnx.InstanceNorm",
        **{f"layers[{i}]": f"{n} -> computed by layers[{i - 1}]" for i, n in names.items()},
    }
    graph, state = nnx.split(model)
    text = jax.jit(lambda s, x: nnx.merge(graph, s)(x)).lower(state, x).as_text()
    assert "stablehlo.maximum" not in text and "stablehlo.logistic" not in text
    assert all(layer.activation is None for layer in model.layers[1::3])
    assert_close(expected, trained(model, x))
    unfuse(model)
    assert nnx.graphdef(model) == before


def test_pairs_at_evaluation() -> None:
    x, model = x_of(), convolutions(nnx.silu, nnx.relu, nnx.relu)
    view = functools.partial(nnx.view, use_running_average=True)
    expected = view(model)(x)
    assert_close(expected, view(fuse(model))(x))


def test_what_is_no_pair() -> None:
    rngs = nnx.Rngs(0)

    class Own(nnx.GroupNorm):
        """A user's subclass."""

    def silu(x: jax.Array) -> jax.Array:
        return jax.nn.silu(x)

    group = functools.partial(nnx.GroupNorm, WIDTH, num_groups=2, rngs=rngs)
    batch = functools.partial(nnx.BatchNorm, WIDTH, rngs=rngs)
    for layers in (
        (group(), silu),
        (group(), functools.partial(jax.nn.silu)),
        (group(), jax.nn.gelu),
        (group(), jnp.sin, jax.nn.silu),
        (group(), nnx.Sequential(jax.nn.silu)),
        (batch(), jax.nn.silu),
        (Own(WIDTH, num_groups=2, rngs=rngs), jax.nn.silu),
        (group(axis_name="devices"), jax.nn.silu),
        (nnx.LayerNorm(WIDTH, rngs=rngs), jax.nn.relu),
        (jax.nn.silu, group()),
    ):
        model = nnx.Sequential(*layers)
        assert type(fuse(model)) is nnx.Sequential


def test_a_norm_with_an_activation_takes_no_other() -> None:
    norm = jax_gradops.nnx.GroupNorm(WIDTH, num_groups=2, activation="relu", rngs=nnx.Rngs(0))
    model = jax_gradops.nnx.Sequential(norm, jax.nn.silu)
    assert_close(jax.nn.silu(norm(x_of())), model(x_of()))
    assert type(unfuse(model).layers[0]) is jax_gradops.nnx.GroupNorm
    assert_close(jax.nn.silu(norm(x_of())), model(x_of()))


def test_a_norm_of_two_models() -> None:
    """The norm itself has no activation: its other callers get the result of the norm alone."""
    norm = nnx.GroupNorm(WIDTH, num_groups=2, rngs=nnx.Rngs(0))
    expected = norm(x_of()), jax.nn.silu(norm(x_of()))
    model = fuse(nnx.Dict(norm=norm, pair=nnx.Sequential(norm, jax.nn.silu)))
    assert type(model["pair"]) is jax_gradops.nnx.Sequential
    assert_close(expected, (model["norm"](x_of()), model["pair"](x_of())))


def test_the_first_pair_gets_all_arguments() -> None:
    mask = np.random.default_rng(5).random((4, 6, WIDTH)) > 0.3
    norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=nnx.Rngs(0))
    model = nnx.Sequential(norm, jax.nn.relu)
    arguments: Any = ({}, {"mask": mask, "use_running_average": False})
    expected = [nnx.clone(model)(x_of(), **given) for given in arguments]
    fuse(model)
    assert_close(expected, [model(x_of(), **given) for given in arguments])
    assert_close(nnx.clone(unfuse(model))(x_of(), False), nnx.clone(fuse(model))(x_of(), False))


def test_gelu_is_asked_for() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        jax.nn.gelu,
        nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs),
        jax.nn.silu,
    )
    before = nnx.graphdef(model)

    def found() -> set[str]:
        graph, state = nnx.split(model)
        return kernels(lambda s, x: nnx.merge(graph, s)(x), state, x_of())

    fuse(model)
    assert found() == {"group_norm_fwd"}
    reports: list[Any] = []
    fuse(model, gelu=True, report=reports.append)
    assert reports[0].changed == {
        "layers[1]": "gelu -> jax_gradops.bias_gelu, with the bias of layers[0]"
    }
    assert found() == {"group_norm_fwd", "bias_gelu_fwd"}
    fuse(model, gelu=True, report=reports.append)
    assert not reports[1].changed
    assert nnx.graphdef(unfuse(model)) == before
    assert nnx.graphdef(unfuse(fuse(model))) == before
