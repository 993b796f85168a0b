"""docs/papers.py: the pages of the papers get their tables and pictures from the stored runs."""

from dataclasses import replace

import pytest

from flatlens.papers.experiment import Setting

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
    assert "of theorems, which check the code, are not counted" in page


def test_each_setting_of_a_protocol_is_a_row_of_its_paper(pages, monkeypatch):
    rows = (Setting("labels", "2 | G.2", "2", "10"), Setting("steps", "not said", "750,000", "30,000"))
    experiments = {name: replace(one, protocol=rows * (name == "X4")) for name, one in pages.EXPERIMENTS.items()}
    monkeypatch.setattr(pages, "EXPERIMENTS", experiments)
    assert list(pages.protocols("sharpening")) == []
    title, _, *table = pages.protocols("compression")
    assert title.startswith("### X4")
    assert table[2:] == ["| labels | 2 \\| G.2 | 2 | 10 |", "| steps | not said | 750,000 | 30,000 |", ""]
