"""What the regularisers estimate: over all signs their mean is the measure itself."""

import itertools

import pytest
import torch
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput, BadModel, UnknownName
from flatlens.grams.record import record
from flatlens.training import SGD, InputJacobian, ParameterJacobian, RelativeFlatness, Training, TrainingLoss, train
from flatlens.training import objective as penalties_module
from flatlens.training.objective import Pass


def network(kind):
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3)
    ).double()


def samples(kind, n=2):
    generator = torch.Generator().manual_seed(1)
    shape = (n, 4) if kind == "dense" else (n, 1, 3, 3)
    return torch.randn(shape, generator=generator, dtype=torch.float64), torch.tensor([0, 2])[:n]


def forward(net, x, loss="cross_entropy"):
    x = x.clone().requires_grad_()
    with record(net.eval()) as tape:
        outputs = net(x)
    return Pass(x, outputs, list(net.parameters()), tape.linear, TrainingLoss(loss))


def mean_over_all_signs(monkeypatch, penalty, net, x, loss="cross_entropy"):
    values = []
    for drawn in itertools.product((-1.0, 1.0), repeat=len(x) * 3):
        u = torch.tensor(drawn, dtype=torch.float64).reshape(len(x), 3)
        monkeypatch.setattr(penalties_module, "random_signs", lambda *_, u=u: u)
        values.append(float(penalty.value(forward(net, x, loss), torch.Generator()).detach()))
    return sum(values) / len(values)


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error", "mse"])
@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("layers", ["last", "all"])
def test_relative_flatness_is_estimated_without_bias(monkeypatch, kind, loss, layers):
    net, (x, y) = network(kind), samples(kind)
    report = fl.measure(fl.Lens(fl.Problem(net.eval(), loss, (x, y))), ["relative_flatness_ggn"])
    wanted = report["relative_flatness_ggn" if layers == "last" else "relative_flatness_ggn.sum"].value
    penalty = RelativeFlatness(1.0, layers)
    assert mean_over_all_signs(monkeypatch, penalty, net, x, loss) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_jacobians_norms_are_estimated_without_bias(monkeypatch, kind):
    net, (x, y) = network(kind), samples(kind)
    names = ["jacobian_frobenius", "parameter_jacobian_frobenius"]
    report = fl.measure(fl.Lens(fl.Problem(net.eval(), "cross_entropy", (x, y))), names)
    for penalty, name in zip((InputJacobian(1.0), ParameterJacobian(1.0)), names, strict=True):
        assert mean_over_all_signs(monkeypatch, penalty, net, x) == pytest.approx(report[name].value, rel=1e-10)


@pytest.mark.parametrize("n", [2, 32])
def test_the_published_scaling(n):
    """E ||u^T J||^2 = mean_i ||J_i||_F^2 / N, whatever the number of samples."""
    net = network("dense")
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    penalty = InputJacobian(1.0, "published")
    squares = [float(penalty.value(forward(net, x), generator).detach()) ** 2 for _ in range(2000)]
    mean = sum(squares) / len(squares)
    spread = (sum((s - mean) ** 2 for s in squares) / len(squares)) ** 0.5 / len(squares) ** 0.5
    J = torch.stack([torch.func.jacrev(lambda one: net(one[None])[0])(one) for one in x])
    wanted = float(J.detach().square().sum((1, 2)).mean() / 3)
    assert abs(mean - wanted) < 4 * spread
    assert spread < 0.03 * wanted


def test_confident_softmax_has_finite_slopes():
    net = network("dense")
    with torch.no_grad():
        net[2].weight.mul_(1e3)
    x, _ = samples("dense")
    value = RelativeFlatness(1.0, "all").value(forward(net, x), torch.Generator().manual_seed(0))
    slopes = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    assert value.isfinite()
    assert all(slope.isfinite().all() for slope in slopes if slope is not None)


def test_a_network_whose_outputs_do_not_move_has_no_published_slope_of_nan():
    net = nn.Sequential(nn.Linear(4, 3)).double()
    nn.init.zeros_(net[0].weight)
    x, _ = samples("dense")
    value = InputJacobian(1.0, "published").value(forward(net, x), torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(value, net[0].weight)
    assert slope.isfinite().all()


def test_what_cannot_be_regularised_is_refused():
    net = network("dense")
    x, _ = samples("dense")
    draw = torch.Generator()
    with pytest.raises(UnknownName, match="unknown linear layer 'fc1'"):
        RelativeFlatness(1.0, ("fc1",)).value(forward(net, x), draw)
    seen = forward(net, x)
    with pytest.raises(BadModel, match="no linear layer"):
        RelativeFlatness(1.0).value(Pass(seen.x, seen.outputs, seen.parameters, {}, seen.loss), draw)
    twice = module_of(lambda net, x: net.layer(net.layer(x).tanh()), layer=(4, 4)).double()
    with pytest.raises(BadModel, match="'layer' is used more than once"):
        RelativeFlatness(1.0).value(forward(twice, x), draw)
    for wrong in (lambda: RelativeFlatness(-1.0), lambda: InputJacobian(float("nan")), lambda: InputJacobian(1, "l2")):
        with pytest.raises(BadInput):
            wrong()
    with pytest.raises(BadInput, match="'last', 'all'"):
        RelativeFlatness(1.0, "first")


def test_outputs_without_a_derivative_have_no_penalty():
    how = Training(SGD(0.1), max_steps=3, penalties=(InputJacobian(0.1),))
    net = module_of(lambda net, x: net.e((x[:, 0] > 0).long()), e=nn.Embedding(4, 2))
    train(net, (torch.randn(9, 3), torch.arange(9) % 2), how)
