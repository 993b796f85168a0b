"""The progress bar, of commands and in Python: silent for short work, and never on stdout."""

import inspect
import io
import re
import sys
import time

import pytest
import torch

import flatlens as fl
from flatlens import progress
from flatlens.measures.definition import Run, on_lens
from flatlens.progress import DELAY, TICK, Bar, in_words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_shows_nothing(capsys):
    with Bar() as bar:
        for done in range(5):
            bar("networks", done, 4)
    assert capsys.readouterr() == ("", "")


def test_a_log_file_gets_lines_with_the_time_left(capsys):
    with Bar(delay=0, pause=0) as bar:
        bar("networks", 10, 20)
        time.sleep(0.02)
        bar("networks", 15, 20)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["flatlens: networks 10/20", "flatlens: networks 15/20, about 0 s left"]


def test_lines_keep_their_distance(capsys):
    with Bar(delay=0, pause=60) as bar:
        for done in range(100):
            bar("networks", done, 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_gets_a_bar_after_the_delay(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Bar(delay=0.05) as bar:
        bar("networks", 0, 4)
        time.sleep(0.4)
        bar("networks", 2, 4)
        time.sleep(0.3)
        shown = sys.stderr.getvalue()
    assert "networks" in shown
    assert "2/4" in shown


def test_work_that_tells_nothing_is_told_of(capsys):
    with Bar(stage="reading", delay=0.1, pause=0.2) as bar:
        time.sleep(0.7)
        bar.stage("trying")
        time.sleep(0.5)
        bar("one pass", 1, 3)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flatlens: reading, 0 s so far"
    told = [line.removeprefix("flatlens: ").partition(",")[0].partition(" 1/3")[0] for line in lines]
    assert list(dict.fromkeys(told)) == ["reading", "trying", "one pass"]
    assert lines[-1].startswith("flatlens: one pass 1/3, ")
    assert lines[-1].endswith(" so far")
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_one_call_into_torch_is_told_of(capsys):
    with Bar(stage="measuring", delay=0.1, pause=0.1):
        start = time.monotonic()
        size = 1000
        while time.monotonic() - start < 0.5:  # a call of half a second, whatever the machine
            size, start = int(1.5 * size), time.monotonic()
            capsys.readouterr()
            torch.mm(torch.ones(size, size), torch.ones(size, size))
        assert "measuring" in capsys.readouterr().err


def test_a_terminal_gets_a_bar_of_the_stage(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Bar(stage="reading", delay=0.05) as bar:
        time.sleep(0.5)
        assert "reading" in sys.stderr.getvalue()
        bar("networks", 0, 4)
        assert [task.description for task in bar._bars.tasks] == ["networks"]
        bar("networks", 4, 4)
        assert [task.description for task in bar._bars.tasks] == ["reading"]


def test_the_first_sign_of_life_comes_within_two_seconds():
    assert DELAY + TICK < 2
    assert inspect.signature(Bar).parameters["delay"].default is None  # that is, DELAY


def test_a_bar_ends_with_its_work(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    def work() -> None:
        with Bar(delay=0.01):
            time.sleep(0.1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    length = len(sys.stderr.getvalue())
    time.sleep(0.3)
    assert len(sys.stderr.getvalue()) == length


def test_two_kinds_of_work_have_a_bar_each(capsys):
    with Bar(delay=0, pause=0) as bar:
        bar("networks", 1, 1)
        bar("page", 0, 1)
    assert capsys.readouterr().err.splitlines() == ["flatlens: networks 1/1", "flatlens: page 0/1"]


def test_the_bar_of_what_is_finished_goes(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Bar(delay=0) as bar:
        bar("networks", 0, 4)
        time.sleep(0.5)
        for seed in range(100):
            bar(f"seed {seed}", 1, 2)
            bar(f"seed {seed}", 2, 2)
        assert [task.description for task in bar._bars.tasks] == ["networks"]
        bar("seed 0", 1, 2)  # taken up again
        assert [task.description for task in bar._bars.tasks] == ["networks", "seed 0"]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5400, "1.5 h")])
def test_durations(seconds, words):
    assert in_words(seconds) == words


def test_the_announcement_comes_with_the_work(capsys):
    with Bar("48 networks, 5 minutes") as bar:
        assert capsys.readouterr().err == ""
        bar("networks", 0, 48)
        bar("networks", 1, 48)
    assert capsys.readouterr().err == "flatlens: 48 networks, 5 minutes\n"


def test_finished_work_is_not_announced(capsys):
    with Bar("48 networks, 5 minutes") as bar:
        bar("networks", 48, 48)
    assert capsys.readouterr().err == ""


def slow() -> fl.Lens:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return fl.Lens(fl.Problem(net, "mse", (torch.randn(40, 3), torch.zeros(40, 2))))


def sleepy(lens: fl.Lens, run: Run) -> fl.Estimate:
    """A measure of half a second."""
    for _ in run.counted("steps", 5):
        time.sleep(0.1)
    return fl.Estimate(1.0)


SLEEPY = on_lens(id="own", family="own", symbol="s", source="nowhere", unit="", invariant_under=set(), on_request=True)(
    sleepy
)


@pytest.mark.parametrize("call", [fl.measure, fl.check_invariance], ids=lambda call: call.__name__)
def test_a_script_shows_its_work_too(call, capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(progress, "PAUSE", 0.1)
    call(slow(), SLEEPY)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"^flatlens: steps [1-4]/5, (about )?\d s (left|so far)$", err, re.MULTILINE)


def test_one_switch_turns_it_off(capsys, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.05)
    fl.measure(slow(), SLEEPY, progress=False)
    monkeypatch.setenv("FLATLENS_PROGRESS", "0")
    fl.measure(slow(), SLEEPY)
    with Bar(delay=0, pause=0) as bar:
        bar("networks", 0, 1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.delenv("FLATLENS_PROGRESS")
    monkeypatch.setenv("RANK", "1")  # the first process shows it for all
    fl.measure(slow(), SLEEPY)
    assert capsys.readouterr().err == ""
    with pytest.raises(fl.errors.BadInput, match=r"None or False"):
        fl.measure(slow(), SLEEPY, progress="no")


def test_a_notebook_gets_one_line_that_goes_away(monkeypatch):
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(progress, "REWRITE", 0.05)
    monkeypatch.setattr(sys, "stderr", OutStream())
    fl.measure(slow(), SLEEPY)
    text = sys.stderr.getvalue()
    assert re.search(r"\rflatlens: steps \d/5", text)
    assert "\n" not in text
    assert text.endswith("\r")
    assert not text.split("\r")[-2].strip()  # overwritten
