"""What is said, where, and how often."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from tracked_run import Run

import flatlens as fl
from flatlens.estimate import Estimate, Report, undefined
from flatlens.tracking import Edge, Live, Moment, loggers
from flatlens.tracking.loggers import as_line

REPORT = Report(
    {
        ("sharpness(rtol=0.01)", None): Estimate(38.1),
        ("sharpness(rtol=0.01)", "fc1"): Estimate(12.0),
        ("weight_norm", None): Estimate(7.0),
        ("weight_norm.spectral", None): Estimate(3.0),
        ("hessian_trace", None): Estimate(100.0, stderr=2.0, kind="estimate"),
        ("mls", None): undefined("why"),
    },
    {},
)


def test_a_line() -> None:
    """Network values alone; beside the sharpness the edge."""
    said = "sharpness(rtol=0.01) 38.1{}; weight_norm 7; hessian_trace 100 +- 4; mls undefined"
    assert as_line(Moment(5, REPORT, Edge(0.05, 40.0, "2/lr"))) == "step 5: " + said.format(", 2/lr = 40 (95%)")
    assert as_line(Moment(5, REPORT, Edge(0.05))) == "step 5: " + said.format("")
    long = "2(1+momentum)/(lr(1+2momentum)) - weight decay"
    assert as_line(Moment(5, REPORT, Edge(0.05, 40.0, long))) == "step 5: " + said.format(", edge = 40 (95%)")


def test_a_terminal_has_one_line_rewritten_in_place(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(loggers.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((40, 24)))
    run = Run()
    run.train(6, fl.Tracker(run.problem, ["loss", "sharpness"], every=2))
    out, err = capsys.readouterr()
    assert out == ""
    assert "\n" not in err
    lines = err.split("\r")
    assert lines.pop() == ""
    assert [line.split(":")[0] for line in lines] == [f"\x1b[2Kstep {step}" for step in (0, 2, 4, 6)]
    assert all(len(line) - len("\x1b[2K") <= 39 for line in lines)


def test_a_log_file_has_a_line_now_and_then(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    say = Live()
    for step in range(100):
        say(Moment(step, REPORT, Edge()))
        now[0] += 1
    out, err = capsys.readouterr()
    assert out == ""
    doubled, paused = [0, 1, 3, 7, 15, 31, 63], [30, 46, 61, 78, 93]
    assert [line.split(":")[1] for line in err.splitlines()] == [f" step {s}" for s in sorted(doubled + paused)]


@pytest.mark.parametrize("chosen", [False, "callable"])
def test_silence_and_a_function_of_ones_own(chosen: object, capsys) -> None:
    run, seen = Run(), []
    run.train(4, fl.Tracker(run.problem, "loss", every=2, live=seen.append if chosen else False))
    assert capsys.readouterr() == ("", "")
    assert [moment.step for moment in seen] == ([0, 2, 4] if chosen else [])
    for moment in seen:
        assert moment.report["loss"].value > 0
        assert moment.edge.value == pytest.approx(2 * 1.9 / 0.05)
        assert torch.is_grad_enabled()
