"""The screen fits 80 columns and explains its marks; the page is whole, offline and escapes what it is given."""

import math
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from flatlens.comparing import Comparison
from flatlens.estimate import Estimate, Report, undefined
from flatlens.measures import MEASURES
from flatlens.measures.definition import PAPERS, named
from flatlens.report.compare import compare_screen, headings, number, write_compare_page
from flatlens.report.figures.compared import values_figure
from flatlens.report.figures.measured import INK, NEUTRAL, ranks_figure, ranks_frame, taus_figure
from flatlens.report.page import svg_of

ABOUT = {"n": 20, "outputs": 3, "loss": "cross_entropy", "dtype": "float64", "device": "cpu", "layers": ["fc1"],
         "versions": {"torch": "2"}}  # fmt: skip
RANKED = ["mls", "ggn_trace", "relative_flatness", "parameter_jacobian_frobenius", "weight_norm", "log_volume",
          "sharpness", "matrix_normalized_sharpness"]  # fmt: skip


def made_up(names, gap=True, seed=0):
    rng = np.random.default_rng(seed)
    reports = {}
    for i, name in enumerate(names):
        values = {key: Estimate(float(rng.normal() ** 2 * 10.0 ** rng.integers(-9, 9))) for key in RANKED}
        values["sharpness"] = Estimate(-1.2e-5 * (i + 1), kind="lower bound")
        values["log_volume"] = undefined("every sample is rank-deficient") if i == 1 else Estimate(-1.0 * i)
        values["ggn_trace"] = Estimate(1.0 + 0.1 * i, 0.1, "estimate")
        values |= {"loss": Estimate(1e-6 * i), "accuracy": Estimate(0.987)}
        if gap:
            values |= {"test_loss": Estimate(0.5, 0.1, "estimate"), "test_accuracy": Estimate(0.5, 0.1, "estimate"),
                       "generalisation_gap": Estimate(-0.5 + 0.1 * i, 0.1, "estimate")}  # fmt: skip
        reports[name] = Report({(key, None): e for key, e in values.items()}, ABOUT)
    return Comparison(reports, {key: MEASURES[key] for key in RANKED}, ("They differ in precision.",))


def screen(comparison, width=80):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(compare_screen(comparison), highlight=False, markup=False)
    return captured.get()


@pytest.mark.parametrize("gap", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ["e{}", "checkpoint-{}000"])
def test_two_to_six_networks_fit_80_columns_with_nothing_cut(count, name, gap):
    names = [name.format(i) for i in range(count)]
    text = screen(made_up(names, gap))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert all(one in text for one in names)
    for key in RANKED:
        assert text.count(f"\n{key} ") >= 2, key  # its rank and its value


def test_the_columns_of_the_groups_stand_below_each_other():
    lines = screen(made_up(["one", "two", "three"])).splitlines()
    head = next(line for line in lines if line.startswith("measure") and "τ gap" in line)
    row = next(line for line in lines if line.startswith("weight_norm *"))
    assert row[head.index("three") + 4] in "123~"
    assert row[head.index("one") + 2] in "123~"


def test_marks_are_explained_and_used():
    text = screen(made_up(["a", "b", "c"]))
    flat = " ".join(text.split())
    assert "mls *" not in text
    assert "ggn_trace *" in text
    assert "relative_flatness *" in text  # it is invariant under layer-wise rescaling alone
    ggn = next(line for line in text.splitlines() if line.startswith("ggn_trace *"))
    assert ggn.split()[2:5] == ["2~", "2~", "2~"]
    assert "sharpness * ≥" in text
    assert "≥, ≤: a bound" in flat
    assert "Undefined: log_volume on b: every sample is rank-deficient" in flat
    assert "Not counted: weight_norm: smaller is not necessarily better" in flat
    assert "~: a shared rank, because values are tied or 95% intervals overlap" in flat
    assert "They differ in precision." in flat
    assert "W says little about 3 networks" in flat
    assert text.index("Invariant under rescaling") < text.index("* Not invariant") < text.index("Smaller is not")


def test_the_picture_has_the_signs_of_bounds():
    comparison = made_up(["a", "b"])
    shown = ranks_frame(comparison).set_index(["measure", "model"])["value_text"]
    assert shown["sharpness", "a"] == "≥-1.2e-05"
    assert shown["log_volume", "b"] == "–"
    assert "≥" not in shown["mls", "a"]
    assert "≥, ≤: a bound" in ranks_figure(comparison).caption


@pytest.mark.parametrize(("count", "explained"), [(2, "~*≥"), (9, "~*"), (31, "*")])
def test_a_caption_explains_the_marks_that_are_drawn(count, explained):
    figure = ranks_figure(made_up([f"n{i}" for i in range(count)]))
    assert {mark for mark in "~*≥" if mark in figure.caption} == set(explained)


def test_an_open_rank_is_marked_and_no_name_is_cut():
    figure = ranks_figure(made_up([f"n{i}" for i in range(9)]))
    texts = ranks_frame(made_up([f"n{i}" for i in range(9)])).set_index("measure")["rank_text"]
    assert set(texts["ggn_trace"].str[-1]) == {"~"}
    assert not texts["mls"].str.contains("~").any()
    assert figure.spec["layer"][0]["encoding"]["x"]["axis"]["labelLimit"] == 0


def test_a_tau_that_is_undefined_is_an_empty_cell():
    names = ("mls", "nmls", "ggn_trace")
    reports = {
        model: Report({(name, None): Estimate(1.0 if name == "nmls" else float(i)) for name in names}, ABOUT)
        for i, model in enumerate("abc")
    }
    figure = taus_figure(Comparison(reports, {name: MEASURES[name] for name in names}))
    assert figure.data["tau"].isna().any()
    svg = svg_of(figure)
    assert "null" not in re.sub("<[^>]*>", "", svg)
    assert svg.count(f'fill="{NEUTRAL}"') == len(figure.data)  # below the tints


def test_networks_that_no_measure_tells_apart_are_one_sentence(tmp_path):
    values = {(name, None): Estimate(2.0) for name in ("mls", "ggn_trace", "weight_norm", "loss", "accuracy")}
    same = Comparison(
        {name: Report(values, ABOUT) for name in "ab"},
        {key: MEASURES[key] for key in ("mls", "ggn_trace", "weight_norm")},
    )
    page = write_compare_page(same, tmp_path / "page.html").read_text()
    for text in (screen(same), page):
        assert text.count("All networks have equal values: are these the same weights?") == 1
        assert "Not counted" not in text
        assert "undefined (" not in text
        assert ". ." not in text


def test_many_networks_are_a_line_each():
    text = screen(made_up([f"net{i}" for i in range(30)]))
    assert "30 networks: their ranks and values by each measure are in --page and --json." in " ".join(text.split())
    assert sum(line.strip().startswith(tuple("123456789")) for line in text.splitlines()) >= 30
    assert len(text.splitlines()) < 65


def test_long_names_become_numbers_with_a_legend():
    assert headings(made_up(["a", "b"])) == ["a", "b"]
    long = [f"runs/study/networks/{i:012d}" for i in range(6)]
    assert headings(made_up(long)) == list("123456")


@pytest.mark.parametrize(("value", "shown"), [
    (0.0, "0"), (-1.23456e-5, "-1.23e-5"), (123456.0, "1.23e5"), (float("inf"), "inf"), (float("nan"), "-"),
    (99.99, "100"),
])  # fmt: skip
def test_numbers_in_few_letters(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize("count", [2, 7, 9, 31])
def test_figures_are_valid_and_hold_the_data(count):
    comparison = made_up([f"n{i}" for i in range(count)])
    figure = ranks_figure(comparison)
    figure.whole.to_dict(validate=True)
    assert figure.caption
    data = ranks_frame(comparison)
    assert len(data) == count * len(RANKED)
    assert data["place"].dropna().between(0, 1).all()
    assert set(data.loc[data["measure"] == "mls", "row"]) == {"mls"}
    assert set(data.loc[data["measure"] == "ggn_trace", "row"]) == {"ggn_trace *"}
    taus = taus_figure(comparison)
    taus.whole.to_dict(validate=True)
    assert len(taus.data) == len(comparison.agreement().taus) ** 2


@pytest.mark.parametrize("gap", [True, False])
def test_the_page_needs_nothing_and_shows_everything(tmp_path, gap):
    path = write_compare_page(made_up(["a", "<b>&"], gap), tmp_path / "page.html")
    text = path.read_text()
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert text.count("<script") == 1  # our own; by its hash no other one could run
    assert "script-src 'sha256-" in text
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert text.count("<svg") == len(RANKED) + 2  # a panel for each measure, the ranks, the agreement
    assert ("Measures and the generalisation gap" in text) == gap
    assert "2 networks compared" in text
    assert "They differ in precision." in text
    assert all(MEASURES[key].card.meaning.split("<")[0][:20] in text for key in ("mls", "weight_norm"))
    assert len(re.findall('<tr[^>]*><th scope="row">', text)) >= 2 * len(RANKED)
    sources = re.search("<p>Sources: (.*?)</p>", text).group(1)
    named = {word for key in RANKED for word in re.findall(r"\w+", MEASURES[key].card.source)}
    assert set(re.findall("<em>(.*?)</em>", sources)) == named & set(PAPERS)
    assert f'fill="{INK}"' in text  # on light tints, on a dark page, too
    assert 'fill="var(--soft)"' in text


def test_the_page_is_the_same_byte_for_byte(tmp_path):
    one, two = (write_compare_page(made_up(["a", "b", "c"]), tmp_path / name).read_bytes() for name in ("1", "2"))
    assert one == two


@pytest.fixture
def pairs():
    """`a` and `b` fit the data, and `c` does not; each measure of `b` has a wide interval."""

    def report(loss, value, error):
        samples = torch.linspace(0.9, 1.1, 50) * loss
        estimates = {("loss", None): Estimate(loss, samples=samples), ("accuracy", None): Estimate(1.0)}
        estimates["mls", None] = Estimate(value, error, "estimate") if error else Estimate(value)
        estimates["sharpness", None] = Estimate(50 * value, math.nan, "lower bound")
        return Report(estimates, ABOUT | {"model": "Net", "parameters": 3})

    measures = {name: named(name)[0] for name in ("mls", "sharpness")}
    return Comparison({"a": report(0.1, 1.0, 0.0), "b": report(0.11, 2.0, 0.5), "c": report(2.0, 0.1, 0.0)}, measures)


def test_each_network_s_value_is_drawn_with_its_interval_and_what_is_not_ranked_is_marked(pairs):
    figure = values_figure(pairs)
    rows = figure.data.set_index(["measure", "model"])
    assert rows.loc["mls", "b"][["low", "high"]].to_list() == pytest.approx([2 - 0.98, 2 + 0.98])
    assert rows["ranked"].to_list() == [True, True, False] * 2
    assert rows.loc["mls", "c"]["told"] == "mls of c: 0.1, not ranked"
    assert rows.loc["sharpness", "a"]["told"] == "sharpness of a: ≥50"
    titles = [(panel["title"]["text"], panel["title"]["subtitle"]) for panel in figure.panel_specs]
    assert titles == [
        ("mls", "smaller is more compressed, log scale"),
        ("sharpness *", "smaller is flatter, log scale"),
    ]
    for words in ("bar is the 95% interval", "hollow grey dot", "points to the right is a lower bound", "*:"):
        assert words in figure.caption
    for drawing in (figure.whole, *figure.panels):
        drawing.to_dict(validate=True)
    svg = svg_of(figure)
    assert svg.count('aria-roledescription="point"') == 6
    filled = re.findall(r'aria-label="\w+ of (\w): [^>]*fill="#2f7fc1"', svg)
    assert filled == ["a", "b"] * 2  # the others are hollow


def test_a_page_of_a_comparison_shows_values_before_ranks_one_picture_for_each_measure(pairs, tmp_path):
    page = write_compare_page(pairs, tmp_path / "page.html").read_text()
    assert page.index('id="compared"') < page.index('id="ranks"')
    assert page[: page.index('id="ranks"')].count("<svg") == 2
    assert "<title>mls of c: 0.1, not ranked</title>" in page


def test_one_network_that_fits_has_values_and_nothing_is_ranked(tmp_path):
    two = made_up(["good", "bad"])
    bad = Report({**two.reports["bad"], ("loss", None): Estimate(math.inf)}, ABOUT)
    comparison = Comparison({**two.reports, "bad": bad}, two.measures)
    text, page = screen(comparison), write_compare_page(comparison, tmp_path / "c.html").read_text()
    assert comparison.ranked == ["good"]
    assert "weight_norm *" in text
    assert "not ranked" in text.lower()
    for words in ("Ranks", "mean rank", "Agreement", "Not counted"):
        assert words not in text
    assert 'id="agreement"' not in page
    assert "mean rank" not in page
    assert "mean rank" in screen(two)
