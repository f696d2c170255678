"""The layer under the ops: choice of the implementation, export, graphs, threads, devices."""

from __future__ import annotations

import concurrent.futures
import os
import re
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_bitwise_equal
from fresh_process import run_python
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_gradops
from jax_gradops._ops.all import SPECS

pytestmark = pytest.mark.newest_jax

TARGET = 'custom_call_target="jax_gradops.'
X = np.arange(12, dtype=np.float32).reshape(3, 4) ** 2


# --- Which implementation ------------------------------------------------------------------------


def compiled() -> str:
    return jax.jit(lambda x: jax_gradops.layer_norm(x)).lower(X).compile().as_text()


def test_use_implementation(platform):
    assert TARGET in compiled()
    with jax_gradops.use_implementation("xla"):
        assert TARGET not in compiled()
        assert jax_gradops.implementation_in_use("rms_norm").implementation == "xla"
        with jax_gradops.use_implementation("ffi"):
            assert TARGET in compiled()
        assert TARGET not in compiled()
    with pytest.raises(KeyError), jax_gradops.use_implementation("xla"):
        raise KeyError
    assert TARGET in compiled()


def test_use_implementation_is_of_this_thread():
    with jax_gradops.use_implementation("xla"), concurrent.futures.ThreadPoolExecutor() as pool:
        assert TARGET in pool.submit(compiled).result()


def test_argument_wins_over_use_implementation(platform):
    with jax_gradops.use_implementation("xla"):
        f = jax.jit(lambda x: jax_gradops.layer_norm(x, implementation="ffi"))
        assert TARGET in f.lower(X).compile().as_text()


def test_implementation_in_use(platform):
    for op in SPECS:
        expected = "xla" if op == "batch_norm_inference" else "ffi"
        assert jax_gradops.implementation_in_use(op).implementation == expected
        assert jax_gradops.implementation_in_use(op, platform).implementation == expected
        implementation, reason = jax_gradops.implementation_in_use(op, "tpu")
        assert implementation == "xla" and "'tpu'" in reason


def test_platform_without_kernels():
    """Programs for a TPU compile here without our custom calls. "ffi" permits kernels only."""

    def f(x: Any) -> Any:
        y, pull = jax.vjp(jax_gradops.layer_norm, x)
        clipped, norm = jax_gradops.clip_tree_by_global_norm([y, *pull(y)], 1.0)
        return jax_gradops.gelu(clipped[0]), norm

    exported = export.export(jax.jit(f), platforms=["tpu"])(jax.ShapeDtypeStruct((3, 4), X.dtype))
    assert "jax_gradops." not in exported.mlir_module()


@pytest.mark.parametrize("context", ["vmap", "auto", "explicit", "shard_map", "partly manual"])
def test_lowers_for_a_platform_without_kernels(context):
    """The reference is traced while JAX lowers for the TPU."""

    def loss(x: Any, scale: Any) -> Any:
        y, *_ = jax_gradops.batch_norm(jax_gradops.gelu(jax_gradops.layer_norm(x, scale)), scale)
        (clipped,), _ = jax_gradops.clip_tree_by_global_norm([y], 1.0)
        return jnp.sum(jnp.sin(clipped))

    kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
    four = jax.devices("cpu")[:4]
    devices = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=four)
    x: Any = np.tile(X, (4, 1))[:8]
    scale: Any = np.ones(4, np.float32)
    names = {"shard_map": ("a", "b"), "partly manual": ("a",)}.get(context)
    function = loss
    if names:
        function = jax.shard_map(
            lambda x, scale: jax.lax.psum(loss(x, scale), names), mesh=devices,
            in_specs=(P(names), P()), out_specs=P(), axis_names=set(names),
        )  # fmt: skip
    gradient: Any = jax.grad(function, (0, 1))
    if context == "vmap":
        gradient, x = jax.vmap(gradient, (0, None)), np.stack([x, x])
    if context in ("auto", "explicit"):
        x = jax.device_put(x, NamedSharding(devices, P("a")))
        scale = jax.device_put(scale, NamedSharding(devices, P()))
    with jax.set_mesh(devices):
        traced = jax.jit(gradient).trace(x, scale)
    kernel = "jax_gradops_row_norm_fwd_"  # the start of a function's name
    assert kernel not in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert kernel in traced.lower(lowering_platforms=("cpu",)).as_text()


# --- Export --------------------------------------------------------------------------------------


def model(x: Any, scale: Any) -> Any:
    y = jax_gradops.bias_gelu(jax_gradops.layer_norm(x, scale), scale)
    return jax_gradops.rms_norm(y).sum(dtype=jnp.float32)


@pytest.mark.parametrize("shape", ["3, 4", "b, 4", "b, d"])
def test_export(shape):
    """Exports, serialises and reads a function and its gradient, with symbolic sizes too."""
    sizes = export.symbolic_shape(shape)
    types = [jax.ShapeDtypeStruct(sizes, X.dtype), jax.ShapeDtypeStruct(sizes[1:], X.dtype)]
    f = jax.jit(jax.value_and_grad(model, argnums=(0, 1)))
    with jax.default_device(jax.devices("cpu")[0]):
        exported = export.export(
            f, platforms=["cpu"], disabled_checks=jax_gradops.EXPORT_DISABLED_CHECKS
        )(*types)
        assert "jax_gradops.row_norm_bwd" in exported.mlir_module()
        pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
        loaded = export.deserialize(exported.serialize())
        scale = np.linspace(0.5, 2, 4, dtype=np.float32)
        for actual, expected in zip(
            jax.tree.leaves(loaded.call(X, scale)), jax.tree.leaves(f(X, scale)), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_statistics_have_names(capsys):
    """`save_only_these_names` keeps the named statistics, and nothing else of an op."""
    names = "layer_norm_mean", "layer_norm_rstd", "rms_norm_rstd"

    def f(x: Any) -> Any:
        return jax_gradops.rms_norm(jnp.sin(jax_gradops.layer_norm(jnp.sin(x)))).sum()

    for kept in (names, *((name,) for name in names), ()):
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(f, policy=policy), X)
        saved = capsys.readouterr().out.splitlines()
        assert len([line for line in saved if "from the argument" not in line]) == len(kept), saved


def test_export_needs_the_disabled_checks():
    with pytest.raises(ValueError, match="custom"):
        export.export(jax.jit(jax_gradops.layer_norm), platforms=["cpu"])(X)


# --- CUDA graphs ---------------------------------------------------------------------------------

# Every kernel in one program, which runs several times with other operands.
GRAPH = """
import hashlib, json
import jax, jax.numpy as jnp, numpy as np
import jax_gradops
@jax.jit
def f(x, scale):
    def loss(x, scale):
        y = jax_gradops.bias_gelu(jax_gradops.layer_norm(x, scale, scale), scale)
        return jnp.sum(jax_gradops.rms_norm(y, scale) ** 2)
    return jax_gradops.clip_tree_by_global_norm(jax.grad(loss, argnums=(0, 1))(x, scale), 1.0)
digest = hashlib.sha256()
for seed in range(4):
    rng = np.random.default_rng(seed)
    x, scale = rng.standard_normal((300, 1000)), rng.standard_normal(1000)
    for leaf in jax.tree.leaves(f(x.astype(np.float32), scale.astype(np.float32))):
        digest.update(np.asarray(leaf).tobytes())
calls = f.lower(jnp.float32(x), jnp.float32(scale)).as_text().count("custom_call @jax_gradops.")
print(json.dumps([digest.hexdigest(), calls]))
"""


@pytest.mark.P2
@pytest.mark.gpu
def test_cuda_graph(tmp_path):
    """XLA captures every kernel in a CUDA graph. Replays and launches give equal results."""
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("no CUDA device")

    def run(name: str, flags: str) -> tuple[list[Any], str]:
        flags += f" --xla_dump_to={tmp_path / name}"
        result = run_python(GRAPH, tmp_path, JAX_PLATFORMS="cuda", XLA_FLAGS=flags)
        dumps = sorted((tmp_path / name).glob("*jit_f*thunk_sequence*"))
        return result, dumps[-1].read_text()  # the last dump is from after XLA's passes over thunks

    (captured, calls), thunks = run("captured", "")
    (launched, _), plain = run("launched", "--xla_gpu_enable_command_buffer=")
    assert captured == launched
    assert "kCommandBuffer" not in plain
    # Calls inside the graph are indented.
    inside = re.findall(r"^ +\d+: kCustomCall", thunks, re.MULTILINE)
    assert "kCommandBuffer" in thunks and len(inside) == calls >= 7


# --- Threads -------------------------------------------------------------------------------------

# 64 independent branches: XLA runs their handlers on the threads of its own pool.
STRESS = """
import hashlib, json, os
if "ONE_CPU" in os.environ:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
import jax_gradops
rng = np.random.default_rng(0)
xs = [rng.standard_normal((257, 129)).astype(np.float32) for _ in range(64)]
w = rng.standard_normal((129, 129)).astype(np.float32) / 16
def f(x, scale):
    y = jax_gradops.layer_norm(jnp.tanh(x @ w), scale)
    return jax_gradops.rms_norm(jax_gradops.bias_gelu(y, scale)).sum()
@jax.jit
def run(xs, scale):
    outs = [jax.value_and_grad(f, argnums=(0, 1))(x, scale) for x in xs]
    return outs, jax_gradops.global_norm(outs)
@jax.jit
def kernels(x, scale):
    y, pull = jax.vjp(jax_gradops.layer_norm, x, scale)
    z, pull_z = jax.vjp(jax_gradops.bias_gelu, y, scale)
    r, pull_r = jax.vjp(jax_gradops.rms_norm, z, scale)
    b, pull_b = jax.vjp(lambda x, s: jax_gradops.batch_norm(x, s)[0], x, scale)
    c, pull_c = jax.vjp(lambda x: jax_gradops.batch_norm(x[..., None], axis=1)[0][..., 0], x)
    clipped = jax_gradops.backward.inplace_clip_by_global_norm([x, y, z], 1.0)
    d = jax_gradops.backward.embedding_backward(x, np.arange(4099) ** 2 % 4099 // 9, 5000)
    return y, z, r, b, c, d, pull(y), pull_z(y), pull_r(y), pull_b(y), pull_c(y), clipped
scale = np.linspace(0.5, 2, 129, dtype=np.float32)
for _ in range(10):
    outs, norm = jax.block_until_ready(run(xs, scale))
x = rng.standard_normal((4099, 129)).astype(np.float32)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(kernels(x, scale)):
    digest.update(np.asarray(leaf).tobytes())
print(json.dumps([digest.hexdigest(), float(norm)]))
"""


@pytest.mark.R6
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_threads_do_not_deadlock_and_do_not_matter(tmp_path):
    """Runs with all threads and with one thread. Results of all kernels are bitwise equal."""
    # XLA's pool has one thread per processor, or one per device if there are more devices.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    many = run_python(STRESS, tmp_path, timeout=240)
    one = run_python(STRESS, tmp_path, timeout=240, ONE_CPU="1", XLA_FLAGS=" ".join(flags))
    assert many[0] == one[0]
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5)  # XLA's matmuls are between the kernels


def test_python_threads(platform):
    """Eight threads that call at the same time get the result of a single thread."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((999, 130)).astype(np.float32) for _ in range(8)]

    @jax.jit
    def f(x: Any) -> Any:
        y, pull = jax.vjp(lambda x, s: jax_gradops.gelu(jax_gradops.layer_norm(x, s)), x, x[0])
        return y, *pull(y), jax_gradops.global_norm(x)

    device = jax.config.jax_default_device

    def run(x: Any) -> list[Any]:
        with jax.default_device(device):
            return [jax.block_until_ready(f(x)) for _ in range(10)]

    expected = [f(x) for x in xs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results, reference in zip(pool.map(run, xs), expected, strict=True):
            for result in results:
                for a, b in zip(result, reference, strict=True):
                    assert_bitwise_equal(a, b)


@pytest.mark.R4
def test_every_device(platform):
    """Kernels run on their operands' device, on all devices at the same time."""
    x = np.random.default_rng(0).standard_normal((333, 1031)).astype(np.float32)

    @jax.jit
    def f(x: Any) -> Any:
        y, pull = jax.vjp(
            lambda x, s: jax_gradops.bias_gelu(jax_gradops.layer_norm(x, s), s), x, x[0]
        )
        return y, *pull(x), jax_gradops.global_norm([x, y])

    expected = f(x)
    devices = jax.devices("gpu" if platform == "cuda" else "cpu")[:4]
    mixed = [*reversed(devices), *devices, *devices[::2]] * 3
    arrays = [jax.device_put(x, device) for device in mixed]
    for device, results in zip(mixed, list(map(f, arrays)), strict=True):
        assert results[0].devices() == {device}
        for a, b in zip(results, expected, strict=True):
            assert_bitwise_equal(a, b)


@pytest.mark.R4
def test_every_device_from_its_own_thread(platform):
    """A thread's current device is not the device of the operands."""
    x = np.random.default_rng(0).standard_normal((333, 1031)).astype(np.float32)
    f = jax.jit(lambda x: (jax_gradops.rms_norm(x), jax_gradops.global_norm([x, x])))
    expected = f(x)
    devices = jax.devices("gpu" if platform == "cuda" else "cpu")[:4]

    def run(i: int) -> list[Any]:
        array = jax.device_put(x, devices[i % len(devices)])
        return [jax.block_until_ready(f(array)) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in pool.map(run, range(8)):
            for result in results:
                for a, b in zip(result, expected, strict=True):
                    assert_bitwise_equal(a, b)


def test_out_of_memory(platform):
    """The error says that memory is missing. The next call works."""
    memory = jax.devices("gpu")[0].memory_stats() if platform == "cuda" else None
    rows = (memory or {"bytes_limit": 2**60})["bytes_limit"] // 2**12

    @jax.jit
    def f(x: Any) -> Any:
        rows_ = x[None] + jnp.zeros((rows, 1), x.dtype)
        y, pull = jax.vjp(lambda x, s: jax_gradops.layer_norm(x, s), rows_, x)
        return y, *pull(y)

    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    expected = jax_gradops.layer_norm(x)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: Out of memory"):
            jax.block_until_ready(f(x))
        assert_bitwise_equal(jax_gradops.layer_norm(x), expected)
