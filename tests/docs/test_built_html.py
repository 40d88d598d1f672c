"""The files of the built site: nothing comes from another host, and every link inside of it leads somewhere."""

import posixpath
import urllib.parse

import pytest
from built_site import (
    SITE,
    addresses_in_styles,
    is_elsewhere,
    lines,
    needs_site,
    pages,
    read_page,
)

PAGE = """
<html><head>
<link rel="stylesheet" href="https://a.example/style.css"><link rel="canonical" href="https://b.example/page">
<style>@import "//c.example/c.css"; p { background: url('https://d.example/d.png') }</style>
<script src="//e.example/e.js"></script>
<script type="module">import x from "https://f.example/f.js"; const address = "https://g.example";</script>
</head><body>
<img src="own.png" srcset="https://h.example/h.png 2x, other.png 1x"><video poster="http://i.example/i.png"></video>
<p style="background: url(https://j.example/j.png)" id="here">https://k.example</p>
<a href="https://l.example" name="there">elsewhere</a><a href="#here">here</a>
<link rel="preload" as="font" href="https://m.example/m.woff">
</body></html>
"""


def test_the_reader_sees_every_way_to_name_another_host():
    page = read_page(PAGE)
    hosts = {
        urllib.parse.urlsplit(address).netloc[:1]
        for address in page.fetched
        if is_elsewhere(address)
    }
    assert hosts == set("acdefhijm")
    assert page.links == {"https://l.example", "#here"}
    assert page.anchors == {"here", "there"}


@pytest.mark.parametrize(
    ("address", "elsewhere"),
    [
        ("https://a.example/b", True),
        ("//a.example/b", True),
        ("../b.html#c", False),
        ("data:image/png;,", False),
    ],
)
def test_addresses_of_other_hosts_are_told_from_paths(address, elsewhere):
    assert is_elsewhere(address) is elsewhere


@needs_site
def test_no_page_fetches_anything_from_another_host():
    fetched = {
        name: sorted(filter(is_elsewhere, page.fetched))
        for name, page in pages().items()
    }
    assert not any(fetched.values()), lines(fetched)


@needs_site
def test_no_style_sheet_fetches_anything_from_another_host():
    sheets = {
        str(path.relative_to(SITE)): path.read_text() for path in SITE.rglob("*.css")
    }
    assert len(sheets) > 3
    fetched = {
        name: list(filter(is_elsewhere, addresses_in_styles(text)))
        for name, text in sheets.items()
    }
    assert not any(fetched.values()), lines(fetched)


def missing(name, address):
    """What is wrong with an address on a page, or None."""
    parts = urllib.parse.urlsplit(address)
    if is_elsewhere(address) or parts.scheme in (
        "data",
        "mailto",
        "javascript",
        "about",
    ):
        return None
    folder = posixpath.dirname(name)
    path = (
        urllib.parse.unquote(posixpath.normpath(posixpath.join(folder, parts.path)))
        if parts.path
        else name
    )
    if (SITE / path).is_dir():
        path = posixpath.join(path, "index.html")
    if not (SITE / path).is_file():
        return f"no file {path}"
    # Links back from the sources name what has two public names by either of them.
    anchor = (
        "" if name.startswith("_modules/") else urllib.parse.unquote(parts.fragment)
    )
    if anchor and path in pages() and anchor not in pages()[path].anchors:
        return f"no anchor {anchor} in {path}"
    return None


@needs_site
def test_every_link_inside_of_the_site_leads_somewhere():
    wrong = {
        name: sorted(
            {missing(name, each) for each in page.links | page.fetched} - {None}
        )
        for name, page in pages().items()
    }
    assert not any(wrong.values()), lines(wrong)


@needs_site
def test_search_and_inventory_are_part_of_the_site():
    assert len(pages()) > 20
    for name in ("search.html", "searchindex.js", "objects.inv"):
        assert (SITE / name).is_file(), name
