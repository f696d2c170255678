"""The pages of the documentation site: their code runs, and no public name is missing."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import jax_gradops
import jax_gradops.linen
import jax_gradops.nnx

pytestmark = [pytest.mark.newest_jax, pytest.mark.usefixtures("as_users_have_it")]

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = {
    str(path.relative_to(DOCS)): path
    for path in sorted(DOCS.rglob("*.md"))
    if BLOCK.search(path.read_text())
}
#: The text of all pages.
TEXT = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))


def missing_packages(code: str) -> list[str]:
    """The packages that the code imports and that are not installed."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@pytest.mark.parametrize("name", PAGES)
def test_page(name):
    """The blocks of a page run one after the other, in one namespace."""
    text = PAGES[name].read_text()
    blocks = [(text[: m.start()].count("\n") + 1, m[1]) for m in BLOCK.finditer(text)]
    missing = sorted({package for _, code in blocks for package in missing_packages(code)})
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    namespace = {"__name__": "page"}
    for line, code in blocks:
        # A traceback then has the line numbers of the page.
        exec(compile("\n" * line + code, PAGES[name], "exec"), namespace)


def test_broken_links_are_found(tmp_path):
    spec = importlib.util.spec_from_file_location("site_links", DOCS / "_ext" / "site_links.py")
    site_links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_links)
    (tmp_path / "a.html").write_text('<h1 id="top-of-a"></h1><a href="folder/b.html#part">')
    (tmp_path / "folder").mkdir()
    page = tmp_path / "folder" / "b.html"
    page.write_text('<p id="part"><a href="../a.html#top-of-a"><a href="https://x.org/y">')
    assert site_links.mistakes(tmp_path) == []
    page.write_text('<a href="../a.html#other">\n<img src="c.png">')
    expected = [f"{tmp_path / 'a.html'}:1: no anchor for folder/b.html#part"]
    expected += [f"{page}:1: no anchor for ../a.html#other", f"{page}:2: no file for c.png"]
    assert sorted(site_links.mistakes(tmp_path)) == expected


def documented() -> set[str]:
    """The names that some page documents by their docstring."""
    found = set()
    for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        module = ""
        for directive, name in re.findall(r"\.\. (\w+):: ([\w.]+)", block):
            if directive in ("automodule", "currentmodule"):
                module = f"{name}."
                if ":imported-members:" in block:
                    found |= {f"{name}.{n}" for n in vars(jax_gradops.backward)}
            else:
                found.add(name if name.startswith("jax_gradops.") else module + name)
    return found


def test_each_public_name_is_documented():
    names = {f"jax_gradops.{n}" for n, v in vars(jax_gradops).items() if not n.startswith("_")}
    names -= {f"jax_gradops.{n}" for n, v in vars(jax_gradops).items() if inspect.ismodule(v)}
    for module in (jax_gradops.linen, jax_gradops.nnx):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert sorted(names - documented()) == []
