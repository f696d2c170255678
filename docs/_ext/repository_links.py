"""Warns of links to files that the repository does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
_logger = logging.getLogger(__name__)


def check(app: Any, document: nodes.document) -> None:
    """Checks one page."""
    start = f"{app.config.html_theme_options['repository_url']}/blob/main/"
    for link in document.findall(nodes.reference):
        uri = link.get("refuri", "")
        if uri.startswith(start):
            path = urlsplit(uri.removeprefix(start)).path
            link["refuri"] = uri.removesuffix("#")
            if not (ROOT / path).exists():
                _logger.warning("the repository has no file %s", path, location=link)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", check)
    return {"parallel_read_safe": True}
