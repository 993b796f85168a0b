"""The edge of stability, against what the optimisers do on a quadratic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import prune
from tracked_run import Run, blobs

import flatlens as fl
from flatlens.tracking import Edge, edge_of
from flatlens.training import SAM

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.03, "momentum": 0.5},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.3, "nesterov": True},
    {"lr": 0.1, "momentum": 0.6, "dampening": 0.4},
    {"lr": 0.1, "dampening": 0.4},
    {"lr": 0.1, "weight_decay": 0.5},
    {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9, "nesterov": True},
    {"lr": torch.tensor(0.1), "momentum": 0.5},
]


def grows(settings: dict[str, object], curvature: float) -> bool:
    """Whether |x| is larger after many steps on 0.5 h x^2."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimiser = torch.optim.SGD([x], **settings)
    for _ in range(4000):
        optimiser.zero_grad()
        (0.5 * curvature * x.square()).sum().backward()
        optimiser.step()
    return not float(x.detach().abs()) < 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_grow_beyond_the_edge_and_shrink_below_it(settings: dict[str, object]) -> None:
    edge = edge_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], **settings))
    assert edge.lr == pytest.approx(float(settings["lr"]))
    assert not grows(settings, 0.99 * edge.value)
    assert grows(settings, 1.01 * edge.value)


def test_the_two_edges_everyone_knows() -> None:
    w = [torch.nn.Parameter(torch.ones(1))]
    assert edge_of(torch.optim.SGD(w, lr=0.05)) == Edge(0.05, 40.0, "2/lr", batches=40.0)
    heavy = edge_of(torch.optim.SGD(w, lr=0.05, momentum=0.9))
    assert heavy.value == pytest.approx(2 * 1.9 / 0.05)
    assert heavy.formula == "2(1+momentum)/lr"


ADAPTIVE = {
    "adam": (torch.optim.Adam, {"lr": 0.05}, 38 / 0.05, "2(1+beta1)/((1-beta1)lr)"),
    "adam without momentum": (torch.optim.Adam, {"lr": 0.05, "betas": (0.0, 0.99)}, 2 / 0.05, "2/lr"),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.9)}, 600, "2(1+beta1)/((1-beta1)lr)"),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, 200, "2/lr"),
    "rmsprop with momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}, 300, "2(1+momentum)/lr"),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "weight_decay": 0.1}, 200, "2/lr"),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_edge_of_adaptive_optimisers_is_that_of_the_preconditioned_sharpness(name: str) -> None:
    """Their steps are compared with it in tests/curvature/test_optimiser_geometry_preconditioned.py."""
    kind, settings, value, formula = ADAPTIVE[name]
    edge = edge_of(kind([torch.nn.Parameter(torch.ones(1))], **settings))
    assert (edge.lr, edge.formula, edge.of) == (settings["lr"], formula, "preconditioned_sharpness")
    assert edge.value == pytest.approx(value)
    assert edge.beside("preconditioned_sharpness") == edge.beside("loss") == edge.value
    assert math.isnan(edge.beside("sharpness"))
    assert edge.beside("critical_sharpness") == 2 / edge.lr


def test_groups_with_their_own_learning_rates_have_the_edge_of_the_largest() -> None:
    one, two = ([torch.nn.Parameter(torch.ones(1))] for _ in range(2))
    mixed = torch.optim.SGD([{"params": one, "lr": 0.1}, {"params": two, "lr": 0.2}])
    assert edge_of(mixed) == Edge(0.2, 10.0, "2/lr", "preconditioned_sharpness")
    alike = torch.optim.SGD([{"params": one}, {"params": two}], lr=0.1)
    assert edge_of(alike) == Edge(0.1, 20.0, "2/lr", batches=20.0)
    apart = torch.optim.SGD([{"params": one}, {"params": two, "weight_decay": 1.0}], lr=0.1)
    assert edge_of(apart) == Edge(0.1, 20.0, "2/lr", "preconditioned_sharpness")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(("share", "rises"), [(0.6, False), (1.6, True)])
def test_beyond_muon_s_edge_its_step_raises_the_risk(share: float, rises: bool) -> None:
    """||W||^2 / 8 at W = s I: the step is about lr I (to the accuracy of its iteration), and rises where lr > 2 s."""
    lr = 0.1
    net = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.eye(4) * lr / 2 / share)
    muon = torch.optim.Muon(net.parameters(), lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0)
    problem = fl.Problem(net, "half_squared_error", (torch.eye(4), torch.zeros(4, 4)))
    edge = edge_of(muon)
    assert edge == Edge(lr, 2 / lr, "2/lr", "preconditioned_sharpness")
    found = fl.measure(fl.Lens(problem, optimiser=muon), "preconditioned_sharpness")["preconditioned_sharpness"].value
    assert found == pytest.approx(share * edge.value, rel=1e-4)
    assert (found > edge.value) == rises
    before = fl.measure(fl.Lens(problem), "loss")["loss"].value
    net.weight.grad = net.weight.detach() / 4
    muon.step()
    assert (fl.measure(fl.Lens(problem), "loss")["loss"].value > before) == rises


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_s_momentum_has_no_known_edge() -> None:
    found = edge_of(torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1))
    assert math.isnan(found.value)
    assert found.note == "the edge of Muon with momentum is not known"


def test_where_there_is_no_edge() -> None:
    one = [torch.nn.Parameter(torch.ones(1))]
    assert math.isnan(edge_of(None).lr)
    assert math.isnan(edge_of(None).value)
    for without in (
        torch.optim.SGD(one, lr=0.1, maximize=True),
        torch.optim.SGD(one, lr=0.1, momentum=1.5),
        torch.optim.RMSprop(one, lr=0.1, momentum=1.2),
        torch.optim.Adam(one, lr=0.1, maximize=True),
        torch.optim.SGD(one, lr=0.1, momentum=1.0),
        torch.optim.AdamW(one, lr=0.1, betas=(1 - 1e-16, 0.9)),
        torch.optim.Adafactor(one, lr=0.1),
        torch.optim.Rprop(one, lr=0.1),
    ):
        found = edge_of(without)
        assert (found.lr, math.isnan(found.value), bool(found.note)) == (0.1, True, True)
        assert found.beside("critical_sharpness") == 20
    assert math.isnan(edge_of(torch.optim.SGD(one, lr=0.0)).value)


class Lion(torch.optim.Optimizer):
    """Of any package: it is recognised by its name."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})


class SOAP(Lion):
    """Of the name of another, without its settings."""


class Own(Lion):
    """A user's own, around another one, as Lookahead is."""

    def __init__(self, params: object) -> None:
        super().__init__(params)
        self.optimizer = torch.optim.SGD(self.param_groups)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            Lion,
            "Lion steps by signs: no preconditioner, no linear edge of stability; above 2 / lr of critical_sharpness",
        ),
        (SOAP, "SOAP is unknown: it has no 'betas', unlike the SOAP that flatlens knows"),
        (Own, "Own is unknown: flatlens has no preconditioner for Own, only for AdaBelief, Adadelta, "),
    ],
)
def test_an_edge_that_is_not_there_says_why(kind: type[Lion], why: str) -> None:
    run = Run()
    run.optimiser = kind(run.net.parameters())
    assert edge_of(run.optimiser).note.startswith(why)
    tracker = fl.Tracker(run.problem, ["sharpness", "preconditioned_sharpness", "loss"], every=1, live=False)
    tracker.step(0, optimiser=run.optimiser)
    rows = tracker.history.set_index("measure")
    assert rows["edge"].isna().all()
    assert rows["note"]["sharpness"].endswith(edge_of(run.optimiser).note)
    assert rows["note"]["preconditioned_sharpness"] == edge_of(run.optimiser).note
    assert why not in rows["note"]["loss"]


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99])
def test_edges_with_closed_forms(beta1: float) -> None:
    w, a, b = [torch.nn.Parameter(torch.ones(1))], 0.01, beta1
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax):
        assert edge_of(kind(w, lr=a, betas=(b, 0.999))).value == pytest.approx(2 * (1 + b) / ((1 - b) * a), rel=1e-12)
    nadam = torch.optim.NAdam(w, lr=a, betas=(b, 0.999))
    nadam.state[w[0]] = {"step": torch.tensor(1e9), "mu_product": torch.tensor(0.0)}  # of a long training
    assert edge_of(nadam).value == pytest.approx(2 * (1 + b) / ((1 - b) * (1 + 2 * b) * a), rel=1e-12)
    nadam.state[w[0]] = {"step": torch.tensor(1.0), "mu_product": torch.tensor(0.3 * b)}
    early = edge_of(nadam).value
    assert (early == pytest.approx(2 * (1 + b) / ((1 - b) * (1 + 2 * b) * a), rel=0.01)) == (b == 0)
    settings = {"k": 10, "r": 0.0, "lr_max": a, "weight_lr_power": 2.0, "weight_decay": 0.0, "momentum": b}
    free = FrozenSteps(w, {"lr": a, "weight_sum": 1e9 * a**2, **settings})  # the averaging weight is 1e-9
    assert edge_of(free).value == pytest.approx(2 / ((1 - b) * a), rel=1e-6)


FrozenSteps = type("SGDScheduleFree", (torch.optim.Optimizer,), {"step": lambda self: None})


@pytest.mark.parametrize(("name", "settings"), [("Lion", {}), ("AdaFactor", {"relative_step": False})])
@pytest.mark.parametrize(("share", "rises"), [(0.99, False), (1.01, True)])
def test_beyond_two_over_the_learning_rate_a_step_without_an_edge_raises_the_loss(
    name: str, settings: dict[str, bool], share: float, rises: bool
) -> None:
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)
    net, x = torch.nn.Linear(3, 2, bias=False).double(), torch.randn(9, 3, dtype=torch.float64)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(9, 2, dtype=torch.float64)))
    optimiser = kind(net.parameters(), lr=0.01, **settings)
    found = fl.measure(fl.Lens(problem, optimiser=optimiser), "critical_sharpness")["critical_sharpness"]
    assert found.value > 0
    for group in optimiser.param_groups:
        group["lr"] = share * 2 / found.value
    before = fl.measure(fl.Lens(problem), "loss")["loss"].value
    (net(x).square().sum(1).mean() / 2).backward()
    optimiser.step()
    assert (fl.measure(fl.Lens(problem), "loss")["loss"].value > before) == rises


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rho", [0.01, 1.0])
def test_sam_grows_beyond_its_own_edge_alone(momentum: float, rho: float) -> None:
    """SAM of flatlens.training before the steps of torch's SGD, on 0.5 h x^2; the gradient's norm is frozen."""
    norm = 0.2
    sam = Sharpened([torch.nn.Parameter(torch.ones(1))], rho, torch.optim.SGD, lr=0.1, momentum=momentum)
    assert math.isnan(edge_of(sam).value)
    assert "gradient_norm" in edge_of(sam).note
    edge = edge_of(sam, gradient_norm=norm)
    plain = edge_of(sam.base_optimizer).value
    assert edge.value < plain
    assert edge.value * (1 + rho * edge.value / norm) == pytest.approx(plain)
    if not momentum:  # Long and Bartlett 2024
        closed = norm / (2 * rho) * (math.sqrt(1 + 8 * rho / (0.1 * norm)) - 1)
        assert edge.value == pytest.approx(closed)
    for share, grows in ((0.999, False), (1.001, True)):
        x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimiser = torch.optim.SGD([x], lr=0.1, momentum=momentum)
        lengths = []
        for _ in range(400):
            g = share * edge.value * x.detach()
            (eps,) = SAM(rho * float(g.abs()) / norm).move([x], [g])
            x.grad = share * edge.value * (x.detach() + eps)
            optimiser.step()
            lengths.append(float(x.detach().abs()))
        assert (lengths[-1] > lengths[200]) == grows


class Sharpened(torch.optim.Optimizer):
    """The interface of the implementations of SAM that people use."""

    def __init__(self, params: object, rho: float, base: type[torch.optim.Optimizer], **settings: float) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups


Sharpened.__name__ = "SAM"


def test_a_tracker_knows_the_edge_of_sam_at_the_gradient_of_each_step() -> None:
    run = Run()
    run.optimiser = Sharpened(run.net.parameters(), 0.05, torch.optim.SGD, lr=0.1)
    tracker = fl.Tracker(run.problem, ["sharpness", "preconditioned_sharpness"], every=1, live=False)
    tracker.step(0, optimiser=run.optimiser)
    run.net.zero_grad()
    torch.nn.functional.cross_entropy(run.net.eval()(run.x), run.y).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in run.net.parameters()))
    rows = tracker.history.set_index("measure")
    expected = edge_of(run.optimiser, gradient_norm=norm).value
    assert 0 < expected < 20
    assert rows["edge"].to_list() == pytest.approx([expected] * 2, rel=1e-5)
    assert rows["value"]["preconditioned_sharpness"] == pytest.approx(rows["value"]["sharpness"], rel=0.01)
    adaptive = Sharpened(run.net.parameters(), 0.05, torch.optim.Adam, lr=0.1)
    assert "preconditioner is unknown" in edge_of(adaptive, gradient_norm=norm).note
    head = Sharpened(list(run.net.parameters())[-1:], 0.05, torch.optim.SGD, lr=0.1)
    tracker.step(1, optimiser=head)
    assert tracker.history["edge"].iloc[-2:].isna().all()


def test_a_tracker_hands_its_measures_the_optimiser_and_each_row_its_own_edge() -> None:
    run = Run()
    run.optimiser = torch.optim.Adam(run.net.parameters(), lr=0.01)
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimiser, 10, 0.5)
    names = ["sharpness", "preconditioned_sharpness", "critical_sharpness", "loss"]
    tracker = fl.Tracker(run.problem, names, every=4, live=False)
    run.train(8, tracker)
    rows = tracker.history.set_index(["measure", "step"])
    assert rows.loc["sharpness", "edge"].isna().all()
    assert rows.loc["preconditioned_sharpness", "edge"].to_list() == pytest.approx([3800] * 3)
    assert rows.loc["critical_sharpness", "edge"].to_list() == pytest.approx([200] * 3)
    assert (rows.loc[("preconditioned_sharpness", 4), "value"], rows.loc[("critical_sharpness", 4), "value"]) > (0, 0)
    other = fl.Tracker(run.problem, names, every=4, live=False)
    other.load_state_dict(tracker.state_dict())
    assert other.history.drop(columns="seconds").equals(tracker.history.drop(columns="seconds"))


def test_a_tracker_takes_the_update_of_another_loss() -> None:
    run = Run()
    other = fl.Problem(run.net, "cross_entropy", (run.x[:20], run.y[:20]))
    apart, own = (
        fl.Tracker(run.problem, "directional_sharpness", every=1, along=along, live=False) for along in (other, None)
    )
    values = [tracker.step(0, optimiser=run.optimiser)["directional_sharpness"].value for tracker in (apart, own)]
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_no_edge_beside_the_sharpness_of_parameters_that_are_not_trained() -> None:
    """A head on a frozen-in-practice body: the sharpness of all parameters says nothing about the head's steps."""
    run = Run()
    head = list(run.net.parameters())[-2:]
    optimiser = torch.optim.SGD(head, lr=0.5)
    tracker = fl.Tracker(run.problem, ["sharpness", "preconditioned_sharpness"], every=1, live=False)
    tracker.step(0, optimiser=optimiser)
    table = tracker.history.set_index("measure")
    assert math.isnan(table.edge["sharpness"])
    assert table.edge["preconditioned_sharpness"] == 4
    assert table.value["preconditioned_sharpness"] < table.value["sharpness"]


def _frozen(net: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(False)


def _thawed(net: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(True)


def _thawed_and_trained(net: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(True)
    optimiser.add_param_group({"params": net[0].parameters()})


def _pruned(net: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(net[2], "weight", 0.5)


@pytest.mark.parametrize(
    ("trained", "change", "edge"),
    [("all", _frozen, 20), ("head", _thawed, math.nan), ("head", _thawed_and_trained, 20), ("all", _pruned, 20)],
)
def test_the_edge_is_that_of_the_parameters_of_the_moment(
    trained: str, change: Callable[[torch.nn.Module, torch.optim.Optimizer], None], edge: float
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))
    net[0].requires_grad_(trained == "all")
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    tracker = fl.Tracker(fl.Problem(net, "cross_entropy", blobs()), "sharpness", every=1, live=False)
    tracker.step(0, optimiser=optimiser)
    change(net, optimiser)
    tracker.step(1, optimiser=optimiser)
    assert tracker.history.edge.to_list() == pytest.approx([20, edge], nan_ok=True)


def test_adagrad_has_no_geometry_before_its_first_step() -> None:
    run = Run()
    adagrad = torch.optim.Adagrad(run.net.parameters(), lr=0.1)
    found = fl.measure(fl.Lens(run.problem, optimiser=adagrad), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert found.note == "Adagrad has not stepped yet, so it has no preconditioner"


@pytest.mark.parametrize("name", ["SGD", "Adam", "Muon"])
def test_a_learning_rate_of_zero_makes_no_step(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    run = Run()
    matrices = [p for p in run.net.parameters() if p.ndim == 2]
    optimiser = getattr(torch.optim, name)(matrices, lr=0.0)
    report = fl.measure(fl.Lens(run.problem, optimiser=optimiser), ["preconditioned_sharpness", "critical_sharpness"])
    assert {one.note for one in report.values()} == {"the learning rate is 0: the optimiser makes no step"}


def test_a_decay_that_makes_the_steps_grow() -> None:
    run = Run()
    adamw = torch.optim.AdamW(run.net.parameters(), lr=0.5, weight_decay=4.0)
    for p in run.net.parameters():
        p.grad = torch.zeros_like(p)
    adamw.step()
    found = fl.measure(fl.Lens(run.problem, optimiser=adamw), "preconditioned_sharpness")["preconditioned_sharpness"]
    assert found.note == "AdamW: its steps grow at any curvature; reduce its weight decay or momentum"
