"""A callable gets outputs in the network's own form, whichever it is; one that couples samples is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadLoss

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()


def formed(form: str) -> nn.Module:
    """A linear map whose outputs are a sequence, an image, or two heads."""
    torch.manual_seed(0)

    def forward(net: nn.Module, x: Tensor) -> Any:
        f = net.net(x)
        return {
            "sequence": f.reshape(len(f), 4, 2),
            "image": f.reshape(len(f), 2, 2, 2),
            "heads": {"a": f[:, :3], "b": f[:, 3:]},
        }[form]

    return module_of(forward, net=(3, 8)).double()


def target(form: str) -> Any:
    torch.manual_seed(1)
    return {"a": torch.randn(6, 3), "b": torch.randn(6, 5)} if form == "heads" else torch.randn(formed(form)(X).shape)


def apart(f: Any, y: Any) -> Tensor:
    """Half the squared error, each sample by itself."""
    parts = zip(f.values(), y.values(), strict=True) if isinstance(f, dict) else [(f, y)]
    return sum(((a - b) ** 2).flatten(1).sum(1) / 2 for a, b in parts)


FORMS = pytest.mark.parametrize("form", ["sequence", "image", "heads"])


@FORMS
@pytest.mark.parametrize("mean", [False, True])
def test_it_gets_what_the_network_returns(form: str, mean: bool) -> None:
    loss = (lambda f, y: apart(f, y).mean()) if mean else apart
    problem = fl.Problem(formed(form), loss, (X, target(form)))
    value = fl.measure(fl.Lens(problem), "loss")["loss"].value
    assert value == pytest.approx(apart(formed(form)(X), target(form)).mean().item(), rel=1e-12)


@FORMS
@pytest.mark.parametrize("mean", [False, True])
def test_one_that_couples_samples_is_refused(form: str, mean: bool) -> None:
    def coupled(f: Any, y: Any) -> Tensor:
        losses = apart(f, y)
        losses = losses * losses.detach().sum()
        return losses.mean() if mean else losses

    with pytest.raises(BadLoss):
        fl.Problem(formed(form), coupled, (X, target(form)))
