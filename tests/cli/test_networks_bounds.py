"""`flatlens bounds`: verdicts in words on stdout, JSON for machines, a page; 1 with --strict where one is violated."""

import json
from pathlib import Path

import pytest
from builders import NET

from flatlens import cli
from flatlens.bounds import BOUNDS
from flatlens.bounds.context import Claim
from flatlens.bounds.definition import bound

OPTIONS = ["net.py:build", "--data", "net.py:samples", "--loss", "half_squared_error"]


@pytest.fixture(autouse=True)
def _net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


def test_every_claim_is_shown_with_its_verdict(capsys):
    assert cli.run(["bounds", *OPTIONS, "--strict"]) == 0
    out = capsys.readouterr().out
    assert "linear_stability" in out
    assert "mls_chain.A_B" in out
    assert "claims hold" in out.splitlines()[0]
    assert "iolated" not in out.splitlines()[0]


def test_json_has_both_sides_and_every_assumption(capsys):
    assert cli.run(["bounds", *OPTIONS, "--bounds", "mls_chain,lipschitz_bound", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["bound"]: row for row in found["bounds"]}
    assert rows["mls_chain"]["lhs"] <= rows["mls_chain"]["rhs"]
    assert rows["lipschitz_bound"]["status"] == "not applicable"
    assert rows["lipschitz_bound"]["assumption"]
    assert found["about"]["n"] == 20


def test_a_violated_bound_is_told_first_and_ends_with_1_under_strict(capsys, monkeypatch):
    def wrong(context):
        """Two is at most one."""
        yield Claim(2.0, 1.0)

    monkeypatch.setattr(BOUNDS, "_known", dict(BOUNDS._known))  # which the decorator adds to
    bound(id="B0", symbol="2 <= 1", source="nobody")(wrong)
    assert cli.run(["bounds", *OPTIONS, "--bounds", "wrong"]) == 0
    assert capsys.readouterr().out.startswith("Violated: wrong; an error in flatlens or in a theorem")
    assert cli.run(["bounds", *OPTIONS, "--bounds", "wrong", "--strict"]) == 1


@pytest.mark.parametrize("command", ["bounds", "invariance"])
def test_a_page_is_written_that_asks_for_nothing(command, capsys, tmp_path):
    assert cli.run([command, *OPTIONS, "--page", "page.html"]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert text.count("<script") == 1  # our own: by its hash no other one may run
    assert "script-src 'sha256-" in text
    assert "page written: page.html" in capsys.readouterr().err


def test_the_chain_is_drawn_with_its_four_values(tmp_path):
    import flatlens as fl
    from flatlens.report.figures.measured import chain_figure, chain_frame, tightness_figure

    names: dict[str, object] = {}
    exec(NET, names)
    lens = fl.Lens(fl.Problem(names["build"](), "half_squared_error", names["samples"]()))
    verdicts = fl.check_bounds(lens)
    frame = chain_frame(verdicts)
    assert frame["letter"].tolist() == ["A", "B", "C", "D"]
    assert frame["value"].is_monotonic_increasing
    assert frame["value"][0] == pytest.approx(fl.measure(lens, "mls")["mls"].value)
    for figure in (chain_figure(verdicts), tightness_figure(verdicts)):
        figure.whole.to_dict(validate=True)
        assert figure.caption


@pytest.mark.parametrize(("arguments", "told"), [
    (["--bounds", "no_such"], "unknown bound 'no_such'"),
    (["--assume", "flatness"], "unknown assumption 'flatness'"),
    (["--page", "nowhere/page.html"], "there is no folder nowhere"),
])  # fmt: skip
@pytest.mark.usefixtures("_net")
def test_mistakes_are_told_in_one_line(arguments, told, refused):
    assert told in refused("bounds", *OPTIONS, *arguments)
