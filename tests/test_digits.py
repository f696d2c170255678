"""`python -m jax_gradops demo --task digits`: its results, and its errors."""

import collections
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import demos
import jax.numpy as jnp
import numpy as np
import pytest
from demos import interrupt_after, one_error, table

from jax_gradops._tools.demo import settings

data = pytest.importorskip("jax_gradops._tools.demo.digits.data")
from jax_gradops._tools.demo.digits import plots  # noqa: E402
from jax_gradops._tools.demo.digits import run as digits_run  # noqa: E402
from jax_gradops._tools.demo.digits.program import Program  # noqa: E402

STEPS = 8
SMALL = {"width": 4, "batch": 32}
FILES = {"checkpoint", "confusion.png", "metrics.csv", "training.png"}
run = functools.partial(demos.run, "--task", "digits")


@pytest.fixture(scope="module", autouse=True)
def as_users_have_it():
    with demos.as_users_have_it():
        yield


@functools.cache
def program(given: settings.DigitsSettings, implementation: str | None, mesh: Any) -> Program:
    """The program, compiled once for all tests."""
    return Program(given, data.load(given.seed, given.batch), implementation, mesh=mesh)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(as_users_have_it: None):
    def get(
        given: settings.DigitsSettings, digits: object, implementation: str | None, *, mesh: Any
    ) -> Program:
        return program(given, implementation, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits_run, "Program", get)
        yield
    program.cache_clear()


def options(folder: Path, **others: object) -> list[object]:
    given = {"output": folder, "steps": STEPS} | SMALL | others
    return [part for name, value in given.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def straight(as_users_have_it: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without interruption."""
    folder = tmp_path_factory.mktemp("straight") / "output"
    assert run(*options(folder)) == 0
    return folder


def test_writes_its_files(straight: Path):
    assert {path.name for path in straight.iterdir()} == FILES
    rows = table(straight / "metrics.csv")
    losses = [float(row["loss"]) for row in rows]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    assert all(float(row["gradient_norm"]) > 0 for row in rows)
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    for name in ("confusion.png", "training.png"):
        assert (straight / name).read_bytes().startswith(b"\x89PNG")


def test_same_seed_same_run(straight: Path, tmp_path: Path):
    assert run(*options(tmp_path)) == 0
    for name in ("metrics.csv", "confusion.png", "training.png"):
        assert (tmp_path / name).read_bytes() == (straight / name).read_bytes()


def test_another_seed_is_another_run():
    one, other = (data.load(seed, 1) for seed in (0, 1))
    assert not np.array_equal(one.test_images, other.test_images)


def test_interrupted_and_resumed_equals_straight(
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    with monkeypatch.context() as patch:
        interrupt_after(patch, Program, 3)
        assert run(*options(tmp_path)) == 130
    assert f"demo --resume --task digits --output {tmp_path}" in capsys.readouterr().out
    assert run("--resume", "--output", tmp_path) == 0
    for name in ("metrics.csv", "confusion.png"):
        assert (tmp_path / name).read_bytes() == (straight / name).read_bytes()


def test_mesh(straight: Path, tmp_path: Path):
    """On many devices, statistics are of the whole batch: the run equals a run on one device."""
    assert run(*options(tmp_path, mesh="data=2,fsdp=2")) == 0
    for actual, expected in zip(
        table(tmp_path / "metrics.csv"), table(straight / "metrics.csv"), strict=True
    ):
        for name in ("loss", "gradient_norm"):
            assert float(actual[name]) == pytest.approx(float(expected[name]), rel=1e-3)


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert run("--compare", *options(tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.csv", "comparison.png"}
    rows = table(tmp_path / "comparison.csv")
    curves = [[float(row[f"{name}_loss"]) for row in rows] for name in ("ffi", "xla")]
    np.testing.assert_allclose(*curves, rtol=1e-4)
    out = capsys.readouterr().out
    assert "native kernel calls" in out and "XLA's own operations only" in out
    assert out.count(" images/s\n") == 2


def test_kernels_are_in_the_compiled_train_step():
    given = settings.new_run({"steps": STEPS} | SMALL, "cpu", "digits")
    hlo = program(given, None, None).train_step_hlo()
    calls = re.findall(r'custom_call_target="jax_gradops\.(\w+)"', hlo)
    # The stem has one batch norm, each block two, each shortcut one.
    expected = {"batch_norm_fwd": 9, "batch_norm_bwd": 9, "sum_of_squares": 1}
    expected |= {"softmax_cross_entropy_fwd": 1, "softmax_cross_entropy_bwd": 1}
    assert collections.Counter(calls) == expected


def test_mixed_precision():
    given = settings.new_run({"steps": STEPS, "precision": "mixed"} | SMALL, "cpu", "digits")
    mixed = program(given, None, None)
    assert re.search(r"bf16\[32,8,8,4\].*jax_gradops\.batch_norm_fwd", mixed.train_step_hlo())
    state, metrics = mixed.train_step(mixed.initial_state())
    assert np.isfinite(float(metrics.loss)) and metrics.loss.dtype == jnp.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--context", "8"], "--context is an option of --task text, not of --task digits"),
        (["--text", "file.txt"], "--text is an option of --task text, not of --task digits"),
        (["--layers", "2"], "--layers is an option of --task text"),
        (["--heads", "2"], "--heads is an option of --task text"),
        (["--batch", "1348"], "--batch must be at most 1347, the images to train on; got 1348"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--width", "0"], "--width must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--mesh", "data=3"], "--batch must be a multiple of the mesh's 3 devices, got 128"),
        (["--resume"], "no checkpoint"),
        (["--compare", "--resume"], "leave out --resume"),
        (["--compare", "--implementation", "ffi"], "leave out --implementation"),
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
    assert run(*given) == 2
    assert message in one_error(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("task", "given", "message"),
    [
        ("text", [], "has --task digits, not text"),
        ("digits", ["--width", "5"], "has --width 4, not 5"),
        ("digits", ["--steps", "3"], f"is at step {STEPS}, beyond --steps 3"),
    ],
)
def test_resume_of_another_run(
    straight: Path, task: str, given: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert demos.run("--task", task, "--resume", "--output", straight, *given) == 2
    assert message in one_error(capsys)


def test_missing_scikit_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert run() == 2
    assert "sklearn is missing: pip install 'jax_gradops[demo]'" in one_error(capsys)


def test_split():
    """The two parts have no common image, and each digit's share is equal in both."""
    digits = data.load(0, 1)
    train, test = digits.train_images, digits.test_images
    assert (len(train), len(test)) == (1347, 450)
    assert {image.tobytes() for image in train}.isdisjoint(image.tobytes() for image in test)
    shares = [np.bincount(y) / len(y) for y in (digits.train_labels, digits.test_labels)]
    np.testing.assert_allclose(*shares, atol=2e-3)
    assert train.dtype == np.float32 and train.min() == 0 and train.max() == 1


def test_batches_are_shifted_images():
    images = jnp.arange(1, 5 * 64 + 1, dtype=jnp.float32).reshape(5, 8, 8)
    batch, labels = data.sample_batch(images, jnp.arange(5), jnp.array([0, 7], jnp.uint32), 5)
    assert sorted(np.asarray(labels)) == list(range(5))
    found = set()
    for shifted, label in zip(np.asarray(batch), np.asarray(labels), strict=True):
        padded = np.pad(np.asarray(images)[label], 1)
        places = [(i, j) for i in range(3) for j in range(3)]
        matching = [
            (i, j) for i, j in places if np.array_equal(padded[i : i + 8, j : j + 8], shifted)
        ]
        assert len(matching) == 1
        found.update(matching)
    assert len(found) > 1


def test_confusion_matrix():
    counts = np.diag(np.full(10, 45)) + np.eye(10, k=3, dtype=int)
    assert plots.confusion(counts, "title") != plots.confusion(np.diag(np.full(10, 45)), "title")
    empty = np.zeros((10, 10), int)
    assert plots.confusion(empty, "title").startswith(b"\x89PNG")


def test_learns_to_read(tmp_path: Path):
    """Runs the command with XLA's optimisations, on a third of the default number of images."""
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-m", "jax_gradops", "demo", "--task", "digits"]
    result = subprocess.run(
        [*command, "--steps", "120", "--batch", "96", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"\n[\d,]+ images/s\n", result.stdout)
    assert float(table(tmp_path / "metrics.csv")[-1]["test_accuracy"]) >= 0.98
