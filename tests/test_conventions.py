"""The page of conventions: complete, what its script makes, and in the ratios that theory knows."""

import importlib
import math
import re
from pathlib import Path

import pytest

import flatlens as fl

DOCS = Path(__file__).parent.parent / "docs"
WRITTEN = (DOCS / "conventions.md").read_text()
pytestmark = pytest.mark.xdist_group("conventions")  # the page is computed once
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?!\w)")


@pytest.fixture(scope="module")
def made():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        page = importlib.import_module("conventions.page")
        networks, sections = page.computed()
        yield page, networks, sections


@pytest.fixture(scope="module")
def quantities(made):
    return {one.name: one for _, one in made[2] if hasattr(one, "rows")}


@pytest.fixture(scope="module")
def networks(made):
    return made[1]


def row(quantity, text: str):
    (found,) = [one for one in quantity.rows if one.text.startswith(text)]
    return found


def test_every_measure_is_on_the_page():
    assert [card.name for card in fl.catalogue() if f"`{card.name}`" not in WRITTEN] == []


def test_the_page_is_what_the_script_makes(made):
    page, networks, sections = made
    fresh = page.page(networks, sections)
    again = "write it anew: python docs/conventions > docs/conventions.md"
    assert NUMBER.sub("#", WRITTEN) == NUMBER.sub("#", fresh), again
    old, new = (tuple(float(number) for number in NUMBER.findall(text)) for text in (WRITTEN, fresh))
    assert old == pytest.approx(new, rel=1.01e-3), again  # a last digit of four may be rounded the other way


def test_every_ratio_that_theory_knows(quantities, networks):
    n, outputs, layers = len(networks.y), 10, 3
    last = networks.entropy.parameters["fc3.weight"]
    theory = {
        "0": 0.0,
        "1": 1.0,
        "-1": -1.0,
        "2": 2.0,
        "100": 100.0,
        "1 / 2": 0.5,
        "n": n,
        "2 / N": 2 / outputs,
        "1 / P": 1 / len(networks.entropy.theta),
        "1 / m": 1 / last.shape[1],
        "(L + 1) / L": (layers + 1) / layers,
        "ρ² / 2": 0.1**2 / 2,
        "σ": networks.relu("pac_bayes_flatness", "sigma") if "`pac_bayes_flatness`" in quantities else math.nan,
    }
    known = [(quantity, one) for quantity in quantities.values() for one in quantity.rows if one.exactly]
    assert {one.exactly for _, one in known} >= {"2 / N", "n", "1 / P", "1 / m", "2", "1 / 2"}
    for quantity, one in known:
        close = 1e-4 if quantity.name == "`sharpness`" else 1e-9  # Lanczos against a literal eigenvalue
        assert quantity.ratio(one) == pytest.approx(theory[one.exactly], rel=close), (quantity.name, one.text)


def test_squares_and_roots(quantities):
    sharpness = quantities["`interpolation_sharpness`, `parameter_jacobian_frobenius`"]
    assert row(sharpness, "its square root").value ** 2 == pytest.approx(sharpness.rows[0].value)
    norm = quantities["`weight_norm`"]
    assert row(norm, "not rooted").value == pytest.approx(norm.rows[0].value ** 2)
    volume = quantities["`local_volume`, `network_volume`"]
    geometric = row(volume, "geometric mean").value
    assert geometric < volume.rows[0].value  # of fewer, and larger, samples; still below the mean of all
    assert math.log(geometric) == pytest.approx(quantities["`log_volume`"].rows[0].value)


def test_the_literal_hessian_agrees_with_the_operators(quantities):
    sharpness = quantities["`sharpness`"]
    own = sharpness.rows[0].value
    assert row(sharpness, "power iteration").value <= own * (1 + 1e-6)
    assert row(sharpness, "weights alone").value <= own
    assert own <= row(sharpness, "batches added").value  # three batches' means, where one would do
    trace = quantities["`hessian_trace`"]
    units = row(quantities["`adaptive_sharpness`, `adaptive_sharpness_ggn`"], "units 1")
    assert units.value == pytest.approx(trace.rows[0].value)
    exact = row(quantities["`spectral_density`"], "exact")
    assert quantities["`spectral_density`"].ratio(exact) == pytest.approx(1, rel=0.2)


def test_every_value_is_a_number_and_every_source_is_used(made, quantities):
    assert all(math.isfinite(one.value) for quantity in quantities.values() for one in quantity.rows)
    rows = [one.found_in for quantity in quantities.values() for one in quantity.rows]
    said = " ".join(rows + [one.remark for _, one in made[2] if hasattr(one, "remark")])
    sources = importlib.import_module("conventions.sources")
    assert [name for name, *_ in sources.CODE if name and name not in said] == []
