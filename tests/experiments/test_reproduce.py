"""Experiments run into folders, are read back, and say what came of their claims."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest

from flatlens.errors import BadFolder, UnknownName
from flatlens.experiments.claims import Claim
from flatlens.experiments.papers import EXPERIMENTS
from flatlens.experiments.reproduce import load_reproduction, reproduce, selected
from flatlens.report.reproduction import write_atlas
from flatlens.statistics import Statistic

pytestmark = pytest.mark.xdist_group("X3")


def run(name, out, **options):
    with ThreadPoolExecutor(1) as executor:
        return reproduce(name, out, scale="smoke", executor=executor, **options)


@pytest.fixture
def tightness(smoke_of):
    return smoke_of("X3")


def test_each_claim_has_a_verdict_and_each_plot_its_data(tightness):
    _, found = tightness
    assert found.experiment is EXPERIMENTS["X3"]
    assert found.unfinished == 0
    (verdict,) = found.verdicts
    assert verdict.statistic.n == 4
    assert verdict.statistic.low <= verdict.statistic.value <= verdict.statistic.high
    (plot,) = found.plots
    assert set(plot.data["line"]) == {"A", "B", "C", "D"}
    means = plot.data.pivot(index="x", columns="line", values="y")
    assert (means["A"] <= means["B"]).all()
    assert (means["B"] <= means["C"]).all()
    assert (means["C"] <= means["D"]).all()
    assert (plot.data["low"] <= plot.data["y"]).all()


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


def test_what_is_not_reproduced_runs_once_more_at_other_seeds_and_of_another_size(tightness, tmp_path, monkeypatch):
    out, _ = tightness
    shutil.copytree(out, tmp_path / "out")
    said = Claim("never", "Nothing.", "nowhere", lambda results: Statistic("one", 1.0, 4, 0.9, 1.1), "below")
    monkeypatch.setitem(EXPERIMENTS, "X3", replace(EXPERIMENTS["X3"], claims=(said, *EXPERIMENTS["X3"].claims)))
    assert run("X3", tmp_path / "out").again == ()
    found = run("X3", tmp_path / "out", again=True)
    assert [v.claim for v in found.again] == [v.claim for v in found.verdicts]
    assert found.again[1].statistic.value != found.verdicts[1].statistic.value
    assert [row["again"]["outcome"] for row in found.claims()] == [v.outcome for v in found.again]
    assert load_reproduction(tmp_path / "out").claims() == found.claims()
    networks = pd.read_csv(tmp_path / "out" / "again" / "tightness" / "table.csv")
    assert networks["seed"].min() == 1000
    page = write_atlas([found], tmp_path / "out", [tmp_path / "out"])[0].read_text()
    assert "Once more: the same at other seeds" in page


def test_what_is_reproduced_runs_once(tightness, monkeypatch):
    out, _ = tightness
    said = Claim("always", "All.", "nowhere", lambda results: Statistic("one", 1.0, 4, 0.9, 1.1))
    monkeypatch.setitem(EXPERIMENTS, "X3", replace(EXPERIMENTS["X3"], claims=(said,)))
    assert run("X3", out, again=True).again == ()
    assert not (out / "again").exists()
