"""The granulated Kendall coefficient, beside grids worked by hand and beside its definition as a double loop."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatlens.errors import BadInput
from flatlens.statistics import granulated_kendall, resamples
from flatlens.statistics.groupwise import _groups, _psi


def psi(x, y, axes, **options):
    return granulated_kendall(x, y, axes, **{"resampled": 0, "permuted": 0, **options})


def test_two_by_three_by_hand():
    """Rows lr = 1, 2; columns width = 1, 2, 3. measure 1 2 3 / 6 5 4, gap 1 3 2 / 4 4 5.

    Along lr (three groups of two): + + +, so psi = 1. Along width (two groups of three): lr = 1 has pairs + + -, tau
    1/3; lr = 2 has 0 (a tie of the gap), - and -, tau -2/3; psi = -1/6. Psi = 5/12.
    """
    axes = pd.DataFrame(product([1, 2], [1, 2, 3]), columns=["lr", "width"])
    found = psi([1, 2, 3, 6, 5, 4], [1, 3, 2, 4, 4, 5], axes)
    assert found.parts["lr"].value == pytest.approx(1)
    assert found.parts["width"].value == pytest.approx(-1 / 6)
    assert found.value == pytest.approx(5 / 12)
    assert found.parts["lr"].note == "3 of 3 groups have networks to compare"


def literally(x, y, axes, axis):
    """Over settings of the others, the mean over pairs of sign times sign."""
    taus = []
    others = [name for name in axes if name != axis]
    for _, group in axes.groupby(others) if others else [((), axes)]:
        terms = [
            np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
            for i, j in product(group.index, repeat=2)
            if axes.loc[i, axis] != axes.loc[j, axis]
        ]
        taus += [np.mean(terms)] if terms else []
    return np.mean(taus) if taus else np.nan


@pytest.fixture
def holed():
    """A 3 x 2 x 2 grid with replicates, ties and missing cells."""
    rng = np.random.default_rng(0)
    axes = pd.DataFrame(list(product([1, 2, 3], "ab", [0.1, 0.2])) * 2, columns=["depth", "kind", "lr"])
    axes = axes.drop(index=[0, 3, 7, 12, 15]).reset_index(drop=True)
    return rng.integers(0, 5, len(axes)).astype(float), rng.normal(size=len(axes)).round(1), axes


def test_the_definition_as_a_loop(holed):
    x, y, axes = holed
    found = psi(x, y, axes)
    for axis in axes:
        assert found.parts[axis].value == pytest.approx(literally(x, y, axes, axis))
    assert found.value == pytest.approx(np.mean([part.value for part in found.parts.values()]))


def test_a_resample_is_the_loop_over_the_repeated_networks(holed):
    x, y, axes = holed
    groups, apart = _groups({name: pd.factorize(axes[name])[0] for name in axes}, "depth")
    for counts in resamples(len(x), 1, 5):
        drawn = np.repeat(np.arange(len(x)), counts.astype(int))
        expected = literally(x[drawn], y[drawn], axes.iloc[drawn].reset_index(drop=True), "depth")
        assert _psi(x, y, groups, apart, counts[None])[0] == pytest.approx(expected)


def test_one_axis_without_ties_is_kendalls_tau():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 12))
    found = psi(x, y, pd.DataFrame({"lr": np.arange(12)}))
    assert found.value == pytest.approx(stats.kendalltau(x, y).statistic)


def test_a_confounder_is_seen_through():
    """Overall the measure follows the gap, for width drives both; in every group it goes against it."""
    axes = pd.DataFrame(product([0, 10, 20], [1, 2, 3]), columns=["width", "lr"])
    x, y = axes["width"] + axes["lr"], axes["width"] - axes["lr"]
    assert stats.kendalltau(x, y).statistic > 0.3
    assert psi(x, y, axes).parts["lr"].value == -1


def test_axes_that_never_vary_and_lone_cells_are_told():
    axes = pd.DataFrame({"lr": [1, 2, 1, 2, 3], "width": [1, 1, 2, 2, 3], "kind": "a"})
    found = psi([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], axes)
    assert found.parts["kind"].note == "0 of 5 groups have networks to compare"
    assert np.isnan(found.parts["kind"].value)
    assert found.parts["lr"].note == "2 of 3 groups have networks to compare"
    assert found.note == "the mean over lr, width; kind not counted: 0 of 5 groups have networks to compare"
    assert found.value == 1
    assert np.isnan(psi([1, 2, 3, 4], [1, 2, 3, 4], axes[["kind"]].iloc[:4]).value)


def test_networks_without_a_number_or_a_setting_are_left_out_and_told():
    axes = pd.DataFrame({"lr": [1, 2, 1, 2, 1, None], "width": [1, 1, 2, 2, 3, 3]})
    found = psi([1, 2, 3, 4, np.nan, 6], [1, 2, 3, 4, 5, 6], axes)
    assert found.n == 4
    assert dict(found.excluded) == {"x is missing": 1, "hyperparameter lr is missing": 1}
    assert "3 networks are left" in psi([1, 2, 3], [1, 2, 3], axes.iloc[:3]).note


def test_p_is_never_too_small_where_there_is_nothing():
    """Psi takes few values, and equal ones count against it: p is uniform or larger."""
    rng = np.random.default_rng(2)
    axes = pd.DataFrame(product(range(3), range(3), range(2)), columns=["a", "b", "c"])
    found = [psi(*rng.normal(size=(2, 18)), axes, permuted=99, seed=i) for i in range(200)]
    for ps in ([one.p for one in found], [one.parts["a"].p for one in found]):
        assert stats.kstest(ps, "uniform", alternative="greater").pvalue > 0.01
        assert np.mean(np.array(ps) <= 0.2) > 0.1
    effect = axes["a"] + axes["b"] + axes["c"]
    assert psi(effect, effect, axes, permuted=199).p == pytest.approx(1 / 200)


def test_the_interval_holds_the_value():
    rng = np.random.default_rng(3)
    axes = pd.DataFrame(list(product(range(3), range(3))) * 3, columns=["a", "b"])
    x = axes["a"] + rng.normal(size=27)
    found = psi(x, axes["a"] + rng.normal(size=27), axes, resampled=500)
    assert found.low < found.value < found.high
    assert found.parts["a"].low < found.parts["a"].value < found.parts["a"].high


def test_mistakes_are_told():
    with pytest.raises(BadInput, match="at least one column of a setting"):
        psi([1, 2], [1, 2], pd.DataFrame(index=[0, 1]))
    with pytest.raises(BadInput, match="hyperparameter lr has shape"):
        psi([1, 2], [1, 2], pd.DataFrame({"lr": [1, 2, 3]}))


def test_over_units_it_is_computed_again_without_each(holed):
    """The delete-one-unit jackknife of Fisher's z, with the loop of the definition."""
    x, y, axes = holed
    units = np.arange(len(x)) % 7
    found = psi(x, y, axes, units=units, unit="seed")

    def whole(kept):
        of = axes[kept].reset_index(drop=True)
        return np.arctanh(np.nanmean([literally(x[kept], y[kept], of, axis) for axis in axes]))

    z, without = whole(units >= 0), np.array([whole(units != unit) for unit in range(7)])
    reach = stats.t.ppf(0.975, 6) * np.sqrt(6 / 7 * ((without - z) ** 2).sum())
    assert (found.low, found.high) == pytest.approx((np.tanh(z - reach), np.tanh(z + reach)), rel=1e-9)
    assert (found.units, found.unit) == (7, "seed")
    assert all(part.units == 7 and part.low < part.value < part.high for part in found.parts.values())
    assert np.isnan(psi(x, y, axes, units=np.arange(len(x)) % 5).low)


def test_over_units_what_is_undefined_says_why():
    axes = pd.DataFrame({"lr": [1, 2, 1, 2, 3], "kind": "a"})
    found = psi([1, 2, 3], [1, 2, 3], axes.iloc[:3], units=[0, 1, 2])
    assert "3 networks are left" in found.note
    assert found.units == 3
    assert np.isnan(psi(range(5), range(5), axes[["kind"]], units=range(5)).value)
