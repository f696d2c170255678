"""Parts of pages that follow from the library and from committed measurements.

A page asks for a part by name, with arguments:

    ```{generated} support layer_norm rms_norm
    ```

The block is replaced by Markdown before the page is read. `PARTS` lists the parts.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```\{generated\} (\w+) *(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


# --- What an op supports --------------------------------------------------------------------------


def support(arguments: str, _: str) -> str:
    """Dtypes, platforms and transformations of ops. It traces the ops to find out."""
    import op_facts

    facts = {name: op_facts.of(name) for name in arguments.split()}
    first = table(
        ["function", "dtypes", *(f"{p} kernel" for p in op_facts.PLATFORMS), "elsewhere"],
        [
            [
                f"`{name}`",
                ", ".join(fact.dtypes),
                *(["on request" if fact.by_xla else "yes"] * len(op_facts.PLATFORMS)),
                "XLA's operations",
            ]
            for name, fact in facts.items()
        ],
    )
    notes = [
        f"`{name}`: {fact.by_xla[0].upper()}{fact.by_xla[1:]}."
        for name, fact in facts.items()
        if fact.by_xla
    ]
    second = table(
        ["transformation", *(f"`{name}`" for name in facts)],
        [
            [what, *(fact.transformations[what] for fact in facts.values())]
            for what in op_facts.TRANSFORMATIONS
        ],
    )
    return "\n".join([first, *notes, "", "What runs on a platform with kernels:", "", second])


# --- Measurements ---------------------------------------------------------------------------------

_NAMES = {"ours": "this library", "xla": "XLA", "torch": "PyTorch", "cudnn": "cuDNN"}
_DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def results(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each timed result of a folder of measurements, with its file's content."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for result in content["results"]:
            if "ours" in result.get("cold", {}).get("peers", {}):
                yield content, result


def _time(peers: dict[str, Any], name: str | None) -> str:
    return f"{peers[name]['us']:.1f}" if name in peers else "–"


def _named(name: str | None) -> str:
    return "–" if name is None else _NAMES.get(name, name.capitalize())


def _of_device(result: dict[str, Any]) -> dict[str, Any]:
    """The competitors whose time does not contain the host's dispatch."""
    return {n: peer for n, peer in result["cold"]["peers"].items() if not peer["host_bound"]}


def _numbers(result: dict[str, Any]) -> list[str]:
    peers, best = _of_device(result), result["cold"]["best_peer"]
    return [
        _time(peers, "ours"),
        f"{peers['ours']['fraction_of_copy']:.2f}" if {"ours", "copy"} <= peers.keys() else "–",
        _time(peers, "xla"),
        _named(best),
        _time(peers, best),
    ]


_NUMBERS = ["this library, µs", "fraction of copy", "XLA, µs", "fastest other", "its time, µs"]


def _title(result: dict[str, Any]) -> str:
    return f"`{result['op']}`" + (f", {result['form']}" if result["form"] else "")


def _conditions(content: dict[str, Any]) -> str:
    versions = content["versions"]
    wanted = ("jax", "torch", "triton", "flax")
    return ", ".join(
        [content["device"], *(f"{_named(n)} {versions[n]}" for n in wanted if n in versions)]
    ).replace("Jax", "JAX")


def machine(arguments: str, _: str) -> str:
    """The page of a folder of `benchmarks/`: machine, commands, and a table for each op."""
    tables: dict[str, list[list[str]]] = {}
    contents: dict[str, dict[str, Any]] = {}
    for content, result in results(ROOT / "benchmarks" / arguments):
        contents[content["commands"][0]] = content
        shape = "\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}".join(map(str, result["shape"]))
        key = [shape, result["dtype"], _DIRECTIONS[result["direction"]]]
        tables.setdefault(_title(result), []).append([*key, *_numbers(result)])
    text = [f"Machine and versions: {_conditions(next(iter(contents.values())))}.", "", "```sh"]
    text += [*contents, "```", ""]
    for title, rows in tables.items():
        text += [f"## {title}", "", table(["shape", "dtype", "direction", *_NUMBERS], rows)]
    return "\n".join(text)


def speed(arguments: str, _: str) -> str:
    """The ops' results for rows of one width, from each folder of `benchmarks/`."""
    text = []
    for folder in sorted({path.parent for path in (ROOT / "benchmarks").glob("*/*.json")}):
        rows, conditions, shapes = [], "", set()
        for content, result in results(folder):
            if result["op"] in arguments.split() and result["shape"][-1] == 2048:
                shapes.add(f"{' × '.join(map(str, result['shape']))} of {result['dtype']}")
                key = [_title(result), result["dtype"], _DIRECTIONS[result["direction"]]]
                rows.append([*key, *_numbers(result)])
                conditions = _conditions(content)
        if rows:
            link = f"[All shapes](/performance/{folder.name}.md)"
            text += [f"{conditions}. Shapes: {', '.join(sorted(shapes))}. {link}.", ""]
            text += [table(["op", "dtype", "direction", *_NUMBERS], rows)]
    return "\n".join(text) or "Not measured yet.\n"


def ranges(arguments: str, _: str) -> str:
    """The smallest and the largest speed-up over XLA of all shapes, for a folder.

    XLA's wrong results do not count. Times with the host's dispatch do not, either.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    for _content, result in results(ROOT / "benchmarks" / arguments):
        key = _title(result), result["dtype"], _DIRECTIONS[result["direction"]]
        if {"ours", "xla"} <= _of_device(result).keys():
            speed_up = result["cold"]["speed_up_over_xla"]
            found.setdefault(key, []).append(speed_up)
    rows = [[*key, f"{min(all_):.2f}", f"{max(all_):.2f}"] for key, all_ in found.items()]
    return table(["op", "dtype", "direction", "least", "most"], rows)


# --- Pictures -------------------------------------------------------------------------------------


def passes(_: str, body: str) -> str:
    """A picture of what one kernel reads, computes and writes. A line of `body` is a kernel.

    A line is ``title: reads -> steps -> writes``. Commas separate the entries.
    """
    rows = []
    for line in filter(str.strip, body.splitlines()):
        title, _, rest = line.partition(":")
        reads, steps, writes = (
            "".join(f"<li>{html.escape(entry.strip())}</li>" for entry in part.split(","))
            for part in rest.split("->")
        )
        rows.append(
            f'<div class="pass"><p class="pass-title">{html.escape(title.strip())}</p>'
            f'<div class="pass-memory"><p>reads</p><ul>{reads}</ul></div>'
            f'<div class="pass-arrow" aria-hidden="true"></div>'
            f'<div class="pass-kernel"><p>one kernel</p><ul>{steps}</ul></div>'
            f'<div class="pass-arrow" aria-hidden="true"></div>'
            f'<div class="pass-memory"><p>writes</p><ul>{writes}</ul></div></div>'
        )
    return f'<div class="passes">{"".join(rows)}</div>\n'


# --- Pages and public names -----------------------------------------------------------------------


def pages(arguments: str, _: str) -> str:
    """A table of the pages of a folder: the title, and the first sentence."""
    rows = []
    for path in sorted((ROOT / "docs" / arguments).glob("*.md")):
        if path.stem != "index":
            title, text = path.read_text().split("\n\n")[:2]
            sentence = re.split(r"(?<=\.)\s", text.replace("\n", " "))[0]
            rows.append([f"[{title.removeprefix('# ')}]({path.name})", sentence])
    return table(["page", "what it computes"], rows)


def functions(arguments: str, _: str) -> str:
    """A table of a module's public functions with a link and their first line."""
    module = importlib.import_module(arguments)
    rows = [
        [f"{{py:func}}`{arguments}.{name}`", _summary(value)]
        for name, value in sorted(vars(module).items())
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    return table(["function", "what it does"], rows)


def _summary(value: Any) -> str:
    line = inspect.getdoc(value).splitlines()[0]
    return re.sub(r"`+(.*?)`+", r"`\1`", line)


def command(arguments: str, _: str) -> str:
    """What ``--help`` of a command prints."""
    import contextlib
    import io

    from jax_gradops.__main__ import main

    printed = io.StringIO()
    os.environ["COLUMNS"] = "88"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*arguments.split(), "--help"])
    return f"```text\n{printed.getvalue().strip()}\n```\n"


PARTS: dict[str, Callable[[str, str], str]] = {
    "support": support,
    "machine": machine,
    "speed": speed,
    "ranges": ranges,
    "passes": passes,
    "pages": pages,
    "functions": functions,
    "command": command,
}


def expand(app: Any, name: str, source: list[str]) -> None:
    """Replaces the blocks of a page."""

    def markdown(match: re.Match[str]) -> str:
        part, arguments, body = match.groups()
        if part not in PARTS:
            raise ExtensionError(f"{name}: there is no generated part {part!r}")
        return PARTS[part](arguments.strip(), body)

    source[0] = _BLOCK.sub(markdown, source[0])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", expand)
    return {"parallel_read_safe": True}
