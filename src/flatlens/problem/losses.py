"""The losses: squared errors, cross-entropy, those of torch.nn, and functions of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import BadData, BadLoss, UnknownName
from flatlens.problem.custom import (
    MODULE_OF,
    CustomLoss,
    as_module,
    other_module,
    require_two_arguments,
    settings_of_function,
)
from flatlens.problem.heads import HeadLosses
from flatlens.problem.loss import Loss, as_vectors, class_labels, probabilities, slices_of_rows, smoothed


@final
class SquaredError(Loss):
    """Squared errors: `half_squared_error`, 0.5 ||f - y||^2 (C = I), and `mse`, torch's mean over outputs (C = 2/N I).

    Class labels may be smoothed to (1 - a) y + a/N.
    """

    apart = convex = closed = True

    def __init__(self, name: str, label_smoothing: float = 0.0) -> None:
        self.name, self.label_smoothing = name, label_smoothing
        self.half_square = name == "half_squared_error"

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the smoothing of class labels."""
        return {"label_smoothing": self.label_smoothing} if self.label_smoothing else {}

    def _factor(self, outputs: int) -> float:
        return 0.5 if self.half_square else 1.0 / outputs

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the scaled squared distance to the target, (n,)."""
        return self._factor(f.shape[1]) * (f - as_vectors(f, y, self.name, self.label_smoothing)).square().sum(1)

    def least(self, f: Tensor, y: Any) -> Tensor:
        """Return 0: every target can be reached."""
        return torch.zeros(len(f), dtype=torch.float64, device=f.device)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return a multiple of the identity, (n, N, N)."""
        N = f.shape[1]
        eye = torch.eye(N, dtype=torch.float64, device=f.device) * (2 * self._factor(N))
        return eye.expand(len(f), N, N)

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies u by a number."""
        return lambda u: u.to(torch.float64) * (2 * self._factor(f.shape[1]))

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return u itself, scaled."""
        factor = 2 * self._factor(f.shape[1])
        return u[:, None].to(torch.float64), u.new_full((len(f), 1, 1), factor, dtype=torch.float64)

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return C's own product: the loss is -log p of a Gaussian."""
        return self.output_hessian_product(f, y)

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return Gaussian draws with covariance C."""
        noise: Tensor = torch.randn(len(f), draws, f.shape[1], dtype=torch.float64, generator=generator).to(f.device)
        return noise * math.sqrt(2 * self._factor(f.shape[1]))


@final
class CrossEntropy(Loss):
    """Cross-entropy of softmax(f), with torch's class weights, `ignore_index` and label smoothing."""

    name = "cross_entropy"
    apart = convex = closed = places = True

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        if weight is not None and not bool((fine := (weight >= 0) & weight.isfinite()).all()):
            raise BadLoss(
                f"Problem(loss=CrossEntropyLoss): class weights must be finite and not negative, got "
                f"{float(weight[~fine][0]):.4g}"
            )
        self.weight, self.ignore_index, self.label_smoothing = weight, ignore_index, label_smoothing

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the options that differ from torch's defaults."""
        given = {"weight": self.weight, "ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        plain = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}
        return {name: value for name, value in given.items() if value is not plain[name] and value != plain[name]}

    def _weight(self, f: Tensor, dtype: torch.dtype) -> Tensor:
        one = torch.ones(f.shape[1]) if self.weight is None else self.weight
        return one.to(f.device, dtype)

    def _target(self, f: Tensor, y: Any) -> Tensor:
        target: Tensor = torch.as_tensor(y, device=f.device)
        if target.is_floating_point():
            if target.shape != f.shape:
                raise BadData(
                    f"Problem(data=...): cross_entropy needs integer labels of shape ({len(f)},) or class "
                    f"probabilities of shape {tuple(f.shape)}, got {tuple(target.shape)} {target.dtype}"
                    f"{_mending(target)}"
                )
            return probabilities(target, self.name).to(f.dtype)
        if target.shape != (len(f),):
            raise BadData(
                f"Problem(data=...): cross_entropy needs labels of shape ({len(f)},), got {tuple(target.shape)}"
                f"{_mending(target)}"
            )
        return class_labels(target, f.shape[1], self.ignore_index)

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return -sum_k a_k log p_k, a_k the smoothed, weighted target."""
        target = self._target(f, y)
        if f.requires_grad or f.numel() == 0:
            return self._rows(f, target)
        return torch.cat([self._rows(f[part], target[part]) for part in slices_of_rows(f)])

    def _rows(self, f: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            f,
            target,
            weight=None if self.weight is None else self.weight.to(f),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def least(self, f: Tensor, y: Any) -> Tensor:
        """Return the label's entropy, -sum_k a_k log(a_k / a), a = sum_k a_k: the loss at p = a_k / a."""
        parts = self._shares(f.to(torch.float64), self._target(f, y))
        entropy: Tensor = torch.special.entr(parts).sum(1) - torch.special.entr(parts.sum(1))
        return entropy

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return the weight of the label's class; 0 where ignored; 1 for class probabilities, as in torch."""
        target = self._target(f, y)
        if target.is_floating_point():
            return super().mass(f, y)
        seen = target != self.ignore_index
        return torch.where(seen, self._weight(f, f.dtype)[target.where(seen, 0)], 0.0).to(torch.float64)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C = (sum_k a_k)(diag p - p p^T).

        Diagonal p_k * (sum of the others), accurate where p is close to one-hot.
        """
        p = f.detach().to(torch.float64).softmax(1)
        others = p @ (1 - torch.eye(p.shape[1], dtype=p.dtype, device=p.device))
        C = -p[:, :, None] * p[:, None, :]
        C.diagonal(dim1=1, dim2=2).copy_(p * others)
        return C * self._target_sum(p, self._target(f, y))[:, None, None]

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product without the matrices: (sum_k a_k) (p u - p <p, u>)."""
        return _softmax_covariance(f, self._target_sum(f, self._target(f, y)))

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return R u with R = diag(sqrt p) - p sqrt(p)^T: R R^T = diag(p) - p p^T, stable for p close to one-hot."""
        row = torch.empty(f.shape, dtype=torch.float64, device=f.device)
        for part in slices_of_rows(f):
            p = f[part].detach().to(torch.float64).softmax(1)
            root = p.sqrt()
            ru = root * u[part]
            torch.sub(ru, p * ru.sum(1, keepdim=True), out=row[part])
        return row[:, None], self._target_sum(f, self._target(f, y))[:, None, None]

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the product for the softmax's categorical distribution.

        The label's weight is the mass; smoothing plays no part.
        """
        return _softmax_covariance(f, self.mass(f, y))

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return p - e_k, k drawn from p."""
        p = f.detach().to(torch.float64).softmax(1)
        drawn = torch.multinomial(p.cpu(), draws, replacement=True, generator=generator).to(p.device)
        slopes = p[:, None] - F.one_hot(drawn, p.shape[1]).to(p.dtype)
        return slopes * self.mass(f, y).sqrt()[:, None, None]

    def _target_sum(self, f: Tensor, target: Tensor) -> Tensor:
        """Return sum_k a_k, (n,) float64: 1 unless classes are weighted or samples ignored."""
        if target.is_floating_point():
            return torch.cat(
                [self._shares(target[part].to(torch.float64), target[part]).sum(1) for part in slices_of_rows(f)]
            )
        w, a = self._weight(f, torch.float64), self.label_smoothing
        seen = target != self.ignore_index
        return ((1 - a) * w[target.where(seen, 0)] + a * w.mean()) * seen

    def _shares(self, p: Tensor, target: Tensor) -> Tensor:
        """Return a_k, (n, N) in p's dtype: the targets smoothed, then weighted; 0 where ignored."""
        w = self._weight(p, p.dtype)
        if not target.is_floating_point():
            seen = target != self.ignore_index
            smooth = smoothed(F.one_hot(target.where(seen, 0), p.shape[1]).to(w), self.label_smoothing)
            return smooth * w * seen[:, None]
        return smoothed(target.to(w), self.label_smoothing) * w


def _mending(target: Tensor) -> str:
    """Return the advice that makes labels of targets that are none yet.

    >>> _mending(torch.ones(4, 1)), _mending(torch.eye(3).long()), _mending(torch.tensor([0.5]))
    (': y.flatten().long() makes labels of it', ': y.argmax(1) turns one-hot rows into labels', '')
    """
    if target.ndim == 0 or target.is_complex():
        return ""
    y = target.detach().to(torch.float64)
    if y.ndim == 2 and y.shape[1] > 1 and bool((y.amax(1) == y.sum(1)).all()):
        return ": y.argmax(1) turns one-hot rows into labels"
    if y.numel() != len(y) or bool((y != y.round()).any()):
        return ""
    made = ".flatten()" * (y.ndim > 1) + ".long()" * target.is_floating_point()
    return f": y{made} makes labels of it"


def _softmax_covariance(f: Tensor, factor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return u -> factor_i (diag(p) - p p^T) u, computed as p * (u - <p, u>): accurate where p is close to one-hot.

    In float64, a few rows at a time: of a language model's outputs no second copy is made. The product has u's dtype.
    """
    f = f.detach()

    def apply(u: Tensor) -> Tensor:
        out = torch.empty_like(u)
        for part in slices_of_rows(u):
            p, wide = f[part].to(torch.float64).softmax(1), u[part].to(torch.float64)
            wide = wide - (p * wide).sum(1, keepdim=True)
            out[part] = p.mul_(wide).mul_(factor[part, None])
        return out

    return apply


def _from_module(module: nn.Module) -> Loss:
    """Return the Loss of a torch.nn module with its options."""
    name = type(module).__name__
    means = ("mean", "batchmean") if isinstance(module, nn.KLDivLoss) else ("mean",)
    if getattr(module, "reduction", "mean") not in means:
        raise BadLoss(
            f"Problem(loss={name}(reduction={module.reduction!r})): the risk is a mean over samples: use "
            f"reduction='mean', or pass a function (outputs, targets) -> losses of shape (n,)"
        )
    if isinstance(module, nn.CrossEntropyLoss) and type(module).forward is nn.CrossEntropyLoss.forward:
        return CrossEntropy(module.weight, module.ignore_index, module.label_smoothing)
    if type(module).forward is nn.MSELoss.forward:
        return SquaredError("mse")
    return other_module(module)


_OWN: dict[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropy,
    "half_squared_error": lambda: SquaredError("half_squared_error"),
    "mse": lambda: SquaredError("mse"),
}


def _named(name: str) -> Loss:
    """Return flatlens's loss of this name, or torch's of this class or function, in any spelling that is one's alone.

    >>> _named("HuberLoss"), _named("huber"), _named("l1_loss")
    (HuberLoss, HuberLoss, L1Loss)
    """
    if name in _OWN:
        return _OWN[name]()
    torchs = {kind.__name__: kind for kind in MODULE_OF.values()} | {f.__name__: kind for f, kind in MODULE_OF.items()}
    plain = name.removeprefix("torch.").removeprefix("nn.").removeprefix("functional.").removesuffix("()")
    same = {kind for one, kind in torchs.items() if _short(one) == _short(plain)}
    near = {kind for one, kind in torchs.items() if _short(one).startswith(_short(plain))}
    if plain in torchs or len(same) == len(near) == 1:
        return _from_module(torchs.get(plain, *same)())
    if same:
        told = ", ".join(sorted(kind.__name__ for kind in near))
        raise UnknownName(f"no loss is called {name!r}: did you mean {told} (of torch.nn)?")
    raise UnknownName.among("loss", name, [*_OWN, *(kind.__name__ for kind in MODULE_OF.values())])


def _short(name: str) -> str:
    """Return a name without case, underscores and the word loss.

    >>> _short("BCEWithLogitsLoss"), _short("smooth_l1_loss")
    ('bcewithlogits', 'smoothl1')
    """
    return name.lower().replace("_", "").removesuffix("loss")


def as_loss(loss: object) -> Loss:
    """Return the argument of `Problem(loss=...)` as a Loss.

    >>> as_loss("mse").output_hessian(torch.zeros(1, 4), torch.zeros(1, 4))[0, 0, 0].item()
    0.5
    """
    if isinstance(loss, str):
        return _named(loss)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, Mapping | tuple | list) and loss:
        each = loss.values() if isinstance(loss, Mapping) else loss
        return HeadLosses([as_loss(one) for one in each], list(loss) if isinstance(loss, Mapping) else None)
    module = loss if isinstance(loss, nn.Module) else as_module(loss)
    if module is not None:
        return _from_module(module)
    if isinstance(loss, type):
        raise BadLoss(f"Problem(loss={loss.__name__}): a class, not a loss: write {loss.__name__}()")
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        require_two_arguments(loss, name)
        return CustomLoss(loss, name, settings=settings_of_function(loss))
    raise BadLoss(
        f"Problem(loss=...): a name ({', '.join(_OWN)}), a torch loss, a function (outputs, targets) -> losses, or a "
        f"dict of these for several heads is needed, got {type(loss).__name__}"
        f"{': the order is Problem(model, loss, data)' * isinstance(loss, Tensor)}"
    )
