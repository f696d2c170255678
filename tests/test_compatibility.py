"""CUDA kernels that cannot run here leave working JAX, the CPU's kernels, and one message.

The GPUs and drivers are made up: what is asked of `_cuda` is in its stub. For CPU modules that
cannot be loaded see test_core.py.
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
from jax import export

import jax_gradops
from jax_gradops import _registry
from jax_gradops._cli import doctor, info

FFI = _registry.runtime_ffi_version()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a CUDA module, of this build, for these GPUs; returns the warnings so far."""
    caught: list[str] = []

    def install(build: str, devices: Any, ffi_api_version: Any = FFI, chosen: Any = None) -> None:
        module: Any = types.SimpleNamespace(
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
    """Values, and that they are the kernels'."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(lambda x: jax.vjp(jax_gradops.layer_norm, x)[1](x)).lower(x).compile()
        y = jax_gradops.layer_norm(x)
    assert "jax_gradops.layer_norm_bwd" in (compiled.as_text() or "")
    np.testing.assert_allclose(y, [[-1.2247438, 0, 1.2247438]] * 2, rtol=1e-5)


def for_cuda() -> str:
    """A program for GPUs, made here."""
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
    """CUDA is not to be started."""
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
    """Or could, where there is no GPU: programs for GPUs may be made there."""
    install, caught = cuda
    install(build, devices, chosen=chosen)
    check_cpu()
    assert "jax_gradops.layer_norm_fwd" in for_cuda()
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
    """As JAX sees them; on a machine without a driver there are none, and nothing fails."""
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
