"""docs/papers.py: the pages of the papers get their tables and pictures from the stored runs."""

from dataclasses import replace
from html import escape

import pytest

from flatlens.papers import EXPERIMENTS
from flatlens.papers.experiment import Setting
from flatlens.report.reproduction import atlas_html

pytestmark = pytest.mark.xdist_group("X3")


@pytest.fixture
def pages(docs_script):
    return docs_script("papers")


@pytest.fixture
def found(smoke_of):
    return smoke_of("X3")[1]


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
    pages.write([found])
    page = (tmp_path / "compression.md").read_text()
    assert "[X3 at smoke scale](../atlas.md#x3)" in page
    assert "**Fig. G.4: the steps of the bound**" in page
    assert "Fig. G.5, Fig. G.6, Fig. G.7 (X4 has not been run yet)" in page
    assert "Not yet run: X1, Over three learning rates" in page  # the main claims of the other experiments
    assert "![Fig. G.4](../images/atlas/X3_at_smoke_scale-tightness.svg)" in page
    assert "of theorems, which check the code." in page


def test_a_main_claim_has_its_value_and_what_its_authors_could_object(pages, found):
    row = pages.rows_of([found])[0][0]
    prediction = replace(row.outcome.prediction, headline=True, accepted="Most likely", objections="One.")
    main = replace(row, outcome=replace(row.outcome, prediction=prediction))
    legend, _, *table = pages.main_claims([found], [[main]])
    assert legend == pages.LEGEND
    line, objections = (line for line in table if prediction.says in line)
    assert f" | {main.in_short} | {pages.atlas.value_of(main.outcome.statistic)} | " in line
    assert line.endswith(" | Most likely |")
    assert objections.endswith(f"{prediction.says} *Most likely.* One.")


def test_each_setting_of_a_protocol_is_a_row_of_its_experiment(pages, monkeypatch):
    rows = (Setting("labels", "2 | G.2", "10", "2"), Setting("steps", "not said", "30,000", "750,000"))
    protocols = {"X4": rows, "X6": (Setting("seeds", "five", "10"),)}
    experiments = {name: replace(one, protocol=protocols.get(name, ())) for name, one in pages.EXPERIMENTS.items()}
    monkeypatch.setattr(pages, "EXPERIMENTS", experiments)
    lines = list(pages.settings())
    assert any("github.com" in line for line in lines)
    assert [line for line in lines if line.startswith(("#", "| "))] == [
        "## compression",
        "### X4",
        "| setting | as printed | as coded | ours, at desk scale |",
        "| --- | --- | --- | --- |",
        "| labels | 2 \\| G.2 | 2 | 10 |",
        "| steps | not said | 750,000 | 30,000 |",
        "## sharpening",
        "### X6",
        "| setting | as printed | ours, at desk scale |",
        "| --- | --- | --- |",
        "| seeds | five | 10 |",
    ]


def test_the_page_of_settings_is_what_the_script_makes(pages):
    text = (pages.FOLDER / f"{pages.SETTINGS}.md").read_text()
    assert text == pages.refresh(text, pages.settings())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_says_its_settings_as_printed_and_here(name):
    one = EXPERIMENTS[name]
    assert one.code
    heading, *rows = one.protocol_table
    assert rows
    assert all(len(row) == len(heading) and all(row) for row in rows), "a cell is empty"
    assert len({what for what, *_ in rows}) == len(rows), "a setting stands twice"


def test_only_code_that_is_known_is_compared():
    """A paper without code has no column for it; the tables of the others name what their code leaves open."""
    coded = {one.paper for one in EXPERIMENTS.values() if "as coded" in one.protocol_table[0]}
    assert coded == {"compression", "reparam2019", "relative2021"}


def test_the_page_of_a_run_at_desk_scale_has_the_table_of_settings(found):
    """Other scales have other settings, and no such table."""
    html = atlas_html([replace(found, scale="desk")], [[]], ["."])
    assert "ours, at desk scale" in html
    assert all(escape(row.ours) in html for row in EXPERIMENTS["X3"].protocol)
    assert "ours, at desk scale" not in atlas_html([found], [[]], ["."])
