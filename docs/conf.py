"""Sphinx configuration."""

import hashlib
import importlib.metadata
import os
from pathlib import Path

project = "numpyro_tempered"
author = "The numpyro_tempered authors"
copyright = author
release = version = importlib.metadata.version("numpyro_tempered")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = "numpyro_tempered"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3


def sources():
    """What the output of a page depends on besides its own text: the package, and the versions it runs with."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "numpyro_tempered").rglob("*.py")):
        digest.update(path.read_bytes())
    for package in ("arviz", "jax", "matplotlib", "numpyro"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


# A page is executed again when its text, the package or a version has changed.
nb_execution_mode = "cache"
nb_execution_cache_path = os.path.join(
    os.environ.get("EXECUTED_PAGES", os.path.join(os.path.dirname(__file__), "_build", "pages")), sources()
)
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
# Progress bars and hints of other libraries; errors stop the build.
nb_output_stderr = "remove"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
