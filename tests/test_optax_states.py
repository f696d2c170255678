"""`clip_by_global_norm` with the states, parameters and loops that Optax's clip accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

import jax_gradops
from jax_gradops import ClipByGlobalNormState

pytestmark = pytest.mark.newest_jax

UPDATES = {"w": np.array([3.0, 4.0], np.float32), "other": None}


@pytest.fixture(autouse=True)
def _promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # Optax needs this
        yield


# --- What init is given ------------------------------------------------------------------------

#: Parameters without a gradient.
OTHERS: dict[str, Callable[[], Any]] = {
    "counter": lambda: jnp.int32(3),
    "mask": lambda: np.array([True]),
    "key": lambda: jax.random.key(0),
    "name": lambda: "block",
    "function": lambda: jnp.tanh,
    "complex": lambda: np.array([1j], np.complex64),
    "abstract": lambda: jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    "abstract key": lambda: jax.eval_shape(lambda: jax.random.key(0)),
}


@pytest.mark.C10
@pytest.mark.parametrize("name", OTHERS)
def test_parameters_without_gradient(platform, name):
    params = {"w": np.zeros(2, np.float32), "other": OTHERS[name]()}
    for clip in (optax.clip_by_global_norm, jax_gradops.clip_by_global_norm):
        transform = clip(1.0)
        updates, _ = transform.update(UPDATES, transform.init(params))
        np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
    state = jax_gradops.clip_by_global_norm(1.0).init(params)
    assert state.global_norm == 0 and state.global_norm.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_dtype_of_abstract_parameters(dtype):
    init = jax_gradops.clip_by_global_norm(1.0).init
    abstract = jax.ShapeDtypeStruct((3,), dtype)
    assert init([abstract, "name"]).global_norm.dtype == jnp.float64
    assert jax.eval_shape(init, [abstract]).global_norm.dtype == jnp.float64
    assert init([1.0]).global_norm.dtype == jnp.float64


# --- What update is given ----------------------------------------------------------------------


@pytest.mark.C12
@pytest.mark.parametrize(
    ("state", "dtype"),
    [
        (None, "float32"),
        (optax.EmptyState(), "float32"),
        (ClipByGlobalNormState(0.0), "float32"),
        (ClipByGlobalNormState(0), "float32"),
        (ClipByGlobalNormState(np.float32(0)), "float32"),
        (ClipByGlobalNormState(np.zeros((), np.float64)), "float64"),
        (ClipByGlobalNormState(np.float64(0)), "float64"),
    ],
    ids=str,
)  # fmt: skip
def test_states(platform, state, dtype):
    """Optax's state, no state, and states that a checkpoint may restore."""
    for update in (
        jax_gradops.clip_by_global_norm(1.0).update,
        optax.clip_by_global_norm(1.0).update,
    ):
        updates, new = update(UPDATES, state)
        np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
        if update.__module__.startswith("jax_gradops"):
            assert new.global_norm == 5 and new.global_norm.dtype == dtype


def test_restored_from_text(platform):
    """A state converted to JSON and back."""
    transform = jax_gradops.clip_by_global_norm(1.0)
    text = json.dumps({k: float(v) for k, v in transform.init(UPDATES)._asdict().items()})
    _, state = transform.update(UPDATES, ClipByGlobalNormState(**json.loads(text)))
    assert state.global_norm == 5


# --- Checkpoints of Optax's clip -----------------------------------------------------------------

PARAMS = {"w": np.array([1.0, 2.0], np.float32)}
GRADIENTS = {"w": np.array([3.0, 4.0], np.float32)}


def with_clip(clip: Any) -> Any:
    return optax.chain(clip, optax.adam(0.1))


def without_norm(max_norm: float) -> Any:
    return jax_gradops.clip_by_global_norm(max_norm, keep_norm=False)


def by_flax(state: Any, like: Any, path: Path) -> Any:
    del path
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))


def by_orbax(state: Any, like: Any, path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", like)


@pytest.mark.parametrize("through", [by_flax, by_orbax])
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_without_norm(through: Any, ours_first: bool, tmp_path: Path) -> None:
    """A run goes on from a checkpoint of the clip of the other library."""
    clips = [without_norm, optax.clip_by_global_norm]
    first, second = (with_clip(c(1.0)) for c in (clips if ours_first else clips[::-1]))
    _, state = first.update(GRADIENTS, first.init(PARAMS), PARAMS)
    restored = through(state, second.init(PARAMS), tmp_path)
    expected, _ = first.update(GRADIENTS, state, PARAMS)
    updates, after = jax.jit(second.update)(GRADIENTS, restored, PARAMS)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert after[0] == optax.EmptyState()


@pytest.mark.parametrize("through", [by_flax, by_orbax])
def test_checkpoints_with_norm_do_not_fit(through: Any, tmp_path: Path) -> None:
    """The messages are in the site's page on troubleshooting."""
    saved = with_clip(optax.clip_by_global_norm(1.0)).init(PARAMS)
    like = with_clip(jax_gradops.clip_by_global_norm(1.0)).init(PARAMS)
    match = (
        "got set\\(\\) and {'global_norm'} at path ./0|restore item and on-disk value metadata tree"
    )
    with pytest.raises(ValueError, match=match):
        through(saved, like, tmp_path)


@pytest.mark.parametrize("state", [None, optax.EmptyState(), ClipByGlobalNormState(0.0)], ids=str)
def test_a_clip_without_norm_keeps_no_state(platform, state):
    transform = without_norm(1.0)
    updates, after = transform.update(UPDATES, state)
    np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
    assert transform.init(UPDATES) == after == optax.EmptyState()


def test_injected_hyperparameters_without_norm(platform):
    inject = optax.inject_hyperparams(jax_gradops.clip_by_global_norm)
    transform = inject(max_norm=optax.constant_schedule(1.0), keep_norm=False)
    updates, state = transform.update(UPDATES, transform.init(PARAMS))
    np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-6)
    assert state.inner_state == optax.EmptyState()


# --- Loops in shard_map ------------------------------------------------------------------------

LOOPS: dict[str, Callable[[Any], Any]] = {
    "scan": lambda tx: tx,
    "fori_loop": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step, **_: step % 2 == 0
    ),
}


def run_loop(optimizer: Any, kind: str, w: Any, rows: Any) -> Any:
    """Four steps from w. Each step uses one row."""

    def step(carry: Any, row: Any) -> Any:
        w, state = carry
        gradient = jax.grad(lambda w: jnp.sum((w - row) ** 2))(w)
        updates, state = optimizer.update(gradient, state, w)
        return (optax.apply_updates(w, updates), state), None

    start = w, optimizer.init(w)
    if kind == "fori_loop":
        return jax.lax.fori_loop(0, 4, lambda i, c: step(c, rows[i])[0], start)
    return jax.lax.scan(step, start, rows)[0]


@pytest.mark.C9
@pytest.mark.parametrize("kind", LOOPS)
def test_loops_in_shard_map(platform, kind, rng):
    """Each device has its own weights. From the start, the state varies as the weights do."""
    devices = mesh(platform, AxisType.Auto)
    n = devices.shape["data"]
    rows = rng.standard_normal((n, 4, 3)).astype(np.float32)

    def loop(clip: Any) -> Any:
        optimizer = LOOPS[kind](optax.chain(clip(1.0), optax.sgd(0.1)))

        def local(w: Any, rows: Any) -> Any:
            w, state = run_loop(optimizer, kind, w[0], rows[0])
            norm = optax.tree.get(state, "global_norm", jnp.sum(w))
            return w[None], norm[None]

        mapped = jax.shard_map(
            local, mesh=devices, in_specs=(P("data"), P("data")), out_specs=P("data")
        )
        return jax.jit(mapped)(np.ones((n, 3), np.float32), rows)

    w, norms = loop(jax_gradops.clip_by_global_norm)
    np.testing.assert_allclose(w, loop(optax.clip_by_global_norm)[0], atol=1e-6)
    assert len(np.unique(norms)) == n  # each device has its own norm


@pytest.mark.C9
def test_updates_vary_more_than_the_state(platform, rng):
    """Each device's gradients are clipped, then averaged. The state has the mean of the norms."""
    devices = mesh(platform, AxisType.Auto)
    n = devices.shape["data"]
    gradients = rng.standard_normal((n, 4, 3)).astype(np.float32)

    def loop(clip: Any) -> Any:
        optimizer = clip(1.0)

        def local(gradients: Any) -> Any:
            w = jnp.zeros(3, jnp.float32)

            def step(carry: Any, gradient: Any) -> Any:
                w, state = carry
                updates, state = optimizer.update(gradient, state, w)
                return (w - jax.lax.pmean(updates, "data"), state), None

            return jax.lax.scan(step, (w, optimizer.init(w)), gradients[0])[0]

        mapped = jax.shard_map(local, mesh=devices, in_specs=P("data"), out_specs=P())
        return jax.jit(mapped)(gradients)

    w, state = loop(jax_gradops.clip_by_global_norm)
    np.testing.assert_allclose(w, loop(optax.clip_by_global_norm)[0], atol=1e-6)
    mean = np.linalg.norm(gradients[:, -1], axis=-1).mean()
    np.testing.assert_allclose(state.global_norm, mean, rtol=1e-6)


def test_loop_on_an_explicit_mesh(platform, rng):
    devices = mesh(platform, AxisType.Explicit)
    rows = rng.standard_normal((4, 8)).astype(np.float32)

    def loop(clip: Any) -> Any:
        optimizer = optax.chain(clip(1.0), optax.sgd(0.1))
        with jax.set_mesh(devices):
            w = jax.device_put(np.ones(8, np.float32), NamedSharding(devices, P("data")))
            step = jax.jit(lambda w: run_loop(optimizer, "scan", w, rows)[0])
            return step(w)

    np.testing.assert_allclose(
        loop(jax_gradops.clip_by_global_norm), loop(optax.clip_by_global_norm), atol=1e-6
    )


# --- Optax's optimizers ------------------------------------------------------------------------

ALIASES = (
    "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamaxw", "adamw", "adan", "amsgrad",
    "fromage", "lamb", "lars", "lion", "nadamw", "novograd", "optimistic_gradient_descent",
    "radam", "rmsprop", "sgd", "sign_sgd", "yogi",
)  # fmt: skip


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_with_complex_parameters(name, rng):
    """After the clip, in a chain: two steps equal two steps with Optax's clip."""
    z = (rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3))).astype(np.complex64)
    params = {"z": z, "x": rng.standard_normal(3).astype(np.float32)}
    gradients = jax.tree.map(lambda p: 30 * p, params)

    def train(clip: Any) -> Any:
        optimizer = optax.chain(clip(0.5), getattr(optax, name)(1e-2))
        now, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(gradients, state, now)
            now = optax.apply_updates(now, updates)
        return now

    ours, theirs = train(jax_gradops.clip_by_global_norm), train(optax.clip_by_global_norm)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
