"""docs/gap.py: which measure correlates with the gap by what differs between networks, and docs/papers/index.md."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments.quantities import GAP, Quantity
from flatlens.statistics import Statistic

pytestmark = pytest.mark.xdist_group("X3")
PAPERS = Path(__file__).parents[2] / "docs" / "papers"
LR = "learning rate, batch size, optimiser"


@pytest.fixture
def gap(docs_script):
    return docs_script("gap")


@pytest.fixture
def found(smoke_of):
    return smoke_of("X3")[1]


def population(found):
    """Three learning rates with 8 seeds each: one measure is the gap and noise, one follows the learning rate alone."""
    draw = np.random.default_rng(0)
    lr, seed = np.repeat([0.1, 0.2, 0.4], 8), np.tile(range(8), 3)
    gap = lr + 0.03 * draw.normal(size=24)
    measures = {"good": gap + 0.01 * draw.normal(size=24), "lr's": lr + 0.03 * draw.normal(size=24)}
    quantities = (GAP, *(Quantity(name, name) for name in measures))
    values = pd.DataFrame(
        {"key": map(str, range(24)), "lr": lr, "seed": seed, "included": True, GAP.name: gap} | measures
    )
    result = replace(
        found.results["tightness"], networks=values, values=values, quantities=quantities, varied=["lr", "seed"],
        settings={"axes": [{"name": "seed", "values": range(8)}]},
    )  # fmt: skip
    return replace(found, results={"drawn": result}, second={})


def of(measure, every):
    return {one.where: one for one in every if one.measure == measure}


def test_kinds_of_networks_are_populations_apart(gap, found):
    """A measure that correlates positively without BatchNorm and negatively with it: not in a mixture of both."""
    one = population(found)
    result = one.results["drawn"]
    both = [
        result.values.assign(
            key=result.values["key"] + str(normed), good=result.values["good"] * (-1) ** normed, batchnorm=bool(normed)
        )
        for normed in (0, 1)
    ]
    values = pd.concat(both, ignore_index=True)
    seen = of("good", gap.relations([replace(one, results={"drawn": replace(result, networks=values, values=values)})]))
    assert {where: gap.sign(one.gap) for where, one in seen.items()} == {
        "drawn without BatchNorm": 1, "drawn with BatchNorm": -1,
    }  # fmt: skip


def test_a_measure_that_follows_a_setting_alone_shows_so(gap, found):
    every = gap.relations([population(found)])
    good, follows = (of(name, every)["drawn"] for name in ("good", "lr's"))
    assert good.difference == follows.difference == LR
    assert [gap.sign(one.gap) for one in (good, follows)] == [1, 1]
    assert [gap.sign(one.equal[0]) for one in (good, follows)] == [1, 0]
    assert (good.gap.n, good.gap.units, good.accuracy, good.given) == (24, 8, None, None)


def test_what_follows_the_training_loss_is_not_left_given_it(gap, found):
    """Gap and one measure follow the loss; the other measure follows what the loss does not say of the gap."""
    one = population(found)
    draw = np.random.default_rng(1)
    loss, noise = np.exp(draw.normal(size=24)), draw.normal(size=24)
    table = one.results["drawn"].values.assign(
        loss=loss, accuracy=0.9, test_accuracy=0.9 - noise / 10, good=np.log(loss) + 0.2 * draw.normal(size=24),
        **{GAP.name: 3 * np.log(loss) + noise, "lr's": noise + 0.5 * draw.normal(size=24)},
    )  # fmt: skip
    every = gap.relations(
        [replace(one, results={"drawn": replace(one.results["drawn"], networks=table, values=table)})]
    )
    good, other = (of(name, every)["drawn"] for name in ("good", "lr's"))
    assert gap.sign(good.gap) == 1
    assert [gap.sign(one.given) for one in (good, other)] == [0, 1]
    assert [gap.sign(one.accuracy) for one in (good, other)] == [0, 1]


def signed(gap, measure, signs, accuracy="", given=""):
    """One population for each sign of the correlations with the gap."""
    ends = {"+": (0.2, 0.8), "-": (-0.8, -0.2), "?": (-0.3, 0.3)}
    r = {s: Statistic("r", sum(end) / 2, 10, *end, units=10, unit="seed") for s, end in ends.items()}
    return [
        gap.Relation(
            measure, LR, "X4", str(at), r[s], r[accuracy[at]] if accuracy else None, r[given[at]] if given else None,
            (r["?"], None, None),
        )
        for at, s in enumerate(signs)
    ]  # fmt: skip


def test_the_lines_name_what_is_left_given_the_loss(gap):
    every = [
        *signed(gap, "follows the loss", "++++", given="--??"),
        *signed(gap, "keeps", "+++?", given="+++?"),
        *signed(gap, "seen twice", "++", given="++"),
        *signed(gap, "against", "--+", accuracy="-??"),
        *signed(gap, "training loss", "----"),
    ]
    lines = [line for line in gap.advice(every) if f"**{LR}**" in line or "| avoid |" in line]
    assert lines == [
        f"| **{LR}** | use | keeps | 0.50 (3 +, 0 − of 4) | not known | 0.50 (3 +, 0 − of 4) | 40 | X4 |",
        "|  | avoid | against | -0.50 (1 +, 2 − of 3) | 0.00 (0 +, 1 − of 3) | not known | 30 | X4 |",
    ]


def test_regressions_have_no_accuracy_gap(gap):
    every = [replace(one, classes=False) for one in signed(gap, "against", "--")]
    lines = list(gap.advice(every))
    assert "|  | avoid | against | -0.50 (0 +, 2 − of 2) | regression | not known | 20 | X4 |" in lines


def test_no_line_says_avoid_where_the_gaps_disagree(gap):
    lines = list(gap.advice(signed(gap, "one", "---", accuracy="+++")))
    assert (
        "|  | the gaps disagree | one | -0.50 (0 +, 3 − of 3) | 0.50 (3 +, 0 − of 3) | not known | 30 | X4 |" in lines
    )
    assert f"| **{LR}** | use | no measure qualifies |  |  |  |  |  |" in lines


def test_a_line_has_the_name_to_type(gap):
    """The shortest over populations; of a bound's side the bound; none where the measure is called so."""
    columns = ["ggn_norm(batch_statistics=1000)", "ggn_norm", "ggn_norm"]
    every = [
        replace(one, column=column)
        for one, column in zip(signed(gap, "Gauss-Newton norm", "+++"), columns, strict=True)
    ]
    (seen,) = gap.seen_where(every, LR)
    names = [gap._with_name(replace(seen, column=c)) for c in (seen.column, "mls_chain.rhs[fc1]")]
    assert names == ["Gauss-Newton norm (`ggn_norm`)", "Gauss-Newton norm (`mls_chain`)"]
    assert gap._with_name(replace(seen, measure="sharpness", column="sharpness")) == "sharpness"


def test_bounds_are_no_candidates_where_the_number_of_samples_differs(gap):
    every = [replace(one, difference="number of samples") for one in signed(gap, "bound, exact radius", "++++")]
    assert gap.seen_where(every, "number of samples") == []


def test_the_page_says_what_the_table_says(gap):
    """Every line of docs/papers/index.md, computed again from docs/papers/gap.csv."""
    table = pd.read_csv(PAPERS / "gap.csv")
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (PAPERS / "index.md").read_text().splitlines()
    ]
    said = [line for line in lines if len(line) == 8 and line[1] in ("use", "avoid", "the gaps disagree")]
    assert sum(bool(line[3]) for line in said) >= 6
    difference = ""
    for first, _, named, *cells, _, _ in said:
        measure = named.partition(" (`")[0]
        difference = first.strip("*") or difference
        if not cells[0]:
            continue
        alone = difference == gap.SEEDS
        mine = table[(table["measure"] == measure) & (alone | (table["what differs"] == difference))]
        for column, cell in zip(gap.EQUAL if alone else gap.COLUMNS, cells, strict=True):
            known = mine.dropna(subset=[column])
            if cell in ("not known", "regression"):
                assert known.empty
                continue
            above, below = (known[f"{column} low"] > 0).sum(), (known[f"{column} high"] < 0).sum()
            value, _, counted = cell.partition(" ")
            assert float(value) == pytest.approx(known[column].median(), abs=0.0051)
            assert counted == f"({above} +, {below} − of {len(known)})"
