"""Parameters that other tensors are made from: no per-sample autograd, and the sums of explicit Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.grams import lay_out
from flatlens.grams.record import run_recorded

X = torch.randn(7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))  # three tokens
Y = torch.tensor([0, 1, 2, 0, 1, 2, 1])


def of(act: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """A forward() of its own over the given parts; the mean over tokens and a linear layer follow."""
    return module_of(lambda net, x: net.head(act(net, net.first(x)).tanh().mean(1)), **parts, first=(4, 4), head=(4, 3))


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def from_others(s: Any, h: Tensor) -> Tensor:
    """Attention of the tokens to their own squares: the fused weight is split."""
    return s.mha(h, h * h, h * h, need_weights=False)[0]


def with_distances(s: Any, h: Tensor) -> Tensor:
    """Scores with a bias that a table of distances holds."""
    distance = torch.arange(3)[:, None] - torch.arange(3) + 2
    return (h @ h.mT + s.table[distance]).softmax(-1) @ h


NETWORKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a slice of a weight": (lambda: of(lambda s, h: h + F.linear(h, s.w[1:5]), w=free(6, 4)), {"w"}),
    "a weight in units of its size": (lambda: of(lambda s, h: F.linear(h, s.w / s.w.norm()), w=free(4, 4)), {"w"}),
    "a weight of two factors": (
        lambda: of(lambda s, h: h + F.linear(h, s.up @ s.down), up=free(4, 2), down=free(2, 4)), {"up", "down"}
    ),
    "a weight that also acts as it is": (lambda: of(lambda s, h: F.linear(h, s.w) + F.linear(h, s.w.exp()),
                                                     w=free(4, 4)), {"w"}),
    "cross-attention": (
        lambda: of(from_others, mha=nn.MultiheadAttention(4, 2, batch_first=True)),
        {"mha.in_proj_weight", "mha.in_proj_bias"},
    ),
    "a part of a table of positions": (lambda: of(lambda s, h: h + s.place[:, : h.shape[1]], place=free(1, 5, 4)),
                                       {"place"}),
    "positions looked up for all samples at once": (
        lambda: of(lambda s, h: h + s.place(torch.arange(h.shape[1])[None]), place=nn.Embedding(6, 4)),
        {"place.weight"},
    ),
    "a row that is looked up twice, and padding": (
        lambda: of(lambda s, h: h * s.place(torch.tensor([[2, 0, 2]])).sin(),
                    place=nn.Embedding(6, 4, padding_idx=0)), {"place.weight"},
    ),
    "a table of distances": (lambda: of(with_distances, table=free(5)), {"table"}),
    "a weight and its transpose": (lambda: of(lambda s, h: F.linear(F.linear(h, s.w).tanh(), s.w.T), w=free(5, 4)),
                                   {"w"}),
    "a temperature": (lambda: of(lambda s, h: h * s.t.exp(), t=free()), {"t"}),
}  # fmt: skip


def jacobians(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """df/dtheta of each parameter, (n, N, size), by a backward pass for each sample and output."""
    named = dict(net.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for one in x.split(1):
        for output in net(one)[0]:
            gradients = torch.autograd.grad(
                output, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for name, gradient in zip(named, gradients, strict=True):
                rows[name].append(gradient.flatten())
    return {name: torch.stack(each).reshape(len(x), -1, named[name].numel()) for name, each in rows.items()}


@pytest.mark.parametrize("memory", ["1GiB", 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_over_parameters_are_those_of_explicit_jacobians(name: str, memory: str | int) -> None:
    make, made = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double().eval()
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (X, Y), memory=memory))
    assert set(lens.plan.derived) == made
    assert not lens.plan.unexplained
    report = fl.measure(lens, ["interpolation_sharpness", "ggn_trace", "adaptive_sharpness_ggn"])
    assert set(lens.plan.derived) == made  # the plan held on every chunk
    p = net(X).detach().softmax(1)
    C = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    S = trace = adaptive = 0.0
    for key, M in jacobians(net, X).items():
        weighted = torch.einsum("nka,nkl,nla->na", M, C, M).mean(0)
        S += float(M.square().sum((1, 2)).mean())
        trace += float(weighted.sum())
        adaptive += float((weighted * net.get_parameter(key).detach().flatten().square()).sum())
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
    assert report["ggn_trace"].value == pytest.approx(trace, rel=1e-10)
    assert report["adaptive_sharpness_ggn"].value == pytest.approx(adaptive, rel=1e-10)


def tied() -> nn.Module:
    """A causal model in small: its table is read by ids, and multiplies the last features; ids 0 are padding."""

    def forward(net: nn.Module, ids: Tensor) -> Tensor:
        h = net.embed(ids) + net.place(torch.arange(ids.shape[1])[None])
        return net.head(net.mix(h).tanh().mean(1))

    net = module_of(
        forward,
        embed=nn.Embedding(5, 4, padding_idx=0),
        place=nn.Embedding(6, 4),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, 5, bias=False),
    )
    net.head.weight = net.embed.weight
    return net


def test_a_tied_head_is_one_weight() -> None:
    """Sums are those of explicit Jacobians, and relative flatness is Definition 3 by explicit double backward."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = tied().double().eval()
        with torch.no_grad():
            net.embed.weight[0] = torch.randn(4)
    ids, y = torch.tensor([[1, 2, 2], [3, 0, 4], [4, 4, 1], [2, 1, 0]]), torch.tensor([1, 4, 0, 2])
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (ids, y)))
    assert set(lens.plan.derived) == {"embed.weight", "place.weight"}
    report = fl.measure(lens, ["interpolation_sharpness", "relative_flatness", "relative_flatness_ggn", "kappa_trace"])
    S = sum(float(M.square().sum((1, 2)).mean()) for M in jacobians(net, ids).values())
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
    W = net.head.weight
    (g,) = torch.autograd.grad(F.cross_entropy(net(ids), y), W, create_graph=True)
    H = torch.stack([torch.autograd.grad(e, W, retain_graph=True)[0] for e in g.flatten()]).reshape(5, 4, 5, 4)
    literal = float(torch.einsum("si,ti,sktk->", W.detach(), W.detach(), H))
    assert report["relative_flatness", "head"].value == pytest.approx(literal, rel=1e-9)
    kappa = float(W.detach().square().sum()) * float(torch.einsum("sksk->", H))
    assert report["kappa_trace", "head"].value == pytest.approx(kappa, rel=1e-9)
    p = net(ids).detach().softmax(1)
    C = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    M = torch.einsum("si,nksj->nkij", W.detach(), jacobians(net, ids)["embed.weight"].reshape(4, 5, 5, 4)).flatten(2)
    ggn = float(torch.einsum("nka,nkl,nla->n", M, C, M).mean())
    assert report["relative_flatness_ggn", "head"].value == pytest.approx(ggn, rel=1e-10)


def test_what_depends_on_the_sample_is_not_taken_for_made() -> None:
    """A weight times a number of each sample goes through per-sample autograd, or is right all the same."""
    net = of(lambda s, h: F.linear(h, s.w) * (s.w * h.detach().mean()).exp().sum(), w=free(4, 4)).double()
    problem = fl.Problem(net, "cross_entropy", (X[:1], Y[:1]))
    report = fl.measure(fl.Lens(problem), "interpolation_sharpness")
    S = sum(float(J.square().sum()) for J in jacobians(net, X[:1]).values())
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)


def test_a_chunk_of_one_sample_keeps_the_plan() -> None:
    """A token expanded to one sample is not repeated, and is still read with samples."""
    net = of(lambda s, h: torch.cat([s.token.expand(len(h), 1, 4), h], 1), token=free(1, 1, 4)).double()
    problem = fl.Problem(net, "cross_entropy", (X, Y))
    plan = lay_out(problem, net)
    assert plan.small_parameters.count("token") == 1
    for raw in problem.batches(1):
        batch = problem.place(raw)
        with problem.measuring(net):
            tape, inputs, _, _ = run_recorded(problem, net, batch)
        plan.require_same(tape, inputs, batch)
