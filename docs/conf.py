"""Sphinx configuration."""

import importlib.metadata

project = "numpyro_tempered"
author = "The numpyro_tempered authors"
copyright = author
release = version = importlib.metadata.version("numpyro_tempered")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = "numpyro_tempered"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
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
