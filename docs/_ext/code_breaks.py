"""Lets a browser break long code in a table after a dot, a comma, a bracket or an underscore."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes


def add_breaks(app: Any, document: nodes.document, _: str) -> None:
    """Adds the breaks to a page. Copied text does not contain them."""
    if app.builder.format != "html":
        return
    for table in document.findall(nodes.table):
        for code in list(table.findall(nodes.literal)):
            parts = re.findall(r"(?:jax_gradops|.)+?(?:[.,(_=]+|$)", code.astext())
            if len(code.astext()) < 12 or len(parts) < 2:
                continue
            code.clear()
            for i, part in enumerate(parts):
                code += [nodes.raw("", "<wbr>", format="html")] if i else []
                code += nodes.Text(part)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", add_breaks)
    return {"parallel_read_safe": True}
