"""Second derivatives in a pre-activation, where torch's batched backward passes are wrong or refused."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl


def gated() -> nn.Module:
    """A learnt filter in frequency above a layer: the outputs are affine in the layer, and the slope has a graph."""
    return module_of(
        lambda net, x: net.out(torch.fft.irfft(torch.fft.rfft(net.a(x)) * net.w, n=8)),
        a=nn.Linear(3, 8),
        w=nn.Parameter(torch.randn(5)),
        out=(8, 2),
    )


def normed(groups: int, channels: int, act: nn.Module, *, affine: bool = True) -> nn.Module:
    """Return a network with a group norm below a smooth or kinked activation."""
    norm = nn.GroupNorm(groups, channels, affine=affine)
    return nn.Sequential(nn.Conv2d(1, channels, 1), norm, act, nn.Flatten(), nn.LazyLinear(2))


NETWORKS = {
    "samples, channels and positions alike": (lambda: normed(1, 4, nn.GELU()), (4, 1, 2, 2)),
    "samples as many as channels of a group": (lambda: normed(1, 3, nn.Tanh(), affine=False), (3, 1, 1, 1)),
    "one sample": (lambda: normed(4, 4, nn.Tanh(), affine=False), (1, 1, 2, 2)),
    "no sizes alike": (lambda: normed(2, 8, nn.SiLU()), (5, 1, 2, 3)),
    "two norms, kinks alone": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.GroupNorm(3, 6), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
        ),
        (7, 1, 3, 3),
    ),
    "a gate above": (gated, (6, 3)),
}  # fmt: skip


def trace_by_double_backward(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return Tr H, one backward pass of the gradient for each parameter."""
    parameters, total = list(net.parameters()), 0.0
    gradient = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
    for p, slope in zip(parameters, gradient, strict=True):
        for j, entry in enumerate(slope.flatten() if slope.requires_grad else ()):
            (row,) = torch.autograd.grad(entry, [p], retain_graph=True, allow_unused=True)
            total += 0.0 if row is None else float(row.flatten()[j])
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_the_trace_is_that_of_double_backward(name: str) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    net, x, y = build().double(), torch.randn(*shape, dtype=torch.float64), torch.arange(shape[0]) % 2
    net(x)  # a lazy layer learns its size
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["hessian_trace(exact=True)"])
    trace = found["hessian_trace(exact=True)"]
    assert trace.kind == "exact"
    assert trace.value == pytest.approx(trace_by_double_backward(net, x, y), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("pool", [nn.Identity, lambda: nn.MaxPool2d(2)])
def test_channels_last_is_no_lack_of_memory(pool: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        pool(),
        nn.Conv2d(4, 5, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 2),
    ).double()
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4) % 2
    values = []
    for layout in (torch.contiguous_format, torch.channels_last):
        problem = fl.Problem(net.to(memory_format=layout), "cross_entropy", (x.contiguous(memory_format=layout), y))
        values.append(fl.measure(fl.Lens(problem), ["hessian_trace(rtol=0.01)"])["hessian_trace(rtol=0.01)"])
    assert [value.kind for value in values] == ["exact", "exact"]
    assert values[0].value == pytest.approx(values[1].value, rel=1e-9)


def cells(cell: type[nn.LSTMCell] | type[nn.GRUCell]) -> nn.Module:
    """Two steps of a cell that torch.func cannot differentiate for several directions at once."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 3)
        for step in range(x.shape[1]):
            if isinstance(net.cell, nn.LSTMCell):
                h, c = net.cell(x[:, step], (h, c))
            else:
                h = net.cell(x[:, step], h)
        return net.out(h)

    return module_of(forward, cell=cell(2, 3), out=(3, 2))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("name", ["cell.weight_ih", "cell.weight_hh"])
def test_relative_flatness_of_cells_is_its_definition(cell: type[nn.LSTMCell] | type[nn.GRUCell], name: str) -> None:
    torch.manual_seed(0)
    net, x, y = cells(cell).double(), torch.randn(4, 2, 2, dtype=torch.float64), torch.arange(4) % 2
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["relative_flatness"])
    W = dict(net.named_parameters())[name]
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y), [W], create_graph=True)
    rows = [torch.autograd.grad(entry, [W], retain_graph=True)[0] for entry in gradient.flatten()]
    H = torch.stack(rows).reshape(*W.shape, *W.shape)
    truth = torch.einsum("sm,tm,sjtj->", W.detach(), W.detach(), H)
    assert found["relative_flatness", name].kind == "exact"
    assert found["relative_flatness", name].value == pytest.approx(float(truth), rel=1e-8, abs=1e-12)


def test_a_forward_with_torch_func_inside() -> None:
    """Its graph cannot be watched while it is built; the curvature exists all the same."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return net.b(net.a(x).tanh()).squeeze(-1)

        return torch.cat([energy(x)[:, None], torch.func.vmap(torch.func.grad(energy))(x)], 1)

    torch.manual_seed(0)
    net = module_of(forward, a=(2, 4), b=(4, 1)).double()
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    found = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, y))), ["loss", "sharpness(rtol=1e-8)"])
    parameters = list(net.parameters())
    slopes = torch.autograd.grad(F.mse_loss(net(x), y), parameters, create_graph=True)
    rows = []
    for entry in torch.cat([slope.flatten() for slope in slopes]):
        row = torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    largest = torch.linalg.eigvalsh(torch.stack(rows))[-1]
    assert found["sharpness(rtol=1e-08)"].value == pytest.approx(float(largest), rel=1e-6)
