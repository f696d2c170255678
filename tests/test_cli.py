"""The commands `python -m jax_gradops info` and `doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Literal

import jax
import pytest

import jax_gradops
from jax_gradops import _registry
from jax_gradops.__main__ import COMMANDS, main
from jax_gradops._cli import NO_READER, cases, doctor, info, plan
from jax_gradops._ops.all import SPECS

ROOT = Path(__file__).parents[1]
CPU_LEVELS = [level for level, usable in _registry.MODULES["cpu"].cpu_levels.items() if usable]


def run(*args: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    # CPU only: on GPU hosts, `make test-gpu` runs the doctor on all devices.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    clean = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "jax_gradops", *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        env=clean | env,
    )


def test_info() -> None:
    result = run("info", "--json")
    assert result.returncode == 0, result.stderr
    text = json.dumps(json.loads(result.stdout))
    assert jax_gradops.__version__ in text
    assert all(op in text for op in SPECS)
    assert run("--version").stdout.strip() == jax_gradops.__version__


PLANS = [
    f"{op}_{direction} {shape} {dtype}"
    for op, spec in SPECS.items()
    if spec.plan
    for direction in ("fwd", "bwd")
    for shape, dtype in (("64x7", "float32"), ("8x3x4096", "bfloat16"), ("4x70000", "float64"))
]


@pytest.mark.parametrize("words", PLANS)
def test_plan(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each plan names a kernel and its file, and explains its numbers. No GPU is needed."""
    assert main(["info", "--plan", *words.split(), "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    found = re.search(r"^kernel: (\w+), in (ffi/cuda/\S+)$", text, re.MULTILINE)
    assert found and f" {found[1]}(" in (ROOT / found[2]).read_text()
    assert (ROOT / found[2]).with_name("README.md").exists()
    assert all(len(line.split()) > 2 for line in text.splitlines()[4:]), text
    assert main(["info", "--json", "--plan", *words.split(), "--gpu", "a100"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == "a100"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(("op", "groups"), [("group_norm", 32), ("instance_norm", 320)])
def test_plan_of_samples(op: str, groups: int, direction: str) -> None:
    """Each sample has a plan of its own. The bundles are the groups of channels."""
    found = plan.find((f"{op}_{direction}", "16x64x64x320", "bfloat16"), "h100")
    text = plan.describe(found)
    assert f"{groups} groups x {320 // groups} channels" in text and "that of batch norm" in text
    numbers = {name: value for name, (value, _) in found["numbers"].items()}
    assert numbers["plane"] == 0 and numbers["tiles"] * numbers["tile_channels"] == 320
    assert 4096 <= numbers["steps"] * numbers["step_rows"] * numbers["fold"] < 2 * 4096


@pytest.mark.parametrize(
    ("words", "gpu", "message"),
    [
        ("softmax_fwd 3x4 float32", "h100", "no plan is known for 'softmax_fwd': expected one of "),
        ("layer_norm_fwd 32 float32", "h100", "the shape must have two or more sizes"),
        ("layer_norm_fwd 9999999999x99999999 float32", "h100", "at most 2^48 elements"),
        ("layer_norm_fwd 3x4 int32", "h100", "the dtype must be one of float16, bfloat16"),
        ("layer_norm_fwd 3x4 float32", "h1000", "--gpu must be one of a100, "),
    ],
)
def test_wrong_plan(words: str, gpu: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--plan", *words.split(), "--gpu", gpu]) == 2
    assert message in capsys.readouterr().err


def test_info_says_why_there_are_no_cuda_kernels() -> None:
    """The build recorded the reason. pip does not show it."""
    environment = info.collect()
    reason = environment["kernels"]["cuda"]["reason"]
    if "cuda" in _registry.MODULES:
        assert reason is None
        return
    skipped = sys.modules["jax_gradops._cpu"].cuda_skipped
    assert reason == "jax_gradops was built without CUDA" + (f": {skipped}" if skipped else "")
    assert reason in info.describe(environment)
    assert jax_gradops.implementation_in_use("gelu", "cuda") == ("xla", reason)


def test_doctor_warns_of_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning has the build's reason, and says how to build the kernels."""
    monkeypatch.setitem(
        sys.modules, "jax_gradops._cpu", types.SimpleNamespace(cuda_skipped="no nvcc")
    )
    reason = _registry._built_without("cuda")
    assert reason == "jax_gradops was built without CUDA: no nvcc"
    environment = info.collect()
    environment["kernels"]["cuda"] = {"build": None, "reason": reason}
    environment["devices"] = []
    assert not any(reason in w for w in doctor.installation_warnings(environment))
    environment["devices"] = [{"name": "cuda:0", "platform": "gpu", "kind": "A GPU"}]
    (warning,) = doctor.installation_warnings(environment)
    assert reason in warning and "JAX_GRADOPS_CUDA=ON pip install" in warning
    assert doctor.installation_failures(environment) == []


def test_cases_cover_every_op() -> None:
    """Every op has a case. Otherwise `doctor` would accept an op without running it."""
    assert {c.spec.name for c in cases.all_cases()} == SPECS.keys()


@pytest.mark.parametrize("level", CPU_LEVELS or [""])
def test_doctor_is_content_with_this_installation(level: str) -> None:
    """The doctor accepts every CPU level that the processor supports."""
    result = run("doctor", **{_registry.CPU_LEVEL: level})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout and "All ops give right results" in result.stdout
    if level:
        assert f"built for x86-64-{level} (" in result.stdout


def test_unknown_cpu_level() -> None:
    result = run("--version", **{_registry.CPU_LEVEL: "avx2"})
    assert result.returncode != 0
    assert f"{_registry.CPU_LEVEL} " in result.stderr and "got 'avx2'" in result.stderr


def test_doctor_runs_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Kernels run in each dtype and each case. XLA does not replace them."""
    assert doctor_in_process(monkeypatch) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["failures"] == []
    assert len(report["checks"]) == len(cases.all_cases()) * len(cases.DTYPES)
    by_xla = {c["title"] for c in report["checks"] if c["implementation"] != "ffi"}
    assert by_xla == {"batch_norm_inference"}  # XLA is faster there
    assert all(c["error"] <= c["tolerance"] and not c["message"] for c in report["checks"])


def test_doctor_without_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with JAX_DISABLE_JIT=1: right results are not reported as wrong."""
    with jax.disable_jit():
        assert doctor_in_process(monkeypatch) == 0


def test_doctor_finds_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    spec = SPECS["rms_norm"]
    wrong = [
        dataclasses.replace(form, call=lambda *a, f=form, **k: f.call(*a, **k) * 1.001)
        for form in spec.forms
    ]
    monkeypatch.setitem(SPECS, "rms_norm", dataclasses.replace(spec, forms=tuple(wrong)))
    assert doctor_in_process(monkeypatch) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert {c["title"] for c in report["checks"] if c["message"]} == {
        "rms_norm",
        "rms_norm (from output)",
    }
    failures = report["failures"]
    assert failures and all("exceeds the tolerance" in failure for failure in failures)
    assert failures[0].startswith("rms_norm")


def doctor_in_process(monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the doctor on one CPU device with JAX's default settings; prints JSON."""
    monkeypatch.setattr(info, "find_devices", lambda: (jax.devices("cpu")[:1], None))
    with jax.enable_x64(False):
        return main(["doctor", "--json"])


@pytest.mark.parametrize(
    ("python", "folder", "implementation", "command"),
    [
        ("{here}/.venv/bin/python", "demo_output", None, ".venv/bin/python -m {demo} --resume"),
        (
            "/opt/my venv/bin/python",
            "demo_output",
            None,
            "'/opt/my venv/bin/python' -m {demo} --resume",
        ),
        ("{here}/python", "demo_output", None, "{here}/python -m {demo} --resume"),
        ("", "a b", "xla", "python -m {demo} --resume --output 'a b' --implementation xla"),
    ],
)
def test_resume_command(
    python: str,
    folder: str,
    implementation: Literal["ffi", "xla"] | None,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The command runs as printed, with this Python.

    It has the options missing in the checkpoint.
    """
    runs = pytest.importorskip("jax_gradops._tools.demo.runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", python.format(here=tmp_path))
    expected = command.format(here=tmp_path, demo="jax_gradops demo")
    assert runs.resume_command(Path(folder), implementation) == expected
    mesh = jax.make_mesh((2, 1), ("data", "fsdp"), devices=jax.devices("cpu")[:2])
    with_mesh = runs.resume_command(Path(folder), implementation, mesh)
    assert with_mesh == f"{expected} --mesh data=2,fsdp=1"


def test_demo_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pytest.importorskip("jax_gradops._tools.demo.runs")
    in_use = jax_gradops.ImplementationInUse("xla", "built without CUDA: no nvcc")
    monkeypatch.setattr(jax_gradops, "implementation_in_use", lambda op: in_use)
    assert runs.describe_calls(2 * runs._CALL, None) == "2 native kernel calls"
    assert runs.describe_calls("", "xla") == "XLA's own operations only"
    assert runs.describe_calls("", None) == f"XLA's own operations only: {in_use.reason}"


@pytest.mark.parametrize("args", [["nonsense"], ["info", "--no-such-option"]])
def test_mistakes_are_explained(args: list[str]) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert "error" in result.stderr and "Traceback" not in result.stderr


def test_no_command_lists_the_commands(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {name} +\w", out, re.MULTILINE) for name in COMMANDS)


def test_usage_is_of_the_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["info", "--foo"])
    err = capsys.readouterr().err
    assert err.startswith("usage: python -m jax_gradops info [-h] [--json]")
    assert err.endswith("jax_gradops info: error: unrecognized arguments: --foo\n")


def test_no_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """If JAX_PLATFORMS names a missing platform, JAX 0.10 raises an empty AssertionError."""

    def devices() -> list[jax.Device]:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main(["bench"]) == 2
    message = "there is no CPU here: AssertionError (JAX_PLATFORMS=cuda)"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "bench --help",
        "info",
        "info --json",
        "doctor",
        "bench --op gelu --shape 8x8 --rounds 1",
        "demo --steps 1 --output {folder}",
    ],
)
def test_reader_that_has_seen_enough(command: str, tmp_path: Path) -> None:
    """With `| head`: no traceback, and the exit status of a shell in this case."""
    if command.startswith("demo"):
        pytest.importorskip("jax_gradops._tools.demo.runs")
    reader, writer = os.pipe()
    os.close(reader)
    # Output must be buffered. argparse ignores errors of unbuffered writes.
    result = run(*command.format(folder=tmp_path).split(), stdout=writer, PYTHONUNBUFFERED="")
    os.close(writer)
    assert (result.returncode, result.stderr) == (NO_READER, "")
