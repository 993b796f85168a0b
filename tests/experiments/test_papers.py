"""Every experiment runs at its smallest scale, has data for every figure, and weighs every claim; not what comes."""

import json

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments import Study
from flatlens.experiments.claims import Outcome
from flatlens.experiments.experiment import SCALES
from flatlens.experiments.papers import EXPERIMENTS
from flatlens.experiments.reproduce import load_reproduction
from flatlens.measures.papers import PAPERS

COLUMNS = {
    "scatter": ["panel", "x", "y", "group", "key"],
    "curves": ["panel", "x", "line", "y", "low", "high"],
    "table": ["panel", "row", "column", "text"],
    "bars": ["panel", "x", "group", "y", "low", "high"],
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in EXPERIMENTS]
)


@EACH
def test_every_network_is_measured_and_every_claim_weighed(smoke_of, name):
    _, one = smoke_of(name)
    assert one.unfinished == 0
    assert not any(result.failed for result in one.results.values())
    assert len({claim.name for claim in one.experiment.claims}) == len(one.verdicts)
    networks = sum(len(result.networks) for result in one.results.values())
    for verdict in one.verdicts:
        found = verdict.statistic
        assert verdict.outcome in Outcome.__args__
        assert found.name
        assert found.n <= networks
        assert np.isfinite(found.value) or found.note or found.n < 4, verdict
        assert verdict.claim.source.startswith(one.experiment.paper)


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
            assert np.isfinite(numbers.to_numpy(dtype=float)).any()
        if plot.kind == "scatter":
            assert set(plot.data["key"]) <= keys


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
def test_every_recipe_is_whole(name, scale):
    """No data is read here: the settings alone, at every scale."""
    one = EXPERIMENTS[name]
    studies = one.studies(scale)
    assert studies
    for study in studies.values():
        assert Study.from_json(study.as_json()) == study
        assert len({settings.key for settings in study.networks()}) == len(study.networks())
    assert set(one.differs) == set(SCALES)
    assert one.differs[scale]
    assert one.paper in PAPERS
