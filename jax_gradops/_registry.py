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

# XLA's name of the platform, and the module that carries its kernels. The keys are the names that
# `jax.lax.platform_dependent` takes.
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

    Registering a handler that is too new succeeds, and then every JAX call of the process fails
    ("Unable to initialize backend"), so this is asked first.
    """
    if compiled[0] == runtime[0] and compiled[1] <= runtime[1]:
        return None
    return (
        f"it was built for XLA FFI API {compiled[0]}.{compiled[1]}, the installed jaxlib has "
        f"{runtime[0]}.{runtime[1]}: install a newer jaxlib, or build jax_gradops against this one"
    )


def _built_without(platform: str) -> str:
    """With the build's own reason, which the CPU module carries: pip does not show the build."""
    reason = getattr(sys.modules.get("jax_gradops._cpu"), "cuda_skipped", "")
    return f"jax_gradops was built without {platform.upper()}" + (f": {reason}" if reason else "")


def _of_cpu_level(baseline: ModuleType) -> ModuleType:
    """The CPU module for the highest level of x86-64 that the processor has, or the one asked for.

    Each is built from the same sources. Code of a level that the processor lacks would crash.
    """
    supported: dict[str, bool] = baseline.cpu_levels  # from the lowest, the baseline's
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


def _load(platform: str) -> tuple[ModuleType | None, str]:
    """Loads and registers one backend. Returns its module, or None and the reason."""
    xla_platform, name = _BACKENDS[platform]
    try:
        module = importlib.import_module(f"jax_gradops.{name}")
        if platform == "cpu":
            module = _of_cpu_level(module)
    except ModuleNotFoundError:
        if platform != "cpu":
            return None, _built_without(platform)
        # The CPU module is always built, so this is a source folder that hides the installed one.
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
    for handler_name, handler in module.registrations().items():
        jax.ffi.register_ffi_target(TARGET_PREFIX + handler_name, handler, platform=xla_platform)
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


# Of the Python code, as it is imported: the files may be others when an op is first traced.
_SOURCES = _digest(_sources())


@functools.cache
def identity(platform: str) -> str:
    """What the results of a platform's kernels depend on beside arrays: a digest of the code.

    For the persistent compilation cache, in which a program of another build may be.
    """
    return _digest([Path(MODULES[platform].__file__ or "")], _SOURCES).hex()


def platforms() -> tuple[str, ...]:
    """Platforms that have kernels here. Not for use at import: it looks at the machine's GPUs."""
    return tuple(p for p in MODULES if p != "cuda" or _why_gpus_cannot() is None)


def covers(build: str, architecture: int) -> bool:
    """Whether kernels built for these architectures ("80-real,90") run on such a GPU.

    Machine code ("80-real") runs on GPUs of the same generation that are as new or newer, PTX
    ("80-virtual") on all that are as new or newer; without a suffix there are both. "90a" is for
    one architecture, "100f" for one generation.
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
    """Why kernels of this build cannot run on these GPUs; None if they can, or if there is none.

    `driver` and `runtime` are CUDA versions as in 13000: that which the driver knows, 0 without
    one, and that of the build.
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
    """Asked when an op is first traced, as CUDA's start takes time; with one warning."""
    module, chosen = MODULES["cuda"], jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen and not {"cuda", "gpu"}.intersection(chosen.split(",")):
        return None
    reason = gpu_mismatch(module.build_info, *module.devices())
    if reason is not None:
        warnings.warn(f"jax_gradops: {reason}. Using XLA's own operations.", stacklevel=2)
    return reason


def canonical_platform(platform: str) -> str:
    """JAX's names of platforms ("gpu", "CUDA", …) to `platform_dependent`'s."""
    platform = platform.lower()
    if platform != "gpu":
        return platform
    try:
        devices = jax.devices("gpu")
    except (RuntimeError, AssertionError):  # AssertionError: jax 0.10, JAX_PLATFORMS=cuda
        return "cuda"  # there is none here
    return "rocm" if any("rocm" in d.client.platform_version for d in devices) else "cuda"


def why_unavailable(platform: str) -> str | None:
    """None if `platform` has kernels here, else the reason why not."""
    platform = canonical_platform(platform)
    if platform in MODULES:
        return _why_gpus_cannot() if platform == "cuda" else None
    if platform in _loaded:
        return _loaded[platform][1]
    return f"jax_gradops has no kernels for platform {platform!r}"
