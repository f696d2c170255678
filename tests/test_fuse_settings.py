"""`jax_gradops.fuse` under JAX's settings, called again, and of functions with many arrays."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fresh_process import run_python

import jax_gradops
from jax_gradops._fuse import check, report

pytestmark = pytest.mark.newest_jax

# This runs in a new process, because the suite changes some of these settings itself.
SETTINGS = """
import contextlib, json
import jax, jax.numpy as jnp, numpy as np
import jax_gradops
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

def norm(x, s):
    c = x - x.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-5) * s[None]

def loss(x, s):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), jnp.arange(8)[:, None], -1)[:, 0] * s[0]

def automatic(x, s):
    return jax.sharding.auto_axes(norm, axes="a", out_sharding=P("a"))(x, s)

@contextlib.contextmanager
def changed(name, value):
    old = getattr(jax.config, name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, old)

result = {}
def run(name, features, functions=(norm, loss), dtype="float32"):
    # Other features in each case, so that no comparison is shared.
    numbers = np.random.default_rng(0).normal(size=(8, features))
    x, s = jax.device_put(numbers.astype(dtype)), jax.device_put(np.ones(features, dtype))
    if jax.sharding.get_abstract_mesh().shape:
        x = jax.device_put(x, NamedSharding(mesh, P("a")))
        s = jax.device_put(s, NamedSharding(mesh, P()))
    for f in functions:
        found = []
        y = jax.jit(jax_gradops.fuse(f, report=found.append))(x, s)
        with jax.transfer_guard("allow"):
            same = y.dtype == dtype and np.allclose(y, jax.jit(f)(x, s), rtol=1e-5, atol=1e-5)
        key = f"{name}, {f.__name__}"
        result[key] = str(found[0]) if found[0].left or not same else found[0].replaced[0].op

with jax.enable_x64(True):
    run("enable_x64", 16, dtype="float64")
for features, (name, value) in enumerate((("jax_transfer_guard", "disallow"),
                                          ("jax_disable_jit", True), ("jax_debug_nans", True),
                                          ("jax_numpy_rank_promotion", "raise"),
                                          ("jax_check_tracer_leaks", True)), 17):
    with changed(name, value):
        run(name, features)
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    run("auto_axes", 30, (automatic,))
found = []
with changed("jax_error_checking_behavior_nan", "raise"):
    jax.jit(jax_gradops.fuse(norm, report=found.append))(jnp.ones((8, 31)), jnp.ones(31))
result["checks"] = found[0].left[0].why
print(json.dumps(result))
"""


def test_settings(tmp_path):
    """Comparisons are cut off from the caller: no setting of JAX makes `fuse` leave code."""
    flags = "--xla_force_host_platform_device_count=8"
    found = run_python(SETTINGS, tmp_path, XLA_FLAGS=flags)
    assert found.pop("checks").startswith("jax_error_checking_behavior_nan")
    ops = {"loss": "softmax_cross_entropy_with_integer_labels"}
    assert found == {key: ops.get(key.split(", ")[1], "layer_norm") for key in found}
    assert len(found) == 13


def rms_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None]


def test_what_failed_is_tried_again(monkeypatch):
    monkeypatch.setattr(report, "RAISE_ERRORS", False)
    monkeypatch.setattr(check, "_comparisons", {})
    arrays = jnp.ones((4, 24), jnp.float32), jnp.ones(24, jnp.float32)
    inner = jax.jit(lambda x, s: jax.lax.scan(lambda x, _: (rms_norm(x, s), None), x, None, 2)[0])
    found: list[Any] = []
    fused = jax_gradops.fuse(inner, report=found.append)
    with monkeypatch.context() as context:
        context.setattr(check, "_program", lambda *_: 1 // 0)
        jax.eval_shape(fused, *arrays)
    fused(*arrays)
    failed, again = found
    assert not failed.replaced and "the search failed: ZeroDivisionError" in failed.left[0].why
    assert [each.op for each in again.replaced] == ["rms_norm"] and not again.left


def test_calls_without_jit_compile_once():
    """Inner functions are searched once, so that JAX finds their programs again."""
    compiled = 0

    def count(event: str, _: float, **__: Any) -> None:
        nonlocal compiled
        compiled += event.endswith("backend_compile_duration")

    @jax.jit
    def layer(x, scale):  # too long to be opened
        for _ in range(50):
            x = jnp.sin(x) * jnp.float32(1.01)
        return rms_norm(x, scale)

    def loss(x, scales):
        for i in range(3):
            x = layer(x, scales[i])
        x, _ = jax.lax.scan(body, x, scales)
        return jnp.sum(x**3)

    def body(x, scale):
        return jnp.tanh(rms_norm(x, scale)), None

    arrays = jnp.ones((8, 20), jnp.float32), jnp.ones((3, 20), jnp.float32)
    found: list[Any] = []
    fused = jax_gradops.fuse(loss, report=found.append)
    for call in (fused, jax.jit(fused)):
        call(*arrays)
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            results = [call(*arrays) for _ in range(2)]
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
        assert compiled == 0
        np.testing.assert_allclose(results[1], loss(*arrays), rtol=2e-5)
    assert found[0] == found[1]
    assert sum(each.times for each in found[1].replaced) == 4


def test_update_of_many_leaves():
    """The time to trace an optimizer's update grows linearly with the number of leaves."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def seconds(function: Any, *args: Any) -> float:
        start = time.thread_time()  # of this process alone, without the comparisons' threads
        jax.eval_shape(function, *args)
        return time.thread_time() - start

    found: list[Any] = []
    leaves = {str(i): jnp.ones((4,) * (1 + i % 2), jnp.float32) for i in range(1000)}
    state = optimizer.init(leaves)
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it
        plain = seconds(lambda *args: optimizer.update(*args), leaves, state, leaves)
        fused = jax_gradops.fuse(lambda *args: optimizer.update(*args), report=found.append)
        assert seconds(fused, leaves, state, leaves) < 3 * plain + 2
    assert [each.op for each in found[0].replaced] == ["clip_tree_by_global_norm"]
