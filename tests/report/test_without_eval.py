"""The pages' charts in a JavaScript engine that makes no program of a text: the same pictures as in one that may."""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from flatlens.report.figures.figure import theme
from flatlens.report.figures.offline import bundle
from flatlens.report.page import study_html

VIEW = "s.viewClass||mod12.View"
HEADLESS = (
    "class extends mod12.View { initialize() { return this; } hover() { return this; } tooltip() { return this; } }"
)
PAGE = """
globalThis.window = globalThis;
globalThis.addEventListener = () => {};
globalThis.getComputedStyle = () => ({});
globalThis.ShadowRoot = class {};
const element = () => ({
  style: {}, dataset: {}, childNodes: [], innerHTML: "", classList: { add() {}, remove() {} }, setAttribute() {},
  append() {}, appendChild: (child) => child, addEventListener() {}, removeEventListener() {},
  getRootNode: () => document,
});
globalThis.document = Object.assign(element(), {
  createElement: element, createElementNS: element, getElementById: () => null, head: element(), body: element(),
});
"""
DRAW = """
(async () => {
  for (const [name, spec] of Object.entries(SPECS)) {
    const options = { mode: "vega-lite", actions: false, renderer: "none", ast: AST, config: CONFIG };
    console.log(JSON.stringify([name, await (await vegaEmbed(element(), spec, options)).view.toSVG()]));
  }
})().catch((error) => { console.error(error.message); process.exit(1); });
"""


def drawn(folder, specs, *, ast, evaluation=True):
    """The charts as SVG by name, or the engine's complaint."""
    script = bundle()
    assert script.count(VIEW) == 1
    draw = DRAW.replace("SPECS", json.dumps(specs)).replace("AST", ast).replace("CONFIG", json.dumps(theme("light", 1)))
    (folder / "draw.js").write_text(PAGE + script.replace(VIEW, HEADLESS) + draw, encoding="utf-8")
    flags = [] if evaluation else ["--disallow-code-generation-from-strings"]
    done = subprocess.run(["node", *flags, str(folder / "draw.js")], capture_output=True, text=True)
    return dict(map(json.loads, done.stdout.splitlines())) if done.returncode == 0 else done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_charts_need_no_eval(tmp_path, laptop, laptop_figures):
    html = study_html(laptop, laptop_figures, ())
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', html, re.DOTALL).group(1))
    compiled = drawn(tmp_path, specs, ast="false")
    assert drawn(tmp_path, specs, ast="true", evaluation=False) == compiled
    assert len(compiled) == len(specs)
    assert all(svg.startswith("<svg") for svg in compiled.values())
    assert "disallowed" in drawn(tmp_path, specs, ast="false", evaluation=False)


def test_the_pages_forbid_it_and_their_script_does_without():
    templates = files("flatlens.report").joinpath("templates")
    for page in ("study.html.j2", "atlas.html.j2", "checked.html.j2"):
        policy = re.search(r'Security-Policy" content="(.*?)"', templates.joinpath(page).read_text("utf-8")).group(1)
        assert "default-src 'none'" in policy
        assert "unsafe-eval" not in policy
    assert "ast: true" in templates.joinpath("study.js").read_text("utf-8")
