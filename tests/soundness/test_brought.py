"""Networks that people bring, each once measured wrong, or met with a traceback, by a plan read off the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

import flatlens as fl


def free(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Shifted(nn.Linear):
    """Adds what its input is repeated for."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__(width, outputs)
        self.shift = free(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + self.shift, self.weight, self.bias)


class Both(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight, self.bias), x


class Flattened(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2)


def one_bias() -> nn.Linear:
    layer = nn.Linear(4, 5)
    layer.bias = free(1)
    return layer


def rare(s: Any, x: Tensor) -> Tensor:
    return s.o(s.a(x).tanh() + F.relu(x[:, :1] - 1.9) * F.embedding(torch.arange(8), s.E).sum(0))


def filtered(s: Any, x: Tensor) -> Tensor:
    return s.o(torch.fft.irfft(torch.fft.rfft(s.a(x)) * s.g, n=6))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a bias of one entry": (lambda: module_of(lambda s, x: s.o(F.linear(x, s.w, s.b).tanh()), w=free(5, 4),
                                              b=free(1), o=(5, 3)), 4),
    "a layer with a bias of one entry": (lambda: nn.Sequential(one_bias(), nn.Tanh(), nn.Linear(5, 3)), 4),
    "a sum that repeats a product": (
        lambda: module_of(lambda s, x: s.o((F.linear(x, s.w).unsqueeze(2) + s.b).relu().sum(1)), w=free(5, 4),
                          b=free(5), o=(5, 3)), 4),
    "a sum that repeats the input": (lambda: nn.Sequential(Shifted(1, 4, 5), nn.Tanh(), nn.Linear(5, 3)), 1),
    "a bias before its weight": (lambda: module_of(lambda s, x: s.o(F.linear(x, s.w, s.b).tanh()), b=free(5),
                                                   w=free(5, 4), o=(5, 3)), 4),
    "a gain on frequencies": (lambda: module_of(filtered, a=nn.Linear(4, 6), g=free(4), o=(6, 3)), 4),
    "a table that is rarely read": (lambda: module_of(rare, a=nn.Linear(4, 5), E=free(8, 5), o=(5, 3)), 4),
    "a layer that gives a tuple": (lambda: module_of(lambda s, x: s.o(s.a(x)[0].tanh()), a=Both(4, 5), o=(5, 3)), 4),
    "a layer mapped over samples": (
        lambda: module_of(lambda s, x: torch.func.vmap(lambda z: s.o(s.a(z).tanh()))(x), a=(4, 5), o=(5, 3)), 4),
    "a convolution that flattens": (
        lambda: module_of(lambda s, x: s.o(s.c(x.reshape(-1, 1, 2, 2)).flatten(1).tanh()),
                          c=Flattened(1, 2, 2, padding=1), o=(18, 3)), 4),
}  # fmt: skip


def truth(net: nn.Module, batches: list[Tensor]) -> tuple[float, float]:
    """(S, MLS), one backward pass for each sample and output."""
    total, norms = 0.0, []
    for x in (one[None].clone().requires_grad_() for batch in batches for one in batch):
        rows, own = [], list(net.parameters())
        for output in net(x)[0]:
            slopes = torch.autograd.grad(
                output, [x, *own], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(slopes[0].flatten())
            total += sum(float(slope.square().sum()) for slope in slopes[1:])
        norms.append(float(torch.linalg.matrix_norm(torch.stack(rows), 2)))
    return total / len(norms), sum(norms) / len(norms)


@pytest.mark.parametrize("memory", ["1GiB", 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_what_brute_force_says(name: str, memory: str | int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, width = NETWORKS[name]
        net, x = make().double(), torch.randn(40, width, dtype=torch.float64)
    S, mls = truth(net, [x])
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.arange(40) % 3), memory=memory)), "pass")
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
    assert report["mls"].value == pytest.approx(mls, rel=1e-10)
    assert all("\n" not in estimate.note for estimate in report.values())


def test_longer_sequences_after_the_probes() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = module_of(lambda s, x: s.o(s.a(x).relu().sum(1)), a=(4, 5), o=(5, 3)).double()
        batches = [torch.randn(4, T, 4, dtype=torch.float64) for T in (1, 1, 1, 6, 6, 6)]
    loader = DataLoader([(x, torch.arange(4) % 3) for x in batches], batch_size=None)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", loader)), ["interpolation_sharpness", "mls"])
    S, mls = truth(net, batches)
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
    assert report["mls"].value == pytest.approx(mls, rel=1e-10)


def test_a_cached_parametrisation_is_made_anew() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
    data = (torch.randn(10, 4).double(), torch.arange(10) % 3)
    plain = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), "interpolation_sharpness")
    with parametrize.cached():
        cached = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), "interpolation_sharpness")
    assert cached["interpolation_sharpness"].value == plain["interpolation_sharpness"].value


def test_what_autograd_refuses_is_one_line() -> None:
    def act(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        z = F.linear(h, s.w)
        h.relu_()  # z's slope in w is gone
        return s.o(torch.tanh(z) + h)

    frozen = nn.Parameter(torch.randn(5, 5), requires_grad=False)
    net = module_of(act, a=(4, 5), w=frozen, o=(5, 3)).double()
    problem = fl.Problem(net, "cross_entropy", (torch.randn(10, 4).double(), torch.arange(10) % 3))
    report = fl.measure(fl.Lens(problem), "pass")
    assert report["loss"].kind == "exact"
    assert "do not change tensors or frozen parameters in place" in report["mls"].note
    assert "\n" not in report["mls"].note


@pytest.mark.parametrize("normalize", ["std", "variance"])
def test_flatness_in_units_of_features_that_are_not_told_apart(normalize: str) -> None:
    def act(s: Any, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        h = s.a(x)
        return s.o(h.index_add(0, chosen, s.b(h[chosen])).relu())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = module_of(act, a=(4, 5), b=(5, 5), o=(5, 3)).double()
        x = torch.randn(30, 4, dtype=torch.float64)
    key = f"relative_flatness_ggn(normalized={normalize!r})"
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.arange(30) % 3))), key)
    assert report[key, "b"].kind == "undefined"
    assert "samples of a batch" in report[key, "b"].note
    assert report[key, "a"].kind == "exact"
