"""A report as a notebook shows it: a long one folds by block."""

from __future__ import annotations

from html import escape

import pandas as pd

from flatlens.estimate import Report
from flatlens.report.blocks import grouped
from flatlens.result import MOST_ROWS


def folded(report: Report) -> str:
    """Return the HTML of a report's table: the network's numbers, and each block's below its name."""
    table = report.frame()
    if len(table) <= MOST_ROWS:
        return _html(table)
    parts = [_html(table[table["layer"] == ""])]
    for block, members in grouped(list(dict.fromkeys(layer for layer in table["layer"] if layer))):
        rows = table[table["layer"].isin(members)]
        layers = f"{len(members)} layers, " if len(members) > 1 else ""
        told = f"{escape(block or members[0])} ({layers}{len(rows)} numbers)"
        parts.append(f"<details><summary>{told}</summary>{_html(rows)}</details>")
    return "\n".join(parts)


def _html(table: pd.DataFrame) -> str:
    return table.to_html(float_format="{:.6g}".format, border=0)
