"""Coarser products: only on request, said in every report, and never in what is made of the derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput, BadModel
from flatlens.models import LeNet5, ViT

NETWORKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)), torch.randn(30, 6)),
    "lenet": lambda: (LeNet5().build(), torch.randn(8, 3, 32, 32)),
    "vit": lambda: (ViT(image=8, width=16, depth=1, heads=2).build(), torch.randn(6, 3, 8, 8)),
}
MEASURES = ["mls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn", "log_volume", "hessian_trace"]


def measured(name: str, **options: str) -> fl.Report:
    torch.manual_seed(0)
    net, x = NETWORKS[name]()
    problem = fl.Problem(net, "cross_entropy", (x, torch.zeros(len(x), dtype=torch.long)), **options)
    return fl.measure(fl.Lens(problem), MEASURES)


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_is_near_and_not_the_same(name: str) -> None:
    full, coarse = measured(name), measured(name, arithmetic="bfloat16")
    for measure in MEASURES:
        a, b = full[measure], coarse[measure]
        if measure == "log_volume":  # its small eigenvalues drown
            assert b.kind == "undefined"
        else:
            assert b.kind == a.kind, measure
            assert b.value == pytest.approx(a.value, rel=0.1, abs=0.1), measure
    assert coarse["interpolation_sharpness"].value != full["interpolation_sharpness"].value
    assert coarse["interpolation_sharpness"].value == pytest.approx(full["interpolation_sharpness"].value, rel=0.03)
    assert list(coarse.about["layers"]) == list(full.about["layers"])  # how it is built is seen in full
    assert coarse.about["by_autograd"] == full.about["by_autograd"]


def test_every_report_says_it() -> None:
    assert measured("mlp").about["arithmetic"] == "full"
    assert measured("mlp", arithmetic="bfloat16").about["arithmetic"] == "bfloat16"


def test_losses_and_outputs_stay_in_full_precision() -> None:
    """Whatever else is asked for with them, and takes a pass in bfloat16."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20, bias=False), nn.ReLU(), nn.Linear(20, 3, bias=False))  # homogeneous
    data = torch.randn(30, 6), torch.randint(0, 3, (30,))
    asked = ["ggn_trace", "loss", "output_norm", "fisher_rao", "accuracy"]
    full, coarse = (
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data, arithmetic=arithmetic)), asked)
        for arithmetic in ("full", "bfloat16")
    )
    assert coarse["ggn_trace"].value != pytest.approx(full["ggn_trace"].value, rel=1e-5)
    for measure in ("loss", "output_norm", "fisher_rao", "accuracy"):
        assert coarse[measure].value == pytest.approx(full[measure].value, rel=1e-12), measure
    assert coarse["fisher_rao"].note == full["fisher_rao"].note == ""


def test_autocast_around_it_changes_nothing() -> None:
    """Who trains under autocast has not asked for coarse measures."""
    full = measured("mlp")
    with torch.autocast("cpu", torch.bfloat16):
        same = measured("mlp")
    for measure in MEASURES:
        assert same[measure].value == full[measure].value, measure


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arithmetic": "half"}, "'full', 'tf32' or 'bfloat16'"),
        ({"arithmetic": "tf32"}, "only for CUDA devices, and the network is on cpu"),
        ({"arithmetic": "bfloat16", "dtype": torch.float64}, "measured in float32"),
    ],
)
def test_what_would_change_nothing_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        fl.Problem(nn.Linear(2, 2), "cross_entropy", (torch.ones(3, 2), torch.zeros(3).long()), **options)


def test_differences_and_checks_are_in_full() -> None:
    """What compares outputs must not see their rounding."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)), torch.randn(60, 6)
    data = x, torch.zeros(60).long()
    full, coarse = (fl.Problem(net, "cross_entropy", data, arithmetic=a) for a in ("full", "bfloat16"))
    for measure in ("mls_by_search", "average_sharpness", "feature_robustness"):
        values = [fl.measure(fl.Lens(problem), [measure])[measure].value for problem in (full, coarse)]
        assert values[0] == values[1], measure
    coupled = module_of(lambda net, x: net.linear(x) - net.linear(x).mean(0), linear=(6, 3))
    with pytest.raises(BadInput, match="outputs change with the other samples"):
        fl.Problem(coupled, "cross_entropy", data, arithmetic="bfloat16")
    with pytest.raises(BadInput, match="full precision"):
        fl.check_bounds(fl.Lens(coarse))
    with pytest.raises(BadInput, match="measured in float32"):
        fl.Problem(nn.Linear(6, 3).double(), "cross_entropy", data, arithmetic="bfloat16")
    other = fl.Problem(deepcopy(net), "cross_entropy", data, arithmetic="bfloat16")
    compared = fl.compare({"a": fl.Lens(coarse), "b": fl.Lens(other)}, ["mls"])
    assert compared.rounding == pytest.approx(2**-3.5)
    assert len(compared.frame())


def test_a_network_that_cannot_be_copied_is_not_measured_in_another_precision() -> None:
    net = nn.Linear(3, 2)
    net.lock = threading.Lock()
    with pytest.raises(BadModel, match=r"measuring in float64 needs a copy .*cannot pickle"):
        fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)), dtype=torch.float64)
