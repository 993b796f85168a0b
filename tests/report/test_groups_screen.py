"""The screen of groups fits its width with no number cut, and the page is whole and offline."""

import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flatlens.report.compare import change, group_screen, interval_in_words, write_group_page
from flatlens.statistics import GroupDifference

sys.path.insert(0, str(Path(__file__).parents[1] / "comparing"))
from made_up import ABOUT, grouped, report


def of(times=1.0, start=0, n=4, **others):
    rng = np.random.default_rng(start)
    return [
        report(0.2, 0.3 + seed / 10, neuron_flatness=times * (1 + seed) * rng.lognormal(0, 0.1),
               log_volume=-5.0 - seed + rng.normal(), ggn_trace=1e-7 * rng.lognormal(0, 0.1),
               weight_norm=3.0 + rng.random(), **others)
        for seed in range(n)
    ]  # fmt: skip


@pytest.fixture
def found():
    made = grouped(SGD=of(), SAM=of(0.3, 1))
    for one in made.networks.reports.values():
        one.about |= {**ABOUT, "layers": ["fc1"], "device": "cpu", "versions": {"torch": "2"}}
    return made


def screen(found, width):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(group_screen(found), highlight=False, markup=False)
    return captured.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_has_the_answer_first_and_every_number(found, width):
    text = screen(found, width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).startswith(" ".join(found.answer[0].split()))
    assert "…" not in text
    for one in found.differences:
        if one.low == one.low:
            assert change(one) in text
            assert interval_in_words(one) in text


def test_measures_that_decide_stand_apart_from_the_others(found):
    text = " ".join(screen(found, 80).partition("compared with SGD")[2].split())
    parts = ("Flatness, by invariant", "neuron_flatness ×", "Sensitivity and compression, by", "log_volume",
             "Loss and accuracy", "test_loss", "Other measures:", "ggn_trace ×", "weight_norm ×")  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "Holm's correction" in text
    assert "Student's t over pairs" in text


def test_three_groups_have_a_column_of_their_own():
    text = screen(grouped(SGD=of(), SAM=of(0.3, 1), Adam=of(1, 2)), 80)
    assert "Compared with SGD" in text
    row = next(line for line in text.splitlines() if line.startswith("neuron_flatness"))
    assert row.split()[1] == "SAM"


def test_an_interval_that_is_missing_is_a_dash_and_the_note_says_why():
    text = screen(grouped(SGD=of(n=2), SAM=of(0.3, 1, n=2)), 80)
    assert "Note: fewer than 3 independent units" in " ".join(text.split())
    assert interval_in_words(GroupDifference("x", "a", "b", 1.0)) == "-"


def test_the_page_is_offline_and_has_every_row(found, tmp_path):
    found.not_ranked  # noqa: B018 (cached)
    text = write_group_page(found, tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert text.index(found.answer[0].split(" by ")[0]) < text.index("2 groups of networks compared</h1>") + 2000
    for one in found.differences:
        assert f'data-search="{one.name} {one.group}"' in text
    assert "Left out" not in text
    sam = of(0.3, 1)
    sam[1] = report(2.4, 2.5, neuron_flatness=1e-9, log_volume=-9.0)
    lost = grouped(SGD=of(), SAM=sam)
    for one in lost.networks.reports.values():
        one.about |= {"device": "cpu", "versions": {"torch": "2"}}
    assert "<li>SAM 2: untrained or failed" in write_group_page(lost, tmp_path / "lost.html").read_text()
