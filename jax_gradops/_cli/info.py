"""``python -m jax_gradops info``: versions, platforms, devices, and what each op runs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import jax

import jax_gradops
from jax_gradops import _registry
from jax_gradops._cli import plan
from jax_gradops._ops.all import SPECS

Device: TypeAlias = Any  # jax.Device: pyright does not accept it as a type
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plan",
        nargs=3,
        metavar=("OP", "SHAPE", "DTYPE"),
        help="print which CUDA kernel runs and how it splits its work, for example for "
        "layer_norm_bwd 32768x5120 bfloat16. No GPU is needed",
    )
    parser.add_argument(
        "--gpu",
        help=f"the GPU for --plan: {', '.join(plan.GPUS)}. Default: this machine's, else h100",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what `collect` found; returns the exit status."""
    if args.plan is not None:
        try:
            print(plan.text(args.plan, args.gpu, as_json=args.json))
        except plan.PlanError as error:
            print(f"jax_gradops info: error: {error}", file=sys.stderr)
            return 2
        return 0
    environment = collect()
    print(json.dumps(environment, indent=2) if args.json else describe(environment))
    return 0


def collect() -> dict[str, Any]:
    """Describes the installation, in values that JSON can hold.

    It never raises: if JAX finds no device, the reason is under ``"error"``.
    """
    devices, error = find_devices()
    return {
        "versions": {
            "jax_gradops": jax_gradops.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "location": str(Path(jax_gradops.__file__).parent),
        "ffi_api": {
            "runtime": ".".join(map(str, _registry.runtime_ffi_version())),
            "compiled": {
                name: ".".join(map(str, module.ffi_api_version))
                for name, module in _registry.MODULES.items()
            },
        },
        "kernels": {name: _kernels(name) for name in ("cpu", "cuda")},
        "devices": [_device(device) for device in devices],
        "error": error,
        "threads": usable_cpus(),
        "ops": {} if error else _implementations(sorted({d.platform for d in devices})),
    }


def find_devices() -> tuple[list[Device], str | None]:
    """All devices of the process, with the CPU beside an accelerator; or why JAX finds none."""
    try:
        devices = jax.devices()
    except Exception as error:  # a plugin may raise anything
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        wanted = os.environ.get("JAX_PLATFORMS")  # JAX 0.10 leaves it out of its message
        return [], f"{reason} (JAX_PLATFORMS={wanted})" if wanted else reason
    if all(device.platform != "cpu" for device in devices):
        try:
            devices = [*devices, *jax.devices("cpu")]
        except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
            pass
    return [d for d in devices if d.process_index == jax.process_index()], None


def usable_cpus() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture if the name is unknown."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)", cpuinfo.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1] if found else platform.machine()


def describe(environment: dict[str, Any]) -> str:
    """The result of `collect`, as text."""
    versions = (f"{name} {v or 'not installed'}" for name, v in environment["versions"].items())
    lines = [
        ("versions", ", ".join(versions)),
        ("location", environment["location"]),
        ("XLA FFI API", _describe_ffi(environment["ffi_api"])),
    ]
    for name, kernels in environment["kernels"].items():
        text = kernels["reason"] or f"available, built for {kernels['build']}"
        lines.append((f"{name} kernels", text))
    for device in environment["devices"]:
        lines.append(("device", f"{device['name']}: {device['kind']}"))
    if environment["error"]:
        lines.append(("devices", f"none: {environment['error']}"))
    lines.append(("CPU threads", str(environment["threads"])))
    for name, platforms in environment["ops"].items():
        in_use = (f"{p}: {use['implementation']}" for p, use in platforms.items())
        lines.append((name, ", ".join(in_use)))
    width = max(len(title) for title, _ in lines)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in lines)


def version(package: str) -> str | None:
    """An installed package's version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels(name: str) -> dict[str, str | None]:
    """``"build"`` is the SIMD level in use, or the CUDA architectures."""
    module = _registry.MODULES.get(name)
    return {
        "build": None if module is None else module.build_info.replace("-real", ""),
        "reason": _registry.why_unavailable(name),
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": str(device),
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
    }


def _implementations(platforms: list[str]) -> dict[str, dict[str, dict[str, str]]]:
    return {
        op: {p: jax_gradops.implementation_in_use(op, p)._asdict() for p in platforms}
        for op in SPECS
    }


def _describe_ffi(versions: dict[str, Any]) -> str:
    compiled = (f"{name} kernels built for {v}" for name, v in versions["compiled"].items())
    return ", ".join([f"installed jaxlib has {versions['runtime']}", *compiled])
