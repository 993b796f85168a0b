"""Losses of torch and of the user's own: functions, partials, lambdas and modules that return a mean."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from builders import trace_of_hessian
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadInput, BadLoss
from flatlens.problem.losses import MODULE_OF, as_loss

G = torch.Generator().manual_seed(0)
F6 = torch.randn(6, 4, generator=G, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
SIGNS = torch.tensor([[1.0, -1, 1, -1]]).double().repeat(6, 1)
POSITIVE = torch.rand(6, 4, generator=G, dtype=torch.float64)
TARGETS = {
    F.cross_entropy: LABELS, F.nll_loss: LABELS, F.multi_margin_loss: LABELS,
    F.multilabel_margin_loss: torch.tensor([[3, 0, -1, 1]]).repeat(6, 1),
    F.hinge_embedding_loss: SIGNS, F.soft_margin_loss: SIGNS,
}  # fmt: skip


class Pair(NamedTuple):
    """Two outputs with names."""

    a: Tensor
    b: Tensor


OF_TWO = (F.gaussian_nll_loss, F.margin_ranking_loss, F.cosine_embedding_loss)


@pytest.mark.parametrize("function", [one for one in MODULE_OF if one not in OF_TWO], ids=lambda f: f.__name__)
def test_a_function_of_torch_is_the_mean_of_its_samples(function) -> None:
    f, y = (F6.sigmoid() if function is F.binary_cross_entropy else F6), TARGETS.get(function, POSITIVE)
    loss = as_loss(function)
    alone = torch.stack([function(f[i : i + 1], y[i : i + 1]) for i in range(6)])
    assert torch.allclose(loss.values(f, y), alone, rtol=1e-12)
    assert float(loss.values(f, y).sum() / loss.mass(f, y).sum()) == pytest.approx(float(function(f, y)), rel=1e-12)


@pytest.mark.parametrize("function", OF_TWO, ids=lambda f: f.__name__)
def test_a_function_of_two_outputs_has_one_target(function) -> None:
    """As a tuple or a dict of the network, whatever the entries are called; the risk is torch's own."""
    x, means = torch.randn(6, 3, generator=G).double(), function is F.gaussian_nll_loss
    y = POSITIVE if means else SIGNS[:, 0] if function is F.cosine_embedding_loss else SIGNS

    def two(form: type) -> nn.Module:
        torch.manual_seed(0)

        def forward(net: nn.Module, x: Tensor) -> object:
            f, g = net.a(x), F.softplus(net.b(x))
            return {"mean": f, "spread": g} if form is dict else Pair(f, g) if form is Pair else (f, g)

        return module_of(forward, a=(3, 4), b=(3, 4)).double()

    f, g = two(tuple)(x)
    truth = float((function(f, y, g) if means else function(f, g, y)).detach())
    for form in (tuple, dict, Pair):
        assert fl.Lens(fl.Problem(two(form), function, (x, y))).outcomes("data").risk == pytest.approx(truth, rel=1e-12)

    def own(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return ((outputs[0] * outputs[1]).sum(1) - targets.reshape(len(targets), -1).sum(1)).square()

    other = fl.Problem(two(dict), lambda o, t: own((o["mean"], o["spread"]), t["value"]), (x, {"value": y}))
    assert fl.Lens(other).outcomes("data").risk == pytest.approx(float(own((f, g), y).detach().mean()), rel=1e-12)
    named = {tuple: own, dict: lambda o, t: own((o["mean"], o["spread"]), t), Pair: lambda o, t: own((o.a, o.b), t)}
    for form, loss in named.items():
        found = fl.measure(fl.Lens(fl.Problem(two(form), loss, (x, y))), ["loss", "hessian_trace(exact=True)"])
        assert found["loss"].value == pytest.approx(float(own((f, g), y).detach().mean()), rel=1e-12)
        truth = trace_of_hessian(net := two(tuple), own(net(x), y).mean())
        assert found["hessian_trace(exact=True)"].value == pytest.approx(truth, rel=1e-9)


def test_the_options_of_a_partial_are_kept() -> None:
    for options in ({"label_smoothing": 0.2}, {"weight": torch.tensor([1.0, 2, 3, 4]).double()}):
        loss, function = as_loss(partial(F.cross_entropy, **options)), partial(F.cross_entropy, **options)
        mean = float(loss.values(F6, LABELS).sum() / loss.mass(F6, LABELS).sum())
        assert mean == pytest.approx(float(function(F6, LABELS)), rel=1e-12)
    huber = as_loss(partial(F.huber_loss, delta=0.3))
    assert float(huber.values(F6, POSITIVE).mean()) == pytest.approx(float(F.huber_loss(F6, POSITIVE, delta=0.3)))
    with pytest.raises(BadLoss, match="reduction='sum'"):
        as_loss(partial(F.mse_loss, reduction="sum"))
    with pytest.raises(BadLoss, match=r"does not take these options.*lable_smoothing"):
        as_loss(partial(F.cross_entropy, lable_smoothing=0.1))


def test_a_partial_that_returns_each_samples_loss_is_a_function() -> None:
    each = as_loss(partial(F.cross_entropy, reduction="none", label_smoothing=0.2))
    mean = F.cross_entropy(F6, LABELS, label_smoothing=0.2)
    assert float(each.values(F6, LABELS).mean()) == pytest.approx(float(mean), rel=1e-12)
    with pytest.raises(BadLoss, match=r"one value per sample, shape \(6,\)"):
        problem(partial(F.mse_loss, reduction="none"), POSITIVE)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", ["scripted", "vmapped", "torch's own", "a module", "any arguments"])
def test_functions_that_tell_no_arguments_are_losses(kind: str) -> None:
    def squares(f: Tensor, y: Tensor) -> Tensor:
        return (f - y).square().sum(1)

    loss = {
        "scripted": lambda: torch.jit.script(squares),
        "vmapped": lambda: torch.vmap(lambda f, y: (f - y).square().sum()),
        "torch's own": lambda: torch.cosine_similarity,
        "a module": nn.PairwiseDistance,
        "any arguments": lambda: lambda *given: squares(*given),
    }[kind]()
    found = fl.Lens(problem(loss, POSITIVE)).outcomes("data").risk
    assert found == pytest.approx(float(loss(problem(loss, POSITIVE).model(X3), POSITIVE).detach().mean()), rel=1e-12)


def test_partials_that_set_other_arguments_are_told_apart() -> None:
    def weighted(a: float, b: float, f: Tensor, y: Tensor, c: float = 0.0) -> Tensor:
        return (a * (f - y).square() + b * (f - y).abs() + c).sum(1)

    same = [partial(weighted, 0.5, 0.9), partial(partial(weighted, 0.5), 0.9)]
    others = [partial(weighted, 0.9, 0.5), partial(weighted, 0.5, torch.tensor(0.9)), partial(weighted, 0.5, 0.9, c=1)]
    told = [as_loss(one).description for one in (*same, *others)]
    assert told[0] == told[1]
    assert "#1=0.5, #2=0.9" in told[0]
    assert len(set(told)) == 4


def mean_loss() -> nn.Module:
    return module_of(lambda net, f, y: F.cross_entropy(f, y))


X3 = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()


def problem(loss: object, y: Tensor = LABELS, **options: object) -> fl.Problem:
    torch.manual_seed(0)
    return fl.Problem(nn.Linear(3, 4).double(), loss, (X3, y), **options)


MEANS = {"lambda": lambda f, y: F.cross_entropy(f, y), "module": mean_loss(), "partial": partial(mean_loss().forward)}


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_over_the_batch_is_taken_sample_by_sample(loss) -> None:
    """Whatever is measured is what the named loss gives."""
    wanted = ["loss", "ggn_trace", "mls", "relative_flatness", "sharpness(rtol=1e-9)"]
    ours = fl.measure(fl.Lens(problem(loss)), wanted)
    theirs = fl.measure(fl.Lens(problem("cross_entropy")), wanted)
    for key, e in theirs.items():
        assert ours[key].value == pytest.approx(e.value, rel=1e-7), key
    assert torch.allclose(ours["loss"].samples, theirs["loss"].samples)


COUPLED = {
    "a sum": (lambda f, y: F.cross_entropy(f, y, reduction="sum"), "it is their sum"),
    "a mean times n": (lambda f, y: f.square().mean() * len(f), "it is their sum"),
    "class weights": (lambda f, y: F.cross_entropy(f, y, torch.arange(1.0, 5).double()), "have different weights"),
    "a batch's mean": (lambda f, y: f.mean(0).square().sum(), "have different weights, or influence each other"),
    "the largest": (lambda f, y: f.square().max(), "influence each other"),
    "a maximum over counts": (lambda f, y: f.square().mean() / y.unique().numel(), "influence each other"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_one_number_that_is_no_mean_of_single_losses_is_refused(name) -> None:
    loss, reason = COUPLED[name]
    with pytest.raises(BadLoss, match=reason) as caught:
        problem(loss)
    assert "\n" not in str(caught.value)


def test_ignored_targets_are_no_matter_for_a_lambda() -> None:
    y = LABELS.masked_fill(LABELS == 1, -100)
    with pytest.raises(BadLoss, match=r"sample 1 is NaN.*ignored needs nn\.CrossEntropyLoss"):
        problem(lambda f, y: F.cross_entropy(f, y), y)
    assert problem(F.cross_entropy, y).mass == 4


def test_a_later_batch_that_couples_is_refused_too() -> None:
    """The first 1,024 samples are alike: only there is the mean of squares the square of the mean."""
    x = torch.zeros(1100, 3).double()
    x[1024:] = torch.randn(76, 3).double()
    with pytest.raises(BadLoss, match="influence each other"):
        fl.Problem(nn.Linear(3, 1).double(), lambda f, y: f.mean().square(), (x, torch.zeros(1100)))


def test_a_report_states_every_setting_of_a_loss() -> None:
    def told(loss: object, y: Tensor = LABELS) -> str:
        return str(fl.measure(fl.Lens(problem(loss, y)), "loss").about["loss"])

    assert told("cross_entropy") == told(F.cross_entropy) == "cross_entropy"
    assert told(nn.CrossEntropyLoss(label_smoothing=0.1)) == "cross_entropy(label_smoothing=0.1)"
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]), ignore_index=7)
    assert told(weighted) == "cross_entropy(weight=[1, 2, 3, 4], ignore_index=7)"
    assert told(nn.HuberLoss(delta=0.3), POSITIVE) == "HuberLoss(delta=0.3)"
    many = [as_loss(nn.CrossEntropyLoss(weight=torch.arange(20.0) + k)).description for k in (0, 0, 1)]
    assert many[0] == many[1] != many[2]


LOSSES = (
    "cross_entropy",
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.CrossEntropyLoss(label_smoothing=0.2),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4])),
    lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1, reduction="none"),
    lambda f, y: F.cross_entropy(f, y, label_smoothing=0.2, reduction="none"),
)


@pytest.mark.parametrize("b", range(1, 6))
@pytest.mark.parametrize("a", range(5))
def test_networks_of_different_losses_are_not_ranked(a: int, b: int) -> None:
    lenses = {"a": fl.Lens(problem(LOSSES[a])), "b": fl.Lens(problem(LOSSES[b]))}
    if a == b:
        assert len(fl.compare(lenses, ["mls"]).frame())
        return
    with pytest.raises(BadInput, match="under one loss"):
        fl.compare(lenses, ["mls"])


def test_functions_that_differ_in_what_they_close_over_are_not_ranked() -> None:
    def scaled(tensor: Tensor) -> object:
        return lambda f, y: (f * tensor).square().sum(1)

    lenses = {name: fl.Lens(problem(scaled(torch.tensor(c).double()))) for name, c in (("a", 1.0), ("b", 2.0))}
    with pytest.raises(BadInput, match="for the same outputs of a sample; they must be measured under one loss"):
        fl.compare(lenses, ["mls"])
