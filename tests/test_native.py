"""The native handlers without JAX: `tests/native` calls them with call frames made by hand.

It also tests malformed calls, memory next to an unreadable page, sanitizers, and stress of the
thread pool. CONTRIBUTING.md says how to run these tests longer.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from jax_gradops import _registry
from jax_gradops._tools import testing

NATIVE = Path(__file__).parent / "native"
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not jaxlib.__version__.startswith("0.10."),
        reason="call frames are made as jaxlib 0.10 declares them, which the library is built with",
    ),
]
LEVELS = [level for level, usable in _registry.MODULES["cpu"].cpu_levels.items() if usable] or [""]
SECONDS = 900  # the limit for each program and build; builds take minutes on a busy machine
# Most of the time is compilation of kernels with sanitizers. Without optimisation and without
# checks of each pointer it takes half the time. `make native` has both.
OPTIONS = "-O0 -fno-sanitize=null,alignment,object-size,vptr"


def run(command: list[str], **environment: str) -> str:
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | environment,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{command} gave {result.returncode}:\n{output[-4000:]}"
    assert "FAILED" not in output, output
    return output


@pytest.fixture(scope="module")
def build() -> Path:
    """The folder in which drivers are built."""
    folder = NATIVE.parents[1] / "build" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("make"):
        pytest.skip("make is needed to build the driver")
    return folder


def make(build: Path, target: str) -> None:
    """Builds a driver. A lock keeps pytest-xdist's workers from building shared parts at once."""
    folders = [f"BUILD={build}", f"JAXLIB={Path(jaxlib.__file__).parent}"]
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(["make", "-C", str(NATIVE), "library", *folders])
    run(["make", "-C", str(NATIVE), target, *folders], OPTIONS=OPTIONS)


def module_of(level: str) -> str:
    return path_of("_cpu" if level in ("v2", "") else f"_cpu_{level}")


def path_of(name: str) -> str:
    spec = importlib.util.find_spec(f"jax_gradops.{name}")
    assert spec is not None and spec.origin is not None
    return spec.origin


def test_built_modules(build):
    """Modules of every level that this processor has. Results without exponentials are equal."""
    make(build, "library")
    command = [sys.executable, "-P", str(NATIVE / "host.py"), str(build / "library/driver.so")]
    if "cpu" in testing.MODULES:
        run([*command, path_of("_testing_cpu"), "malformed", "memory", "threads"])
    results = {}
    for level in LEVELS:
        output = run([*command, module_of(level), "malformed", "memory", "threads"])
        handlers = set(_registry.MODULES["cpu"].registrations())
        assert set(re.findall(r"malformed (\w+): \d{2,} calls", output)) == handlers
        found = dict(re.findall(r"memory (\w+): \d{2,} calls, results (\w{16})", output))
        assert found.keys() == handlers
        assert re.search(r"threads: \d{2,} calls", output)
        fused = ("gelu", "softmax", "group_norm")  # formulas with fused products and sums
        results[level] = {
            op: bits for op, bits in found.items() if not any(word in op for word in fused)
        }
    assert all(found == results[LEVELS[0]] for found in results.values()), results


@pytest.mark.parametrize(
    ("sanitizer", "checks"),
    [("asan", ["malformed", "memory-short", "allocations"]), ("tsan", ["threads-short"])],
)
def test_sanitizers(build, sanitizer, checks):
    """Address and undefined-behaviour sanitizers, and the thread sanitizer for data races."""
    make(build, sanitizer)
    assert "\n0 failures" in run([str(build / sanitizer / "driver"), *checks])
