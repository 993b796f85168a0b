"""docs/papers.py: the pages of the papers get their tables and pictures from the stored runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.tables import gap_correlations
from flatlens.papers.experiment import Setting

pytestmark = pytest.mark.xdist_group("X3")


@pytest.fixture
def pages(docs_script):
    return docs_script("papers")


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
    settings, units = values[["lr"]].astype(str), values["seed"]
    relations = gap_correlations(values[[q.name for q in quantities]], settings, quantities, units)
    result = replace(
        found.results["tightness"], networks=values, values=values, quantities=quantities, varied=["lr", "seed"],
        gap_correlations=relations, settings={"axes": [{"name": "seed", "values": range(8)}]},
    )  # fmt: skip
    return replace(found, results={"drawn": result}, second={"drawn": result})


def test_every_page_has_its_place_for_results(pages):
    for path in pages.FOLDER.glob("*.md"):
        text = path.read_text()
        assert text.count(pages.BEGIN) == text.count(pages.END) == 1, path.name
        assert text.index(pages.BEGIN) < text.index(pages.END)


def test_only_what_lies_between_the_marks_is_replaced(pages):
    text = f"# Title\n\n{pages.BEGIN}\nold\n{pages.END}\n\nLast.\n"
    once = pages.refresh(text, iter(["new"]))
    assert once.startswith("# Title\n")
    assert once.endswith("Last.\n")
    assert "new" in once
    assert "old" not in once
    assert pages.refresh(once, iter(["new"])) == once


def test_a_paper_has_the_counts_of_its_rows_and_its_figures(pages, found, monkeypatch, tmp_path):
    (tmp_path / "compression.md").write_text(f"# Title\n{pages.BEGIN}\n{pages.END}\n")
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages.atlas, "load_all", lambda: [found])
    pages.main()
    page = (tmp_path / "compression.md").read_text()
    assert "In the paper: **Fig. G.4**, an MLP through training" in page
    assert "Not drawn here: **Fig. G.5**, 100 VGG-11s" in page
    assert "| not yet run |" in page  # the main claims of the other experiments
    assert "![Fig. G.4: the steps of the bound](../images/atlas/X3_at_smoke_scale-tightness.svg)" in page
    assert "| theorem |" in page


def test_kinds_of_networks_are_populations_apart(pages, found):
    """A measure that goes with the gap without BatchNorm and against it with BatchNorm: in no mixture of both."""
    one = population(found)
    result = one.results["drawn"]
    both = [
        table.assign(key=table["key"] + str(normed), good=table["good"] * (-1) ** normed, **{GAP.name: table[GAP.name]})
        for normed in (0, 1)
        for table in [result.values.assign(batchnorm=bool(normed))]
    ]
    values = pd.concat(both, ignore_index=True)
    mixed = replace(result, networks=values, values=values)
    one = replace(one, results={"drawn": mixed}, second={})
    lines = [line for line in pages.over_all([one]) if line.startswith("| good ")]
    signs = {line.split("|")[2].split(", ")[1].strip(): line.split("|")[6].strip()[0] for line in lines[1:]}
    assert signs == {"drawn without BatchNorm": "+", "drawn with BatchNorm": "−"}


def test_a_measure_that_follows_a_setting_alone_shows_so(pages, found):
    lines = list(pages.over_all([population(found)]))
    (in_short, good), (_, follows) = (
        [line for line in lines if line.startswith(f"| {name} ")] for name in ("good", "lr's")
    )
    assert in_short == "| good | 1 | 1 | 0 | 0 | 1 | 0 | 0 |"
    cells = [[cell.strip() for cell in line.split("|")[3:-1]] for line in (good, follows)]
    assert [cell[0] for cell in cells] == ["24, 8 seeds"] * 2
    assert [(cell[3], cell[6]) for cell in cells] == [("+ *", "+ *"), ("+ *", "?")]
    assert all(cell[1] == cell[2] and cell[4] == cell[5] for cell in cells)  # the re-run is the same here
    assert float(cells[0][4].split()[0]) > 0.9
    assert abs(float(cells[1][4].split()[0])) < 0.5


def test_a_sign_needs_both_runs(pages, found):
    one = population(found)
    first = one.results["drawn"]
    turned = replace(first, values=first.values.assign(good=-first.values["good"]))
    line = next(line for line in pages.over_all([replace(one, second={"drawn": turned})]) if "[X3" in line)
    assert line.startswith("| good |")
    assert [cell.strip() for cell in line.split("|")[6:10:3]] == ["?", "?"]


def test_each_setting_of_a_protocol_is_a_row_of_its_paper(pages, monkeypatch):
    rows = (Setting("labels", "2 | G.2", "2", "10"), Setting("steps", "not said", "750,000", "30,000"))
    experiments = {name: replace(one, protocol=rows * (name == "X4")) for name, one in pages.EXPERIMENTS.items()}
    monkeypatch.setattr(pages, "EXPERIMENTS", experiments)
    assert list(pages.protocols("sharpening")) == []
    title, _, *table = pages.protocols("compression")
    assert title.startswith("### X4")
    assert table[2:] == ["| labels | 2 \\| G.2 | 2 | 10 |", "| steps | not said | 750,000 | 30,000 |", ""]
