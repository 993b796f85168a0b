"""Schemes of compression: what a weight becomes when it has fewer bits, entries or ranks, and how many bits it takes.

    int8, int4      w -> s round(w / s), s = max |w| / (2^(bits - 1) - 1): symmetric, to the nearest, 0 stays 0
    float8          w -> s e4m3(w / s), s = max |w| / 448: one sign, four bits of exponent, three of fraction
    prune           the `share` of a weight's entries that are smallest in size become 0
    low_rank        the nearest matrix in factors with at most `share` of the weight's entries

The maximum is over an output channel, over the tensor with `by='tensor'`, or with `group=32` over 32 successive entries
of a channel, fewer at its end. A scale has 32 bits and is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput, UnknownName
from flatlens.operations.layers import TRANSPOSED, adapter_of
from flatlens.registry import spelled

ScaleOf = Literal["channel", "tensor", "group"]
SCALE_BITS = 32  #: bits of a scale
_LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Scheme:
    """A way to compress a weight.

    >>> int4 = scheme("int4(by='tensor')")
    >>> int4.bits, int4(torch.tensor([[7.0, 3.4], [0.2, -1.0]])).tolist()
    (4, [[7.0, 3.0], [0.0, -1.0]])
    >>> scheme("int4(group=2)")(torch.tensor([[7.0, 3.4, 0.2, -0.7, 0.4]])).tolist()
    [[7.0, 3.0, 0.20000000298023224, -0.699999988079071, 0.4000000059604645]]
    >>> scheme("prune(share=0.5)")(torch.tensor([[7.0, 3.4], [0.2, -1.0]])).tolist()
    [[7.0, 3.4000000953674316], [0.0, 0.0]]
    """

    name: str  #: as it is spelled, with its options
    kind: Literal["int", "float8", "prune", "low_rank"]
    bits: int = 0  #: bits of an entry; 0 where entries keep their own
    by: ScaleOf = "channel"  #: the entries that share a scale
    group: int = 0  #: number of them, where `by` is "group"
    share: float = 0.0

    def __call__(self, W: Tensor) -> Tensor | None:
        """Return the compressed weight, (d, m) as W, a row for each output; None where the scheme leaves nothing."""
        if self.kind == "prune":
            few = round(self.share * W.numel())
            pruned = W.flatten().clone()
            pruned[W.flatten().abs().argsort(stable=True)[:few]] = 0.0
            return pruned.view_as(W)
        if self.kind == "low_rank":
            if (rank := self.rank(*W.shape)) < 1:
                return None
            U, S, V = torch.linalg.svd(W, full_matrices=False)
            nearest: Tensor = (U[:, :rank] * S[:rank]) @ V[:rank]
            return nearest
        # the largest size among the entries that share a scale: (), (d, 1) or, by groups, (d, m)
        size = W.abs().amax() if self.by == "tensor" else W.abs().amax(1, keepdim=True)
        if self.by == "group":
            filled = nn.functional.pad(W.abs(), (0, -W.shape[1] % self.group))
            size = filled.view(len(W), -1, self.group).amax(2).repeat_interleave(self.group, 1)[:, : W.shape[1]]
        largest = _LARGEST_E4M3 if self.kind == "float8" else float(2 ** (self.bits - 1) - 1)
        scale = torch.where(size > 0, size / largest, 1.0)  # zeros stay
        entries = (W / scale).clamp(-largest, largest)
        if self.kind == "float8":
            return entries.to(torch.float32).to(torch.float8_e4m3fn).to(W) * scale
        return entries.round() * scale

    def rank(self, d: int, m: int) -> int:
        """Return the rank of the factors (d, r) and (r, m)."""
        return int(self.share * d * m / (d + m))

    def size(self, d: int, m: int, stored: int) -> int:
        """Return the bits of a compressed weight, (d, m), whose entries have `stored` bits.

        Of a pruned one: its entries that are not 0, and a bit for the place of each.
        """
        if self.kind == "prune":
            return stored * (d * m - round(self.share * d * m)) + d * m
        if self.kind == "low_rank":
            return stored * self.rank(d, m) * (d + m)
        scales = 1 if self.by == "tensor" else d * (-(-m // self.group) if self.group else 1)
        return self.bits * d * m + SCALE_BITS * scales

    @property
    def quantises(self) -> bool:
        """Return whether the scheme reduces the bits of every entry."""
        return self.bits > 0


SCHEMES = {
    "int8": Scheme("int8", "int", 8),
    "int4": Scheme("int4", "int", 4),
    "float8": Scheme("float8", "float8", 8),
    "prune": Scheme("prune", "prune", share=0.5),
    "low_rank": Scheme("low_rank", "low_rank", share=0.5),
}
DEFAULT = (
    "int8", "int4", "int4(by='tensor')", "float8", "prune(share=0.5)", "prune(share=0.8)", "low_rank(share=0.5)",
)  # fmt: skip
"""The schemes that are measured unless others are named."""


def scheme(name: str) -> Scheme:
    """Return the scheme that a name with options spells."""
    refused: dict[str, object] = {"argument": "schemes", "value": name, "call": "compression"}
    try:
        known, options = spelled(name)
    except ValueError:
        known, options = name, {}
    if known not in SCHEMES:
        raise UnknownName.among("scheme", known, SCHEMES, argument="schemes", call="compression")
    found = SCHEMES[known]
    allowed = ("by", "group") if found.quantises else ("share",)
    if other := [option for option in options if option not in allowed]:
        told = " or ".join(map(repr, allowed))
        raise BadInput(f"{known} has no option {other[0]!r}: its option is {told}", **refused)  # type: ignore[arg-type]
    if options.get("by", "channel") not in ("channel", "tensor"):
        raise BadInput("by= must be 'channel' or 'tensor'; group=32 is by groups", **refused)  # type: ignore[arg-type]
    if len(options) > 1:
        raise BadInput("give by= or group=, not both", **refused)  # type: ignore[arg-type]
    group = options.get("group", 1)
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise BadInput("group= must be a whole number of at least 1", **refused)  # type: ignore[arg-type]
    share = options.get("share", 0.5)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise BadInput("share= must lie between 0 and 1", **refused)  # type: ignore[arg-type]
    told = ", ".join(f"{option}={value!r}" for option, value in options.items())
    options |= {"by": "group"} if "group" in options else {}
    return replace(found, name=f"{known}({told})" if told else known, **options)


def schemes_named(asked: str | Scheme | Iterable[str | Scheme] | None) -> list[Scheme]:
    """Return the schemes asked for, each once: names, schemes, or None for the usual ones."""
    given = DEFAULT if asked is None else [asked] if isinstance(asked, str | Scheme) else asked
    given = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(one, str | Scheme) for one in given):
        raise BadInput("expected names of schemes", argument="schemes", value=asked, call="compression")
    found = {one.name: one for one in (scheme(one) if isinstance(one, str) else one for one in given)}
    if not found:
        raise BadInput("name at least one scheme", argument="schemes", value=[], call="compression")
    return list(found.values())


def output_axis(module: nn.Module, name: str) -> int:
    """Return the axis of a weight that has its output channels: 1 in transposed convolutions and in Conv1D, else 0."""
    transposed = isinstance(module, TRANSPOSED) or getattr(adapter_of(module), "transposed", False)
    return int(name == "weight" and transposed)


def in_matrix(act: Callable[[Tensor], Tensor | None], weight: Tensor, axis: int) -> Tensor | None:
    """Return what `act` makes of a weight as a matrix (d, m) with a row for each output, in the weight's own shape."""
    first = weight.transpose(0, axis)
    made = act(first.reshape(len(first), -1))
    return None if made is None else made.reshape(first.shape).transpose(0, axis)
