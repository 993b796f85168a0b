"""Numbers of a CUDA device beside those of the processor in float64; skipped where there is no device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.training import SGD, Training
from flatlens.training.stack import Member, train_together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ONE_PASS = ["mls", "relative_flatness_ggn", "ggn_trace", "local_volume", "loss", "accuracy"]
PRODUCTS = ["sharpness(rtol=1e-05)", "critical_sharpness", "directional_sharpness(along='gradient')"]
NETWORKS = {
    "dense": ((8,), lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))),
    "convolutions": (
        (3, 8, 8),
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4)
        ),
    ),
    "attention": (
        (5, 8),
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(40, 4)
        ),
    ),
}


def problems(name: str) -> tuple[fl.Problem, fl.Problem]:
    """The same problem on the device in float32, and on the processor in float64."""
    shape, build = NETWORKS[name]
    torch.manual_seed(0)
    net, x, y = build(), torch.randn(24, *shape), torch.arange(24) % 4
    there = fl.Problem(copy.deepcopy(net).cuda(), "cross_entropy", (x.cuda(), y.cuda()))
    return there, fl.Problem(net.double(), "cross_entropy", (x.double(), y))


@pytest.mark.parametrize("name", NETWORKS)
def test_measures_are_those_of_the_processor(name: str) -> None:
    found, wanted = (fl.measure(fl.Lens(one), [*ONE_PASS, *PRODUCTS]) for one in problems(name))
    for key, estimate in wanted.items():
        assert found[key].value == pytest.approx(estimate.value, rel=1e-3, abs=1e-5, nan_ok=True), key


def test_data_on_the_processor_travel_chunk_by_chunk() -> None:
    there, here = problems("dense")
    x, y = next(here.data.chunks(99))
    apart = fl.Problem(there.model, "cross_entropy", (x.float(), y))
    assert fl.measure(fl.Lens(apart), "mls")["mls"].value == pytest.approx(
        fl.measure(fl.Lens(there), "mls")["mls"].value, rel=1e-5
    )


def test_networks_on_the_device_are_trained_alone_and_say_why() -> None:
    x, y = torch.randn(16, 8, device="cuda"), torch.arange(16, device="cuda") % 4
    nets = [nn.Linear(8, 4).cuda() for _ in range(2)]
    members = [Member(net, (x, y), Training(SGD(0.1), batch_size=4, max_steps=8)) for net in nets]
    assert [one.why_alone for one in train_together(members)] == ["only networks on the CPU are stacked"] * 2
