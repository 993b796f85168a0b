"""What is expected of a measurement, from trials: time, products, and memory as the machine counts it."""

import pytest
import torch
from builders import MIB, Gauge, lens_in_chunks
from torch import nn

import flatlens as fl
from flatlens import forecast
from flatlens.forecast import Cost, seconds_of
from flatlens.grams.plan import Weight
from flatlens.memory import OfProcess, _of_group
from flatlens.problem.data import Data


@pytest.fixture
def lens():
    return lens_in_chunks()


def test_the_peak_follows_the_chunk_not_the_data(lens, monkeypatch):
    gauge = Gauge(left=1e12)

    def work(few):
        gauge.most = (60 + 2 * forecast.chunk(few, few.problem.n)) * MIB  # 50 of them were taken before

    monkeypatch.setattr(forecast, "meter", lambda device: gauge)
    whole = forecast.chunk(lens, 200)
    assert 25 < whole < 200  # beyond the last trial, short of the data
    found = forecast.forecast(lens, work)
    assert found.peak == pytest.approx((60 + 2 * whole) * MIB)
    assert found.least == pytest.approx(62 * MIB)
    assert found.more == pytest.approx((10 + 2 * whole) * MIB)


def test_results_are_counted_for_every_sample(lens, monkeypatch):
    gauge = Gauge(left=1e12)
    monkeypatch.setattr(forecast, "meter", lambda device: gauge)
    monkeypatch.setattr(forecast, "_slope", lambda *points: 0.0)

    def work(few):
        return fl.measure(few, ["mls", "interpolation_sharpness"])

    report = work(lens)
    kept = [*lens.per_sample([]).values(), *(e.samples for e in report.values() if e.samples is not None)]
    each = sum({v.data_ptr(): v.nbytes for v in kept if v.shape == (200,)}.values()) / 200
    assert each >= 6 * 8
    assert forecast.forecast(lens, work).more == pytest.approx(each * (200 - 25))  # the last trial has 25 samples


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


def test_seconds_are_those_of_all_samples(lens, monkeypatch):
    """The machine takes 2 s more at first, 0.5 s for each call, and 0.25 s for each sample."""
    clock = [0.0, 2.0]
    for name in ("monotonic", "process_time"):
        monkeypatch.setattr(forecast.time, name, lambda: clock[0])

    def work(few):
        clock[:] = [clock[0] + 0.5 + 0.25 * few.problem.n + clock[1], 0.0]

    chunks = -(-200 // forecast.chunk(lens, 200))
    found = forecast.forecast(lens, work, whole=True)
    assert found.seconds == pytest.approx(0.25 * 200 + 0.5 * chunks**0.5)
    assert found.cost(lens, 3).seconds == pytest.approx(2.0 + 3 * found.seconds)


def test_a_trial_that_a_busy_machine_delays_gives_no_negative_time():
    assert seconds_of([(2, 4.0), (4, 3.0)], 100, 100) == 3.0
    assert seconds_of([(2, 1.0), (4, 9.0)], 100, 100) == pytest.approx(9.0 / 4 * 100)  # no more than each sample alone


def test_the_cost_of_a_measurement_is_that_of_its_parts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.randn(300, 4), torch.arange(300) % 3
    names = ["mls", "sharpness", "hessian_trace(probes=8)"]
    found = fl.cost(net, "cross_entropy", data, measures=names)
    assert isinstance(found, Cost)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), names)
    assert found.measures["hessian_trace(probes=8)"][1] == report["hessian_trace(probes=8)"].products > 0
    assert abs(found.measures["sharpness"][1] - report["sharpness"].products) < 20  # of other samples
    assert found.products >= sum(products for _, products in found.measures.values())
    assert set(found.frame()["measure"]) == {*names, "the pass", "the rest", "the checks"}
    assert found.seconds * (1 + 1e-12) >= found.frame()["seconds"].sum() > 0  # a sum in another order
    assert repr(found).endswith("curvature products")
    assert found.size == "67 parameters, 300 samples, 1 forward and 3 backward passes"


def test_a_machine_that_is_busy_during_one_trial_changes_little(lens, monkeypatch):
    """Each sample takes 0.25 s of a processor, and the first trials have all of it, the last one a third."""
    clock = {"wall": 0.0, "own": 0.0}
    monkeypatch.setattr(forecast.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(forecast.time, "process_time", lambda: clock["own"])

    def work(few):
        clock["own"] += 0.25 * few.problem.n
        clock["wall"] += 0.25 * few.problem.n * (3 if few.problem.n > 8 else 1)

    found = forecast.forecast(lens, work)
    assert found.seconds == pytest.approx(0.25 * 200 * clock["wall"] / clock["own"])


@pytest.fixture
def slow(monkeypatch):
    """A network that counts as slow, and the number of samples of each trial."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    monkeypatch.setattr(forecast, "SLOW", 0.0)
    seen, tried = [], forecast._tried
    monkeypatch.setattr(
        forecast, "_tried", lambda lens, work, count, *how: seen.append(count) or tried(lens, work, count, *how)
    )
    return net, (torch.randn(300, 8), torch.arange(300) % 3), seen


def test_a_slow_network_has_one_trial_of_one_sample(slow):
    net, data, seen = slow
    found = fl.cost(net, "cross_entropy", data, measures=["mls", "sharpness"])
    assert seen == [1]
    assert set(found.measures) == {"mls", "sharpness", "the pass", "the rest", "the checks"}
    assert found.measures["sharpness"][0] < 300 * found.measures["sharpness"][1]
    assert "2 numbers of 123 parameters" not in found.answer
    assert found.answer.split(" for ")[1].startswith("2 numbers of")


def test_a_slow_network_s_limited_search_is_counted_without_running_it(slow, monkeypatch):
    net, data, _ = slow
    monkeypatch.setattr("flatlens.measures.pipeline.BUDGET", 1.0)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)))
    monkeypatch.setattr("flatlens.measures.leading_eigenvalues.eigenpairs", None)
    found = fl.cost(net, "cross_entropy", data)
    assert found.measures["sharpness"][1] == report["sharpness"].products > 4


def test_norms_of_a_slow_network_s_weights_are_searched_where_they_are_asked_for(slow, monkeypatch):
    """Once for each form of a weight; the summary shows none of them."""
    net, data, _ = slow
    searched, norm = [], Weight.searched_spectral_norm.func
    monkeypatch.setattr(
        Weight.searched_spectral_norm, "func", lambda weight: searched.append(weight.layer) or norm(weight)
    )
    assert "the weights' norms" not in fl.cost(net, "cross_entropy", data).measures
    assert not searched
    assert fl.cost(net, "cross_entropy", data, measures="weight_norm").measures["the weights' norms"][0] > 0
    assert searched == ["0", "4"]


@pytest.mark.parametrize("form", ["pair", "set", "loader", "dicts", "stream"])
def test_the_first_samples_stand_for_all(form):
    x, y = torch.randn(100, 4), torch.arange(100) % 3
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    pairs = list(zip(x, y, strict=True))
    source = {
        "pair": (x, y),
        "set": torch.utils.data.Subset(torch.utils.data.TensorDataset(x, y), range(100)),
        "loader": torch.utils.data.DataLoader(pairs, batch_size=7),
        "dicts": rows,
        "stream": torch.utils.data.DataLoader([(x[:40], y[:40]), (x[40:], y[40:])], batch_size=None),
    }[form]
    data = Data(source, "data")
    assert data.count == 100
    for count in (2, 10):
        first, targets = next(data.first(count).chunks(64))
        first = first["x"] if isinstance(first, dict) else first
        assert torch.equal(first, x[:count])
        assert torch.equal(targets, y[:count])


def test_few_samples_have_a_cost_too():
    net = nn.Sequential(nn.Linear(4, 1))
    for n in (1, 3, 15):
        assert 0 < fl.cost(net, "mse", (torch.randn(n, 4), torch.zeros(n, 1)), measures="mls").seconds < 60


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
    monkeypatch.setattr("flatlens.memory.GROUP", tmp_path)
    assert _of_group() is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _of_group() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _of_group() == 450
