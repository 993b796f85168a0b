"""The experiments of the two papers of Petzka et al.: that they run and say what their claims need, not what comes."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from torch import nn

import flatlens as fl
from flatlens.bounds.relative_generalisation import rate
from flatlens.data.synthetic import clusters, mixture
from flatlens.papers import EXPERIMENTS
from flatlens.papers.coded_bound import cross_validated, flatness, preimages
from flatlens.papers.contrasts import draws_of, size_over_draws
from flatlens.papers.evidence import these, trained_ones
from flatlens.papers.experiment import SUMMED_GAP
from flatlens.papers.feature_space import FLIPPED, FOLDS, in_folds, measured, printed, stored
from flatlens.papers.relative2021 import (
    AS_CODED,
    BY_DEVIATION,
    CODED,
    FLATNESS,
    RIGHT,
    THEOREM_4,
    TIMES,
    approximated,
    at_end,
    chances,
    each_step,
    estimated,
    in_blocks,
    in_subspace,
    minima,
    minima_redrawn,
    moved_by,
    none_near,
    risen,
    rises,
    weaker_over_draws,
    worst_case,
)
from flatlens.papers.reparam2019 import (
    HIDDEN,
    LAYER_MEASURES,
    NETWORK_WISE,
    OF_TABLE_1,
    apart,
    layer_redrawn,
    lenets,
    mlps_by_errors,
    ranks_of,
    well_trained,
    within,
)
from flatlens.papers.reproduction import rerun
from flatlens.training import Ridge, Training, train
from flatlens.training.optimisers import solution


def test_the_published_settings():
    lenet = EXPERIMENTS["X14"].studies("paper")["lenet"]
    seen = {(n.training.batch_size, n.training.optimiser.lr) for n in lenet.networks()}
    assert seen == {(4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)}
    assert {n.model.init for n in lenet.networks()} == {"xavier_normal", "kaiming_uniform", "uniform", "normal"}
    for scale in ("desk", "paper"):
        printed = EXPERIMENTS["X14"].studies(scale)["lenet_printed"].networks()
        assert {(n.training.batch_size, n.training.optimiser.lr) for n in printed} == seen
        assert {n.model.init for n in printed} - {n.model.init for n in lenet.networks()} == {"normal_sd"}
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
    table, networks = lenets(results), results["lenet"].networks
    assert np.allclose(table["kappa"], table["lmax"] * networks["weight_norm[fc3]"] ** 2)
    assert np.allclose(table["kappa_tau"], table["trace"] * networks["weight_norm[fc3]"] ** 2)
    for name in ("kappa", "kappa_tau"):
        assert np.allclose(table[name], table[f"moved {name}"], rtol=1e-3)
    for name in ("lmax", "trace"):
        times = table[f"moved {name}"] / table[name]  # the factor by which fc3 is divided, squared
        assert times.between(5**2, 25**2).all()
        assert times.nunique() == len(times)
        norms = networks["weight_norm@layerwise[fc3]"] / networks["weight_norm[fc3]"]  # 1 / factor
        assert np.allclose(table[f"multiplied {name}"], table[name] * norms**2)
    assert ranks_of(lenets)(results)["moved trace"].tolist() == table["moved trace"].rank().tolist()
    inside = table.groupby("init")["moved trace"].rank()
    assert ranks_of(lenets, "init")(results)["moved trace"].tolist() == inside.tolist()


@pytest.mark.xdist_group("X15")
def test_networks_of_a_larger_training_loss_are_left_out(smoke_of):
    results = smoke_of("X15")[1].results
    networks = results["mlp"].networks
    networks = networks.assign(loss=[0.01, 0.0701, 0.07, 0.3], accuracy=[0.9, 0.94, 0.92, 0.93])
    results = {"mlp": type(results["mlp"])(**{**vars(results["mlp"]), "networks": networks})}
    kept, left_out = trained_ones(well_trained(results))
    assert kept["loss"].tolist() == [0.01, 0.07]
    assert left_out == (("training loss above 0.07", 2),)
    kept, left_out = trained_ones(mlps_by_errors(results))
    assert kept["accuracy"].tolist() == [0.94, 0.93]
    assert left_out == (("training error rate above 0.07", 2),)
    assert np.allclose(kept["test_loss"] - kept["generalisation_gap"], kept["loss"])


def test_layers_are_apart_by_the_sizes_of_their_correlations():
    table = pd.DataFrame(np.random.default_rng(0).standard_normal((40, 4)), columns=["a", "b", "c", "y"])
    table = table.assign(
        b=table["b"] - table["y"], c=table["c"] + 3 * table["y"], unit=[f"seed {i}" for i in range(40)]
    )
    z = sorted(abs(np.arctanh(pearsonr(table[column], table["y"])[0])) for column in "abc")
    far = z[2] - z[0]
    for holds, side, value in (("all", "below", far), ("some", "above", far), ("all", "above", -far)):
        found = apart(lambda _: table, ["a", "b", "c"], "y", holds, side)({})
        assert len(found.parts) == 6
        assert found.value == pytest.approx(value)


@pytest.mark.xdist_group("X15")
def test_networks_are_held_against_every_layer_of_every_kind(smoke_of):
    outcomes = {outcome.prediction.name: outcome.statistic for outcome in smoke_of("X15")[1].outcomes}
    layers = {f"{symbol[:-1]}{layer[2:]}" for symbol, _ in LAYER_MEASURES.values() for layer in HIDDEN}
    for name in NETWORK_WISE:
        cases = {case.partition(" less ")[2] for case in outcomes[f"{name}.stronger"].parts} - {""}
        assert cases <= layers
        assert len(layers - cases) <= name.endswith("max")  # a maximum that is one layer's in every network is left out


@pytest.mark.xdist_group("X16")
def test_the_random_network_is_the_same_in_data_and_model(smoke_of):
    studies = EXPERIMENTS["X16"].studies("smoke") | EXPERIMENTS["X17"].studies("smoke")
    for study in studies.values():
        assert all(n.data.seed == n.model.seed == n.training.seed for n in study.networks())
    networks = smoke_of("X16")[1].results["clusters"].networks
    assert networks.groupby("separation")["test_accuracy"].mean().is_monotonic_increasing
    assert networks["test_accuracy"].max() > 0.9  # the head sees the clusters and no noise


@pytest.mark.xdist_group("X16")
def test_the_head_is_that_of_ridge_regression_on_the_clusters_as_drawn(smoke_of):
    networks = smoke_of("X16")[1].results["clusters"].networks
    for row in networks.to_dict("records"):
        drawn = clusters(row["separation"], n=60, test=140, seed=int(row["seed"]))
        W, b = solution(drawn.x.double(), torch.eye(2).double()[drawn.y], 1.0)

        def loss(x, y, W=W, b=b):
            return (x.double() @ W.T + b - torch.eye(2).double()[y]).square().sum(1).mean() / 2

        kappa = W.square().sum() * drawn.x.double().square().sum(1).mean()
        assert row[FLATNESS] == pytest.approx(float(kappa), rel=1e-3)
        gap = loss(drawn.test_x, drawn.test_y) - loss(drawn.x, drawn.y)
        assert row["generalisation_gap"] == pytest.approx(float(gap), rel=1e-3, abs=1e-6)


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
    assert row["room"] == pytest.approx(10 * one["generalisation_gap"].mean() - bound.mean())
    assert row["representativeness"] == pytest.approx(one["representativeness"].mean())
    coded = one["representativeness"] + 0.01 * one[FLATNESS] / 8
    assert row["delta 0.1"] == pytest.approx(coded.mean())
    assert rate(60, 8) == pytest.approx(60 ** (-2 / 12))


def test_a_data_set_in_feature_space_is_measured_as_a_network_is():
    """A linear network on the features themselves, and the risk on 200,000 other samples."""
    separation, n, seed = 1.0, 300, 5
    generator = torch.Generator().manual_seed(seed)
    drawn = mixture(separation, generator)
    x, y = drawn.sample(n, generator)
    test_x, test_y = drawn.sample(200_000, torch.Generator().manual_seed(99))
    net = nn.Linear(8, 2).double()
    train(net, (x, y), Training(Ridge(), loss="half_squared_error", max_steps=1))
    problem = fl.Problem(net, "half_squared_error", (x, y), test=(test_x, test_y))
    report = fl.measure(fl.Lens(problem), [FLATNESS, AS_CODED, BY_DEVIATION, "generalisation_gap"])
    found = measured((separation,), n, range(seed, seed + 1))[0, 0].tolist()
    flatness, as_coded, gap, gap_of_error, by_deviation, gap_of_labels = found
    assert flatness == pytest.approx(report[FLATNESS].value, rel=1e-9)
    assert as_coded == pytest.approx(report[AS_CODED].value, rel=1e-9)
    assert by_deviation == pytest.approx(report[BY_DEVIATION].value, rel=1e-9)
    off = net(test_x).detach() - torch.eye(2).double()[test_y]
    error = float((off.square().sum(1) / 2).std()) / 200_000**0.5
    assert abs(gap - report["generalisation_gap"].value) < 4 * error
    wrong, wrong_here = ((net(a).argmax(1) != b).double().mean().item() for a, b in ((test_x, test_y), (x, y)))
    assert abs(gap_of_error - (wrong - wrong_here)) < 4 * (wrong / 200_000) ** 0.5
    # the notebook's loss: one output, trained on -1 and 1, against labels 0 and 1
    W, b = solution(x, 2 * y.double()[:, None] - 1, 1.0)
    there, here = (((a @ W.T + b).squeeze(1) - one).square() for a, one in ((test_x, test_y), (x, y)))
    assert abs(gap_of_labels - float(there.mean() - here.mean())) < 4 * float(there.std()) / 200_000**0.5


@pytest.mark.parametrize("separation", [0.5, 3.0])
def test_the_stored_generators_risks_are_those_of_many_samples(separation):
    """The head of 300 samples, on 200,000 others of the same clusters, labels drawn anew as there."""
    draw, generator = stored(300, 5), torch.Generator().manual_seed(99)
    assert set((2.0 * draw.means[:, :6]).unique().tolist()) == {-2.0, 2.0}
    assert draw.means.unique(dim=0).shape[0] == 4
    kappa, _, gap, gap_of_error, *_ = measured((separation,), 300, range(5, 6), "stored")[0, 0].tolist()
    phi, targets = draw.around + separation * draw.apart, torch.eye(2).double()[draw.labels]
    W, b = solution(phi, targets, 1.0)
    assert kappa == pytest.approx(float(W.square().sum() * phi.square().sum(1).mean()), rel=1e-9)
    cluster = torch.randint(4, (200_000,), generator=generator)
    values, vectors = torch.linalg.eigh(draw.covariances)
    roots = (vectors * values.clamp(min=0).sqrt()[:, None])[cluster]
    noise = torch.randn(200_000, 8, 1, generator=generator, dtype=torch.float64)
    labels = draw.classes[cluster]
    anew = torch.rand(200_000, generator=generator) < FLIPPED
    labels = torch.where(anew, torch.randint(2, labels.shape, generator=generator), labels)
    outputs = (separation * draw.means[cluster] + (roots @ noise).squeeze(2)) @ W.T + b
    losses = (outputs - torch.eye(2).double()[labels]).square().sum(1) / 2
    here = phi @ W.T + b
    loss = (here - targets).square().sum(1).mean() / 2
    assert abs(gap - float(losses.mean() - loss)) < 4 * float(losses.std()) / 200_000**0.5
    wrong = (outputs.argmax(1) != labels).double().mean() - (here.argmax(1) != draw.labels).double().mean()
    assert abs(gap_of_error - float(wrong)) < 4 * (0.25 / 200_000) ** 0.5


def test_the_codes_relative_flatness_is_the_hessian_of_its_layer_with_weights_changed_after():
    """Against autograd on a small chain: every block's trace by itself."""
    torch.manual_seed(0)
    sizes, layers = (7, 6, 5, 4), []
    for inputs, outputs in pairwise(sizes):
        weight = torch.randn(outputs, inputs).double()
        layers.append((weight, torch.randn(outputs).double(), torch.linalg.pinv(weight)))
    W, b = torch.randn(1, 4).double(), torch.randn(1).double()
    features, y = torch.randn(20, 4).double(), torch.randint(2, (20,)).double()
    x = preimages(tuple(layers), features)
    through = x
    for weight, bias, _ in layers:
        through = through @ weight.T + bias
    assert torch.allclose(through, features)  # the linear layers alone map the inputs to the features
    below = x
    for weight, bias, _ in layers[:-1]:
        below = torch.tanh(below @ weight.T + bias)
    last, bias, _ = layers[-1]

    def loss(weight):
        return ((torch.tanh(below @ weight.T + bias) @ W.T + b).squeeze(1) - y).square().mean()

    hessian = torch.autograd.functional.hessian(loss, last)  # (4, 5, 4, 5)
    scaled = last.clone()
    scaled[:, :4] *= torch.tanh(below @ last.T + bias).var(0, correction=0)
    expected = sum(float(scaled[i] @ scaled[j] * hessian[i, :, j, :].trace()) / 5 for i in range(4) for j in range(4))
    kappa, found = flatness(tuple(layers), W, b, x, y)
    assert kappa == pytest.approx(expected, rel=1e-9)
    assert found == pytest.approx(float(loss(last)))


def test_representativeness_as_coded_is_the_cross_validated_error_but_for_a_hundredth():
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(50, 10, generator=generator).double()
    y = (phi[:, 0] + torch.randn(50, generator=generator) > 0).double()
    error, found = cross_validated(phi, y, torch.Generator().manual_seed(1))
    assert 0 < error < 0.5
    assert 0 < error - found < 0.4 / 45  # a density of at most 0.4, weights that sum to 1, divided by 45


@pytest.mark.xdist_group("X16")
def test_data_sets_in_feature_space_are_others_in_a_rerun(smoke_of):
    results = smoke_of("X16")[1].results
    table = in_blocks("printed")(results)
    assert table.groupby("separation").size().to_dict() == {1.0: 4, 4.0: 4}
    assert table["labelled"].tolist() == [4.0, 1.0] * 4
    settings = rerun(EXPERIMENTS["X16"].studies("smoke")["clusters"])
    networks = pd.DataFrame([{"separation": n.data.separation, "seed": n.data.seed} for n in settings.networks()])
    again = SimpleNamespace(settings=settings.as_json(), networks=networks)
    others = in_blocks("printed")({"clusters": again})
    assert not set(table["block"]) & set(others["block"])
    assert len(others) == len(table)


@pytest.mark.xdist_group("X16")
def test_a_blocks_correlation_is_that_of_its_data_sets(smoke_of):
    results = smoke_of("X16")[1].results
    row = in_blocks("stored")(results).query("block == 1 and separation == 4.0").iloc[0]
    values = measured((1.0, 4.0), 60, range(TIMES, 2 * TIMES), "stored")[1].numpy()
    assert np.tanh(row["squared error, r"]) == pytest.approx(pearsonr(values[:, 0], values[:, 2])[0])
    assert np.tanh(row["0-1 error, ranks"]) == pytest.approx(spearmanr(values[:, 0], values[:, 3])[0])
    z = {at: in_blocks("printed")(results).query(f"separation == {at}")["0-1 error, r"].to_numpy() for at in (1, 4)}
    assert rises("0-1 error, r")(results).value == pytest.approx((z[4] - z[1]).mean() / 3)
    assert rises("0-1 error, r", least=0.5)(results).value == pytest.approx((z[4] - z[1]).mean() / 3)
    assert np.isnan(rises("0-1 error, r", least=2)(results).value)  # one separation has no slope
    more = in_blocks("printed", small=True)(results)
    assert sorted(more["separation"].unique()) == [0.1, 0.25, 1, 4]
    assert (more.query("separation == 4")["0-1 error, r"].to_numpy() == z[4]).all()
    least = more.query("separation == 0.1")["0-1 error, r"].mean()
    assert none_near("0-1 error, r", small=True)(results).value == pytest.approx(0.1 - abs(least))
    assert risen("0-1 error, r")(results).value == pytest.approx((z[4] - z[1]).mean())
    smallest, largest = (at_end("0-1 error, r", True, "stored", by)(results).value for by in ("labelled", "separation"))
    z = {at: in_blocks("stored")(results).query(f"separation == {at}")["0-1 error, r"].mean() for at in (1, 4)}
    assert (smallest, largest) == pytest.approx((z[1], z[4]))  # under the largest label are the data of the smallest
    near = none_near("0-1 error, r", 0.3, "stored", "labelled")(results)
    assert near.value == pytest.approx(0.3 - abs(z[4]))


@pytest.mark.xdist_group("X16")
def test_ten_data_sets_are_of_one_distribution_and_their_correlations_averaged(smoke_of):
    results = smoke_of("X16")[1].results
    row = in_blocks("folds")(results).query("block == 1 and separation == 4.0").iloc[0]
    values = measured((1.0, 4.0), 60, range(TIMES, 2 * TIMES), "folds")[1].numpy().reshape(-1, FOLDS, 6)
    r = [pearsonr(ten[:, 0], ten[:, 3])[0] for ten in values]
    assert row["0-1 error, r"] == pytest.approx(np.arctanh(r).mean())
    drawn = in_folds(60, 5)
    assert len(drawn) == FOLDS
    whole = printed(FOLDS * 60, 5)
    assert all(torch.equal(one.covariances, whole.covariances) for one in drawn)
    assert torch.equal(torch.cat([one.around for one in drawn]), whole.around)


@pytest.mark.xdist_group("X17")
def test_each_step_is_the_change_to_the_next_separation(smoke_of):
    table = approximated(smoke_of("X17")[1].results)
    falling, rising = (these(table.assign(bound=sign * table["separation"])) for sign in (-1, 1))
    assert each_step(falling, "bound", "below")({}).value == pytest.approx(-3.0)  # the separations are 1 and 4
    assert each_step(rising, "bound")({}).value == pytest.approx(3.0)


@pytest.mark.xdist_group("X17")
def test_a_sample_has_the_networks_representativeness_by_other_splits(smoke_of):
    results = smoke_of("X17")[1].results
    table, again = approximated(results), estimated()(results)
    flatness = [samples["delta 0.1"] - samples["representativeness"] for samples in (table, again)]
    assert np.allclose(*flatness)
    assert np.allclose(again["slack, delta 0.1"], again["delta 0.1"] - table["generalisation_gap"])
    assert np.allclose(again["representativeness"], table["representativeness"], rtol=0.3)  # thirty splits in each
    assert np.allclose(again["bound"] - again["delta 0.1"], table["bound"] - table["delta 0.1"])
    signed = estimated(way="signed")(results)["representativeness"]
    assert (signed.abs() < again["representativeness"]).all()
    assert (estimated(way="drawn")(results)["representativeness"] > 0).all()
    assert not np.allclose(estimated("relative")(results)["representativeness"], again["representativeness"], rtol=0.01)


def test_chances_of_classes_are_sure_at_far_centres_and_those_of_drawn_labels():
    law = mixture(50.0, torch.Generator().manual_seed(1))
    centres = torch.cat([law.centroids, law.centroids @ law.mixing], 1)
    assert torch.allclose(chances(law, centres), torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]).double())
    law = mixture(1.0, torch.Generator().manual_seed(1))
    features, labels = law.sample(20_000, torch.Generator().manual_seed(2))
    likely = chances(law, features)
    for share in (0.2, 0.5, 0.8):
        near = (likely[:, 1] - share).abs() < 0.1
        assert labels[near].double().mean() == pytest.approx(float(likely[near, 1].mean()), abs=0.05)


@pytest.mark.xdist_group("X17")
def test_the_share_above_and_the_room_below_are_of_bound_and_gap(smoke_of):
    table = approximated(smoke_of("X17")[1].results)
    bound, gap = table["bound"], table["generalisation_gap"]
    assert (table["above"] == (bound > gap)).all()
    assert np.allclose(table["half the gap"], 2 * gap - bound)
    assert np.allclose(table["0.1 less slack"], 0.1 + gap - bound)


def test_the_clusters_keep_their_distances_in_the_subspace_with_a_density():
    drawn = mixture(2.0, torch.Generator().manual_seed(1))
    law, (means, covariances, _) = in_subspace(drawn), drawn.moments()
    assert torch.allclose(torch.cdist(law.means, law.means), torch.cdist(means, means))
    assert torch.allclose(law.means.norm(dim=1), means.norm(dim=1))
    values = torch.linalg.eigvalsh(covariances)
    assert torch.allclose(values[:, 2:], torch.linalg.eigvalsh(law.covariances))
    assert values[:, :2].abs().max() < 1e-12 * values.max()
    assert torch.linalg.matrix_rank(covariances[0]) == law.dimension == 6


@pytest.mark.xdist_group("X17")
def test_the_worst_case_takes_the_mean_loss_for_the_largest(smoke_of):
    results = smoke_of("X17")[1].results
    networks, samples = results["folds"].networks, approximated(results)
    one = networks[(networks["separation"] == 1.0) & (networks["seed"] == 0)]
    loss = (one["loss"] + one["generalisation_gap"]).mean()
    row = samples[(samples["separation"] == 1.0) & (samples["seed"] == 0)].iloc[0]
    assert row["worst case"] == pytest.approx(worst_case(1.0, 0, 60) * loss)
    assert worst_case(1.0, 0, 60) > worst_case(1.0, 0, 600)


def test_values_within_a_group_have_mean_0_and_spread_1_and_a_group_of_one_has_none():
    table = pd.DataFrame({"init": ["a", "a", "b"], "x": [1.0, 5.0, 7.0], "y": [1, 2, 3]})
    found = within(lambda _: table, "init", ["x"])({})
    assert found["x"].tolist()[:2] == [-1.0, 1.0]
    assert found["x"].isna().tolist() == [False, False, True]
    assert found["y"].tolist() == [1, 2, 3]
    found = within(lambda _: table.assign(**{"left out": ["", "", ""]}, init="a"), "init", ["x"])({})
    left = within(lambda _: table.assign(**{"left out": ["", "", "diverged"]}, init="a"), "init", ["x"])({})
    assert found["x"].notna().all()
    assert left["x"].tolist()[:2] == [-1.0, 1.0]
    assert np.isnan(left["x"][2])


@pytest.mark.parametrize(("name", "study"), [("X14", "lenet"), ("X15", "mlp"), ("X18", "lenet")])
def test_every_network_has_a_start_of_its_own_and_all_the_same_data(name, study):
    for scale in ("laptop", "paper"):
        networks = EXPERIMENTS[name].studies(scale)[study].networks()
        assert len({one.model.seed for one in networks}) == len(networks)
        assert all(one.model.seed == one.training.seed for one in networks)
        assert len({one.data.seed for one in networks}) == 1


@pytest.mark.xdist_group("X15")
def test_table_1_says_what_neurons_change(smoke_of):
    outcomes = {outcome.prediction.name: outcome for outcome in smoke_of("X15")[1].outcomes}
    for name in OF_TABLE_1:
        assert outcomes[f"{name}.layerwise"].statistic.value < 1e-3
        assert (outcomes[f"{name}.neuronwise"].statistic.value > 0.01) == name.startswith("kappa")


@pytest.mark.xdist_group("X18")
def test_measures_as_defined_and_as_coded(smoke_of):
    results = smoke_of("X18")[1].results
    table, networks = minima(results), results["lenet"].networks
    assert table[[*RIGHT, *CODED]].notna().all(axis=None)
    s = table["PAC-Bayes"] ** -0.25  # its square is the deviation sigma of the noise
    coded = networks["weight_norm"] ** 2 / (4 * s**2) + np.log(30 / s) + 10
    assert np.allclose(coded - table[CODED[3]], np.log(30) + 10)
    norm = networks["weight_norm[fc3]"]
    assert np.allclose(table[CODED[1]] * norm**2, networks["kappa_trace[fc3]"])
    assert (table[CODED[1]] < table["Hessian trace"]).all()  # one layer's of all
    for name in ("relative flatness", "Fisher-Rao norm", "relative flatness, fc2", CODED[0]):
        assert np.allclose(table[name], table[f"moved {name}"], rtol=1e-6), name
    for name in ("Hessian trace", "weight norm", CODED[1], CODED[4]):
        assert not np.isclose(table[name], table[f"moved {name}"], rtol=0.1).any(), name
    factors = (table[f"code moved {CODED[4]}"] / table[CODED[4]]) ** 0.5
    assert factors.between(5, 25).all()
    assert np.allclose(factors, factors.round())
    assert np.allclose(table[f"code moved {CODED[1]}"] * factors**2, table[CODED[1]])
    assert np.allclose(table["Fisher-Rao norm"], table["neurons moved Fisher-Rao norm"])
    assert np.allclose(table[THEOREM_4], table[f"neurons moved {THEOREM_4}"])
    for name in (
        "relative flatness",
        "Hessian trace",
        "weight norm",
    ):  # the first despite C.2: the layer's own features
        assert not np.isclose(table[name], table[f"neurons moved {name}"], rtol=0.01).any(), name
    assert set(table["optimiser"]) == {"SGD", "Adam"}


@pytest.mark.xdist_group("X18")
def test_what_other_draws_of_the_factors_give_follows_from_stored_numbers(smoke_of):
    results = smoke_of("X18")[1].results
    networks, table = results["lenet"].networks, minima_redrawn("code moved", CODED[4])(results)
    layers = ("conv1", "conv2", "fc1", "fc2", "fc3")
    ratios = [networks[f"weight_norm@layerwise[{layer}]"] / networks[f"weight_norm[{layer}]"] for layer in layers]
    trace, norm = moved_by(networks, np.cumprod(ratios, 0)[:4])  # by the factors that each network had
    assert np.allclose(trace, networks["hessian_trace@layerwise"])
    assert np.allclose(norm, networks["weight_norm@layerwise"])
    moved = table[draws_of(f"code moved {CODED[4]}")]
    factors = (moved.div(table[CODED[4]], axis=0) ** 0.5).to_numpy()
    assert np.allclose(factors, factors.round())
    assert (factors.min(), factors.max()) == pytest.approx((5, 25), abs=0.5)
    sizes = [abs(np.arctanh(pearsonr(values, table["gap"])[0])) for _, values in moved.items()]
    own = abs(np.arctanh(pearsonr(table[CODED[4]], table["gap"])[0]))
    assert weaker_over_draws("code moved", CODED[4])(results).value == pytest.approx(own - np.mean(sizes))


@pytest.mark.xdist_group("X14")
def test_a_factor_of_layer_5_is_drawn_again(smoke_of):
    results = smoke_of("X14")[1].results
    for move, power in (("moved", 2), ("multiplied", -2)):
        table = layer_redrawn(these(lenets(results)), move, "trace")({})
        factors = table[draws_of(f"{move} trace")].div(table["trace"], axis=0) ** (1 / power)
        assert factors.stack().between(5, 25).all()
        assert len(np.unique(factors)) == factors.size
        r = [pearsonr(table[one], table["gap"])[0] for one in factors]
        found = size_over_draws(these(table), f"{move} trace", "gap")({})
        assert np.arctanh(found.value) == pytest.approx(np.abs(np.arctanh(r)).mean())
