"""Scalar parameters, token ids beside numbers, layers without width, checkpoints, losses that have one derivative."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.errors import BadModel

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 3, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(0, 5, (8, 2), generator=GENERATOR)
Y = torch.arange(8) % 2


def scaled(shape: tuple[int, ...]) -> nn.Module:
    """A learned temperature, of no axis or of one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module_of(
            lambda net, x: net.linear(x).tanh() * net.scale,
            linear=(3, 2),
            scale=nn.Parameter(torch.full(shape, 1.3)),
        ).double()


NAMES = (
    "average_sharpness", "average_sharpness(adaptive=False)", "worst_sharpness", "worst_sharpness(adaptive=True)",
    "pac_bayes_flatness", "pac_bayes_flatness(of='loss')", "sharpness", "hessian_trace(exact=True)", "ggn_norm",
    "interpolation_sharpness", "adaptive_sharpness", "spectral_density",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_scalar_parameter_is_worth_as_much_as_a_vector_of_one_entry(name: str) -> None:
    found = []
    for net in (scaled(()), scaled((1,))):
        data = (X, net(X).argmax(1))  # all are right, so that noise costs accuracy
        found.append(fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), name)[name])
    assert found[0].kind == found[1].kind != "undefined"
    assert found[0].value == pytest.approx(found[1].value, rel=1e-12)


def beside(ids_first: bool) -> nn.Module:
    """Token ids and numbers in one forward()."""

    def forward(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        ids, x = (a, b) if ids_first else (b, a)
        return net.linear(torch.cat([net.table(ids).flatten(1), x], 1).tanh())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module_of(forward, table=nn.Embedding(5, 2), linear=(7, 2)).double()


@pytest.mark.parametrize("form", ["ids first", "ids last", "by name"])
def test_token_ids_beside_numbers(form: str) -> None:
    net = beside(form == "ids first")
    given = {"ids first": (IDS, X), "ids last": (X, IDS), "by name": {"a": X, "b": IDS}}[form]
    report = fl.measure(fl.Lens(fl.Problem(net, "half_squared_error", (given, torch.zeros(8, 2).double()))), "pass")
    sizes, norms = [], []
    for i in range(8):
        x = X[i : i + 1].clone().requires_grad_()
        f = net(*((IDS[i : i + 1], x) if form == "ids first" else (x, IDS[i : i + 1])))[0]
        rows = [torch.autograd.grad(out, [*net.parameters(), x], retain_graph=True) for out in f]
        sizes.append(sum(float(g.square().sum()) for row in rows for g in row[:-1]))
        norms.append(float(torch.linalg.matrix_norm(torch.cat([row[-1] for row in rows]), 2)))
    assert report["interpolation_sharpness"].value == pytest.approx(sum(sizes) / 8, rel=1e-12)
    assert report["ggn_trace"].value == pytest.approx(sum(sizes) / 8, rel=1e-12)
    assert report["mls"].value == pytest.approx(sum(norms) / 8, rel=1e-12)


@pytest.mark.parametrize(("net", "words"), [
    (lambda: nn.Linear(3, 0), r"'weight', of shape \(0, 3\), is empty"),
    (lambda: nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 2)), r"'0.weight', of shape \(0, 3\)"),
    (lambda: nn.Sequential(nn.Linear(3, 2), nn.Flatten(0), nn.Unflatten(0, (8, 2)), nn.AdaptiveAvgPool1d(0)),
     "return at least one output"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_width_are_refused(net: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(BadModel, match=words):
        fl.Problem(net(), "mse", (X.float(), torch.zeros(8, 0)))


def with_checkpoint(reentrant: bool) -> nn.Module:
    return module_of(
        lambda net, x: net.b(checkpoints.checkpoint(lambda h: net.a(h).tanh(), x, use_reentrant=reentrant)),
        a=(3, 4),
        b=(4, 2),
    ).double()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_measure(reentrant: bool) -> None:
    net = with_checkpoint(reentrant)
    plain = nn.Sequential(net.a, nn.Tanh(), net.b)
    for names in (["ggn_trace", "mls", "hessian_trace"], "sharpness", "critical_sharpness"):  # one plans a pass
        problems = [fl.Problem(model, "cross_entropy", (X, Y)) for model in (net, plain)]
        found, truth = [fl.measure(fl.Lens(problem), names).values() for problem in problems]
        assert [e.value for e in found] == pytest.approx([e.value for e in truth], rel=1e-9)
    assert issubclass(checkpoints.CheckpointFunction, torch.autograd.Function)  # put back


def recomputes(checkpointed: bool) -> nn.Module:
    """Attention, a norm and dropout, which backward() would run anew in whatever state the network is in by then."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            q, k, v = net.a(x).unflatten(-1, (3, 2, 2)).unbind(1)
            return net.drop(net.norm(nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)))

        return net.b(checkpoints.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x))

    return module_of(forward, a=(3, 12), norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.5), b=(4, 2)).double()


@pytest.mark.parametrize("options", [{}, {"batchnorm": "train", "ghost_batch": 4}])
def test_what_is_recomputed_meets_the_same_state_in_every_product(options: dict[str, Any]) -> None:
    plain, net = recomputes(False), recomputes(True)
    net.load_state_dict(plain.state_dict())
    products = []
    for model in (plain, net):
        operator = Hessian(fl.Problem(model, "cross_entropy", (X, Y), **options))
        v = torch.linspace(-1, 1, operator.size, dtype=torch.float64)
        products += [operator(v), operator(v)]
    for one in products[1:]:
        assert torch.allclose(one, products[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [nn.MultiMarginLoss(), nn.MultiMarginLoss(p=2)], ids=["p=1", "p=2"])
def test_a_loss_that_torch_differentiates_once_is_refused_by_its_name(loss: nn.Module) -> None:
    lens = fl.Lens(fl.Problem(nn.Linear(3, 2).double(), loss, (X, Y)))
    report = fl.measure(lens, "pass")
    assert report["loss"].kind == report["mls"].kind == "exact"  # only what reads the loss's second derivative is lost
    assert re.search(r"multi_margin_loss_backward.*plain operations", report["ggn_trace"].note)
    assert "\n" not in report["ggn_trace"].note


def twice(two_names: bool) -> nn.Module:
    """A layer that acts twice: once as a module of one name, or as a module of two."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = module_of(lambda net, x: net.last(net.middle(net.middle(net.first(x)).relu())))
        net.first, net.middle, net.last = (nn.Linear(*shape).double() for shape in ((3, 4), (4, 4), (4, 2)))
        if two_names:
            net.again = net.middle
    return net


@pytest.mark.parametrize("name", [card.name for card in fl.catalogue()])
def test_a_module_of_two_names_is_measured_as_of_one_and_keeps_its_parameters(name: str) -> None:
    found = []
    for two_names in (True, False):
        net = twice(two_names)
        before = [(p, p.detach().clone()) for p in net.parameters()]
        problem = fl.Problem(net, "cross_entropy", (X, Y), test=(X, Y))
        found.append(fl.measure(fl.Lens(problem), name)[name])
        after = list(net.parameters())
        assert [id(p) for p in after] == [id(p) for p, _ in before]
        assert all(torch.equal(p, was) for p, (_, was) in zip(after, before, strict=True))
    assert found[0].kind == found[1].kind
    assert found[0].value == pytest.approx(found[1].value, rel=1e-12, nan_ok=True)
