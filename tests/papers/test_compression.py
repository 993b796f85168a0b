"""The statistics of the compression paper's predictions, on made-up results whose answer is known."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fake_study import fake_result

from flatlens.papers import EXPERIMENTS
from flatlens.papers.compression.populations import KINDS, PARTIAL_SHARPNESS, SHOWN, population
from flatlens.papers.compression.training import CHAIN, SHARP, VARIATION_SIDES, log_cv, of_mean_curves
from flatlens.papers.compression.transformers import COMMAND, SEARCHED, SHARPNESS_46, VIT_NAMES

SEEDS = {"axes": [{"name": "lr+batch_size+seed", "values": [[0.1, 8, 0], [0.1, 8, 1]]}]}


def outcome(experiment, name, results):
    return next(p for p in EXPERIMENTS[experiment].predictions if p.name == name).weigh(results)


def populations(*, d_falls_in):
    """30 networks of each kind: NMLS rises with its bound, MLS with D, but falls with it in kinds of `d_falls_in`."""
    rng, results = np.random.default_rng(0), {}
    for kind in KINDS:
        x = rng.normal(size=(4, 30))
        values = pd.DataFrame({q.name: rng.normal(size=30) for q in SHOWN})
        values["NMLS"], values["bound of NMLS"] = x[0], x[0] + 0.3 * x[1]
        values["MLS"], values["D"] = x[2], (-1 if kind in d_falls_in else 1) * x[2] + 0.3 * x[3]
        values = values.assign(key=[str(i) for i in range(30)], seed=range(30), included=True)
        networks = values[["key", "seed"]].assign(outcome="converged")
        results[kind] = SimpleNamespace(values=values, networks=networks, settings=SEEDS)
    return results


@pytest.mark.parametrize(
    ("d_falls_in", "only", "in_some"),
    [(["mlp"], "reproduced", "reproduced"), (list(KINDS), "reproduced", "reproduced"), ([], *2 * ["not reproduced"])],
)
def test_only_the_bound_of_nmls_is_consistent_where_d_falls_with_mls_in_some_kind(d_falls_in, only, in_some):
    results = populations(d_falls_in=d_falls_in)
    assert outcome("X4", "LeNets_on_ten_classes.only_the_bound_of_nmls", results).conclusion == only
    assert outcome("X4", "LeNets_on_ten_classes.D_against_mls_in_some", results).conclusion == in_some
    assert outcome("X4", "mlp.D.against_mls", results).conclusion == ("reproduced" if d_falls_in else "not reproduced")


def test_the_partial_sharpness_is_c_without_the_weights_norm():
    results = populations(d_falls_in=[])
    norm, partial, whole = np.random.default_rng(1).uniform(1, 2, (3, 30))
    results["mlp"].networks = results["mlp"].networks.assign(
        **{"mls_chain.C_D.lhs[fc1]": norm * partial, "mls_chain.rhs[fc1]": norm * whole},
        interpolation_sharpness=whole**2,
    )
    np.testing.assert_allclose(population("mlp")(results)[PARTIAL_SHARPNESS], partial)


def test_bounds_of_the_codes_lenets_by_the_printed_norms_are_those_without_frobenius():
    results = populations(d_falls_in=[])
    d, bound = np.random.default_rng(1).uniform(1, 2, (2, 30))
    of_lenet = results["lenet"].networks.assign(**{"mls_chain.rhs[conv1]": d, "nmls_bound.rhs": bound})
    found = population("lenet.spectral")(
        {"lenet": SimpleNamespace(**(vars(results["lenet"]) | {"networks": of_lenet}))}
    )
    np.testing.assert_array_equal(found[["D", "-D", "bound of NMLS"]], np.column_stack([d, -d, bound]))


def test_networks_with_starts_of_their_own_are_each_a_unit():
    found = outcome("X4", "vgg.bound_of_NMLS.NMLS", populations(d_falls_in=[])).statistic
    assert (found.n, found.units) == (30, 30)


def chain_of(ratio_c, ratio_d):
    """10 runs of 7 lengths: A doubles from length to length; C and D follow it with these powers, D with noise."""
    rng = np.random.default_rng(0)
    runs = pd.DataFrame([(2.0**k * rng.uniform(0.5, 2), k, s) for s in range(10) for k in range(7)])
    a, length, seed = (runs[i] for i in range(3))
    columns = dict(
        zip(CHAIN.values(), (a, 2 * a, 3 * a**ratio_c, 9 * a**ratio_d * rng.uniform(0.5, 2, 70)), strict=True)
    )
    columns |= {VARIATION_SIDES[0]: a * columns[CHAIN["C"]], VARIATION_SIDES[1]: 2 * a**2}
    networks = pd.DataFrame(columns).assign(
        max_steps=length, seed=seed, key=[str(i) for i in range(70)], outcome="finished"
    )
    settings = {"axes": [{"name": "max_steps", "values": [1, 2]}, {"name": "seed", "values": [0, 1]}]}
    return {"tightness": SimpleNamespace(networks=networks, settings=settings)}


@pytest.mark.parametrize(("c", "d", "found"), [(1.0, -1.0, "reproduced"), (-1.0, 1.0, "not reproduced")])
def test_c_is_more_indicative_where_it_changes_with_mls_and_d_does_not(c, d, found):
    one = outcome("X3", "C_is_more_indicative", chain_of(c, d))
    assert one.conclusion == found
    assert (one.statistic.units, one.statistic.unit) == (10, "run")


def test_a_step_is_loose_where_the_ratio_varies():
    one = outcome("X3", "B_C_by_variation", chain_of(2.0, 1.0))
    assert one.statistic.value == pytest.approx(1.0)  # log C/B and the variation are both log A and a constant
    assert one.conclusion == "reproduced"
    of_lengths = outcome("X3", "B_C_by_variation.within_a_length", chain_of(2.0, 1.0)).statistic
    assert of_lengths.value == pytest.approx(1.0)
    cv = log_cv(pd.Series([np.log(np.sqrt((1 + 9) / 2) / 2)]))  # of 1 and 3: mean 2, standard deviation 1
    assert cv[0] == pytest.approx(np.log(1 / 2))


def test_the_mean_curve_is_that_of_values_over_the_runs():
    rng = np.random.default_rng(0)
    sharp, mls = rng.uniform(1, 9, (2, 10, 6))  # of ten runs at six looks
    rows = [
        (str(run), 100 * look, measure, "", values[run, look])
        for measure, values in ((SHARP, sharp), ("mls", mls))
        for run in range(10)
        for look in range(6)
    ]
    networks = {"key": [str(run) for run in range(10)], "seed": range(10), "lr": 0.1, "batch_size": 20}
    table = pd.DataFrame(rows, columns=["key", "step", "measure", "layer", "value"])
    results = {"training": fake_result(networks, histories=table)}
    found = of_mean_curves("lr", "mls", "mls", levels=True)(results)
    assert found.value == pytest.approx(np.corrcoef(np.sqrt(sharp).mean(0), mls.mean(0))[0, 1])
    without = [np.corrcoef(np.delete(np.sqrt(sharp), i, 0).mean(0), np.delete(mls, i, 0).mean(0)) for i in range(10)]
    least, most = found.leave_one_out
    assert (least, most) == pytest.approx((min(r[0, 1] for r in without), max(r[0, 1] for r in without)))
    changes = np.diff(np.sqrt(sharp).mean(0)), np.diff(mls.mean(0))
    assert of_mean_curves("lr", "mls", "mls")(results).value == pytest.approx(np.corrcoef(*changes)[0, 1])


def transformers(names, *, off=1.0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=len(names))
    networks = pd.DataFrame(
        {"model": names, SEARCHED: np.exp(x), SHARPNESS_46: np.exp(x + 0.5 * rng.normal(size=len(x)))}
    )
    mobile = networks["model"].str.contains("mobilevit")
    networks.loc[mobile, SEARCHED] /= off
    networks.loc[mobile, SHARPNESS_46] *= off
    networks = networks.assign(key=[str(i) for i in range(len(x))], steps=0)
    return {"transformers": SimpleNamespace(networks=networks, settings={"axes": []})}


def test_published_transformers_are_weighed_by_class_and_their_clusters_found():
    published = [f"timm:{name}" for name in VIT_NAMES]
    trend = outcome("X5", "general_trend", transformers(published))
    assert (trend.conclusion, trend.statistic.unit, trend.statistic.units) == ("reproduced", "class", 18)
    results = transformers(published, off=100.0)
    most = outcome("X5", "general_trend.most", results).statistic
    assert (most.n, most.units) == (sum("mobile" not in one and "fast" not in one for one in published), 15)
    assert outcome("X5", "mobilevit_upper_left", results).conclusion == "reproduced"
    assert outcome("X5", "fastvit_lower_right", results).conclusion == "open"
    assert outcome("X5", "small_vits", results).conclusion == "not tested"


def test_what_needs_published_transformers_is_not_tested_on_small_ones_and_says_what_tests_it():
    results = transformers([f"ViT(width={w}, seed={s})" for w in range(12) for s in range(3)])
    for name in ("general_trend", "mobilevit_upper_left", "fastvit_lower_right"):
        one = outcome("X5", name, results)
        assert one.conclusion == "not tested"
        assert COMMAND in one.statistic.note
    own = outcome("X5", "small_vits", results)
    assert (own.conclusion, own.statistic.n, own.statistic.units) == ("reproduced", 36, 12)
