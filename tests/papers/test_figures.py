"""The list of the papers' figures: none is missing, and each counterpart is drawn."""

import re

import pytest

from flatlens.papers import EXPERIMENTS
from flatlens.papers.figures import FIGURES

NUMBERED = {
    "compression": [f"Fig. {i}" for i in (1, 2, 3, "G.4", "G.5", "G.6", "G.7", "H.8", "H.9")],
    "sharpening": [*(f"Fig. {i}" for i in range(1, 34)), "Table 1", "Table 2"],
    "reparam2019": [*(f"Fig. {i}" for i in range(1, 7)), "Table 1"],
    "relative2021": [f"Fig. {i}" for i in range(1, 9)],
}
"""Every caption in the papers' texts."""
AT_SMOKE = {"Fig. 7", "Fig. 8", "Fig. 10", "Fig. 11"}
"""Figures of X6 at learning rates that smoke scale leaves out."""


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_figure_and_table_is_listed_once(paper):
    listed = [one.name for one in FIGURES if one.paper == paper]
    assert sorted(listed) == sorted(NUMBERED[paper])
    assert {one.paper for one in FIGURES} == set(NUMBERED)


def test_an_experiment_draws_those_that_it_says_it_reproduces():
    for name, experiment in EXPERIMENTS.items():
        said = experiment.reproduces
        figures = re.search(r"Fig\. ((?:[GH\d.]+(?:, )?)+)", said)
        tables = re.search(r"Tables? ((?:\d(?:, )?)+)", said)
        expected = {f"Fig. {one}" for one in figures[1].rstrip(", ").split(", ")} if figures else set()
        expected |= {f"Table {one}" for one in tables[1].rstrip(", ").split(", ")} if tables else set()
        listed = {one.name for one in FIGURES if one.experiment == name}
        assert listed == expected, name


def test_what_has_no_counterpart_says_why():
    for one in FIGURES:
        assert bool(one.experiment) == bool(one.plots)
        assert one.experiment or one.remark


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in EXPERIMENTS])
def test_each_counterpart_is_drawn(smoke_of, name):
    _, found = smoke_of(name)
    for one in FIGURES:
        if one.experiment != name or (name == "X6" and one.name in AT_SMOKE):
            continue
        drawn = one.among(found.plots)
        assert drawn, one.name
        if one.name.startswith("Fig. "):
            number = re.escape(one.name.removeprefix("Fig. "))
            assert any(re.search(rf"\b{number}\b", plot.title) for plot in drawn), one.name
