"""`nnx.Linear`: Flax's results, and a separate sum for the bias's gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import WIDTH, assert_close, kernels, x_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

from jax_gradops import _linear_bias
from jax_gradops.nnx import DenseGelu, Linear, fuse, unfuse

pytestmark = pytest.mark.usefixtures("flax_settings")

BF16, F16, F32, F64 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64


def layer(kind: Any = Linear, outputs: int = 5, **options: Any) -> Any:
    some = nnx.initializers.normal(1.0)
    return kind(WIDTH, outputs, bias_init=some, rngs=nnx.Rngs(0), **options)


def loss_of(layer: Any, x: jax.Array) -> jax.Array:
    y = layer(x)
    return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, F32))))


def gradients(layer: Any, x: jax.Array) -> Any:
    found = nnx.jit(nnx.grad(loss_of, argnums=(0, 1)))(layer, x)
    return nnx.to_pure_dict(found[0]), found[1]


@pytest.mark.parametrize(
    "shape", [(4, 6, WIDTH), (3, WIDTH), (WIDTH,), (0, WIDTH), (2, 1, 3, WIDTH)]
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, {}) for dtype in (F16, BF16, F32, F64)),
        *((F32, {"dtype": dtype}) for dtype in (F16, BF16, F64)),
        (BF16, {"param_dtype": BF16}),
        (F32, {"dtype": BF16, "use_bias": False}),
        (F32, {"dtype": BF16, "preferred_element_type": F32}),
        (F32, {"preferred_element_type": BF16}),
        (jnp.int32, {}),
        (jnp.complex64, {"param_dtype": jnp.complex64}),
    ],
    ids=str,
)
def test_as_flax(dtype: Any, options: Any, shape: tuple[int, ...], platform: str) -> None:
    x = x_of(*shape).astype(dtype)
    flax, ours = layer(nnx.Linear, **options), layer(**options)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(flax), nnx.state(ours))
    results = [nnx.jit(lambda m, x: m(x))(m, x) for m in (flax, ours)]
    assert results[0].dtype == results[1].dtype
    np.testing.assert_array_equal(*results)
    if not jnp.issubdtype(dtype, jnp.floating):
        return
    found = [gradients(m, x) for m in (flax, ours)]
    assert jax.tree.map(lambda a: a.dtype, found[0]) == jax.tree.map(lambda a: a.dtype, found[1])
    narrow = [d for d in (dtype, *options.values()) if d in (F16, BF16)]
    assert_close(*found, narrow[0] if narrow else F32)


def bias_gradient(dy: jax.Array, dtype: Any = F32) -> jax.Array:
    y, bias = jnp.zeros_like(dy), jnp.zeros(dy.shape[-1], dtype)
    return jax.jit(lambda y, b, dy: jax.vjp(_linear_bias.plus_bias, y, b)[1](dy)[1])(y, bias, dy)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("parameter", [F16, BF16, F32, F64])
def test_the_sum_is_not_rounded_on_its_way(dtype: Any, parameter: Any, platform: str) -> None:
    """2^14 rows that nearly cancel. For narrow cotangents, sums are float32 and rounded once."""
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((64, 256, 3)), dtype)
    exact = np.asarray(dy, np.float64)
    total, terms = exact.sum((0, 1)), np.abs(exact).sum((0, 1))
    found = bias_gradient(dy, parameter)
    assert found.dtype == parameter
    wide = 16 * float(jnp.finfo(F64 if dtype == F64 else F32).eps) * terms
    allowed = wide + float(jnp.finfo(parameter).eps) * np.abs(total)
    assert np.all(np.abs(np.asarray(found, np.float64) - total) <= allowed)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (3, 4, 5), (2, 0, 5)])
def test_products_with_ones(dtype: Any, shape: tuple[int, ...], platform: str) -> None:
    """The GPU's method, on any platform. Sums of small integers are exact in any order."""
    dy = jnp.asarray(np.random.default_rng(2).integers(-9, 10, shape), dtype)
    found = jax.jit(_linear_bias.column_sums_by_product)(dy)
    assert found.dtype == F32
    np.testing.assert_array_equal(found, np.asarray(dy, F64).reshape(-1, 5).sum(0))


@pytest.mark.parametrize("precision", ["BF16_BF16_F32", "F16_F16_F16", "highest"])
def test_products_with_ones_are_exact(precision: str, platform: str) -> None:
    """For any precision that a user sets. bfloat16 cannot hold 1001, float16 cannot hold 4005."""
    with jax.default_matmul_precision(precision):
        found = jax.jit(_linear_bias.column_sums_by_product)(
            jnp.full((4, 3), 1001, F16).at[0, 0].add(1)
        )
    np.testing.assert_array_equal(found, [4005, 4004, 4004])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite(value: float, platform: str) -> None:
    """NaN or infinity changes only its own column."""
    dy = jnp.ones((40, 3), BF16).at[7, 1].set(value)
    np.testing.assert_array_equal(bias_gradient(dy), [40, value, 40])


@pytest.mark.newest_jax
def test_the_gradient_exists_once() -> None:
    """A barrier keeps one copy of the gradient for the products and the sum.

    Forward, there is no barrier, so that XLA can fuse.
    """
    ours, x = layer(dtype=BF16), x_of()
    forward = nnx.jit(lambda m, x: m(x)).lower(ours, x).as_text()
    backward = nnx.jit(nnx.grad(loss_of)).lower(ours, x).as_text()
    assert "optimization_barrier" not in forward
    assert backward.count("optimization_barrier") == 1


# --- Transformations -----------------------------------------------------------------------------


def arguments(dtype: Any = F32) -> tuple[jax.Array, jax.Array, jax.Array]:
    y = jnp.asarray(np.random.default_rng(3).standard_normal((8, 4, 6)), dtype)
    return y, jnp.linspace(-1, 1, 6, dtype=F32), jnp.cos(y.astype(F32)).astype(dtype)


def pull(y: jax.Array, bias: jax.Array, dy: jax.Array) -> Any:
    out, vjp = jax.vjp(lambda y, b: _linear_bias.linear_bias(y, b.astype(y.dtype), b), y, bias)
    return out, *vjp(dy)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, 0), (1, 0, 1), (None, 0, 0)])
def test_vmap(dtype: Any, axes: Any, platform: str) -> None:
    y, bias, dy = arguments(dtype)
    mapped = [0 if axes[0] is None else axes[0], 0, 0 if axes[2] is None else axes[2]]
    size = dy.shape[mapped[2]]
    given = [
        y[0] if axes[0] is None else y,
        bias if axes[1] is None else jnp.stack([bias * (i + 1) for i in range(size)]),
        dy,
    ]
    found = jax.jit(jax.vmap(pull, axes))(*given)
    each = [
        pull(
            *(
                a if axis is None else jnp.take(a, i, axis)
                for a, axis in zip(given, axes, strict=True)
            )
        )
        for i in range(size)
    ]
    assert_close(jax.tree.map(lambda *a: jnp.stack(a), *each), found, dtype)


@pytest.mark.newest_jax
def test_derivatives_of_derivatives(platform: str) -> None:
    y, bias, dy = arguments()

    def second(f: Any) -> Any:
        first = jax.grad(lambda y, b: jnp.sum(jnp.sin(jnp.sin(f(y, b)) * dy)), (0, 1))
        return jax.grad(lambda y, b: sum(jnp.sum(jnp.cos(a)) for a in first(y, b)), (0, 1))

    plain, ours = second(lambda y, b: y + b.reshape(1, 1, -1)), second(_linear_bias.plus_bias)
    assert_close(jax.jit(plain)(y, bias), jax.jit(ours)(y, bias))


@pytest.mark.newest_jax
def test_forward_mode() -> None:
    x = x_of()
    tangents = [jax.jvp(m, (x,), (x,))[1] for m in (layer(), layer(nnx.Linear))]
    np.testing.assert_array_equal(*tangents)


@pytest.mark.newest_jax
@pytest.mark.parametrize(
    "spec", [P("data"), P("data", "model"), P("model", "data"), P(None, None, "model")]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_meshes(dtype: Any, kind: Any, spec: P, platform: str) -> None:
    """The result equals the unsharded one, and nothing is gathered."""
    devices = mesh(platform, kind)
    if any(n is not None and a % devices.shape[n] for a, n in zip((8, 4, 6), spec, strict=False)):
        pytest.skip("the axes are no multiples of the mesh's")
    y, bias, dy = arguments(dtype)
    features = P(*spec[2:])
    with jax.set_mesh(devices):
        given = [
            jax.device_put(a, NamedSharding(devices, s))
            for a, s in ((y, spec), (bias, features), (dy, spec))
        ]
        compiled = jax.jit(pull).lower(*given).compile()
        found = compiled(*given)
    assert_close(pull(y, bias, dy), jax.tree.map(np.asarray, found), dtype)
    assert collectives(compiled.as_text()).keys() <= {"all-reduce"}


@pytest.mark.newest_jax
@pytest.mark.parametrize("with_bias", [P(), P("data"), P("model")], ids=str)
@pytest.mark.parametrize("with_kernel", [P(), P("data"), P(None, "model"), P("model")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_explicit_meshes_as_flax(dtype: Any, with_kernel: P, with_bias: P, platform: str) -> None:
    """Kernel and bias are sharded differently from x. We accept what Flax accepts."""
    devices = mesh(platform, AxisType.Explicit)

    def run(kind: Any, out: Any) -> Any:
        graph, state = nnx.split(layer(kind, 8, dtype=dtype))
        specs = {"kernel": with_kernel, "bias": with_bias}
        given = {
            name: jax.device_put(np.asarray(a), NamedSharding(devices, specs[name]))
            for name, a in nnx.to_pure_dict(state).items()
        }
        x = jax.device_put(x_of(8, WIDTH), NamedSharding(devices, P("data")))

        def loss(given: Any, x: jax.Array) -> jax.Array:
            nnx.replace_by_pure_dict(state, given)
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, out).astype(F32)))

        found = jax.jit(jax.grad(loss, (0, 1)))(given, x)
        return found, jax.tree.map(lambda a: a.sharding, found)

    compared = 0
    with jax.set_mesh(devices):
        for out in (None, P("data", "model")):
            try:
                expected, shardings = run(nnx.Linear, out)
            except Exception as error:
                assert "shard" in str(error)
                continue
            found, ours = run(Linear, out)
            assert_close(expected, found, dtype)
            assert ours == shardings
            compared += 1
    if not compared:
        pytest.skip("Flax refuses these shardings")


@pytest.mark.newest_jax
@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check: bool, platform: str) -> None:
    """The gradient of a narrow parameter is rounded after the sum over shards."""
    devices = mesh(platform, AxisType.Auto)
    spread = {"mesh": devices, "in_specs": (P("data"), P(), P("data")), "check_vma": check}

    def gradient(y: jax.Array, bias: jax.Array, dy: jax.Array) -> jax.Array:
        return pull(y, bias, dy)[2] if check else lax.psum(pull(y, bias, dy)[2], "data")

    dy = jnp.asarray(np.random.default_rng(4).standard_normal((512, 64)), BF16)
    y, bias = jnp.zeros_like(dy), jnp.zeros(64, BF16)
    found = jax.jit(jax.shard_map(gradient, out_specs=P(), **spread))(y, bias, dy)
    exact = np.asarray(dy, F64).sum(0)
    if check:
        np.testing.assert_array_equal(found, exact.astype(BF16))
    else:
        np.testing.assert_allclose(np.asarray(found, F64), exact, atol=1)
    if not check:
        return
    for dtype in (BF16, F32):
        y, bias, dy = arguments(dtype)
        mapped = jax.shard_map(
            pull,
            mesh=devices,
            in_specs=(P("data"), P(), P("data")),
            out_specs=(P("data"), P("data"), P()),
        )
        assert_close(pull(y, bias, dy), jax.jit(mapped)(y, bias, dy), dtype)


# --- fuse ----------------------------------------------------------------------------------------


class Doubled(nnx.Linear):
    """A subclass with its own call, as a user may write it."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        return 2 * super().__call__(inputs, out_sharding)


@pytest.mark.newest_jax
def test_fuse() -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        plain=layer(nnx.Linear),
        own=layer(Doubled),
        gelu=layer(DenseGelu),
        pair=nnx.Sequential(layer(nnx.Linear, WIDTH), jax.nn.gelu, layer(nnx.Linear)),
        norm=nnx.LayerNorm(WIDTH, rngs=rngs),
        general=nnx.LinearGeneral(WIDTH, 5, rngs=rngs),
    )
    before, x = nnx.graphdef(model), x_of()
    names = ("plain", "own", "gelu", "pair")
    expected = [model[name](x) for name in names]
    reports: list[Any] = []
    fuse(model, report=reports.append)
    assert type(model["plain"]) is nnx.Linear
    fuse(model, gelu=True, linear=True, report=reports.append)
    fuse(model, gelu=True, linear=True, report=reports.append)
    assert [r.changed for r in reports] == [
        {"norm": "LayerNorm -> jax_gradops.nnx.LayerNorm"},
        {
            "pair.layers[0]": "Linear -> jax_gradops.nnx.Linear",
            "pair.layers[1]": "gelu -> jax_gradops.bias_gelu, with the bias of layers[0]",
            "pair.layers[2]": "Linear -> jax_gradops.nnx.Linear",
            "plain": "Linear -> jax_gradops.nnx.Linear",
        },
        {},
    ]
    assert [r.left for r in reports] == [
        {"pair.layers[1]": "a GELU: gelu=True is not given"},
        *[
            {
                "own": "Doubled is a subclass of Linear, maybe with code of its own",
                "general": "no class for LinearGeneral",
            }
        ]
        * 2,
    ]
    assert kernels(model["pair"], x) == {"bias_gelu_fwd"}
    assert_close(expected, [model[name](x) for name in names])
    assert nnx.graphdef(unfuse(model)) == before


def test_tables() -> None:
    """The paths of modules are Flax's, except for a Linear that is computed with its GELU."""

    def paths(model: Any) -> list[str]:
        lines = nnx.tabulate(model, x_of()).splitlines()
        cells = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
        return [cell for cell in cells if cell]

    def model() -> Any:
        return nnx.Sequential(layer(nnx.Linear, WIDTH), jax.nn.gelu, layer(nnx.Linear))

    expected = paths(model())
    assert "layers/0" in expected and "layers/2" in expected
    assert paths(fuse(model(), linear=True)) == expected
    assert paths(fuse(model(), gelu=True, linear=True)) == [p for p in expected if p != "layers/0"]
