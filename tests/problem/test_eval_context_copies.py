"""The user's network is only read while it is measured, also by several threads; and it is what is measured."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.perturbation.weights import Landscape
from flatlens.problem import measuring

N = 6
SEARCHES = [
    "mls", "ggn_trace", "hessian_trace", "sharpness", "critical_sharpness", "average_sharpness", "worst_sharpness",
    "mls_by_search",
]  # fmt: skip


class Stateful(nn.Module):
    """Counts its passes in a buffer, a number and a dict, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("passes", torch.zeros(()))
        self.calls, self.cache, self.kept = 0, dict[str, Tensor](), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.calls += 1
        self.kept.append(h := torch.tanh(self.norm(self.first(x))))
        self.cache["h"] = h
        return self.last(F.dropout(h, 0.5, self.training))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x[:, None].tanh())[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.stack([x, x.sin()], 1)).mean(1))


class Locked(nn.Module):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lock = mlp(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.net(x)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return net


def normed() -> nn.Module:
    parts = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.utils.weight_norm(nn.Linear(5, 3))
    return nn.Sequential(parts[0], nn.Tanh(), parts[1])


def patched() -> nn.Module:
    """Its forward() is a function that holds its bound method."""
    net, before = mlp(), None
    before = net.forward
    net.forward = lambda x: before(x) * 2  # type: ignore[method-assign,assignment]
    return net


def rebound() -> nn.Module:
    """Its forward() is a method of the module, put there from outside."""
    net = mlp()
    net.forward = MethodType(lambda self, x: nn.Sequential.forward(self, x) * 2, net)  # type: ignore[method-assign]
    return net


def hooked() -> nn.Module:
    """A hook reads a bias of the network."""
    net = mlp()
    net[1].register_forward_hook(lambda module, given, z: z * (1 + net[0].bias.sum()))
    return net


COPIED: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "state": Stateful, "words": Words, "attention": Attending, "tied": tied, "normed": normed,
    "rebound": rebound,
}  # fmt: skip
IN_PLACE: dict[str, Callable[[], nn.Module]] = {"locked": Locked, "patched": patched, "hooked": hooked}
BUILT = COPIED | IN_PLACE


def built(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return BUILT[name]()


def data(classes: bool = True) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=draws)
    return x, torch.arange(N) % 3 if classes else torch.randn(N, 3, generator=draws)


def problem_of(net: nn.Module, **options: Any) -> fl.Problem:
    return fl.Problem(net, "cross_entropy", data(), **options)


def bits(report: Any) -> dict[Any, str]:
    return {key: float(estimate.value).hex() for key, estimate in report.items()}


def state(net: nn.Module) -> list[object]:
    """All that a network is. Values are read through NumPy, which nobody notices."""
    kept: list[object] = []
    for name, module in net.named_modules():
        own = {key: value for key, value in vars(module).items() if not isinstance(value, Tensor)}
        kept.append((name, id(module), module.training, str({**own, "_parameters": 0, "_buffers": 0})))
    for name, t in [*net.named_parameters(), *net.named_buffers()]:
        here = id(t), t.data_ptr(), t.requires_grad, id(t.grad)
        kept.append((name, *here, torch.Tensor.numpy(t.detach()).tobytes()))
    return kept


class Spy(nn.Module):
    """Notes at each pass, of any copy, whether the user's network is as it was; nobody sees that memory is read."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, Seen(net)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.look()
        return self.net(x)


class Seen:
    def __init__(self, net: nn.Module) -> None:
        self.memory = [t.detach().numpy() for t in (*net.parameters(), *net.buffers())]
        self.flags = lambda: [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in net.modules()]
        self.frozen = lambda: [(id(p), p.requires_grad, p.grad is None) for p in net.parameters()]
        self.before, self.changed, self.passes = self.now(), 0, 0

    def __deepcopy__(self, known: object) -> Seen:
        return self

    def now(self) -> list[object]:
        return [self.flags(), self.frozen(), *(memory.tobytes() for memory in self.memory)]

    def look(self) -> None:
        self.passes += 1
        self.changed += self.now() != self.before


@pytest.mark.parametrize("name", ["mlp", "state", "words", "tied"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_network_is_as_it_was_at_each_pass(name: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes, freezing, gradients, hooks, names of attributes, and bytes of weights and buffers."""
    monkeypatch.setattr("flatlens.problem.eval_context.holds", lambda *_, **__: False)  # the spy holds the network
    net = built(name)
    for p in list(net.parameters())[: 2 * frozen]:
        p.requires_grad_(False)
    spy = Spy(net)
    problem = problem_of(spy, parameters="all")
    assert problem.measured() is not spy
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    fl.measure(fl.Lens(problem, optimiser=optimiser), [*SEARCHES, "feature_robustness", "directional_sharpness"])
    fl.check_bounds(fl.Lens(problem))
    fl.check_invariance(fl.Lens(problem), ["mls", "sharpness"])
    assert spy.seen.passes > 50
    assert spy.seen.changed == 0


@pytest.mark.parametrize("name", BUILT)
def test_threads_that_measure_one_network_give_the_bits_of_one_thread(name: str) -> None:
    """One lens, several lenses, several problems; all measures at the same time, with bounds and invariance."""
    net = built(name)
    problem, other = problem_of(net), problem_of(net)
    assert (problem.measured() is net) == (name in IN_PLACE)
    before = state(net)
    wanted = {one: bits(fl.measure(fl.Lens(problem), one)) for one in SEARCHES}
    sides = [(v.bound, v.layer, float(v.lhs).hex()) for v in fl.check_bounds(fl.Lens(problem))]
    shared = fl.Lens(problem)
    jobs: list[tuple[Callable[[], object], object]] = []
    for turn, one in enumerate(SEARCHES):
        jobs.append((partial(lambda one: bits(fl.measure(shared, one)), one), wanted[one]))
        jobs.append(
            (partial(lambda one, of: bits(fl.measure(fl.Lens(of), one)), one, (problem, other)[turn % 2]), wanted[one])
        )
    jobs.append((lambda: [(v.bound, v.layer, float(v.lhs).hex()) for v in fl.check_bounds(fl.Lens(problem))], sides))
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(job) for job, _ in jobs]
        for one, (_, expected) in zip(found, jobs, strict=True):
            assert one.result(300) == expected
    assert state(net) == before


def test_a_thread_that_trains_changes_no_number() -> None:
    """One thread switches the measured network's mode and runs it; another trains another network."""
    net, x = built("mlp"), data()[0]
    problem, ended = problem_of(net), threading.Event()
    names = ["mls", "sharpness", "critical_sharpness"]
    wanted = {one: bits(fl.measure(fl.Lens(problem), one)) for one in names}
    modes: set[tuple[bool, ...]] = set()

    def use() -> None:
        while not ended.is_set():
            net.train()
            net(x)
            modes.add(tuple(module.training for module in net.modules()))
            net.eval()
            modes.add(tuple(module.training for module in net.modules()))

    def train() -> None:
        other = built("mlp")
        optimiser = torch.optim.Adam(other.parameters())
        while not ended.is_set():
            optimiser.zero_grad()
            other(x).square().sum().backward()
            optimiser.step()

    threads = [threading.Thread(target=use), threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    try:
        found = {one: bits(fl.measure(fl.Lens(problem), one)) for one in names}
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert found == wanted
    assert modes == {(True,) * 7, (False,) * 7}  # nobody else switched a module


def around(net: nn.Module) -> Iterator[tuple[str, fl.Problem, nn.Module]]:
    """Yield problems whose functions run or read the user's own modules, each with the network that this makes."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(net)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.net(x)

    x, y = data(classes=False)
    yield "forward", fl.Problem(net, "mse", (x, y), forward=lambda model, batch: (2 * net(batch[0]), batch[1])), Twice()
    unseen = {"net": net}
    yield (
        "a table",
        fl.Problem(net, "mse", (x, y), forward=lambda model, batch: (2 * unseen["net"](batch[0]), batch[1])),
        Twice(),
    )


def test_a_function_that_runs_the_user_s_own_modules_is_measured_with_them() -> None:
    names = ["mls", "hessian_trace", "sharpness"]
    net = built("mlp")
    for told, problem, same in around(net):
        assert problem.measured() is net, told
        found = fl.measure(fl.Lens(problem), names)
        true = fl.measure(fl.Lens(fl.Problem(same, "mse", data(classes=False))), names)
        for one in names:
            assert found[one].value == pytest.approx(true[one].value, rel=1e-4), told
        assert all(module.training for module in net.modules())


LIVE: dict[str, nn.Module] = {}
"""Networks that code finds at run time, where no closure shows it."""


class Registered(nn.Module):
    """Runs the network that is registered under its name; its own is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return LIVE["net"].net(x)


class Noting(nn.Module):
    """Reads a weight of the registered network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * LIVE["net"].net[0].weight.sum()


@pytest.mark.parametrize("kind", [Registered, Noting])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_network_that_finds_its_original_at_run_time_is_measured_in_place(
    kind: type[nn.Module], frozen: bool
) -> None:
    torch.manual_seed(0)
    LIVE["net"] = net = kind()
    net.requires_grad_(not frozen)
    problem = problem_of(net, parameters="all")
    assert problem.measured() is net
    assert fl.measure(fl.Lens(problem), "hessian_trace")["hessian_trace"].kind != "undefined"
    assert [p.requires_grad for p in net.parameters()] == [not frozen] * 6


class Named(nn.Module):
    """Fails in a copy: it looks itself up."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = mlp(), Table()
        self.table.rows[id(self)] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.table.rows[id(self)]


class Table:
    def __init__(self) -> None:
        self.rows: dict[int, float] = {}


def test_a_network_that_fails_in_its_copy_alone_is_measured_in_place() -> None:
    net = Named()
    problem = problem_of(net)
    assert problem.measured() is net
    assert fl.measure(fl.Lens(problem), "mls")["mls"].kind == "exact"


def test_what_training_changes_is_seen() -> None:
    """In place, by `.data`, by a loaded state, in place of the parameter itself; buffers, too."""
    net = built("state")
    problem = problem_of(net)
    H = Hessian(problem)
    v = torch.randn(H.space.size, generator=torch.Generator().manual_seed(1))
    other = {name: t + 0.1 for name, t in built("state").state_dict().items()}

    def in_place() -> None:
        with torch.no_grad():
            net.first.weight.mul_(1.5)

    def by_data() -> None:
        net.first.weight.data = net.first.weight.data * 1.5

    def a_buffer() -> None:
        net.norm.running_var.mul_(2)

    changes: list[Callable[[], object]] = [
        in_place, by_data, a_buffer, lambda: net.load_state_dict(other),
        lambda: net.load_state_dict(copy.deepcopy(other), assign=True),
    ]  # fmt: skip
    for change in changes:
        stale = fl.Lens(problem)
        H(v)
        change()
        if change is not a_buffer:  # a product keeps its graphs while the weights stay, as ever
            assert torch.equal(H(v), Hessian(problem_of(copy.deepcopy(net)))(v))
        again = fl.measure(fl.Lens(problem), ["mls", "sharpness"])
        assert bits(again) == bits(fl.measure(fl.Lens(problem_of(copy.deepcopy(net))), ["mls", "sharpness"]))
        with pytest.raises(fl.StaleLens):
            fl.measure(stale, "mls")


@pytest.mark.parametrize("name", BUILT)
def test_moved_weights_are_never_the_user_s(name: str) -> None:
    net = built(name)
    landscape = Landscape(problem_of(net))
    memory = [p.detach().numpy() for p in net.parameters()]
    before, places = [m.tobytes() for m in memory], [p.data_ptr() for p in net.parameters()]
    risk, gradient = landscape.risk_and_gradient()
    with landscape.walk(gradient) as move:
        move(0.5)
        assert landscape.risk() != risk
        assert [m.tobytes() for m in memory] == before
    assert landscape.risk() == risk
    assert [p.data_ptr() for p in net.parameters()] == places


def test_a_copy_takes_no_memory_for_weights() -> None:
    net = built("mlp")
    copied = problem_of(net).measured()
    pairs = list(zip(copied.parameters(), net.parameters(), strict=True))
    assert all(p is not q and p.data_ptr() == q.data_ptr() for p, q in pairs)
    with measuring(copied):
        assert not copied.training
        assert net.training


class Odd(nn.Module):
    """Holds something beside its layers."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.odd = odd(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def opened(net: nn.Module) -> object:
    return Path(os.devnull).open()


ODD: dict[str, Callable[[Odd], Any]] = {
    "lock": lambda net: threading.Lock(), "generator": lambda net: torch.Generator(),
    "graph": lambda net: net.a.weight * 2, "graphs": lambda net: {"of": [net.a.weight * 2]},
    "file": opened, "iterator": lambda net: (i for i in range(3)),
    "counter": lambda net: count(), "itself": lambda net: [net], "method": lambda net: net.a.forward,
    "optimiser": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_whatever_a_network_holds_the_numbers_are_the_same(odd: str) -> None:
    torch.manual_seed(0)
    plain = Odd(lambda net: None)
    torch.manual_seed(0)
    net = Odd(ODD[odd])
    names = ["mls", "sharpness", "critical_sharpness"]
    assert bits(fl.measure(fl.Lens(problem_of(net)), names)) == bits(fl.measure(fl.Lens(problem_of(plain)), names))
    assert all(module.training for module in net.modules())
