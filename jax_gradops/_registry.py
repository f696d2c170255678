"""Loads the native modules that fit the installed jaxlib, and registers their handlers."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import jax

TARGET_PREFIX = "jax_gradops."
CPU_LEVEL = "JAX_GRADOPS_CPU_LEVEL"

# The keys are platform names for `jax.lax.platform_dependent`. The values are XLA's name of the
# platform and the module with its kernels.
_BACKENDS = {"cpu": ("cpu", "_cpu"), "cuda": ("CUDA", "_cuda")}


def runtime_ffi_version() -> tuple[int, int]:
    """The FFI API version (major, minor) of the installed jaxlib, from its own header."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = [
        re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR")
    ]
    major, minor = (int(match.group(1)) for match in found if match)
    return major, minor


def mismatch(compiled: tuple[int, int], runtime: tuple[int, int]) -> str | None:
    """Why handlers compiled against `compiled` cannot run on `runtime`; None if they can.

    Registering a handler that is too new succeeds. After that, every JAX call of the process fails
    ("Unable to initialize backend"). So call this before registering.
    """
    if compiled[0] == runtime[0] and compiled[1] <= runtime[1]:
        return None
    return (
        f"it was built for XLA FFI API {compiled[0]}.{compiled[1]}, the installed jaxlib has "
        f"{runtime[0]}.{runtime[1]}: install a newer jaxlib, or build jax_gradops against this one"
    )


def _built_without(platform: str) -> str:
    """Why a module is missing. The CPU module has the build's reason: pip does not show it."""
    reason = getattr(sys.modules.get("jax_gradops._cpu"), "cuda_skipped", "")
    return f"jax_gradops was built without {platform.upper()}" + (f": {reason}" if reason else "")


def _of_cpu_level(baseline: ModuleType) -> ModuleType:
    """The CPU module for the processor's highest x86-64 level, or for the level in `CPU_LEVEL`.

    All are built from the same sources. Code for a level that the processor lacks would crash.
    """
    supported: dict[str, bool] = baseline.cpu_levels  # lowest first: the baseline's
    usable = [level for level, has_it in supported.items() if has_it]
    level = os.environ.get(CPU_LEVEL) or (usable[-1] if usable else None)
    if level is None:
        return baseline
    if level not in supported:
        known = f"must be one of {', '.join(supported)}" if supported else "is for x86-64 only"
        raise ValueError(
            f"jax_gradops: the environment variable {CPU_LEVEL} {known}, got {level!r}"
        )
    if level not in usable:
        raise ValueError(
            f"jax_gradops: {CPU_LEVEL}={level}, but this processor has only {', '.join(usable)} of "
            "x86-64: unset it, and the best one is used"
        )
    if level == usable[0]:
        return baseline
    return importlib.import_module(f"{baseline.__name__}_{level}")


def register(module: ModuleType, platform: str) -> None:
    """Registers all handlers of a native module with XLA."""
    for name, handler in module.registrations().items():
        jax.ffi.register_ffi_target(TARGET_PREFIX + name, handler, platform=_BACKENDS[platform][0])


def _load(platform: str) -> tuple[ModuleType | None, str]:
    """Loads and registers one backend. Returns its module, or None and the reason."""
    name = _BACKENDS[platform][1]
    try:
        module = importlib.import_module(f"jax_gradops.{name}")
        if platform == "cpu":
            module = _of_cpu_level(module)
    except ModuleNotFoundError:
        if platform != "cpu":
            return None, _built_without(platform)
        # The CPU module is always built: this is a source folder that hides the installation.
        reason = f"no native module in {Path(__file__).parent}"
        warnings.warn(
            f"jax_gradops: {reason}: this is a source folder, not an installation. Install it "
            "(`pip install -e .`), or start Python elsewhere. Using XLA's own operations.",
            stacklevel=2,
        )
        return None, reason
    except ImportError as error:
        reason = f"jax_gradops.{name} cannot be loaded: {error}"
        warnings.warn(f"{reason}. Using XLA's own operations.", stacklevel=2)
        return None, reason
    reason = mismatch(tuple(module.ffi_api_version), runtime_ffi_version())
    if reason is not None:
        warnings.warn(
            f"jax_gradops: the native {platform} library does not fit: {reason}. "
            "Using XLA's own operations.",
            stacklevel=2,
        )
        return None, reason
    register(module, platform)
    return module, ""


_loaded = {platform: _load(platform) for platform in _BACKENDS}

#: The loaded native modules by platform.
MODULES: dict[str, ModuleType] = {p: module for p, (module, _) in _loaded.items() if module}


def _digest(paths: Iterable[Path], start: bytes = b"") -> bytes:
    digest = hashlib.sha256(start)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.digest()


def _sources() -> list[Path]:
    package = Path(__file__).parent
    return sorted(p for g in ("*.py", "_kernel/*.py", "_ops/**/*.py") for p in package.glob(g))


# The Python code at import: the files may have changed when an op is first traced.
_SOURCES = _digest(_sources())


@functools.cache
def identity(platform: str) -> str:
    """A digest of all code that the results of a platform's kernels depend on.

    The persistent compilation cache needs it: the cache may hold a program of another build.
    """
    return _digest([Path(MODULES[platform].__file__ or "")], _SOURCES).hex()


def platforms() -> tuple[str, ...]:
    """Platforms that have kernels here. Do not call it at import: it looks at the GPUs."""
    return tuple(p for p in MODULES if p != "cuda" or _why_gpus_cannot() is None)


def covers(build: str, architecture: int) -> bool:
    """Whether kernels built for these architectures ("80-real,90") run on a GPU of `architecture`.

    "80-real" is machine code. It runs on equal or newer GPUs of its generation. "80-virtual" is
    PTX. It runs on all equal or newer GPUs. Without a suffix, the build has both. "90a" is for one
    architecture, "100f" for one generation.
    """
    for entry in build.split(","):
        name, _, kind = entry.partition("-")
        built = int(name.rstrip("af"))
        if built == architecture:
            return True
        same_generation = built // 10 == architecture // 10 and not name.endswith("a")
        if built < architecture and (same_generation or (name.isdigit() and kind != "real")):
            return True
    return False


def gpu_mismatch(build: str, architectures: list[int], driver: int, runtime: int) -> str | None:
    """Why kernels of this build cannot run on these GPUs; None if they can, or without a GPU.

    `driver` is the CUDA version that the driver knows: 13000 is CUDA 13.0, 0 is no driver.
    `runtime` is the CUDA version of the build.
    """
    if 0 < driver // 1000 < runtime // 1000:
        return (
            f"the NVIDIA driver knows CUDA {driver // 1000}, and the CUDA kernels were built for "
            f"GPUs with CUDA {runtime // 1000}: install a newer driver"
        )
    lacking = sorted(a for a in set(architectures) if not covers(build, a))
    if not lacking:
        return None
    return (
        f"the CUDA kernels were built for GPUs of architecture {build}, and this machine's has "
        f"{', '.join(map(str, lacking))}: build them for it (JAX_GRADOPS_CUDA_ARCHITECTURES)"
    )


@functools.cache
def _why_gpus_cannot() -> str | None:
    """`gpu_mismatch` of this machine, with one warning. Not for import: CUDA starts slowly."""
    module, chosen = MODULES["cuda"], jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen and not {"cuda", "gpu"}.intersection(chosen.split(",")):
        return None
    reason = gpu_mismatch(module.build_info, *module.devices())
    if reason is not None:
        warnings.warn(f"jax_gradops: {reason}. Using XLA's own operations.", stacklevel=2)
    return reason


def canonical_platform(platform: str) -> str:
    """Turns JAX's platform name ("gpu", "CUDA", …) into a name for `platform_dependent`."""
    platform = platform.lower()
    if platform != "gpu":
        return platform
    try:
        devices = jax.devices("gpu")
    except (RuntimeError, AssertionError):  # AssertionError: jax 0.10, JAX_PLATFORMS=cuda
        return "cuda"  # there is no GPU here
    return "rocm" if any("rocm" in d.client.platform_version for d in devices) else "cuda"


def why_unavailable(platform: str) -> str | None:
    """Why `platform` has no kernels here; None if it has."""
    platform = canonical_platform(platform)
    if platform in MODULES:
        return _why_gpus_cannot() if platform == "cuda" else None
    if platform in _loaded:
        return _loaded[platform][1]
    return f"jax_gradops has no kernels for platform {platform!r}"
