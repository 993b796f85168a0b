from __future__ import annotations

import pytest
from rich.console import Console

from flatlens.estimate import Estimate, Report, undefined
from flatlens.measures import catalogue
from flatlens.report.measure import measure_screen

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
    assert "Survive any rescaling of the weights: mls, local_volume" in lines


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
    shown = [line.split()[0] for line in lines[4:12]]
    assert shown == ["sensitivity", "mls", "nmls", "compression", "local_volume", "log_volume", "other", "my_own"]


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
