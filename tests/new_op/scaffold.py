"""Makes the files of a new row-wise op: `make new-op NAME=softplus`.

The new op works. It computes x + bias, with gradients. Replace this formula by the op's own.
Five lines of other files must name the op. The command prints them, and `--apply` inserts them.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from typing import NamedTuple

TEMPLATES = Path(__file__).parent / "templates"
ROOT = Path(__file__).parents[2]


class Line(NamedTuple):
    """A line for an existing file."""

    path: str
    text: str
    before: str  # a pattern: the line comes before the first line that matches
    ordered: bool = False  # or before the first such line that sorts after the line, else after all


LINES = (
    Line(
        "jax_gradops/__init__.py",
        "from jax_gradops._ops.@name@.@name@ import @name@ as @name@",
        r"from jax_gradops\._ops\.",
        ordered=True,
    ),
    Line("ffi/ops/handlers.h", '#include "ops/@name@.h"', r'#include "ops/', ordered=True),
    Line("ffi/ops/handlers.h", "    @Name@Forward, @Name@Backward,", r".*>;$"),
    Line(
        "docs/start/quickstart.md",
        "y = jax_gradops.@name@(x, jnp.zeros(256))  # x + bias",
        r"hidden = ",
    ),
    Line("CHANGELOG.md", "- Op: `@name@` adds a bias. It has kernels for CPU and CUDA.", r"- "),
)

NEXT = """
Replace the formula in:
  _value, _derivative, docstring   jax_gradops/_ops/@name@/@name@.py
  _value, _derivative              jax_gradops/_ops/@name@/oracle.py (independent of the op's code)
  @Name@Value, @Name@Derivative    ffi/ops/@name@.h
Say what the op computes in docs/ops/@name@.md, and in the new lines of docs/start/quickstart.md
and CHANGELOG.md.
Then format and test:
  make format
  make test ARGS="tests/test_@name@.py tests/test_package.py tests/test_mistakes.py \\
    tests/test_native_calls.py"
"""


def expanded(text: str, name: str) -> str:
    """A template's text or path for an op."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    return text.replace("@name@", name).replace("@Name@", camel)


def files(name: str) -> dict[str, str]:
    """The texts of the op's files, by path."""
    templates = sorted(path for path in TEMPLATES.rglob("*.in") if path.is_file())
    return {
        expanded(path.relative_to(TEMPLATES).with_suffix("").as_posix(), name): expanded(
            path.read_text(), name
        )
        for path in templates
    }


def mistake(name: str, root: Path) -> str | None:
    """Why an op cannot have this name, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        return f"{name!r} must be a name of lower-case words, such as log_cosh"
    taken = [path for path in files(name) if (root / path).exists()]
    return f"{taken[0]} exists already" if taken else None


def inserted(text: str, line: Line, name: str) -> str:
    """A file's text with the line."""
    new, lines = expanded(line.text, name), text.splitlines()
    like = [i for i, old in enumerate(lines) if re.match(line.before, old)]
    if not like:
        raise ValueError(f"{line.path} has no line like {line.before}")
    after = [i for i in like if not line.ordered or lines[i] > new]
    lines.insert(after[0] if after else like[-1] + 1, new)
    return "\n".join(lines) + "\n"


def create(name: str, root: Path) -> None:
    """Writes the op's files."""
    for path, text in files(name).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def apply(name: str, root: Path) -> None:
    """Inserts the lines in other files."""
    for line in LINES:
        path = root / line.path
        path.write_text(inserted(path.read_text(), line, name))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="name of the public function, such as softplus")
    parser.add_argument("--apply", action="store_true", help="also insert the lines elsewhere")
    args = parser.parse_args()
    if wrong := mistake(args.name, ROOT):
        print(f"new-op: {wrong}", file=sys.stderr)
        return 2
    create(args.name, ROOT)
    print("New files:", *files(args.name), sep="\n  ")
    if args.apply:
        apply(args.name, ROOT)
    print("\nInserted:" if args.apply else "\nAdd these lines, or call with ARGS=--apply:")
    for line in LINES:
        print(f"  {line.path:24}  {expanded(line.text, args.name).strip()}")
    print(expanded(NEXT, args.name), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
