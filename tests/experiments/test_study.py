"""A study from its settings to its tables, with a stand-in for the measuring: no worker process is started here."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from flatlens.data.sources import DataSettings
from flatlens.errors import BadFolder
from flatlens.estimate import Estimate, Report
from flatlens.experiments import Quantity, Study, load_study, run_study, store
from flatlens.experiments import network as network_module
from flatlens.experiments import study as study_module
from flatlens.experiments.settings import in_words
from flatlens.experiments.tables import without_seeds
from flatlens.models import MLP
from flatlens.report.figures import Grid
from flatlens.training import SGD, Training, Until
from flatlens.training.optimisers import SAM

STUDY = replace(
    Study.digits("smoke")
    .setting("data.train", 40)
    .setting("widths", (16,))
    .setting("until.loss_below", 0.1)
    .over("lr", 0.1, 0.05)
    .over("batch_size", 8, 4)
    .over("seed", 0, 1),
    quantities=(
        Quantity("generalisation gap", "generalisation_gap", role="result"),
        Quantity("sqrt sharpness", "interpolation_sharpness", "sqrt"),
        Quantity("norm, first layer", "norm[fc1]"),
        Quantity("learning rate (log)", "lr", "log", role="setting"),
    ),
)


def stand_in(model, split, settings):
    """Numbers of the right names that follow from the weights alone."""
    with torch.no_grad():
        gap = (model(split.test_x) - model(split.x[:1])).square().mean()
        norms = {name: float(weight.norm()) for name, weight in model.named_parameters() if weight.ndim == 2}
    estimates = {
        ("generalisation_gap", None): Estimate(float(gap)),
        ("interpolation_sharpness", None): Estimate(sum(norms.values())),
        ("test_accuracy", None): Estimate(0.5),
        **{("norm", name.removesuffix(".weight")): Estimate(value) for name, value in norms.items()},
    }
    return Report(estimates, {"n": len(split.x)})


@pytest.fixture(autouse=True)
def _measured_by_stand_in(monkeypatch):
    monkeypatch.setattr(network_module, "measure_network", stand_in)


def run(out, study=STUDY, **options):
    with ThreadPoolExecutor(1) as executor:
        return run_study(study, out, executor=executor, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_module, "measure_network", stand_in)
        out = tmp_path_factory.mktemp("study") / "out"
        return out, run(out)


def test_networks_are_one_row_each_in_order(finished):
    _, result = finished
    networks = result.networks
    order = networks[["lr", "batch_size", "seed"]]
    assert len(networks) == 8
    assert order.equals(order.sort_values(["lr", "batch_size", "seed"], ignore_index=True))
    assert list(networks.columns) == [
        "key",
        "lr",
        "batch_size",
        "seed",
        "outcome",
        "steps",
        "generalisation_gap",
        "interpolation_sharpness",
        "test_accuracy",
        "norm[fc1]",
        "norm[fc2]",
    ]
    assert set(networks["outcome"]) == {"converged"}


def test_layers_and_curves_are_tidy(finished):
    _, result = finished
    assert list(result.layers.columns) == [
        *["key", "lr", "batch_size", "seed", "measure", "layer", "position", "value", "kind"]
    ]
    assert len(result.layers) == 8 * 2
    assert set(zip(result.layers["layer"], result.layers["position"], strict=True)) == {("fc1", 0), ("fc2", 1)}
    assert list(result.curves.columns) == ["key", "lr", "batch_size", "seed", "step", "loss", "accuracy", "test_loss"]
    ends = result.curves.groupby("key", sort=False).tail(1)
    assert (ends["step"].to_numpy() == result.networks["steps"].to_numpy()).all()
    assert (ends["loss"] < STUDY.base.training.until.loss_below).all()


def test_quantities_are_transformed_and_related(finished):
    _, result = finished
    names = [q.name for q in STUDY.quantities]
    assert list(result.values.columns) == ["key", "lr", "batch_size", "seed", "included", *names]
    np.testing.assert_allclose(result.values["sqrt sharpness"] ** 2, result.networks["interpolation_sharpness"])
    assert len(result.relations) == 6
    expected = np.corrcoef(result.values["generalisation gap"], result.values["sqrt sharpness"])[0, 1]
    assert result.relations.loc[0, "pearson"] == pytest.approx(expected)
    assert set(result.within["group"]) == {"lr", "lr, batch_size", "seed"}
    assert (result.within["y"] == "generalisation gap").all()


def test_the_result_is_rebuilt_from_the_folders_alone(finished):
    out, result = finished
    again = load_study(out)
    for name in ("networks", "layers", "curves", "values", "relations", "within"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(result, name), check_exact=True)
    assert (again.findings, again.settings, again.versions) == (result.findings, result.settings, result.versions)
    assert again.settings == STUDY.as_json()
    assert again.versions["threads"] == "1"


def test_the_same_study_elsewhere_gives_the_same_bytes(finished, tmp_path):
    out, _ = finished
    run(tmp_path / "elsewhere")
    for name in ("table.csv", "relations.csv"):
        assert (tmp_path / "elsewhere" / name).read_bytes() == (out / name).read_bytes()
    table = pd.read_csv(out / "table.csv")
    pd.testing.assert_frame_equal(table, load_study(out).networks, check_exact=True)


def test_finished_networks_are_not_computed_again(finished, monkeypatch):
    out, result = finished
    monkeypatch.setattr(network_module, "train", lambda *_, **__: pytest.fail("trained again"))
    seen = []
    again = run(out, progress=lambda *what: seen.append(what))
    assert seen == [("networks", 8, 8)]
    assert again.networks.equals(result.networks)


def test_networks_of_an_earlier_result_are_not_computed_again(finished, tmp_path, monkeypatch):
    """Half of the networks come from its tables, with the seconds of half; the study ends in the same bytes."""
    out, whole = finished
    shutil.copytree(out, tmp_path / "half")
    trained = [network.key for network in STUDY.networks()[::2]]
    for key in trained:
        shutil.rmtree(tmp_path / "half" / "networks" / key)
    half = load_study(tmp_path / "half")
    result = run(tmp_path / "out", known=half)
    assert sorted(path.name for path in (tmp_path / "out" / "networks").iterdir()) == sorted(trained)
    for name in ("table.csv", "relations.csv", "gap.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()
    for name in ("layers", "curves", "values"):
        pd.testing.assert_frame_equal(getattr(result, name), getattr(whole, name), check_exact=True)
    assert (result.versions, result.findings, result.unfinished) == (whole.versions, whole.findings, 0)
    monkeypatch.setattr(network_module, "train", lambda *_, **__: pytest.fail("trained again"))
    assert run(tmp_path / "out").networks.equals(whole.networks)  # the tables are kept in the folder
    again = run(tmp_path / "more", STUDY.over("lr", 0.1), known=whole)
    assert again.networks.equals(whole.networks[whole.networks["lr"] == 0.1].reset_index(drop=True))
    assert again.seconds == pytest.approx(whole.seconds / 2, abs=0.1)
    assert again.versions == whole.versions
    written = (tmp_path / "more" / "known.zip").read_bytes()
    middle = len(written) // 2
    for damaged in (b"PK", written[:middle] + bytes([written[middle] ^ 255]) + written[middle + 1 :]):
        (tmp_path / "more" / "known.zip").write_bytes(damaged)
        with pytest.raises(BadFolder, match=r"known\.zip' does not hold the tables of an earlier run, or is damaged"):
            load_study(tmp_path / "more")


def test_a_study_grows_in_its_folder_and_trains_only_what_is_new(finished, tmp_path, monkeypatch):
    """Another value, another seed and another axis, spelled 0 for 0.0: the same bytes as of the whole at once."""
    out, whole = finished
    shutil.copytree(out, tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "networks").rglob("*.json")}
    trained, train = [], network_module.train
    monkeypatch.setattr(network_module, "train", lambda *given, **more: trained.append(1) or train(*given, **more))
    seeds = STUDY.over("seed", 0, 1, 2).over("lr", 0.05, 0.1, 0.2)
    run(tmp_path / "out", seeds, together=1)
    assert len(trained) == 18 - 8
    grown = run(tmp_path / "out", seeds.over("momentum", 0, 0.5), together=1)
    assert len(trained) == 36 - 8
    assert all(file.stat().st_mtime_ns == then for file, then in before.items())
    assert set(whole.networks["key"]) < set(grown.networks["key"])
    run(tmp_path / "at once", seeds.over("momentum", 0.0, 0.5), together=1)
    for name in ("study.json", "table.csv", "relations.csv", "gap.csv", "derived.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()
    with pytest.raises(BadFolder, match="holds 28 networks that this study does not have"):
        run(tmp_path / "out", STUDY)
    assert load_study(tmp_path / "out").networks.equals(grown.networks)


def test_none_is_a_value_of_a_setting_by_this_name(tmp_path):
    axes = STUDY.over("lr", 0.1).over("batch_size", 8).over("ascent", None, SAM(0.01))
    result = run(tmp_path / "out", replace(axes, base=replace(axes.base, measures=())))
    assert result.networks["ascent"].tolist() == ["none", "SAM(rho=0.01)"] * 2
    assert pd.read_csv(tmp_path / "out" / "table.csv")["ascent"].tolist() == ["none", "SAM(rho=0.01)"] * 2
    assert set(result.differences["setting"]) == {"ascent"}
    assert set(result.differences["reference"]) == {"none"}
    assert Grid.of(result).colours == ("none", "SAM(rho=0.01)")
    assert "ascent none" in in_words(axes.networks()[0], axes.varied)
    assert "nan" not in set(without_seeds(result.networks, axes.varied).stack())


def test_nothing_is_derived_again_unless_something_changed(finished, tmp_path, monkeypatch):
    out, whole = finished
    shutil.copytree(out, tmp_path / "out")
    derived, derive = [], study_module.relate_all
    monkeypatch.setattr(study_module, "relate_all", lambda *given: derived.append(1) or derive(*given))
    for name in ("relations", "within", "gap_correlations"):
        pd.testing.assert_frame_equal(
            getattr(run(tmp_path / "out"), name), getattr(load_study(out, again=True), name), check_exact=True
        )
    assert len(derived) == 3  # those asked for
    assert run(tmp_path / "out").findings == whole.findings
    (tmp_path / "out" / "derived.json").write_text("{")
    run(tmp_path / "out")
    monkeypatch.setattr(store, "_source", lambda: "another version of flatlens")
    run(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "networks" / whole.networks["key"][0])
    assert load_study(tmp_path / "out").unfinished == 1
    assert len(derived) == 6
    run(tmp_path / "out")
    run(tmp_path / "out")
    assert len(derived) == 6


def test_an_earlier_result_that_varied_other_settings_has_the_columns_of_this_study(finished, tmp_path):
    _, whole = finished
    wider = STUDY.over("lr", 0.1).over("momentum", 0.0, 0.5)
    run(tmp_path / "anew", wider)
    result = run(tmp_path / "out", wider, known=whole)
    assert len(list((tmp_path / "out" / "networks").iterdir())) == 4
    assert (tmp_path / "out" / "table.csv").read_bytes() == (tmp_path / "anew" / "table.csv").read_bytes()
    narrower = run(tmp_path / "narrow", STUDY.over("lr", 0.1).setting("momentum", 0.5), known=result)
    assert "momentum" not in narrower.networks
    assert not list((tmp_path / "narrow" / "networks").iterdir())


def test_two_earlier_results_are_both_kept(finished, tmp_path, monkeypatch):
    _, whole = finished
    halves = [run(tmp_path / str(lr), STUDY.over("lr", lr), known=whole) for lr in (0.1, 0.05)]
    monkeypatch.setattr(network_module, "train", lambda *_, **__: pytest.fail("trained again"))
    out = tmp_path / "both"
    for half in halves:
        study_module.Store.create(out, STUDY).keep(half, [network.key for network in STUDY.networks()], None)
    assert run(out).networks.equals(whole.networks)


def test_earlier_results_of_other_versions_are_refused_unless_mixed(finished, tmp_path):
    old = replace(finished[1], versions={**finished[1].versions, "torch": "9.9"})
    part = STUDY.over("lr", 0.1, 0.2)
    with pytest.raises(BadFolder, match=r"torch 9\.9 there"):
        run(tmp_path / "out", part, known=old)
    assert not (tmp_path / "out" / "known.zip").exists()
    mixed = run(tmp_path / "out", part, known=old, mixed=True)
    assert set(mixed.versions["torch"].split(" | ")) == {torch.__version__, "9.9"}
    run(tmp_path / "complete", STUDY.over("lr", 0.1), known=old)  # nothing is left: nothing is mixed


def test_a_failed_run_is_told_and_taken_again_when_asked(tmp_path, monkeypatch):
    broken = STUDY.networks()[2]

    def sometimes(model, split, settings):
        if settings == broken:
            raise RuntimeError("a bad day")
        return stand_in(model, split, settings)

    monkeypatch.setattr(network_module, "measure_network", sometimes)
    result = run(tmp_path / "out")
    assert result.failed == [(broken.key, "RuntimeError: a bad day")]
    assert len(result.networks) == 7
    assert any("1 network failed and is missing" in sentence for sentence in result.findings)
    monkeypatch.setattr(network_module, "measure_network", stand_in)
    assert run(tmp_path / "out").failed == result.failed  # it stays recorded until it is asked for
    mended = run(tmp_path / "out", retry_failed=True)
    assert mended.failed == []
    assert len(mended.networks) == 8


def test_networks_that_do_not_interpolate_are_kept_flagged_and_left_out(tmp_path):
    study = STUDY.over("lr", 0.1, 1e4).setting("max_steps", 2000)
    result = run(tmp_path / "out", study)
    diverged = result.networks[result.networks["lr"] == 1e4]
    assert set(diverged["outcome"]) == {"diverged"}
    assert diverged["generalisation_gap"].isna().all()
    assert [key for key, _ in result.excluded] == list(diverged["key"])
    assert "diverged" in result.excluded[0][1]
    assert result.relations.loc[0, "n"] == 4
    assert any("4 networks diverged and are excluded" in sentence for sentence in result.findings)


def test_a_study_in_which_nothing_interpolates_still_has_a_result(tmp_path):
    result = run(tmp_path / "out", STUDY.setting("max_steps", 3))
    assert set(result.networks["outcome"]) == {"out of steps"}
    assert not result.values["included"].any()
    assert result.relations["pearson"].isna().all()
    assert result.findings[0].startswith("0 of 8 networks interpolate")
    assert "after 3 steps" in result.excluded[0][1]
    assert repr(result).split("\n") == [*result.answer, "", "<StudyResult of digits: 8 networks, 8 left out>"]
    assert result.answer[0].startswith("No measure can be correlated with the generalisation gap")


def test_a_regression_that_does_not_end_is_told_without_accuracy_and_batch_size(tmp_path):
    training = Training(SGD(0.01), loss="mse", until=Until(loss_below=1e-9), max_steps=2)
    base = replace(STUDY.base, data=DataSettings("eight_points"), model=MLP(1, (16,), 1), training=training)
    ((_, why),) = run(
        tmp_path, replace(STUDY, base=base).over("lr", 0.01).over("batch_size", None).over("seed", 0)
    ).excluded
    assert re.fullmatch(r"loss \S+ after 2 steps \(learning rate 0.01, full batch, seed 0\)", why)


def test_a_study_in_which_everything_fails_says_the_first_error(tmp_path, monkeypatch):
    monkeypatch.setattr(network_module, "measure_network", lambda *_: 1 / 0)
    with pytest.raises(BadFolder, match="8 failed; the first error: ZeroDivisionError"):
        run(tmp_path / "out")


def test_a_partial_study_says_so(finished, tmp_path):
    out, _ = finished
    shutil.copytree(out, tmp_path / "part")
    for network in STUDY.networks()[1:4]:
        shutil.rmtree(tmp_path / "part" / "networks" / network.key)
    result = load_study(tmp_path / "part")
    assert result.unfinished == 3
    assert any("3 networks are not finished" in sentence for sentence in result.findings)


def test_other_versions_are_refused_when_work_is_left_unless_mixed(finished, tmp_path, monkeypatch):
    shutil.copytree(finished[0], tmp_path / "out")
    other = {**study_module.versions(), "torch": "9.9"}
    monkeypatch.setattr(study_module, "versions", lambda: other)
    monkeypatch.setattr(network_module, "versions", lambda: other)
    run(tmp_path / "out")  # complete: nothing is mixed
    shutil.rmtree(tmp_path / "out" / "networks" / STUDY.networks()[0].key)
    with pytest.raises(BadFolder, match=r"torch .* there, 9\.9 here"):
        run(tmp_path / "out")
    assert set(run(tmp_path / "out", mixed=True).versions["torch"].split(" | ")) == {torch.__version__, "9.9"}
