"""Random programs around the ops: nested transformations, and arrays sharded over devices.

Results of the kernels must equal results of XLA's operations in float64. This includes derivatives
of any order. Each example is compiled, so a run has few. `make fuzz` tries others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_fuzz import forget_now_and_then

import jax_gradops

pytestmark = pytest.mark.newest_jax

FEATURES = 6
Op = Callable[[jax.Array], jax.Array]


def op_of(name: str) -> Op:
    """An op from [rows, FEATURES] to an array of this shape."""
    vector = jnp.linspace(0.5, 2, FEATURES)
    g = jax_gradops
    ops: dict[str, Op] = {
        "layer_norm": lambda x: g.layer_norm(x, vector, vector),
        "layer_norm from output": lambda x: g.layer_norm(x, vector, residuals="output"),
        "rms_norm": lambda x: g.rms_norm(x, vector, scale_offset=1.0),
        "add_rms_norm": lambda x: sum(g.add_rms_norm(x, jnp.sin(x), vector)),
        "gelu": g.gelu,
        "bias_gelu": lambda x: g.bias_gelu(x, vector, False),
        "batch_norm": lambda x: g.batch_norm(x, vector, activation="relu", residual=jnp.cos(x))[0],
        "group_norm": lambda x: g.group_norm(x, vector, vector, num_groups=2, activation="silu"),
        "instance_norm": lambda x: (  # of two points for each row and channel
            g.instance_norm(jnp.stack([x, jnp.cos(x)], 1), vector, activation="relu")[:, 1]
        ),
        "clip": lambda x: g.clip_tree_by_global_norm([x], 1.5)[0][0],
        "clip in place": lambda x: g.backward.inplace_clip_by_global_norm([x], 1.5)[0][0],
    }
    return ops[name]


OPS = (
    "layer_norm", "layer_norm from output", "rms_norm", "add_rms_norm", "gelu", "bias_gelu",
    "batch_norm", "group_norm", "instance_norm", "clip", "clip in place",
)  # fmt: skip


def mapped(f: Op, axis: int) -> Op:
    """Applies f to three stacked arrays and returns the sum of the results."""

    def g(x: jax.Array) -> jax.Array:
        stacked = jnp.stack([x, 2 * x, jnp.sin(x)], axis)
        return jnp.sum(jax.vmap(f, axis, axis)(stacked), axis)

    return g


def of_batch_axis(f: Op) -> Op:
    """Maps rows as an axis with a name."""
    del f
    one = lambda x: jax_gradops.batch_norm(x[None], axis_name="row")[0][0]  # noqa: E731
    return jax.vmap(one, axis_name="row")


def associative(f: Op) -> Op:
    return lambda x: jnp.sum(jax.lax.associative_scan(lambda a, b: f(a + b), jnp.stack([x] * 3)), 0)


POLICIES = jax.checkpoint_policies
WRAPPERS: dict[str, Callable[[Op], Op]] = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "scan of results": lambda f: (
        lambda x: jnp.sum(jax.lax.scan(lambda c, a: (c + f(a), f(c)), x, jnp.stack([x, -x]))[1], 0)
    ),
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x),
    "map": lambda f: lambda x: jnp.sum(jax.lax.map(f, jnp.stack([x, jnp.cos(x)])), 0),
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) > -1e9, f, jnp.sin, x),
    "remat": jax.checkpoint,
    "remat, dots": lambda f: jax.checkpoint(f, policy=POLICIES.dots_saveable),
    "remat, names": lambda f: jax.checkpoint(
        f,
        policy=POLICIES.save_only_these_names(
            "layer_norm_rstd", "batch_norm_mean", "group_norm_rstd"
        ),
    ),
    "vmap 0": functools.partial(mapped, axis=0),
    "vmap 1": functools.partial(mapped, axis=1),
    "vmap 2": functools.partial(mapped, axis=2),
    "batch axis": of_batch_axis,
    "associative_scan": associative,
    "and sine": lambda f: lambda x: f(jnp.sin(x)) + x,
}


def _loss(f: Op) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.sum(jnp.sin(f(x)))


def _while(f: Op) -> Op:
    def g(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]

    return g


DERIVATIVES: dict[str, Callable[[Op], Op]] = {
    "value, while": _while,
    "grad": lambda f: jax.grad(_loss(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(_loss(f)), (x,), (jnp.cos(x),))[1],
    "grad of grad": lambda f: jax.grad(lambda x: jnp.vdot(jax.grad(_loss(f))(x), jnp.cos(x))),
    "grad of jvp": lambda f: jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (jnp.cos(x),))[1])),
    "transposed pullback": lambda f: (
        lambda x: jax.linear_transpose(lambda ct: jax.vjp(f, x)[1](ct)[0], x)(jnp.cos(x))[0]
    ),
}


def run(f: Op, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(f)(x))


@hypothesis.given(
    op=st.sampled_from(OPS),
    wrappers=st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3),
    derivative=st.sampled_from(sorted(DERIVATIVES)),
    seed=st.integers(0, 2**32),
)
@pytest.mark.T1
@pytest.mark.T2
def test_nested_transformations(op, wrappers, derivative, seed):
    forget_now_and_then()
    x = np.random.default_rng(seed).standard_normal((3, FEATURES))
    found = {}
    with jax.numpy_rank_promotion("allow"):
        for implementation in ("ffi", "xla"):
            with jax_gradops.use_implementation(implementation):
                f = op_of(op)
                for wrapper in wrappers:
                    f = WRAPPERS[wrapper](f)
                found[implementation] = run(DERIVATIVES[derivative](f), x)
    size = 1 + np.max(np.abs(found["xla"]))
    np.testing.assert_allclose(found["ffi"], found["xla"], rtol=1e-7, atol=1e-8 * size)


SPECS = (P(), P("a"), P("b"), P(("a", "b")), P(None, "a"), P("a", "b"), P("b", "a"))


@hypothesis.given(
    ops=st.lists(st.sampled_from(OPS), min_size=1, max_size=2),
    kinds=st.tuples(*[st.sampled_from(["auto", "explicit", "manual"])] * 2),
    specs=st.tuples(*[st.sampled_from(SPECS)] * 2),
    derivative=st.sampled_from(["value", "grad", "jvp", "jvp of grad"]),
    shardy=st.booleans(),
    seed=st.integers(0, 2**32),
)
@pytest.mark.P6
def test_spread_arrays(ops, kinds, specs, derivative, shardy, seed):
    """A program on a mesh with axes of any kinds equals the program on one device."""
    forget_now_and_then()
    shardy = shardy or "auto" != kinds[0] or "auto" != kinds[1]  # GSPMD supports only Auto axes
    of_kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=tuple(of_kind[k] for k in kinds),
        devices=jax.devices("cpu")[:4],
    )  # fmt: skip
    manual = {name for name, kind in zip("ab", kinds, strict=True) if kind == "manual"}
    x = np.random.default_rng(seed).standard_normal((8, FEATURES))

    def program(x: jax.Array) -> jax.Array:
        for op, spec in zip(ops, (specs[1], P()), strict=False):
            x = jnp.sin(op_of(op)(x)) + x
            free = P(*(None if manual & set(np.ravel(e)) else e for e in spec))
            if not manual and "explicit" not in kinds:
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, free))
        return x

    def of_manual(f: Op) -> Op:
        """Runs f on each device's rows. Other axes keep their sharding."""
        if not manual:
            return f
        rows = P(tuple(sorted(manual)))
        return jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=manual)

    def on_parts(f: Op) -> Op:
        parts = 2 ** len(manual)
        return lambda x: jnp.concatenate([f(part) for part in jnp.split(x, parts)])

    differentiated = DERIVATIVES.get(derivative, lambda f: f)(program)
    before = jax.config.jax_use_shardy_partitioner
    try:
        jax.config.update("jax_use_shardy_partitioner", shardy)
        with jax.numpy_rank_promotion("allow"):
            expected = run(on_parts(differentiated), x)
            explicit = "explicit" in kinds
            spec = P(tuple(sorted(manual))) if manual else specs[0]
            if explicit and "explicit" != kinds[0] and not manual:
                spec = P()
            with jax.set_mesh(mesh):
                spread = jax.device_put(x, NamedSharding(mesh, spec))
                result = run(of_manual(differentiated), spread)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    size = 1 + np.max(np.abs(expected))
    np.testing.assert_allclose(result, expected, rtol=1e-7, atol=1e-8 * size)
