"""Sphinx configuration."""

import hashlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path

from sphinx.ext.autosummary import autosummary_toc

sys.path.append(os.path.join(os.path.dirname(__file__), "_ext"))

project = "numpyro_tempered"
author = "The numpyro_tempered authors"
copyright = author
release = version = importlib.metadata.version("numpyro_tempered")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    # MathJax and its fonts, served by the site itself.
    "sphinx-mathjax-offline",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "gallery",
]
exclude_patterns = ["_build", "_ext", "_templates", "results"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "numpyro_tempered"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/versions.html",
        "sidebar/scroll-end.html",
    ]
}
# Set by .ci/site, where the pages lie beside those of other versions.
html_context = {"several_versions": bool(os.environ.get("SEVERAL_VERSIONS"))}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
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
    os.environ.get(
        "EXECUTED_PAGES", os.path.join(os.path.dirname(__file__), "_build", "pages")
    ),
    sources(),
)
# Notebooks of the gallery are executed where they are made, on an accelerator if there is one.
nb_execution_excludepatterns = ["gallery/*"]
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
# The directives that replace these separators are not in the older versions.
suppress_warnings = ["design.card_legacy"]
# Progress bars and hints of other libraries; errors stop the build.
nb_output_stderr = "remove"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False


# Array arguments take numbers as well; spelled out, the union hides every other type of a signature.
ARRAY_LIKE = "Array | ndarray | bool | number | bool | int | float | complex"


def shorten_types(app, what, name, obj, options, signature, returns):
    return tuple(
        each and each.replace(ARRAY_LIKE, "ArrayLike") for each in (signature, returns)
    )


def skip_member(app, what, name, obj, skip, options):
    """Fields of tuples stand under Attributes; scikit-learn adds methods that route metadata."""
    is_field = (getattr(obj, "__doc__", None) or "").startswith(
        "Alias for field number"
    )
    return True if is_field or name.endswith("_request") else None


def without_navigation(app, doctree):
    """Pages of single objects are reached by the tables of the API, and would fill the sidebar of every page."""
    for node in list(doctree.findall(autosummary_toc)):
        node.parent.remove(node)


def break_names(app, page, template, context, doctree):
    """Names in titles may break after a dot or an underscore, and nowhere else."""
    if "body" in context:
        context["body"] = re.sub(
            r"<h1>[^<]*",
            lambda title: re.sub(r"(?<=\w)[._](?=\w)", r"\g<0><wbr>", title[0]),
            context["body"],
        )


def setup(app):
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("autodoc-skip-member", skip_member)
    # Before Sphinx collects the entries of the sidebar.
    app.connect("doctree-read", without_navigation, priority=100)
    app.connect("html-page-context", break_names)
