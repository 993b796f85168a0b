"""The page and the screens of one measured network with more than a hundred layers."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from rich.console import Console

from flatlens.errors import UnknownName
from flatlens.estimate import Estimate, Report, undefined
from flatlens.measures import catalogue
from flatlens.report.figures.measured import DARK, layers_figure, layers_frame
from flatlens.report.measure import measure_screen, write_measure_page
from flatlens.report.page import svg_of

PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
LAYERS = ["stem<b>", *(f"blocks.{i}.{part}" for i in range(30) for part in PARTS), "head"]


@pytest.fixture(scope="module")
def deep():
    """mls is 2^-i in block i, but its bias is far below; relative flatness is defined at the head alone."""
    estimates = {("mls", None): Estimate(2.5), ("relative_flatness.sum", None): undefined("elsewhere it is not")}
    for at, layer in enumerate(LAYERS):
        estimates["mls", layer] = Estimate(2.0 ** -(at // 4))
        estimates["relative_flatness", layer] = Estimate(3.0) if layer == "head" else undefined("it curves")
    estimates["ggn_trace", "blocks.7.norm.bias"] = Estimate(1e-20)
    about = {"model": "Deep<i>", "n": 12, "outputs": 4, "layers": LAYERS, "loss": "cross_entropy", "parameters": 1000,
             "device": "cpu", "dtype": "float32", "versions": {"torch": "2.13"},
             "origin": {"weights": "random (seed 0)", "preparation": "its own <tokenizer>"}}  # fmt: skip
    return Report(estimates, about)


@pytest.fixture(scope="module")
def page(deep, tmp_path_factory):
    return write_measure_page(deep, catalogue(), tmp_path_factory.mktemp("page") / "page.html").read_text()


class Rows(HTMLParser):
    """What the rows of the table of layers are searched by."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html[html.index('id="by-layer"') :])

    def handle_starttag(self, tag, attrs):
        if tag == "tr" and "data-search" in dict(attrs):
            self.found.append(dict(attrs)["data-search"])


def test_the_page_holds_every_layer_once_under_its_block(page):
    assert sorted(Rows(page).found) == sorted([*LAYERS, "blocks.7.norm.bias"])
    assert page.count('<tr class="group">') == 30
    assert "2.5" in page
    assert "elsewhere it is not" in page


def test_the_page_says_what_was_measured_and_escapes_it(page):
    assert "Untrained: the weights are random." in page
    assert "its own &lt;tokenizer&gt;" in page
    assert "stem&lt;b&gt;" in page
    assert "stem<b>" not in page
    assert "Deep<i>" not in page
    assert page.count("<script") == 1
    assert re.search(r"script-src 'sha256-[\w+/=]{44}'", page)
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_script_s_hash_is_that_of_the_script(page):
    from base64 import b64encode
    from hashlib import sha256

    script = page[page.index("<script>") + len("<script>") : page.index("</script>")]
    assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in page


def test_a_deep_network_is_mapped_by_block(deep):
    data = layers_frame(deep)
    assert data["row"].to_list() == ["stem<b>", *(f"blocks.{i}" for i in range(30)), "head"] * 2
    mls = data[data["measure"] == "mls"].set_index("row")
    assert mls.loc["blocks.3", "layer"] == "blocks.3.attn.qkv"  # with 2^-3 the largest: the other three have 2^-4
    assert mls.loc["blocks.3", "value"] == 2.0**-3
    assert (mls["place"].iloc[0], mls["place"].iloc[-1]) == (1.0, 0.0)
    assert mls.loc["blocks.15", "place"] == pytest.approx(0.5, abs=0.02)  # half the way in logarithms
    flatness = data[data["measure"] == "relative_flatness"].set_index("row")
    assert flatness["text"].to_list() == ["–"] * 31 + ["3"]
    assert flatness.loc["blocks.0", "told"] == "relative_flatness of blocks.0.attn.qkv: undefined: it curves"
    assert "ggn_trace" not in set(data["measure"])  # at a bias alone
    figure = layers_figure(deep)
    assert figure.caption.startswith("Blocks, each with its largest value")
    assert "undefined" in figure.caption


def layered(values, **more):
    return Report({("mls", layer): Estimate(value) for layer, value in values.items()}, {**ABOUT, "layers": [*values]})


def test_the_colour_is_the_place_between_the_smallest_and_the_largest_layer():
    def places(values):
        return layers_frame(layered(values))["place"].to_list()

    assert places({"a": 1.0, "b": 10.0, "c": 100.0}) == [0.0, 0.5, 1.0]
    assert places({"a": 100.0, "b": 101.0}) == [0.0, pytest.approx(math.log2(1.01), abs=1e-4)]  # pale: almost equal
    assert places({"a": -1.0, "b": 0.0, "c": 3.0}) == [0.0, 0.25, 1.0]
    assert places({"a": 1.0, "b": math.inf, "c": 3.0})[1] != places({"a": 1.0, "b": math.inf, "c": 3.0})[1]  # NaN
    svg = svg_of(layers_figure(layered({"a": 1.0, "b": 10.0})))
    assert "rgb({}, {}, {})".format(*bytes.fromhex(DARK[1:])) in svg
    assert svg.count('aria-roledescription="rect mark"') == 2


def test_two_hundred_layers_without_blocks_are_rows_without_values_and_long_names_are_shortened():
    names = [f"a_very_long_name_of_a_layer_{i}" for i in range(200)]
    figure = layers_figure(layered({name: 1.0 + i for i, name in enumerate(names)}))
    assert len(figure.data) == 200
    assert [layer["mark"]["type"] for layer in figure.spec["layer"]] == ["rect", "rect"]
    assert figure.caption.startswith("Layers")
    svg = svg_of(figure)
    assert "a_very_long_…_of_a_layer_0" in svg
    assert float(re.search(r'height="(\d+)', svg)[1]) < 3000
    few = layers_figure(layered({"fc1": 1.0, "fc2": 2.0}))
    assert [layer["mark"]["type"] for layer in few.spec["layer"]] == ["rect", "rect", "text"]


def printed(report: Report, layers: str = "", width: int = 100) -> list[str]:
    console = Console(width=width, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(measure_screen(report, catalogue(), layers))
    return console.export_text().splitlines()


def test_the_screen_shows_the_way_through_the_blocks(deep):
    lines = printed(deep)
    assert any("122 layers and 1 other parameter in 30 blocks" in line for line in lines)
    bars = next(line.split()[1] for line in lines if "█" in line)
    assert len(bars) == 30
    assert (bars[0], bars[-1]) == ("█", "▁")
    assert len(lines) < 45
    assert any(line.startswith("weights: random") for line in lines)


def test_layers_asked_for_are_shown_each(deep):
    lines = printed(deep, "blocks.7.", 80)
    at = lines.index(next(line for line in lines if line.strip() == "blocks.7"))
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == list(PARTS)
    assert not any("blocks.8" in line for line in lines)
    with pytest.raises(UnknownName, match=r"blocks\.77"):
        printed(deep, "blocks.77.")


ABOUT = {"model": "Net", "n": 1, "outputs": 1, "layers": ["fc"], "loss": "mse", "parameters": 2, "device": "cpu",
         "dtype": "float64", "versions": {"torch": "2.13"}}  # fmt: skip


def test_a_network_of_one_layer_has_a_page_too(tmp_path):
    report = Report({("mls", None): Estimate(1.0), ("mls", "fc"): Estimate(1.0)}, ABOUT)
    assert Rows(write_measure_page(report, catalogue(), tmp_path / "page.html").read_text()).found == ["fc"]


SEARCHED = """
const row = (search) => ({ hidden: false, dataset: { search } });
const button = { addEventListener() {}, setAttribute() {} };
const body = (rows, folds) => ({
  rows, hidden: false, classList: { toggle() {}, contains: () => false },
  querySelector: () => (folds ? button : null), querySelectorAll: () => rows,
});
const bodies = [
  body([row("mls sensitivity"), row("nmls")], false), body([row("ggn_trace")], false), body([row("fc1")], true),
];
const table = { tBodies: bodies, querySelectorAll: () => bodies.flatMap((one) => one.rows) };
const input = { addEventListener: (_, typed) => { input.typed = typed; } };
const tools = {
  dataset: { searches: "table" }, querySelector: (what) => (what === "input" ? input : {}), querySelectorAll: () => [],
};
globalThis.document = { querySelectorAll: () => [tools], getElementById: () => table };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(
    ("typed", "hidden"), [("mls", [False, True, True]), ("FC", [True, True, False]), ("", [False, False, False])]
)
def test_a_search_hides_the_heading_of_a_family_without_a_row(tmp_path, typed, hidden):
    script = files("flatlens.report").joinpath("templates", "groups.js").read_text()
    search = f"input.typed({{ target: {{ value: {json.dumps(typed)} }} }});"
    show = "console.log(JSON.stringify(bodies.map((one) => one.hidden)));"
    (tmp_path / "search.js").write_text(f"{SEARCHED}{script}{search}{show}")
    done = subprocess.run(["node", str(tmp_path / "search.js")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == hidden


def test_an_estimate_of_a_layer_has_its_error_and_a_bound_its_sign(tmp_path):
    estimates = {
        ("ggn_trace", "fc1"): Estimate(5.4, 8.0, "estimate"),
        ("ggn_trace", "fc2"): Estimate(1.0),
        ("mls", "fc1"): Estimate(2.0, kind="lower bound"),
        ("mls", "fc2"): undefined("it has a kink"),
    }
    report = Report(estimates, {**ABOUT, "layers": ["fc1", "fc2"]})
    page = write_measure_page(report, catalogue(), tmp_path / "page.html").read_text()
    assert re.search(r'title="5\.4 ± 16 \(estimate\)">5\.4 ± 16<', page)
    assert ">≥2<" in page
    assert re.search(r'tabindex="0" title="it has a kink">–<', page)
    screen = "\n".join(printed(report))
    assert "5.4 ± 16" in screen
    assert "≥2" in screen
    cells = layers_frame(report).set_index("layer")
    assert cells.loc["fc1", "text"].to_list() == ["5.4", "≥2"]
    assert cells.loc["fc1", "told"].iloc[0] == "ggn_trace of fc1: 5.4 ± 16 (estimate)"


def test_the_picture_takes_the_colours_of_the_page_and_the_sources_are_named(page):
    picture = page[page.index("<svg") : page.index("</svg>")]
    assert 'fill="var(--panel)"' in picture
    assert 'fill="var(--soft)"' in picture
    assert not re.search('"(white|#1c2430|#5b6675|#e3e7ec)"', picture)
    sources = re.search("<p>Sources: (.*?)</p>", page).group(1)
    assert re.findall("<em>(.*?)</em>", sources) == ["compression", "sharpening", "relative2021"]


def test_a_long_name_may_break_between_its_words(page):
    assert '<th scope="row">relative_<wbr>flatness.<wbr>sum</th>' in page


def test_no_map_of_a_single_layer(tmp_path):
    report = Report({("mls", "fc1"): Estimate(1.0), ("ggn_trace", "fc2"): Estimate(1.0)}, {**ABOUT, "layers": ["fc1"]})
    assert "Layers by measures" not in write_measure_page(report, catalogue(), tmp_path / "page.html").read_text()


def test_an_infinite_value_is_in_the_table_and_has_no_tint_in_the_map(tmp_path):
    values = {"a.0.x": math.inf, "a.0.y": 2.0, "a.1.x": 1.0, "a.1.y": 2.0}
    report = layered(values)
    assert "inf (exact)" in write_measure_page(report, catalogue(), tmp_path / "page.html").read_text()
    data = layers_frame(report).set_index("layer")
    assert data.loc["a.0.x", "text"] == "inf"
    assert math.isnan(data.loc["a.0.x", "place"])


def test_the_answer_and_the_map_come_first(page):
    main = page[page.index("<main>") :]
    assert main.index('class="lead"') < main.index('id="layers-map"') < main.index('id="network"')
    assert "<title>mls of blocks.0.attn.qkv: 1 (exact)</title>" in main  # the pointer shows it


def test_parameters_beside_the_layers_are_counted_as_such(page):
    assert "122 layers and 1 other parameter, by block" in page


def test_closed_blocks_are_open_on_paper(page):
    closed = page[: page.index(".data .closed tr:not(.group)")]
    assert closed.endswith("@media screen { ")
