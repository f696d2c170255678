"""``python -m jax_gradops doctor``: runs every op on every device and checks the results.

Forward and backward results are compared with float64 NumPy. If a kernel should be in use, the
compiled program must call it. The command never crashes: an exception becomes a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_gradops import _registry, implementation_in_use
from jax_gradops._cli import cases, info
from jax_gradops._oracles import Reference

BUILD_CUDA = (
    "to build the CUDA kernels, install from the source folder where nvcc 12.8 or newer is: "
    'JAX_GRADOPS_CUDA=ON pip install --force-reinstall --no-deps ".[cuda13]"'
)

#: Part of an error message, and the likely cause.
CAUSES = {
    "no kernel image": "the CUDA kernels were built for another GPU architecture",
    "invalid device function": "the CUDA kernels were built for another GPU architecture",
    "unsupported toolchain": "the NVIDIA driver is older than the CUDA version of the build",
    "driver version is insufficient": "the NVIDIA driver is older than the CUDA version needs",
    "no registered implementation": "the native handlers were not registered with JAX",
    "No FFI handler registered": "the native handlers were not registered with JAX",
    "RESOURCE_EXHAUSTED": "the device is out of memory: another process may hold it",
    "out of memory": "the device is out of memory: another process may hold it",
}


@dataclasses.dataclass
class Check:
    """One op on one device in one dtype.

    Attributes:
      error: the error of the result that is nearest to failing, as a fraction of that result's
        largest value. None if it is not a number.
      tolerance: the largest allowed `error` of that result.
      message: why the check failed. Empty if it passed.
    """

    device: str
    title: str
    dtype: str
    implementation: str
    error: float | None = None
    tolerance: float | None = None
    message: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the checks and prints them; returns 0 if all is right, else 1."""
    environment = info.collect()
    devices, _ = info.find_devices()
    if not args.json:
        print(info.describe(environment))
    checks: list[Check] = []
    for device in devices:
        if not args.json:
            print(f"\n{device} ({device.device_kind}): largest error / tolerance")
        for case in cases.all_cases():
            row = [check(case, dtype, device) for dtype in cases.DTYPES]
            checks += row
            if not args.json:
                print(describe(row), flush=True)
    failures = [*installation_failures(environment), *failed_checks(checks)]
    warnings = installation_warnings(environment)
    if args.json:
        report = {
            "ok": not failures,
            "failures": failures,
            "warnings": warnings,
            "checks": [dataclasses.asdict(c) for c in checks],
            "environment": environment,
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n" + verdict(failures, warnings))
    return 1 if failures else 0


# --- One check -----------------------------------------------------------------------------------


def check(case: cases.Case, dtype: str, device: info.Device) -> Check:
    """Runs `case` on `device`. The result's `message` says what went wrong."""
    result = Check(str(device), case.title, dtype, "unknown")
    try:
        in_use = implementation_in_use(case.spec.name, device.platform)
        result.implementation = in_use.implementation
        _run(case, dtype, device, result)
    except Exception as error:  # any error: the other checks go on
        result.message = f"{type(error).__name__}: {error}".strip()
    return result


def _run(case: cases.Case, dtype: str, device: info.Device, result: Check) -> None:
    form, problems = case.form, case.problems(dtype)
    rng = np.random.default_rng(1)
    inputs = []
    for operands, options in problems:
        call = functools.partial(form.call, **form.options, **options)
        cotangents = jax.tree.map(
            lambda y: np.asarray(rng.standard_normal(y.shape)).astype(y.dtype),
            jax.eval_shape(call, *operands),
        )
        inputs.append((cotangents, *operands))

    def program(inputs: list[tuple[Any, ...]]) -> list[Any]:
        return [
            form.value_and_vjp(*arrays, **options)
            for arrays, (_, options) in zip(inputs, problems, strict=True)
        ]

    # Compiled even with JAX_DISABLE_JIT: only a compiled program shows what it calls.
    with jax.default_device(device), jax.disable_jit(False):
        compiled = jax.jit(program).lower(jax.device_put(inputs, device)).compile()
        text = compiled.as_text() or ""
        got = jax.tree.leaves(jax.device_get(compiled(jax.device_put(inputs, device))))
    want: list[Reference] = []
    for arrays, (_, options) in zip(inputs, problems, strict=True):
        cotangents, *operands = jax.tree.map(lambda x: x.astype(np.float64), arrays)
        want += form.expected(*operands, **options)
        want += form.expected_gradients(cotangents, *operands, **options)
    ratios = [_error(*pair, dtype, form.roundings) for pair in zip(got, want, strict=True)]
    result.error, result.tolerance = max(
        ratios, key=lambda r: math.inf if r[0] is None else r[0] / r[1]
    )
    targets = [_registry.TARGET_PREFIX + kernel.name for kernel in form.kernels]
    missing = [target for target in targets if f'"{target}"' not in text]
    if result.error is None:
        result.message = "a result is not finite, or has the wrong shape"
    elif result.error > result.tolerance:
        result.message = f"error {result.error:.1e} exceeds the tolerance {result.tolerance:.1e}"
    elif result.implementation == "ffi" and missing:
        result.message = f"the compiled program does not call {' nor '.join(missing)}"


def _error(
    got: np.ndarray, want: Reference, dtype: str, roundings: int
) -> tuple[float | None, float]:
    """Error and tolerance of a result, as fractions of its largest value. x has this dtype."""
    # For float32 sums of a few thousand terms. A rounding to the dtype adds half an epsilon.
    tolerance = 32 * float(jnp.finfo(jnp.float32).eps)
    if dtype != "float32":
        roundings += got.dtype != jnp.float32
        tolerance += roundings * float(jnp.finfo(dtype).eps) / 2
    if got.shape != want.value.shape:
        return None, tolerance
    difference = np.max(np.abs(got.astype(np.float64) - want.value) - want.error)
    error = float(difference / max(np.max(np.abs(want.value)), 1e-30))
    return (error if math.isfinite(error) else None), tolerance


# --- What it means -------------------------------------------------------------------------------


def failed_checks(checks: list[Check]) -> list[str]:
    """One text per failure, with its likely cause."""
    failures = []
    for message in dict.fromkeys(c.message for c in checks if c.message):
        where = [c for c in checks if c.message == message]
        titles = ", ".join(dict.fromkeys(c.title for c in where))
        devices = ", ".join(dict.fromkeys(c.device for c in where))
        failures.append(f"{titles} on {devices}: {_first_line(message)}. {_cause(message, where)}")
    return failures


def _cause(message: str, where: list[Check]) -> str:
    for part, cause in CAUSES.items():
        if part.lower() in message.lower():
            return f"Likely cause: {cause}" + (f"; {BUILD_CUDA}" if "built for" in cause else "")
    if where[0].implementation == "ffi":
        return 'implementation="xla" avoids the kernels; please report it with the output of --json'
    return "The native kernels took no part: look at the installation of jax and its plugins"


def installation_failures(environment: dict[str, Any]) -> list[str]:
    """Why nothing can run, or no native kernel."""
    failures = []
    if environment["error"]:
        failures.append(
            f"JAX finds no device: {environment['error']}. Check JAX_PLATFORMS, and that the "
            "versions of jax, jaxlib and the CUDA plugin agree"
        )
    if reason := environment["kernels"]["cpu"]["reason"]:
        text = f"there are no CPU kernels: {reason}"
        if "no native module" in reason:
            text += (
                ". This source folder hides the installed package, or nothing is installed: start "
                "Python elsewhere, or run `pip install -e .` here"
            )
        failures.append(text)
    reason = environment["kernels"]["cuda"]["reason"]
    if reason and "built without" not in reason:  # the library exists, but does not load
        failures.append(f"there are no CUDA kernels: {reason}")
    return failures


def installation_warnings(environment: dict[str, Any]) -> list[str]:
    """What works, but not as well as it could."""
    warnings = []
    gpus = [d for d in environment["devices"] if d["platform"] == "gpu"]
    nvidia = [d for d in gpus if _registry.canonical_platform("gpu") == "cuda"]
    reason = environment["kernels"]["cuda"]["reason"]
    if nvidia and reason and "built without" in reason:
        warnings.append(f"{nvidia[0]['kind']} runs XLA's own operations, as {reason}; {BUILD_CUDA}")
    if not gpus and Path("/dev/nvidia0").exists() and not environment["error"]:
        warnings.append(
            "this machine has an NVIDIA GPU that JAX does not use: "
            'pip install "jax[cuda13]" (or cuda12), and check JAX_PLATFORMS and '
            "CUDA_VISIBLE_DEVICES"
        )
    return warnings


# --- Text ----------------------------------------------------------------------------------------


def describe(row: list[Check]) -> str:
    """One line: an op on one device, in all dtypes."""
    failed = [c for c in row if c.message]
    implementation = {"ffi": "kernel", "xla": "XLA"}.get(row[0].implementation, "?")
    columns = [f"{'FAIL' if failed else 'ok':<4}", f"{row[0].title:<24}", f"{implementation:<6}"]
    for c in row:
        numbers = "-" if c.error is None else f"{c.error:.1e} / {c.tolerance:.1e}"
        columns.append(f"{c.dtype} {numbers:<17}")
    if failed:
        columns.append(_first_line(failed[0].message))
    return "  ".join(columns).rstrip()


def verdict(failures: list[str], warnings: list[str]) -> str:
    """The outcome of all checks, as text."""
    lines = [f"warning: {w}" for w in warnings] + [f"FAIL: {f}" for f in failures]
    if failures:
        lines.append(f"{len(failures)} problem{'s' if len(failures) > 1 else ''} found.")
    else:
        lines.append("All ops give right results on all devices.")
    return "\n".join(lines)


def _first_line(message: str) -> str:
    line = message.splitlines()[0]
    return line if len(line) <= 200 else line[:197] + "..."
