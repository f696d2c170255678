"""Checks links and anchors inside a built site, without the network: site_links.py FOLDER.

LinkChecker finds the same mistakes, but reads a page again for each anchor: over a minute.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, each with its line, and the page's anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[int, str]] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each tag."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append((self.getpos()[0], value))
            elif value and (name == "id" or (tag, name) == ("a", "name")):
                self.anchors.add(value)


def mistakes(site: Path) -> list[str]:
    """A line for each link to a file or an anchor that the site does not have."""
    pages = {
        path: Page(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        for line, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = Path(path.parent, unquote(parts.path)).resolve()
            if not target.is_file():
                found.append(f"{path}:{line}: no file for {link}")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path}:{line}: no anchor for {link}")
    print(f"{len(pages)} pages, {sum(len(p.links) for p in pages.values())} links")
    return found if pages else [f"{site}: no pages"]


if __name__ == "__main__":
    sys.exit("\n".join(mistakes(Path(sys.argv[1]).resolve())) or None)
