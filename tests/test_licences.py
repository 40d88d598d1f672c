"""What an installation brings along is free to use: licences of all dependencies, and of theirs."""

import importlib.metadata
import re

import pytest

PERMISSIVE = re.compile(
    r"Apache|BSD|MIT|PSF|Python Software Foundation|MPL-2\.0|Zlib|ISC|HPND|Unlicense",
    re.IGNORECASE,
)
COPYLEFT = re.compile(
    r"\b(?:A|L)?GPL|GNU|EUPL|SSPL|CC-BY-NC|Proprietary", re.IGNORECASE
)


def name_of(requirement):
    return re.split(r"[\s;<>=!~\[(]", requirement)[0].lower().replace("_", "-")


def installed(name, seen):
    """The distributions that one needs, with those that they need; extras and other platforms left out."""
    if name in seen:
        return seen
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return seen
    seen[name] = distribution.metadata
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            installed(name_of(requirement), seen)
    return seen


def licence_of(metadata):
    """What a distribution says: its expression, its classifiers, and the first lines of its licence."""
    classifiers = [
        line
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    return " | ".join(
        [
            metadata.get("License-Expression") or "",
            *classifiers,
            (metadata.get("License") or "")[:200],
        ]
    )


NEEDED = installed("numpyro_tempered", {})


def test_the_dependencies_are_seen():
    assert {"jax", "numpyro", "arviz", "numpy", "pandas"} <= NEEDED.keys()


def is_permissive(licence):
    return not COPYLEFT.search(licence) and bool(
        PERMISSIVE.search(licence) or "Copyright" in licence
    )


def test_licences_are_permissive():
    licences = {name: licence_of(metadata) for name, metadata in NEEDED.items()}
    assert not {
        name: licence
        for name, licence in licences.items()
        if not is_permissive(licence)
    }


@pytest.mark.parametrize(
    "licence", ["GPL-3.0-or-later", "License :: OSI Approved :: GNU Affero", "LGPL-2.1"]
)
def test_copyleft_is_seen(licence):
    assert COPYLEFT.search(licence)
