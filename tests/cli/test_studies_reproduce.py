"""`flatlens reproduce` on the smallest experiment."""

import json

import pytest

from flatlens.cli import run
from flatlens.cli.studies import _expected_reproduce, _planned
from flatlens.experiments import network
from flatlens.experiments.network import Cost
from flatlens.papers import EXPERIMENTS
from flatlens.papers.reproduction import load_reproduction, save_archive


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce") / "x3"
    assert run(["reproduce", "X3", "--scale", "smoke", "--out", str(folder), "--workers", "1"]) == 0
    return folder


def test_it_leaves_a_page_with_verdicts_figures_and_what_differs(out):
    page = (out / "report.html").read_text()
    assert "What differs from the paper" in page
    assert page.count('class="badge') == len(EXPERIMENTS["X3"].predictions)
    assert 'data-spec="X3-tightness-0"' in page
    for name in ("tightness.png", "tightness.svg", "tightness.csv"):
        assert (out / "figures" / name).stat().st_size > 0
    for link in ("claims.json", "tightness/table.csv", "tightness/study.json"):
        assert f'href="{link}"' in page
        assert (out / link).is_file()
    assert "http://" not in page.partition("<script>")[0]


def test_the_answer_comes_first_on_screen_and_page(out, capsys):
    assert run(["reproduce", "X3", "--scale", "smoke", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    answer = load_reproduction(out).answer
    assert printed.startswith(" ".join(answer))
    page = (out / "report.html").read_text()
    assert page.index(f'<p class="answer">{answer[0]}') < page.index('<p class="lead">')


def test_json_has_the_claims(out, capsys):
    assert run(["reproduce", "X3", "--scale", "smoke", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["experiments"]
    assert one["id"] == "X3"
    assert found["answer"] == one["answer"] == load_reproduction(out).answer
    assert one["answer"][0].startswith("X3 at smoke scale: ")
    assert one["claims"][0]["outcome"] in {"reproduced", "not reproduced", "open", "not tested"}


def test_several_have_a_folder_each_and_one_page(out, tmp_path, capsys, monkeypatch):
    from flatlens.papers import reproduction as module

    (tmp_path / "atlas").mkdir()
    (tmp_path / "atlas" / "X3").symlink_to(out)
    monkeypatch.setattr(module, "EXPERIMENTS", {"X3": module.EXPERIMENTS["X3"]})
    assert run(["reproduce", "all", "--scale", "smoke", "--out", str(tmp_path / "atlas"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experiments"][0]["id"] == "X3"


def test_paper_scale_says_beforehand_how_long_it_takes(monkeypatch):
    monkeypatch.setattr(network, "cost_of", lambda studies, done: Cost(100, training=7200.0, measuring=720.0))
    told = _expected_reproduce([*_planned(EXPERIMENTS["X3"], "paper", again=False).values()], "paper", 2, {})
    assert told == "100 networks, at most about 66 min with 2 workers, 91% of it training"
    for again, count in ((False, 4), (True, 8)):
        studies = list(_planned(EXPERIMENTS["X3"], "smoke", again=again).values())
        assert _expected_reproduce(studies, "smoke", 2, {}) == f"{count} networks"


def test_tables_of_an_earlier_run_are_not_trained_again(out, tmp_path, capsys, monkeypatch):
    tables, earlier = tmp_path / "tables", load_reproduction(out)
    tables.mkdir()
    save_archive(earlier, tables / "X3-smoke.zip")
    assert (
        _expected_reproduce([*_planned(EXPERIMENTS["X3"], "smoke", again=False).values()], "smoke", 2, earlier.results)
        == "0 networks"
    )
    asked = ["reproduce", "X3", "--scale", "smoke", "--json", "--workers", "1", "--out"]
    monkeypatch.setattr("flatlens.experiments.network.train", lambda *_, **__: pytest.fail("trained again"))
    assert run([*asked, str(tmp_path / "anew"), "--tables", str(tables)]) == 0
    printed = capsys.readouterr()
    assert "has 4 of its 4 networks" in printed.err
    (one,) = json.loads(printed.out)["experiments"]
    assert one["claims"] == json.loads((out / "claims.json").read_text())
    assert (tmp_path / "anew" / "tightness" / "table.csv").read_bytes() == (out / "tightness/table.csv").read_bytes()
    assert run([*asked, str(tmp_path / "b"), "--tables", str(tables / "none.zip")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err
    (tables / "X4-smoke.zip").write_bytes((tables / "X3-smoke.zip").read_bytes())
    asked[1] = "X4"
    assert run([*asked, str(tmp_path / "c"), "--tables", str(tables)]) == 2
    assert "holds X3 at smoke scale, not X4 at smoke scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name an experiment"),
        (["X99"], "unknown experiment 'X99'"),
        (["X3", "--workers", "0"], "--workers 0"),
        (["X3", "--dask", "a", "--slurm", "b"], "give only one of them"),
    ],
)
def test_bad_input_is_one_line(arguments, said, tmp_path, capsys):
    assert run(["reproduce", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_several_do_not_go_into_the_folder_of_one(out, capsys):
    assert run(["reproduce", "X3", "X5", "--scale", "smoke", "--out", str(out)]) == 2
    assert "already holds one experiment: name another --out" in capsys.readouterr().err
    assert not (out / "X3").exists()


def test_experiments_are_listed(capsys):
    assert run(["list", "experiments"]) == 0
    listed = capsys.readouterr().out
    assert "X4" in listed
    assert "Fig. G.5" in listed


def test_a_dry_run_says_what_is_left(out, tmp_path, capsys):
    command = ["reproduce", "X3", "--scale", "smoke", "--dry-run", "--out"]
    assert run([*command, str(out)]) == 0
    assert capsys.readouterr().out.startswith("X3 at smoke scale: 0 of 4 networks left")
    assert run([*command, str(tmp_path / "new"), "--again"]) == 0
    assert capsys.readouterr().out.startswith("X3 at smoke scale: 8 of 8 networks left")
    assert not (tmp_path / "new").exists()
