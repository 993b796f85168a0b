"""Every prediction says what it is: theorem, claim or number with the paper's words, or a reading with its reason."""

import os
import re
from pathlib import Path

import pytest

from flatlens.papers import EXPERIMENTS

QUOTED = {"theorem", "claim", "number", "variation"}
GONE_THROUGH = (
    "X1",
    "X2",
    "X3",
    "X4",
    "X5",
    "X6",
    "X7",
    "X8",
    "X9",
    "X10",
    "X11",
    "X12",
    "X13",
    "X14",
    "X15",
    "X16",
    "X17",
    "X18",
    "X19",
)
"""Experiments whose rows have been compared with the paper's text, sentence by sentence."""
TEXTS = os.environ.get("FLATLENS_PAPERS")
"""Folder with the papers' texts: compression.txt, sharpening.txt, sharpening-appendix.txt, ..."""

ROWS = [pytest.param(row, id=f"{name}-{row.name}") for name in GONE_THROUGH for row in EXPERIMENTS[name].predictions]


def plain(text):
    """The text without marks of emphasis, numbers of lines, line breaks and the hyphens at the ends of lines."""
    text = re.sub(r"(?m)^[ \t]*\d{1,4} (?=\S)", "", text)
    text = re.sub(r"(?<=\w)-\s*\n\s*(?=[a-z])", "", text).replace("*", "")
    for fancy, simple in (("’", "'"), ("“", '"'), ("”", '"'), ("–", "-"), ("ﬁ", "fi"), ("ﬂ", "fl")):
        text = text.replace(fancy, simple)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_kind_with_a_quote_or_a_reason(row):
    assert row.kind in {*QUOTED, "reading"}
    assert row.quote or row.kind not in QUOTED, "the paper's words"
    assert row.reason or row.kind != "reading", "why it is read so"
    assert not row.headline or (row.kind in ("claim", "reading") and row.quote), "a sentence of the paper"
    assert not row.headline or (row.accepted and row.objections), "a main claim says what its authors could object"
    assert len(row.accepted) <= 70, "a cell holds a few words"
    assert not row.quote.startswith(row.says)


def test_no_paper_has_more_than_five_headlines():
    rows = [row.values[0] for row in ROWS]
    for paper in {row.source.partition(" ")[0] for row in rows}:
        assert sum(row.headline for row in rows if row.source.startswith(paper)) <= 5, paper


@pytest.mark.skipif(TEXTS is None, reason="FLATLENS_PAPERS names no folder with the papers' texts")
@pytest.mark.parametrize("row", [row for row in ROWS if row.values[0].quote])
def test_every_quote_is_in_the_paper(row):
    paper = row.source.partition(" ")[0]
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(TEXTS).glob(f"{paper}*.txt"))]
    assert texts, paper
    parts = [part.strip() for part in plain(row.quote).split("[...]")]
    assert any(all(part in plain(text) for part in parts) for text in texts), row.quote
