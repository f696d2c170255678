"""The files of `python -m jax_gradops bench`: resuming from them, tables and plots."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_gradops.__main__ import main
from jax_gradops._tools.bench import live, measuring, plots, record, timing

TINY = ("--device", "cpu", "--rounds", "1", "--op", "rms_norm", "--dtype", "f32")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    monkeypatch.setattr(timing, "SAMPLE", {"cpu": 0.0, "gpu": 0.0})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the measured cases, in order."""
    names: list[str] = []
    run_case = measuring.run_case

    def run(case: Any, *others: Any) -> None:
        names.append(str(case))
        run_case(case, *others)

    monkeypatch.setattr(measuring, "run_case", run)
    return names


CASES = [f"rms_norm fwd f32 {shape}" for shape in ("5x33", "4x64", "3x128")]
SWEEP = (*TINY, "--direction", "fwd", "--shape", "5x33,4x64,3x128", "--against", "xla")


def test_goes_on_where_it_was_interrupted(
    tmp_path: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    path = tmp_path / "bench.json"
    run = (*SWEEP, "--json", str(path))
    with monkeypatch.context() as patch:
        counted = measuring.run_case

        def interrupted(case: Any, *others: Any) -> None:
            if len(measured) == 1:
                raise KeyboardInterrupt
            counted(case, *others)

        patch.setattr(measuring, "run_case", interrupted)
        assert main(["bench", *run]) == 130
    assert "2 cases were left out, as it was interrupted: the same command with --resume" in (
        capsys.readouterr().out
    )
    first = json.loads(path.read_text())
    assert first["left_out"] == CASES[1:] and measured == CASES[:1]
    assert not list(tmp_path.glob(".*"))

    assert main(["bench", *run, "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"1 of 3 cases are in {path} already" in out and out.count(CASES[0]) == 1
    assert measured == CASES
    content = json.loads(path.read_text())
    assert [r["case"] for r in content["results"]] == CASES and content["left_out"] == []
    assert content["results"][0] == first["results"][0]
    assert content["commands"] == first["commands"]
    # The folder is left out.
    assert content["commands"][0].endswith("--against xla --json bench.json")

    # Nothing is left to run. Cases that were not asked for stay in the file.
    assert main(["bench", *run, "--resume", "--shape", "5x33,2x7"]) == 0
    assert measured == [*CASES, "rms_norm fwd f32 2x7"]
    content = json.loads(path.read_text())
    assert [r["case"] for r in content["results"]] == measured and len(content["commands"]) == 2

    # Without --resume, the file is replaced.
    assert main(["bench", *run, "--shape", "2x7"]) == 0
    assert len(json.loads(path.read_text())["results"]) == 1


def test_goes_on_with_what_went_wrong(tmp_path: Path, measured: list[str]) -> None:
    path = tmp_path / "bench.json"
    run = ("bench", *SWEEP, "--shape", "5x33", "--json", str(path))
    assert main([*run]) == 0
    content = json.loads(path.read_text())
    content["results"][0]["problem"] = "out of memory"
    path.write_text(json.dumps(content))
    assert main([*run, "--resume"]) == 0
    assert measured == CASES[:1] * 2
    (result,) = json.loads(path.read_text())["results"]
    assert result["problem"] == ""


def test_does_not_go_on_with_other_machines_figures(
    tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "bench.json"
    run = ("bench", *SWEEP, "--shape", "5x33", "--json", str(path))
    assert main([*run]) == 0
    written = path.read_text()
    for name, value, message in (
        ("versions", {"jax": "0.0"}, f'its versions jax was "0.0" and is "{jax.__version__}"'),
        ("device", "another", 'its device was "another" and is "cpu"'),
        ("library", "0", 'its library was "0" and is '),
        ("rounds", 9, "its rounds was 9 and is 1"),
    ):
        content = json.loads(written)
        is_group = isinstance(value, dict)
        content[name] = content[name] | value if is_group else value
        text = json.dumps(content)
        path.write_text(text)
        assert main([*run, "--resume"]) == 2
        assert message in capsys.readouterr().err
        assert path.read_text() == text
    assert len(measured) == 1


@pytest.mark.usefixtures("standard_promotion")
def test_flax_and_optax_take_part(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ("--op", "layer_norm,rms_norm,clip,global_norm", "--shape", "5x33")
    status = main(["bench", *TINY, *options, "--against", "flax,optax", "--json", str(path)])
    assert status == 0
    for result in json.loads(path.read_text())["results"]:
        peer = "optax" if result["op"] in ("clip", "global_norm") else "flax"
        assert result["wrong"] == result["failed"] == {}
        assert result["warm"]["peers"].keys() == {"ours", "copy", peer}
        assert 0 <= result["errors"][peer] < 1e-4


COMMITTED = sorted((Path(__file__).parent.parent / "benchmarks").glob("*/*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_measurements(path: Path) -> None:
    """Committed measurements have no errors, and name no folders of the machine."""
    pytest.importorskip("matplotlib")
    content = record.read(path)
    assert content["platform"] == ("cpu" if path.parent.name.startswith("cpu") else "gpu")
    assert content["copy"] == "device_copy"
    assert content["results"] and not [r["problem"] for r in content["results"] if r["problem"]]
    assert not re.search(r"/(home|Users|root|tmp|var|opt|work|usr)/", path.read_text())
    assert plots.draw(content).axes


# --- Of files with figures that were not measured ------------------------------------------------


def timed(us: float) -> dict[str, Any]:
    spread = {"us": us, "p20": 0.9 * us, "p80": 1.2 * us, "host_bound": False}
    return spread | {"gb_per_s": 1e3 / us, "fraction_of_copy": 10 / us}


def peers_of(factor: float = 1.0) -> dict[str, Any]:
    peers = {"copy": timed(10), "ours": timed(11 * factor), "xla": timed(30), "torch": timed(25)}
    best = {"best_peer": "torch", "speed_up_over_best": 2.3, "speed_up_over_xla": 2.7}
    return {"peers": peers, **best}


CLEAN: dict[str, Any] = {"errors": {"ours": 1e-7}, "wrong": {}, "failed": {}, "problem": ""}


def op_result(op: str, direction: str, dtype: str, rows: int, width: int) -> dict[str, Any]:
    return {
        "case": f"{op} {direction} {dtype} {rows}x{width}",
        **{"op": op, "form": "", "direction": direction, "dtype": dtype, "shape": [rows, width]},
        **{"layout": "", "bytes": 8 * rows * width, "calls": {"cold": 1, "warm": 0}},
        "cold": peers_of(width / 256),
        **CLEAN,
    }


def clip_result(form: str, clipping: bool) -> dict[str, Any]:
    return {
        "case": f"{form} {'clipping' if clipping else 'not clipping'} f32 9x9",
        **{"op": "clip", "form": form, "dtype": "float32", "tree": "9x9", "leaves": 9},
        **{"clipping": clipping, "bytes": 324, "calls": {"cold": 0, "warm": 1}},
        "warm": peers_of(),
        **CLEAN,
        "wrong": {"xla": "leaf 1 is off"},
    }


def train_result() -> dict[str, Any]:
    def variant(ms: float) -> dict[str, Any]:
        return {
            "ms": {"median": ms, "p20": 0.98 * ms, "p80": 1.03 * ms},
            **{"host_bound": False, "examples_per_s": 1e3 / ms},
            **{"memory_bytes": 1 << 30, "temporary_bytes": 3 << 28},
            "over_stock": {"median": 20 / ms, "p20": 19 / ms, "p80": 21 / ms},
            **{"kernel_calls": {"row_norm_fwd": 3}, "compile_seconds": 2.0},
            **{"losses": [7.0, 6.0, 5.5], "losses_off_by": 1e-3, "profile": None},
        }

    return {
        "case": "llama bf16 2x16 99 words",
        **{"model": "llama", "dtype": "bfloat16", "shape": [2, 16], "unit": "tokens"},
        "vocabulary": 99,
        "variants": {"stock": variant(20.0), "jax_gradops": variant(18.0)},
        **{"noise": [0.1, 0.1, 0.1], "wrong": {}, "failed": {}, "problem": ""},
    }


SUITES = {
    "ops": [
        op_result(op, direction, dtype, 2**16 // width, width)
        for op in ("layer_norm", "rms_norm")
        for direction in ("fwd", "bwd")
        for dtype in ("bfloat16", "float32")
        for width in (256, 512, 1024)
        if (op, direction) != ("rms_norm", "bwd")
    ]
    + [op_result("layer_norm", "fwd", "float32", 1, 512)],
    "clip": [clip_result(form, c) for form in ("transform", "step") for c in (True, False)],
    "train": [train_result()],
}


def a_file(tmp_path: Path, suite: str) -> Path:
    content = {
        **{"format": record.FORMAT, "commands": ["python -m …"], "suite": suite, "rounds": 1},
        **{"device": "a device", "processor": "a processor", "platform": "gpu", "threads": 1},
        **{"competitors": ["xla", "torch"], "versions": {"jax": "1.2", "torch": None}},
        "results": SUITES[suite],
    }
    path = tmp_path / f"{suite}.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("suite", SUITES)
def test_shows_a_file(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    path, sheet = a_file(tmp_path, suite), tmp_path / "out.csv"
    plot = tmp_path / "out.svg"
    options = ("--csv", str(sheet), "--plot", str(plot))
    assert main(["bench", "--from", str(path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a device, jax 1.2"
    for result in SUITES[suite]:
        assert any(line.startswith(f"{result['case']} ") for line in lines)
    with sheet.open() as file:
        rows = list(csv.DictReader(file))
    if suite == "train":
        assert [r["variant"] for r in rows] == ["stock", "jax_gradops"]
        assert float(rows[1]["ms_median"]) == 18 and rows[1]["shape"] == "2x16"
        assert (rows[0]["temporary_bytes"], rows[0]["vocabulary"]) == (str(3 << 28), "99")
    else:
        assert len(rows) == 4 * len(SUITES[suite])
        assert {r["peer"] for r in rows} == {"ours", "copy", "xla", "torch"}
        assert {(r["peer"], float(r["us"])) for r in rows} >= {("torch", 25.0), ("copy", 10.0)}
    drawn = plot.read_text()
    assert drawn.startswith("<?xml") and "</svg>" in drawn
    first = plot.read_bytes()
    assert main(["bench", "--from", str(path), "--plot", str(plot)]) == 0
    assert plot.read_bytes() == first  # otherwise git would show a changed figure


def test_narrows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, sheet = a_file(tmp_path, "ops"), tmp_path / "out.csv"

    def rows(*args: str) -> list[dict[str, str]]:
        assert main(["bench", "--from", str(path), "--csv", str(sheet), *args]) == 0
        with sheet.open() as file:
            return list(csv.DictReader(file))

    assert {r["op"] for r in rows("--op", "rms_norm")} == {"rms_norm"}
    found = rows("--dtype", "f32", "--direction", "bwd", "--shape", "128x512", "--form", "plain")
    assert {r["shape"] for r in found} == {"128x512"} and len(found) == 4
    capsys.readouterr()
    assert {r["peer"] for r in rows("--against", "torch")} == {"ours", "copy", "torch"}
    assert "best" in (printed := capsys.readouterr().out) and " xla" not in printed
    # torch is also shown once as the best competitor
    assert printed.count(" torch ") == len(SUITES["ops"]) + 1
    for args, message in (
        (("--op", "clip"), f"{path} has no results of op clip"),
        (("--shape", "all"), "--from: name shapes by their numbers"),
    ):
        assert main(["bench", "--from", str(path), *args]) == 2
        assert message in capsys.readouterr().err


def test_a_plot_has_a_line_for_each_peer_and_the_copy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plots.draw(json.loads(a_file(tmp_path, "ops").read_text()))
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in panels[:4]] == [
        "bf16 forward", "bf16 backward", "f32 forward", "f32 backward",
    ]  # fmt: skip
    assert len(panels) == 6
    for axes in panels:
        lines = {line.get_label(): line for line in axes.lines}
        assert lines.keys() == {"a copy", "jax_gradops", "XLA", "PyTorch"}
        assert lines["a copy"].get_ydata() == [1.0, 1.0]
        ours = lines["jax_gradops"]  # the largest shape of each width, not the shape of one row
        assert list(ours.get_xdata()) == [256, 512, 1024]
        assert list(ours.get_ydata()) == pytest.approx([10 / 11, 10 / 22, 10 / 44])
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1
    others = ("xla", "flax", "torch", "cudnn", "triton", "liger", "quack")
    assert len({plots.STYLES[name].color for name in ("ours", *others)}) == 8
    assert figure.get_suptitle().strip() == "Fraction of memory bandwidth, copy = 1"


def test_a_plot_of_one_width_has_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    content = json.loads(a_file(tmp_path, "ops").read_text())
    content["results"] = [r for r in content["results"] if r["shape"] == [64, 1024]]
    panels = [axes for axes in plots.draw(content).axes if axes.axison]
    assert len(panels) == 6
    for axes in panels:
        bars = {bar.get_label(): bar.patches[0].get_height() for bar in axes.containers[1::2]}
        assert bars.keys() == {"jax_gradops", "XLA", "PyTorch"}
        assert bars["jax_gradops"] == pytest.approx(10 / 44)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1024"]


def test_plots_need_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    hidden = lambda name, *others: None if name == "matplotlib" else find_spec(name, *others)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    path = tmp_path / "out.png"
    assert main(["bench", *SWEEP, "--plot", str(path)]) == 2  # refused before any measurement
    captured = capsys.readouterr()
    assert "--plot needs Matplotlib: pip install matplotlib" in captured.err and not captured.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("case,us\n", "is not JSON"),
        ("[]", "is no --json file of this version of bench"),
        ('{"suite": "ops", "results": []}', "is no --json file of this version of bench"),
    ],
)
def test_a_file_that_is_none(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    for args in (("--from", str(path)), (*SWEEP, "--json", str(path), "--resume")):
        assert main(["bench", *args]) == 2
        assert f"error: {path} {message}" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_terminal_has_a_table_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["bench", "--from", str(a_file(tmp_path, "ops")), "--op", "rms_norm"]) == 0
    assert "over" in capsys.readouterr().out
    names = ["first", "second", "third"]
    monkeypatch.setattr(live.time, "perf_counter", iter([0.0, 40.0, 80.0]).__next__)
    heights = []
    with live.Display(names, lambda lines: heights.append(lines) or "a table") as display:
        assert display.status() == "0/3  now first"
        display.done()
        assert display.status() == "1/3  now second  2:40 min left"
    assert heights and min(heights) > 5
    out = capsys.readouterr().out
    assert "a table" in out and "1:20 min left" in out


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    record.write(path, b"whole")

    def full(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Exception, match="cannot write to .*No space left"):
        record.write(path, b"new and longer")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]
