"""What tests of the built site share: its pages, and what a page names."""

import functools
import html.parser
import os
import re
import urllib.parse
from pathlib import Path
from typing import NamedTuple

import pytest

SITE = (
    Path(os.environ["BUILT_SITE"]).resolve() if os.environ.get("BUILT_SITE") else None
)
NO_SITE = (
    "BUILT_SITE names no folder of a built site: python -m sphinx -b html docs FOLDER"
)
needs_site = pytest.mark.skipif(SITE is None, reason=NO_SITE)
# Relations of a link to what a browser does not fetch.
FOLLOWED = {
    "canonical",
    "author",
    "index",
    "next",
    "prev",
    "search",
    "help",
    "license",
    "top",
    "up",
}
# Whose address a browser fetches with the page, by element.
FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "audio": ("src",),
    "video": ("src", "poster"),
    "track": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "input": ("src",),
}
IN_STYLES = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
IN_MODULES = re.compile(r"""(?:\bimport\b|\bfrom\b)[\s(]*["']((?:https?:)?//[^"']+)""")


class Page(NamedTuple):
    """What a page names: addresses fetched with it, addresses to go to, and its anchors."""

    fetched: frozenset
    links: frozenset
    anchors: frozenset


class Reader(html.parser.HTMLParser):
    """Collects what a page names."""

    def __init__(self):
        super().__init__()
        self.fetched, self.links, self.anchors, self.inside = set(), set(), set(), None

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.inside = tag
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.fetched |= set(addresses_in_styles(given.get("style")))
        for name in FETCHED.get(tag, ()):
            for candidate in (given.get(name) or "").split(
                ", " if name == "srcset" else "\n"
            ):
                self.fetched |= set(candidate.split()[:1])
        if tag == "link" and not set((given.get("rel") or "").split()) <= FOLLOWED:
            self.fetched.add(given.get("href") or "")
        if tag in ("a", "area") and given.get("href"):
            self.links.add(given["href"])

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "style":
            self.fetched |= set(addresses_in_styles(data))
        if self.inside == "script":
            self.fetched |= set(IN_MODULES.findall(data))


def addresses_in_styles(text):
    """Addresses in a style sheet, or in the style of an element."""
    return [first or second for first, second in IN_STYLES.findall(text or "")]


def read_page(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    return Page(
        frozenset(reader.fetched), frozenset(reader.links), frozenset(reader.anchors)
    )


def is_elsewhere(address):
    """Whether an address is that of another host."""
    parts = urllib.parse.urlsplit(address.strip())
    return bool(parts.netloc) or parts.scheme in ("http", "https", "ftp")


@functools.cache
def pages():
    """Pages of the site by their paths in it; what packages bring along in ``_static`` is no page."""
    paths = sorted(SITE.rglob("*.html"))
    return {
        str(path.relative_to(SITE)): read_page(path.read_text())
        for path in paths
        if "_static" not in path.relative_to(SITE).parts
    }


def stem_of(name):
    """The name of a page's source: that of its file, or of the folder whose index it is."""
    path = Path(name.lstrip("/"))
    return path.parent.name if path.stem == "index" and path.parent.name else path.stem


def page_of(stem):
    """The path of the page whose source has this stem."""
    found = [name for name in pages() if stem_of(name) == stem]
    if len(found) != 1:
        raise ValueError(f"{len(found)} pages are called {stem}: {found}")
    return found[0]


def lines(wrong):
    """What is wrong by page, a line for each page."""
    return "\n" + "\n".join(
        f"{name}: {problems}" for name, problems in wrong.items() if problems
    )
