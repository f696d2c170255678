"""Runs the examples of the documentation: Python blocks of README.md, and docstrings."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("as_users_have_it")]

README = Path(__file__).parent.parent / "README.md"
BLOCKS = [
    (README.read_text()[: match.start()].count("\n") + 2, match[1])
    for match in re.finditer(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
]
MODULES = {"linen": jax_gradops.linen, "nnx": jax_gradops.nnx}
DOCUMENTED = {
    **{
        name: value
        for name, value in (vars(jax_gradops) | vars(jax_gradops.backward)).items()
        if inspect.isfunction(value) and not name.startswith("_")
    },
    **MODULES,
    **{
        f"{api}.{name}": getattr(module, name)
        for api, module in MODULES.items()
        for name in module.__all__
        if name != "FuseReport"  # FuseReport is only a result
    },
}


def test_readme_has_examples():
    assert len(BLOCKS) >= 1


@pytest.mark.parametrize(("line", "code"), BLOCKS, ids=[f"line {line}" for line, _ in BLOCKS])
def test_readme(line, code):
    """Each block works alone."""
    if ">>> " in code:
        run_doctest(doctest.DocTestParser().get_doctest(code, {}, f"README:{line}", None, line))
    else:
        # A traceback then has the line numbers of the file.
        exec(compile("\n" * (line - 1) + code, README, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring(name):
    tests = doctest.DocTestFinder(recurse=False).find(DOCUMENTED[name], name, globs={})
    assert any(test.examples for test in tests), f"{name} has no example"
    for test in tests:
        run_doctest(test)


def run_doctest(test: doctest.DocTest) -> None:
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert not report, "".join(report)
