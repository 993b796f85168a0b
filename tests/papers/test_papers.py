"""Every experiment runs at its smallest scale, has data for every figure, and weighs every claim; not what comes."""

import json

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.tables import unit_column
from flatlens.measures.definition import PAPERS
from flatlens.papers import EXPERIMENTS, evidence
from flatlens.papers.experiment import SCALES, SHARED_WORDS, Conclusion
from flatlens.papers.reproduction import load_reproduction
from flatlens.statistics.inference import FEWEST_UNITS

COLUMNS = {
    "scatter": ["panel", "x", "y", "group", "key"],
    "curves": ["panel", "x", "line", "y", "low", "high"],
    "table": ["panel", "row", "column", "text"],
    "bars": ["panel", "x", "group", "y", "low", "high"],
}
NETWORKS = {
    "X1": (5, 35, 50, 40), "X2": (5, 50, 50, 40), "X3": (4, 70, 50, 40), "X4": (22, 81, 884, 800),
    "X5": (8, 72, 60, 186), "X6": (36, 200, 306, 242), "X7": (8, 64, 60, 50), "X8": (16, 108, 180, 300),
    "X9": (48, 384, 1568, 2400), "X10": (16, 48, 60, 30), "X11": (12, 48, 60, 30), "X12": (16, 40, 80, 40),
    "X13": (24, 60, 80, 100), "X14": (8, 48, 176, 324), "X15": (4, 96, 80, 40), "X16": (8, 600, 600, 600),
    "X17": (12, 240, 720, 720), "X18": (4, 48, 169, 450), "X19": (48, 336, 576, 540),
}  # fmt: skip
"""At smoke, laptop, desk and paper scale, as the texts say."""
FEW = ("X1", "X2", "X3", "X4", "X5")
"""At smoke scale their networks are too few for some statistics."""
UNSEEN = {
    "X6": (
        "jacobian.beyond_edge",
        "loss.beyond_edge",
        "sharpness.halts.growth",
        "sharpness.smoothing.peak",
        "sharpness.smoothing.from_half",
        "sharpness.smoothing.outer",
        "jacobian.smoothing.from_half",
        "ansatz.sharpness_down",
        "bound.grows.late",
    ),
    "X8": tuple(f"{kind}.{setting}.test_accuracy" for kind in ("resnet", "vgg") for setting in ("lr", "batch_size")),
    "X10": (
        "first_epoch.sharpness.peak",
        "first_epoch.jacobian.peak",
        "first_epoch.together.changes",
        "first_epoch.together.values",
        *(
            f"{what}.follows_outputs.{read}"
            for what in ("curvature", "jacobian")
            for read in ("two_looks", "later_half", "values.later_half")
        ),
    ),
    "X14": ("converged.",),
    "X16": ("rises.from_2",),
    "X19": ("holds.published",),
    "X9": ("mixup.decorrelates", "augmentation.decorrelates", "jacobian.superior"),
    "X18": (
        "flatness.strong.all_images",
        "stronger.all_images",
        "another_layer.strong.all_images",
        "flatness.as_coded.but_three",
        "stronger.as_coded.but_three",
        "flatness.converged",
        "stronger.converged",
    ),
}
"""Claims that smoke scale says nothing of, as their names begin: X6's networks never come to 2/lr, some of X6 and X10
never rise above their first value, are looked at too few times, or have one degree of smoothing or number of steps;
X8's test accuracies are equal, Eq. 7 needs more samples than X19 has on spheres, X16 has one separation from 2 on, X9
has two strengths beside none (rows of the regularised networks alone, too). Nor has it trained cases (rows of fitted
networks), or test images enough for a gap of accuracy."""
FINITE = ("X11", "X12", "X14", "X15", "X16", "X17", "X18")
"""No number of their figures is missing, even at smoke scale (but ends of intervals are)."""


def each(names):
    """A test a name; all tests of an experiment run in one process."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names])


EACH = each(EXPERIMENTS)


@EACH
def test_every_network_is_measured_and_every_claim_weighed(smoke_of, name):
    _, one = smoke_of(name)
    assert one.unfinished == 0
    assert not any(result.failed for result in one.results.values())
    assert len({prediction.name for prediction in one.experiment.predictions}) == len(one.outcomes)
    networks = sum(len(result.networks) for result in one.results.values())
    for outcome in one.outcomes:
        found = outcome.statistic
        assert outcome.conclusion in Conclusion.__args__
        assert found.name
        assert found.n <= networks
        assert np.isfinite(found.value) or found.note or found.n < 4, outcome
        assert outcome.prediction.source.startswith(one.experiment.paper)


@each([name for name in EXPERIMENTS if name not in FEW])
def test_no_network_is_left_out_and_every_statistic_is_a_number(smoke_of, name, monkeypatch):
    _, one = smoke_of(name)
    monkeypatch.setattr(evidence, "LEARNT", -1.0)  # at smoke scale some never train
    assert not any(result.excluded for result in one.results.values())
    weighed = {one_of.prediction.name: one_of.prediction.weigh(one.results).statistic for one_of in one.outcomes}
    unseen = {claim for claim in weighed if claim.startswith(UNSEEN.get(name, ()))}
    unseen |= {claim for claim in weighed if ".fitted" in claim or "accuracy_gap" in claim}
    unseen |= {claim for claim in weighed if name == "X9" and ".alone" in claim}
    lost = {claim: found for claim, found in weighed.items() if not np.isfinite(found.value) or found.left_out}
    assert {claim: found for claim, found in lost.items() if claim not in unseen} == {}


@EACH
def test_every_figure_has_its_data(smoke_of, name):
    _, one = smoke_of(name)
    assert len({plot.name for plot in one.plots}) == len(one.plots) > 0
    keys = set(pd.concat([result.networks["key"] for result in one.results.values()]))
    for plot in one.plots:
        assert len(plot.data), plot.name
        assert plot.caption
        if plot.kind == "matrix":
            assert set(plot.data) == {q.name for q in one.results[plot.study].quantities}
        else:
            assert list(plot.data)[: len(COLUMNS[plot.kind])] == COLUMNS[plot.kind]
            numbers = plot.data.drop(columns="x", errors="ignore").select_dtypes("number")
            assert plot.kind == "table" or np.isfinite(numbers.to_numpy(dtype=float)).any()
        if plot.kind == "scatter":
            assert set(plot.data["key"]) <= keys
        if name in FINITE:
            values = plot.data.drop(columns=["low", "high"], errors="ignore").select_dtypes("number")
            assert np.isfinite(values.to_numpy(dtype=float)).all(), plot.name


@EACH
def test_every_number_can_be_traced_to_its_network(smoke_of, name):
    out, one = smoke_of(name)
    assert json.loads((out / "claims.json").read_text()) == one.claims()
    for study, result in one.results.items():
        table = pd.read_csv(out / study / "table.csv")
        assert list(table["key"]) == list(result.networks["key"])
        settings = {network.key: network for network in one.experiment.studies("smoke")[study].networks()}
        for key in table["key"]:
            folder = out / study / "networks" / key
            assert json.loads((folder / "config.json").read_text()) == settings[key].as_json()
            assert json.loads((folder / "result.json").read_text())["versions"] == result.versions
        assert (out / study / "histories.csv").exists() == (len(result.histories) > 0)


@EACH
def test_it_is_read_back_from_its_folders(smoke_of, name):
    out, one = smoke_of(name)
    again = load_reproduction(out)
    assert again.claims() == one.claims()
    for first, second in zip(one.plots, again.plots, strict=True):
        pd.testing.assert_frame_equal(first.data, second.data)


@pytest.mark.parametrize("scale", SCALES)
@EACH
def test_every_recipe_is_whole_and_of_the_size_that_is_said(name, scale):
    """No data is read here: the settings alone, at every scale."""
    one = EXPERIMENTS[name]
    studies = one.studies(scale)
    assert studies
    total = 0
    for study in studies.values():
        assert Study.from_json(study.as_json()) == study
        keys = [settings.key for settings in study.networks()]
        assert len(set(keys)) == len(keys)
        total += len(keys)
    assert total == NETWORKS[name][SCALES.index(scale)]
    assert set(one.differs) == set(SCALES)
    assert one.differs[scale]
    assert one.paper in PAPERS


def units_of(study):
    """The number of independent units that a study's networks make, from its settings alone."""
    networks = study.networks()
    varies_seed = unit_column(study.varied) == "seed"
    return len({one.training.seed for one in networks}) if varies_seed else len(networks)


@EACH
def test_it_says_where_too_few_trials_decide_nothing(name):
    one = EXPERIMENTS[name]
    fewest = {scale: min(map(units_of, one.studies(scale).values())) for scale in SCALES}
    assert fewest["laptop"] >= FEWEST_UNITS
    assert (fewest["paper"] < FEWEST_UNITS) == (SHARED_WORDS["FEW_SEEDS"] in one.differs["paper"])
