"""`python -m jax_gradops demo`, task text: its results, its files, and its errors."""

import dataclasses
import functools
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import demos
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from demos import interrupt_after, one_error, run, table

from jax_gradops._tools.demo import checkpoint, meshes, settings, text, text_run
from jax_gradops._tools.demo.program import Program

STEPS = 40
SENTENCES = "".join(
    f"{who} {does} the {what}.\n"
    for who in ("Ann", "Bob", "Carla", "Dan", "Eve")
    for does in ("sees", "takes", "likes", "gives back", "forgets")
    for what in ("ball", "green book", "other half", "kettle", "ladder", "Übung")
)
SMALL = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 8}
FILES = {"checkpoint", "metrics.csv", "sample.txt", "training.png"}


@pytest.fixture(scope="module", autouse=True)
def as_users_have_it():
    with demos.as_users_have_it():
        yield


@functools.cache
def program(
    given: settings.TextSettings, digest: str, implementation: str | None, mesh: Any = None
) -> Program:
    """The program, compiled once for all tests."""
    corpus = text.load_corpus(given.text, given.context)
    assert corpus.digest == digest
    return Program(given, corpus, implementation, mesh=mesh)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(as_users_have_it: None):
    def get(
        given: settings.TextSettings, corpus: text.Corpus, implementation: str | None, *, mesh: Any
    ) -> Program:
        return program(given, corpus.digest, implementation, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_run, "Program", get)
        yield
    program.cache_clear()


@pytest.fixture(scope="module")
def corpus(as_users_have_it: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(SENTENCES, encoding="utf-8")
    return path


def options(corpus: Path, folder: Path, **others: object) -> list[object]:
    given = {"text": corpus, "output": folder, "steps": STEPS} | SMALL | others
    return [part for name, value in given.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without interruption."""
    folder = tmp_path_factory.mktemp("straight") / "deeper" / "output"
    assert run(*options(corpus, folder)) == 0
    return folder


@pytest.mark.newest_jax
def test_trains_and_writes_its_files(straight: Path):
    assert {path.name for path in straight.iterdir()} == FILES
    rows = table(straight / "metrics.csv")
    losses = [float(row["loss"]) for row in rows]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3
    assert all(float(row["gradient_norm"]) > 0 for row in rows)
    assert float(rows[-1]["validation_loss"]) < losses[0]
    assert (straight / "training.png").read_bytes().startswith(b"\x89PNG")
    assert set((straight / "sample.txt").read_text(encoding="utf-8")) <= set(SENTENCES)


@pytest.mark.newest_jax
def test_mesh(corpus: Path, straight: Path, tmp_path: Path):
    """A run on many devices equals a run on one, up to rounding. A checkpoint fits both."""
    assert run(*options(corpus, tmp_path, mesh="data=2,fsdp=4")) == 0
    for actual, expected in zip(
        table(tmp_path / "metrics.csv"), table(straight / "metrics.csv"), strict=True
    ):
        for name in ("loss", "gradient_norm"):
            assert float(actual[name]) == pytest.approx(float(expected[name]), rel=1e-3)
    assert run(*options(corpus, tmp_path), "--resume") == 0


@pytest.mark.newest_jax
def test_mesh_spreads_the_state(corpus: Path):
    """The state is sharded over fsdp where sizes allow. Kernels get only the device's rows."""
    given = settings.new_run({"text": str(corpus)} | SMALL | {"steps": STEPS}, "cpu")
    devices = meshes.make_mesh({"data": 2, "fsdp": 4}, given.batch, "cpu")
    spread = program(given, text.load_corpus(given.text, given.context).digest, None, devices)
    matrices = [a for a in jax.tree.leaves(spread.initial_state()) if a.ndim > 1]
    assert matrices and all(a.addressable_shards[0].data.size * 4 == a.size for a in matrices)
    rows = re.findall(r"= \(?f32\[(\d+),.*jax_gradops\.row_norm_fwd", spread.train_step_hlo())
    assert set(rows) == {"1"}
    # The clip computes its norm from shards of gradients.
    norms = [x for x in spread.train_step_hlo().splitlines() if "jax_gradops.sum_of_squares" in x]
    shapes = re.findall(r"f32\[([\d,]+)\]", " ".join(norms))
    assert max(np.prod([int(n) for n in s.split(",")]) for s in shapes if s != "2048,2") == (
        max(a.size for a in matrices) // 4
    )


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("model=2", "--mesh must be such as"),
        ("data=0", "--mesh must be such as"),
        ("data=2,data=4", "--mesh must be such as"),
        ("", "--mesh must be such as"),
        ("data=64", "--mesh needs 64 cpu devices"),
        ("data=3", "--batch must be a multiple of the mesh's 3 devices, got 8"),
    ],
)
def test_mesh_errors(mesh: str, message: str, corpus: Path, tmp_path: Path, capsys: Any):
    folder = tmp_path / "output"
    assert run(*options(corpus, folder, mesh=mesh)) == 2
    assert message in capsys.readouterr().err and not folder.exists()


@pytest.mark.newest_jax
@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_kernels_are_in_the_compiled_train_step(corpus: Path, precision: str):
    given = {"steps": STEPS, "precision": precision, "text": str(corpus)} | SMALL
    digest = text.load_corpus(str(corpus), SMALL["context"]).digest
    compiled = program(settings.new_run(given, "cpu"), digest, None)
    hlo = compiled.train_step_hlo()
    for op in ("row_norm", "bias_gelu", "softmax_cross_entropy"):
        for direction in ("fwd", "bwd"):
            assert f'custom_call_target="jax_gradops.{op}_{direction}"' in hlo
    for handler in ("sum_of_squares", "embedding_bwd"):
        assert f'custom_call_target="jax_gradops.{handler}"' in hlo
    if precision == "mixed":
        assert re.search(r"bf16\[.*jax_gradops\.softmax_cross_entropy_bwd", hlo)
        state, metrics = compiled.train_step(compiled.initial_state())
        assert np.isfinite(float(metrics.loss))
        assert str(metrics.loss.dtype) == "float32"
        kinds = {str(p.dtype) for p in checkpoint_leaves(state.params)}
        assert kinds == {"float32"}


def checkpoint_leaves(state: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def test_interrupted_and_resumed_equals_straight(
    corpus: Path,
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    with monkeypatch.context() as patch:
        interrupt_after(patch, Program, 5)
        assert run(*options(corpus, tmp_path)) == 130
    out = capsys.readouterr().out
    assert f"Stopped at step 5 of {STEPS}" in out
    assert f"demo --resume --output {tmp_path}" in out
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
    assert run("--resume", "--output", tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for name in ("metrics.csv", "sample.txt"):
        assert (tmp_path / name).read_text() == (straight / name).read_text()
    restore = ocp.args.StandardRestore()
    states = [checkpoint._restore(f, state=restore)["state"] for f in (tmp_path, straight)]
    for resumed, expected in zip(*map(checkpoint_leaves, states), strict=True):
        np.testing.assert_array_equal(resumed, expected)


def test_new_run_keeps_the_checkpoint_of_the_last_one(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """A new run says that there is an earlier one, and how to go on with that one."""
    word = f"{tmp_path} has the checkpoint of an earlier run. --resume goes on with that run."
    assert run(*options(corpus, tmp_path, steps=2)) == 0
    assert run("--resume", "--output", tmp_path) == 0
    assert word not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert run(*options(corpus, tmp_path, steps=3)) == 0
    out = capsys.readouterr().out
    assert word in out and str(tmp_path / "checkpoint.previous") in out

    def steps() -> int:
        return len(checkpoint.load_about(tmp_path)["history"]["losses"])

    assert steps() == 3
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "checkpoint.previous").rename(tmp_path / "checkpoint")
    assert steps() == 2


def test_second_interrupt_aborts(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    before = signal.getsignal(signal.SIGINT)
    interrupt_after(monkeypatch, Program, 2, times=2)
    assert run(*options(corpus, tmp_path)) == 130
    assert capsys.readouterr().err == "jax_gradops demo: aborted\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_compare(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert run("--compare", *options(corpus, tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.csv", "comparison.png"}
    rows = table(tmp_path / "comparison.csv")
    curves = [[float(row[f"{name}_loss"]) for row in rows] for name in ("ffi", "xla")]
    np.testing.assert_allclose(*curves, rtol=1e-3)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "native kernel calls" in out and "XLA's own operations only" in out
    assert out.count(" tokens/s\n") == 2
    assert out.count("than one character") + out.count("train longer (--steps)") == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--text", "nowhere.txt"], "No such file"),
        (["--text", "."], "Is a directory"),
        (["--text", "latin1.txt"], "not UTF-8 text"),
        (["--text", "empty.txt"], "is empty"),
        (["--text", "short.txt"], "has 5 characters; --context 64 needs at least 650"),
        (["--output", "empty.txt"], "is not a folder"),
        (["--output", "empty.txt/below"], "is not a folder"),
        (["--output", "x" * 300], "File name too long"),
        (["--resume"], "no checkpoint"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch", "-1"], "--batch must be at least 1, got -1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--seed", str(2**32)], "--seed must be less than"),
        (["--context", "1"], "--context must be at least 2"),
        (["--width", "100", "--heads", "3"], "--heads must divide --width"),
        (["--compare", "--resume"], "leave out --resume"),
        (["--compare", "--implementation", "xla"], "leave out --implementation"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("Hello")
    Path("latin1.txt").write_bytes(b"caf\xe9\n" * 1000)
    before = sorted(tmp_path.rglob("*"))
    assert run(*given) == 2
    assert message in one_error(capsys)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can write")
def test_unwritable_folder(corpus: Path, capsys: pytest.CaptureFixture):
    assert run(*options(corpus, Path("/proc/demo/output"))) == 2
    assert "cannot write to /proc/demo/output" in one_error(capsys)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seed", "1"], "has --seed 0, not 1"),
        (["--width", "32"], "has --width 16, not 32"),
        (["--text", "other.txt"], "has --text "),
        (["--steps", "3"], f"is at step {STEPS}, beyond --steps 3"),
    ],
)
def test_resume_with_other_settings(
    straight: Path, given: list[str], message: str, capsys: pytest.CaptureFixture
):
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
    assert run("--resume", "--output", straight, *given) == 2
    assert message in one_error(capsys)
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*")} == before


def test_resume_of_a_changed_text(corpus: Path, straight: Path, capsys: pytest.CaptureFixture):
    corpus.write_text(SENTENCES + "!", encoding="utf-8")
    try:
        assert run("--resume", "--output", straight) == 2
    finally:
        corpus.write_text(SENTENCES, encoding="utf-8")
    assert "has changed" in one_error(capsys)


def test_resume_of_a_damaged_checkpoint(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    shutil.copytree(straight, tmp_path / "output")
    for path in (tmp_path / "output" / "checkpoint" / "about").iterdir():
        path.unlink()
    assert run("--resume", "--output", tmp_path / "output") == 2
    assert "cannot be read" in one_error(capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": None},
        {"settings": {}},
        {"history": []},
        {"settings": {"steps": "many"}},
        {"settings": {"width": 0}},
    ],
    ids=str,
)
def test_resume_of_another_kind_of_checkpoint(change: dict[str, Any]):
    """Valid JSON with wrong content gives an ordinary error."""
    good = settings.new_run({}, "cpu")
    saved = {"settings": dataclasses.asdict(good), "history": {"losses": []}, "task": "text"}
    assert settings.resumed_run({}, saved, Path("here"), "text") == good
    for name, value in change.items():
        merged = isinstance(value, dict) and value
        saved[name] = saved[name] | value if merged else value
    with pytest.raises(settings.DemoError, match="not one of this demo|must be at least 1"):
        settings.resumed_run({}, saved, Path("here"), "text")


def test_write_follows_no_link(tmp_path: Path):
    """A link that has the file's name is replaced. The permissions are the user's usual ones."""
    from jax_gradops._tools.demo import files

    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "sample.txt").symlink_to(tmp_path / "elsewhere")
    files.write(tmp_path / "sample.txt", "text")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / "sample.txt").read_text() == "text"
    assert not (tmp_path / "sample.txt").is_symlink()
    (tmp_path / "usual").touch()
    assert (tmp_path / "sample.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_failed_write_leaves_nothing(tmp_path: Path):
    from jax_gradops._tools.demo import files

    (tmp_path / "taken").mkdir()
    with pytest.raises(settings.DemoError, match="cannot write to"):
        files.write(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_bigram_entropy():
    # After 0, 0 and 1 are equally likely. After 1, 0 always follows: (2/3) ln 2 + (1/3) 0.
    tokens = np.array([0, 0, 1] * 4000 + [0], np.uint8)
    assert text.bigram_entropy(tokens) == pytest.approx(2 / 3 * np.log(2), abs=1e-9)


def test_windows_predict_each_token_once():
    windows = text.windows(np.arange(24, dtype=np.uint8), 5)
    assert windows[:, 1:].ravel().tolist() == list(range(1, 21))
    assert (windows[:, 1:] == windows[:, :-1] + 1).all()
