"""Adapters: z = W phi + b of every type of layer, and of what autograd saved of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.operations.graph import Graph
from flatlens.operations.layers import is_linear, layer_of
from flatlens.operations.parameter_uses import Product, reads_of

LAYERS = {
    "dense": (nn.Linear(4, 5), (4,)),
    "tokens": (nn.Linear(4, 5), (7, 4)),
    "grouped line": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (4, 11)),
    "plane, same": (nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2), (4, 8, 7)),
    "volume, circular": (nn.Conv3d(2, 4, 2, padding=1, padding_mode="circular"), (2, 4, 4, 5)),
    "transposed, grouped line": (
        nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=3), (4, 7)),
    "transposed plane": (nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (2, 1), (1, 2)), (4, 5, 4)),
    "transposed volume": (nn.ConvTranspose3d(2, 4, 2, stride=2, padding=1), (2, 4, 4, 5)),
    "transposed, cropped beyond its kernel": (nn.ConvTranspose1d(4, 6, 2, padding=3), (4, 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_matrix_times_its_patches(name: str) -> None:
    module, size = LAYERS[name]
    module = module.double()
    assert is_linear(module)
    adapter, x = layer_of(module), torch.randn(3, *size, dtype=torch.float64)
    z, W = module(x), adapter.matrix(module.weight)
    assert module.bias is not None
    by_hand = W @ adapter.patches(x, 3) + module.bias.reshape(adapter.groups, -1, 1)
    assert torch.allclose(by_hand, adapter.by_position(z, 3), rtol=1e-12, atol=1e-13)
    assert torch.equal(adapter.as_stored(W, module.weight.shape), module.weight)
    without_bias = adapter.by_position(adapter.apply(x, module.weight), 3)
    assert torch.allclose(W @ adapter.patches(x, 3), without_bias, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
def test_the_graph_shows_the_same_product(name: str) -> None:
    module, size = LAYERS[name]
    module = module.double()
    f = module(torch.randn(3, *size, dtype=torch.float64, requires_grad=True))
    (read,) = reads_of(Graph(f), module.weight) or ()
    assert isinstance(read, Product)
    assert read.stored == module.weight.shape
    W, phi = read.adapter.matrix(module.weight), read.adapter.patches(read.kept(), 3)
    assert module.bias is not None
    z = W @ phi + module.bias.reshape(read.adapter.groups, -1, 1)
    assert torch.allclose(z, layer_of(module).by_position(f, 3), rtol=1e-12, atol=1e-13)


def test_transposed_convolutions_have_rows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)).double()
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.arange(5) % 2))), "pass")
    for measure in ("relative_flatness", "neuron_flatness", "mls", "weight_norm.spectral"):
        assert report[measure, "0"].kind == "exact"
