"""Compares Flax's modules with ours: constructors, variables, results, gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import APIS, CASES, Case, results

#: Our modules, and by method the arguments that Flax's modules do not have.
MODULES: dict[str, dict[str, set[str]]] = {
    "LayerNorm": {},
    "RMSNorm": {},
    "BatchNorm": {"__init__": {"activation"}, "__call__": {"residual"}},
    "GroupNorm": {"__init__": {"activation"}},
    "InstanceNorm": {"__init__": {"activation"}},
    "Embed": {},
}

pytestmark = pytest.mark.usefixtures("flax_settings")


def assert_same(expected: Any, actual: Any, dtypes: tuple[Any, ...] = ()) -> None:
    """Equal trees, up to some roundings in the narrowest of `dtypes` and the array's own dtype."""
    one, two = jax.tree.structure(expected), jax.tree.structure(actual)
    assert one == two, f"{two}, expected {one}"
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        what = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {b.shape} {b.dtype}"
        allowed = max(map(rounding, (a.dtype, *dtypes)))
        a, b = (np.asarray(v, np.complex128 if jnp.iscomplexobj(v) else np.float64) for v in (a, b))
        np.testing.assert_allclose(
            b, a, rtol=0, atol=allowed * np.max(np.abs(a), initial=1), err_msg=what
        )


def rounding(dtype: Any) -> float:
    """The allowed error as a fraction of the largest value.

    Flax's E[x²] - E[x]² loses some digits of float32.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    return float(jnp.finfo(dtype).eps) * (4 if jnp.dtype(dtype).itemsize == 2 else 64)


def cases() -> Iterator[Any]:
    for api in APIS:
        for case in CASES:
            if case.only in (None, api):
                yield pytest.param(api, case, id=f"{api}-{case}")


@pytest.mark.parametrize(("api", "case"), list(cases()))
# Flax updates float64 running averages if parameters are float32. JAX warns of this.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_as_flax(api: str, case: Case, platform: str) -> None:
    (flax, _), (ours, program) = (results(api, modules, case) for modules in APIS[api])
    jax.tree.map(np.testing.assert_array_equal, flax["initial"], ours.pop("initial"))
    initial = flax.pop("initial")
    # NNX rounds x to `dtype` first. On GPUs, XLA omits this rounding, but not before our kernel.
    rounded = case.options.get("dtype") if (api, platform) == ("nnx", "cuda") else None
    assert_same(flax.pop("after"), ours.pop("after"), () if rounded is None else (rounded,))
    # If an output is rounded, its cotangent differs by the rounding error, and so do all gradients.
    dtypes = {jnp.dtype(case.dtype), *(v.dtype for v in jax.tree.leaves((initial, flax)))}
    assert_same(flax, ours, tuple(dtypes))
    assert ("jax_gradops" in program) == case.kernel


@pytest.mark.newest_jax
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", MODULES)
def test_signatures(api: str, name: str) -> None:
    flax, ours = (getattr(modules, name) for modules in APIS[api])
    assert issubclass(ours, flax)
    for method in ("__init__", "__call__"):
        expected, found = (
            [
                (p.name, p.kind, p.default)
                for p in inspect.signature(getattr(c, method)).parameters.values()
            ]
            for c in (flax, ours)
        )
        own = MODULES[name].get(method, set())
        assert expected == [p for p in found if p[0] not in own], method
        only = inspect.Parameter.KEYWORD_ONLY
        assert sorted(p for p in found if p[0] in own) == sorted((n, only, None) for n in own)


def _rounded(*args: Any, **options: Any) -> Any:
    """A promotion of one's own: linen passes the table, NNX a tuple."""
    del options
    return tuple(a.astype(jnp.bfloat16) for a in jax.tree.leaves(args))


EMBEDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 table": {"param_dtype": jnp.bfloat16},
    "float32 of a bfloat16 table": {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
    "float64": {"param_dtype": jnp.float64},
    "own promotion": {"promote_dtype": _rounded},
    "one row": {"num_embeddings": 1, "dtype": jnp.bfloat16},
    "complex": {"param_dtype": jnp.complex64},
    "complex result": {"dtype": jnp.complex64},
}


def _embed(api: str, modules: Any, options: Any, indices: Any) -> tuple[Any, Any]:
    """The table of an Embed, and a function of it: rows of the table, and those of `attend`."""
    query = jnp.ones((2, 3), jnp.bfloat16)
    if api == "linen":
        layer = modules.Embed(**options)
        return layer.init(jax.random.key(0), indices), lambda t: (
            layer.apply(t, indices),
            layer.apply(t, query, method="attend"),
        )
    graph, table = nnx.split(modules.Embed(**options, rngs=nnx.Rngs(0)))
    layer = functools.partial(nnx.merge, graph)
    return table, lambda t: (layer(t)(indices), layer(t).attend(query))


@pytest.mark.newest_jax
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("options", EMBEDS.values(), ids=EMBEDS)
@pytest.mark.parametrize("integers", ["int32", "uint8"])
def test_embed_as_flax(api: str, options: dict[str, Any], integers: str) -> None:
    """Tables and results have the bits of Flax's. The gradient is that of a float64 sum."""
    options = {"num_embeddings": 7, "features": 3} | options
    indices = np.array([[0, 3, 3, 6], [-2, 7, 3, 1]]).astype(integers)
    found = [_embed(api, modules, options, indices) for modules in APIS[api]]
    for a, b in zip(*(jax.tree.leaves((t, call(t))) for t, call in found), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(b, complex), np.asarray(a, complex))
    table, call = found[1]
    y, pull = jax.vjp(lambda t: call(t)[0], table)
    if y.dtype.kind == "c" or options["num_embeddings"] == 1:
        return
    # Sums of three need more digits than bfloat16 has.
    expected = np.zeros((7, 3))
    rows = [0, 3, 3, 6, 3, 1, *([5] if integers == "int32" else [])]
    np.add.at(expected, rows, 1 + 2**-7)
    (gradient,) = jax.tree.leaves(jax.jit(pull)(jnp.full_like(y, 1 + 2**-7)))
    rounded = jnp.asarray(expected, y.dtype if "promote_dtype" in options else gradient.dtype)
    np.testing.assert_array_equal(gradient, rounded.astype(gradient.dtype))


@pytest.mark.newest_jax
@pytest.mark.parametrize("sharded", [(None, None), ("d", None), (None, "d")])
def test_embed_with_out_sharding(sharded: Any) -> None:
    """As in Flax, on a mesh with explicit axes. The gradient has the table's sharding."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    indices, spec = jnp.arange(4).reshape(2, 2), jax.P("d", None, None)
    found: list[Any] = []
    with jax.set_mesh(mesh):
        for modules in APIS["nnx"]:
            layer = modules.Embed(7, 3, rngs=nnx.Rngs(0))
            layer.embedding.set_value(jax.device_put(layer.embedding[...], jax.P(*sharded)))
            y = jax.jit(lambda x, m=layer: m(x, out_sharding=spec))(indices)
            assert jax.typeof(y).sharding.spec == spec
            loss = lambda m: m(indices, out_sharding=spec).sum()  # noqa: E731
            (gradient,) = jax.tree.leaves(nnx.grad(loss)(layer))
            assert jax.typeof(gradient) == jax.typeof(layer.embedding[...])
            found.append((y, gradient))
    jax.tree.map(np.testing.assert_array_equal, *found)
