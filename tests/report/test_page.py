from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from types import SimpleNamespace

import pandas as pd
import pytest

from flatlens.measures import Card
from flatlens.papers.experiment import Experiment, Plot, Prediction
from flatlens.report.figures import study_figures
from flatlens.report.figures.plots import plot_figure
from flatlens.report.page import study_html, write_study_page
from flatlens.report.reproduction import atlas_html
from flatlens.statistics import Statistic

NASTY = "<script>alert(1)</script>\"'&"


def card(name: str, *moves: str, text: str = "") -> Card:
    return Card(
        name, "M0", "flatness", "x", text or "what it means", text or "a paper", "1", "one pass", frozenset(moves)
    )


CARDS = (
    card("mls", "layerwise", "neuronwise", "permutation"),
    card("relative_flatness", "layerwise", "permutation"),
    card("never_measured"),
    card("test_loss", "layerwise"),
)


class Elements(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def html(laptop, laptop_figures) -> str:
    return study_html(laptop, laptop_figures, CARDS)


@pytest.fixture(scope="module")
def folder(smoke, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    (out / "table.csv").write_text("key\n")
    return out, write_study_page(smoke, out)


def specs_of(html: str) -> dict[str, dict]:
    return json.loads(re.search(r'id="specs">(.*?)</script>', html, re.DOTALL).group(1))


def test_every_figure_has_its_place_and_its_chart(html):
    slots = [attrs["data-spec"] for attrs in Elements(html).all("div") if "data-spec" in attrs]
    first, *slots = slots  # the picture of the first screen is one of the panels below
    assert first in slots
    assert sorted(slots) == sorted(specs_of(html))
    for name, panels in (
        ("correlations_with_gap", 2),
        ("against_gap", 8),
        ("scatter_matrix", 1),
        ("layer_profiles", 3),
    ):
        assert len([slot for slot in slots if slot.startswith(f"{name}-")]) == panels


def test_nothing_is_fetched(html):
    elements = Elements(html)
    for tag, attrs in elements.tags:
        assert not str(attrs.get("src", "")).startswith(("http", "//")), tag
        assert "srcset" not in attrs
    assert [attrs["href"] for attrs in elements.all("link")] == ["data:,"]
    assert all(not attrs["href"].startswith(("http", "//", "/")) for attrs in elements.all("a"))
    assert "@import" not in html
    policy = next(attrs["content"] for attrs in elements.all("meta") if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy


def test_it_is_laid_out_for_a_phone(html):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Elements(html).all("meta")
    assert "prefers-color-scheme: dark" in html


def test_it_says_what_was_run_and_found(html, laptop):
    assert "48 networks of 4 layers (relu, widths 64, 64 and 64)" in html
    assert "learning rates 0.02, 0.05, 0.1 and 0.2, batch sizes 4, 16 and 64, 4 seeds for each combination" in html
    assert laptop.findings[0] in html
    assert "1 of 48 networks is excluded" in html
    assert f"<code>{laptop.excluded[0][0]}</code>: out of steps" in html
    assert "2.13.0" in html


def test_the_first_screen_is_the_answer_and_one_picture_and_the_rest_is_folded(laptop, laptop_figures):
    result = replace(laptop, answer=["One line & more.", "Two.", "Three."])
    html = study_html(result, laptop_figures, CARDS)
    first = html[html.index('<section id="answer"') :].partition("</section>")[0]
    assert re.findall(r'<p class="answer">(.*?)</p>', first) == ["One line &amp; more.", "Two.", "Three."]
    picture = re.search(r'data-spec="against_gap-(\d+)"', first).group(1)
    strongest = laptop.relations[laptop.relations["x"] == "generalisation gap"].set_index("y")["pearson"].abs()
    measures = [q.name for q in laptop.quantities if q.role == "measure"]
    assert measures[int(picture)] == strongest[measures].idxmax()
    assert html.index('<section id="answer"') < html.index("<details>")
    folded = re.findall(r'<section id="(\w+)">\n<details><summary><h2>', html)
    assert len(folded) == html.count("<section id=") - 1
    assert html.count("<details>") == html.count("</details>") == len(folded)


def test_failed_and_unfinished_networks_are_said(smoke):
    result = replace(smoke, failed=[("0" * 12, "ValueError: <b>")], unfinished=3)
    html = study_html(result, study_figures(result), CARDS)
    assert "1 run failed and is missing" in html
    assert "3 networks of the study not finished:" in html
    assert "ValueError: &lt;b&gt;" in html


def test_differences_have_a_table_for_each_axis_of_words_those_that_decide_first(smoke):
    rows = [
        {"setting": axis, "column": name, "group": "<SAM>", "reference": "none", "value": 0.5, "low": 0.4, "high": 0.6}
        | {"scale": "ratio", "p": 0.01, "p_holm": p, "n": 6, "smaller": 6, "note": "", "decides": decides}
        | {"small_means": "flat" * decides}
        for axis in ("ascent", "model.activation")
        for name, p, decides in (("ggn_trace", 0.5, False), ("neuron_flatness", 0.02, True))
    ]
    html = study_html(replace(smoke, differences=pd.DataFrame(rows)), study_figures(smoke), CARDS)
    sections = re.findall(r"<h2>Differences by (.*?)</h2>.*?<tbody>(.*?)</tbody>", html, re.DOTALL)
    assert [axis for axis, _ in sections] == ["ascent", "activation"]
    for _, body in sections:
        assert re.findall(r'<th scope="row">(.*?)</th>', body) == ["neuron_<wbr>flatness", "ggn_<wbr>trace"]
        assert body.count("&lt;SAM&gt;") == 2
        assert "<b>×0.5</b> <small>[0.4, 0.6]" in body.replace("\n", "")
        assert body.count("<b>") == 1
    assert "Differences by" not in study_html(smoke, study_figures(smoke), CARDS)


def test_badges_say_what_is_invariant(html):
    rows = re.findall(r'<tr><th scope="row"><code>(\w+)</code></th>(.*?)</tr>', html, re.DOTALL)
    badges = {name: re.findall(r"(invariant|changes)<", row) for name, row in rows}
    assert badges == {"mls": ["invariant"] * 4, "relative_flatness": ["invariant", "changes", "invariant", "changes"]}


def test_every_coefficient_is_there_and_bold_where_it_is_sure(html, laptop):
    section = html[html.index('<section id="coefficients">') :].partition("</section>")[0]
    cells = re.findall(
        r"<td tabindex=\"0\" title=\"[^\"]*\">(<b>)?(-?[\d.]+)(?:</b>)? <small>\[(-?[\d.]+), (-?[\d.]+)\]", section
    )
    against = laptop.gap_correlations.dropna(subset=["value"])
    assert len(cells) == len(against)
    sure = (against["low"] > 0) | (against["high"] < 0)
    assert 0 < sure.sum() < len(against)
    assert [bool(bold) for bold, *_ in cells] == sure.tolist()
    assert [value for _, value, *_ in cells] == [f"{value:.2f}" for value in against["value"]]


def test_the_table_holds_every_network_with_all_digits(html, laptop):
    body = html[html.index('id="networks"') :]
    assert body.count("<tr ") == 48
    assert repr(float(laptop.networks["mls"][0])) in body
    assert body.count("by-layer") >= 12 * 49


def test_the_sources_are_those_of_the_measures(smoke):
    cited = replace(card("mls"), source="compression Def. 3.7", meaning="rows of `mls`")
    html = study_html(smoke, study_figures(smoke), [cited])
    sources = re.search("<p>Sources: (.*?)</p>", html).group(1)
    assert re.findall("<em>(.*?)</em>", sources) == ["compression"]
    assert "rows of <code>mls</code>" in html
    assert "Sources: " not in study_html(smoke, study_figures(smoke), CARDS)  # "a paper" is none of the list


def atlas_of(statistic: Statistic, smoke, **fields) -> str:
    """The page of a made-up experiment with one claim and one table."""
    claim = Prediction("c", "It holds.", "compression section 1", lambda _: statistic, **fields)
    made_up = Experiment("X0", "Made up", "sharpening Fig. 1", dict, (claim,), list, {})
    table = pd.DataFrame({"panel": "of <all>", "row": ["here"], "column": ["mls"], "text": ["1 & 2"]})
    found = SimpleNamespace(experiment=made_up, scale="smoke", outcomes=[claim.weigh({})], again=(), halves=(),
                            networks=4, results={"mlp": smoke}, unfinished=0)  # fmt: skip
    return atlas_html([found], [[plot_figure(Plot("t", "Table", "", "table", table), {})]], ["."])


def test_the_page_of_an_experiment_shows_its_claim_as_it_was_weighed(smoke):
    html = atlas_of(Statistic("mean", 1.0, 4), smoke, than=1 - 1e-9, kind="theorem", quote="*so* $1 - \\epsilon$")
    assert "mean, predicted above 1 - 1e-09" in html
    assert "“<em>so</em> 1 - ε”" in html
    sources = re.search("<p>Sources: (.*?)</p>", html).group(1)
    assert re.findall("<em>(.*?)</em>", sources) == ["compression", "sharpening"]


def test_a_claim_is_one_fact_a_cell_and_its_cases_are_folded(smoke):
    html = atlas_of(Statistic("m", 0.5, 4, parts={"case 0": Statistic("m", 0.25, 4)}), smoke)
    cells = re.search(r"<tr><td>It holds\.(.*?)</tr>", html, re.S).group(1)
    folded, shown = cells.split("</details>")
    assert folded.lstrip().startswith("<details><summary>")
    assert "case 0 0.25" in folded
    assert re.sub(r"<[^>]+>|\s+", " ", shown).split() == ["?", "open", "0.50", "4"]


def test_a_table_of_an_experiment_is_text(smoke):
    html = atlas_of(Statistic("m", 0.5, 4), smoke)
    assert "<caption>of &lt;all&gt;</caption>" in html
    assert '<tr><th scope="row">here</th><td>1 &amp; 2</td></tr>' in html
    assert specs_of(html) == {}


def test_text_from_outside_cannot_become_markup(smoke):
    networks, values = smoke.networks.copy(), smoke.values.copy()
    networks.loc[0, "key"] = values.loc[0, "key"] = NASTY
    networks = networks.rename(columns={"nmls": NASTY})
    layers = smoke.layers.assign(layer=smoke.layers["layer"] + NASTY, measure=NASTY)
    settings = {
        "name": NASTY,
        NASTY: [NASTY],
        "loss": NASTY,
        "data": {"name": NASTY, "train": NASTY},
        "activation": NASTY,
        "widths": [NASTY],
    }
    result = replace(smoke, networks=networks, values=values, layers=layers, settings=settings, findings=[NASTY],
                     versions={NASTY: NASTY}, excluded=[(NASTY, NASTY)], failed=[(NASTY, NASTY)])  # fmt: skip
    html = study_html(result, study_figures(result), [card("mls", text=NASTY)], [NASTY])
    assert "<script>alert" not in html
    assert len(Elements(html).all("script")) == 4
    assert NASTY in json.dumps(specs_of(html), ensure_ascii=False).replace('\\"', '"')  # and yet it is all there


def test_files_are_whole_and_linked(folder):
    out, written = folder
    page = out / "report.html"
    assert written[0] == page
    assert len(written) == 1 + 5 * 4
    assert not list(out.rglob("*.partial"))
    links = {attrs["href"] for attrs in Elements(page.read_text()).all("a")} - {"figures/"}
    files = {link for link in links if not link.startswith("#")}
    assert "table.csv" in files
    assert "relations.csv" not in files  # not there, so not linked
    for link in files:
        assert (out / link).stat().st_size > 0
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("figures/*.png"))
    assert all(path.read_bytes().startswith(b"%PDF-") for path in out.glob("figures/*.pdf"))
    assert all(b"<svg" in path.read_bytes()[:200] for path in out.glob("figures/*.svg"))


def test_a_page_of_undefined_numbers_is_still_a_page(strange_results, strange_figures):
    for name, result in strange_results.items():
        html = study_html(result, strange_figures[name], CARDS)
        assert len(specs_of(html)) >= 5, name
        assert "NaN" not in html[html.index('id="specs"') : html.index('"use strict"')], name


def test_anchors_lead_somewhere(html):
    elements = Elements(html)
    ids = {attrs["id"] for _, attrs in elements.tags if "id" in attrs}
    assert {attrs["href"][1:] for attrs in elements.all("a") if attrs["href"].startswith("#")} <= ids


def test_the_same_result_gives_the_same_page(smoke):
    first, second = (study_html(smoke, study_figures(smoke), CARDS) for _ in range(2))
    assert first == second


def test_a_page_that_cannot_be_written_leaves_the_old_one(smoke, tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_study_page(smoke, tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.rglob("*.partial"))


def test_it_stays_small(html):
    assert len(html) < 3_000_000


def test_progress_is_called_to_the_end(make_result, tmp_path):
    calls: list[tuple[str, int, int]] = []
    result = make_result(lrs=(0.1,), batch_sizes=(4,), seeds=1, excluded=0, steps=1, quantities=())
    write_study_page(result, tmp_path, progress=lambda *call: calls.append(call))
    assert calls[0] == ("drawing figures", 0, 5)
    assert calls[-1] == ("drawing figures", 5, 5)


def test_a_page_of_the_same_result_is_not_drawn_again(folder, smoke, tmp_path):
    out, files = folder
    shutil.copytree(out, tmp_path / "out")
    there = [tmp_path / "out" / file.relative_to(out) for file in files]
    for file in there:
        file.write_text("as it was")

    def drawn(result=smoke, **options):
        assert write_study_page(result, tmp_path / "out", **options) == there
        return there[0].read_text() != "as it was"

    assert not drawn()
    (tmp_path / "out" / "table.csv").unlink()  # the page links it
    assert drawn()
    there[0].write_text("as it was")
    assert not drawn()
    assert drawn(again=True)
    there[-1].unlink()
    assert drawn()
    there[0].write_text("as it was")
    assert drawn(replace(smoke, findings=["another"]))


SCRIPTED = """
const row = (search, value) => ({ hidden: false, dataset: { search }, cells: [{ dataset: { value } }] });
const rows = [row("SGD", "nan"), row("Adam", "inf"), row("sgd", "2.0"), row("x", "-inf")];
const on = (it) => Object.assign(it, { on: {}, addEventListener(name, act) { it.on[name] = act; } });
const head = { classList: { contains: () => true }, removeAttribute() {}, getAttribute: () => null, setAttribute() {} };
const button = on({ parentElement: head });
const body = { rows, moved: [], append(one) { this.moved.push(one.cells[0].dataset.value); } };
const table = { tBodies: [body], querySelectorAll: (what) => (what === "thead button" ? [button] : []) };
const [search, fold] = [on({}), on({ open: false })];
const slot = { dataset: { spec: "a" }, closest: () => !fold.open };
const byId = { networks: table, search, specs: { textContent: "{}" }, themes: { textContent: "{}" } };
globalThis.drawn = 0;
globalThis.vegaEmbed = () => { drawn += 1; };
globalThis.location = { hash: "" };
globalThis.window = on({ matchMedia: () => on({ matches: false }) });
globalThis.document = {
  getElementById: (id) => byId[id] || null, documentElement: { dataset: {} },
  querySelectorAll: (what) => (what === "details" ? [fold] : [slot]),
};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("act", "show", "expected"),
    [
        ("search.on.input({ target: { value: 'SGD' } });", "rows.map((one) => one.hidden)", [False, True, False, True]),
        ("button.on.click();", "body.moved", ["-inf", "2.0", "inf", "nan"]),
        ("window.on.beforeprint();", "[fold.open, drawn]", [True, 1]),
    ],
)
def test_the_script_searches_sorts_and_draws_all_for_the_printer(tmp_path, act, show, expected):
    script = files("flatlens.report").joinpath("templates", "study.js").read_text("utf-8")
    (tmp_path / "page.js").write_text(f"{SCRIPTED}{script}{act}console.log(JSON.stringify({show}));")
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


def test_a_missing_whole_number_is_a_dash_and_sorts_with_the_undefined(smoke):
    sizes = pd.array([None, *range(1, len(smoke.networks))], dtype="Int64")
    html = study_html(replace(smoke, networks=smoke.networks.assign(size=sizes)), study_figures(smoke), CARDS)
    assert '<td class="number" data-value="nan" title="nan">–</td>' in html
    assert "&lt;NA&gt;" not in html


def test_a_table_does_not_deny_the_intervals_of_the_figures(html):
    assert "no interval\nin this table; the figures and findings have one from 3 units on" in html
