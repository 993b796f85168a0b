"""Settings of the site: `sphinx-build -W docs build/site`. What is special to flatlens is in docs/site_parts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
os.environ["FLATLENS_PROGRESS"] = "0"  # notebooks would keep the bar of a tutorial
sys.path.insert(0, str(HERE))

from site_parts import docstrings, entries, filters, formulas, gallery, markdown, offline  # noqa: E402

from flatlens.version import __version__  # noqa: E402

project = "flatlens"
author = copyright = "The flatlens developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinxcontrib.bibtex",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = ["conventions", "development", "site_parts", "tables", "tutorials", "**sg_execution_times.rst"]
suppress_warnings = ["config.cache", "ref.python"]  # gallery settings hold functions; words of attributes read as types

myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = f"flatlens {__version__}"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["site_parts/static"]
html_css_files = ["wide.css"]
html_show_sourcelink = html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"
napoleon_google_docstring = True

# torch's names, from a small inventory of our own: the site is built without a network.
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", str(HERE / "site_parts" / "torch.inv"))}

bibtex_bibfiles = ["references.bib"]
sphinx_gallery_conf = gallery.SETTINGS


def setup(app: object) -> None:
    """Connect what is special to flatlens."""
    for part in (docstrings, entries, filters, formulas, markdown, offline):
        part.setup(app)
