"""Networks drawn from descriptions: plain modules, float64, small, with data whose outliers wake rare branches.

A description is a frozen dataclass; `build` makes the network and its data of it, the same ones every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import drawn_features as features
import drawn_stages as wired
import torch
from drawn_attention import ATTENTION
from drawn_stages import RARE_TOKEN, Factory, Kit, Stage
from hypothesis import strategies as st
from literal_curvature import LOSSES, LossOf
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, VOCABULARY = 3, 7
SHAPES = {"vector": (), "tokens": (TOKENS,), "signal": (6,), "picture": (4, 4)}  #: beside features or channels
DIMS = {"signal": 1, "picture": 2}

EVERYWHERE = wired.RARE | wired.HOOKED | wired.PARAMETRISED | wired.SHARED | wired.SCALARS | wired.PLAIN
ROWS = wired.OVERRIDDEN | wired.SHARED_LINEAR | wired.EXPERTS | features.NORMS_OF_ROWS
MAPS = features.CONVOLUTIONS | features.NORMS_OF_CHANNELS
STAGES: dict[str, dict[str, Factory]] = {
    "vector": EVERYWHERE | ROWS | features.NORMS_OF_VECTORS | wired.OPERANDS | wired.VIEWS,
    "tokens": EVERYWHERE | ROWS | ATTENTION | wired.FOLDED,
    "ids": EVERYWHERE | ROWS | ATTENTION | wired.FOLDED,
    "signal": EVERYWHERE | MAPS,
    "picture": EVERYWHERE | MAPS | features.PICTURES,
}
FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Factory]]] = {  #: the spaces, and a stage of which there must be
    "rare": (("vector", "vector", "tokens", "signal", "picture"), wired.RARE),
    "hooked": (("vector", "vector", "tokens", "picture"), wired.HOOKED),
    "parametrised": (("vector", "vector", "tokens", "signal"), wired.PARAMETRISED),
    "overridden": (("vector", "vector", "tokens", "picture"), wired.OVERRIDDEN | features.PICTURES),
    "shared": (("vector", "vector", "ids", "signal"), wired.SHARED | wired.SHARED_LINEAR),
    "experts": (("vector", "vector", "tokens", "ids"), wired.EXPERTS),
    "embedded": (("ids",), wired.RARE | wired.PLAIN | wired.SHARED_LINEAR | wired.EXPERTS),
    "scalars and norms": (
        ("vector", "tokens", "picture"),
        wired.SCALARS | features.NORMS_OF_ROWS | features.NORMS_OF_VECTORS | features.NORMS_OF_CHANNELS,
    ),
    "convolutional": (("signal", "picture"), features.CONVOLUTIONS | features.PICTURES),
    "attention": (("tokens", "ids"), ATTENTION),
    "operands": (("vector",), wired.OPERANDS),
    "views": (("vector",), wired.VIEWS),
    "folded": (("tokens", "ids"), wired.FOLDED),
    "positions": (("vector", "tokens"), EVERYWHERE | ROWS),
}
POSITIONS = 3  #: of an output, where the loss takes classes at positions; as many as there may be classes
ENTRIES = ("embedding", "padding", "positions", "looked up again", "looked up again, rarely", "scaled")
HEADS = ("mean", "first", "tied", "tied slice")


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    """A loss of the user's own."""
    return (f - y).cosh().log().sum(1)


def half_squared(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum(1)


def mse(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean(1)


def at_positions(f: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of outputs (n, C, L), flattened, with labels (n, L) or class probabilities (n, C, L)."""
    return F.cross_entropy(f.unflatten(1, (-1, POSITIONS)), y, reduction="none").mean(1)


LOSS_OF: dict[str, LossOf] = {
    "cross_entropy": LOSSES["cross_entropy"], "half_squared_error": half_squared, "mse": mse, "log_cosh": log_cosh
}  # fmt: skip
OF_POSITIONS = ("labels at positions", "probabilities at positions")
LOSS_OF |= dict.fromkeys(OF_POSITIONS, at_positions)


@dataclass(frozen=True)
class Drawn:
    """A network and its data, described."""

    space: str  #: what the input is
    stages: tuple[tuple[str, int], ...]  #: (name, variant)
    n: int
    inputs: int
    width: int
    outputs: int
    loss: str
    few: int  #: samples with an outlier or a rare token
    chunk: int  #: samples in a chunk, 0 for all
    seed: int
    entry: str = "embedding"  #: of ids
    head: str = "mean"
    train: bool = False  #: the mode that the model is handed over in
    second: str = ""  #: which second derivatives are judged, too: "product", "trace", "layers"


class Program(nn.Module):
    """An entry, stages one after another that see the input, too, and a head."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.space, self.entry, self.kind = drawn.space, drawn.entry, drawn.head
        width = drawn.width
        if drawn.space == "ids":
            self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0 if drawn.entry == "padding" else None)
            self.place = nn.Embedding(TOKENS, width) if drawn.entry == "positions" else None
        widths = [width if drawn.space == "ids" else drawn.inputs] + [width] * len(drawn.stages)
        made = [
            STAGES[drawn.space][name](Kit(i, o, DIMS.get(drawn.space, 0), pick))
            for (name, pick), i, o in zip(drawn.stages, widths[:-1], widths[1:], strict=True)
        ]
        self.stages = nn.ModuleList(made)
        self.positions = drawn.loss in OF_POSITIONS
        outputs = drawn.outputs * POSITIONS if self.positions else drawn.outputs
        self.head = nn.Linear(width, VOCABULARY if self.tied else outputs)
        if self.tied:
            self.head.weight = self.embed.weight
        self.outputs = drawn.outputs

    @property
    def tied(self) -> bool:
        return self.space == "ids" and self.kind == "tied"

    def begin(self, x: Tensor) -> Tensor:
        """The features that the first stage reads."""
        if self.space != "ids":
            return x
        h = self.embed(x)
        if self.place is not None:
            h = h + self.place(torch.arange(TOKENS))
        if self.entry == "looked up again":
            h = h + self.embed(x.flip(1)).tanh()
        if self.entry == "looked up again, rarely":
            h = h + wired.rare(h, x) * self.embed(x.flip(1))
        return h * h.shape[2] ** 0.5 if self.entry == "scaled" else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x)
        for stage in self.stages:
            h = stage(h, x)
        return self.end(h)

    def end(self, h: Tensor) -> Tensor:
        """Outputs of the last features."""
        if self.space in DIMS:
            h = h.flatten(2).mean(2)
        elif self.space != "vector":
            h = h[:, 0] if self.kind == "first" else h.mean(1)
        if self.space == "ids" and self.kind == "tied slice":
            return F.linear(h, self.embed.weight[: self.outputs])
        f = self.head(h)
        return f.unflatten(1, (-1, POSITIONS)) if self.positions else f


def _inputs(drawn: Drawn, rare: Tensor) -> Tensor:
    """Ordinary entries below 2.6 in size, one beyond 6 in each rare sample; or ids."""
    if drawn.space == "ids":
        x = torch.randint(0, RARE_TOKEN, (drawn.n, TOKENS))
        x[rare, torch.randint(0, TOKENS, (len(rare),))] = RARE_TOKEN
        return x
    features = (drawn.inputs,)
    shape = SHAPES[drawn.space] + features if drawn.space in ("vector", "tokens") else features + SHAPES[drawn.space]
    x = torch.randn(drawn.n, *shape, dtype=torch.float64)
    x = torch.where(x.abs() > 2.6, x / 3, x).flatten(1)
    x[rare, torch.randint(0, x.shape[1], (len(rare),))] = (6 + 3 * torch.rand(len(rare))).double() * (
        1 - 2 * torch.randint(0, 2, (len(rare),))
    )
    return x.reshape(drawn.n, *shape)


def _unlike_new(net: nn.Module) -> None:
    """Norms and biases away from their defaults."""
    for name, p in net.named_parameters():
        if p.ndim == 1 and "original" not in name and "weight_g" not in name:
            p.copy_(0.4 * torch.randn_like(p) + float("norm" in name and "weight" in name))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)


def _targets(drawn: Drawn, f: Tensor) -> Tensor:
    if drawn.loss == "cross_entropy":
        return torch.randint(0, f.shape[1], (drawn.n,))
    if drawn.loss == "labels at positions":
        return torch.randint(0, f.shape[1], (drawn.n, POSITIONS))
    y = torch.randn_like(f)
    return y.softmax(1) if drawn.loss == "probabilities at positions" else y


@torch.no_grad()
def build(drawn: Drawn) -> tuple[Program, Tensor, Tensor]:
    """(the network, inputs, targets)."""
    with torch.random.fork_rng():
        torch.manual_seed(drawn.seed)
        net = Program(drawn).double().eval()
        _unlike_new(net)
        x = _inputs(drawn, torch.randperm(drawn.n)[: drawn.few])
        h = net.begin(x)
        for stage in net.stages:
            assert isinstance(stage, Stage)
            stage.set_cut(h, x, drawn.few)
            h = stage(h, x)
        f = net.end(h)
        y = _targets(drawn, f)
    return net.train(drawn.train), x, y


@st.composite
def networks(draw: Callable[..., object], family: str) -> Drawn:
    """Descriptions with at least one stage of a family, others of any kind around it.

    Every choice is drawn from options of its own: hypothesis copies choices among those of the same options, and five
    draws of six would be near copies of the sixth.
    """

    def one_of(*options):
        return draw(st.sampled_from(options))

    spaces, own = FAMILIES[family]
    space = one_of(*spaces)
    every = [(name, variant) for name in sorted(STAGES[space]) for variant in range(7)]
    mine = one_of(*((name, variant) for name, variant in every if name in own))
    before, after = one_of(None, None, *every), one_of(*reversed(every), None, None, None)
    stages = tuple(stage for stage in (before, mine, after) if stage is not None)
    second = one_of("", "", "", "", "", "product", "trace", "layers")
    small = second or {"encoder layer", "a block twice", "attention block twice", "lstm"} & set(dict(stages))
    outputs = one_of(2, 3, 1) if small else one_of(2, 3, 4, 1)
    n = one_of(9, 12, 6) if small else one_of(12, 20, 33, 40)
    if family == "positions":
        outputs, losses = one_of(3, 2), list(OF_POSITIONS)
    else:
        losses = [n for n in LOSS_OF if n not in OF_POSITIONS and (outputs > 1 or n != "cross_entropy")]
    widths = (4, 2, 3) if small or space != "vector" else (4, 2, 3, 5, 6)
    return Drawn(
        space=space,
        stages=stages,
        n=n,
        inputs=one_of(3, 2) if space in DIMS else one_of(3, 2, 4, 5, 6),
        width=one_of(*widths),
        outputs=outputs,
        loss=one_of(*losses),
        few=one_of(1, 1, 2),
        chunk=one_of(0, 0, 0, n // 2, outputs, 7, 1),
        seed=draw(st.integers(0, 10**6)),
        entry=one_of(*ENTRIES) if space == "ids" else ENTRIES[0],
        head=one_of(*HEADS) if space == "ids" else one_of(*HEADS[:2]) if space == "tokens" else HEADS[0],
        train=one_of(True, False),
        second=second,
    )
