"""`jax_gradops.fuse` under JAX's transformations, and with all kinds of arguments and results."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_fuse_fuzz import assert_same

import jax_gradops
from jax_gradops import fuse
from jax_gradops._fuse import report

pytestmark = pytest.mark.newest_jax
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4, 16)))
SCALE, BIAS = jnp.linspace(0.5, 1.5, 16), jnp.linspace(-1, 1, 16)


def layer_norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * full(SCALE, x) + full(BIAS, x)


def full(vector: Any, x: Any) -> Any:
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def block(x: Any) -> Any:
    return x + jax.nn.gelu(layer_norm(x) + full(SCALE, x))


def with_statistics(x: Any) -> Any:
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    y = (x - full(mean, x)) / jnp.sqrt(full(variance, x) + 1e-5)
    return y * full(SCALE, x), mean, variance


def replaced(function: Any, *args: Any) -> list[str]:
    found: list[Any] = []
    jax.eval_shape(fuse(function, report=found.append), *args)
    return [each.op for each in found[0].replaced]


def loss_of(function: Any) -> Any:
    def loss(x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(3 * y)) for y in jax.tree.leaves(function(x)))

    return loss


def scan(x: Any) -> Any:
    return jax.lax.scan(lambda c, w: (block(c + w), c.sum()), x, jnp.stack([x, 2 * x]))


def while_loop(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, block(c[1])), (0, x))[1]


def cond(x: Any) -> Any:
    return jax.lax.cond(x[(0,) * x.ndim] > 0, block, lambda x: jax.nn.gelu(x), x)


def remat(x: Any) -> Any:
    def inner(x: Any) -> Any:
        return jax.ad_checkpoint.checkpoint_name(block(x), "a") @ jnp.ones((16, 16))

    policy = jax.checkpoint_policies.save_only_these_names("a")
    return jax.checkpoint(inner, policy=policy)(x)


def inner_jit_many_times(x: Any) -> Any:
    inner = jax.jit(block)
    return inner(inner(inner(x) * 2))


def psum_over_rows(x: Any) -> Any:
    return jax.vmap(lambda row: block(row) - jax.lax.psum(row, "rows"), axis_name="rows")(x)


FUNCTIONS = [block, with_statistics, scan, cond, remat, inner_jit_many_times, psum_over_rows]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_derivatives(function):
    """First and second derivatives are those of the code, also under vmap."""
    assert replaced(function, X)

    def all_of(function: Any, x: Any) -> Any:
        gradient = jax.grad(loss_of(function))
        mapped = jax.vmap(function, 1, 0)
        x5 = jnp.stack([x, 2 * x], 1)
        return (
            function(x), jax.jvp(gradient, (x,), (jnp.cos(x),)),
            jax.grad(loss_of(mapped))(x5), fuse(mapped)(x5),
        )  # fmt: skip

    run = jax.jit(lambda x: [all_of(f, x) for f in (fuse(function), function)])
    actual, expected = run(X)
    assert_same(actual, expected, 1e-8)


@pytest.mark.parametrize("function", [block, with_statistics], ids=lambda f: f.__name__)
def test_the_fused_gradient(function):
    """The gradient's code may be fused too. It must be the same."""
    gradient = jax.grad(loss_of(function))
    assert_same(jax.jit(fuse(gradient))(X), jax.jit(gradient)(X))


def test_while_loop():
    assert replaced(while_loop, X)
    assert_same(fuse(while_loop)(X), while_loop(X))
    assert_same(jax.jvp(fuse(while_loop), (X,), (X,)), jax.jvp(while_loop, (X,), (X,)))


def test_closures_over_tracers():
    def outer(x: Any, w: Any, fuse: Any) -> Any:
        return fuse(lambda y: block(y) * w + x)(x * 2), fuse(lambda: layer_norm(x * w))()

    def gradient(fuse: Any) -> Any:
        return jax.grad(lambda x: loss_of(lambda x: outer(x, jnp.tanh(x), fuse))(x))

    assert_same(jax.jit(gradient(fuse))(X), gradient(lambda f: f)(X))
    mapped = (jax.vmap(lambda x, f=f: outer(x, x + 1, f))(X) for f in (fuse, lambda f: f))
    assert_same(*mapped)


def test_values_that_are_not_traced():
    """Python's and NumPy's values stay what they are."""

    def function(x: Any, flag: Any, name: Any, index: Any, none: Any = None, *, n: int) -> Any:
        assert flag is True and name == "a" and type(n) is int and none is None
        y = layer_norm(x)[:, tuple(index)] if flag else x
        return {"y": y, "flag": flag, "name": name, "n": n, "none": none, "index": index, "x": x}

    index = np.array([1, 2])
    result = fuse(function)(X, True, "a", index, n=3)
    assert result["flag"] is True and result["n"] == 3 and result["none"] is None
    assert result["name"] == "a" and result["index"] is index
    np.testing.assert_array_equal(result["x"], X)
    assert_same(result["y"], layer_norm(X)[:, (1, 2)])
    for other in (np.array(["a"]), np.str_("a"), np.array([None])):
        fuse(lambda x, _: layer_norm(x))(X, other)


def test_arrays_of_other_dtypes():
    def function(x: Any, i: Any, mask: Any, key: Any, empty: Any) -> Any:
        y = layer_norm(x) * jnp.where(mask, i, 0).astype(x.dtype)
        return y, jax.random.normal(key, (3,)), jax.random.key_data(key), empty, i, mask, y

    arrays = (X, jnp.arange(16)[None, None], X > 0, jax.random.key(3), jnp.zeros((0, 4)))
    assert replaced(function, *arrays) == ["layer_norm"]
    assert_same(fuse(function)(*arrays), function(*arrays))
    for shape in ((0, 4, 16), (4, 0)):
        assert fuse(lambda x: jax.nn.gelu(x))(jnp.zeros(shape)).shape == shape


def test_results_are_arrays():
    """Also those that the function returns as they are, and constants."""
    results = fuse(lambda x: (x, layer_norm(x), jnp.float32(3), jnp.arange(3)))(X)
    assert all(isinstance(y, jax.Array) for y in results)


def test_effects():
    seen: list[float] = []

    def function(x: Any) -> Any:
        y = layer_norm(x)
        jax.debug.callback(lambda v: seen.append(float(v)), y.sum(), ordered=True)
        double = jax.ShapeDtypeStruct(x.shape, x.dtype)
        z = jax.experimental.io_callback(lambda v: 2 * np.asarray(v), double, x, ordered=True)
        ref = jax.new_ref(layer_norm(y + z))
        return ref[...]

    assert replaced(function, X)
    results = [function(X), fuse(function)(X), jax.jit(fuse(function))(X)]
    jax.effects_barrier()
    assert len(seen) == 3 and np.allclose(seen, seen[0])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_donation():
    expected = block(X)
    inner = jax.jit(block, donate_argnums=0)
    assert_same(jax.jit(fuse(lambda x: inner(x * 1)))(X), expected)
    assert_same(jax.jit(fuse(block), donate_argnums=0)(X + 0), expected)


@pytest.mark.parametrize(
    "context", [jax.disable_jit, jax.checking_leaks, lambda: jax.debug_nans(True)]
)
def test_settings(context):
    with context():
        assert_same(fuse(block)(X), block(X))


def test_export():
    """Code of symbolic shapes stays as it is."""
    with jax_gradops.use_implementation("xla"):
        exported = jax.export.export(jax.jit(fuse(block)))(X)
        assert_same(exported.call(X), block(X))
        found: list[Any] = []
        shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*b, t, 16"), X.dtype)
        exported = jax.export.export(jax.jit(fuse(block, report=found.append)))(shape)
    assert "symbolic" in str(found[0])
    assert_same(exported.call(X), block(X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind):
    devices = mesh("cpu", kind)
    x = jax.device_put(X, NamedSharding(devices, P("data", "model")))
    assert replaced(block, x)
    local = {"in_specs": P("data", "model"), "out_specs": P("data", "model")}
    mapped = jax.shard_map(block, mesh=devices, **local)
    inside = jax.shard_map(fuse(block), mesh=devices, check_vma=False, **local)

    def run(*functions: Any) -> list[Any]:
        return jax.jit(lambda x: [(f(x), jax.grad(loss_of(f))(x)) for f in functions])(x)

    expected, *others = run(block, fuse(block))
    with jax.set_mesh(devices):
        others += run(fuse(block), fuse(mapped), inside)
    for y, dx in others:
        assert_same((y, dx), expected)
        assert y.sharding.is_equivalent_to(expected[0].sharding, 3)


def test_an_error_in_the_search(monkeypatch):
    """The code stays as it is. The report has the error."""
    monkeypatch.setattr(report, "RAISE_ERRORS", False)

    def fails(*args: Any) -> Any:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr("jax_gradops._fuse.search.roots", fails)
    found: list[Any] = []
    assert_same(fuse(block, report=found.append)(X), block(X))
    assert not found[0].replaced
    assert "the search failed: RuntimeError: one" in str(found[0]) and "two" not in str(found[0])
    with pytest.raises(ZeroDivisionError):  # the function's own errors pass
        fuse(lambda x: x / (1 // 0))(X)
