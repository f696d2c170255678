"""README.md and other pages must agree with the code, the measurements and the messages."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import statistics
import sys
import tomllib
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
import optax
import pytest
from flax import serialization

import jax_gradops
from jax_gradops import _implementation, _registry
from jax_gradops.__main__ import COMMANDS, carrier, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("**/*.md")]
SITE = sorted((ROOT / "docs").rglob("*.md"))  # the build checks links of these pages


# --- Figures -------------------------------------------------------------------------------------

OPS = {
    "layer norm": "layer_norm",
    "RMS norm": "rms_norm",
    "bias + GELU, tanh": "bias_gelu tanh",
    "bias + GELU, exact": "bias_gelu exact",
    "batch norm": "batch_norm",
    "group norm and SiLU": "group_norm silu",
    "softmax cross-entropy": "softmax_cross_entropy",
}


def table_after(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose first line starts with `| head`."""
    rows = text[text.index(f"\n| {head}") :].strip().split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_speeds_are_those_of_the_committed_figures():
    """The first table: the median of the speeds over XLA of all shapes."""
    speeds = defaultdict(list)
    for path in (ROOT / "benchmarks" / "h200").glob("*.json"):
        for result in json.loads(path.read_text())["results"]:
            op = f"{result['op']} {result['form']}".strip()
            key = op, result["dtype"], result["direction"]
            if (speed := result["cold"]["speed_up_over_xla"]) is not None:
                speeds[key].append(speed)
    expected = [
        [name]
        + [
            f"{statistics.median(speeds[op, dtype, direction]):.2f}"
            for dtype in ("bfloat16", "float32")
            for direction in ("fwd", "bwd")
        ]
        for name, op in OPS.items()
    ]
    assert table_after(README, "op | bfloat16 forward") == expected


def test_training_steps_are_those_of_the_site():
    """README has some of the rows of the page about performance."""
    page = (ROOT / "docs" / "performance" / "index.md").read_text()
    measured = table_after(page, "model | GPU")
    for _, _, stock, ours, speed in measured:
        assert float(stock) / float(ours) == pytest.approx(float(speed), abs=0.015)
    for model, gpu, speed in table_after(README, "whole training step"):
        found = [m[4] for m in measured if m[0].startswith(model) and m[1].endswith(gpu)]
        assert speed == " to ".join(sorted({min(found), max(found)})), model


# --- Names, links and commands -------------------------------------------------------------------


def is_there(name: str) -> bool:
    module, *parts = name.split(".")
    found: Any = importlib.import_module(module)
    for part in parts:
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_names():
    """All names in the text exist, including names of Flax and Optax."""
    text = "\n".join([README, *(page.read_text() for page in SITE)])
    text = re.sub(r"https://[^)\s]*", "", text)
    names = set(
        re.findall(r'(?<![\w."@])((?:jax_gradops|jax|flax|optax)\.(?!md)[a-zA-Z][\w.]*\w)', text)
    )
    assert [name for name in sorted(names) if not is_there(name)] == []
    assert len(names) > 50


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
SOURCE = urlsplit(URLS["Source"]).path  # of OWNER


def of_this_repository(link: str) -> str:
    """For an address of this project's site or repository, the path of the file; else the link."""
    site, raw = f"{URLS['Documentation']}/", f"https://raw.githubusercontent.com{SOURCE}/main/"
    if link.startswith(site):
        path, sharp, anchor = link.removeprefix(site).partition("#")
        path = f"{path}index.html" if path.endswith("/") or not path else path
        return f"{ROOT}/docs/{path.removesuffix('.html')}.md{sharp}{anchor}"
    for start in (raw, f"{URLS['Source']}/blob/main/", f"{URLS['Source']}/actions/workflows/"):
        if link.startswith(start):
            folder = "/.github/workflows/" if "actions" in start else "/"
            return f"{ROOT}{folder}{link.removeprefix(start).removesuffix('/badge.svg')}"
    return link


def test_addresses():
    """All addresses of this project have the owner that pyproject.toml names."""
    owner = SOURCE.split("/")[1]
    addresses = re.compile(
        r"https://(?:raw\.githubusercontent\.com|github\.com|img\.shields\.io/github/[\w/]+)"
        r"/([\w-]+)/jax_gradops\b|https://([\w-]+)\.github\.io/jax_gradops\b"
    )
    files = [*PAGES, *SITE, ROOT / "pyproject.toml", ROOT / "CITATION.cff", *ROOT.glob("conda/*")]
    for path in files:
        for found in addresses.finditer(path.read_text()):
            assert owner in found.groups(), (
                f"{path.name}: {found[0]}, but pyproject.toml has {URLS['Source']}. "
                "CONTRIBUTING.md, Packaging, has the command that changes the owner everywhere."
            )


def test_conda_recipe():
    """The recipe has the version and the requirements of pyproject.toml."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    assert f'version: "{pyproject["project"]["version"]}"' in recipe
    for required in pyproject["build-system"]["requires"] + pyproject["project"]["dependencies"]:
        assert f"- {required.replace('>=', ' >=', 1)}\n" in recipe


def test_links():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]*)\)", page.read_text()):
            link = of_this_repository(link)
            if not link.startswith("https://"):
                path, _, anchor = link.partition("#")
                target = page.parent / path if path else page  # a path of ROOT is absolute
                assert target.exists(), f"{page}: {link}"
                assert not anchor or anchor in anchors(target), f"{page}: {link}"


def commands() -> Iterator[str]:
    """All lines of shell blocks, and all code spans."""
    for page in [*PAGES, *SITE]:
        text = page.read_text()
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield from block.replace("\\\n", "").splitlines()
        yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


# The text after `python -m jax_gradops`. In code spans also `bench` with an option's value.
COMMAND = re.compile(
    rf"(?:.*python (?:-P )?-m jax_gradops (?={'|'.join(COMMANDS)})|(?=bench \S+ [^-]))([^|…]+)"
)
COMMAND_LINES = sorted({found[1] for c in commands() if (found := COMMAND.fullmatch(c))})


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Options exist and can be combined. Nothing is run."""
    args = shlex.split(line, comments=True)
    module: Any = carrier(args[0])
    parsed: list[Any] = []
    monkeypatch.setattr(module, "run", lambda args: parsed.append(args) or 0)
    assert main(args) == 0
    if args[0] == "bench":
        for option in ("json", "csv", "plot", "profile"):
            if path := getattr(parsed[0], option):
                setattr(parsed[0], option, tmp_path / path.name)
        module.options.check(parsed[0])


# --- Messages ------------------------------------------------------------------------------------

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.*?)` \| .* \|$", TROUBLES, re.MULTILINE)
OF_OTHERS = {  # messages of pip, CMake, Python and Orbax
    "error: externally-managed-environment",
    "No CMAKE_CXX_COMPILER could be found.",
    "No module named 'flax'",
    "User-provided restore item and on-disk value metadata tree structures do not match",
}
X = np.ones((2, 4), np.float32)


def said(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(Exception) as caught:
        function(*args, **options)
    return str(caught.value)


def warned(monkeypatch: pytest.MonkeyPatch, platform: str, import_module: Any) -> str:
    """The warning after an import of a native module with this result."""
    with monkeypatch.context() as patch, pytest.warns(UserWarning) as warnings:
        namespace = types.SimpleNamespace(import_module=import_module)
        patch.setattr(_registry, "importlib", namespace)
        _registry._load(platform)
    return str(warnings[0].message)


def raising(error: Exception) -> Any:
    def function(name: str) -> Any:
        raise error

    return function


def of_importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield warned(monkeypatch, "cpu", raising(ModuleNotFoundError("jax_gradops._cpu")))
    yield warned(monkeypatch, "cuda", raising(ImportError("GLIBC_2.38 not found")))
    too_new = types.SimpleNamespace(ffi_api_version=(9, 9))
    yield warned(monkeypatch, "cuda", lambda name: too_new)
    for driver in (12000, 13000):  # as in _why_gpus_cannot
        yield f"jax_gradops: {_registry.gpu_mismatch('80-real', [90], driver, 13000)}"
    processor = types.SimpleNamespace(cpu_levels={"v2": True, "v3": False, "v4": False})
    for level in ("avx2", "v4"):
        with monkeypatch.context() as patch:
            patch.setenv(_registry.CPU_LEVEL, level)
            yield said(_registry._of_cpu_level, processor)
    with monkeypatch.context() as patch:
        if "nnx" in vars(jax_gradops):  # `hasattr` would import it
            patch.delattr(jax_gradops, "nnx")
        patch.delitem(sys.modules, "jax_gradops.nnx", raising=False)
        patch.setitem(sys.modules, "flax", None)
        yield said(lambda: jax_gradops.nnx)


def of_calling(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patch:
        patch.setattr(_implementation, "default_platform", lambda: "tpu")
        yield said(jax_gradops.layer_norm, X, implementation="ffi")
        without = types.SimpleNamespace(cuda_skipped="no nvcc")
        patch.setitem(sys.modules, "jax_gradops._cpu", without)
        yield _registry._built_without("cuda")
    yield said(jax_gradops.layer_norm, X.astype(int))
    yield said(jax_gradops.layer_norm, X, X[0, :3])
    yield said(jax_gradops.batch_norm, X, X[0, :3])
    yield said(lambda: jax_gradops.layer_norm(X, eps=1e-6))
    yield said(jax.jit(lambda epsilon: jax_gradops.layer_norm(X, epsilon=epsilon)), 1e-6)
    yield said(jax_gradops.batch_norm, X, axis_name="batch")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P()))
    yield said(
        lambda x: jax.jit(jax_gradops.gelu).trace(x).lower(lowering_platforms=("cpu",)), abstract
    )
    yield said(jax_gradops.clip_by_global_norm, optax.constant_schedule(1.0))
    yield said(jax_gradops.clip_by_global_norm(1.0).update, {"w": X}, {"w": X})
    old, new = optax.clip_by_global_norm(1.0), jax_gradops.clip_by_global_norm(1.0)
    saved = serialization.to_state_dict((old.init({"w": X}),))
    yield said(serialization.from_state_dict, (new.init({"w": X}),), saved)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "optax", None)
        yield said(jax_gradops.clip_by_global_norm, 1.0)


def of_running(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Iterator[str]:
    yield said(jax.export.export(jax.jit(jax_gradops.layer_norm)), X)
    unknown = jax.ffi.ffi_call("jax_gradops.of_no_import", jax.ShapeDtypeStruct((), "float32"))
    yield said(jax.jit(unknown), X)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flax", None)
        assert main(["demo"]) == 2
    with jax_gradops.use_implementation("xla"):
        assert main(["bench", "--device", "cpu"]) == 2
    yield capsys.readouterr().err


def test_troubleshooting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Each message in the text is a real message, character by character."""
    texts = [
        (ROOT / "Makefile").read_text(),
        (ROOT / "CMakeLists.txt").read_text(),
        (ROOT / "cmake" / "cuda.cmake").read_text(),
        *of_importing(monkeypatch),
        *of_calling(monkeypatch),
        *of_running(monkeypatch, capsys),
    ]
    patterns = {m: "[^\n]*".join(map(re.escape, m.split("…"))) for m in MESSAGES}
    unsaid = {m for m, p in patterns.items() if not any(re.search(p, text) for text in texts)}
    assert unsaid == OF_OTHERS
    assert len(MESSAGES) > 20
