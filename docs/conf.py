"""Configuration of the docs site: sphinx-build -W docs build/docs."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from plsc import __version__

project = "plsc"
html_show_copyright = False
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"plsc {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository, outside the site


def _visit_math(writer, node):
    """Write MathML, which browsers typeset by themselves: no script, no other host."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app):
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math, None))
    app.config.html_math_renderer = "mathml"
