"""The site's own parts: pages and docstrings as it reads them, pictures that are up to date, notebooks that run."""

import doctest
import importlib.util
import io
import json
import re
import runpy
import tomllib
from pathlib import Path

import nbformat
import pytest
from docutils.utils.math.latex2mathml import tex2mathml
from nbclient import NotebookClient
from sphinx.application import Sphinx
from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

import flatlens as fl

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE_ALONE = ("2_your", "3_", "5_", "7_")
"""Of the tutorials, whose code is run by each build of the site: as notebooks they have no part that others lack."""
TUTORIALS = [
    pytest.param(path, marks=pytest.mark.slow if path.stem.startswith(SITE_ALONE) else (), id=path.stem)
    for path in sorted((DOCS / "tutorials").glob("*.py"))
]


def script(name):
    """Return a module of docs/ that is no part of the package."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["markdown", "docstrings", "entries", "offline"])
def test_what_the_site_changes_is_what_its_examples_show(name):
    found = doctest.testmod(script(f"site_parts/{name}"))
    assert found.attempted
    assert not found.failed


def test_links_of_the_root_lead_into_the_site():
    markdown = script("site_parts/markdown")
    page = ["# Page\n\n```{include} ../README.md\n```\n"]
    markdown._read(None, "index", page)
    targets = re.findall(r"\]\(([^)#]+)\)", page[0])
    assert "start.md" in targets
    assert "contributing.md" in targets
    assert not [one for one in targets if not one.startswith("http") and not (DOCS / one).exists()]


def test_docstrings_keep_their_examples_and_drawings():
    docstrings = script("site_parts/docstrings")
    lines = ["Return ||x||_2 of x_i.", "", ">>> a | b", "{'*'}", "", "Args:", "  **options: more"]
    docstrings._process(None, "function", "f", None, None, lines)
    assert lines == [r"Return \|\|x\|\|_2 of x_i.", "", ">>> a | b", "{'*'}", "", "Args:", r"  \*\*options: more"]


def test_the_inventory_of_torch_is_what_its_maker_writes():
    inventory = script("site_parts/inventory")
    assert inventory.INVENTORY.read_bytes() == inventory.content()


def test_the_pictures_of_the_architecture_follow_the_import_contract(tmp_path):
    architecture = script("architecture")
    architecture.main(tmp_path)
    for name in ("layers.svg", "flow.svg"):
        assert (tmp_path / name).read_text() == (DOCS / "images" / name).read_text(), "run docs/architecture.py"
    package = ROOT / "src" / "flatlens"
    drawn = {name for row in architecture.layers() for name in row}
    assert drawn == {one.stem for one in package.iterdir() if not one.name.startswith(("__", "py."))}


PAGE = """# Formulas

Inline $\\overline{x}$, `mls.max`, [`mls`](https://example.org), and a block:

```{math}
\\sum_i x_i^2
```
"""


@pytest.mark.parametrize("planted", [False, True])
def test_a_page_loads_nothing_from_a_network(planted, tmp_path):
    """With the site's own settings, without its tutorials; a script from elsewhere is a warning, which ends a build."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(PAGE)
    without = ["sphinx_gallery", "bibtex", "intersphinx"]
    extensions = [one for one in settings()["extensions"] if not any(name in one for name in without)]
    changed = {"extensions": extensions, "html_js_files": ["https://cdn.example.org/a.js"] if planted else []}
    told = io.StringIO()
    folders = tmp_path / "docs", DOCS, tmp_path / "site", tmp_path / "trees"
    app = Sphinx(*folders, "html", changed, status=None, warning=told)
    app.build()
    assert ("index.html needs a network: <script" in told.getvalue()) is planted
    page = (tmp_path / "site" / "index.html").read_text()
    assert page.count("<math") == 2
    assert page.count('href="measures.html#mls"') == 1  # not within the other link


def test_every_formula_of_the_documentation_can_be_drawn():
    formulas = {one for page in DOCS.rglob("*.md") for one in re.findall(r"\$`([^`]+)`\$", page.read_text())}
    assert len(formulas) > 50
    assert all(tex2mathml(one).startswith("<math") for one in formulas)


def settings():
    """Return the names in docs/conf.py."""
    return runpy.run_path(str(DOCS / "conf.py"))


def test_one_version_everywhere():
    assert f"\nversion: {fl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{fl.__version__}}}," in (DOCS / "questions.md").read_text()
    assert f"\n## [{fl.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_tutorial_runs_as_a_notebook(tutorial, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fl.__file__).parents[1]))
    blocks = split_code_and_text_blocks(str(tutorial))[1]
    content = jupyter_notebook(blocks, {**DEFAULT_GALLERY_CONF, "src_dir": str(DOCS)}, str(tmp_path))
    notebook = nbformat.reads(json.dumps(content), as_version=4)  # joins lists of lines
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any(cell.outputs for cell in code)
