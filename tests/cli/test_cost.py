"""What is told of time and memory before work starts, and the refusal of what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import cli
from flatlens.cli import cost
from flatlens.cli.cost import OfProcess, _of_group

NET = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x = torch.linspace(-1, 1, 160).reshape(40, 4).sin()
def samples(): return x, torch.arange(40) % 3
"""
MIB = 2**20


class Gauge:
    """A machine on which work takes 10 MiB, and 2 MiB for each sample of a chunk."""

    def __init__(self, left: float) -> None:
        self.room, self.most = int(left), 0

    def used(self):
        return 50 * MIB

    def begin(self):
        self.most = 0
        return True

    def peak(self):
        return self.most

    def left(self):
        return self.room


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return ["measure", "net.py:build", "--data", "net.py:samples", "--loss", "cross_entropy", "--measures", "mls"]


@pytest.fixture
def lens():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return fl.Lens(fl.Problem(net, "cross_entropy", (torch.randn(200, 4), torch.arange(200) % 3), memory="100KB"))


def test_work_that_lasts_is_announced_with_its_memory(net, capsys, monkeypatch):
    monkeypatch.setattr(cost, "DELAY", 0.0)
    assert cli.run(net) == 0
    out, err = capsys.readouterr()
    assert "67 parameters, 40 samples, 1 forward and 3 backward passes: about" in err
    assert "GiB of memory (" in err
    monkeypatch.setattr(cost, "DELAY", 1000.0)
    assert cli.run(net) == 0
    again, err = capsys.readouterr()
    assert err == ""
    assert out == again  # the trials leave no trace in the numbers


@pytest.mark.parametrize("command", ["bounds", "invariance"])
def test_the_other_commands_announce_too(net, capsys, monkeypatch, command):
    monkeypatch.setattr(cost, "DELAY", 0.0)
    options = ["--measures", "mls"] if command == "invariance" else ["--bounds", "mls_chain"]
    assert cli.run([command, *net[1:-2], *options]) == 0
    assert "40 samples" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_in_one_line(net, capsys, monkeypatch):
    monkeypatch.setattr(cost, "meter", lambda device: Gauge(left=10))
    assert cli.run(net) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in ("memory", "--outputs 2", "--anyway"):
        assert word in err
    assert cli.run([*net, "--anyway"]) == 0


def test_the_peak_follows_the_chunk_not_the_data(lens, monkeypatch):
    gauge = Gauge(left=1e12)

    def work(few):
        gauge.most = (60 + 2 * cost.chunk(few, few.problem.n)) * MIB  # 50 of them were taken before

    monkeypatch.setattr(cost, "meter", lambda device: gauge)
    monkeypatch.setattr(cost, "DELAY", 0.0)
    whole = cost.chunk(lens, 200)
    assert 25 < whole < 200  # beyond the last trial, short of the data
    found = cost.trials(lens, work)
    assert found.peak == pytest.approx((60 + 2 * whole) * MIB)
    assert found.least == pytest.approx(62 * MIB)
    assert found.more == pytest.approx((10 + 2 * whole) * MIB)


def test_results_are_counted_for_every_sample(lens, monkeypatch):
    gauge = Gauge(left=1e12)
    monkeypatch.setattr(cost, "meter", lambda device: gauge)
    monkeypatch.setattr(cost, "DELAY", 0.0)
    monkeypatch.setattr(cost, "_slope", lambda *points: 0.0)

    def work(few):
        return fl.measure(few, ["mls", "interpolation_sharpness"])

    report = work(lens)
    kept = [*lens.per_sample([]).values(), *(e.samples for e in report.values() if e.samples is not None)]
    each = sum({v.data_ptr(): v.nbytes for v in kept if v.shape == (200,)}.values()) / 200
    assert each >= 8 * 8
    assert cost.trials(lens, work).more == pytest.approx(each * (200 - 25))  # the last trial has 25 samples


def test_what_was_freed_does_not_hide_what_is_taken():
    gauge = OfProcess()
    if not gauge.begin():
        pytest.skip("this kernel keeps no peak that can be set back")
    held = [torch.ones(16_000) for _ in range(1000)]  # too small each to be given back by itself
    del held[::2]
    del held[:]
    gauge.begin()
    before = gauge.used()
    held = [torch.ones(16_000) for _ in range(1000)]
    assert gauge.peak() - before > 40 * MIB
    assert len(held) == 1000


def test_smaller_chunks_are_advised_where_they_would_do(lens, monkeypatch):
    monkeypatch.setattr(cost, "meter", lambda device: Gauge(left=30_000))  # one sample takes some 1400 bytes
    with pytest.raises(fl.errors.BadInput, match=r"--memory 1MiB"):
        cost.announce(lens, lambda few: None)


def test_seconds_are_those_of_all_samples(lens, monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 14.0])  # 5 s for 2 samples at first, then 4 s for 8
    monkeypatch.setattr(cost.time, "monotonic", lambda: next(clock))
    samples, chunks = 200 / 8, -(-200 // cost.chunk(lens, 200))
    assert chunks < samples
    assert cost.trials(lens, lambda few: None).seconds == pytest.approx(4.0 * (samples * chunks) ** 0.5)


def test_the_process_is_weighed():
    gauge = OfProcess()
    gauge.begin()
    before = gauge.peak()
    if before is None:
        pytest.skip("this kernel keeps no peak that can be set back")
    held = torch.ones(64 * MIB // 4)
    assert gauge.peak() - before > 50 * MIB
    del held
    gauge.begin()
    assert gauge.peak() - before < 50 * MIB
    assert gauge.left() > 0


def test_a_container_s_limit_counts_without_the_files_it_read(tmp_path, monkeypatch):
    monkeypatch.setattr("flatlens.cli.cost.GROUP", tmp_path)
    assert _of_group() is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _of_group() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _of_group() == 450


def test_json_stays_json_where_work_is_announced(net, capsys, monkeypatch):
    monkeypatch.setattr(cost, "DELAY", 0.0)
    assert cli.run([*net, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["n"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lenet", "transformer", "file"])
def test_what_is_announced_is_used(case):
    pytest.importorskip("psutil")
    from benchmarks import machine

    assert 0.75 <= machine.answer("announced", "measured", case)["ratio"] <= 1.33


def test_samples_that_no_trial_can_take_are_measured_all_the_same(net, capsys):
    with Path("net.py").open("a") as file:
        file.write("def ignored(): return x, torch.cat([torch.full((20,), -100), torch.arange(20) % 3])\n")
        file.write("def batch(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))\n")
    assert cli.run(["measure", "net.py:build", "--data", "net.py:ignored", *net[4:]]) == 0
    own_statistics = ["--batchnorm", "train", "--ghost-batch", "20"]
    assert cli.run(["measure", "net.py:batch", *net[2:], *own_statistics]) == 0
    assert "mls" in capsys.readouterr().out
