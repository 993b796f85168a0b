"""Experiments run into folders, are read back, and say what came of their claims."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest

from flatlens.errors import BadFolder, UnknownName
from flatlens.experiments.store import Store
from flatlens.papers import EXPERIMENTS
from flatlens.papers import reproduction as reproduce_module
from flatlens.papers.experiment import Prediction
from flatlens.papers.reproduction import (
    load_reproduction,
    read_studies,
    reproduce,
    rerun,
    save_archive,
    selected,
)
from flatlens.papers.summary import rows_of
from flatlens.report.figures.plots import plot_figure
from flatlens.report.reproduction import atlas_html, write_atlas
from flatlens.statistics import Statistic

pytestmark = pytest.mark.xdist_group("X3")


def run(name, out, **options):
    with ThreadPoolExecutor(1) as executor:
        return reproduce(name, out, scale="smoke", executor=executor, **options)


@pytest.fixture
def tightness(smoke_of):
    return smoke_of("X3")


def test_each_prediction_has_an_outcome_and_each_plot_its_data(tightness):
    _, found = tightness
    assert found.experiment is EXPERIMENTS["X3"]
    assert found.unfinished == 0
    assert [outcome.prediction for outcome in found.outcomes] == list(EXPERIMENTS["X3"].predictions)
    for outcome in found.outcomes:
        for case in outcome.statistic.parts.values() or [outcome.statistic]:
            assert case.units is not None
    plot = found.plots[0]
    assert set(plot.data["line"]) == {"A", "B", "C", "D"}
    means = plot.data.pivot(index="x", columns="line", values="y")
    assert (means["A"] <= means["B"]).all()
    assert (means["B"] <= means["C"]).all()
    assert (means["C"] <= means["D"]).all()
    assert (plot.data["low"] <= plot.data["y"]).all()


def test_run_again_it_is_only_read(tightness, monkeypatch):
    out, found = tightness
    monkeypatch.setattr("flatlens.experiments.network.compute", None)
    assert [v.as_json() for v in run("X3", out).outcomes] == [v.as_json() for v in found.outcomes]


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


def test_an_experiment_that_another_process_has_just_begun_is_not_foreign(tmp_path, monkeypatch):
    (tmp_path / "experiment.json").write_text('{"experiment": "X3", "scale": "smoke"}')
    looked = iter([False])  # the other process wrote its note after this look
    monkeypatch.setattr(reproduce_module, "is_reproduction", lambda out: next(looked, True))
    monkeypatch.setattr(reproduce_module, "run_study", lambda *_, **__: pytest.fail("begun"))
    with pytest.raises(pytest.fail.Exception, match="begun"):
        run("X3", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"experiment": "X99", "scale": "smoke"}', '{"experiment": "X3", "scale": 1}']
)
def test_a_damaged_note_is_one_line(tmp_path, text):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(BadFolder, match=r"experiment\.json"):
        load_reproduction(tmp_path)


def test_names_are_looked_up():
    assert [one.id for one in selected(["x4", "X1"])] == ["X4", "X1"]
    assert [one.id for one in selected(["x4", "X4"])] == ["X4"]
    assert selected(["all"]) == selected(["X4", "ALL"]) == list(EXPERIMENTS.values())
    for names in (["X99"], ["all", "X99"]):
        with pytest.raises(UnknownName, match="X99"):
            selected(names)
    with pytest.raises(UnknownName, match="scale"):
        reproduce("X3", "nowhere", scale="huge")


def test_it_runs_a_second_time_at_other_seeds_and_of_another_size(tightness, tmp_path, monkeypatch):
    out, _ = tightness
    shutil.copytree(out, tmp_path / "out")
    said = Prediction("never", "Nothing.", "nowhere", lambda results: Statistic("one", 1.0, 4, 0.9, 1.1), "below")
    monkeypatch.setitem(
        EXPERIMENTS, "X3", replace(EXPERIMENTS["X3"], predictions=(said, *EXPERIMENTS["X3"].predictions))
    )
    assert run("X3", tmp_path / "out").again == ()
    found = run("X3", tmp_path / "out", again=True)
    assert [v.prediction for v in found.again] == [v.prediction for v in found.outcomes]
    assert found.again[2].statistic.value != found.outcomes[2].statistic.value
    assert [row["again"]["outcome"] for row in found.claims()] == [v.conclusion for v in found.again]
    assert load_reproduction(tmp_path / "out").claims() == found.claims()
    networks = pd.read_csv(tmp_path / "out" / "again" / "tightness" / "table.csv")
    assert networks["seed"].min() == 1000
    page = write_atlas([found], tmp_path / "out", [tmp_path / "out"])[0].read_text()
    assert "Replication: the same studies with other seeds" in page


@pytest.mark.parametrize("begun", ["before its settings", "before its first network", "after its first network"])
def test_a_rerun_that_was_stopped_counts_as_none(tightness, tmp_path, begun):
    out, found = tightness
    shutil.copytree(out, tmp_path / "out")
    again = tmp_path / "out" / "again" / "tightness"
    if begun == "before its settings":
        again.mkdir(parents=True)
    else:
        store = Store.create(again, rerun(found.experiment.studies("smoke")["tightness"]))
        if begun == "after its first network":
            store.folder(store.study().networks()[0].key).mkdir()
    for one in (load_reproduction(tmp_path / "out"), run("X3", tmp_path / "out")):
        assert one.claims() == found.claims()
        assert one.again == ()


def test_several_are_an_atlas_with_an_overview(tightness):
    _, found = tightness
    figures = [plot_figure(plot, found.results) for plot in found.plots]
    other = replace(found, experiment=replace(found.experiment, id="X99"))
    alone, both = atlas_html([found], [figures], ["."]), atlas_html([found, other], [figures] * 2, ["X3", "X99"])
    assert "At a glance" not in alone
    assert "At a glance" in both
    assert '<a href="#X99">X99</a></td>' in both
    for link in ("X99/claims.json", "X99/tightness/study.json", "X99/figures/tightness.csv"):
        assert f'href="{link}"' in both


def test_the_page_of_all_outcomes_has_each_with_its_picture(tightness, tmp_path, monkeypatch, docs_script):
    _, found = tightness
    atlas = docs_script("atlas")
    monkeypatch.setattr(atlas, "HERE", tmp_path)
    pictures = tmp_path / "images" / "atlas"
    pictures.mkdir(parents=True)
    (pictures / "X3.png").write_text("of an earlier page")
    atlas.draw([found], pictures)
    assert sorted(one.name for one in pictures.iterdir()) == [
        "X3_at_smoke_scale-factors.svg", "X3_at_smoke_scale-tightness.svg",
    ]  # fmt: skip
    page = atlas.page([found])
    ran = [outcome.statistic for outcome in found.outcomes if outcome.statistic.n]
    for statistic in ran:
        assert f"| {atlas.value_of(statistic)} | {statistic.size} |" in page
    waiting = len(found.outcomes) - len(ran)
    assert waiting > 0
    assert f"<summary>{len(ran)} rows, {waiting} more wait for networks</summary>" in page
    assert "[X3 at smoke scale](#x3)" in page
    for plot in found.plots:
        assert f"![{plot.title}](images/atlas/X3_at_smoke_scale-{plot.name}.svg)" in page
    link, picture = "[X3 at smoke scale](#x3)", "[picture](images/atlas/X3_at_smoke_scale-tightness.svg)"
    assert f"| Fig. G.4 | an MLP through training: A, B, C and D of Eq. 48 | {link}, {picture} |" in page
    assert "| Fig. 1 | a network as feature extractor and model | none | a drawing" in page
    atlas.write_claims([replace(found, again=found.outcomes)], tmp_path / "claims")
    rows = pd.read_csv(tmp_path / "claims" / "X3.csv", keep_default_na=False)
    for outcome, row in zip(found.outcomes, rows.to_dict("records"), strict=True):
        assert (row["the paper's words"], row["tested"]) == (outcome.prediction.quote, outcome.tested_as)
        assert row["value, 95% interval"] == atlas.value_of(outcome.statistic)
        assert row["second run"] == f"{outcome.marked} {outcome.statistic.in_words}, n = {outcome.statistic.size}"


def test_the_pages_are_made_from_kept_tables(tightness, tmp_path, monkeypatch, docs_script):
    out, found = tightness
    scripts = docs_script("reproductions")
    atlas, docs = scripts.atlas, tmp_path / "docs"
    monkeypatch.setattr(atlas, "HERE", docs)
    monkeypatch.setattr(scripts.papers, "FOLDER", docs / "papers")
    (docs / "papers").mkdir(parents=True)
    (docs / "papers" / "compression.md").write_text(f"# Title\n{scripts.papers.BEGIN}\n{scripts.papers.END}\n")
    (docs / "tables").mkdir()
    (docs / "tables" / "earlier.json").write_text("[]")
    shutil.copytree(out, tmp_path / "runs" / "X3")
    scripts.main(str(tmp_path / "runs"))
    assert (docs / "atlas.md").read_text() == atlas.page([found])
    assert (docs / "claims" / "X3.csv").is_file()
    assert found.plots[0].title in (docs / "papers" / "compression.md").read_text()
    assert (docs / "changed.md").read_text().startswith("# Outcomes that changed")
    shutil.rmtree(tmp_path / "runs")
    kept = tmp_path / "docs" / "tables" / "X3-smoke.zip"
    assert kept.read_bytes() == save_archive(found, tmp_path / "X3.zip").read_bytes()
    scripts.main()
    assert (docs / "atlas.md").read_text() == atlas.page([found])


def test_a_study_that_has_not_ended_and_a_laptop_run_without_its_second_are_not_kept(
    tightness, tmp_path, monkeypatch, docs_script
):
    out, found = tightness
    atlas, kept = docs_script("atlas"), tmp_path / "kept"
    half = shutil.copytree(out, tmp_path / "runs" / "X3")
    (half / "tightness" / "networks" / next(os.walk(half / "tightness" / "networks"))[1][0]).rename(tmp_path / "lost")
    atlas.keep(tmp_path / "runs", kept)
    monkeypatch.setattr(atlas, "load_reproduction", lambda _, ended: replace(found, scale="laptop"))
    atlas.keep(tmp_path / "runs", kept)
    assert not list(kept.iterdir())


def test_studies_that_were_kept_stay_beside_those_that_ended_later(tightness, tmp_path, monkeypatch, docs_script):
    _, found = tightness
    atlas, kept = docs_script("atlas"), tmp_path / "kept"
    (tmp_path / "runs" / "X3").mkdir(parents=True)
    monkeypatch.setattr(atlas, "is_reproduction", lambda _: True)
    for name in ("tightness", "later"):
        one = replace(found, results={name: found.results["tightness"]})
        monkeypatch.setattr(atlas, "load_reproduction", lambda _, ended, one=one: one)
        atlas.keep(tmp_path / "runs", kept)
    assert read_studies(kept / "X3-smoke.zip")[2].keys() == {"tightness", "later"}


def test_laptop_scale_stands_beside_desk_scale(tightness, tmp_path, docs_script):
    _, found = tightness
    atlas = docs_script("atlas")
    laptop, desk = replace(found, scale="laptop", again=found.outcomes), replace(found, scale="desk")
    page = atlas.page([laptop, desk])
    assert page.count(", at desk scale: ") == page.count("## X3\n") == 1
    assert "[X3 at desk scale](#x3)" in page
    row = rows_of([laptop])[0][0]
    atlas.write_claims([laptop, desk], tmp_path)
    written = pd.read_csv(tmp_path / "X3.csv", keep_default_na=False)
    assert written["at laptop scale"][0] == f"{row.marked} {row.outcome.statistic.in_words}"


def test_pictures_that_take_too_much_are_refused_and_large_ones_become_png(
    tightness, tmp_path, monkeypatch, docs_script
):
    _, found = tightness
    atlas = docs_script("atlas")
    monkeypatch.setattr(atlas, "LARGEST", 1000)
    atlas.draw([found], tmp_path)
    written = list(tmp_path.iterdir())
    assert {one.suffix for one in written} == {".png"}
    monkeypatch.setattr(atlas, "MOST", sum(one.stat().st_size for one in written) - 1)
    with pytest.raises(BadFolder, match="draw fewer"):
        atlas.draw([found], tmp_path)
