"""Ridge regression of a network's last linear layer on its input features, solved in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, BadModel


@dataclass(frozen=True)
class Ridge:
    """Ridge regression: the last linear layer minimises sum_i ||W phi_i + b - y_i||^2 + penalty ||W||_F^2.

    The other layers do not change. The bias has no penalty, as in scikit-learn. A run takes one step, whatever number
    of steps the settings give.
    """

    penalty: float = 1.0
    lr: ClassVar[float] = 0.0  #: placeholder for tables of networks: ridge regression has no learning rate

    def __post_init__(self) -> None:
        if not (self.penalty > 0 and math.isfinite(self.penalty)):
            raise BadInput(f"Ridge(penalty={self.penalty}): it must be positive, so that there is one solution")


@torch.no_grad()
def solve(model: nn.Module, x: Tensor, targets: Tensor, penalty: float) -> None:
    """Put the solution for these inputs and targets into the last linear layer, in place; computed in float64.

    Raises:
        BadModel: the network does not end in an `nn.Linear`.
    """
    last = _last(model)
    W, b = solution(_features(model, last, x).double(), targets.double(), penalty, bias=last.bias is not None)
    last.weight.copy_(W)
    if last.bias is not None:
        last.bias.copy_(b)


def solution(phi: Tensor, y: Tensor, penalty: float, *, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Return the W (outputs, m) and b (outputs,) that `Ridge` describes, for features (n, m) and targets (n, outputs).

    >>> W, b = solution(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]]), penalty=2.0)
    >>> W.item(), b.item()
    (1.0, 2.0)
    """
    centre, level = (phi.mean(0), y.mean(0)) if bias else (phi.new_zeros(phi.shape[1]), y.new_zeros(y.shape[1]))
    phi, y = phi - centre, y - level
    units = torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device)
    W = torch.linalg.solve(phi.T @ phi + penalty * units, phi.T @ y).T
    return W, level - W @ centre


def _last(model: nn.Module) -> nn.Linear:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise BadModel("Training(Ridge()): the network has no nn.Linear whose weights can be computed")
    return layers[-1]


def _features(model: nn.Module, last: nn.Linear, x: Tensor) -> Tensor:
    """Return the layer's input features, (n, m)."""
    seen: list[Tensor] = []
    handle = last.register_forward_hook(lambda _, inputs, outputs: seen.extend((inputs[0], outputs)))
    was = model.training
    try:
        f = model.eval()(x)
    finally:
        handle.remove()
        model.train(was)
    if len(seen) != 2 or f.shape != seen[1].shape or not bool((f == seen[1]).all()):
        raise BadModel("Training(Ridge()): the network must end in an nn.Linear, called once")
    return seen[0]
