"""Each entry by its modules, functions and methods: all of them do the same, and what the table says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import SquaredReLU
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from flatlens.operations.table import OPERATIONS, Operation, hooked, operation_of

SETTINGS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.Threshold: (0.1, 2.0), nn.Unflatten: (1, (2, 3)), nn.PixelShuffle: (2,), nn.PixelUnshuffle: (2,),
    nn.ChannelShuffle: (2,), nn.Linear: (6, 3), nn.BatchNorm1d: (6,), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (4,),
    **{getattr(nn, f"{name}{d}d"): (4, 2, 2) for name in ("Conv", "ConvTranspose") for d in (1, 2, 3)},
    **{getattr(nn, f"{name}{d}d"): (2,) for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
       for d in (1, 2, 3)},
}  # fmt: skip


def modules(one: Operation) -> list[type[nn.Module]]:
    return [getattr(nn, name) for name in one.called.split() if hasattr(nn, name)]


ENTRIES = [(one, module) for one in OPERATIONS for module in modules(one) if module is not nn.PReLU]


def made(module: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net = module(*SETTINGS.get(module, ())).double().eval()
    if hasattr(net, "running_var"):
        net.running_mean.normal_()
        net.running_var.uniform_(0.5, 2.0)
    return net


def fed(module: type[nn.Module]) -> Tensor:
    """Six features of three samples, or four channels in as many dimensions as the module's name ends in."""
    last = module.__name__[-2:]
    space = int(last[0]) if last in ("1d", "2d", "3d") and module is not nn.BatchNorm1d else 0
    space = 2 if "Shuffle" in module.__name__ or "Unshuffle" in module.__name__ else space
    shape = (3, 4, *(4,) * space) if space else (3, 6)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("one", "module"), ENTRIES, ids=lambda value: getattr(value, "__name__", ""))
def test_modules_do_what_their_entry_says(one: Operation, module: type[nn.Module]) -> None:
    act, x = made(module), fed(module)
    assert operation_of(act) is not None
    with torch.no_grad():
        y, u = act(x), torch.randn_like(x)
        step = 1e-4 if one.kinks else 1.0
        bend = float((act(x + step * u) - 2 * y + act(x - step * u)).abs().max())
        assert (bend < 1e-12) == (one.role is not None)
        assert one.affine == (one.role is not None and not one.kinks)
        assert torch.allclose(act(30 * x), 30 * y) == one.homogeneous
        if one.moves:
            assert torch.equal(y.flatten().sort().values, x.flatten().sort().values)
        if one.effect == "identity":
            assert torch.equal(y, x)
        if one.effect in ("identity", "each"):
            other = x.clone()
            other[:, 0] += 1
            assert torch.equal(act(other)[:, 1:], y[:, 1:])
        if one.effect == "each":
            assert not torch.equal(y, x)
        if one.effect == "window":
            assert y.ndim == x.ndim
            other = x.clone()
            other[:, 0] += 1  # windows lie within a channel
            assert torch.equal(act(other)[:, 1:], y[:, 1:])
            assert bool((act(other)[:, 0] != y[:, 0]).any())


CALLS = [(one, call) for one in OPERATIONS if one.effect == "each" for call in one.called.split()[1:] if modules(one)]


@pytest.mark.parametrize(("one", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_functions_and_methods_are_their_modules(one: Operation, call: str) -> None:
    (module,) = modules(one)
    x, settings = fed(module), SETTINGS.get(module, ())
    expected = made(module)(x)
    functions = [getattr(home, call) for home in (torch, nn.functional) if hasattr(home, call)]
    assert functions or hasattr(x, call)
    for function in functions:
        assert operation_of(function) is one
        assert torch.equal(function(x.clone(), *settings), expected)
    if hasattr(x, call):
        assert operation_of(call) is one
        assert torch.equal(getattr(x.clone(), call)(*settings), expected)


def test_no_name_stands_for_two() -> None:
    names = [name for one in OPERATIONS for name in one.called.split()]
    assert len(set(names)) == len(names)


class Renamed(nn.ReLU):
    pass


def patched() -> nn.Module:
    act = nn.ReLU()
    act.forward = lambda x: x.relu().square()  # type: ignore[method-assign]
    return act


def followed() -> nn.Module:
    act = nn.ReLU()
    act.register_forward_hook(lambda module, inputs, z: z.square())
    return act


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (SquaredReLU(), None), (patched(), None), (followed(), None), (nn.Softmax(1), None),
        (nn.InstanceNorm1d(3), None), (nn.Sequential(), None), (Renamed(), "relu"),
        (weight_norm(nn.Linear(2, 2)), "linear"),
    ],
    ids=["squared", "patched", "followed", "softmax", "instance norm", "sequential", "renamed", "weight_norm"],
)  # fmt: skip
def test_a_module_is_what_its_forward_is(module: nn.Module, name: str | None) -> None:
    found = operation_of(module)
    assert (found.name if found else None) == name
    assert found is None or (found.activation_of(module) is not None) == (name == "relu")


def test_hooks_can_be_overlooked() -> None:
    act = followed()
    assert hooked(act)
    found = operation_of(act, hooks=True)
    assert found is not None
    assert found.name == "relu"


def test_an_operation_that_is_not_listed_is_unknown() -> None:
    assert operation_of(torch.softmax) is operation_of("softmax") is None
    assert operation_of(torch.nn.functional.layer_norm) is None
