from __future__ import annotations

import pytest
from rich.console import Console

from flatlens.estimate import Estimate, Report, undefined
from flatlens.measures import catalogue
from flatlens.report.cards import SHORT_MEANINGS
from flatlens.report.measure import EXPLAINED, LINES, measure_screen

LAYERS = ["fc1", "fc2"]


CARDS = catalogue()


def report(layers=LAYERS) -> Report:
    estimates = {("mls", None): Estimate(2.5), ("ggn_trace", None): Estimate(10.0, stderr=0.5, kind="estimate")}
    estimates |= {("mls", layer): Estimate(float(i)) for i, layer in enumerate(layers)}
    estimates["local_volume", None] = undefined("every sample is rank-deficient")
    estimates["loss", None] = Estimate(0.25)
    return Report(estimates, {"n": 600, "outputs": 10, "layers": list(reversed(layers)), "loss": "half_squared_error"})


def printed(what: Report, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(measure_screen(what, CARDS))
    return console.export_text().splitlines()


def row(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [name])


def test_numbers_errors_and_invariances_stand_in_one_row():
    lines = printed(report())
    assert lines[0] == "600 samples, 10 outputs, 2 layers, half squared error"
    assert row(lines, "mls") == ["mls", "2.5", "exact", "yes", "yes", "yes", "yes"]
    assert row(lines, "ggn_trace") == ["ggn_trace", "10", "0.98", "estimate", "no", "no", "yes", "no"]
    assert row(lines, "local_volume") == ["local_volume", "undefined", "yes", "yes", "yes", "yes"]
    assert "local_volume: every sample is rank-deficient" in lines
    assert "is the network-level value invariant under layer-wise" in " ".join(" ".join(lines).split())


def test_the_risk_comes_first_and_has_no_badges():
    lines = printed(report())
    headings = [
        line.strip() for line in lines if line.strip() in {"risk", "sensitivity", "sharpness", "compression", "other"}
    ]
    assert headings == ["risk", "sensitivity", "sharpness", "compression"]
    assert row(lines, "loss") == ["loss", "0.25", "exact"]


def test_a_family_stands_together_whatever_the_order():
    answers = ("mls", "local_volume", "nmls", "my_own", "log_volume")
    lines = printed(Report({(name, None): Estimate(1.0) for name in answers}, {}))
    shown = [line.split()[0] for line in lines[4:14] if not line.startswith("    ")]
    assert shown == ["sensitivity", "mls", "nmls", "compression", "local_volume", "log_volume", "other", "my_own"]


def test_the_numbers_that_most_people_ask_for_have_a_line_of_meaning_where_there_is_room():
    lines = printed(report())
    assert (
        lines[lines.index(next(line for line in lines if line.split()[:1] == ["mls"])) + 1].strip()
        == SHORT_MEANINGS["mls"]
    )
    assert {*SHORT_MEANINGS} <= {card.name for card in CARDS}
    assert max(map(len, SHORT_MEANINGS.values())) + len("    ") <= 80
    many = {(f"local_volume(top_k={k})", None): Estimate(1.0) for k in range(1, EXPLAINED + 1)}
    assert SHORT_MEANINGS["mls"] not in " ".join(printed(Report(many | {("mls", None): Estimate(1.0)}, {})))


def test_few_numbers_have_their_notes_in_the_answer_alone():
    sharpness = {("sharpness", None): Estimate(1.0, kind="lower bound", note="an eigenvalue lies within 0.1")}
    told = " ".join(printed(Report(sharpness, {}, ["sharpness is at least 1: an eigenvalue lies within 0.1."])))
    assert told.count("an eigenvalue lies within 0.1") == 1
    assert "an eigenvalue lies within 0.1" in " ".join(printed(Report(sharpness, {})))


@pytest.mark.parametrize(
    ("measures", "layers", "left_out"), [(5, 3, ""), (5, 300, ""), (50, 5, "layers"), (90, 5, "and more")]
)
def test_print_fits_a_screen(measures, layers, left_out):
    names = [f"local_volume(top_k={k})" for k in range(1, measures + 1)]
    at = [None, *(f"blocks.{k}.a_rather_long_name" for k in range(layers))]
    lines = str(Report({(name, place): Estimate(4.0953e12) for name in names for place in at}, {})).split("\n")
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 100
    assert left_out in lines[-1]
    assert ("report.frame()" in lines[-1]) == bool(left_out)


def test_a_notebook_shows_meaning_direction_and_invariances():
    html = report()._repr_html_()
    assert "<th>small means</th>" in html
    assert "<td>compressed</td>" in html
    assert "<td>layer, neuron, order, head</td>" in html
    assert "Maximum local sensitivity" in html
    assert "<p>An answer.</p>" in Report({}, {}, ["An answer."])._repr_html_()


@pytest.mark.parametrize(("count", "parts"), [(3, True), (40, False)])
def test_parts_make_room_where_there_is_much_to_show(count, parts):
    spelled = [f"local_volume(top_k={k})" for k in range(1, count)]
    names = ["relative_flatness", "relative_flatness.max", *spelled]
    estimates = {(name, None): Estimate(1.0) for name in names} | {("relative_flatness.max", "fc1"): Estimate(2.0)}
    lines = printed(Report(estimates, {}), 100)
    assert all(any(line.split()[:1] == [name] for line in lines) for name in ("relative_flatness", *spelled))
    assert any("relative_flatness.max" in line for line in lines) == parts
    assert any("--json" in line for line in lines) != parts


def test_layers_stand_in_execution_order():
    lines = printed(report())
    start = lines.index("Layer by layer".ljust(len(next(x for x in lines if x.startswith("Layer by layer")))))
    assert lines[start + 1].split() == ["measure", "fc2", "fc1"]
    assert lines[start + 2].split() == ["mls", "1", "0"]


def test_a_deep_network_is_summed_up_by_its_extremes():
    lines = printed(report([f"blocks.{i}.mlp" for i in range(40)]))
    assert next(line for line in lines if "Over 40 layers" in line)
    assert row(lines[15:], "mls") == ["mls", "0", "blocks.0.mlp", "39", "blocks.39.mlp"]
    assert len(lines) < 30


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_screen(width):
    lines = printed(report(), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_an_empty_report_is_no_error():
    assert printed(Report({}, {}))[0] == "measured"
