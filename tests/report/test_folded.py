"""A long report folds by block in a notebook; every number is in it once."""

import re

from flatlens.estimate import Estimate, Report
from flatlens.result import MOST_ROWS


def report(blocks: int) -> Report:
    layers = ["stem", *(f"blocks.{i}.{part}" for i in range(blocks) for part in ("fc1", "fc<2>"))]
    values = {("mls", at): Estimate(float(i)) for i, at in enumerate((None, *layers))}
    return Report({**values, **{("nmls", at): Estimate(1.0) for _, at in values}}, {"layers": layers})


def test_a_short_report_is_one_table():
    html = report(2)._repr_html_()
    assert html.count("<table") == 1
    assert "<details>" not in html


def test_a_long_one_has_its_blocks_folded():
    long = report(30)
    assert len(long.frame()) > MOST_ROWS
    html = long._repr_html_()
    titles = re.findall(r"<summary>(.*?)</summary>", html)
    assert titles[:2] == ["stem (2 numbers)", "blocks.0 (2 layers, 4 numbers)"]
    assert len(titles) == 31
    assert html.partition("<details>")[0].count("<tr>") == 2  # the network's own numbers are not folded
    assert html.count("<tr>") == len(long)
    assert "fc<2>" not in html
