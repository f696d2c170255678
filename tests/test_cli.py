"""`python -m jax_gradops info` and `doctor`, as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

import jax_gradops
from jax_gradops import _status
from jax_gradops.__main__ import main
from jax_gradops._cli import info


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    # CPU only: GPU hosts run the doctor on all devices in `make test-gpu`.
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "jax_gradops", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean | env,
    )


def test_info() -> None:
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    text = json.dumps(json.loads(result.stdout))
    assert jax_gradops.__version__ in text
    assert all(op in text for op in _status.OPS)
    assert "0.1.0" in run("--version").stdout


def test_doctor_is_content_with_this_installation() -> None:
    result = run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout
    assert result.stdout.count("kernel") >= 9  # the kernels ran, not XLA in their place


def test_doctor_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    right = jax_gradops.rms_norm
    monkeypatch.setattr(info, "find_devices", lambda: (jax.devices("cpu")[:1], None))
    monkeypatch.setattr(jax_gradops, "rms_norm", lambda *a, **k: right(*a, **k) * 1.001)
    assert main(["doctor", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert "rms_norm" in json.dumps(output) and "FAIL" in json.dumps(output).upper()


@pytest.mark.parametrize("args", [["nonsense"], ["info", "--no-such-option"]])
def test_mistakes_are_explained(args: list[str]) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert "error" in result.stderr and "Traceback" not in result.stderr
