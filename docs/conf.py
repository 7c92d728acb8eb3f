"""Configuration of the docs site: sphinx-build -W docs build/docs."""

from plsc import __version__

project = "plsc"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "Classifiers over very many classes", "page_width": "1100px"}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, outside the site
