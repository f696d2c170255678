"""Our Flax modules beyond plain calls: interceptors and other tools, unusual arguments."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx
from flax_models import WIDTH, assert_close, x_of

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx
from jax_gradops.nnx import fuse, unfuse

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("flax_settings")]


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 5, rngs=rngs), jax.nn.gelu
    )


# --- What watches calls --------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False])
def test_interceptors_see_a_call_once(running: bool) -> None:
    def twice(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        return 2 * y if context.method_name == "__call__" else y

    results = []
    for modules in (linen, jax_gradops.linen):
        model = modules.BatchNorm(use_running_average=running)
        variables = model.init(jax.random.key(0), x_of())
        with linen.intercept_methods(twice):
            results.append(model.apply(variables, x_of(), mutable=["batch_stats"])[0])
        _, state = model.apply(
            variables, x_of(), mutable=["batch_stats", "intermediates"], capture_intermediates=True
        )
        assert len(state["intermediates"]["__call__"]) == 1
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


def test_tables_and_captures() -> None:
    model = fuse(mlp(nnx.Rngs(0)), gelu=True)
    table = nnx.tabulate(model, x_of())
    assert "LayerNorm" in table and "Sequential" in table
    assert "LayerNorm" in linen.tabulate(jax_gradops.linen.LayerNorm(), jax.random.key(0))(x_of())
    expected = unfuse(copy.deepcopy(model))(x_of())
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nnx.clone(model)):
        np.testing.assert_allclose(other(x_of()), expected, rtol=1e-5, atol=1e-5)
    mixed = nnx.Sequential(
        *(
            m.BatchNorm(WIDTH, use_running_average=True, rngs=nnx.Rngs(0))
            for m in (nnx, jax_gradops.nnx)
        )
    )
    assert nnx.tabulate(mixed, x_of()).count("BatchNorm") == 2


def test_sequential_is_called_as_flax_calls_it() -> None:
    rngs = nnx.Rngs(0)

    def two(x: jax.Array) -> Any:
        return x, None

    def options(x: jax.Array, **given: Any) -> jax.Array:
        assert given == {}
        return x

    for layers in ((two, nnx.Linear(WIDTH, 5, rngs=rngs), jax.nn.gelu), (options,), ()):
        flax, ours = nnx.Sequential(*layers), jax_gradops.nnx.Sequential(*layers)
        arguments = (x_of(),) if layers else ()
        expected, got = flax(*arguments), ours(*arguments)
        assert (expected is None) == (got is None)
        if expected is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    linear = nnx.Sequential(nnx.Linear(WIDTH, 5, rngs=rngs), jax.nn.gelu)
    expected = linear(x_of(), None)
    np.testing.assert_allclose(
        fuse(linear, gelu=True)(x_of(), None), expected, rtol=1e-5, atol=1e-5
    )


# --- Arguments -----------------------------------------------------------------------------------


def both(name: str, x: Any, **options: Any) -> list[Any]:
    """Flax's result and ours, in linen and in NNX."""
    results = []
    for modules in (linen, jax_gradops.linen):
        model = getattr(modules, name)(**options)
        results.append(model.init_with_output(jax.random.key(0), x)[0])
    features = np.prod(
        [np.shape(x)[a] for a in {a % np.ndim(x) for a in options.get("feature_axes", [-1])}]
    )
    for modules in (nnx, jax_gradops.nnx):
        results.append(getattr(modules, name)(int(features), **options, rngs=nnx.Rngs(0))(x))
    return results


_NORMS = ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm")


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_options_that_are_odd(name: str) -> None:
    same = {"reduction_axes": (-1, 2), "feature_axes": (-1, 2)}  # the last axis, twice
    for options in (
        same,
        {"epsilon": -1e-9},
        {"epsilon": np.float32(0.1)},
        {"epsilon": jnp.ones(())},
    ):
        flax, ours, flax_nnx, ours_nnx = both(name, x_of(), **options)
        np.testing.assert_allclose(ours, flax, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ours_nnx, flax_nnx, rtol=1e-4, atol=1e-4)
    with jax.enable_x64(False):
        for y in both(name, x_of(), dtype=float):
            assert y.dtype == jnp.float32


@pytest.mark.parametrize(
    "options",
    [{"scale_init": lambda _, shape, __: jnp.full(shape, 2)}, {"epsilon": 0}],
    ids=["integers", "no epsilon"],
)
@pytest.mark.parametrize("name", _NORMS)
def test_integer_scales_and_no_epsilon(name: str, options: dict[str, Any]) -> None:
    """Without epsilon, a variance of 0 gives NaN."""
    more: dict[str, Any] = {
        "BatchNorm": {"use_running_average": False},
        "GroupNorm": {"num_groups": 2},
    }.get(name, {})
    x = x_of().at[0, :, :].set(0).at[:, :, 0].set(0)
    flax, ours, flax_nnx, ours_nnx = both(name, x, **more, **options)
    np.testing.assert_allclose(ours, flax, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours_nnx, flax_nnx, rtol=1e-4, atol=1e-4)
    assert bool(np.isnan(ours).any()) == ("epsilon" in options)


def test_lists_in_nnx() -> None:
    rows = [[1.0, 2.0, 4.0], [0.0, 1.0, 5.0]]
    for name in ("LayerNorm", "RMSNorm"):
        flax, ours = (getattr(m, name)(3, rngs=nnx.Rngs(0))(rows) for m in (nnx, jax_gradops.nnx))
        np.testing.assert_allclose(ours, flax, rtol=1e-5, atol=1e-5)


class Doubled(jax_gradops.nnx.LayerNorm):
    """A subclass with its own call, as a user may write it."""

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        return 2 * super().__call__(x.astype(jnp.float32), mask=mask)


class DoubledLinen(jax_gradops.linen.LayerNorm):
    @linen.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        return 2 * super().__call__(x.astype(jnp.float32), mask=mask)


def test_add_norm_of_others() -> None:
    x, residual = x_of(), x_of() + 1
    norm = Doubled(WIDTH, rngs=nnx.Rngs(0))
    y, total = jax_gradops.nnx.add_norm(norm, x, residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, norm(x + residual))
    for other in (x[..., :1], x_of(WIDTH), jnp.float32(2), residual.astype(jnp.bfloat16)):
        y, total = jax_gradops.nnx.add_norm(
            jax_gradops.nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), x, other
        )
        expected = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))(x + other)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        assert total.dtype == (x + other).dtype

    class Model(linen.Module):
        norm: Any

        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            return jax_gradops.linen.add_norm(self.norm(), x, residual)

    ours = jax_gradops.linen.LayerNorm
    for norm in (DoubledLinen, ours, linen.remat(ours), linen.jit(ours)):
        (y, total), variables = Model(norm).init_with_output(jax.random.key(0), x)
        factor = 2 if norm is DoubledLinen else 1
        expected = factor * np.asarray(
            linen.LayerNorm().init_with_output(jax.random.key(0), x + residual)[0]
        )
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(total, x + residual)
        text = jax.jit(Model(norm).apply).lower(variables, x).as_text()
        assert ("stablehlo.add" in text) == (norm is DoubledLinen)


@pytest.mark.parametrize("batch", [3, WIDTH])
def test_a_transformed_norm_of_a_sum_with_a_bias(batch: int) -> None:
    """A bias has no axis for `vmap` to map, for any length of the other arrays' axes."""
    x, residual, bias = x_of(batch, 2, WIDTH), x_of(batch, 2, WIDTH)[::-1], x_of(WIDTH)

    class Model(linen.Module):
        norm: Any

        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            return jax_gradops.linen.add_norm(self.norm(), x, residual, bias)

    ours = jax_gradops.linen.LayerNorm
    total = x + (residual + bias)
    expected = linen.LayerNorm().init_with_output(jax.random.key(0), total)[0]
    mapped = linen.vmap(ours, variable_axes={"params": None}, split_rngs={"params": False})
    for norm in (ours, mapped, linen.remat(ours), linen.jit(ours)):
        (y, s), _ = Model(norm).init_with_output(jax.random.key(0), x)
        np.testing.assert_allclose(s, total, rtol=1e-6)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


class MlpBlock(linen.Module):
    """big_vision's: two layers without names. The first is Flax's Dense with a GELU, or `up`."""

    up: Any = None
    names: tuple[str | None, str | None] = (None, None)

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.names
        if self.up is None:
            hidden = jax.nn.gelu(linen.Dense(5, name=first)(x))
        else:
            hidden = self.up(5, name=first)(x)
        return linen.Dense(3, name=second)(hidden)


@pytest.mark.parametrize("names", [(None, None), ("Dense_0", "Dense_1"), ("up", None)], ids=str)
def test_a_dense_checkpoint_loads(names: Any) -> None:
    y, variables = MlpBlock(None, names).init_with_output(jax.random.key(0), x_of())
    ours = MlpBlock(jax_gradops.linen.DenseGelu, names)
    np.testing.assert_allclose(ours.apply(variables, x_of()), y, rtol=1e-5, atol=1e-5)
    assert_close(variables, ours.init(jax.random.key(0), x_of()))


@pytest.mark.parametrize("up", [None, jax_gradops.linen.DenseGelu])
def test_flax_does_not_count_layers_with_names(up: Any) -> None:
    """The next layer without a name is Dense_0 again, with Flax's Dense as well."""
    with pytest.raises(errors.NameInUseError, match="Dense_0"):
        MlpBlock(up, ("Dense_0", None)).init(jax.random.key(0), x_of())


@pytest.mark.parametrize("transformation", [linen.remat, linen.jit])
def test_names_of_transformed_layers(transformation: Any) -> None:
    class Two(linen.Module):
        layer: Any

        @linen.compact
        def __call__(self, x: jax.Array) -> list[Any]:
            return [self.layer(5)(x), transformation(self.layer)(5)(x), self.layer(5)(x)]

    layers = linen.Dense, jax_gradops.linen.DenseGelu, jax_gradops.linen.DeferredBiasDense
    flax, *ours = (Two(layer).init(jax.random.key(0), x_of()) for layer in layers)
    for variables in ours:
        assert_close(flax, variables)


def test_dense_layers_have_names_of_their_own() -> None:
    """Only automatic names take them for a Dense."""
    for name in ("DenseGelu", "DeferredBiasDense"):
        layer = getattr(jax_gradops.linen, name)
        assert pickle.loads(pickle.dumps(layer)) is layer and name in repr(layer)


def norm_of_a_sum(api: Any) -> tuple[Any, Any, Any]:
    """A function of x and residual that calls `add_norm`, and both arrays."""
    x = x_of()
    residual = jnp.full_like(x, 1 / 3)
    if api is jax_gradops.nnx:
        norm: Any = api.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
        return lambda x, residual: api.add_norm(norm, x, residual), x, residual

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, residual: Any) -> Any:
            return api.add_norm(api.LayerNorm(), x, residual)

    variables = Block().init(jax.random.key(0), x, residual)
    return functools.partial(Block().apply, variables), x, residual


@pytest.mark.parametrize("transformed", [False, True])
def test_interceptors_see_arrays_of_a_sum(transformed: bool) -> None:
    norm_class = linen.remat(jax_gradops.linen.LayerNorm) if transformed else None

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, residual: Any) -> Any:
            norm = (norm_class or jax_gradops.linen.LayerNorm)(name="norm")
            return jax_gradops.linen.add_norm(norm, x, residual)

    seen: list[Any] = []

    def double(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, linen.LayerNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)  # Flax's transformations call their own functions
        seen.extend(args)
        assert args[0].dtype == jnp.float32 and args[0].shape == x.shape
        return 2 * call(*args, **kwargs)

    x, residual = x_of(), jnp.full_like(x_of(), 1 / 3)
    variables = Block().init(jax.random.key(0), x, residual)
    y, total = Block().apply(variables, x, residual)
    with linen.intercept_methods(double):
        twice, same = Block().apply(variables, x, residual)
    assert seen and all(isinstance(array, jax.Array) for array in seen)
    np.testing.assert_allclose(twice, 2 * y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(same, total)


def test_a_cast_of_a_norms_argument_leaves_the_sum() -> None:
    def cast(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, linen.LayerNorm):
            args = jax.tree.map(lambda a: a.astype(jnp.bfloat16), args)
        return call(*args, **kwargs)

    function, x, residual = norm_of_a_sum(jax_gradops.linen)
    expected, total = function(x, residual)
    with linen.intercept_methods(cast):
        y, same = function(x, residual)
    assert same.dtype == jnp.float32
    np.testing.assert_array_equal(same, total)
    np.testing.assert_allclose(y, expected, atol=0.1)


@pytest.mark.parametrize("inner", [jax.jit, jax.checkpoint])
def test_a_norm_that_an_interceptor_traces_alone(inner: Any) -> None:
    """The sum is made outside the inner function. No tracer of this function may leak."""

    def alone(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, linen.LayerNorm):
            return call(*args, **kwargs)
        return inner(lambda: call(*args, **kwargs))()

    function, x, residual = norm_of_a_sum(jax_gradops.linen)
    expected = function(x, residual)
    with linen.intercept_methods(alone):
        results = function(x, residual), jax.jit(function)(x, residual)
    for result in results:
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("api", [jax_gradops.linen, jax_gradops.nnx], ids=["linen", "nnx"])
def test_a_sum_is_added_by_the_norms_kernel(api: Any) -> None:
    function, x, residual = norm_of_a_sum(api)
    text = jax.jit(function).lower(x, residual).compile().as_text()
    assert text is not None
    assert "row_norm_fwd" in text and " add(" not in text


def test_captured_results_of_a_sum_are_arrays() -> None:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return jax_gradops.linen.add_norm(jax_gradops.linen.LayerNorm(name="norm"), x, x)

    variables = Block().init(jax.random.key(0), x_of())
    (y, _), state = Block().apply(variables, x_of(), capture_intermediates=True)
    (captured,) = state["intermediates"]["norm"]["__call__"]
    np.testing.assert_array_equal(captured, y)


# --- Flax's names given to our classes -----------------------------------------------------------


def test_fuse_after_flax_has_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mlp(nnx.Rngs(0))
    linear, norm = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.LayerNorm
    weight_norm = nnx.WeightNorm(linear, rngs=nnx.Rngs(0))
    expected = before(x_of())
    for name in (*_NORMS, "Linear", "Sequential"):
        monkeypatch.setattr(nnx, name, getattr(jax_gradops.nnx, name))
    for name in _NORMS:
        monkeypatch.setattr(linen, name, getattr(jax_gradops.linen, name))
    monkeypatch.setattr(jax.nn, "gelu", jax_gradops.gelu)
    monkeypatch.setattr(nnx, "WeightNorm", None)
    after = mlp(nnx.Rngs(0))
    reports: list[Any] = []
    for model in (before, after):
        fuse(model, gelu=True, linear=True, report=reports.append)
        assert type(model) is jax_gradops.nnx.Sequential
        assert type(model.layers[0]) is jax_gradops.nnx.LayerNorm
        np.testing.assert_allclose(model(x_of()), expected, rtol=1e-5, atol=1e-5)
    fuse(nnx.Sequential(weight_norm), report=reports.append)
    assert reports[-1].left == {"layers[0]": "no kernel for WeightNorm"}
    assert type(unfuse(before).layers[0]) is norm


def test_what_has_the_name_of_gelu_is_no_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.nn, "gelu", lambda x: x)
    model = nnx.Sequential(nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0)), jax.nn.gelu)
    expected = model(x_of())
    np.testing.assert_allclose(fuse(model, gelu=True)(x_of()), expected, rtol=1e-5)
