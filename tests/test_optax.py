"""`clip_by_global_norm` acts as Optax's in Optax's chains and wrappers and Flax's train states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import jax_gradops

pytestmark = pytest.mark.newest_jax

PARAMS = {"w": np.full((4, 3), 0.5, np.float32), "b": np.zeros(3, np.float32)}
Clip = Callable[..., optax.GradientTransformation]


def only_weights(tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "w", tree)


def labels(tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: path[-1].key, tree)


# Each takes a clip's constructor, and returns an optimizer.
OPTIMIZERS: dict[str, Callable[[Clip], Any]] = {
    "chain": lambda clip: optax.chain(clip(1.0), optax.adamw(1e-2)),
    "chain, last": lambda clip: optax.chain(optax.scale(-0.1), clip(0.5)),
    "named_chain": lambda clip: optax.named_chain(("clip", clip(1.0)), ("sgd", optax.sgd(0.1))),
    "MultiSteps": lambda clip: optax.MultiSteps(optax.chain(clip(1.0), optax.adam(1e-2)), 2),
    "masked": lambda clip: optax.chain(optax.masked(clip(1.0), only_weights), optax.sgd(0.1)),
    "partition": lambda clip: optax.partition(
        {"w": optax.chain(clip(1.0), optax.sgd(0.1)), "b": optax.adam(1e-2)}, labels
    ),
    "inject_hyperparams": lambda clip: optax.chain(
        optax.inject_hyperparams(clip)(max_norm=optax.linear_schedule(2.0, 0.5, 4)), optax.sgd(0.1)
    ),
    "apply_if_finite": lambda clip: optax.apply_if_finite(
        optax.chain(clip(1.0), optax.sgd(0.1)), max_consecutive_errors=5
    ),
    "flatten": lambda clip: optax.flatten(optax.chain(clip(1.0), optax.adam(1e-2))),
    "with_extra_args_support": lambda clip: optax.with_extra_args_support(clip(1.0)),
    "conditionally_transform": lambda clip: optax.chain(
        optax.conditionally_transform(clip(1.0), lambda step: step % 2 == 0), optax.sgd(0.1)
    ),
}


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(x @ params["w"]) * 30 + params["b"][None])


def train(optimizer: Any, data: Any) -> tuple[list[Any], Any]:
    """The parameters after each step, and the last state."""

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, PARAMS)
    state, history = optimizer.init(params), []
    for x in data:
        params, state = step(params, state, x)
        history.append(params)
    return history, state


@pytest.fixture
def data(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((6, 8, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def _promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # Optax needs this
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrappers(platform, name, data):
    make = OPTIMIZERS[name]
    ours, state = train(make(jax_gradops.clip_by_global_norm), data)
    expected, _ = train(make(optax.clip_by_global_norm), data)
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)
    # Optax finds a value anywhere in a state by its name.
    norm = optax.tree.get(state, "global_norm")
    assert norm.shape == () and norm.dtype == jnp.float32 and norm > 0


def test_norm_in_the_state(platform, data):
    """The state has the norm of the last update, before clipping."""
    optimizer = OPTIMIZERS["chain"](jax_gradops.clip_by_global_norm)
    history, state = train(optimizer, data)
    last = jax.grad(loss)(history[-2], data[-1])
    np.testing.assert_allclose(
        optax.tree.get(state, "global_norm"), optax.tree.norm(last), rtol=1e-6
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_apply_if_finite(platform, value):
    """A gradient that is not finite changes only the count, not parameters or other state."""
    optimizer = OPTIMIZERS["apply_if_finite"](jax_gradops.clip_by_global_norm)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    bad = {**PARAMS, "b": np.array([1, value, 2], np.float32)}
    updates, state = jax.jit(optimizer.update)(bad, state, params)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    assert state.notfinite_count == 1 and optax.tree.get(state, "global_norm") == 0


def test_nonfinite_zero(platform):
    """With nonfinite="zero", the clip itself turns such an update into zeros."""
    optimizer = optax.chain(jax_gradops.clip_by_global_norm(1.0, nonfinite="zero"), optax.sgd(0.1))
    bad = {**PARAMS, "b": np.array([1, np.nan, 2], np.float32)}
    updates, _ = jax.jit(optimizer.update)(bad, optimizer.init(PARAMS))
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)


def test_accumulated_gradients_are_clipped_once(platform, data):
    """`MultiSteps` clips the mean of its gradients, not each gradient."""
    optimizer = OPTIMIZERS["MultiSteps"](jax_gradops.clip_by_global_norm)
    history, state = train(optimizer, data[:2])
    start = jax.tree.map(jnp.asarray, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, history[0], start)  # no update yet
    mean = jax.tree.map(lambda *g: sum(g) / 2, *(jax.grad(loss)(start, x) for x in data[:2]))
    np.testing.assert_allclose(
        optax.tree.get(state, "global_norm"), optax.tree.norm(mean), rtol=1e-6
    )


def test_nnx_optimizer(platform, data):
    """Flax NNX: `nnx.Optimizer`."""

    def run(clip: Clip) -> Any:
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.chain(clip(0.5), optax.adam(1e-2)), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> None:
            grads = nnx.grad(lambda m: jnp.sum(jnp.sin(m(x)) * 30))(model)
            optimizer.update(model, grads)

        for x in data:
            step(model, optimizer, x)
        return jax.tree.leaves(nnx.state(model, nnx.Param)), optimizer

    ours, optimizer = run(jax_gradops.clip_by_global_norm)
    expected, _ = run(optax.clip_by_global_norm)
    for a, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)
    assert optimizer.opt_state[0].global_norm[...] > 0


def test_linen_train_state(platform, data):
    """Flax linen: `TrainState`."""

    def run(clip: Clip) -> Any:
        model = linen.Dense(3)
        state = TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), data[0]),
            tx=optax.chain(clip(0.5), optax.adam(1e-2)),
        )

        @jax.jit
        def step(state: Any, x: Any) -> Any:
            grads = jax.grad(lambda p: jnp.sum(jnp.sin(state.apply_fn(p, x)) * 30))(state.params)
            return state.apply_gradients(grads=grads)

        for x in data:
            state = step(state, x)
        return state

    ours, expected = run(jax_gradops.clip_by_global_norm), run(optax.clip_by_global_norm)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6),
        ours.params,
        expected.params,
    )
    assert optax.tree.get(ours.opt_state, "global_norm") > 0


def test_bits_of_optax(platform, rng):
    """Equals Optax bitwise if nothing is clipped, or the norm is a power of two.

    Optax divides first. In other cases, both round twice, and their norms may be rounded
    differently.
    """
    state, empty = jax_gradops.clip_by_global_norm(2.0).init(PARAMS), optax.EmptyState()

    def both(tree: Any) -> Any:
        ours = jax.jit(jax_gradops.clip_by_global_norm(2.0).update)(tree, state)[0]
        return ours, jax.jit(optax.clip_by_global_norm(2.0).update)(tree, empty)[0]

    unclipped = {"w": rng.uniform(-0.1, 0.1, 100).astype(np.float32)}
    norm_4 = {"w": np.array([2.4, 0.0], np.float32), "b": np.array([3.2], np.float32)}
    assert jax_gradops.global_norm(norm_4) == 4
    for tree in (unclipped, norm_4):
        jax.tree.map(np.testing.assert_array_equal, *both(tree))
    for size in (1e-1, 1.0, 1e3, 1e15):
        ours, theirs = both({"w": (size * rng.standard_normal(10_000)).astype(np.float32)})
        np.testing.assert_array_max_ulp(np.asarray(ours["w"]), np.asarray(theirs["w"]), maxulp=2)


@pytest.mark.parametrize(
    ("leaf", "max_norm", "of_optax"),
    [
        (np.zeros(3, np.float32), 0.0, "nan"),
        (np.full(30_000, 30, np.float16), 1.0, "zeros"),
        (np.full(4, 1e20, np.float32), 1.0, "zeros"),
        (np.full(4, 1e-25, np.float32), 1e-26, "unclipped"),
        (np.linspace(0.1, 1, 10_001).astype(jnp.bfloat16), 1.0, "drift"),
    ],
    ids=["0/0", "float16 overflows", "huge", "tiny", "bfloat16 norm"],
)
def test_where_optax_is_wrong(platform, leaf, max_norm, of_optax):
    """README's list of Optax's errors: our results are right. If Optax changes, README must too."""
    tree = [leaf]
    (clipped,), norm = jax_gradops.clip_tree_by_global_norm(tree, max_norm)
    wide = leaf.astype(np.float64)
    exact = np.linalg.norm(wide)
    np.testing.assert_allclose(norm, exact, rtol=1e-6)
    expected = wide * (max_norm / exact if exact > 0 else 1)
    eps = float(jnp.finfo(leaf.dtype).eps)
    np.testing.assert_allclose(clipped.astype(np.float64), expected, rtol=2 * eps)

    (theirs,), _ = optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())
    theirs = np.asarray(theirs).astype(np.float64)
    if of_optax == "nan":
        assert np.isnan(theirs).all()
    elif of_optax == "zeros":
        np.testing.assert_array_equal(theirs, 0)
    elif of_optax == "unclipped":
        np.testing.assert_array_equal(theirs, wide)
    else:
        assert optax.tree.norm(tree).dtype == jnp.bfloat16
        assert np.abs(float(optax.tree.norm(tree)) / exact - 1) > 1e-4


def test_chain(platform, implementation, rng):
    """Training equals training with Optax's clip. The state holds the norm before clipping."""

    def train(clip: Any) -> Any:
        optimizer = optax.chain(clip, optax.adam(1e-2))
        params = {"w": jnp.full((4, 3), 0.5, jnp.float32), "b": jnp.zeros(3, jnp.float32)}

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, x: Any) -> Any:
            grads = jax.grad(lambda p: jnp.sum(jnp.sin(x @ p["w"]) * 30 + p["b"][None]))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

        state = optimizer.init(params)
        for x in data:
            params, state, norm = step(params, state, x)
        return params, state, norm

    data = rng.standard_normal((5, 8, 4)).astype(np.float32)
    clip = jax_gradops.clip_by_global_norm(1.0, implementation=implementation)
    ours, state, norm = train(clip)
    expected, _, _ = train(optax.clip_by_global_norm(1.0))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, expected
    )
    assert isinstance(state[0], jax_gradops.ClipByGlobalNormState)
    np.testing.assert_allclose(state[0].global_norm, norm, rtol=1e-6)
    assert state[0].global_norm.dtype == jnp.float32 and norm > 1


def test_inject_hyperparams(platform):
    """max_norm may change from step to step."""
    schedule = optax.linear_schedule(1.0, 0.5, 1)
    clip = optax.inject_hyperparams(jax_gradops.clip_by_global_norm)(max_norm=schedule)
    grads = {"w": jnp.array([3.0, 4.0], jnp.float32)}
    state = clip.init(grads)
    update = jax.jit(clip.update)
    for expected in (1.0, 0.5, 0.5):
        clipped, state = update(grads, state)
        np.testing.assert_allclose(np.linalg.norm(clipped["w"]), expected, rtol=1e-6)
        assert state.inner_state.global_norm == 5


def test_initial_state():
    init = jax_gradops.clip_by_global_norm(1.0).init
    assert init({"w": jnp.ones(3, jnp.bfloat16)}).global_norm.dtype == jnp.float32
    assert init({"w": jnp.ones(3, jnp.float64)}).global_norm.dtype == jnp.float64
    assert init({}).global_norm == 0
