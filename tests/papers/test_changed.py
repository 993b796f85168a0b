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
    lines = list(changed.page(earlier, {"X3": rows}))
    assert "Of 4 outcomes 1 are the same, 1 changed, and 1 rows are gone." in lines
    assert "The others wait for new runs of X4: they stand at the end, and decide nothing." in lines
    told = [line for line in lines if line.startswith("| [X3]")]
    assert len(told) == 1
    assert second.outcome.prediction.says in told[0]
    assert "other units" in told[0]
    assert "| X3 | c | ✓ reproduced | other units |" in lines
    assert lines[-1] == "| X4 | d | ✓ reproduced | 0.1 |"
