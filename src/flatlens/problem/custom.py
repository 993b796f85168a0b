"""Losses that are not flatlens's own: torch's modules and functions, and functions and modules of the user's."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatlens.errors import BadLoss, LossFailed
from flatlens.problem.apart import AS_ONE
from flatlens.problem.batches import picked
from flatlens.problem.loss import Loss, one_each
from flatlens.userfile import needed_arguments, takes, users_code

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

_MEND = "return losses of shape (n,), one for each sample"


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
        self.whole, self.masses, self.ignore_index = not by_row, masses, ignore_index
        self._settings = dict(settings)

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the module's options."""
        return self._settings

    def values(self, f: Any, y: Any) -> Tensor:
        """Return the callable's losses, (n,)."""
        if self.singly:
            n = samples_of(f)
            alone = [torch.tensor([i]) for i in range(n)]
            return torch.stack([self._called(picked(f, i, n), picked(y, i, n), 1).reshape(()) for i in alone])
        return self._called(f, y, samples_of(f))

    def mass(self, f: Tensor, y: Any) -> Tensor:
        """Return what each sample adds to the risk's denominator, (n,) float64."""
        return super().mass(f, y) if self.masses is None else self.masses(f, y).to(torch.float64)

    def _called(self, f: Any, y: Any, n: int) -> Tensor:
        if isinstance(y, Tensor) and y.is_floating_point() and isinstance(f, Tensor):
            y = y.to(f.dtype)
        with users_code(lambda line: LossFailed(f"Problem(loss={self.name}): the loss failed on {n} samples ({line})")):
            values = self.function(f, y)
        if not isinstance(values, Tensor):
            raise BadLoss(
                f"Problem(loss={self.name}): a loss must return a tensor of shape ({n},), got {type(values).__name__}"
            )
        return values

    def settled(self, f: Any, y: Any) -> CustomLoss:
        """Return the loss for outputs like these: one that returns the mean of a batch is called for each sample."""
        if self.singly or self._called(f, y, samples_of(f)).ndim:
            return self
        return CustomLoss(self.function, self.name, by_row=self.by_row, singly=True, settings=self._settings)

    def require_apart(self, f: Any, y: Any) -> None:
        """Refuse a loss that couples samples, or whose value for a batch is not the mean of its samples' own."""
        if not self.singly:
            super().require_apart(f, y)
            return
        n = samples_of(f)
        draw = torch.Generator().manual_seed(n)
        alone = self.values(f, y).detach()
        for size in sorted({n, -(-n // 2), min(n, 3), min(n, 2)}, reverse=True):
            rows = torch.randperm(n, generator=draw)[:size].sort().values
            batch = float(self._called(picked(f, rows, n), picked(y, rows, n), size))
            mean = float(alone[rows.to(alone.device)].mean())
            if abs(batch - mean) > 1e3 * torch.finfo(alone.dtype).eps * float(alone.abs().max()):
                summed = abs(batch - size * mean) <= 1e-6 * abs(batch)
                how = "it is their sum" if summed else "the samples do not count alike, or influence each other"
                mend = "" if summed else f"; {AS_ONE}"
                raise BadLoss(
                    f"Problem(loss={self.name}): the loss of {size} samples together is {batch:.6g}, the mean of their "
                    f"own losses is {mean:.6g} ({how}), but the risk is a mean over samples: {_MEND}{mend}"
                )


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
        raise BadLoss(f"Problem(loss=...): {kind.__name__} does not take these options ({error})") from error
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
            f"Problem(loss={name}): it holds the weights of a layer, which would not be measured: put the layer into "
            f"the network, and use nn.CrossEntropyLoss()"
        )
    if getattr(module, "weight", None) is not None and type(module) not in _WEIGHTED:
        raise BadLoss(
            f"Problem(loss={name}): it is not known how its mean takes the class weights: pass a function (outputs, "
            f"targets) -> losses of shape (n,)"
        )
    if not hasattr(module, "reduction"):
        return CustomLoss(module, name, settings=settings)
    ignored: int = getattr(module, "ignore_index", -100)
    if ignored != -100 and not labels:
        raise BadLoss(
            f"Problem(loss={name}): ignore_index is supported for CrossEntropyLoss and NLLLoss only: pass a function "
            f"(outputs, targets) -> losses of shape (n,)"
        )
    each, summed = copy.deepcopy(module), module.reduction == "batchmean"
    each.reduction = "none"  # type: ignore[assignment]
    arguments = _OF_TWO.get(type(module))
    if arguments is None:
        require_two_arguments(module.forward, name)

    def values(f: Any, y: Any) -> Tensor:
        if arguments is None:
            _require_no_weights_of_samples(module, f)
            losses: Tensor = each.to(f)(f, _shaped(f, y, module))
        else:
            losses = each(*arguments(_two(f, name), y))
        n = samples_of(f)
        if losses.ndim < 2:
            return losses
        return losses.reshape(n, -1).sum(1) if summed else losses.reshape(n, -1).mean(1)

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
            f"Problem(loss={name}): it is computed from ({', '.join(needed)}), not from (outputs, targets): pass a "
            f"function (outputs, targets) -> losses of shape (n,) that calls it (targets may be a tuple)"
        )


_WEIGHTED = (nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss)
"""torch losses with weights by which their mean does not divide, but for NLLLoss."""

_OF_TWO: dict[type[nn.Module], Callable[[tuple[Tensor, Tensor], Any], tuple[Any, ...]]] = {
    nn.GaussianNLLLoss: lambda f, y: (f[0], _shaped(f[0], y, nn.MSELoss()), f[1]),
    nn.MarginRankingLoss: lambda f, y: (*f, y),
    nn.CosineEmbeddingLoss: lambda f, y: (*f, y),
}
"""torch losses of two outputs and one target: their arguments."""


def _two(f: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the two outputs of a network."""
    parts = tuple(f.values()) if isinstance(f, Mapping) else f
    if isinstance(parts, Tensor) or len(parts) != 2:
        raise BadLoss(
            f"Problem(loss={name}): it needs two outputs, such as (mean, variance): return a tuple of two tensors from "
            f"the network, or through forward=(model, batch) -> (outputs, targets)"
        )
    return parts[0], parts[1]


def _require_no_weights_of_samples(module: nn.Module, f: Tensor) -> None:
    """Refuse weights that torch spreads over the samples of one batch: the next batch would get the same ones."""
    for name, weight in module.named_buffers():
        if weight.shape[: max(0, weight.ndim - (f.ndim - 1))].numel() > 1:
            raise BadLoss(
                f"Problem(loss={type(module).__name__}): {name} of shape {tuple(weight.shape)} has a value for each "
                f"sample of a batch (outputs {tuple(f.shape)}): give weights of samples as a second target, and a "
                f"function (outputs, (targets, weights)) -> losses of shape (n,)"
            )


def settings_of(module: nn.Module) -> dict[str, object]:
    """Return a loss module's options, parameters and buffers.

    >>> settings_of(nn.HuberLoss(delta=2.0))
    {'delta': 2.0}
    """
    plain = {name: v for name, v in vars(module).items() if name[0] != "_" and name not in ("training", "reduction")}
    return plain | dict(module.named_parameters()) | dict(module.named_buffers())


def _shaped(f: Tensor, y: Any, module: nn.Module) -> Any:
    """Return targets in the outputs' shape, and in their dtype where torch's loss compares numbers.

    Without this, targets that broadcast would be averaged over other samples' targets.
    """
    if not isinstance(y, Tensor) or isinstance(module, INDEXED):
        return y
    labels = not y.is_floating_point()
    if one_each(f, y):
        return y.reshape(f.shape).to(f.dtype if labels and _is_torchs(module) else y.dtype)
    if labels and not _is_torchs(module):  # class labels, for a loss of the user's own
        return y
    raise BadLoss(
        f"Problem(loss={type(module).__name__}): targets of shape {tuple(y.shape)} do not fit outputs of shape "
        f"{tuple(f.shape)}: this loss needs one target for each output, so equal shapes"
    )


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__ == nn.MSELoss.__module__


INDEXED = (nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
"""torch losses whose targets are class numbers"""


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
