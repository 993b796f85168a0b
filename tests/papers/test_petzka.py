"""The experiments of the two papers of Petzka et al.: that they run and say what their claims need, not what comes."""

import numpy as np
import pytest

from flatlens.bounds.relative_generalisation import rate
from flatlens.papers import EXPERIMENTS
from flatlens.papers.relative2021.clusters import FLATNESS, approximated
from flatlens.papers.relative2021.minima import CODED, RIGHT, minima
from flatlens.papers.remarks import SUMMED_GAP
from flatlens.papers.reparam2019 import HIDDEN, LAYER_MEASURES, NETWORK_WISE, fifth_layer, well_trained


def test_the_published_settings():
    (lenet,) = EXPERIMENTS["X14"].studies("paper").values()
    seen = {(n.training.batch_size, n.training.optimiser.lr) for n in lenet.networks()}
    assert seen == {(4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)}
    assert {n.model.init for n in lenet.networks()} == {"xavier_normal", "kaiming_uniform", "uniform", "normal"}
    (mlp,) = EXPERIMENTS["X15"].studies("paper").values()
    assert len({n.training.optimiser.lr / n.training.batch_size for n in mlp.networks()}) == 1
    assert mlp.base.model.widths == (50, 50, 50, 30)
    (minima_of,) = EXPERIMENTS["X18"].studies("paper").values()
    kinds = {type(n.training.optimiser).__name__ for n in minima_of.networks()}
    assert kinds == {"SGD", "Adam", "RMSProp"}
    assert {n.data.name for n in (*lenet.networks(), *minima_of.networks())} == {"cifar10"}


@pytest.mark.xdist_group("X14")
def test_the_published_gap_stands_beside_the_plain_one(smoke_of):
    result = smoke_of("X14")[1].results["lenet"]
    plain, summed = result.networks["generalisation_gap"], result.networks[SUMMED_GAP]
    loss, n = result.networks["loss"], 30
    assert np.allclose(summed, 5 * n * (plain + loss) - n * loss)


@pytest.mark.xdist_group("X14")
def test_layer_five_before_and_after(smoke_of):
    results = smoke_of("X14")[1].results
    table, networks = fifth_layer("lenet")(results), results["lenet"].networks
    assert np.allclose(table["kappa"], table["lmax"] * networks["weight_norm[fc3]"] ** 2)
    assert np.allclose(table["kappa_tau"], table["trace"] * networks["weight_norm[fc3]"] ** 2)
    for name in ("kappa", "kappa_tau"):
        assert np.allclose(table[name], table[f"moved {name}"], rtol=1e-3)
    for name in ("lmax", "trace"):
        times = table[f"moved {name}"] / table[name]  # the factor by which fc3 is divided, squared
        assert times.between(5**2, 25**2).all()
        assert times.nunique() == len(times)


@pytest.mark.xdist_group("X15")
def test_networks_of_a_larger_training_loss_are_left_out(smoke_of):
    results = smoke_of("X15")[1].results
    networks = results["mlp"].networks
    networks = networks.assign(loss=[0.01, 0.0701, 0.07, 0.3])
    results = {"mlp": type(results["mlp"])(**{**vars(results["mlp"]), "networks": networks})}
    assert well_trained("mlp")(results)["loss"].tolist() == [0.01, 0.07]


@pytest.mark.xdist_group("X15")
def test_networks_are_held_against_every_layer_of_every_kind(smoke_of):
    outcomes = {outcome.prediction.name: outcome.statistic for outcome in smoke_of("X15")[1].outcomes}
    for name in NETWORK_WISE:
        others = outcomes[f"{name}.stronger"].name
        assert all(f"{kind}[{layer}]" in others for kind in LAYER_MEASURES for layer in HIDDEN)


@pytest.mark.xdist_group("X16")
def test_the_random_network_is_the_same_in_data_and_model(smoke_of):
    studies = EXPERIMENTS["X16"].studies("smoke") | EXPERIMENTS["X17"].studies("smoke")
    for study in studies.values():
        assert all(n.data.seed == n.model.seed == n.training.seed for n in study.networks())
    networks = smoke_of("X16")[1].results["clusters"].networks
    assert networks.groupby("separation")["test_accuracy"].mean().is_monotonic_increasing
    assert networks["test_accuracy"].max() > 0.9  # the head sees the clusters and no noise


@pytest.mark.xdist_group("X17")
def test_the_approximated_bound_is_the_theorems(smoke_of):
    results = smoke_of("X17")[1].results
    networks, samples = results["folds"].networks, approximated(results)
    one = networks[(networks["separation"] == 4.0) & (networks["seed"] == 1)]
    assert sorted(one["fold"]) == [0, 1, 2]
    bound = one["representativeness"] + 60 ** (-2 / 12) * one[FLATNESS] / 16
    row = samples[(samples["separation"] == 4.0) & (samples["seed"] == 1)].iloc[0]
    assert row["bound"] == pytest.approx(bound.mean())
    assert row["slack"] == pytest.approx(bound.mean() - one["generalisation_gap"].mean())
    assert row["excess"] == pytest.approx(bound.mean() - 10 * one["generalisation_gap"].mean())
    assert row["representativeness"] == pytest.approx(one["representativeness"].mean())
    coded = one["representativeness"] + 0.01 * one[FLATNESS] / 8
    assert row["as coded"] == pytest.approx(coded.mean())
    assert rate(60, 8) == pytest.approx(60 ** (-2 / 12))


@pytest.mark.xdist_group("X18")
def test_measures_as_defined_and_as_coded(smoke_of):
    results = smoke_of("X18")[1].results
    table, networks = minima(results), results["lenet"].networks
    assert table[[*RIGHT, *CODED]].notna().all(axis=None)
    assert np.allclose(table[CODED[3]] ** 2, table["PAC-Bayes"])
    norm = networks["weight_norm[fc3]"]
    assert np.allclose(table[CODED[1]] * norm**2, networks["kappa_trace[fc3]"])
    assert (table[CODED[1]] < table["Hessian trace"]).all()  # one layer's of all
    for name in ("relative flatness", "Fisher-Rao norm", "relative flatness, fc2", CODED[0]):
        assert np.allclose(table[name], table[f"moved {name}"], rtol=1e-6), name
    for name in ("Hessian trace", "weight norm", CODED[1], CODED[4]):
        assert not np.isclose(table[name], table[f"moved {name}"], rtol=0.1).any(), name
    assert set(table["optimiser"]) == {"SGD", "Adam"}
