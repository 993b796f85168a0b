"""What a forward pass hides from autograd is noticed; ordinary networks hide nothing."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from networks import module_of
from torch import nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.models import VGG11, ViT
from flatlens.operations.graph import Graph
from flatlens.perturbation import autograd_check, hidden_operations
from flatlens.perturbation.hidden_operations import Sight


class SameForward(torch.autograd.Function):
    """The identity, which runs no operation; its derivative is said to be 2."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope


def hooked(h):
    h = h * 1
    h.register_hook(torch.neg)
    return h


def counted_apart(h):
    with torch.no_grad():
        size = h.abs().mean()
    return h / size


def packed(h):
    with torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda kept: kept):
        return h * h


def elsewhere(h):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: h * h.detach()).result()


def written(h):
    h = h.clone()
    h.data.mul_(2)
    return h


HIDDEN = {
    "function that returns its input": SameForward.apply,
    "hook on a gradient": hooked,
    "no_grad": counted_apart,
    "detach": lambda h: h * torch.sigmoid(h).detach(),
    "data": lambda h: h * h.data,
    "written behind autograd": written,
    "another thread": elsewhere,
    "number": lambda h: h * h.sum().item(),
    "list": lambda h: h * h.detach().tolist()[0][0],
    "NumPy": lambda h: h + torch.from_numpy(np.round(h.detach().numpy())),
    "kept tensors are changed": packed,
    "rounding": lambda h: torch.round(8 * h) / 8,
    "division that rounds": lambda h: torch.div(h, 0.1, rounding_mode="floor"),
    "lookup by frequency": lambda h: F.embedding(torch.tensor([0, 0, 1, 2]), h, scale_grad_by_freq=True),
    "half type": lambda h: h.bfloat16().float(),
    "autograd inside": lambda h: torch.autograd.grad(h.square().sum(), h, create_graph=True)[0],
    "sparse product": lambda h: torch.sparse.mm(torch.eye(len(h)).to_sparse(), h),
    "gradient of torch.func": lambda h: torch.func.grad(lambda z: z.square().sum())(h),
    "comparison": lambda h: h * (h > 0),
}
SHOWN = {
    "in place": lambda h: h.mul(2).relu_(),
    "constants by any operation": lambda h: h.masked_fill(torch.arange(8) > 4, 0.0) + torch.full((8,), 1.5).round(),
    "slices": lambda h: torch.cat([h[:, :3], h.flip(1)[:, 3:]], 1),
    "vmap": torch.vmap(lambda z: z.exp()),
    "softmax": lambda h: torch.softmax(h, 1),
}


def sees_all(network: nn.Module, x: torch.Tensor) -> bool:
    x = x.clone().requires_grad_()
    with Sight([x, *network.parameters()]) as sight:
        f = network(x)
    return sight.sees(Graph(f))


def around(between) -> nn.Module:
    return module_of(lambda net, x: net.fc2(net.between(net.fc1(x))), fc1=(5, 8), fc2=(8, 3), between=between)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_is_noticed(name):
    torch.manual_seed(0)
    assert not sees_all(around(HIDDEN[name]), torch.randn(4, 5))


@pytest.mark.parametrize("name", SHOWN)
def test_torchs_own_operations_hide_nothing(name):
    torch.manual_seed(0)
    assert sees_all(around(SHOWN[name]), torch.randn(4, 5))


def test_fast_products_of_the_environment_are_noticed(monkeypatch):
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
    assert not sees_all(nn.Linear(5, 3), torch.randn(4, 5))


def test_an_older_torch_that_does_not_tell_what_autograd_keeps_is_not_relied_on(monkeypatch):
    monkeypatch.setattr(hidden_operations, "_KEPT", None)
    assert not sees_all(nn.Linear(5, 3), torch.randn(4, 5))


NETWORKS = {
    "convolutions and BatchNorm": (lambda: VGG11(width=1 / 16, classes=3).build(), (3, 32, 32)),
    "ViT": (lambda: ViT(image=16, patch=4, width=16, depth=1, heads=2, classes=3).build(), (3, 16, 16)),
    "recurrence": (
        lambda: module_of(lambda net, x: net.lstm(x)[0][:, -1], lstm=nn.LSTM(5, 3, batch_first=True)),
        (4, 5),
    ),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), (5,)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_ordinary_network_takes_no_random_directions(name, monkeypatch):
    """Its derivative is looked at along the gradient alone: one difference, or more beside a kink."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    x = {"input_ids": torch.randint(9, (6, 5))} if shape is None else torch.randn(6, *shape)
    problem = fl.Problem(build(), "mse", (x, torch.zeros(6, 3)))
    asked, words = [], autograd_check._Combination.words
    noted = lambda own, random: asked.append(random) or words(own, random)  # noqa: E731
    monkeypatch.setattr(autograd_check._Combination, "words", noted)
    monkeypatch.setattr(autograd_check, "_out_of_sight", lambda *given: pytest.fail("a half type was looked for"))
    assert autograd_check.other_derivative(problem, problem.measured()) == ("", "")
    assert asked == [0]
