"""Every measure where something is missing, repeated, dead or far too sure of itself: a number, or why there is
none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from builders import mlp, normal
from networks import network
from torch import Tensor, nn

import flatlens as fl

torch.set_num_threads(1)

Case = tuple[nn.Module, Tensor, Tensor]


def small(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return mlp((4, 5, 5, 3), act, seed=1)


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(n, 4, seed=seed), torch.arange(n) % 3


def changed(net: nn.Sequential, change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    with torch.no_grad():
        change(net)
    return net


def confident(act: type[nn.Module], scale: float) -> Case:
    """Labels as predicted, logits far apart."""
    net, (x, _) = small(act), data(6)
    f = net(x).detach()
    gap = float((f.topk(2, 1).values @ torch.tensor([[1.0], [-1.0]], dtype=torch.float64)).min())
    changed(net, lambda net: [p.mul_(scale / gap) for p in net[4].parameters()])
    return net, x, net(x).argmax(1)


def zeroed(net: nn.Sequential) -> None:
    for p in net.parameters():
        p.zero_()


def dead(net: nn.Sequential) -> None:
    """No unit of the second layer is ever on."""
    net[2].weight.zero_()
    net[2].bias.fill_(-1)


def twin_outputs(net: nn.Sequential) -> None:
    net[4].weight[1] = net[4].weight[0]
    net[4].bias[1] = net[4].bias[0]


def narrow() -> Case:
    """More outputs than inputs, and a bottleneck between."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 4)).double()
        return net, torch.randn(5, 2).double(), torch.arange(5) % 4


def one_class() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    return net, data(5)[0], torch.zeros(5, dtype=torch.long)


def frozen(act: type[nn.Module], layers: tuple[int, ...]) -> Case:
    net = small(act)
    for layer in layers:
        net[layer].requires_grad_(False)
    return net, *data(5)


def duplicated() -> Case:
    net, (x, y) = small(nn.Tanh), data(2)
    return net, x.repeat(4, 1), y.repeat(4)


def convolutional(change: Callable[[nn.Module], object]) -> Case:
    net, x, y = network("cnn-relu-inplace", n=3)
    with torch.no_grad():
        change(net)
    return net, x, y


CASES: dict[str, Callable[[], Case]] = {
    "confident": lambda: confident(nn.ReLU, 15.0),
    "confident, smooth": lambda: confident(nn.Tanh, 15.0),
    "beyond doubt": lambda: confident(nn.ReLU, 800.0),
    "beyond doubt, smooth": lambda: confident(nn.Tanh, 800.0),
    "dead layer": lambda: (changed(small(), dead), *data(5)),
    "dead convolution": lambda: convolutional(lambda net: net[2].bias.fill_(-100)),
    "twin outputs": lambda: (changed(small(nn.Tanh), twin_outputs), *data(5)),
    "more outputs than inputs": narrow,
    "one sample": lambda: (small(nn.Tanh), *data(1)),
    "one sample, piecewise linear": lambda: (small(), *data(1)),
    "one output": one_class,
    "duplicate rows": duplicated,
    "zero input": lambda: (small(nn.Tanh), torch.zeros(3, 4).double(), torch.arange(3)),
    "zero weight": lambda: (changed(small(), lambda net: net[0].weight.zero_()), *data(5)),
    "zero weight, smooth": lambda: (changed(small(nn.GELU), lambda net: net[2].weight.zero_()), *data(5)),
    "zero last weight": lambda: (changed(small(nn.Tanh), lambda net: net[4].weight.zero_()), *data(5)),
    "zero kernel": lambda: convolutional(lambda net: net[0].weight.zero_()),
    "all parameters zero": lambda: (changed(small(nn.Tanh), zeroed), *data(5)),
    "a frozen layer": lambda: frozen(nn.ReLU, (2,)),
    "a frozen layer, smooth": lambda: frozen(nn.Tanh, (0,)),
    "all but the last frozen": lambda: frozen(nn.Tanh, (0, 2)),
    "a single layer": lambda: (nn.Linear(4, 3).double(), *data(5)),
    "a single layer, no bias": lambda: (nn.Linear(4, 1, bias=False).double(), *data(5)),
}  # fmt: skip

LEFT_OUT = ("test_loss", "test_accuracy", "generalisation_gap", "pac_bayes_flatness")
MEASURES = [*(name for name in fl.measures.MEASURES if name not in LEFT_OUT), "pac_bayes_flatness(probes=2)"]
OPTIONS = [
    "hessian_trace(exact=True)", "adaptive_sharpness(probes=2)", "sharpness(top_k=3, bottom_k=3, layers=True)",
    "ggn_norm(layers=True)", "spectral_density(ggn=True, layers=True)", "interpolation_gap(bound=True)",
    "relative_flatness(normalized='std')", "matrix_normalized_sharpness(frobenius=True)", "mls(softmax=True)",
]  # fmt: skip
CLASSES = [name for name in CASES if name != "one output" and "no bias" not in name]


def require_numbers_or_reasons(report: fl.Report) -> None:
    for (key, at), e in report.items():
        where = f"{key} at {at}: {e}"
        if e.kind == "undefined":
            assert e.note.strip(), where
        else:
            assert math.isfinite(e.value), where
            assert math.isfinite(e.margin), where
            for name, values in e.arrays.items():
                assert bool(torch.isfinite(values).all()), f"{where}: {name}"


@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error"])
@pytest.mark.parametrize("kind", CASES)
def test_every_measure_has_a_number_or_says_why_not(kind: str, loss: str) -> None:
    net, x, y = CASES[kind]()
    if kind not in CLASSES:
        if loss == "cross_entropy" and kind != "one output":
            return
        y = y if loss == "cross_entropy" else y[:, None].double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lens = fl.Lens(fl.Problem(net, loss, (x, y)))
        require_numbers_or_reasons(fl.measure(lens, [*MEASURES, *OPTIONS]))


@pytest.mark.parametrize("kind", ["confident", "beyond doubt, smooth", "dead layer", "zero weight, smooth"])
def test_in_single_precision(kind: str) -> None:
    net, x, y = CASES[kind]()
    require_numbers_or_reasons(fl.measure(fl.Lens(fl.Problem(net.float(), "cross_entropy", (x, y))), MEASURES))


def test_a_confident_network_is_flat_but_not_exactly() -> None:
    net, x, y = CASES["confident"]()
    report = fl.measure(
        fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["loss", "sharpness", "ggn_norm", "hessian_trace"]
    )
    assert 0 < report["loss"].value < 1e-6
    for key in ("sharpness", "ggn_norm", "hessian_trace"):
        assert 0 < report[key].value < 1


def test_nothing_is_measured_at_all() -> None:
    net, x, y = frozen(nn.Tanh, (0, 2, 4))
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["ggn_trace", "hessian_trace", "mls"])
    assert report["ggn_trace"].kind == report["hessian_trace"].kind == "undefined"
    assert report["mls"].kind == "exact"
    for key in ("sharpness", "ggn_norm", "fisher_rao.parameters", "spectral_density"):
        name = key.partition(".")[0]
        estimate = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [name])[key]
        assert estimate.kind == "undefined"
        assert "no parameter is measured" in estimate.note
