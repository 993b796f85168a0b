"""Parameters that other tensors are made from: no per-sample autograd, and the sums of explicit Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl

X = torch.randn(7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))  # three tokens
Y = torch.tensor([0, 1, 2, 0, 1, 2, 1])


class Net(nn.Module):
    """A forward() of its own over the given parts; the mean over tokens and a linear layer follow."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.act, self.first, self.head = act, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self, self.first(x)).tanh().mean(1))


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
    "a slice of a weight": (lambda: Net(lambda s, h: h + F.linear(h, s.w[1:5]), w=free(6, 4)), {"w"}),
    "a weight in units of its size": (lambda: Net(lambda s, h: F.linear(h, s.w / s.w.norm()), w=free(4, 4)), {"w"}),
    "a weight of two factors": (
        lambda: Net(lambda s, h: h + F.linear(h, s.up @ s.down), up=free(4, 2), down=free(2, 4)), {"up", "down"}
    ),
    "a weight that also acts as it is": (lambda: Net(lambda s, h: F.linear(h, s.w) + F.linear(h, s.w.exp()),
                                                     w=free(4, 4)), {"w"}),
    "cross-attention": (
        lambda: Net(from_others, mha=nn.MultiheadAttention(4, 2, batch_first=True)),
        {"mha.in_proj_weight", "mha.in_proj_bias"},
    ),
    "a part of a table of positions": (lambda: Net(lambda s, h: h + s.place[:, : h.shape[1]], place=free(1, 5, 4)),
                                       {"place"}),
    "positions looked up for all samples at once": (
        lambda: Net(lambda s, h: h + s.place(torch.arange(h.shape[1])[None]), place=nn.Embedding(6, 4)),
        {"place.weight"},
    ),
    "a row that is looked up twice, and padding": (
        lambda: Net(lambda s, h: h * s.place(torch.tensor([[2, 0, 2]])).sin(),
                    place=nn.Embedding(6, 4, padding_idx=0)), {"place.weight"},
    ),
    "a table of distances": (lambda: Net(with_distances, table=free(5)), {"table"}),
    "a temperature": (lambda: Net(lambda s, h: h * s.t.exp(), t=free()), {"t"}),
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
    assert set(lens.layout.made) == made
    assert not lens.layout.unexplained
    report = fl.measure(lens, ["interpolation_sharpness", "ggn_trace", "adaptive_sharpness_ggn"])
    assert set(lens.layout.made) == made  # the plan held on every chunk
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


def test_what_depends_on_the_sample_is_not_taken_for_made() -> None:
    """A weight times a number of each sample goes through per-sample autograd, or is right all the same."""
    net = Net(lambda s, h: F.linear(h, s.w) * (s.w * h.detach().mean()).exp().sum(), w=free(4, 4)).double()
    problem = fl.Problem(net, "cross_entropy", (X[:1], Y[:1]))
    report = fl.measure(fl.Lens(problem), "interpolation_sharpness")
    S = sum(float(J.square().sum()) for J in jacobians(net, X[:1]).values())
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
