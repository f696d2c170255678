"""Native modules that cannot be loaded, or whose kernels cannot run here.

JAX and the other kernels must still work, and one message must explain the reason. GPUs and drivers
are simulated: a stub of `_cuda` returns their properties.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fresh_process import run_python
from jax import export

import jax_gradops
from jax_gradops import _registry
from jax_gradops._cli import doctor, info

pytestmark = pytest.mark.newest_jax

# --- Loading the native modules ------------------------------------------------------------------


@pytest.mark.P1
@pytest.mark.parametrize(
    ("compiled", "runtime", "fits"),
    [
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 4), True),
        ((0, 4), (0, 3), False),
        ((0, 3), (1, 0), False),
        ((1, 0), (0, 3), False),
        ((1, 2), (1, 10), True),
    ],
)
def test_ffi_version_guard(compiled, runtime, fits):
    reason = _registry.mismatch(compiled, runtime)
    assert (reason is None) == fits
    if reason:
        assert f"{compiled[0]}.{compiled[1]}" in reason and f"{runtime[0]}.{runtime[1]}" in reason


def test_runtime_ffi_version():
    """The version is read from the header that handlers are compiled with."""
    major, minor = _registry.runtime_ffi_version()
    assert major == 0 and minor >= 3
    for module in _registry.MODULES.values():
        assert _registry.mismatch(tuple(module.ffi_api_version), (major, minor)) is None


@pytest.mark.parametrize(
    ("levels", "wanted", "expected"),
    [
        ({"v2": True, "v3": True, "v4": False}, None, "_cpu_v3"),
        ({"v2": True, "v3": True, "v4": False}, "", "_cpu_v3"),
        ({"v2": True, "v3": True, "v4": True}, None, "_cpu_v4"),
        ({"v2": True, "v3": True, "v4": True}, "v3", "_cpu_v3"),
        ({"v2": True, "v3": False, "v4": False}, None, "_cpu"),
        ({"v2": True, "v3": True, "v4": False}, "v2", "_cpu"),
        ({"v2": True, "v3": True, "v4": False}, "v4", "has only v2, v3 of x86-64"),
        ({"v2": True, "v3": True, "v4": False}, "V3", "must be one of v2, v3, v4, got 'V3'"),
        ({}, None, "_cpu"),
        ({}, "v3", "is for x86-64 only, got 'v3'"),
    ],
)
def test_cpu_level(levels, wanted, expected, monkeypatch):
    """Selects the best level that the processor supports, or the requested one if supported."""
    baseline: Any = types.SimpleNamespace(__name__="_cpu", cpu_levels=levels)
    monkeypatch.setattr(
        _registry.importlib, "import_module", lambda name: types.SimpleNamespace(__name__=name)
    )
    monkeypatch.delenv(_registry.CPU_LEVEL, raising=False)
    if wanted is not None:
        monkeypatch.setenv(_registry.CPU_LEVEL, wanted)
    if expected.startswith("_cpu"):
        assert _registry._of_cpu_level(baseline).__name__ == expected
    else:
        with pytest.raises(ValueError, match=expected):
            _registry._of_cpu_level(baseline)


BROKEN_MODULE = """
import importlib, json, types, warnings
real = importlib.import_module
def fake(name, package=None):
    if name != "jax_gradops._cpu":
        return real(name, package)
    {failure}
importlib.import_module = fake
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jax_gradops
import jax, jax.numpy as jnp
x = jnp.arange(6.0).reshape(2, 3)
y, pull = jax.vjp(jax_gradops.layer_norm, x)
pull(y)
clipped, norm = jax_gradops.clip_tree_by_global_norm([jax_gradops.gelu(y)], 1.0)
try:
    jax_gradops.layer_norm(x, implementation="ffi")
    error = None
except ValueError as e:
    error = str(e)
text = jax.jit(jax_gradops.rms_norm).lower(x).compile().as_text()
print(json.dumps({{
    "warnings": [str(w.message) for w in caught if "jax_gradops" in str(w.message)],
    "in_use": jax_gradops.implementation_in_use("layer_norm", "cpu"),
    "error": error, "custom_call": "jax_gradops." in text, "y": y.tolist(), "norm": float(norm),
}}))
"""


@pytest.mark.P1
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            "return types.SimpleNamespace(ffi_api_version=(0, 99), cpu_levels={})",
            r"was built for XLA FFI API 0\.99.*installed jaxlib has 0\.\d+: install a newer jaxlib",
        ),
        ("raise ModuleNotFoundError(name)", r"no native module in .*pip install"),
        ("raise ImportError('undefined symbol: f')", r"cannot be loaded: undefined symbol: f"),
    ],
    ids=["too new", "missing", "not loadable"],
)
def test_unusable_native_module(failure, message, tmp_path):
    """JAX stays usable: one warning, XLA's operations, and the error of "ffi" has the reason."""
    result = run_python(BROKEN_MODULE.format(failure=failure), tmp_path)
    (warning,) = result["warnings"]
    assert re.search(message, warning), warning
    assert result["in_use"][0] == "xla"
    assert not result["custom_call"]
    assert result["error"].startswith("layer_norm: implementation='ffi' is not available: ")
    np.testing.assert_allclose(result["y"], [[-1.2247438, 0, 1.2247438]] * 2, rtol=1e-5)
    assert result["norm"] > 0


def test_import_is_light_and_silent(tmp_path):
    """The import loads neither Flax nor Optax, and warns of nothing.

    It starts no backend either: JAX_PLATFORMS names a missing one.
    """
    code = """
import json, sys, warnings
import jax
warnings.simplefilter("error")
import jax_gradops
loaded = {m.partition(".")[0] for m in sys.modules}
try:
    jax.devices()
    started = "it would not have been seen"
except RuntimeError as error:
    started = str(error)
print(json.dumps([sorted(loaded & {"flax", "optax", "orbax", "rich", "matplotlib"}), started]))
"""
    loaded, started = run_python(code, tmp_path, JAX_PLATFORMS="nowhere")
    assert loaded == []
    assert "nowhere" in started


# --- CUDA kernels for other GPUs, drivers and versions --------------------------------------------

FFI = _registry.runtime_ffi_version()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a CUDA module of this build for the given GPUs; returns the warnings so far."""
    caught: list[str] = []

    def install(build: str, devices: Any, ffi_api_version: Any = FFI, chosen: Any = None) -> None:
        module: Any = types.SimpleNamespace(
            __file__=__file__,
            ffi_api_version=ffi_api_version,
            build_info=build,
            registrations=dict,
            devices=devices if callable(devices) else lambda: devices,
        )
        with monkeypatch.context() as m:
            m.setattr(_registry.importlib, "import_module", lambda name: module)
            loaded = _registry._load("cuda")
        monkeypatch.setitem(_registry._loaded, "cuda", loaded)
        monkeypatch.delitem(_registry.MODULES, "cuda", raising=False)
        if loaded[0] is not None:
            monkeypatch.setitem(_registry.MODULES, "cuda", module)
        jax.config.update("jax_platforms", chosen)

    def start() -> None:
        _registry._why_gpus_cannot.cache_clear()
        _registry.identity.cache_clear()
        jax.clear_caches()

    start()
    platforms = jax.config.jax_platforms
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: caught.append(str(message))
        yield install, caught
    jax.config.update("jax_platforms", platforms)
    start()


def check_cpu() -> None:
    """Checks the values, and that the kernels computed them."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(lambda x: jax.vjp(jax_gradops.layer_norm, x)[1](x)).lower(x).compile()
        y = jax_gradops.layer_norm(x)
    assert "jax_gradops.row_norm_bwd" in (compiled.as_text() or "")
    np.testing.assert_allclose(y, [[-1.2247438, 0, 1.2247438]] * 2, rtol=1e-5)


def for_cuda() -> str:
    """A program for GPUs that is compiled on this machine."""
    exported = export.export(
        jax.jit(jax_gradops.layer_norm),
        platforms=["cuda"],
        disabled_checks=jax_gradops.EXPORT_DISABLED_CHECKS,
    )
    return exported(jax.ShapeDtypeStruct((3, 4), jnp.float32)).mlir_module()


@pytest.mark.parametrize(
    ("build", "devices", "ffi_api_version", "message"),
    [
        ("90-real", ([80], 13000, 13000), FFI, "architecture 90-real, and this machine's has 80"),
        ("80-real,120", ([90], 13000, 13000), FFI, "architecture 80-real,120, .* has 90"),
        ("90", ([90, 75], 13000, 13000), FFI, "architecture 90, and this machine's has 75"),
        ("90", ([], 12080, 13000), FFI, "driver knows CUDA 12, .* with CUDA 13: install a newer"),
        ("90", ([90], 13000, 13000), (0, 99), "was built for XLA FFI API 0.99.* a newer jaxlib"),
    ],
    ids=["older GPU", "between", "one older GPU", "older driver", "newer FFI"],
)
def test_cuda_kernels_that_cannot_run(cuda, build, devices, ffi_api_version, message):
    install, caught = cuda
    install(build, devices, ffi_api_version)
    check_cpu()
    assert "jax_gradops." not in for_cuda()
    in_use = jax_gradops.implementation_in_use("layer_norm", "cuda")
    assert in_use.implementation == "xla"
    (warning,) = caught
    assert in_use.reason in warning and warning.endswith("Using XLA's own operations.")
    assert re.search(message, warning), warning
    environment = info.collect()
    assert in_use.reason in info.describe(environment)
    (failure,) = doctor.installation_failures(environment)
    assert in_use.reason in failure


def never() -> Any:
    """CUDA must not be started."""
    raise AssertionError


@pytest.mark.parametrize(
    ("build", "devices", "chosen"),
    [
        ("90-real", ([90, 90], 13000, 13000), None),
        ("80-real,90-real,120", ([80, 86, 89, 90, 121], 13020, 13000), None),
        ("90", ([90, 100, 103, 120], 13000, 13000), None),
        ("90", ([90], 13000, 12080), None),
        ("90", ([], 0, 13000), None),
        ("90", never, "cpu"),
    ],
    ids=["same", "several", "by PTX", "newer driver", "no driver", "only the CPU is asked for"],
)
def test_cuda_kernels_that_can_run(cuda, build, devices, chosen):
    """Kernels are used if they can run. Without a GPU, programs for GPUs may still be made."""
    install, caught = cuda
    install(build, devices, chosen=chosen)
    check_cpu()
    assert "jax_gradops.row_norm_fwd" in for_cuda()
    assert jax_gradops.implementation_in_use("layer_norm", "cuda").implementation == "ffi"
    assert caught == []


@pytest.mark.parametrize(
    ("build", "architecture", "covered"),
    [
        ("80-real", 86, True),
        ("86-real", 80, False),
        ("89-real", 90, False),
        ("90-virtual", 100, True),
        ("90a-real", 90, True),
        ("90a", 100, False),
        ("100f", 103, True),
        ("100f", 120, False),
        ("100-real", 103, True),
        ("80-real,90", 75, False),
    ],
)
def test_what_a_build_covers(build, architecture, covered):
    assert _registry.covers(build, architecture) == covered


@pytest.mark.skipif("cuda" not in _registry.MODULES, reason="built without CUDA")
def test_devices_of_the_cuda_module():
    """The GPUs that JAX sees. A machine without a driver has none, and nothing fails."""
    architectures, driver, runtime = _registry.MODULES["cuda"].devices()
    assert runtime >= 12080
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        gpus = []
    found = {int(d.compute_capability.replace(".", "")) for d in gpus}
    assert found <= set(architectures) and (driver > 0) >= bool(gpus)
    if not gpus:
        assert architectures == [] or driver > 0
