"""Networks and moments at which curvature would come out wrong without a word, or leave the model changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import elementwise, module_of, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature import Hessian, eigenpairs, lanczos

DERIVED = ["sharpness", "ggn_norm", "hessian_trace", "adaptive_sharpness", "fisher_rao", "layer_sharpness"]


Square = elementwise("Square", torch.square, lambda x: 2 * x, once=True)


def squared(function: type[torch.autograd.Function]) -> nn.Module:
    return module_of(lambda net, x: net.b(function.apply(net.a(x))), a=(6, 4), b=(4, 3)).double()


@pytest.mark.filterwarnings("ignore")
def test_a_function_that_can_be_differentiated_once_only() -> None:
    _, x, y = network("mlp-relu")
    lens = fl.Lens(fl.Problem(squared(Square), "cross_entropy", (x, y)))
    assert "0" not in lens.plan.affine
    report = fl.measure(lens, ["ggn_trace", *DERIVED, "kappa_trace"])
    assert report["ggn_trace"].kind == "exact"
    assert report["fisher_rao"].kind == "exact"  # from the pass; a product with J would differentiate twice
    for key in ("sharpness", "ggn_norm", "hessian_trace", "adaptive_sharpness", "kappa_trace"):
        assert report[key].kind == "undefined", key
        assert report[key].note


def test_an_embedding_bag_has_no_second_derivative() -> None:
    net = nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, 3))
    ids, y = torch.randint(0, 9, (8, 4)), torch.randint(0, 3, (8,))
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, y))), "pass")
    assert report["ggn_trace"].kind == "exact"
    assert all(e.kind == "undefined" or e.value == e.value for e in report.values())


def test_out_of_products_just_after_a_restart() -> None:
    """A basis just compressed looks as if it had no residual."""
    d = torch.cat([-torch.linspace(0, 1, 2980), torch.linspace(0.9e-3, 1e-3, 20)]).double()
    start = torch.randn(3000, generator=torch.Generator().manual_seed(0)).double()
    pairs = lanczos(lambda v: d * v, start, most=60, room=60)
    v = pairs.vectors[0]
    true = float((d * v - pairs.values[0] * v).norm())
    assert float(pairs.residuals[0]) == pytest.approx(true, rel=1e-6)
    assert not pairs.converged


@pytest.mark.parametrize("scale", [1e22, 1e-24])
def test_single_precision_beyond_the_squares_it_can_hold(scale: float) -> None:
    d = torch.tensor([1.0, 0.5, 0.1, 0.01] * 20) * scale
    assert lanczos(lambda v: d * v, torch.ones(80)).largest == pytest.approx(scale, rel=1e-3)


def test_a_product_that_overflows_is_undefined() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1e9)
    problem = fl.Problem(net, "half_squared_error", (torch.randn(5, 4), torch.zeros(5, 4)), dtype=torch.float32)
    estimate = fl.measure(fl.Lens(problem), ["sharpness"])["sharpness"]
    assert estimate.kind == "undefined"
    assert "float64" in estimate.note


def test_fisher_rao_counts_samples_as_the_risk_does() -> None:
    net, x, y = network("mlp-relu", n=12)
    ignored = torch.full((12,), -100)
    one = fl.Problem(net, "cross_entropy", (x, y))
    two = fl.Problem(net, "cross_entropy", (torch.cat([x, x]), torch.cat([y, ignored])))
    a, b = (fl.measure(fl.Lens(problem), ["fisher_rao"]) for problem in (one, two))
    assert b["fisher_rao"].value == pytest.approx(a["fisher_rao"].value, rel=1e-12)
    assert b["fisher_rao.parameters"].value == pytest.approx(a["fisher_rao.parameters"].value, rel=1e-12)


def test_fisher_rao_counts_reparametrised_layers() -> None:
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, bias=False)) for _ in range(3)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()
    x, y = torch.randn(8, 6).double(), torch.randint(0, 6, (8,))
    problem = fl.Problem(net, "cross_entropy", (x, y))
    f = net(x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(f, y, reduction="sum"), f)
    truth = 3 * float((slope * f).sum(1).square().mean().sqrt())
    assert fl.measure(fl.Lens(problem), ["fisher_rao"])["fisher_rao"].value == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("how", ["in place", "behind autograd's back"])
def test_an_operator_of_a_network_trained_on(how: str) -> None:
    net, x, y = network("mlp-tanh")
    problem = fl.Problem(net, "cross_entropy", (x, y))
    operator, v = Hessian(problem), torch.randn(107).double()
    operator(v)
    with torch.no_grad():
        for p in net.parameters():
            _ = p.mul_(1.5) if how == "in place" else p.data.mul_(1.5)
    assert torch.allclose(operator(v), Hessian(problem)(v), rtol=1e-12)


def test_looking_at_a_spectral_norm_in_train_mode_moves_nothing() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 3)).double()
    _, x, y = network("mlp-relu")
    lens = fl.Lens(fl.Problem(net.train(), "cross_entropy", (x, y)))
    before = [b.clone() for b in net.buffers()]
    fl.measure(lens, "pass")
    assert all(torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True))
    fl.measure(lens, ["weight_norm"])  # and the lens is not stale


def test_inside_inference_mode() -> None:
    net, x, y = network("mlp-tanh")
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    outside = fl.measure(lens, ["sharpness", "hessian_trace"])
    with torch.inference_mode():
        inside = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["sharpness", "hessian_trace"])
        assert Hessian(lens.problem)(torch.ones(107).double()).isfinite().all()
    assert inside["sharpness"].value == outside["sharpness"].value
    assert inside["hessian_trace"].value == outside["hessian_trace"].value


def test_integer_parameters_do_not_count() -> None:
    net, x, y = network("mlp-relu")
    net.register_parameter("steps", nn.Parameter(torch.tensor(3), requires_grad=False))
    problem = fl.Problem(net, "cross_entropy", (x, y), parameters="all")
    assert "steps" not in problem.parameters
    assert fl.measure(fl.Lens(problem), ["sharpness"])["sharpness"].value > 0


def test_the_next_moment_begins_where_the_last_one_ended() -> None:
    net, x, y = network("mlp-tanh", n=30)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    first = fl.Lens(problem)
    cold = fl.measure(first, ["sharpness"])["sharpness"]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1e-3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    warm = fl.measure(fl.Lens(problem, after=first), ["sharpness"])["sharpness"]
    again = fl.measure(fl.Lens(problem), ["sharpness"])["sharpness"]
    assert warm.products < cold.products
    assert warm.value == pytest.approx(again.value, rel=2e-3)
    with pytest.raises(fl.errors.BadInput, match="an earlier Lens"):
        fl.Lens(problem, after=3)
    with pytest.raises(fl.errors.BadInput, match="tensor of shape"):
        eigenpairs(Hessian(problem), start=[1.0])


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * x


def test_a_function_without_a_backward_is_named() -> None:
    _, x, y = network("mlp-relu")
    report = fl.measure(fl.Lens(fl.Problem(squared(NoBackward), "cross_entropy", (x, y))), ["ggn_trace", "loss"])
    assert "give the autograd.Function a backward()" in report["ggn_trace"].note
    assert report["loss"].kind == "exact"


def across_samples(x: Tensor) -> Tensor:
    rows = torch.arange(len(x))
    return torch.sparse_coo_tensor(torch.stack([rows, rows]), 1.5 * torch.ones(len(x)).to(x), (len(x), len(x)))


def diagonal(values: Tensor) -> Tensor:
    rows = torch.arange(len(values))
    return torch.sparse_coo_tensor(torch.stack([rows, rows.flip(0)]), values, (len(values), len(values)))


def hidden(net: nn.Module, x: Tensor) -> Tensor:
    return net.f(x).tanh()


F = torch.func
INSIDE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "sparse.mm": lambda net, x: net.g(torch.sparse.mm(net.A.to_sparse(), hidden(net, x).T).T),
    "csr @": lambda net, x: net.g((net.A.to_sparse_csr() @ hidden(net, x).T).T.tanh()),
    "csc @": lambda net, x: net.g((net.A.to_sparse_csc() @ hidden(net, x).T).T.tanh()),
    "addmm": lambda net, x: net.g(torch.sparse.addmm(hidden(net, x).T, net.A.to_sparse(), hidden(net, x).T).T),
    "over samples": lambda net, x: net.g(torch.sparse.mm(across_samples(x), hidden(net, x))),
    "sparse inputs": lambda net, x: net.g(torch.sparse.mm(x.to_sparse(), net.f.weight.T).tanh()),
    "sparse parameter": lambda net, x: net.g(torch.sparse.mm(diagonal(net.scale), hidden(net, x).T).T),
    "jvp": lambda net, x: net.g(F.jvp(lambda z: hidden(net, z), (x,), (x.cos(),))[1]),
    "vjp": lambda net, x: net.g(net.f(F.vjp(lambda z: hidden(net, z), x)[1](torch.ones(len(x), 4).to(x))[0])),
    "vmap": lambda net, x: F.vmap(lambda z: net.g(hidden(net, z)))(x),
    "grad": lambda net, x: net.g(net.f(F.vmap(F.grad(lambda z: hidden(net, z).sum()))(x)).tanh()),
    "jacrev": lambda net, x: net.g(F.vmap(F.jacrev(lambda z: hidden(net, z)))(x).sum(2)),
    "jacfwd": lambda net, x: net.g(F.vmap(F.jacfwd(lambda z: hidden(net, z)))(x).sum(2)),
    "hessian": lambda net, x: net.g(net.f(F.vmap(F.hessian(lambda z: hidden(net, z).sum()))(x).sum(1))),
    "functional_call": lambda net, x: net.g(F.functional_call(net.f, {"weight": 2 * net.f.weight}, (x,)).tanh()),
}


def by_differences(net: nn.Module, x: Tensor, y: Tensor, step: float) -> Tensor:
    """The Hessian of the risk by central differences of its gradient."""
    weights = list(net.parameters())

    def gradient() -> Tensor:
        found = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), weights, allow_unused=True)
        return torch.cat(
            [
                torch.zeros(p.numel()).to(p) if g is None else g.to_dense().flatten()
                for g, p in zip(found, weights, strict=True)
            ]
        )

    rows = []
    for p in weights:
        for k in range(p.numel()):
            at = p.detach().view(-1)
            at[k] += step
            above = gradient()
            at[k] -= 2 * step
            below = gradient()
            at[k] += step
            rows.append((above - below) / (2 * step))
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", INSIDE)
def test_sparse_operands_and_transforms_inside_forward(name: str, seed: int) -> None:
    """Numbers are those of differences of gradients over two steps, or undefined where torch's own are wrong."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = module_of(INSIDE[name], f=(3, 4), g=(4, 3))
        net.scale, net.A = nn.Parameter(torch.rand(4)), torch.rand(4, 4).triu()
        net.double().A = net.A.double()
        x, y = torch.randn(5, 3).double(), torch.arange(5) % 3
    H, finer = (by_differences(net, x, y, step) for step in (1e-4, 5e-5))
    assert torch.allclose(H, finer, atol=1e-6)
    names = ["hessian_trace", "sharpness(rtol=0.0001)", "ggn_trace"]
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), names)
    assert found["ggn_trace"].kind == "exact"
    truth = {"hessian_trace": float(H.trace()), "sharpness": float(torch.linalg.eigvalsh((H + H.T) / 2)[-1])}
    for measure, value in truth.items():
        one = found["sharpness(rtol=0.0001)" if measure == "sharpness" else measure]
        if one.kind == "undefined":  # torch's own second derivative of a sparse parameter is wrong
            assert name == "sparse parameter"
            assert "second derivatives of the network itself (Of) are wrong by" in one.note
        else:
            assert one.value == pytest.approx(value, rel=2e-3, abs=1e-6)
    assert all(
        one.kind != "undefined" or one.note
        for one in fl.measure(fl.Lens(fl.Problem(net, "mse", (x, x))), "pass").values()
    )
