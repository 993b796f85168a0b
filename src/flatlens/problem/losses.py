"""The losses: squared errors, cross-entropy, torch.nn's losses, and the user's own functions and modules."""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import FORWARD, BadData, BadLoss, LossFailed, UnknownName
from flatlens.problem.batches import picked
from flatlens.problem.loss import (
    BestConstant,
    Loss,
    as_vectors,
    class_labels,
    one_each,
    probabilities,
    slices_of_rows,
    smoothed,
)
from flatlens.problem.row_layout import HeadLosses
from flatlens.registry import spelled
from flatlens.user_code import needed_arguments, takes, users_code

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


@final
class CustomLoss(Loss):
    """A callable (outputs, targets) -> losses of shape (n,); C by automatic differentiation, sample by sample.

    `by_row`: for outputs with one row per token, the callable gets the rows, not the sequences. `singly`: the callable
    returns the mean of a batch, and is called for each sample. `masses`: a callable (outputs, targets) -> masses of
    shape (n,); all are 1 if None.
    """

    def __init__(
        self,
        function: LossFunction,
        name: str,
        *,
        settings: Mapping[str, object],
        by_row: bool = False,
        singly: bool = False,
        masses: LossFunction | None = None,
        ignore_index: int = -100,
    ) -> None:
        self.function, self.name, self.by_row, self.singly = function, name, by_row, singly
        self.whole, self.masses, self.ignore_index, self.settings = not by_row, masses, ignore_index, settings

    def values(self, f: Any, y: Any) -> Tensor:
        """Return the callable's losses, (n,)."""
        if self.singly:
            n = samples_of(f)
            alone = [torch.tensor([i]) for i in range(n)]
            return torch.stack([self.called(picked(f, i, n), picked(y, i, n), 1).reshape(()) for i in alone])
        return self.called(f, y, samples_of(f))

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return what each sample adds to the risk's denominator, (n,) float64."""
        return super().mass(f, y) if self.masses is None else self.masses(f, y).to(torch.float64)

    def called(self, f: Any, y: Any, n: int) -> Tensor:
        """Return what the callable returns for n samples."""
        if isinstance(y, Tensor) and y.is_floating_point() and isinstance(f, Tensor):
            y = y.to(f.dtype)
        with users_code(lambda line: LossFailed(f"the loss failed on {n} samples ({line})", value=self.name)):
            values = self.function(f, y)
        if not isinstance(values, Tensor):
            raise BadLoss(f"a loss must return a tensor of shape ({n},), got {type(values).__name__}", value=self.name)
        return values

    def settled(self, f: Any, y: Any) -> CustomLoss:
        """Return the loss for outputs like these: one that returns the mean of a batch is called for each sample."""
        if self.singly or self.called(f, y, samples_of(f)).ndim:
            return self
        found = copy.copy(self)
        found.singly = True
        return found


def samples_of(f: Any) -> int:
    """Return the number of samples in outputs: a tensor, or the tensors of several heads."""
    return len(f if isinstance(f, Tensor) else next(iter(f.values() if isinstance(f, Mapping) else f)))


MODULE_OF: dict[Callable[..., Tensor], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.nll_loss: nn.NLLLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.margin_ranking_loss: nn.MarginRankingLoss,
    F.cosine_embedding_loss: nn.CosineEmbeddingLoss,
}
"""The module with the options of each function of torch that takes outputs and targets."""


def as_module(loss: object) -> nn.Module | None:
    """Return the module of a torch function, also one with options set by functools.partial; None for anything else.

    With reduction="none" it is a function like any other, which returns a loss for each sample.

    >>> as_module(functools.partial(F.huber_loss, delta=2.0))
    HuberLoss()
    """
    function, args, options = _opened(loss)
    try:
        kind = MODULE_OF.get(function)
    except TypeError:  # not hashable
        return None
    if kind is None or args or options.get("reduction") == "none":
        return None
    try:
        found: nn.Module = kind(**options)
    except TypeError as error:
        raise BadLoss(f"{kind.__name__} does not take these options ({error})") from error
    return found


def other_module(module: nn.Module) -> Loss:
    """Return the Loss of a module that has none of flatlens's own formulas.

    Reduction 'mean' is over a sample's outputs, then over samples. 'batchmean' is the sum over a sample's outputs, and
    the mean over samples. NLLLoss divides by the weights of the labels that count, as torch does.
    """
    name, settings = type(module).__name__, settings_of(module)
    labels = isinstance(module, nn.NLLLoss) and type(module).forward is nn.NLLLoss.forward
    if type(module).__module__.startswith("torch.nn.") and any(True for _ in module.parameters()):
        raise BadLoss(
            "it holds the weights of a layer, which would not be measured",
            value=name,
            remedy="put the layer into the network, and use nn.CrossEntropyLoss()",
        )
    if getattr(module, "weight", None) is not None and type(module) not in _WEIGHTED:
        raise BadLoss(
            "it is not known how its mean takes the class weights",
            value=name,
            remedy="pass a function (outputs, targets) -> losses of shape (n,)",
        )
    # the user's own module without a reduction is a function like any other
    if not hasattr(module, "reduction"):
        return CustomLoss(module, name, settings=settings)
    ignored: int = getattr(module, "ignore_index", -100)
    if ignored != -100 and not labels:
        raise BadLoss(
            "ignore_index is supported for CrossEntropyLoss and NLLLoss only",
            value=name,
            remedy="pass a function (outputs, targets) -> losses of shape (n,)",
        )
    # a copy gives the losses of entries, which are added up or averaged over a sample's
    each, summed = copy.deepcopy(module), module.reduction == "batchmean"
    each.reduction = "none"  # type: ignore[assignment]
    arguments = _OF_TWO.get(type(module))
    if arguments is None:
        require_two_arguments(module.forward, name)

    def values(f: Any, y: Any) -> Tensor:
        if arguments is None:
            # weights that torch spreads over the samples of one batch: the next batch would get the same ones
            for own, weight in module.named_buffers():
                if weight.shape[: max(0, weight.ndim - (f.ndim - 1))].numel() > 1:
                    raise BadLoss(
                        f"{own} of shape {tuple(weight.shape)} has a value for each sample of a batch (outputs "
                        f"{tuple(f.shape)}): give weights of samples as a second target, and a function (outputs, "
                        "(targets, weights)) -> losses of shape (n,)",
                        value=name,
                    )
            losses: Tensor = each.to(f)(f, _shaped(f, y, module))
        else:
            parts = tuple(f.values()) if isinstance(f, Mapping) else f
            if isinstance(parts, Tensor) or len(parts) != 2:
                told = "it needs two outputs, such as (mean, variance)"
                remedy = "return a tuple of two tensors from the network, or through ", FORWARD
                raise BadLoss(told, value=name, remedy=remedy)
            losses = each(*arguments((parts[0], parts[1]), y))
        n = samples_of(f)
        if losses.ndim < 2:
            return losses
        return losses.reshape(n, -1).sum(1) if summed else losses.reshape(n, -1).mean(1)

    # it takes rows, unless its mean is over all of a sample's outputs, or its weights are of the network's own shape
    buffers = [buffer for buffer in module.buffers() if buffer.ndim]
    if summed or arguments is not None:  # over the tokens of a sequence, too
        return CustomLoss(values, name, settings=settings | ({"reduction": "batchmean"} if summed else {}))
    if any(buffer.numel() > buffer.shape[-1] for buffer in buffers):  # of channels: (C, 1, 1)
        return CustomLoss(values, name, settings=settings)
    masses = (lambda f, y: values(-torch.ones_like(f), y)) if labels else None
    found = CustomLoss(values, name, by_row=True, settings=settings, masses=masses, ignore_index=ignored)
    found.places, found.by_place = labels, bool(buffers) and not labels
    return found


def require_two_arguments(function: Callable[..., object], name: str) -> None:
    """Refuse a function that is not one of (outputs, targets)."""
    needed = needed_arguments(function)
    if len(needed) > 2 or (needed and not takes(function, 2)):  # a compiled function may tell no arguments
        raise BadLoss(
            f"it is computed from ({', '.join(needed)}), not from (outputs, targets)",
            value=name,
            remedy="pass a function (outputs, targets) -> losses of shape (n,) that calls it (targets may be a tuple)",
        )


_WEIGHTED = (nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss)
"""torch losses with weights by which their mean does not divide, but for NLLLoss."""

_OF_TWO: dict[type[nn.Module], Callable[[tuple[Tensor, Tensor], Any], tuple[Any, ...]]] = {
    nn.GaussianNLLLoss: lambda f, y: (f[0], _shaped(f[0], y, nn.MSELoss()), f[1]),
    nn.MarginRankingLoss: lambda f, y: (*f, y),
    nn.CosineEmbeddingLoss: lambda f, y: (*f, y),
}
"""torch losses of two outputs and one target: their arguments."""


def settings_of(module: nn.Module) -> dict[str, object]:
    """Return a loss module's options, parameters and buffers.

    >>> settings_of(nn.HuberLoss(delta=2.0))
    {'delta': 2.0}
    """
    plain = {name: v for name, v in vars(module).items() if name[0] != "_" and name not in ("training", "reduction")}
    return plain | dict(module.named_parameters()) | dict(module.named_buffers())


def _shaped(f: Tensor, y: Any, module: nn.Module) -> Any:
    """Targets in the outputs' shape, so that none is broadcast, and in their dtype where torch compares numbers."""
    if not isinstance(y, Tensor) or isinstance(module, INDEXED):
        return y
    labels = not y.is_floating_point()
    if one_each(f, y):
        return y.reshape(f.shape).to(f.dtype if labels and _is_torchs(module) else y.dtype)
    if labels and not _is_torchs(module):  # class labels, for a loss of the user's own
        return y
    raise BadLoss(
        f"targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(f.shape)}",
        value=type(module).__name__,
        remedy="this loss needs one target for each output, so equal shapes",
    )


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__ == nn.MSELoss.__module__


INDEXED = (nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)  #: torch losses whose targets are class numbers


def settings_of_function(function: Any) -> dict[str, object]:
    """Return what tells a function from others of its name: a partial's arguments, and a checksum of a function's code.

    Arguments without a name are told by their position, `#1` the first.

    >>> first, second = (lambda f, y: f.sum(1)), (lambda f, y: 2 * f.sum(1))
    >>> settings_of_function(first) == settings_of_function(second)
    False
    """
    function, args, options = _opened(function)
    options = {f"#{place}": value for place, value in enumerate(args, 1)} | options
    code = getattr(function, "__code__", None)
    if code is None:
        return options
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    constants = (*code.co_consts, *cells, *(function.__defaults__ or ()))
    simple = [part for part in constants if isinstance(part, _SIMPLE)]
    told = repr((code.co_code, code.co_names, simple)).encode()
    return {**options, "code": f"{zlib.crc32(told):08x}"}


def _opened(function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function that a partial calls, and the arguments and options that it sets.

    >>> _opened(functools.partial(pow, 2, mod=5))
    (<built-in function pow>, (2,), {'mod': 5})
    """
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        args, options = function.args + args, {**function.keywords, **options}
        function = function.func
    return function, args, options


_SIMPLE = (str, int, float, bool, tuple, type(None))


@final
class SquaredError(Loss):
    """Squared errors: `half_squared_error`, 0.5 ||f - y||^2 (C = I), and `mse`, torch's mean over outputs (C = 2/N I).

    Class labels may be smoothed to (1 - a) y + a/N.
    """

    apart = convex = closed = True

    def __init__(self, name: str, label_smoothing: float = 0.0) -> None:
        self.name, self.label_smoothing = name, label_smoothing
        self.half_square = name == "half_squared_error"
        self.settings = {"label_smoothing": label_smoothing} if label_smoothing else {}

    def _factor(self, outputs: int) -> float:
        return 0.5 if self.half_square else 1.0 / outputs

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the scaled squared distance to the target, (n,)."""
        return self._factor(f.shape[1]) * (f - as_vectors(f, y, self.name, self.label_smoothing)).square().sum(1)

    def least(self, f: Tensor, y: Any) -> Tensor:
        """Return 0: every target can be reached."""
        return torch.zeros(len(f), dtype=torch.float64, device=f.device)

    def target_sums(self, f: Tensor, y: Any) -> Tensor:
        """Return the sum of the targets and, at the end, of their squares, (N + 1,)."""
        target = as_vectors(f.to(torch.float64), y, self.name, self.label_smoothing)
        return torch.cat([target.sum(0), target.square().sum()[None]]).cpu()

    def constant(self, sums: Tensor, mass: float) -> BestConstant | None:
        """Return the fit by the mean target: the unbiased variance of the targets, scaled as the loss is."""
        mean, square, a = sums[:-1] / mass, float(sums[-1]) / mass, self.label_smoothing
        spread = (square - float(mean.square().sum())) * mass / (mass - 1)
        classes = len(mean) > 1 and abs(float(mean.sum()) - 1) < 1e-9 and bool((mean >= 0).all()) and a < 1
        share = (float(mean.max()) - a / len(mean)) / (1 - a) if classes else 1.0
        return BestConstant(self._factor(len(mean)) * spread, share) if spread > 1e-9 * square else None

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
class Logistic(Loss):
    """Logistic loss: t log(1 + e^-f) + (1 - t) log(1 + e^f), t = (1 - a) y + a / 2, for labels y = 0 and 1.

    `nn.BCEWithLogitsLoss` with smoothed labels; the mean over outputs, if there are several. C is p (1 - p) with p the
    sigmoid of f. With a > 0 the loss is least at p = t, where C = a (2 - a) / 4 whatever the label.

    >>> f = torch.tensor([[0.9]], dtype=torch.float64).logit()
    >>> round(Logistic(label_smoothing=0.2).output_hessian(f, torch.ones(1)).item(), 12)
    0.09
    """

    name = "logistic"
    apart = convex = closed = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = _checked_smoothing(label_smoothing, self.name)
        self.settings = {"label_smoothing": label_smoothing} if label_smoothing else {}

    def _target(self, f: Tensor, y: Any) -> Tensor:
        target: Tensor = torch.as_tensor(y, device=f.device)
        if not one_each(f, target) or bool(((target < 0) | (target > 1)).any()):
            raise BadData(
                f"logistic needs a label from 0 to 1 for each output, shape {tuple(f.shape)}, got shape "
                f"{tuple(target.shape)} from {float(target.min()):.4g} to {float(target.max()):.4g}",
                argument="data",
                remedy="(y + 1) / 2 makes them of labels -1 and 1",
            )
        return (1 - self.label_smoothing) * target.reshape(f.shape).to(f.dtype) + self.label_smoothing / 2

    def values(self, f: Tensor, y: Any) -> Tensor:
        """Return the mean over outputs, (n,)."""
        return F.binary_cross_entropy_with_logits(f, self._target(f, y), reduction="none").mean(1)

    def least(self, f: Tensor, y: Any) -> Tensor:
        """Return the entropy of the smoothed labels: the loss at sigmoid(f) = t."""
        t = self._target(f.to(torch.float64), y)
        entropy: Tensor = (torch.special.entr(t) + torch.special.entr(1 - t)).mean(1)
        return entropy

    def output_hessian_product(self, f: Tensor, y: Any) -> Callable[[Tensor], Tensor]:
        """Return the function that multiplies u by p (1 - p) / N, accurate where p is near 0 or 1."""
        wide = f.detach().to(torch.float64)
        curvature = wide.sigmoid() * (-wide).sigmoid() / f.shape[1]
        return lambda u: curvature * u.to(torch.float64)

    def correct(self, f: Tensor, y: Any) -> Tensor | None:
        """Return whether a network of one output has the label's sign, (n,) float64; None unless labels are 0 and 1."""
        target = torch.as_tensor(y, device=f.device).reshape(len(f), -1)
        if f.shape[1] > 1 or bool(((target != 0) & (target != 1)).any()):
            return None
        return ((f > 0) == (target > 0)).to(torch.float64)[:, 0]


def _checked_smoothing(a: float, name: str) -> float:
    if isinstance(a, bool) or not (isinstance(a, int | float) and 0 <= a <= 1):
        raise BadLoss("label_smoothing must be a number from 0 to 1", value=f"{name}(label_smoothing={a!r})")
    return a


@final
class CrossEntropy(Loss):
    """Cross-entropy of softmax(f), with torch's class weights, `ignore_index` and label smoothing."""

    name = "cross_entropy"
    apart = convex = closed = places = True

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        if weight is not None and not bool((fine := (weight >= 0) & weight.isfinite()).all()):
            got = f"{float(weight[~fine][0]):.4g}"
            raise BadLoss(f"class weights must be finite and not negative, got {got}", value="CrossEntropyLoss")
        self.weight, self.ignore_index, self.label_smoothing = weight, ignore_index, label_smoothing
        given = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        plain = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0}  # torch's defaults
        self.settings = {name: v for name, v in given.items() if v is not plain[name] and v != plain[name]}

    def _weight(self, f: Tensor, dtype: torch.dtype) -> Tensor:
        one = torch.ones(f.shape[1]) if self.weight is None else self.weight
        return one.to(f.device, dtype)

    def _target(self, f: Tensor, y: Any) -> Tensor:
        target: Tensor = torch.as_tensor(y, device=f.device)
        if target.is_floating_point():
            if target.shape != f.shape:
                raise BadData(
                    f"cross_entropy needs integer labels of shape ({len(f)},) or class probabilities of shape "
                    f"{tuple(f.shape)}, got {tuple(target.shape)} {target.dtype}{_mending(target)}",
                    argument="data",
                )
            return probabilities(target, self.name).to(f.dtype)
        if target.shape != (len(f),):
            raise BadData(
                f"cross_entropy needs labels of shape ({len(f)},), got {tuple(target.shape)}{_mending(target)}",
                argument="data",
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

    def target_sums(self, f: Tensor, y: Any) -> Tensor:
        """Return how often each class is the label, or the sum of its probabilities, (N,)."""
        target = self._target(f, y)
        if target.is_floating_point():
            return target.to(torch.float64).sum(0).cpu()
        counted = target[target != self.ignore_index]
        return torch.bincount(counted, minlength=f.shape[1]).to(torch.float64).cpu()

    def constant(self, sums: Tensor, mass: float) -> BestConstant | None:
        """Return the fit by the frequencies of the classes, as the loss smoothes and weighs them.

        The entropy of N frequencies among n samples is too small by (N - 1) / 2n (Miller and Madow); that of equal
        probabilities is the largest one.
        """
        total, N = float(sums.sum()), len(sums)
        if bool((sums == total).any()):
            return None
        a = smoothed(sums[None] / total, self.label_smoothing)[0] * self._weight(sums[None], torch.float64)
        entropy = float(torch.special.entr(a).sum() - torch.special.entr(a.sum()))
        whole = float(a.sum())
        loss = min(entropy + whole * (N - 1) / (2 * total), whole * math.log(N)) * total / mass
        return BestConstant(loss, float(sums.max()) / total)

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return the weight of the label's class; 0 where ignored; 1 for class probabilities, as in torch."""
        target = self._target(f, y)
        if target.is_floating_point():
            return super().mass(f, y)
        seen = target != self.ignore_index
        return torch.where(seen, self._weight(f, f.dtype)[target.where(seen, 0)], 0.0).to(torch.float64)

    def output_hessian(self, f: Tensor, y: Any) -> Tensor:
        """Return C = (sum_k a_k)(diag p - p p^T), with p_k * (sum of the others) where rows are close to one-hot."""
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
        """Return the product for the softmax's categorical distribution, times the mass; smoothing plays no part."""
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
    name = type(module).__name__
    means = ("mean", "batchmean") if isinstance(module, nn.KLDivLoss) else ("mean",)
    if getattr(module, "reduction", "mean") not in means:
        raise BadLoss(
            "the risk is a mean over samples",
            value=f"{name}(reduction={module.reduction!r})",
            remedy="use reduction='mean', or pass a function (outputs, targets) -> losses of shape (n,)",
        )
    if isinstance(module, nn.CrossEntropyLoss) and type(module).forward is nn.CrossEntropyLoss.forward:
        return CrossEntropy(module.weight, module.ignore_index, module.label_smoothing)
    if type(module).forward is nn.MSELoss.forward:
        return SquaredError("mse")
    return other_module(module)


OWN_LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": CrossEntropy,
    "half_squared_error": functools.partial(SquaredError, "half_squared_error"),
    "mse": functools.partial(SquaredError, "mse"),
    "logistic": Logistic,
}


def _named(name: str) -> Loss:
    """Return flatlens's loss of this name, or torch's of this class or function, in any spelling that is one's alone.

    >>> _named("HuberLoss"), _named("huber"), _named("l1_loss")
    (HuberLoss, HuberLoss, L1Loss)
    >>> _named("cross_entropy(label_smoothing=0.1)").description
    'cross_entropy(label_smoothing=0.1)'
    """
    own, options = name, dict[str, Any]()
    with suppress(ValueError):
        own, options = spelled(name)
    if own in OWN_LOSSES:
        if unknown := options.keys() - {"label_smoothing"}:
            raise UnknownName.among("option", min(unknown), ["label_smoothing"], where=f"of {own}")
        return OWN_LOSSES[own](**{key: _checked_smoothing(a, own) for key, a in options.items()})
    torchs = {kind.__name__: kind for kind in MODULE_OF.values()} | {f.__name__: kind for f, kind in MODULE_OF.items()}
    plain = name.removeprefix("torch.").removeprefix("nn.").removeprefix("functional.").removesuffix("()")
    same = {kind for one, kind in torchs.items() if _short(one) == _short(plain)}
    near = {kind for one, kind in torchs.items() if _short(one).startswith(_short(plain))}
    if plain in torchs or len(same) == len(near) == 1:
        return _from_module(torchs.get(plain, *same)())
    if same:
        told = ", ".join(sorted(kind.__name__ for kind in near))
        raise UnknownName(f"unknown loss {name!r}: did you mean {told} (of torch.nn)?")
    raise UnknownName.among("loss", name, [*OWN_LOSSES, *(kind.__name__ for kind in MODULE_OF.values())])


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
        raise BadLoss("a class, not a loss", value=loss.__name__, remedy=f"write {loss.__name__}()")
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        require_two_arguments(loss, name)
        return CustomLoss(loss, name, settings=settings_of_function(loss))
    raise BadLoss(
        f"expected a name ({', '.join(OWN_LOSSES)}), a torch loss, a function (outputs, targets) -> losses, or a dict "
        "of these for several heads, got "
        f"{type(loss).__name__}{': the order is Problem(model, loss, data)' * isinstance(loss, Tensor)}"
    )
