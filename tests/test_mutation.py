"""The faults of tests/mutation can be put into the sources. `make mutate` runs them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "mutation"))

import faults  # noqa: E402
import run  # noqa: E402


@pytest.mark.parametrize("fault", faults.CPU + faults.CUDA, ids=lambda f: f"{f.path}: {f.name}")
def test_fault_can_be_applied(fault):
    """The text that a fault replaces occurs once. The tests that must find the fault exist."""
    assert fault.applied((ROOT / fault.path).read_text())
    assert (fault in faults.CUDA) == fault.path.startswith("ffi/cuda/")
    *files, option, _ = shlex.split(fault.tests)
    assert option == "-k" and all((ROOT / file).is_file() for file in files)


def test_faults_have_names():
    names = [(f.path, f.name) for f in faults.CPU + faults.CUDA]
    assert len(names) == len(set(names))
    assert len(faults.CPU) >= 25 and len(faults.CUDA) >= 10


def test_copy_has_what_the_build_reads():
    """`run.py` builds a copy of some folders. CMakeLists.txt reads no other folder."""
    read = set(re.findall(r"\b(\w+)/", (ROOT / "CMakeLists.txt").read_text()))
    assert {name for name in read if (ROOT / name).is_dir()} <= set(run.COPIED) | {"build"}
