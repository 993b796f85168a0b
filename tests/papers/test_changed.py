"""docs/changed.py: which outcomes of the first atlas are no longer the same, and why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flatlens.papers import EXPERIMENTS
from flatlens.papers.summary import rows_of

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.xdist_group("X3")


@pytest.fixture
def changed(docs_script):
    return docs_script("changed")


def test_columns_of_numbers_stand_to_the_right(changed):
    assert list(changed.atlas.head("", "says", "n", numbers=("n",))) == ["|  | says | n |", "| --- | --- | ---: |"]


def test_every_earlier_row_has_its_place_or_a_reason():
    for one in json.loads((DOCS / "tables" / "earlier.json").read_text()):
        now = [prediction.says for prediction in EXPERIMENTS[one["experiment"]].predictions]
        assert one["now"] in now if one["now"] is not None else one["why"], one["says"]


def test_what_is_the_same_is_counted_and_the_rest_is_told(changed, smoke_of):
    found = smoke_of("X3")[1]
    (rows,) = rows_of([replace(found, again=found.outcomes)])
    first, second = rows[0], rows[1]
    other = "reproduced" if second.decided != "reproduced" else "not reproduced"
    common = {"experiment": "X3", "value": "0.1", "n": "3", "why": "other units"}
    earlier = [
        common | {"says": "a", "outcome": first.decided, "now": first.outcome.prediction.says},
        common | {"says": "b", "outcome": other, "now": second.outcome.prediction.says},
        common | {"says": "c", "outcome": "reproduced", "now": None},
        common | {"says": "d", "outcome": "reproduced", "now": "of a run to come", "experiment": "X4"},
    ]
    table = changed.compared(earlier, {"X3": rows})
    assert [*table["decided"]] == [first.decided, second.decided, "gone", "not run again"]
    assert [*table["claim"]] == [first.outcome.prediction.says, second.outcome.prediction.says, "c", "of a run to come"]
    assert table["why"][1].startswith("other units")
    lines = list(changed.page(table))
    assert "Of 4 outcomes 1 are the same." in lines
    counted = [line for line in lines if line.startswith("| ")]
    cells = [int(cell) for line in counted[2:] for cell in line.split("|")[2:-1]]
    assert counted[0].endswith("| gone | not run again |")
    assert sum(cells) == 4
