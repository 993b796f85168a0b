"""One training step: the gradient of a batch's loss and penalties, and the update of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from flatlens.grams.record import record
from flatlens.problem.plain import plain_weight_norms
from flatlens.training.penalties import Pass
from flatlens.training.ridge import Ridge
from flatlens.training.settings import Training


class Stepper:
    """The steps of a run. Each kind of noise has its own generator: to draw one kind does not change the others."""

    def __init__(self, model: nn.Module, settings: Training) -> None:
        self.model, self.settings = model, settings
        self.loss = settings.objective
        self.penalties = tuple(penalty for penalty in settings.penalties if penalty.coefficient > 0)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        assert not isinstance(settings.optimiser, Ridge)  # takes no steps: see train
        self.optimiser = settings.optimiser.build(self.parameters)
        self.noise = {name: stream(settings.seed, name) for name in ("augmentation", "mixup", "penalties")}

    def take(self, x: Tensor, targets: Tensor, factor: float) -> float:
        """Take one step at `factor` times the optimiser's learning rate; return the loss of the batch before it."""
        settings = self.settings
        if settings.augmentation is not None:
            x = settings.augmentation.apply(x, self.noise["augmentation"])
        if settings.mixup is not None:
            x, targets = settings.mixup.apply(x, targets, self.noise["mixup"])
        self.set_rate(factor)
        loss = self._at_the_worst_place(x, targets) if self.ascends else self.differentiate(x, targets)
        self.optimiser.step()
        return loss

    def set_rate(self, factor: float) -> None:
        """Set the learning rate to a multiple of the optimiser's own."""
        for group in self.optimiser.param_groups:
            group["lr"] = factor * self.settings.optimiser.lr

    @property
    def ascends(self) -> bool:
        """Return whether the gradient is taken at other weights than the current ones."""
        return self.settings.ascent is not None and self.settings.ascent.rho > 0

    def differentiate(self, x: Tensor, targets: Tensor) -> float:
        """Write the gradient of loss and penalties into `.grad`, and return the loss.

        Ghost batches are taken one by one, each weighted by its number of samples.
        """
        self.optimiser.zero_grad()
        n, loss = len(x), 0.0
        most = self.settings.ghost_batch or n
        for start in range(0, n, most):
            part, wanted = x[start : start + most], targets[start : start + most]
            risk, penalty = self._forward(part, wanted, n)
            torch.autograd.backward(risk if penalty is None else risk + penalty, inputs=self.parameters)
            loss += float(risk.detach())
        return loss

    def _forward(self, x: Tensor, targets: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        """Return a part's share of the mean loss over n samples, and of the penalties."""
        if not self.penalties:
            return self.loss.values(self.model(x), targets).sum() / n, None
        x = x.detach().clone()
        if x.is_floating_point():
            x.requires_grad_()
        with plain_weight_norms(self.model), record(self.model) as tape:  # penalties are differentiated again
            outputs = self.model(x)
            seen = Pass(x, outputs, self.parameters, tape.linear, self.loss)
            values = [p.coefficient * p.value(seen, self.noise["penalties"]) for p in self.penalties]
        return self.loss.values(outputs, targets).sum() / n, torch.stack(values).sum() * (len(x) / n)

    def _at_the_worst_place(self, x: Tensor, targets: Tensor) -> float:
        """Write the gradient at theta + eps into `.grad`; return the loss at theta.

        Probes and dropout are those of the gradient from which eps came.
        """
        assert self.settings.ascent is not None
        noise, dropout = self.noise["penalties"].get_state(), global_states(x.device)
        loss = self.differentiate(x, targets)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        here = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p, eps in zip(self.parameters, self.settings.ascent.move(here, slopes), strict=True):
                p.add_(eps)
        self.noise["penalties"].set_state(noise)
        set_global_states(dropout, x.device)
        with _statistics_left_alone(self.model):
            self.differentiate(x, targets)
        with torch.no_grad():
            for p, before in zip(self.parameters, here, strict=True):
                p.copy_(before)  # exactly: adding and taking away leaves rounding
        return loss


def stream(seed: int, name: str) -> Generator:
    """Return a generator for one kind of noise; the order of the samples uses the seed itself."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@contextmanager
def _statistics_left_alone(model: nn.Module) -> Iterator[None]:
    """Keep the running statistics of BatchNorms unchanged inside this context; they still normalise by their batch."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                name, value = ("track_running_stats", False) if isinstance(module, _BatchNorm) else ("momentum", 0.0)
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield


def global_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that dropout uses."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_global_states(states: list[Tensor], device: torch.device) -> None:
    """Restore the states that `global_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
