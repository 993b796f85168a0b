"""X9 and X13: that they measure what their text says, and hand their claims what these are about."""

import numpy as np
import pandas as pd
import pytest

from flatlens.papers import EXPERIMENTS
from flatlens.papers.evidence import these
from flatlens.papers.sharpening import regularised
from flatlens.papers.sharpening.regularised import (
    DRAWN_QUANTITIES,
    GAP,
    NORM,
    REGULARISERS,
    SHARP,
    regularised_networks,
)
from flatlens.training import SAM, SGD, Augmentation, Constant, InputJacobian, Mixup, ParameterJacobian, Steps


@pytest.mark.xdist_group("X9")
def test_figures_have_a_panel_for_each_quantity_and_regulariser(smoke_of):
    plots = smoke_of("X9")[1].plots
    assert [plot.kind for plot in plots] == ["bars"] + ["curves"] * 4
    for plot in plots[1:]:
        assert plot.data["panel"].nunique() == len(DRAWN_QUANTITIES) * len(REGULARISERS)
        assert plot.data.groupby("panel").size().eq(3).all()  # strengths
        assert np.isfinite(plot.data[["x", "y", "low", "high"]].to_numpy(dtype=float)).all()
    bars = plots[0].data
    assert bars.groupby(["panel", "x"]).size().eq(3).all()
    means = bars["panel"] == "mean over all kinds"
    assert bars.loc[means, "y"].dropna().between(-1, 1).all()  # at smoke scale few networks train
    assert bars.loc[~means, "low"].isna().all()  # of three networks there is no interval


@pytest.mark.xdist_group("X13")
def test_a_reference_is_a_level_line_over_the_coefficients(smoke_of):
    (plot,) = smoke_of("X13")[1].plots
    assert plot.log_x
    assert set(plot.data["line"]) == {"Input", "Param.", "ref 1e-1", "ref 1e-3"}
    assert set(plot.data["x"]) == {0.01, 0.1}
    levels = plot.data[plot.data["line"].str.startswith("ref")].groupby(["panel", "line"])["y"].nunique()
    assert (levels == 1).all()
    assert len(levels) == 2 * len(DRAWN_QUANTITIES)


def test_the_published_settings_of_the_regularisers():
    studies = EXPERIMENTS["X9"].studies("paper")
    every = [network for study in studies.values() for network in study.networks()]
    assert {n.data.name for n in every} == {"cifar10", "cifar100"}
    assert {n.model.classes for n in every if n.data.name == "cifar100"} == {100}
    assert {(type(n.model).__name__, n.model.batchnorm) for n in every} == {
        (name, batchnorm) for name in ("ResNet18", "VGG11") for batchnorm in (True, False)
    }
    for n in every:
        training, optimiser = n.training, n.training.optimiser
        assert (training.batch_size, training.max_epochs, n.samples) == (128, 90, 1000)
        assert training.schedule == Steps((50, 80), 0.1)
        assert (optimiser.momentum, optimiser.weight_decay) == (0.9, 5e-4)
    assert {n.training.mixup.beta for n in studies["vgg11_cifar10.mixup"].networks()} >= {0.0, 1.0}
    assert studies["vgg11_cifar10.mixup"].base.training.mixup == Mixup(0.0)
    assert studies["vgg11_cifar10.augmentation"].base.training.augmentation == Augmentation(pad=4, flip=True)
    assert studies["vgg11_cifar10.sam"].base.training.ascent == SAM(0.0)


def test_the_published_settings_of_the_jacobians():
    studies = EXPERIMENTS["X13"].studies("paper")
    assert len(studies) == 8
    for name, study in studies.items():
        kind, training = name.partition(".")[2], study.base.training
        large = kind == "reference_large"
        assert training.optimiser == SGD(0.1 if large else 0.001, 0.9, 5e-4)
        assert training.schedule == (Steps((30, 60), 0.1) if large else Constant())
        assert study.base.model.batchnorm
        kinds = {"input": InputJacobian, "parameters": ParameterJacobian}
        assert [type(one) for one in training.penalties] == ([kinds[kind]] if kind in kinds else [])
        assert all(one.form == "published" for one in training.penalties)


@pytest.mark.xdist_group("X9")
def test_without_strength_they_are_one_training(smoke_of):
    table = regularised_networks("label_smoothing", "augmentation", "sam")(smoke_of("X9")[1].results)
    unregularised = table[table["strength"] == 0]
    assert unregularised["kind"].nunique() == 4
    # moved images lie otherwise in memory, and round otherwise, which training with BatchNorm amplifies
    alike = unregularised[(unregularised["regulariser"] != "augmentation") | ~unregularised["batchnorm"].astype(bool)]
    for column in (GAP, NORM, "loss"):
        values = alike.groupby("kind")[column]
        assert (values.max() / values.min() - 1 < 1e-3).all()
    regularised = table[table["strength"] > 0].groupby(["kind", "regulariser"])
    assert (regularised["loss"].nunique() == 2).all()
    smoothed = table[table["regulariser"] == "label_smoothing"].set_index("strength")
    for kind, classes in (("resnet18_bn", 10), ("vgg11_bn", 2)):
        entropies = [_entropy(alpha, classes) for alpha in (0.25, 0.5)]
        losses = smoothed.loc[smoothed["kind"] == kind, "loss"].loc[[0.25, 0.5]]
        assert (losses >= entropies).all()  # smoothing counts in the loss


@pytest.mark.xdist_group("X9")
def test_networks_that_never_trained_are_marked(smoke_of):
    table = regularised_networks(*REGULARISERS)(smoke_of("X9")[1].results)
    least = np.where(table["kind"].str.startswith("resnet18"), 0.1 + 0.1 * 0.9, 0.5 + 0.1 * 0.5)
    assert (table["left out"].ne("") == table["accuracy"].lt(least)).all()
    assert table["left out"].eq("").any()


def _entropy(alpha, classes):
    p = np.full(classes, alpha / classes)
    p[0] += 1 - alpha
    return -(p * np.log(p)).sum()


@pytest.mark.xdist_group("X9")
def test_a_case_is_a_kind_of_network_under_one_regulariser(smoke_of):
    table = regularised_networks(*REGULARISERS)(smoke_of("X9")[1].results)
    assert table["case"].nunique() == 16
    assert set(table["kind"]) == {"resnet18", "resnet18_bn", "vgg11", "vgg11_bn"}
    assert (table["kind"].str.endswith("_bn") == table["batchnorm"].astype(bool)).all()


def of_two_seeds(norm, sharpness, gap, case="a"):
    """Two seeds at three strengths each, the first seed's numbers first."""
    settings = {"case": case, "kind": "k", "lr": 0.1, "strength": 2 * [0, 0.1, 0.2], "seed": 3 * [0] + 3 * [1]}
    networks = pd.DataFrame({**settings, NORM: norm, SHARP: sharpness, GAP: gap})
    return networks.assign(unit="seed " + networks["seed"].astype(str))


def test_lines_compare_both_norms_along_the_strengths_of_a_seed():
    networks = of_two_seeds(norm=[3, 2, 1, 1, 2, 3], sharpness=[1, 2, 3, 3, 1, 2], gap=[3, 2, 1, 3, 2, 1])
    found = regularised.lines(these(networks), NORM)(None)
    assert found["unit"].tolist() == ["seed 0", "seed 1"]
    assert found["better"].tolist() == pytest.approx([2, -4 / 3])  # tau of the gap: 1 and -1; -1 and 1/3
    assert found["better by size"].tolist() == pytest.approx([0, 2 / 3])


@pytest.mark.parametrize("size", [False, True])
def test_means_over_seeds_along_the_strength_are_correlated(size):
    networks = of_two_seeds(norm=[3, 2, 4, 1, 2, 5], sharpness=[1, 2, 7, 3, 1, 2], gap=[3, 2, 1, 3, 4, 1])
    found = regularised.better_by_means(these(networks), NORM, "r", size=size)(None)
    r = networks.groupby("strength")[[NORM, SHARP, GAP]].mean().corr()[GAP]
    assert found.value == pytest.approx(abs(r[NORM]) - abs(r[SHARP]) if size else r[NORM] - r[SHARP])
    assert found.n == 6


def test_the_greatest_strength_is_compared_with_none():
    networks = of_two_seeds(norm=[4, 9, 2, 6, 9, 1], sharpness=1, gap=1)
    found = regularised.at_the_strongest(these(networks), NORM)(None)
    assert found.value == pytest.approx(np.log([2 / 4, 1 / 6]).mean())


def test_cases_in_which_sharpness_correlates_with_the_gap():
    rising = of_two_seeds(norm=1, sharpness=[1, 2, 3, 1, 2, 4], gap=[1, 2, 3, 1, 2, 3], case="rising")
    falling = of_two_seeds(norm=1, sharpness=[1, 2, 3, 1, 2, 4], gap=[3, 2, 1, 3, 2, 1], case="falling")
    networks = pd.concat([rising, falling], ignore_index=True)
    assert regularised.where_sharpness_correlates(networks).tolist() == [True] * 6 + [False] * 6


def test_what_is_left_of_a_correlation_given_the_norm():
    drawn = np.random.default_rng(0).standard_normal((4, 40))
    sharpness, norm, gap = drawn[:3] + drawn[3]
    z = [np.arctanh([[np.corrcoef(x, y)[0, 1]]]) for x, y in ((sharpness, gap), (sharpness, norm), (norm, gap))]
    rest = [y - np.polyval(np.polyfit(norm, y, 1), norm) for y in (sharpness, gap)]
    left = np.arctanh(np.corrcoef(*rest)[0, 1])
    assert regularised.mediated(*z) == pytest.approx(abs(z[0][0]) - abs(left))


@pytest.mark.xdist_group("X13")
def test_similar_improvements_are_of_the_best_coefficients(smoke_of):
    results = smoke_of("X13")[1].results
    best, of_accuracy = {}, {}
    for name in regularised.JACOBIAN_REGULARISERS:
        networks = results[f"digits.{name}"].networks
        trained = networks[networks["accuracy"] >= 0.19]  # others never trained
        best[name] = trained.groupby("seed")[GAP].min()
        of_accuracy[name] = (trained["accuracy"] - trained["test_accuracy"]).groupby(trained["seed"]).min()
    found = {v.prediction.name: v.statistic.value for v in smoke_of("X13")[1].outcomes}
    assert found["similar"] == pytest.approx(np.abs(np.log(best["input"] / best["parameters"])).mean())
    without = results["digits.reference_small"].networks.set_index("seed")[GAP]
    reduced = [without - best[name] for name in regularised.JACOBIAN_REGULARISERS]
    both = np.logical_and(*(one > 0 for one in reduced))
    expected = np.abs(np.log(reduced[0][both] / reduced[1][both])).mean()
    assert found["similar.reductions"] == pytest.approx(expected, nan_ok=True)
    both = np.logical_and(*(one > 0 for one in of_accuracy.values()))
    expected = np.abs(np.log(of_accuracy["input"][both] / of_accuracy["parameters"][both])).mean()
    assert found["similar.accuracy_gap"] == pytest.approx(expected, nan_ok=True)
    gaps = [results[f"digits.{name}"].networks for name in regularised.JACOBIAN_REGULARISERS]
    both = gaps[0].merge(gaps[1], on=["seed", "coefficient"])  # each has both coefficients
    both = both[(both["accuracy_x"] >= 0.19) & (both["accuracy_y"] >= 0.19)]
    each = np.abs(np.log(both[f"{GAP}_x"] / both[f"{GAP}_y"])).groupby(both["seed"]).mean()
    assert found["similar.same_coefficients"] == pytest.approx(each.mean(), nan_ok=True)


@pytest.mark.xdist_group("X13")
def test_the_change_of_the_gap_is_from_the_network_of_the_same_seed_without_a_regulariser(smoke_of):
    results = smoke_of("X13")[1].results
    table = regularised.with_change(regularised.jacobian_networks("input"))(results)
    without = results["digits.reference_small"].networks.set_index("seed")[GAP]
    assert len(table) == len(results["digits.input"].networks)
    assert np.allclose(table["change of the gap"], table[GAP] - without[table["seed"]].to_numpy())


def test_each_step_is_to_the_next_coefficient():
    rows = [
        {"case": "one", "unit": f"seed {seed}", "seed": seed, "coefficient": c} for seed in range(6) for c in (1, 3, 9)
    ]
    table = pd.DataFrame(rows)
    falling, last = table.assign(norm=1 / table["coefficient"]), table.assign(norm=[2.0, 1.0, 4.0] * 6)
    assert regularised.falls_each_step(these(falling), "norm")({}).value == pytest.approx(-np.log(3))
    assert regularised.falls_each_step(these(last), "norm")({}).value == pytest.approx(np.log(4))
