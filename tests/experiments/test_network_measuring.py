"""What a study measures of a network beside its measures: bounds, moved copies, fewer samples, and in training."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest
import torch

import flatlens as fl
from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.distributions import RULES
from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.experiments import Study, load_study, run_study
from flatlens.experiments.network import compute
from flatlens.experiments.settings import Axis, Followed, NetworkSettings
from flatlens.files import CHECKSUMS
from flatlens.models import MLP
from flatlens.training import Until

BASE = Study.digits("smoke").setting("data.train", 40).setting("max_steps", 6).base
BASE = replace(
    BASE,
    model=MLP(inputs=64, widths=(8,), outputs=10),
    training=replace(BASE.training, until=Until()),
    measures=("mls", "relative_flatness", "weight_norm"),
)
FOLLOWED = replace(BASE, followed=Followed(("loss", "interpolation_sharpness", "mls"), every=2, samples=20))


def trained(settings):
    """The network that `compute` measured, and its data."""
    record, split = compute(settings), settings.data.load()
    model = settings.model.build().double()
    model.load_state_dict({name: weight.double() for name, weight in record.weights.items()})
    return record, model, (split.x.double(), split.y)


def test_the_sides_of_bounds_are_kept():
    record, model, data = trained(replace(BASE, bounds=("mls_chain", "nmls_bound")))
    lens = fl.Lens(fl.Problem(model, "half_squared_error", data))
    for verdict in fl.check_bounds(lens, ["mls_chain", "nmls_bound"]):
        assert record.report[f"{verdict.bound}.lhs", verdict.layer].value == verdict.lhs
        assert record.report[f"{verdict.bound}.rhs", verdict.layer].value == verdict.rhs
        assert record.report[f"{verdict.bound}.rhs", verdict.layer].note.startswith(verdict.status)
    assert record.report["nmls_bound.lhs"].value < record.report["nmls_bound.rhs"].value


def test_networks_can_be_measured_in_float32():
    exact, single = (compute(replace(BASE, dtype=dtype)).report for dtype in ("float64", "float32"))
    assert list(exact) == list(single)
    for row in (("mls", None), ("relative_flatness", "fc2")):
        assert single[row].value == pytest.approx(exact[row].value, rel=1e-4)
        assert single[row].value != exact[row].value


def test_after_a_move_all_is_measured_once_more():
    report = compute(replace(BASE, moved=("layerwise",))).report
    assert report["relative_flatness@layerwise"].value == pytest.approx(report["relative_flatness"].value, rel=1e-9)
    assert report["mls@layerwise", "fc2"].value != pytest.approx(report["mls", "fc2"].value, rel=0.1)
    assert report["weight_norm@layerwise"].value > 2 * report["weight_norm"].value
    for other in ({"seed": 1}, {"batch_size": 17}):  # each network draws factors of its own
        elsewhere = compute(replace(BASE, moved=("layerwise",), training=replace(BASE.training, **other))).report
        ratios = [r["weight_norm@layerwise"].value / r["weight_norm"].value for r in (report, elsewhere)]
        assert ratios[0] != pytest.approx(ratios[1], rel=1e-3)
    fewer = compute(replace(BASE, moved=("layerwise",), measures=("weight_norm",))).report
    assert fewer["weight_norm@layerwise"].value == report["weight_norm@layerwise"].value


def test_every_column_of_a_study_is_read_back(tmp_path):
    """Measures with options, parts, layers, a transform, sides of bounds by every rule, and settings that vary."""
    waves = replace(
        BASE,
        data=DataSettings("waves_circle", train=10, test=10),
        model=MLP(inputs=2, widths=(4,), outputs=1),
        training=replace(BASE.training, loss="mse"),
        measures=("mls", "weight_norm", "local_volume(top_k=1)", "layer_sharpness"),
        bounds=("mls_chain", "jacobian_generalisation"),
        moved=("layerwise",),
    )
    axes = (Axis("seed", (0, 1)), Axis("data.seed", (0, 1)), Axis("batch_size+lr", ((5, 0.1),)))
    with ThreadPoolExecutor(1) as executor:
        result = run_study(Study("columns", waves, axes), tmp_path / "out", executor=executor)
    columns = {name: Column.parse(name) for name in pd.read_csv(tmp_path / "out" / "table.csv", nrows=0).columns}
    assert list(columns) == list(result.networks.columns)
    assert [str(column) for column in columns.values()] == list(columns)
    settings = columns.keys() & {"key", "lr", "batch_size", "seed", "data.seed", "batch_size+lr", "outcome", "steps"}
    measured = {name: column for name, column in columns.items() if name not in settings}
    sides = [column for column in measured.values() if column.side]
    numbers = [column for column in measured.values() if not column.side]
    assert {column.measure for column in sides} == set(waves.bounds)
    assert {column.rule for column in sides} == {"", *RULES[1:]}
    assert {column.measure for column in numbers} == set(waves.measures)
    assert {column.name for column in numbers} == {"mls", "weight_norm", "local_volume", "layer_sharpness"}
    assert {column.transform for column in numbers} == {"", "layerwise"}
    assert {column.layer for column in measured.values()} == {None, "fc1", "fc2"}
    after = {replace(column, transform="") for column in numbers if column.transform}
    assert after == {column for column in numbers if not column.transform}
    report = compute(waves).report
    assert {(column.row, column.layer) for column in measured.values()} == set(report)


def test_fewer_samples_are_drawn_by_the_seed_of_the_data():
    record, model, data = trained(replace(BASE, samples=15))
    problem = fl.Problem(model, "half_squared_error", data).subset(15, torch.Generator().manual_seed(0))
    assert record.report.about["n"] == 15
    assert record.report["mls"].value == fl.measure(fl.Lens(problem), ["mls"])["mls"].value


def test_fewer_samples_leave_the_risk_that_of_all_data():
    risk = ("loss", "accuracy", "generalisation_gap")
    all_of_them, few = (compute(replace(BASE, measures=("mls", *risk), samples=k)).report for k in (None, 15))
    for name in risk:
        assert few[name].value == pytest.approx(all_of_them[name].value, rel=1e-12)
    assert few["mls"].value != pytest.approx(all_of_them["mls"].value, rel=1e-3)


def test_what_is_followed_is_measured_in_training(tmp_path):
    study = Study("followed", FOLLOWED, (Axis("seed", (0, 1)),))
    with ThreadPoolExecutor(1) as executor:
        result = run_study(study, tmp_path / "out", executor=executor)
    table = result.histories
    assert list(table.columns[:7]) == ["key", "lr", "batch_size", "seed", "step", "rate", "edge"]
    loss = table[table["measure"] == "loss"]
    assert loss["step"].tolist() == [0, 2, 4, 6] * 2
    assert (loss["edge"] == 2 / BASE.training.optimiser.lr).all()
    assert loss["key"].tolist() == [key for key in result.networks["key"] for _ in range(4)]
    assert set(table.loc[table["measure"] == "mls", "layer"]) == {"", "fc1", "fc2"}
    pd.testing.assert_frame_equal(load_study(tmp_path / "out").histories, table, check_exact=True)
    kept = compute(FOLLOWED).history.drop(columns="seconds").rename(columns={"lr": "rate"})
    first = table[table["seed"] == 0].reset_index(drop=True)
    pd.testing.assert_frame_equal(first[kept.columns], kept, check_exact=True)


def test_following_leaves_the_training_as_it_is():
    plain, followed = compute(BASE), compute(FOLLOWED)
    assert plain.history is None
    assert all(torch.equal(weight, followed.weights[name]) for name, weight in plain.weights.items())


def test_a_damaged_history_is_one_line(tmp_path):
    study = Study("followed", FOLLOWED, ())
    with ThreadPoolExecutor(1) as executor:
        run_study(study, tmp_path / "out", executor=executor)
    (path,) = (tmp_path / "out").glob("networks/*/history.csv")
    (path.parent / CHECKSUMS).unlink()  # as a version wrote it that kept none
    for damage in ("step,lr\n1,2\n", path.read_text().replace("\n2,", "\ntwo,", 1)):
        path.write_text(damage)
        with pytest.raises(BadFolder, match=r"the history .* is damaged"):
            load_study(tmp_path / "out")


def test_settings_come_back_from_their_text():
    settings = replace(FOLLOWED, bounds=("nmls_bound",), moved=("layerwise",), samples=9)
    assert NetworkSettings.from_json(settings.as_json()) == settings


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"measures": ("mlz",)}, UnknownName),
        ({"measures": ("mls",), "every": 0}, BadInput),
        ({"measures": ("mls",), "every": (3, 2)}, BadInput),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(change, error):
    with pytest.raises(error):
        Followed(**change)


@pytest.mark.parametrize("change", [{"bounds": ("mlz_chain",)}, {"moved": ("sideways",)}])
def test_unknown_names_are_refused_at_once(change):
    with pytest.raises(UnknownName):
        replace(BASE, **change)
