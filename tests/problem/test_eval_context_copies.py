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
from networks import module_of
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


def stateful() -> nn.Module:
    """Counts its passes in a buffer, a number and a dict, and keeps what it computed."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.passes += 1
        net.calls += 1
        net.kept.append(h := torch.tanh(net.norm(net.first(x))))
        net.cache["h"] = h
        return net.last(F.dropout(h, 0.5, net.training))

    return module_of(
        forward,
        first=(4, 5),
        norm=nn.BatchNorm1d(5),
        last=(5, 3),
        passes=torch.zeros(()),
        calls=0,
        cache=dict[str, Tensor](),
        kept=list[Tensor](),
    )


def words() -> nn.Module:
    return module_of(
        lambda net, x: net.last(net.lstm(x[:, None].tanh())[0][:, -1]),
        lstm=nn.LSTM(4, 4, batch_first=True),
        last=(4, 3),
    )


def attending() -> nn.Module:
    return module_of(
        lambda net, x: net.last(net.layer(torch.stack([x, x.sin()], 1)).mean(1)),
        layer=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
        last=(4, 3),
    )


def locked() -> nn.Module:
    """Cannot be copied."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with net.lock:
            return net.net(x)

    return module_of(forward, net=mlp(), lock=threading.Lock())


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
    "mlp": mlp, "state": stateful, "words": words, "attention": attending, "tied": tied, "normed": normed,
    "rebound": rebound,
}  # fmt: skip
IN_PLACE: dict[str, Callable[[], nn.Module]] = {"locked": locked, "patched": patched, "hooked": hooked}
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


def spied(net: nn.Module) -> nn.Module:
    """Notes at each pass, of any copy, whether the user's network is as it was; nobody sees that memory is read."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.seen.look()
        return net.net(x)

    return module_of(forward, net=net, seen=Seen(net))


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
    spy = spied(net)
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

    def twice() -> nn.Module:
        return module_of(lambda net, x: net.net(x) + net.net(x), net=copy.deepcopy(net))

    x, y = data(classes=False)
    yield "forward", fl.Problem(net, "mse", (x, y), forward=lambda model, batch: (2 * net(batch[0]), batch[1])), twice()
    unseen = {"net": net}
    yield (
        "a table",
        fl.Problem(net, "mse", (x, y), forward=lambda model, batch: (2 * unseen["net"](batch[0]), batch[1])),
        twice(),
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


def registered() -> nn.Module:
    """Runs the network that is registered under its name; its own is never run."""
    return module_of(lambda net, x: LIVE["net"].net(x), net=mlp())


def noting() -> nn.Module:
    """Reads a weight of the registered network."""
    return module_of(lambda net, x: net.net(x) * LIVE["net"].net[0].weight.sum(), net=mlp())


@pytest.mark.parametrize("kind", [registered, noting], ids=["Registered", "Noting"])
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


def named() -> nn.Module:
    """Fails in a copy: it looks itself up."""
    net = module_of(lambda net, x: net.net(x) * net.table.rows[id(net)], net=mlp(), table=Table())
    net.table.rows[id(net)] = 2.0
    return net


class Table:
    def __init__(self) -> None:
        self.rows: dict[int, float] = {}


def test_a_network_that_fails_in_its_copy_alone_is_measured_in_place() -> None:
    net = named()
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


def holding(odd: Any) -> nn.Module:
    """Holds something beside its layers."""
    net = module_of(lambda net, x: net.b(net.a(x).relu()), a=(4, 5), b=(5, 3))
    net.odd = odd(net)
    return net


def opened(net: nn.Module) -> object:
    return Path(os.devnull).open()


ODD: dict[str, Callable[[holding], Any]] = {
    "lock": lambda net: threading.Lock(), "generator": lambda net: torch.Generator(),
    "graph": lambda net: net.a.weight * 2, "graphs": lambda net: {"of": [net.a.weight * 2]},
    "file": opened, "iterator": lambda net: (i for i in range(3)),
    "counter": lambda net: count(), "itself": lambda net: [net], "method": lambda net: net.a.forward,
    "optimiser": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_whatever_a_network_holds_the_numbers_are_the_same(odd: str) -> None:
    torch.manual_seed(0)
    plain = holding(lambda net: None)
    torch.manual_seed(0)
    net = holding(ODD[odd])
    names = ["mls", "sharpness", "critical_sharpness"]
    assert bits(fl.measure(fl.Lens(problem_of(net)), names)) == bits(fl.measure(fl.Lens(problem_of(plain)), names))
    assert all(module.training for module in net.modules())
