"""Second derivatives that are not those of the network are refused, by the name of the module; right ones never are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders import normal, redrawn
from networks import elementwise, module_of, network, tied_words
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature import Fisher, GaussNewton, Hessian, Operator, Residual
from flatlens.curvature.symmetry import SymmetryCheck
from flatlens.errors import BadModel, NotDifferentiable

Ctx = Any


class RightSquare(torch.autograd.Function):
    """x^2, its backward made of operations that can be differentiated."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Ctx, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * slope


class FlatSquare(RightSquare):
    """The backward takes x for a constant: H lacks phi'', and is symmetric all the same."""

    @staticmethod
    def backward(ctx: Ctx, slope: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].detach() * slope


class DeafSquare(RightSquare):
    """The backward takes its slope for a constant: J v comes out 0."""

    @staticmethod
    def backward(ctx: Ctx, slope: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slope.detach()


class RareSquare(RightSquare):
    """Wrong where x is beyond 3 alone."""

    @staticmethod
    def backward(ctx: Ctx, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * torch.where(x > 3, x.detach(), x) * slope


Ramp = elementwise("Ramp", lambda x: x.clamp(min=0), lambda x: x > 0)  # right between its kinks


def act(function: type[torch.autograd.Function]) -> nn.Module:
    return module_of(lambda net, x: function.apply(x))


class Fused(nn.Linear):
    """Calls torch's kernel of weight_norm by itself, whose second derivative is wrong in torch 2.13."""

    def __init__(self, rare: bool = False) -> None:
        super().__init__(6, 4)
        self.g, self.rare = nn.Parameter(torch.rand(4, 1) + 0.5), rare

    def forward(self, x: Tensor) -> Tensor:
        plain = super().forward(x)
        if not self.rare:
            return nn.functional.linear(x, torch._weight_norm(self.weight, self.g, 0))
        there = x.amax(1) > 3
        if not bool(there.any()):
            return plain
        return torch.where(there[:, None], nn.functional.linear(x, torch._weight_norm(self.weight, self.g, 0)), plain)


def drawn(*layers: nn.Module) -> nn.Module:
    return redrawn(nn.Sequential(*layers).double(), seed=3, scale=0.5)


def data(n: int = 20, outlier: float = 0.0) -> tuple[Tensor, Tensor]:
    x = normal(n, 6, seed=4).clamp(-2.5, 2.5)
    x[n - 2, 0] += outlier
    return x, torch.arange(n) % 3


def with_act(function: type[torch.autograd.Function]) -> nn.Module:
    return drawn(nn.Linear(6, 4), act(function), nn.Linear(4, 3))


def products(kind: type[Operator], net: nn.Module, x: Tensor, y: Tensor, **options: object) -> Operator:
    operator = kind(fl.Problem(net, "cross_entropy", (x, y), **options))
    operator(torch.ones(operator.size, dtype=operator.dtype))
    return operator


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Hessian, Residual])
def test_a_wrong_backward_is_named(kind: type[Operator], dtype: torch.dtype) -> None:
    wrong = {
        r"'1' \(Of\), which runs FlatSquareBackward": with_act(FlatSquare),
        r"'1' \(Of\), which runs DeafSquareBackward": with_act(DeafSquare),
        r"'0' \(Fused\)": drawn(Fused(), nn.Tanh(), nn.Linear(4, 3)),
    }
    for words, net in wrong.items():
        x, y = data()
        before = [p.clone() for p in net.parameters()]
        with pytest.raises(BadModel, match=f"derivatives of {words}.*plain torch operations") as told:
            products(kind, net, x, y, dtype=dtype)
        assert "\n" not in str(told.value)
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", [GaussNewton, Fisher])
def test_a_jacobian_that_is_not_the_adjoint_of_its_transpose(kind: type[Operator]) -> None:
    x, y = data()
    with pytest.raises(BadModel, match="DeafSquareBackward"):
        products(kind, with_act(DeafSquare), x, y)


def test_rare_branches_are_proved_where_they_are_met() -> None:
    """One sample of 300, not among those looked at first: an operation of torch's, and a value of a user's function."""
    fused = drawn(Fused(rare=True), nn.Tanh(), nn.Linear(4, 3))
    square = drawn(nn.Linear(6, 4), act(RareSquare), nn.Linear(4, 3))
    with torch.no_grad():
        square[0].weight.mul_(0.1)
        square[0].bias.mul_(0.1)
        square[0].weight[0, 0] = 1.0
    for net, words in ((fused, "'0'"), (square, "'1'")):
        for memory in ("1GiB", "30KB"):
            ordinary, y = data(300)
            proved = products(Hessian, net, ordinary, y, memory=memory)
            assert proved.certificate.products >= 2
            with pytest.raises(BadModel, match=f"derivatives of {words}"):
                products(Hessian, net, *data(300, outlier=5.0), memory=memory)


def test_places_inside_a_network() -> None:
    """Of a pre-activation's edge in the graph, as walks along one layer's weight take it."""
    net, (x, y) = drawn(nn.Linear(6, 6), nn.Tanh(), Fused(), nn.Tanh(), nn.Linear(4, 3)), data()
    problem = fl.Problem(net, "cross_entropy", (x, y))

    def proved(above: nn.Module) -> None:
        z = net[0](x)
        of = nn.functional.cross_entropy(above(z), y)
        at = [torch.autograd.graph.get_gradient_edge(z), net[2].weight, net[2].g, net[0].bias]
        rows = list(torch.autograd.grad(of, at, create_graph=True, allow_unused=True))
        SymmetryCheck(problem, net).require_symmetric((x, y), of, rows, at)

    with pytest.raises(BadModel, match="'2'"):
        proved(net[1:])
    proved(nn.Sequential(nn.Tanh(), nn.Linear(6, 3).double()))


class Cumulative(nn.Module):
    """log(sum_{j <= k} exp(h_j)), by torch's logcumsumexp or plainly; its backward has no derivative at slopes of 0."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, h: Tensor) -> Tensor:
        return h.exp().cumsum(1).log() if self.plain else torch.logcumsumexp(h, 1)


ABOVE = {
    "nothing": lambda: [],
    "linear": lambda: [nn.Linear(4, 3)],
    "softmax": lambda: [nn.Softmax(1)],  # equal numbers at the outputs have the slope 0 below
    "relu": lambda: [nn.Linear(4, 9), Cumulative(True), nn.ReLU(), nn.Linear(9, 3)],
}


def both_ways(above: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(6, 4), Cumulative(True), *ABOVE[above]()).to(dtype)
    fused = copy.deepcopy(plain)
    for module in fused.modules():
        if isinstance(module, Cumulative):
            module.plain = False
    return fused, plain


def missed(f: Tensor, by: Tensor) -> Tensor:
    """Half squared errors of targets that are missed by so much to the last bit, whatever the batch."""
    return (f - f.detach() - by).square().sum(1) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("above", ABOVE)
def test_products_with_the_jacobian_of_logcumsumexp(above: str, dtype: torch.dtype) -> None:
    """Also where the targets are met: the Gauss-Newton matrix has no slopes of the loss in it."""
    x = data()[0].to(dtype)
    (fused, plain), eps = both_ways(above, dtype), torch.finfo(dtype).eps
    for size in (0.0, 0.3):
        by = size * normal(*fused(x).shape, seed=6).to(dtype)
        G, truth = (GaussNewton(fl.Problem(net, missed, (x, by))).matrix() for net in (fused, plain))
        assert float((G - truth).norm()) < 1e4 * eps * float(truth.norm())
        assert float(truth.norm()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("met", [0, 1, 20])
def test_a_hessian_that_logcumsumexp_loses_is_refused(above: str, dtype: torch.dtype, met: int) -> None:
    """Of samples whose targets are met exactly; not of units that a ReLU turns off, whose slopes stay 0."""
    x = data()[0].to(dtype)
    fused, plain = both_ways(above, dtype)
    by = 0.3 * normal(*fused(x).shape, seed=6).to(dtype)
    by[:met] = 0
    problem, other = (fl.Problem(net, missed, (x, by)) for net in (fused, plain))
    if met:
        with pytest.raises(NotDifferentiable, match="logcumsumexp has no second derivative at slopes of 0"):
            Hessian(problem).matrix()
        found = fl.measure(fl.Lens(problem), ["sharpness", "ggn_trace"])
        assert found["sharpness"].kind == "undefined"
        assert "write it by cumsum()" in found["sharpness"].note
        assert found["ggn_trace"].kind == "exact"
    else:
        H, truth = Hessian(problem).matrix(), Hessian(other).matrix()
        assert float((H - truth).norm()) < 1e4 * torch.finfo(dtype).eps * float(truth.norm())


def test_a_functional_hessian_at_targets_that_are_met_is_0_all_the_same() -> None:
    x = data()[0]
    fused, plain = both_ways("nothing", torch.float64)
    problems = [fl.Problem(net, missed, (x, torch.zeros_like(fused(x).detach()))) for net in (fused, plain)]
    ours, truth = (fl.measure(fl.Lens(p), ["hessian_trace(exact=True)"])["hessian_trace(exact=True)"] for p in problems)
    assert ours.kind == truth.kind == "exact"
    assert ours.value == pytest.approx(truth.value, rel=1e-9)
    assert float(Residual(problems[0]).matrix().abs().max()) == 0


def test_a_loss_that_logcumsumexp_makes_flat_is_refused() -> None:
    def loss(f: Tensor, y: Tensor) -> Tensor:
        return missed(torch.logcumsumexp(f, 1), y)

    net, (x, _) = RIGHT["no curvature"]().double(), data()
    met = torch.zeros(len(x), 3).double()
    with pytest.raises(NotDifferentiable, match="logcumsumexp"):
        GaussNewton(fl.Problem(net, loss, (x, met))).matrix()
    G = GaussNewton(fl.Problem(net, loss, (x, met + 0.3))).matrix()
    assert torch.allclose(G, G.T, atol=1e-12)


def test_a_measure_is_undefined_rather_than_wrong() -> None:
    problem = fl.Problem(with_act(FlatSquare), "cross_entropy", data())
    report = fl.measure(fl.Lens(problem), ["sharpness", "loss"])
    assert "FlatSquareBackward" in report["sharpness"].note
    assert (report["sharpness"].kind, report["loss"].kind) == ("undefined", "exact")


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_a_loss_with_a_wrong_backward_is_named(kind: type[Operator]) -> None:
    def loss(f: Tensor, y: Tensor) -> Tensor:
        return FlatSquare.apply(f - nn.functional.one_hot(y, 3)).sum(1)

    x, y = data()
    operator = kind(fl.Problem(drawn(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), loss, (x, y)))
    with pytest.raises(BadModel, match=r"the loss's second derivative \(it runs FlatSquareBackward\)"):
        operator(torch.ones(operator.size, dtype=operator.dtype))


def encoder() -> nn.Module:
    return module_of(
        lambda net, x: net.head(net.layer(x[:, None] * torch.linspace(0.5, 1.5, 4).to(x)[:, None]).mean(1)),
        layer=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        head=(6, 3),
    )


def recurrent() -> nn.Module:
    return module_of(
        lambda net, x: net.head(net.lstm(x.unflatten(1, (3, 2)))[0][:, -1]),
        lstm=nn.LSTM(2, 3, batch_first=True),
        head=(3, 3),
    )


RIGHT = {
    "encoder": encoder,
    "lstm": recurrent,
    "batchnorm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 3)),
    "layernorm": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)),
    "instancenorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.InstanceNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "ramp": lambda: nn.Sequential(nn.Linear(6, 40), act(Ramp), nn.Linear(40, 3)),
    "square": lambda: nn.Sequential(nn.Linear(6, 4), act(RightSquare), nn.Linear(4, 3)),
    "no curvature": lambda: nn.Linear(6, 3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RIGHT)
def test_right_networks_are_measured(name: str, dtype: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = RIGHT[name]().to(dtype)
    x, y = data(60)
    for kind in (Hessian, Residual, GaussNewton, Fisher):
        assert products(kind, net, x, y).products == 1
    for name_of, _ in list(net.named_parameters()):  # of a bias below a norm H is 0, but for rounding
        problem = fl.Problem(net, "cross_entropy", (x, y))
        operator = Hessian(problem, [name_of])
        operator(torch.ones(operator.size, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [20.0, 60.0, 100.0, 400.0, 1000.0])
def test_samples_beyond_doubt_are_measured(gap: float, dtype: torch.dtype) -> None:
    """Their slopes are p - 1 of 1e-9 to 1e-300: rounding of p makes their second derivatives asymmetric."""
    for seed in (59, 277, 346, 419, 3227):  # where central differences once were found wrong: they were rounding alone
        torch.manual_seed(seed)
        net, (x, _) = RIGHT["no curvature"]().double(), data(8)
        with torch.no_grad():
            outputs = net(x).topk(2, 1).values
            net.weight.mul_(gap / float((outputs[:, 0] - outputs[:, 1]).min()))
        for model in (net.to(dtype), nn.Sequential(net.to(dtype), nn.ReLU(), nn.Linear(3, 3).to(dtype))):
            assert products(Hessian, model, x, net(x.to(dtype)).argmax(1)).products == 1


def test_batch_statistics_are_right_by_double_backward() -> None:
    net = RIGHT["batchnorm"]().double()
    x, y = data(20)
    operator = products(Hessian, net, x, y, batchnorm="train", ghost_batch=5)
    H = operator.matrix()
    assert torch.allclose(H, H.T, atol=1e-12)


def test_what_a_proof_takes() -> None:
    """Two products on the first few samples; none in coarse arithmetic, where rounding would hide what it looks for."""
    net, x, y = network("mlp-tanh", n=200)
    operator = products(Hessian, net, x, y)
    assert operator.certificate.products == 2
    operator.matrix()
    assert operator.certificate.products == 2
    assert operator.products == 1 + operator.size
    coarse = products(Hessian, net.float(), x.float(), y, arithmetic="bfloat16")
    assert coarse.certificate.products == 0
    examined = products(Hessian, with_act(RightSquare), *data(20))
    assert examined.certificate.products > 2


def test_a_problem_knows_what_was_checked() -> None:
    """A tracker's next moment does not check again; another matrix, other parameters, and users' functions do."""
    net, x, y = network("mlp-tanh", n=20)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    taken = []
    for operator in (Hessian(problem), Hessian(problem), Hessian(problem, "2"), GaussNewton(problem)):
        operator(torch.ones(operator.size, dtype=operator.dtype))
        taken.append(operator.certificate.products)
    assert taken == [2, 0, 2, 2]
    own = fl.Problem(with_act(RightSquare), "cross_entropy", data(20))
    for operator in (Hessian(own), Hessian(own)):
        operator(torch.ones(operator.size, dtype=operator.dtype))
        assert operator.certificate.products > 2


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_are_cut_on_purpose_are_no_fault_of_second_derivatives(seed: int) -> None:
    torch.manual_seed(seed)
    net, *data = tied_words()
    problem = fl.Problem(net, "cross_entropy", tuple(data))
    assert bool(Hessian(problem)(normal(32, seed=seed)).isfinite().all())
