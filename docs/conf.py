"""Sphinx's configuration: ``sphinx-build -W -b html docs docs/_build``."""

import pslayers

project = "pslayers"
author = "the pslayers authors"
version = release = pslayers.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings have names in single backticks
nitpicky = False

myst_heading_anchors = 3  # links such as semantics.md#several-passes

autodoc_class_signature = "separated"  # layers take what torch's own take
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; docstrings say what is what
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"pslayers {release}"
html_copy_source = False
