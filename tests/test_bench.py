"""`python -m jax_gradops bench` on tiny shapes: its cases, its checks, its output, its errors."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_gradops import _registry
from jax_gradops.__main__ import main
from jax_gradops._cli import info
from jax_gradops._tools import testing
from jax_gradops._tools.bench import cases, clip_gate, clip_loops, clips, peers, timing, trees

TINY = ("--device", "cpu", "--shape", "5x33", "--rounds", "1", "--against", "xla")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    monkeypatch.setattr(timing, "SAMPLE", {"cpu": 0.0, "gpu": 0.0})


def bench(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "bench.json"
    status = main(["bench", *TINY, "--json", str(path), *args])
    return status, json.loads(path.read_text())


def test_every_op_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, report = bench(tmp_path, "--dtype", "f32", "--shape", "5x33,2x3x4x5")
    assert status == 0 and report["left_out"] == []
    (command,) = report["commands"]
    assert command.startswith("python -m jax_gradops bench --device cpu")
    copy = "device_copy" if testing.has_handlers("cpu") else "jax.numpy.copy"
    assert report["copy"] == copy and report["versions"]["jax"] == jax.__version__
    timed = {(r["op"], r["form"], r["layout"], r["direction"]) for r in report["results"]}
    assert timed == {(*key, d) for key, op in cases.OPERATIONS.items() for d in op.form.traffic}
    for result in report["results"]:
        assert result["wrong"] == result["failed"] == {}
        assert result["errors"].keys() == {"ours", "xla"}
        layout = {"": [5, 33], "nhwc": [2, 3, 4, 5], "nchw": [2, 5, 3, 4]}
        assert result["shape"] == layout[result["layout"]]
        assert result["bytes"] >= math.prod(result["shape"]) * 4
        figure = result["warm"]
        assert figure["best_peer"] == "xla" and figure["speed_up_over_xla"] > 0
        assert figure["peers"].keys() == {"ours", "xla", "copy"}
        for timed_peer in figure["peers"].values():
            assert 0 < timed_peer["p20"] <= timed_peer["us"] <= timed_peer["p80"]
            assert timed_peer["fraction_of_copy"] > 0 and timed_peer["gb_per_s"] > 0
    lines = capsys.readouterr().out.splitlines()
    for case in ("layer_norm bwd f32 5x33 ", "batch_norm add_relu bwd nchw f32 2x5x3x4 "):
        assert any(line.startswith(case) for line in lines)


def test_as_many_rows_as_columns(tmp_path: Path) -> None:
    """A parameter then has the shape of a number per row."""
    arguments = ("--op", "layer_norm", "--dtype", "f32", "--shape", "33x33")
    status, report = bench(tmp_path, *arguments)
    assert status == 0 and report["results"]


def test_a_wrong_competitor_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    formulas = cases.OPERATIONS["layer_norm", "", ""].xla
    right = formulas["bwd"]

    def wrong(*args: jax.Array) -> list[jax.Array]:
        dx, dscale, dbias = right(*args)
        return [dx, dscale.at[7].multiply(1.001), dbias]

    monkeypatch.setitem(formulas, "bwd", wrong)
    arguments = ("--op", "layer_norm", "--direction", "bwd", "--dtype", "float64")
    status, report = bench(tmp_path, *arguments)
    assert status == 0
    (result,) = report["results"]
    assert result["wrong"].keys() == {"xla"} and result["wrong"]["xla"].startswith("dscale is off")
    assert result["warm"]["peers"].keys() == {"ours", "copy"}
    out = capsys.readouterr().out
    assert "layer_norm bwd f64 5x33: xla is wrong: dscale is off by" in out


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("form", ["", "add_relu"])
def test_a_small_part_of_a_gradient_is_missed(
    form: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm's dx without its variance term must be found, beside roundings to bfloat16."""
    operation = cases.OPERATIONS["batch_norm", form, layout]
    right = operation.xla["bwd"]

    def wrong(dy: jax.Array, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        dx, *rest = right(dy, x, *others)
        dscale, (scale, _, mean, var) = rest[-2], others[-4:]
        count = x.size // scale.size
        slope, center = (
            jnp.expand_dims(a, [i for i in range(x.ndim) if i != operation.axis])
            for a in (dscale * scale / (count * var), mean)
        )
        wide = x.astype(jnp.float32)
        return [(dx.astype(jnp.float32) + slope * (wide - center)).astype(dx.dtype), *rest]

    monkeypatch.setitem(operation.xla, "bwd", wrong)
    arguments = ("--shape", "16x28x28x3", "--layout", layout, "--direction", "bwd")
    status, report = bench(tmp_path, "--op", "batch_norm", "--dtype", "bf16", *arguments)
    assert status == 0
    found = {r["form"]: r["wrong"] for r in report["results"]}
    assert found.pop(form)["xla"].startswith("dx is off")
    assert found and not any(found.values())


def test_being_wrong_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    key = ("rms_norm", "", "")
    right = cases.OPERATIONS[key]
    wrong = dataclasses.replace(right, ours=lambda *a: right.ours(*a) * jnp.float32(1.0001))
    monkeypatch.setitem(cases.OPERATIONS, key, wrong)
    arguments = ("--op", "rms_norm", "--direction", "fwd", "--dtype", "float32")
    status, report = bench(tmp_path, *arguments)
    assert status == 1
    assert report["results"][0]["wrong"].keys() == {"ours"} and "warm" not in report["results"][0]
    assert "error: rms_norm fwd f32 5x33: ours is wrong: y is off by" in capsys.readouterr().err


def test_calls_in_one_program_have_inputs_of_their_own() -> None:
    """A cold program has calls for several times the cache, and returns all their results."""
    device = jax.devices("cpu")[0]
    case = cases.Case("rms_norm", "", "bwd", "float32", (3, 8))
    plan = peers.Plan("cpu", device, 5, 0)
    inputs = peers.Inputs.make(case, plan)
    assert len({np.asarray(a).tobytes() for call in inputs.calls for a in call}) == 10
    with peers.scope(device):
        peer = peers.ours(case, plan)
        peer.compile()
        runner = peer.start(inputs)["cold"]
    assert runner.calls == 5
    assert peer._compiled["cold"].as_text().count("jax_gradops.row_norm_bwd") == 5
    seconds, host_bound = runner.sample(2)
    assert seconds > 0 and not host_bound


def test_a_plan_goes_through_the_cache_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 20)
    device = jax.devices("cpu")[0]

    def plan(rows: int) -> peers.Plan:
        return peers.plan_for(cases.Case("clip", "", "fwd", "float32", (rows, 1024)), device)

    # 64 calls of 12 KB are less than 3 MB
    assert (plan(1).calls, plan(1).figures) == (0, ("warm",))
    assert (plan(8).calls, plan(8).figures) == (32, ("cold", "warm"))
    assert (plan(1024).calls, plan(1024).figures) == (1, ("cold",))


def test_the_clock_waits(platform: str) -> None:
    if not testing.has_handlers(platform):
        pytest.skip("needs the modules for tests")
    device = jax.devices(platform)[0]
    begin = timing.clock(device)()
    end = timing.clock(device, 3.0)()
    assert 0.003 <= timing.seconds_between(begin, end) < 1


class SlowHost:
    """A GPU's clock if the host needs 5 ms to queue the runs. The device needs 1 ms for them."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def clock(self, _: Any, wait_ms: float = 0.0) -> Any:
        def read() -> Any:
            self.waits += [wait_ms] if wait_ms else []
            return types.SimpleNamespace(is_ready=lambda: sum(self.waits[-1:]) < 5)

        return read


def test_the_device_waits_for_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples contain no dispatch. Later samples begin with the wait that was long enough."""
    host = SlowHost()
    monkeypatch.setattr(timing, "clock", host.clock)
    monkeypatch.setattr(timing, "seconds_between", lambda *_: 0.001)
    runner = timing.QueuedProgram(lambda arguments: [arguments], (), 4, None)
    assert runner.sample(2) == runner.sample(2) == (0.001 / 8, False)
    assert host.waits == [2, 8, 8]


@pytest.mark.parametrize(
    ("dtype", "size"), [("uint8", 0), ("uint8", 1_000_003), ("uint8", 9_000_001)]
)
def test_device_copy(platform: str, dtype: str, size: int) -> None:
    if not testing.has_handlers(platform):
        pytest.skip("needs the modules for tests")
    x = jnp.asarray(np.arange(size) % 251, dtype)
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    copy = jax.ffi.ffi_call(f"{_registry.TARGET_PREFIX}device_copy", kind)
    np.testing.assert_array_equal(jax.jit(copy)(x), x)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--op", "layer_norm,softmax"), f"unknown op 'softmax'; known are {', '.join(cases.OPS)}"),
        (("--op", "layernorm"), "unknown op 'layernorm'; did you mean layer_norm? known are "),
        (("--dtype", "int8"), "unknown dtype 'int8'; known are float16, bfloat16"),
        (("--direction", "up"), "unknown direction 'up'; known are fwd, bwd"),
        (("--against", "numpy"), "unknown against 'numpy'; known are xla, flax"),
        (("--shape", "12"), "unknown shape '12'; expected ROWSxFEATURES"),
        (("--shape", "0x3"), "unknown shape '0x3'"),
        (("--shape", "8x14x64"), "unknown shape '8x14x64'"),
        (("--layout", "nhcw"), "unknown layout 'nhcw'; did you mean nhwc?"),
        (("--rounds", "0"), "must be a number above 0, got '0'"),
        (("--device", "tpu"), "invalid choice: 'tpu'"),
        (("--suite", "training"), "invalid choice: 'training'"),
        (("--suite", "clip", "--tree", "gpt3"), "unknown tree 'gpt3'; expected gpt2-124m"),
        (("--suite", "clip", "--form", "adam"), "unknown form 'adam'; known are plain, relu"),
        (
            ("--suite", "train", "--model", "resnet"),
            "unknown model 'resnet'; did you mean resnet50?",
        ),
        (("--suite", "train", "--variant", "ours"), "unknown variant 'ours'; known are stock"),
        (("--suite", "train", "--stages", "5"), "unknown stages '5'; known are 0, 1, 2, 3, 4"),
        (("--suite", "train", "--batch", "0"), "must be a number above 0, got '0'"),
    ],
)
def test_unknown_names(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        main(["bench", *args])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "gpu"), "there is no GPU here: JAX has cpu devices only"),
        (("--against", "liger"), "cannot compare with liger: "),
        (("--against", "cudnn"), "cannot compare with cudnn: "),
        (("--op", "clip", "--direction", "bwd"), "clip has no bwd to time"),
        (
            ("--op", "clip", "--shape", "2x3x4x5,6x7x8x9"),
            "clip has no fwd, bwd to time in shape 2x3x4x5, 6x7x8x9",
        ),
        (("--op", "layer_norm", "--layout", "nchw"), "--layout: for shapes of four axes only"),
        (("--suite", "clip", "--layout", "nchw"), "--layout: for --suite ops only"),
        (("--suite", "clip", "--shape", "3x5"), "--shape: for --suite ops only"),
        (("--tree", "3x5"), "--tree: for --suite clip only"),
        (("--form", "step,tanh"), "--form step: --suite ops has plain, relu, add_relu, silu, tanh"),
        (("--suite", "clip", "--form", "relu"), "--form relu: --suite clip has transform, step"),
        (("--suite", "train", "--form", "relu"), "--form: for --suite ops only"),
        (("--op", "clip", "--form", "tanh"), "clip has no fwd, bwd to time in form tanh"),
        (("--suite", "clip", "--against", "liger"), "cannot compare with liger: there is no clip"),
        (("--json", "/proc/x.json"), "cannot write to /proc/x.json"),
        (("--csv", "no_such_folder/x.csv"), "x.csv: there is no folder no_such_folder"),
        (("--json", "."), "cannot write to .: it is a folder"),
        (("--plot", "x.gif"), "--plot x.gif: expected a name that ends in .svg, .png, .pdf"),
        (("--resume",), "--resume: --json FILE says what to go on with"),
        (("--from", "no_such_file"), "cannot read no_such_file: No such file"),
        (("--from", "x", "--rounds", "3", "--device", "cpu"), "--device, --rounds: for measuring"),
        (("--batch", "2", "--image-size", "32"), "--batch, --image-size: for --suite train only"),
        (("--suite", "train", "--against", "torch"), "with torch: there is no training step"),
        (("--suite", "train", "--dtype", "f16"), "no model is trained in float16"),
        (("--suite", "train", "--profile", "/proc/x"), "cannot write to /proc/x"),
        (("--suite", "train", "--model", "gpt2", "--stages", "1"), "--stages: for resnet50 only"),
        (
            ("--suite", "train", "--model", "llama", "--image-size", "32"),
            "--image-size: for resnet50, vit, unet only",
        ),
        (
            ("--suite", "train", "--model", "resnet50", "--context", "8"),
            "--context: for gpt2, gpt2-exact, gpt2-float32-rows, gpt2-padded, llama, gemma only",
        ),
        (
            ("--suite", "train", "--model", "gpt2,resnet50", "--vocabulary", "128000"),
            "--vocabulary: for llama, gemma only",
        ),
        (("--vocabulary", "128000"), "--vocabulary: for --suite train only"),
        (
            ("--suite", "train", "--model", "resnet50", "--variant", "unfused,save_output"),
            "--variant save_output: for gpt2, gpt2-exact, gpt2-float32-rows, gpt2-padded, vit only",
        ),
    ],
)
def test_what_cannot_be_done(
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(info, "find_devices", lambda: (jax.devices("cpu")[:1], None))
    assert main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jax_gradops bench: error: ") and message in err


def test_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, report = bench(tmp_path, "--op", "clip", "--dtype", "f32", "--time-limit", "1e-9")
    assert status == 0
    assert report["results"] == [] and report["left_out"] == ["clip fwd f32 5x33"]
    assert "1 case was left out" in capsys.readouterr().out


CLIP = ("--suite", "clip", "--device", "cpu", "--rounds", "2", "--against", "xla")


def bench_clip(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "clip.json"
    status = main(["bench", *CLIP, "--json", str(path), *args])
    return status, json.loads(path.read_text())


@pytest.mark.usefixtures("standard_promotion")
def test_clip_of_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(clip_loops, "turns", lambda group, platform: 3)  # as on a GPU
    forms = ("transform", "step", "inplace", "inplace_step")
    arguments = ("--tree", "2x33,mixed3", "--form", ",".join(forms), "--dtype", "bf16")
    status, report = bench_clip(tmp_path, *arguments)
    assert status == 0 and report["suite"] == "clip" and report["left_out"] == []
    found = [(r["tree"], r["form"], r["dtype"], r["clipping"]) for r in report["results"]]
    assert found == [
        (tree, form, dtype, clipping)
        for tree, dtype in (("2x33", "bfloat16"), ("mixed3", "mixed"))
        for form in forms
        for clipping in (True, False)
    ]
    for result in report["results"]:
        assert result["wrong"] == result["failed"] == {}
        assert result["warm"]["peers"].keys() == {"ours", "xla", "copy"}
        assert result["calls"] == {"cold": 0, "warm": 3}
        step = result["form"].endswith("step")
        assert result.get("steps", {}).keys() == ({"ours", "without", "xla"} if step else set())
        assert step == ("without" in result["errors"])
        if result["tree"] == "2x33":
            writes = result["clipping"] if "inplace" in result["form"] else not step
            assert (result["leaves"], result["bytes"]) == (2, 2 * 33 * 2 * (3 if writes else 1))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("transform not clipping mixed mixed3 ") for line in lines)
    assert any("step clipping bf16 2x33: whole steps, µs: ours " in line for line in lines)


@pytest.mark.usefixtures("standard_promotion")
def test_a_wrong_clip_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = clips.FORMS["step"]

    def wrong(tree: list[jax.Array], max_norm: jax.Array) -> list[jax.Array]:
        first, second = right.clip(tree, max_norm)
        return [first, second.at[7].multiply(1.01)]

    monkeypatch.setitem(clips.FORMS, "step", dataclasses.replace(right, clip=wrong))
    arguments = ("--tree", "2x33", "--form", "step", "--dtype", "f32")
    status, report = bench_clip(tmp_path, *arguments)
    assert status == 1
    for result in report["results"]:
        assert result["wrong"].keys() == {"ours"} and "warm" not in result
    error = "error: step clipping f32 2x33: ours is wrong: leaf 1 is off by"
    assert error in capsys.readouterr().err


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_keeps_its_clip_in_the_loop() -> None:
    """A step's gradients are equal in each turn. The norm must not be moved out of the loop."""
    device = jax.devices("cpu")[0]
    group = clips.Group("3x40", "step", "float32")
    with clip_loops.scope(group, device):
        peer = clip_loops.ours(group, peers.Plan("cpu", device, 0, 4))
        run = clip_loops.program(group, peer.clip, 4)
        lowered = jax.jit(run, donate_argnums=0).lower(clip_loops.state_types(group))
    text = lowered.as_text()
    assert text.count("stablehlo.while") == text.count("stablehlo.optimization_barrier") == 1


@pytest.mark.parametrize(
    ("name", "leaves", "elements"),
    [
        ("gpt2-124m", 148, 124_439_808),
        ("gpt2-1.5b", 580, 1_557_611_200),
        ("2000x1024", 2000, 2_048_000),
    ],
)
def test_trees(name: str, leaves: int, elements: int) -> None:
    types = trees.leaves(name, "bfloat16")
    assert len(types) == leaves
    assert trees.size_in_bytes(types) == 2 * elements


def test_mixed_tree() -> None:
    types = trees.leaves("mixed10000", trees.MIXED)
    assert len(types) == 10_000
    assert {t.shape for t in types} >= {(), (0,)}
    assert len({(t.shape, t.dtype) for t in types}) == 39
    assert 40e6 < trees.size_in_bytes(types) < 60e6


def test_against_torch(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    path = tmp_path / "bench.json"
    options = ("--device", "cpu", "--shape", "5x33,2x3x4x5", "--rounds", "1", "--dtype", "f32")
    subprocess.run(
        [sys.executable, "-P", "-m", "jax_gradops", "bench", *options, "--json", str(path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )
    for result in json.loads(path.read_text())["results"]:
        assert "torch" in result["warm"]["peers"], result


def test_many_roundings_are_no_mistake():
    """Repeated rounding of clipped bfloat16 leaves is accepted. An unclipped leaf is a mistake."""
    with jax.enable_x64(False):
        pristine = jnp.linspace(-2, 3, 33).astype(jnp.bfloat16)
        got = pristine
        for _ in range(128):
            got = (got.astype(jnp.float32) * 0.99).astype(jnp.bfloat16)
        factor = 0.99**128
        assert clip_gate.mistakes([got], [pristine], factor, 128, 1.0)[0] == ""
        assert "leaf 0 is off" in clip_gate.mistakes([pristine], [pristine], factor, 128, 1.0)[0]
        wide = pristine.astype(jnp.float32)
        once = wide * jnp.float32(factor / 0.99)  # one turn is missing
        assert "leaf 0 is off" in clip_gate.mistakes([once], [wide], factor, 128, 1.0)[0]
