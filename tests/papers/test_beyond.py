"""What goes beyond the papers: that it runs, and that its tables are the bound's own."""

import numpy as np
import pytest

from flatlens.bounds import check_bounds
from flatlens.data.synthetic import RECIPES, law_of, widest
from flatlens.distributions import RULES
from flatlens.experiments.network import compute
from flatlens.measures import Lens
from flatlens.papers import EXPERIMENTS
from flatlens.papers.beyond import THEOREM_BOUND, VACUOUS, decay, enough, most_samples, sides
from flatlens.papers.experiment import SCALES
from flatlens.problem import Problem

pytestmark = pytest.mark.xdist_group("X19")


@pytest.fixture
def x19(smoke_of):
    return smoke_of("X19")[1]


@pytest.mark.parametrize("scale", SCALES)
def test_one_seed_is_for_data_model_and_training(scale):
    studies = EXPERIMENTS["X19"].studies(scale)
    assert set(studies) == set(RECIPES)
    networks = [network for study in studies.values() for network in study.networks()]
    assert all(n.data.seed == n.model.seed == n.training.seed for n in networks)


def test_sides_are_those_of_the_bound():
    study = EXPERIMENTS["X19"].studies("smoke")["circle"]
    settings = study.networks()[-1]
    record = compute(settings)
    model, split = settings.model.build(), settings.data.load()
    model.load_state_dict(record.weights)
    lens = Lens(Problem(model.double(), "mse", (split.x.double(), split.y.double())))
    known = {"distribution": split.distribution, "target": split.target, "assume": ("iid_samples",)}
    for rule in RULES:
        row = check_bounds(lens, "jacobian_generalisation", rule=rule, **known).of(THEOREM_BOUND)
        at = "" if rule == "exact" else f"@{rule}"
        kept = record.report[f"{THEOREM_BOUND}.rhs{at}"]
        assert kept.value == pytest.approx(row.rhs, nan_ok=True)
        assert kept.note.startswith(row.status)
    assert record.report[f"{THEOREM_BOUND}.lhs"].value == pytest.approx(row.lhs, rel=0.05)


def test_the_tables_of_all_laws(x19):
    table = sides()(x19.results)
    assert len(table) == 48
    assert (table["true error"] < table["tight"]).all()
    assert (table["tight"] < table["exact"]).all()
    assert (table["holds"] == 1).all()
    cubes = table[table["law"].isin(("interval", "square"))]
    assert cubes["published"].to_numpy() == pytest.approx(cubes["exact"].to_numpy())
    largest = most_samples("circle")(x19.results)
    assert set(largest["train"]) == {40}
    assert (largest["wide"] == widest("circle")).all()


def test_the_rate_is_a_slope_in_logarithms_less_one_over_d(x19):
    table = x19.results["sphere"].networks.sort_values("seed")
    few, many = (table.loc[table["train"] == n, "jacobian_generalisation.rhs"].to_numpy() for n in (10, 40))
    steps = np.log(np.log(40 / 0.05) / 40) - np.log(np.log(10 / 0.05) / 10)
    found = decay("sphere")(x19.results).sort_values("unit")["slope less 1/d"]
    assert found.to_numpy() == pytest.approx(np.log(many / few) / steps - 1 / 2)


def test_figures_have_their_data(x19):
    curves, informative = (plot.data for plot in x19.plots)
    lines = {"true error", VACUOUS, *(f"bound, {rule}" for rule in RULES)}
    assert set(curves["line"]) == lines
    assert set(curves["panel"]) == set(RECIPES)
    assert np.isfinite(curves[["x", "y", "low", "high"]].to_numpy()).all()
    assert len(informative) == len(RECIPES) * len(RULES)
    row = informative[(informative["row"] == "interval") & (informative["column"] == "tight")].iloc[0]
    table = sides("interval")(x19.results).groupby("train")["tight"].mean()
    first = table.index[table < 2].min()
    assert row["samples"] == first
    assert row["text"] == f"{first:,.0f} ({row['at_best']:,})"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["interval", "sphere"])
def test_the_least_number_of_samples_is_where_the_radius_is_small_enough(law, rule):
    distribution, target = law_of(law)
    n = enough(law, rule)
    before, now = (distribution.covering_radius(k, 0.05, rule=rule) for k in (n - 1, n))
    assert 2 * target.lipschitz * now.value < widest(law)
    assert before.kind == "undefined" or 2 * target.lipschitz * before.value >= widest(law)
