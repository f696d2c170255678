"""`make new-op`: the templates make an op that fits the present code. Nothing is compiled."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from comparing import assert_matches, widen

import jax_gradops
from jax_gradops import _ops

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "new_op"))

import scaffold  # noqa: E402

NAMES = ("toy_op", "another_toy")


@pytest.mark.parametrize("name", NAMES)
def test_files(name: str):
    """No placeholder is left. Python's files compile."""
    files = scaffold.files(name)
    assert len(files) == 10 and f"jax_gradops/_ops/{name}/spec.py" in files
    for path, text in files.items():
        decorators = r"^@(pytest|dataclasses|functools|_checks)\."
        assert "@" not in re.sub(decorators, "", path + text, flags=re.M)
        if path.endswith(".py"):
            compile(text, path, "exec")


def test_lines_are_short():
    """`make format` mends lines that a long name makes too long, but not lines of docstrings."""
    for path, text in scaffold.files("toy_op").items():
        assert path.endswith(".txt") or max(map(len, text.splitlines())) <= 100, path


@pytest.mark.parametrize("name", NAMES)
def test_lines_elsewhere(name: str, tmp_path: Path):
    """Five lines are added to the present files. Sorted lists stay sorted."""
    for path in {line.path for line in scaffold.LINES}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    scaffold.apply(name, tmp_path)
    added = []
    for path in {line.path for line in scaffold.LINES}:
        before, after = ((root / path).read_text().splitlines() for root in (ROOT, tmp_path))
        new = [line for line in after if line not in before]
        assert [line for line in after if line not in new] == before
        added += new
    assert sorted(added) == sorted(scaffold.expanded(line.text, name) for line in scaffold.LINES)
    assert len(added) == 5
    for line in scaffold.LINES:
        if line.ordered:
            text = (tmp_path / line.path).read_text()
            like = re.findall(rf"^{line.before}.*", text, re.MULTILINE)
            assert like == sorted(like)


def test_names(tmp_path: Path):
    assert scaffold.mistake("toy_op", tmp_path) is None
    for name in ("Toy", "2d", "soft-plus", "lambda", "_gelu", "../x"):
        assert "must be a name of lower-case words" in (scaffold.mistake(name, tmp_path) or "")
    scaffold.create("toy_op", tmp_path)
    assert "exists already" in (scaffold.mistake("toy_op", tmp_path) or "")


def test_the_op_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng):
    """The op in `jax.numpy` equals its oracle, also in its gradients."""
    scaffold.create("toy_op", tmp_path)
    monkeypatch.setattr(_ops, "__path__", [*_ops.__path__, str(tmp_path / "jax_gradops/_ops")])
    try:
        (spec,) = importlib.import_module("jax_gradops._ops.toy_op.spec").SPECS
        (form,) = spec.forms
        dy, x = rng.standard_normal((2, 5, 33)).astype(np.float32)
        bias = rng.standard_normal(33).astype(np.float32)
        with jax_gradops.use_implementation("xla"):
            y, gradients = jax.jit(form.value_and_vjp)(dy, x, bias)
        wide = [widen(a) for a in (dy, x, bias)]
        expected = [*form.expected(*wide[1:]), *form.expected_gradients(*wide)]
        for actual, reference in zip((y, *gradients), expected, strict=True):
            assert_matches(actual, reference, np.float32, np.float32, "toy_op")
    finally:
        for module in [m for m in sys.modules if m.startswith("jax_gradops._ops.toy_op")]:
            del sys.modules[module]
