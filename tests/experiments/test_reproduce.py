"""Experiments run into folders, are read back, and say what came of their claims."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from flatlens.errors import BadFolder, UnknownName
from flatlens.experiments import Study
from flatlens.experiments.experiment import SCALES
from flatlens.experiments.papers import EXPERIMENTS
from flatlens.experiments.reproduce import load_reproduction, reproduce, selected

OUTCOMES = {"reproduced", "not reproduced", "inconclusive"}


def run(name, out, **options):
    with ThreadPoolExecutor(1) as executor:
        return reproduce(name, out, scale="smoke", executor=executor, **options)


@pytest.fixture(scope="module")
def tightness(tmp_path_factory):
    out = tmp_path_factory.mktemp("x3") / "out"
    return out, run("x3", out)


def test_each_claim_has_a_verdict_and_each_plot_its_data(tightness):
    out, found = tightness
    assert found.experiment is EXPERIMENTS["X3"]
    assert found.unfinished == 0
    (verdict,) = found.verdicts
    assert verdict.statistic.n == 4
    assert verdict.statistic.low <= verdict.statistic.value <= verdict.statistic.high
    assert json.loads((out / "claims.json").read_text()) == [verdict.as_json()]
    (plot,) = found.plots
    assert set(plot.data["line"]) == {"A", "B", "C", "D"}
    means = plot.data.pivot(index="x", columns="line", values="y")
    assert (means["A"] <= means["B"]).all()
    assert (means["B"] <= means["C"]).all()
    assert (means["C"] <= means["D"]).all()
    assert (plot.data["low"] <= plot.data["y"]).all()


def test_it_is_read_back_from_its_folders(tightness):
    out, found = tightness
    again = load_reproduction(out)
    assert [v.as_json() for v in again.verdicts] == [v.as_json() for v in found.verdicts]
    assert again.plots[0].data.equals(found.plots[0].data)


def test_run_again_it_is_only_read(tightness, monkeypatch):
    out, found = tightness
    monkeypatch.setattr("flatlens.experiments.network.compute", None)
    assert [v.as_json() for v in run("X3", out).verdicts] == [v.as_json() for v in found.verdicts]


def test_another_experiment_or_scale_is_refused(tightness):
    out, _ = tightness
    with pytest.raises(BadFolder, match="holds X3 at smoke scale"):
        run("X4", out)
    with pytest.raises(BadFolder, match="holds X3 at smoke scale"):
        reproduce("X3", out, scale="laptop")


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(BadFolder, match=r"holds other files \(thesis.tex\)"):
        run("X3", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(BadFolder, match="holds no experiment"):
        load_reproduction(tmp_path)
    with pytest.raises(BadFolder, match="is a file"):
        run("X3", tmp_path / "thesis.tex")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"experiment": "X99", "scale": "smoke"}', '{"experiment": "X3", "scale": 1}']
)
def test_a_damaged_note_is_one_line(tmp_path, text):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(BadFolder, match=r"experiment\.json"):
        load_reproduction(tmp_path)


def test_names_are_looked_up():
    assert [one.id for one in selected(["x4", "X1"])] == ["X4", "X1"]
    assert selected(["all"]) == list(EXPERIMENTS.values())
    with pytest.raises(UnknownName, match="X99"):
        selected(["X99"])
    with pytest.raises(UnknownName, match="scale"):
        reproduce("X3", "nowhere", scale="huge")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_recipe_is_whole(name, scale):
    """No data is read here: the settings alone, at every scale."""
    one = EXPERIMENTS[name]
    studies = one.studies(scale)
    assert studies
    for study in studies.values():
        assert Study.from_json(study.as_json()) == study
        assert len({settings.key for settings in study.networks()}) == len(study.networks())
    assert len({claim.name for claim in one.claims}) == len(one.claims) > 0
    assert set(one.differs) == set(SCALES)
    assert one.paper in {"compression", "sharpening", "reparam2019", "relative2021"}
