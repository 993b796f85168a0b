"""The documents are true: their Python runs, their commands parse, their tree is the tree."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import flatlens as fl
from flatlens.bounds.check import BOUNDS
from flatlens.cli import app
from flatlens.measures.definition import PAPERS
from flatlens.papers import EXPERIMENTS
from flatlens.report.cards import page

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_the_python_in_a_document_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "document"}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_the_commands_in_a_document_are_commands(document):
    for block in blocks(document, "sh"):
        for command in re.split(r"&&|\n", block.replace("\\\n", " ")):
            words = shlex.split(command, comments=True)
            if words and Path(words[0]).name == "flatlens":
                app.parse_args(words[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_the_links_in_a_document_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_the_tree_in_architecture_names_every_folder():
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("## What is where")[2].partition("\n## ")[0]
    package = ROOT / "src" / "flatlens"
    parts = [f"{p.name}/" for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"]
    parts += [p.name for p in package.glob("*.py") if not p.name.startswith("__")]
    named = re.findall(r"^ {6}(\S+)", tree, re.M)
    assert sorted(named) == sorted(parts)


def test_the_readme_has_one_command_each_for_the_job_and_the_tests():
    text = (ROOT / "README.md").read_text()
    for name in ("run", "tests"):
        (block,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)```\n<!-- end -->", text, re.S)
        assert block.count("\n") == 1
        assert "-c constraints.txt" in block


def test_the_readme_is_short_and_counts_what_there_is():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 100
    predictions = sum(len(one.predictions) for one in EXPERIMENTS.values())
    atlas = (ROOT / "docs" / "atlas.md").read_text()
    (rows, chance), decided = (
        re.search(r"(\d+) rows have a p-value.*?at most ([\d.]+)", atlas).groups(),  # type: ignore[union-attr]
        re.search(r"(\d+) are decided, and their replication agrees", atlas)[1],  # type: ignore[index]
    )
    for told in (
        f"{len(BOUNDS)} inequalities",
        f"{len(EXPERIMENTS)} experiments test {predictions} predictions.",
        f"{rows} have a p-value, and {decided} of these are significant and replicated",
        f"at most about {float(chance):.0f} would be, by chance",
    ):
        assert told in " ".join(text.split())


def test_pages_by_hand_are_short():
    """Walks at most 1,000 words; the pages that lead a reader at most 2,500."""
    words = {one.stem: len(one.read_text().split()) for one in DOCUMENTS}
    assert words["CONTRIBUTING"] < 1000
    led = (
        "start choosing comparing questions recipes thirty migrating studies training resnet50 accuracy representations"
    )
    assert {name: words[name] for name in (*led.split(), "extending", "glossary") if words[name] > 2500} == {}


def test_the_table_of_invariances_is_that_of_the_cards():
    text = (ROOT / "docs" / "choosing.md").read_text()
    (row,) = re.findall(r"^\| by layer-wise and neuron-wise .*\n\|.*\n(.*)$", text, re.M)
    moves = ({"layerwise", "neuronwise"}, {"layerwise"}, set())
    cards = {card.name: card for card in fl.catalogue()}
    for names, kept in zip(row.strip("| ").split(" | "), moves, strict=True):
        for name in re.findall(r"`(\w+)`", names):
            assert cards[name].invariant_under & {"layerwise", "neuronwise"} == kept, name


def test_the_questions_star_what_is_run_only_when_named():
    questions = (ROOT / "docs" / "choosing.md").read_text().partition("## Between")[0]
    products = {name for name, one in fl.measures.MEASURES.items() if one.on_request}
    named = set(re.findall(r"`(\w+)`", questions))
    assert set(re.findall(r"`(\w+)`\\\*", questions)) == named & products


def test_the_references_have_every_paper():
    docs = ROOT / "docs"
    entries = (docs / "references.bib").read_text()
    assert re.findall(r"^@\w+\{(\w+),$", entries, re.M) == [*PAPERS]
    assert set(re.findall(r"\{cite\}`(\w+)`", (docs / "references.md").read_text())) == set(PAPERS)


def test_the_questions_count_the_outcomes_of_the_sharpening_paper():
    rows = re.findall(r"^\| \[sharpening\].*", (ROOT / "docs" / "papers" / "index.md").read_text(), re.M)
    words = " ".join((ROOT / "docs" / "questions.md").read_text().split())
    counts = {word: sum(f" {word} " in row for row in rows) for word in ("✓", "✗", "±")}
    assert sum(counts.values()) == len(rows)
    assert f"Of the {len(rows)} main claims" in words
    for told in (f"{counts['✓']} are reproduced", f"{counts['✗']} is not", f"{counts['±']} depends on the reading"):
        assert told in words


def test_the_page_of_measures_is_what_the_measures_say():
    written = (ROOT / "docs" / "measures.md").read_text()
    assert written == page(), "write it anew: flatlens list measures --markdown > docs/measures.md"


def test_the_table_of_regularisers_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("regulariser", ROOT / "docs" / "regulariser.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (ROOT / "docs" / "training.md").read_text(), "paste it anew: python docs/regulariser.py"


def test_every_call_in_the_table_of_other_libraries_runs():
    document = ROOT / "docs" / "migrating.md"
    names: dict[str, object] = {}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), names)
    calls = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", document.read_text(), re.M)
    assert len(calls) > 20
    for call in calls:
        assert eval(call, names) is not None, call
