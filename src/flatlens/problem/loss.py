"""The interface of a loss: one value per sample, and its second derivative in the outputs.

A risk is L = sum_i l_i / sum_i mass_i. The mass of a sample is 1, except where torch divides by something else (class
weights, `ignore_index`): sums are accumulated over all data and divided once, never averaged over batches.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatlens.errors import BadData, BadLoss, NotDifferentiable
from flatlens.progress import count_of


@dataclass(frozen=True)
class BestConstant:
    """The best fit by outputs that are the same for all samples: what a network does that ignores its input."""

    loss: float  #: smallest risk, with the bias taken off that comes from a fit to these samples
    share: float  #: largest accuracy, the most frequent class's share; it says nothing where targets are not classes


class Loss(ABC):
    """l(f, y) per sample, for outputs f of shape (n, N) and targets y.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> problem.loss.name
    'half_squared_error'
    """

    name: str
    ignore_index: int = -100  #: a label that counts as no sample
    half_square: bool = False  #: whether it is the half squared error, with C = I and mass 1
    apart: bool = False  #: whether it is known to treat samples separately, so that no check on data is needed
    convex: bool = False  #: whether it is known to be convex in the outputs, so that C has no negative eigenvalue
    closed: bool = False  #: whether its second derivative is a formula, not taken by autograd
    whole: bool = False  #: whether it takes outputs in the shape that the network gives them
    places: bool = False  #: whether torch's own takes a class at each place, with the classes in axis 1 of the outputs
    by_place: bool = False  #: whether outputs do not all count alike, so that it has to know the network's own shape
    no_curvature: str = ""  #: why there is no second derivative in the outputs; empty if there is one
    one_softmax: bool = True  #: whether the outputs of a sample, or of a token, are one vector that has a softmax
    settings: Mapping[str, object] = MappingProxyType({})  #: the options that tell it from other losses of its name

    @property
    def description(self) -> str:
        """Return the name with all settings."""
        return spelled(self.name, self.settings)

    def settled(self, f: Any, y: Any) -> Loss:
        """Return the loss for outputs and targets like these."""
        return self

    @abstractmethod
    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses l_i, (n,), differentiable in f."""

    def least(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the smallest possible l_i for these targets over all outputs, (n,) float64; None if not known."""
        return None

    def target_sums(self, f: Tensor, y: Any) -> Tensor | None:
        """Return the sums over these targets of which `constant` is made, float64; None if it has no formula."""
        return None

    def constant(self, sums: Tensor, mass: float) -> BestConstant | None:
        """Return the best fit by constant outputs, from the sums of `target_sums`; None if all targets are the same."""
        return None

    def total(self, f: Tensor, y: Any) -> Tensor:
        """Return the sum of the losses, a float64 number, differentiable in f."""
        return self.values(f.to(torch.float64), y).sum()

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return what each sample adds to the risk's denominator, (n,) float64."""
        return torch.ones(len(f), dtype=torch.float64, device=f.device)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C_i = d2 l_i / df2, (n, N, N) float64; here by N products, in subclasses by closed forms."""
        product = self.output_hessian_product(f, y)
        units = torch.eye(f.shape[1], dtype=torch.float64, device=f.device)
        return torch.stack([product(unit.expand(len(f), -1)) for unit in units], dim=1)

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the function u -> C_i u_i for u of f's shape; the product is a new tensor.

        Here by a backward pass through the loss's derivative, whose graph is kept; subclasses use closed forms.
        """
        self.require_curvature()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = f.detach().to(torch.float64).requires_grad_()
            (slope,) = torch.autograd.grad(self.values(leaf, y).sum(), leaf, create_graph=True)

        def apply(u: Tensor) -> Tensor:
            if not slope.requires_grad:  # linear in the outputs
                return torch.zeros_like(leaf)
            # a loss with parameters of its own may have a graph, and be linear in the outputs all the same
            (row,) = torch.autograd.grad(slope, leaf, u.to(slope), retain_graph=True, allow_unused=True)
            return torch.zeros_like(leaf) if row is None else row

        return apply

    def require_curvature(self) -> None:
        """Refuse a loss that has no second derivative in the outputs."""
        if self.no_curvature:
            raise NotDifferentiable(self.no_curvature)

    def combine(self, f: Tensor, y: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows (n, r, N), B (n, r, r)) with E[rows^T B rows] = C where E[u u^T] = I.

        One row R u where C = R R^T is known (for instance where C is diagonal and nonnegative). Otherwise the rows are
        u and C u, and B takes half of each product, in either order.
        """
        product = self.output_hessian_product(f, y)
        diagonal, Cu = product(torch.ones_like(u)), product(u)
        v = torch.randn(u.shape, dtype=u.dtype, generator=torch.Generator().manual_seed(0)).to(u)  # any u will do here
        if bool((diagonal >= 0).all()) and bool(torch.isclose(product(v), diagonal * v, rtol=1e-9, atol=0).all()):
            return (diagonal.sqrt() * u)[:, None], diagonal.new_ones(len(f), 1, 1)
        crossed = torch.tensor([[0.0, 0.5], [0.5, 0.0]], dtype=torch.float64, device=f.device)
        return torch.stack([u.to(Cu), Cu], 1), crossed.expand(len(f), 2, 2)

    def fisher(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return u -> mass_i E[s s^T] u_i, s the gradient of -log p(y|f) for y drawn from the model itself."""
        raise self._without_fisher()

    def draw_slopes(self, f: Tensor, y: Any, draws: int, generator: torch.Generator) -> Tensor:
        """Return gradients s for targets drawn from the model, times sqrt(mass_i): (n, draws, N) float64."""
        raise self._without_fisher()

    def _without_fisher(self) -> BadLoss:
        return BadLoss(
            "the Fisher matrix needs a loss that is a negative log-likelihood (cross_entropy or a squared error)",
            value=self.name,
        )

    def check(self, f: Tensor, y: Any) -> Tensor:
        """Return the losses; refuse targets that do not fit the outputs."""
        values = self.values(f, y)
        if values.shape != (len(f),):
            raise BadLoss(
                f"a loss must return one value per sample, shape ({len(f)},), but returned {tuple(values.shape)}",
                value=self.name,
                remedy="return losses of shape (n,), with no mean over the batch",
            )
        return values

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return whether samples are classified correctly, (n,), NaN if ignored; None if targets are not classes."""
        try:
            y = torch.as_tensor(y, device=f.device)
        except (TypeError, ValueError, RuntimeError):  # such as a list of boxes
            return None
        if y.is_floating_point() and y.shape == f.shape and f.shape[1] > 1:
            one_hot = (y.sum(1) == 1) & (y.max(1).values == 1)
            return (f.argmax(1) == y.argmax(1)).to(torch.float64) if bool(one_hot.all()) else None
        if y.is_floating_point() or y.shape != (len(f),) or f.shape[1] == 1:
            return None
        return torch.where(y == self.ignore_index, math.nan, (f.argmax(1) == y).to(torch.float64))

    def __repr__(self) -> str:
        return self.name


def spelled(name: str, settings: Mapping[str, object]) -> str:
    """Return a name with settings, those of more than eight numbers by their checksum.

    >>> spelled("cross_entropy", {"label_smoothing": 0.1, "weight": torch.tensor([1.0, 2.5])})
    'cross_entropy(label_smoothing=0.1, weight=[1, 2.5])'
    """

    def short(value: object) -> str:
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
        numbers = value.detach().to("cpu", torch.float64).flatten()
        if len(numbers) <= _FEW:
            return f"[{', '.join(f'{x:.6g}' for x in numbers.tolist())}]"
        return f"{len(numbers)} numbers of checksum {zlib.crc32(numbers.numpy().tobytes()):08x}"

    told = ", ".join(f"{key}={short(value)}" for key, value in settings.items())
    return f"{name}({told})" if told else name


_FEW = 8  #: numbers that are written out
_BLOCK = 1 << 19  #: numbers that are taken at once from outputs of many tokens: 4 MiB in float64


def as_vectors(f: Tensor, y: Any, name: str, smoothing: float = 0.0) -> Tensor:
    """Return regression targets of f's shape; integer class labels become one-hot and smoothed."""
    target: Tensor = torch.as_tensor(y, device=f.device)
    if not target.is_floating_point() and target.shape == (len(f),) and f.shape[1] > 1:
        return smoothed(F.one_hot(class_labels(target, f.shape[1]), f.shape[1]).to(f.dtype), smoothing)
    if not one_each(f, target):
        raise BadData(
            f"{name} needs targets of the outputs' shape {tuple(f.shape)} or integer labels of shape ({len(f)},), got "
            f"{tuple(target.shape)} {target.dtype}",
            argument="data",
        )
    return target.reshape(f.shape).to(f.dtype)


def slices_of_rows(f: Tensor) -> Iterator[slice]:
    """Yield slices of rows of f, (n, N), that fit in a cache in float64; one slice if all of them do.

    >>> [len(range(100)[part]) for part in slices_of_rows(torch.empty(100, 1 << 14))]
    [32, 32, 32, 4]
    """
    step = max(1, _BLOCK // max(1, f.shape[1]))
    yield from (slice(start, start + step) for start in range(0, len(f), step))


def one_each(f: Tensor, y: Tensor) -> bool:
    """Return whether the targets hold one number for each output of each sample.

    >>> one_each(torch.zeros(4, 1), torch.zeros(4)), one_each(torch.zeros(4, 3), torch.zeros(3, 4))
    (True, False)
    """
    return y.ndim > 0 and len(y) == len(f) and y.numel() == f.numel()


def smoothed(y: Tensor, a: float) -> Tensor:
    """Return smoothed class probabilities (1 - a) y + a / N, (n, N)."""
    return y if a == 0 else (1 - a) * y + a / y.shape[1]


_KNOWN = ContextVar("labels are known", default=False)


@contextmanager
def labels_known() -> Iterator[None]:
    """Skip the range check of class labels inside: they were checked, and checking again would wait for the device."""
    token = _KNOWN.set(True)
    try:
        yield
    finally:
        _KNOWN.reset(token)


SAMPLE = "sample"  #: what a row of the outputs is, in an error about its target


def class_labels(y: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Return the class labels; refuse any outside [0, classes) except `ignore`."""
    if _KNOWN.get():
        return y.long()
    bad = (y < 0) | (y >= classes)
    if ignore is not None:
        bad &= y != ignore
    if not bad.any():
        return y.long()
    why = f" is out of range: the model has {count_of(classes, 'output')}, so labels run from 0 to {classes - 1}"
    # what to do, as far as the labels show it
    if classes == 1:
        why = ": the model has one output, which cannot tell classes apart"
        mend = "with labels 0 and 1 the loss is nn.BCEWithLogitsLoss()"
    elif bool((y < 0).any()):
        mend = f"labels below 0 are ignored by nn.CrossEntropyLoss(ignore_index={int(y.min())})"
    elif int(y.max()) == classes and bool((y > 0).all()):
        mend = "they are counted from 1 here: subtract 1"
    else:
        mend = f"the last layer needs at least {count_of(int(y.max()) + 1, 'output')}"
    first = int(bad.nonzero()[0])
    what = f"label {int(y[first])} at ", SAMPLE, f" {first} of its batch{why}"
    raise BadData(what, argument="data", remedy=mend)


def probabilities(y: Tensor, name: str) -> Tensor:
    """Return class probabilities; refuse negative ones. Their sum need not be 1: it weighs the sample, as in torch."""
    if not _KNOWN.get() and bool((y < 0).any()):
        at = (y < 0).nonzero()[0]
        what = f"{name} has a target of {float(y[tuple(at)]):.4g} for class {int(at[1])} at "
        which = f" {int(at[0])} of its batch: class probabilities must not be negative"
        remedy = "if these are logits, apply softmax(); if they are logarithms, apply exp()"
        raise BadData((what, SAMPLE, which), argument="data", remedy=remedy)
    return y
