"""Tutorials: settings of sphinx-gallery, and pictures of the charts that they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from sphinx_gallery.scrapers import figure_rst

DOCS = Path(__file__).parents[1]


def charts(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Return the pictures of charts that a block leaves in `chart`, as reStructuredText; each chart once."""
    names = block_vars["example_globals"]
    chart = names.get("chart")
    if not isinstance(chart, alt.TopLevelMixin) or chart is names.get("_drawn"):
        return ""
    names["_drawn"] = chart
    path = Path(next(block_vars["image_path_iterator"]))
    path.write_bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=2))
    return str(figure_rst([str(path)], gallery_conf["src_dir"]))


SETTINGS = {
    "examples_dirs": str(DOCS / "tutorials"),
    "gallery_dirs": "learn",
    "filename_pattern": r"/\d",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": (charts,),
    "capture_repr": ("_repr_html_", "__repr__"),
    "ignore_repr_types": r"altair|flatlens\.report\.figures",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,  # its page loads scripts from a network
    "show_signature": False,
    "min_reported_time": 0,
    "remove_config_comments": True,
    "reset_modules": (),
    "copyfile_regex": "",
}
