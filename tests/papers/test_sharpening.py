"""X6, X7, X8 and X10 of the sharpening paper: that they run and say what their claims need, not what comes."""

import numpy as np
import pandas as pd
import pytest

from flatlens.bounds import check_bounds
from flatlens.experiments.network import compute
from flatlens.measures import Lens
from flatlens.papers import EXPERIMENTS, evidence
from flatlens.papers.evidence import histories, labelled, reached, these
from flatlens.papers.sharpening.descent import (
    BOUND,
    FITTED,
    LAWS_OF_INPUTS,
    NORM,
    WIDTH,
    correlated_values,
    in_all_figures,
    last_quarter,
    log_of_halves,
    moved_alike,
    of_every_second,
    of_later_half,
    of_laws,
    of_smoothing,
    with_width,
)
from flatlens.papers.sharpening.ends import GAP, NOT_FLATTEST, SHARP, at_least, best_of, by_decay, given
from flatlens.papers.sharpening.networks import ABSOLUTE_GAP, BATCH_SHARPNESS
from flatlens.problem import Problem


def paper(name):
    return {key: study.networks() for key, study in EXPERIMENTS[name].studies("paper").items()}


def test_the_published_settings_of_gradient_descent():
    networks = paper("X6")["descent"]
    assert {n.training.optimiser.lr for n in networks} == {0.08, 0.04, 0.02}
    assert {n.training.label_smoothing for n in networks} == {0.0, 0.5, 0.75}
    assert {(n.training.batch_size, n.training.ghost_batch) for n in networks} == {(None, 5000)}
    assert {(n.samples, n.followed.samples) for n in networks} == {(2500, 2500)}
    assert {type(n.model).__name__ for n in networks} == {"VGG11", "ResNet18"}
    assert {n.data.standardise for n in networks} == {"component"}
    assert {n.followed.every for n in networks} == {5, 10, 20}


def test_the_published_settings_of_sgd():
    networks = [n for part in paper("X8").values() for n in part]
    assert {n.training.optimiser.lr for n in networks} == {0.1, 0.01, 0.001}
    assert {n.training.batch_size for n in networks} == {64, 128, 256, 512, 1024}
    assert {n.training.optimiser.weight_decay for n in networks} == {1e-4}
    ends = {(n.data.name, n.model.classes, n.training.until.loss_below) for n in networks}
    assert ends == {("cifar10", 10, 0.01), ("cifar100", 100, 0.02)}
    assert {(n.training.until.loss_window, n.training.check_every, n.samples) for n in networks} == {(10, 100, 2000)}
    assert all(n.data.seed == n.model.seed == n.training.seed for n in networks)
    (decay,) = paper("X7").values()
    assert {(n.training.batch_size, n.training.max_epochs, n.training.schedule.at) for n in decay} == {
        (128, 90, (50, 80))
    }
    cost = paper("X10")
    assert {(n.training.max_epochs, n.followed.every) for n in cost["first_epoch"]} == {(1, 5)}
    assert {(n.training.max_epochs, n.followed.every) for n in cost["training"]} == {(90, -(-50_000 // 128))}


@pytest.mark.xdist_group("X6")
def test_courses_end_where_the_unsmoothed_network_has_learned(smoke_of):
    result = smoke_of("X6")[1].results["descent"]
    whole, cut = histories(result), FITTED(result)
    assert set(cut) == set(whole)
    seeds, smoothing = (result.networks.set_index("key")[name] for name in ("seed", "label_smoothing"))
    for seed in seeds.unique():
        (plain,) = seeds.index[(seeds == seed) & (smoothing == 0.0)]
        assert (cut[plain]["accuracy"].iloc[:-1] < 0.99).all()
        assert cut[plain]["accuracy"].iloc[-1] >= 0.99
        assert {tuple(cut[key].index) for key in seeds.index[seeds == seed]} == {tuple(cut[plain].index)}


@pytest.mark.xdist_group("X6")
def test_a_figure_has_the_networks_of_one_kind_whatever_their_seeds(smoke_of):
    results = smoke_of("X6")[1].results
    networks = reached("descent")(results)
    kinds = {"even": "VGG11(batchnorm=True, seed={})", "odd": "VGG11(batchnorm=False, seed={})"}
    models = [kinds["odd" if seed % 2 else "even"].format(seed) for seed in networks["seed"]]
    table = networks.assign(model=models, rise=-networks["label_smoothing"].astype(float))
    found = in_all_figures(lambda _: table, "rise")(results)
    assert set(found.parts) == {"with BatchNorm, 0.08", "without BatchNorm, 0.08"}


@pytest.mark.xdist_group("X6")
def test_sharpness_stands_beside_the_edge_of_its_learning_rate(smoke_of):
    plot = smoke_of("X6")[1].plots[0]
    assert plot.title.startswith("Fig. 1, 6")
    edge = plot.data[plot.data["line"] == "2/lr"]
    assert plot.dashed == ("2/lr",)
    assert set(edge["panel"]) == {BATCH_SHARPNESS.name}
    assert edge["y"].to_numpy() == pytest.approx(2 / 0.08)


@pytest.mark.xdist_group("X6")
def test_networks_of_section_5_and_the_bound_of_theorem_5_1(smoke_of):
    results = smoke_of("X6")[1].results
    wide = with_width(reached("width"))(results)
    assert dict(zip(wide["model.widths"].astype(str), wide[WIDTH], strict=True)) == {"(4, 4, 4)": 4, "(8, 8, 8)": 8}
    assert {n.model.widths for n in EXPERIMENTS["X6"].studies("laptop")["linear"].networks()} == {()}
    laws = of_laws(results)
    assert set(laws["law"]) == set(LAWS_OF_INPUTS)
    assert laws["holds"].tolist() == (laws[BOUND] <= laws[NORM]).astype(float).tolist()
    assert laws[NORM].to_numpy() == pytest.approx(laws["jacobian_norm"].to_numpy(), rel=1e-5)
    settings = EXPERIMENTS["X6"].studies("smoke")["bound_square"].networks()[-1]
    model, split = settings.model.build(), settings.data.load()
    model.load_state_dict(compute(settings).weights)
    lens = Lens(Problem(model.double(), "mse", (split.x.double(), split.y.double())))
    row = check_bounds(lens, "jacobian_growth", distribution=split.distribution).of("jacobian_growth")
    kept = laws.set_index("key").loc[settings.key]
    assert kept[BOUND] == pytest.approx(row.lhs, rel=1e-4)


@pytest.mark.xdist_group("X7")
def test_the_gap_is_of_all_data_at_the_end(smoke_of):
    result = smoke_of("X7")[1].results["resnet"]
    for key, gap in zip(result.networks["key"], result.networks[ABSOLUTE_GAP.column], strict=True):
        last = result.curves[result.curves["key"] == key].sort_values("step").iloc[-1]
        assert gap == pytest.approx(abs(last["test_loss"] - last["loss"]), rel=1e-3)


@pytest.mark.xdist_group("X10")
def test_the_first_epoch_is_the_beginning_of_the_whole_training(smoke_of):
    results = smoke_of("X10")[1].results
    first, whole = (results[name] for name in ("first_epoch", "training"))
    starts = [
        one.histories.query("step == 0 and not measure.str.startswith('layer_factors')") for one in (first, whole)
    ]
    assert np.allclose(*(start.sort_values(["seed", "measure", "value"])["value"] for start in starts))
    ends = first.histories["step"].max()
    assert ends in set(whole.histories["step"])


@pytest.mark.xdist_group("X6")
def test_networks_are_chosen_by_smoothing_and_rate(smoke_of):
    results = smoke_of("X6")[1].results
    plain, smooth = (of_smoothing(reached("descent"), smoothed)(results) for smoothed in (False, True))
    assert set(plain["label_smoothing"]) == {0.0}
    assert set(smooth["label_smoothing"]) == {0.5}
    assert len(plain) + len(smooth) == 8
    networks = results["descent"].networks.assign(lr=[0.1, 0.2] * 4)
    faster = of_smoothing(lambda _: networks, False, fastest=True)(results)
    assert set(faster["lr"]) == {0.2}
    assert set(faster["label_smoothing"]) == {0.0}


def test_moves_and_values_of_two_curves():
    one = pd.DataFrame({"x": [0.0, 1, 2, 1, 0], "y": [0.0, 1, 0, -1, 3]})
    assert moved_alike("x", "y", 1)(one) == 0.5
    assert moved_alike("x", "y", -1)(one) == 0.5
    assert np.isnan(moved_alike("x", "y", -1)(one.head(3)))
    assert correlated_values("x", "y")(one) == pytest.approx(np.corrcoef(one["x"], one["y"])[0, 1])
    assert np.isnan(correlated_values("x", "y")(one.head(3)))


def test_quarters_and_every_second_look_of_a_curve():
    one = pd.DataFrame({"x": [9.0, 9, 9, 9, 1, 3, 5, 7]})
    assert last_quarter("x")(one) == 6
    assert of_later_half(log_of_halves("x"))(one) == pytest.approx(np.log(6 / 2))
    assert of_every_second(last_quarter("x"))(one) == 5  # of 9, 9, 1, 5


def test_the_flattest_and_the_best_of_a_seed():
    rows = [(seed, sharp, gap) for seed in range(8) for sharp, gap in ((1.0, 4.0), (2.0, 1.0), (4.0, 3.0))]
    rows[:3] = [(0, 1.0, 1.0), (0, 2.0, 2.0), (0, 4.0, 2.0)]  # here the flattest is the best
    table = these(labelled(pd.DataFrame(rows, columns=["seed", SHARP, GAP]), ["seed"]))
    found = at_least(table, SHARP, GAP, ["seed"])({})
    assert found.value == pytest.approx((7 * np.log(4 / 2) + np.log(1 / 2)) / 8)
    assert at_least(table, GAP, SHARP, ["seed"])({}).value == pytest.approx((7 * np.log(2 / 2.5) + np.log(1 / 3)) / 8)
    assert best_of(table, GAP, ["seed"])({})[NOT_FLATTEST].tolist() == [0.0] + 7 * [1.0]


def test_a_correlation_given_a_third_column():
    draws = np.random.default_rng(0)
    z = draws.normal(size=60)
    x, y = z + 0.3 * draws.normal(size=60), z + 0.3 * draws.normal(size=60)
    table = these(labelled(pd.DataFrame({"seed": np.repeat(range(12), 5), "x": x, "y": y, "z": z}), ["seed"]))
    r = np.corrcoef([x, y, z])
    expected = (r[0, 1] - r[0, 2] * r[1, 2]) / np.sqrt((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2))
    assert given(table, "x", "y", "z")({}).value == pytest.approx(expected)


@pytest.mark.xdist_group("X7")
def test_every_decay_is_compared_with_none_at_each_learning_rate(smoke_of, monkeypatch):
    monkeypatch.setattr(evidence, "LEARNT", -1.0)  # at smoke scale some never train
    results = smoke_of("X7")[1].results
    found = by_decay(GAP, "below")(results)
    assert set(found.parts) == {"lr 0.1, decay 0.005", "lr 0.02, decay 0.005"}
    networks = results["resnet"].networks.set_index(["lr", "weight_decay", "seed"])[GAP].astype(float)
    ratio = np.log(networks[0.1, 0.005] / networks[0.1, 0.0]).mean()
    assert found.parts["lr 0.1, decay 0.005"].value == pytest.approx(ratio)
