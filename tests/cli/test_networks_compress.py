"""`flatlens compress`: the answer first, JSON for machines, a page, and a plan that replaces no other file."""

import json
from pathlib import Path

import pytest
from builders import NET

from flatlens import cli

OPTIONS = ["net.py:build", "--data", "net.py:samples", "--loss", "cross_entropy", "--schemes", "int8,int4"]


@pytest.fixture(autouse=True)
def _net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


def test_the_answer_comes_first_and_the_page_and_the_plan_are_written(capsys, tmp_path):
    assert cli.run(["compress", *OPTIONS, "--budget", "0.4", "--plan", "plan.json", "--page", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "% smaller" in out.splitlines()[0]
    assert "activations are not forecast" in " ".join(out.split())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["size"] <= 0.4
    assert {layer["scheme"] for layer in plan["layers"].values()} <= {"int8", "int4", "kept"}
    page = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in page
    assert page.count("<script") == 1
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert all(f'"row">{name}' in page for name in plan["layers"])


def test_json_has_forecast_and_rise_of_every_layer_and_scheme(capsys):
    assert cli.run(["compress", *OPTIONS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["layer"], row["scheme"]): row for row in found["layers"]}
    assert len(rows) == 2 * (len(found["plan"]["layers"]) + 1)
    assert all(row["forecast"] == pytest.approx(row["first_order"] + row["second_order"]) for row in rows.values())
    assert found["plan"]["scheme"] == "int4"
    assert [row["scheme"] for row in found["correlations"]] == ["int8", "int4"]


def test_exchanges_that_are_stopped_say_so(capsys):
    assert cli.run(["compress", *OPTIONS, "--budget", "0.4", "--trials", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["plan"]["trials"], found["plan"]["ended"]) == (1, False)
    assert found["answer"][2].endswith("; exchanges stopped after 1 trial, so a better plan may exist.")


def test_mistakes_are_one_line(refused):
    assert "unknown scheme 'int5'" in refused("compress", *OPTIONS[:-1], "int5")
    assert "--budget 2.0: expected a share" in refused("compress", *OPTIONS, "--budget", "2")
    assert "--trials 0: expected a whole number" in refused("compress", *OPTIONS, "--budget", "0.4", "--trials", "0")
    Path("mine.json").write_text("{}")
    assert "file exists and is not a plan" in refused("compress", *OPTIONS, "--plan", "mine.json")
    assert Path("mine.json").read_text() == "{}"
