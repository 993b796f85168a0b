"""A loss by which samples see each other is refused, wherever in the data it does; one that takes each alone is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from builders import cross_entropy as each
from networks import elementwise
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadLoss
from flatlens.problem.loss import Loss

LossFunction = Callable[[Tensor, Any], Tensor]


def counts(y: Tensor) -> Tensor:
    return (y[:, None] == y).sum(1)


def other(f: Tensor) -> Tensor:
    return f.roll(1, 0)


def only_from(start: float, coupled: LossFunction) -> LossFunction:
    """Coupled where a batch has a label beyond what earlier chunks have."""
    return lambda f, y: coupled(f, y) if int(y.max()) >= start else each(f, y)


COUPLED: Mapping[str, LossFunction] = {
    "class weights from the batch's counts": lambda f, y: each(f, y) * len(y) / counts(y),
    "weights from the count of one class": lambda f, y: each(f, y) * torch.where(y == 1, 1 / (y == 1).sum(), 1.0),
    "differences of neighbours": lambda f, y: each(f, y) + torch.cat([f[:1], f[1:] - f[:-1]]).square().sum(1),
    "the outputs of the sample before": lambda f, y: each(f, y) + 1e-4 * other(f).square().sum(1),
    "a contrast with the sample before": lambda f, y: each(f, y) - (f * other(f)).sum(1),
    "the largest output of the batch": lambda f, y: each(f / f.abs().max(), y),
    "the same, detached": lambda f, y: each(f / f.detach().abs().max(), y),
    "outputs centred over the batch": lambda f, y: each(f - f.mean(0), y),
    "standardised losses": lambda f, y: (each(f, y) - each(f, y).mean()) / each(f, y).std(unbiased=False).clamp(1e-9),
    "the hardest half": lambda f, y: each(f, y) * (each(f, y) >= each(f, y).median()),
    "a curriculum over the batch": lambda f, y: each(f, y) * torch.linspace(1, 2, len(f)),
    "the batch's size": lambda f, y: each(f, y) * len(f),
    "labels of the sample before": lambda f, y: each(f, y.roll(1)),
    "a slope without a value": lambda f, y: each(f, y) + other(f).sum(1) - other(f).sum(1).detach(),
    "a curvature without a slope": lambda f, y: each(f, y) + (other(f) - other(f).detach()).square().sum(1),
    "predictions of the batch, counted": lambda f, y: each(f, y) / counts(f.argmax(1)),
}


APART_IN_PAIRS = {"weights from the count of one class", "the hardest half", "predictions of the batch, counted"}
"""Of two samples with different labels these are what each gives alone."""
REFUSED = r"of a sample depends on the other samples of its batch|fails on parts of it"


def problem(loss: Any, n: int = 12, **options: Any) -> fl.Problem:
    torch.manual_seed(3)
    x, y = torch.randn(n, 4), torch.arange(n) % 3
    return fl.Problem(nn.Linear(4, 4), loss, (x, y), **options)


@pytest.mark.parametrize("n", [2, 7, 12, 1500])
@pytest.mark.parametrize("what", COUPLED)
def test_coupled_losses_are_refused_in_one_line(what: str, n: int) -> None:
    if n == 2 and what in APART_IN_PAIRS:
        assert problem(COUPLED[what], n).n == 2
        return
    with pytest.raises(BadLoss, match=REFUSED) as caught:
        problem(COUPLED[what], n)
    assert "\n" not in str(caught.value)
    assert "give each batch as one sample (docs/recipes.md)" in str(caught.value)


def as_one(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0].flatten(0, 1)).unflatten(0, batch[0].shape[:2]), batch[1]


FOLLOWS_AUTOGRAD = {"a slope without a value", "the same, detached"}
"""Their derivative is not the function's."""


@pytest.mark.parametrize("what", [one for one in COUPLED if one not in FOLLOWS_AUTOGRAD])
def test_the_way_that_the_refusal_names_works(what: str) -> None:
    """Each batch as one sample: the risk, and products with the Hessian by explicit double backward."""
    torch.manual_seed(3)
    net, x, y = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)).double(), torch.randn(3, 5, 4).double(), 0
    y = torch.stack([torch.arange(5) % 3 for _ in range(3)])

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return torch.stack([COUPLED[what](f[i], y[i]).mean() for i in range(len(f))])

    one = fl.Problem(net, loss, (x, y), forward=as_one)
    risk = torch.stack([COUPLED[what](net(x[i]), y[i]).mean() for i in range(3)]).mean()
    assert fl.Lens(one).outcomes("data").risk == pytest.approx(float(risk.detach()), rel=1e-10)
    slope = torch.autograd.grad(risk, list(net.parameters()), create_graph=True)
    v = torch.randn(sum(p.numel() for p in net.parameters())).double()
    along = (torch.cat([g.flatten() for g in slope]) * v).sum()
    Hv = torch.cat([g.flatten() for g in torch.autograd.grad(along, list(net.parameters()))])
    assert torch.allclose(fl.curvature.Hessian(one)(v), Hv, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("memory", ["64KB", "1GiB"])
@pytest.mark.parametrize("what", COUPLED)
def test_also_where_one_rare_chunk_alone_is_coupled(what: str, memory: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2100, 4), torch.randint(0, 3, (2100,))
    y[2090:2093] = 3
    loss = only_from(3, COUPLED[what])
    assert fl.Problem(nn.Linear(4, 4), only_from(4, COUPLED[what]), (x, y), memory=memory).n == 2100
    with pytest.raises(BadLoss, match=REFUSED):
        fl.Problem(nn.Linear(4, 4), loss, (x, y), memory=memory)
    with pytest.raises(BadLoss, match=REFUSED):
        fl.Problem(nn.Linear(4, 4), loss, (x[:2000], y[:2000]), test=(x, y))


def test_one_pair_of_samples_that_see_each_other_s_labels() -> None:
    """Every two are in different parts at least once."""

    def paired(f: Tensor, y: Tensor) -> Tensor:
        return each(f, y.clamp(max=2)) * torch.where(y == 3, 1 / (y == 3).sum().clamp(min=1), 1.0)

    for seed in range(20):
        torch.manual_seed(seed)
        x, y = torch.randn(200, 4), torch.randint(0, 3, (200,))
        assert fl.Problem(nn.Linear(4, 3), paired, (x, y)).n == 200
        y[torch.randperm(200)[:2]] = 3
        with pytest.raises(BadLoss, match="other samples"):
            fl.Problem(nn.Linear(4, 3), paired, (x, y))


@pytest.mark.parametrize("fits", ["met targets", "a network that is zero"])
def test_where_every_loss_and_slope_is_zero(fits: str) -> None:
    """Its curvature alone, or another sample's outputs, show it."""

    def balanced(f: Tensor, y: Tensor) -> Tensor:
        labels = y.argmax(1)
        return (f - y).square().sum(1) * len(y) / counts(labels)

    def smooth(f: Tensor, y: Tensor) -> Tensor:
        return f.square().sum(1) + (f - other(f)).square().sum(1)

    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).double(), torch.randn(30, 4).double()
    if fits == "met targets":
        loss, y = balanced, net(x).detach()
    else:
        loss, y = smooth, torch.zeros(30, 3)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
    with pytest.raises(BadLoss, match="other samples"):
        fl.Problem(net, loss, (x, y))


def test_a_fit_so_close_that_losses_are_tiny() -> None:
    torch.manual_seed(0)
    x, y = torch.eye(3).repeat(10, 1), torch.arange(3).repeat(10)
    net = nn.Linear(3, 3).double()
    with torch.no_grad():
        net.weight.copy_(25 * torch.eye(3))
        net.bias.zero_()
    assert float(each(net(x.double()), y).detach().max()) < 1e-10
    assert fl.Problem(net, lambda f, y: each(f, y), (x, y)).n == 30
    with pytest.raises(BadLoss, match="other samples"):
        fl.Problem(net, COUPLED["class weights from the batch's counts"], (x[:17], y[:17]))


def focal(f: Tensor, y: Tensor) -> Tensor:
    loss = each(f, y)
    return (1 - (-loss).exp()) ** 2 * loss


def angular(f: Tensor, y: Tensor) -> Tensor:
    return each(F.normalize(f, dim=1) * 10, y)


def masked(f: Tensor, y: Tensor) -> Tensor:
    """No sample of class 0 counts; a part without others has no derivative."""
    return each(f, y) * (y > 0) if bool((y > 0).any()) else torch.zeros(len(f))


Once = elementwise("Once", torch.square, lambda x: 2 * x, once=True)


def once(f: Tensor, y: Tensor) -> Tensor:
    """Linear where all labels are small, else differentiable once."""
    linear: Tensor = f.sum(1)
    return linear if bool((y < 2).all()) else torch.where(y < 2, linear, Once.apply(f).sum(1))


APART: Mapping[str, Any] = {
    "differentiable once": once,
    "cross-entropy": each,
    "focal": focal,
    "angular": angular,
    "masked": masked,
    "in single precision": lambda f, y: each(f.float(), y),
    "in half precision": lambda f, y: each(f.bfloat16(), y),
    "scaled up": lambda f, y: 1e9 * each(f, y),
    "scaled down": lambda f, y: 1e-30 * each(f, y),
    "linear": lambda f, y: -f.gather(1, y[:, None])[:, 0],
    "hinge": lambda f, y: F.multi_margin_loss(f, y, reduction="none"),
    "exponential": lambda f, y: (-0.5 * f.gather(1, y[:, None])[:, 0]).exp(),
    "a distance": lambda f, y: (f - F.one_hot(y, f.shape[1])).norm(dim=1),
    "a sum by einsum": lambda f, y: torch.einsum("nk,nk->n", f.softmax(1), f) - f.gather(1, y[:, None])[:, 0],
    "a matrix of costs": lambda f, y: (f.softmax(1) @ torch.arange(16.0).reshape(4, 4).to(f))[torch.arange(len(f)), y],
    "a module of torch": nn.MultiMarginLoss(),
}


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("n", [1, 2, 3, 65, 1500])
@pytest.mark.parametrize("what", APART)
def test_losses_that_take_each_sample_alone_pass(what: str, n: int, spread: float) -> None:
    torch.manual_seed(n)
    net, x = nn.Linear(6, 4), torch.randn(n, 6)
    with torch.no_grad():
        net.weight.mul_(spread)
        net.bias.mul_(spread)
    assert fl.Problem(net, APART[what], (x, 1 + torch.arange(n) % 3)).n == n


def test_a_loss_that_is_differentiable_once_and_couples() -> None:
    with pytest.raises(BadLoss, match="other samples"):
        problem(lambda f, y: once(f, y) + other(Once.apply(f)).sum(1) - other(Once.apply(f)).detach().sum(1))


def test_many_outputs_pass() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) * 250
    assert fl.Problem(nn.Linear(6, 10_000), focal, (x, y)).n == 40


def test_targets_may_be_nested() -> None:
    def forward(net: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        x, y = batch
        return net(x), {"label": y, "names": [str(int(label)) for label in y], "weights": (torch.ones(5), y > 0)}

    def loss(f: Tensor, y: Any) -> Tensor:
        assert len(f) == len(y["label"]) == len(y["names"])
        return each(f, torch.tensor([int(name) for name in y["names"]])) * y["weights"][1]

    assert problem(loss, forward=forward).n == 12
    with pytest.raises(BadLoss, match="other samples"):
        problem(lambda f, y: loss(f, y) * y["label"].sum(), forward=forward)


def test_whole_sequences_and_modules_of_tokens() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)))
    data = torch.randn(20, 3), torch.randint(0, 2, (20, 4))

    def worst(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f.mT, y, reduction="none").logsumexp(1)

    assert fl.Problem(net, worst, data).outputs == 8
    with pytest.raises(BadLoss, match="other samples"):
        fl.Problem(net, lambda f, y: worst(f, y) / (y[:, :1] == y[:, 0]).sum(1), data)

    class Balanced(nn.Module):
        reduction = "mean"

        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return each(f, y) / counts(y)

    assert fl.Problem(net, nn.NLLLoss(), data).outputs == 8
    with pytest.raises(BadLoss, match="other samples"):
        fl.Problem(net, Balanced(), data)


def test_a_loss_class_of_one_s_own() -> None:
    class Own(Loss):
        name = "own"

        def values(self, f: Tensor, y: Any) -> Tensor:
            return each(f, y) * len(f) / counts(y)

    with pytest.raises(BadLoss, match=r"loss=own.*other samples"):
        problem(Own())


def test_a_module_that_changes_torch_s_loss_is_not_that_loss() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return focal(f, y)

    own, plain = (fl.Lens(problem(loss)).outcomes("data").risk for loss in (Focal(), focal))
    assert own == pytest.approx(plain, rel=1e-12)


def test_a_loss_that_cannot_be_differentiated_in_a_later_chunk() -> None:
    def stepped(f: Tensor, y: Tensor) -> Tensor:
        return each(f, y) if bool((y == 0).all()) else (f.argmax(1) != y).double()

    with pytest.raises(BadLoss, match="use a differentiable loss"):
        fl.Problem(nn.Linear(4, 2), stepped, (torch.randn(1500, 4), torch.arange(1500) // 1024))


def test_a_loss_that_draws_random_numbers() -> None:
    with pytest.raises(BadLoss, match="different values for the same batch twice"):
        problem(lambda f, y: each(f, y) * torch.rand(len(f)))


def test_what_a_loss_raises_in_a_later_chunk_is_one_line() -> None:
    def strict(f: Tensor, y: Tensor) -> Tensor:
        if int(y.max()) > 2:
            raise KeyError("no such\nclass")
        return each(f, y)

    x, y = torch.randn(2000, 4), torch.arange(2000) % 3
    y[1500] = 3
    with pytest.raises(BadLoss, match=r"samples 1024 to 1535 .*KeyError") as caught:
        fl.Problem(nn.Linear(4, 4), strict, (x, y))
    assert "\n" not in str(caught.value)
