"""Long work is estimated, shown, and refused beyond a limit unless it is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import progress
from flatlens.errors import BadInput, TooLong, UnknownName
from flatlens.progress import PRODUCTS, SEARCH, Watch


class Clock:
    """A clock that each look moves on."""

    def __init__(self) -> None:
        self.now, self.step = 100.0, 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def watch(limit: float = 600.0) -> Watch:
    found = Watch(None, limit)
    found.begin("hessian_trace")
    return found


def refused(seen: Watch, what: str, total: int) -> tuple[int, str]:
    """Report one after another; return at which number it is refused, and the line."""
    for done in range(1, total + 1):
        try:
            seen(what, done, total)
        except TooLong as error:
            return done, str(error)
    raise AssertionError("not refused")


def test_work_is_refused_as_soon_as_its_duration_is_known(clock: Clock) -> None:
    clock.step = 1.0
    done, line = refused(watch(), PRODUCTS, 10_000)
    assert done < 15
    assert "measure(hessian_trace): 10,000 curvature products would take about 2.8 h, more than the 10 min" in line
    assert line.endswith("or allow it: anyway=True")
    assert "layers=..." in line
    assert "\n" not in line


def test_quick_work_a_pass_and_allowed_work_go_on(clock: Clock) -> None:
    clock.step = 1.0
    for what, total, limit in ((PRODUCTS, 500, 600), ("one pass", 10**6, 600), (PRODUCTS, 10**6, float("inf"))):
        seen = watch(limit)
        for done in range(1, 400):
            seen(what, done, total)


def test_a_search_is_judged_by_what_searches_take(clock: Clock) -> None:
    """300 products are the most that it may take, not what it takes: it is refused once it has lasted too long."""
    clock.step = 20.0
    assert 25 < refused(watch(), SEARCH, 300)[0] < 35
    clock.step = 100.0
    assert refused(watch(), SEARCH, 300)[0] == 2


def test_a_search_announces_what_it_is_expected_to_take() -> None:
    told: list[tuple[int, int]] = []
    seen = fl.Lens(smooth(n=200))
    report = fl.measure(
        seen, "sharpness(rtol=1e-6)", progress=lambda what, *at: told.append(at) if what == SEARCH else 0
    )
    assert len(told) > 5
    assert [done for done, _ in told][:3] == [1, 2, 3]
    assert {total for done, total in told if done < 20} <= {20, told[-1][0]}
    assert told[-1][0] == told[-1][1] == report["sharpness(rtol=1e-06)"].products


def test_the_layers_of_a_measure_are_judged_together(clock: Clock) -> None:
    clock.step = 1.0
    known = watch()
    known.expect(1000)
    assert "1,000 curvature products" in refused(known, PRODUCTS, 100)[1]
    unknown = watch()
    for _ in range(6):  # six loops of 100 are 594 seconds
        for done in range(1, 101):
            unknown(PRODUCTS, done, 100)
    assert refused(unknown, PRODUCTS, 100)[0] < 15


def smooth(tokens: bool = False, n: int = 6) -> fl.Problem:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(n, 3, 3).double() if tokens else torch.randn(n, 3).double()
    return fl.Problem(net, "mse", (x, torch.zeros(*x.shape[:-1], 2).double()))


@pytest.mark.parametrize("tokens", [False, True], ids=["dense", "tokens"])
@pytest.mark.parametrize("name", ["relative_flatness", "neuron_flatness"])
def test_the_note_on_a_part_says_how_many_products_the_whole_takes(name: str, tokens: bool) -> None:
    """The number announced is the number counted."""
    problem = smooth(tokens)
    advised = fl.measure(fl.Lens(problem), "pass")[f"{name}_ggn"]
    told = re.search(
        rf"the Gauss-Newton part of {name}; the whole takes ([\d,]+) more curvature products", advised.note
    )
    assert told is not None, advised
    lens = fl.Lens(problem)
    fl.measure(lens, name)
    assert lens.products == int(told[1].replace(",", "")) > 0


@pytest.mark.parametrize(
    "name", ["relative_flatness", "neuron_flatness", "layer_sharpness", "maximal_relative_flatness"]
)
def test_layers_limits_the_products(name: str) -> None:
    problem = smooth()
    whole, part = fl.Lens(problem), fl.Lens(problem)
    everything, some = fl.measure(whole, name), fl.measure(part, name, layers="2")
    assert some[name, "2"].value == pytest.approx(everything[name, "2"].value, rel=1e-5)
    assert part.products < whole.products
    assert (name, "0") not in some
    with pytest.raises(UnknownName, match="unknown layer 'fc'"):
        fl.measure(part, name, layers=["fc"])


def wide() -> fl.Lens:
    """A lens on a smooth network that takes many products."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 2))
    return fl.Lens(fl.Problem(net, "half_squared_error", (torch.randn(6, 3), torch.zeros(6, 2))))


@pytest.mark.parametrize(
    "name",
    ["relative_flatness", "hessian_trace(exact=True)", "layer_sharpness", "spectral_density", "average_sharpness"],
)
def test_every_measure_of_many_products_can_be_refused(name: str, clock: Clock) -> None:
    """Five minutes pass between any two looks at the clock."""
    lens = wide()
    clock.step = 300.0
    with pytest.raises(TooLong, match="anyway=True") as caught:
        fl.measure(lens, name)
    assert isinstance(caught.value, BadInput)
    assert fl.measure(lens, name, anyway=True)[name].kind != "undefined"


def test_probes_are_refused_after_the_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatlens.measures import traces

    clock = Clock()
    clock.perf_counter = clock.monotonic  # type: ignore[attr-defined]
    clock.step = 40.0
    monkeypatch.setattr(traces, "time", clock)
    lens = wide()
    with pytest.raises(TooLong, match=r"hessian_trace.*: 240 curvature products .* probes=60 take half of that time"):
        fl.measure(lens, "hessian_trace(rtol=1e-4)")
    assert fl.measure(lens, "hessian_trace(probes=60)")["hessian_trace(probes=60)"].products == 60


def test_long_work_of_a_bound_is_refused_unless_it_is_allowed(clock: Clock) -> None:
    lens, clock.step = wide(), 300.0
    with pytest.raises(
        TooLong, match=r"^check_bounds\(interpolation_bound\): 60 .*leave this bound out .*anyway=True"
    ) as caught:
        fl.check_bounds(lens, "interpolation_bound")
    assert "layers=..." not in str(caught.value)
    assert fl.check_bounds(lens, "interpolation_bound", anyway=True)
    assert fl.check_bounds(lens, "mls_chain")  # a pass is never refused
