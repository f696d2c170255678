"""Copies `notebooks/*.ipynb` into the source folder of the site.

Sphinx takes no source from outside of its folder. Links out of the notebooks' folder become links
to the repository.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def copied(text: str) -> str:
    """The notebook's JSON with links that work on the site."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            source = "".join(cell["source"])
            cell["source"] = re.sub(r"\]\(\.\./", "](repo:", source)
    return json.dumps(notebook, indent=1)


def copy(app: Any) -> None:
    """Writes the copies that differ, and deletes copies without an original."""
    folder = Path(app.srcdir, "notebooks")
    folder.mkdir(exist_ok=True)
    originals = {path.name: path for path in (ROOT / "notebooks").glob("*.ipynb")}
    for path in folder.iterdir():
        if path.name not in originals:
            path.unlink()
    for name, path in originals.items():
        text = copied(path.read_text())
        target = folder / name
        if not target.exists() or target.read_text() != text:
            target.write_text(text)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", copy, priority=100)
    return {"parallel_read_safe": True}
