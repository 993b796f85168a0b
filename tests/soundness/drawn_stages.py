"""The stages that drawn networks are put together from, by what makes them hard to measure.

A stage turns features h into others of the same kind, and sees the network's input x, too: a few samples hold an
outlier (or a rare token), and `rare(h, x)` is true for them alone. `s.cut` is set after the network is built so that
`s.watched` exceeds it for as few samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from drawn_layers import (
    Clipping,
    Equalised,
    LowRank,
    LowRankChange,
    Normalising,
    RarelySquaredReLU,
    Rescaling,
    Routed,
    Saturating,
    Scaled,
    Skipping,
    Standardised,
    TemperedNorm,
)
from networks import SquaredReLU
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

OUTLIER = 5.0  #: beyond it no entry of an ordinary sample
RARE_TOKEN = 6
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Softplus, nn.LeakyReLU, nn.SiLU, nn.Identity)


def rare(h: Tensor, x: Tensor) -> Tensor:
    """Which samples hold an outlier, (n, 1, ...) as h has axes."""
    far = x.flatten(1).abs().amax(1) > OUTLIER if x.is_floating_point() else (x == RARE_TOKEN).any(1)
    return far.reshape(-1, *[1] * (h.ndim - 1))


class Stage(nn.Module):
    """Modules and parameters put together by a function of (the stage, h, x)."""

    def __init__(self, wiring: Callable[[Stage, Tensor, Tensor], Tensor], watched=None, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.wiring, self.watched, self.cut = wiring, watched, 0.0

    def set_cut(self, h: Tensor, x: Tensor, few: int) -> None:
        """Between the `few` samples that are largest in what is watched and the others; beyond all where these hardly
        differ, for on which side of a cut a sample lies must not hang on rounding."""
        if self.watched is not None:
            largest = self.watched(self, h).flatten(1).amax(1).sort(descending=True).values
            apart = bool(largest[few - 1] - largest[few] > 1e-3)
            self.cut = float(largest[few - 1 : few + 1].mean() if apart else largest[0] + 1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.wiring(self, h, x)


@dataclass(frozen=True)
class Kit:
    """What a stage is made of: widths in and out, and layers of the features' kind."""

    i: int
    o: int
    dims: int  #: 0 for vectors and tokens, 1 for signals, 2 for pictures
    pick: int  #: chooses among variants

    def layer(self, i: int | None = None, o: int | None = None) -> nn.Module:
        """A linear layer, or a convolution that keeps sizes."""
        i, o = self.i if i is None else i, self.o if o is None else o
        convolution = {1: nn.Conv1d, 2: nn.Conv2d}.get(self.dims)
        return nn.Linear(i, o) if convolution is None else convolution(i, o, 3, padding=1)

    def act(self) -> nn.Module:
        return ACTIVATIONS[self.pick % len(ACTIVATIONS)]()

    def one_of(self, *variants):
        return variants[self.pick % len(variants)]


Factory = Callable[[Kit], Stage]


def _in_place_rows(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    out, mine = s.a(h), rare(h, x).flatten()
    if mine.any():
        out = out.clone()
        out[mine] = s.b(h[mine])
    return s.act(out)


def _branch(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    z = s.act(s.a(h))
    return torch.where(rare(z, x), s.b(z), z) if bool(rare(h, x).any()) else z


RARE: dict[str, Factory] = {
    "route": lambda k: Stage(
        lambda s, h, x: s.act(torch.where(rare(h, x), s.b(h), s.a(h))), a=k.layer(), b=k.layer(), act=k.act()
    ),
    "route of one weight": lambda k: Stage(
        lambda s, h, x: s.act(s.a(torch.where(rare(h, x), 2 * h, h))), a=k.layer(), act=k.act()
    ),
    "gate": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h)) + rare(h, x) * s.b(h), a=k.layer(), b=k.layer(), act=k.act()
    ),
    "late bend": lambda k: Stage(
        lambda s, h, x: F.relu(s.a(h)) + F.relu(s.a(h) - s.cut) ** 2, lambda s, h: s.a(h), a=k.layer()
    ),
    "late bend of one call": lambda k: Stage(
        lambda s, h, x: (lambda z: torch.where(z > s.cut, z * z / (abs(s.cut) + 1), z))(s.a(h)),
        lambda s, h: s.a(h),
        a=k.layer(),
    ),
    "late reader": lambda k: Stage(
        lambda s, h, x: F.relu(s.a(h)) + s.b(F.relu(h - s.cut)), lambda s, h: h, a=k.layer(), b=k.layer()
    ),
    "clamp": lambda k: Stage(lambda s, h, x: s.act(s.a(h.clamp(-3, 3))), a=k.layer(), act=k.act()),
    "hardtanh": lambda k: Stage(
        lambda s, h, x: s.act(s.a(s.clip(h))), clip=nn.Hardtanh(-3, 3), a=k.layer(), act=k.act()
    ),
    "softshrink": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h)) + s.b(F.softshrink(h, 3.0)), a=k.layer(), b=k.layer(), act=k.act()
    ),
    "called again": lambda k: Stage(
        lambda s, h, x: s.o(torch.where(rare(h, x), s.a(s.act(s.a(h))), s.a(h))),
        a=k.layer(k.i, k.i), o=k.layer(), act=k.act(),
    ),
    "rows in place": lambda k: Stage(_in_place_rows, a=k.layer(), b=k.layer(), act=k.act()),
    "branch": lambda k: Stage(_branch, a=k.layer(), b=k.layer(k.o, k.o), act=k.act()),
    "blind": lambda k: Stage(
        lambda s, h, x: s.act(s.a(torch.where(rare(h, x), h.detach(), h))), a=k.layer(), act=k.act()
    ),
}  # fmt: skip


def _hooked(module: nn.Module, hook) -> nn.Module:
    module.register_forward_hook(hook)
    return module


def _pre_hooked(module: nn.Module, hook) -> nn.Module:
    module.register_forward_pre_hook(hook)
    return module


def _replaced(module: nn.Module) -> nn.Module:
    """Its forward overwritten on the instance."""
    plain = module.forward
    module.forward = lambda x: plain(x) + 0.5 * plain(2 * x)
    return module


def _around(layer: nn.Module, act: nn.Module) -> Stage:
    return Stage(lambda s, h, x: s.act(s.a(h)), a=layer, act=act)


HOOKED: dict[str, Factory] = {
    "output doubled": lambda k: _around(_hooked(k.layer(), lambda m, i, o: 2 * o), k.act()),
    "output doubled where large": lambda k: _around(
        _hooked(k.layer(), lambda m, i, o: torch.where(o > 2, 2 * o, o)), k.act()
    ),
    "output squared where large": lambda k: _around(
        _hooked(k.layer(), lambda m, i, o: torch.where(o > 2.5, o * o, o)), k.act()
    ),
    "output plus input": lambda k: _around(
        _hooked(k.layer(k.i, k.i), lambda m, i, o: o + i[0]), nn.Sequential(k.act(), k.layer())
    ),
    "output times the weight": lambda k: _around(_hooked(k.layer(), lambda m, i, o: o * m.weight.mean()), k.act()),
    "input doubled": lambda k: _around(_pre_hooked(k.layer(), lambda m, i: (2 * i[0],)), k.act()),
    "input clipped": lambda k: _around(_pre_hooked(k.layer(), lambda m, i: (i[0].clamp(-3, 3),)), k.act()),
    "activation hooked": lambda k: _around(k.layer(), _hooked(nn.ReLU(), lambda m, i, o: o + i[0] * o)),
    "container hooked": lambda k: _around(
        _hooked(nn.Sequential(k.layer(), nn.Identity()), lambda m, i, o: o * 3), k.act()
    ),
    "forward replaced": lambda k: _around(_replaced(k.layer()), k.act()),
}


def _parametrised(layer: nn.Module, change: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", change)
    return layer


def _low_rank_change(k: Kit) -> Stage:
    layer = k.layer()
    return _around(_parametrised(layer, LowRankChange(layer.weight)), k.act())


PARAMETRISED: dict[str, Factory] = {
    "weight norm": lambda k: _around(parametrizations.weight_norm(k.layer(), dim=k.one_of(0, 1)), k.act()),
    "weight norm by hook": lambda k: _around(nn.utils.weight_norm(k.layer()), k.act()),
    "spectral norm": lambda k: _around(parametrizations.spectral_norm(k.layer()), k.act()),
    "spectral norm by hook": lambda k: _around(nn.utils.spectral_norm(k.layer()), k.act()),
    "halved": lambda k: _around(_parametrised(k.layer(), Scaled()), k.act()),
    "low-rank change": _low_rank_change,
    "bias parametrised": lambda k: _around(
        parametrize.register_parametrization(k.layer(), "bias", Scaled()), k.act()
    ),
    "weight norm twice": lambda k: Stage(
        lambda s, h, x: s.o(s.a(s.act(s.a(h)))),
        a=parametrizations.weight_norm(k.layer(k.i, k.i)), o=k.layer(), act=k.act(),
    ),
}  # fmt: skip

OVERRIDDEN: dict[str, Factory] = {  # vectors and tokens
    "low rank": lambda k: _around(LowRank(k.i, k.o), k.act()),
    "equalised": lambda k: _around(Equalised(k.i, k.o), k.act()),
    "standardised": lambda k: _around(Standardised(k.i, k.o), k.act()),
    "skipping": lambda k: _around(Skipping(k.i, k.o), k.act()),
    "normalising": lambda k: _around(Normalising(k.i, k.o), k.act()),
    "clipping": lambda k: _around(Clipping(k.i, k.o), k.act()),
    "rescaling": lambda k: _around(Rescaling(k.i, k.o), k.act()),
    "saturating": lambda k: _around(Saturating(k.i, k.o), k.act()),
    "squared relu": lambda k: _around(k.layer(), SquaredReLU()),
    "rarely squared relu": lambda k: _around(k.layer(), RarelySquaredReLU()),
    "tempered norm": lambda k: _around(k.layer(), nn.Sequential(TemperedNorm(k.o), k.act())),
}


def _tie(s: Stage, name: str, other: str) -> Stage:
    getattr(s, other).weight = getattr(s, name).weight
    return s


def _corner(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """A rare branch through a corner of the other layer's weight."""
    z = F.relu(s.b(h) - s.cut)
    return s.o(F.relu(s.a(h)) + F.linear(z[..., :1], s.a.weight[:, :1]))


SHARED: dict[str, Factory] = {
    "twice": lambda k: Stage(
        lambda s, h, x: s.o(s.act(s.a(s.act(s.a(h))))), a=k.layer(k.i, k.i), o=k.layer(), act=k.act()
    ),
    "two modules of one weight": lambda k: _tie(
        Stage(lambda s, h, x: s.o(s.b(s.act(s.a(h)))), a=k.layer(k.i, k.i), b=k.layer(k.i, k.i), o=k.layer(),
              act=k.act()), "a", "b",
    ),
    "two modules of one weight, one rare": lambda k: _tie(
        Stage(lambda s, h, x: s.act(s.a(h) + rare(h, x) * s.b(h)), a=k.layer(), b=k.layer(), act=k.act()), "a", "b"
    ),
    "the weight's size": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h)) * s.a.weight.square().mean(), a=k.layer(), act=k.act()
    ),
    "three times": lambda k: Stage(
        lambda s, h, x: s.o(s.a(h) + s.act(s.a(h)) + s.a(2 * h)), a=k.layer(k.i, k.i), o=k.layer(), act=k.act()
    ),
}  # fmt: skip

SHARED_LINEAR: dict[str, Factory] = {
    "transpose": lambda k: Stage(
        lambda s, h, x: s.o(F.linear(s.act(s.a(h)), s.a.weight.t())), a=k.layer(), o=k.layer(), act=k.act()
    ),
    "bare and rare": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h) + rare(h, x) * F.linear(h, s.a.weight)), a=k.layer(), act=k.act()
    ),
    "a corner, late": lambda k: Stage(_corner, lambda s, h: s.b(h), a=k.layer(), b=k.layer(), o=k.layer(k.o, k.o)),
    "bare only": lambda k: Stage(lambda s, h, x: s.act(F.linear(h, s.a.weight)), a=k.layer(), act=k.act()),
}

EXPERTS: dict[str, Factory] = {  # vectors and tokens
    "routed": lambda k: Stage(lambda s, h, x: s.act(s.a(h)), a=Routed(k.i, k.o), act=k.act()),
    "routed beside a skip": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h) + s.b(h)), a=Routed(k.i, k.o, 3), b=k.layer(), act=k.act()
    ),
    "soft": lambda k: Stage(
        lambda s, h, x: s.act(s.r(h).softmax(-1)[..., :1] * s.e[0](h) + s.r(h).softmax(-1)[..., 1:] * s.e[1](h)),
        r=nn.Linear(k.i, 2), e=nn.ModuleList([k.layer(), k.layer()]), act=k.act(),
    ),
    "a rare expert": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h)).index_add(0, rare(h, x).flatten().nonzero()[:, 0], s.b(h[rare(h, x).flatten()])),
        a=k.layer(), b=k.layer(), act=k.act(),
    ),
}  # fmt: skip


def _number(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


SCALARS: dict[str, Factory] = {
    "temperature": lambda k: Stage(lambda s, h, x: s.act(s.a(h) * s.t.exp()), a=k.layer(), t=_number(0.2), act=k.act()),
    "scaled input": lambda k: Stage(lambda s, h, x: s.act(s.a(s.t * h)), a=k.layer(), t=_number(0.7), act=k.act()),
    "attention by temperature": lambda k: Stage(
        lambda s, h, x: s.a(h) * torch.softmax(s.b(h) / s.t, 1), a=k.layer(), b=k.layer(), t=_number(1.5)
    ),
    "a rare scalar": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h) + rare(h, x) * s.t), a=k.layer(), t=_number(0.5), act=k.act()
    ),
    "a late scalar": lambda k: Stage(
        lambda s, h, x: (lambda z: z + s.t * F.relu(z - s.cut))(s.a(h)),
        lambda s, h: s.a(h),
        a=k.layer(),
        t=_number(0.5),
    ),
    "prelu": lambda k: Stage(lambda s, h, x: s.p(s.a(h)), a=k.layer(), p=nn.PReLU()),
    "prelu by bare call": lambda k: Stage(
        lambda s, h, x: F.prelu(s.a(h), s.w), a=k.layer(), w=nn.Parameter(torch.tensor([0.3]))
    ),
    "one of two": lambda k: Stage(
        lambda s, h, x: s.act(s.a(h)) * s.t + (1 - s.t) * s.b(h), a=k.layer(), b=k.layer(), t=_number(0.3), act=k.act()
    ),
}

PLAIN: dict[str, Factory] = {
    "layer": lambda k: _around(k.layer(), k.act()),
    "relu": lambda k: _around(k.layer(), nn.ReLU(inplace=True)),
    "dropout": lambda k: _around(k.layer(), nn.Sequential(nn.Dropout(0.3), k.act())),
    "residual": lambda k: Stage(lambda s, h, x: s.a(h) + s.c(s.act(s.b(h))), a=k.layer(), b=k.layer(k.i, k.i),
                                c=k.layer(), act=k.act()),
    "frozen": lambda k: _around(k.layer().requires_grad_(False), k.act()),
}  # fmt: skip


def _sparse(k: Kit) -> Tensor:
    """A matrix of the features with a third of its entries, in one of torch's sparse layouts."""
    full = torch.randn(k.o, k.o) * (torch.rand(k.o, k.o) < 0.5) + torch.eye(k.o)
    full = full.double()
    return full.to_sparse_csr() if k.pick % 2 else full.to_sparse()


def _mixed(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    rows = s.a(h)
    return s.act(torch.sparse.mm(s.sparse, rows.reshape(-1, rows.shape[-1]).T).T.reshape(rows.shape))


def _along(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """The value and the derivative along the features themselves."""
    value, slope = torch.func.jvp(lambda z: s.act(s.a(z)), (h,), (h.detach() + 1,))
    return value + slope


def _under_autocast(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.act(s.a(h))


OPERANDS: dict[str, Factory] = {  # vectors
    "sparse": lambda k: Stage(_mixed, a=k.layer(), sparse=_sparse(k), act=k.act()),
    "jvp": lambda k: Stage(_along, a=k.layer(), act=k.act()),
    "vmapped": lambda k: Stage(
        lambda s, h, x: torch.func.vmap(lambda row: s.act(s.a(row)))(h), a=k.layer(), act=k.act()
    ),
    "autocast of its own": lambda k: Stage(_under_autocast, a=k.layer(), act=k.act()),
}


def _views(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """Each sample twice in one batch, the views one after the other, and their mean."""
    return s.act(s.a(torch.cat([h, -2 * h]))).unflatten(0, (2, len(h))).mean(0)


def _views_together(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """The same, the views of a sample beside each other."""
    return s.act(s.a(torch.stack([h, h.tanh()], 1).flatten(0, 1))).unflatten(0, (len(h), 2)).mean(1)


VIEWS: dict[str, Factory] = {  # vectors
    "views": lambda k: Stage(_views, a=k.layer(), act=k.act()),
    "views together": lambda k: Stage(_views_together, a=k.layer(), act=k.act()),
}


def _folded(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    return s.act(s.a(h.flatten(0, 1))).unflatten(0, h.shape[:2])


def _folded_by_place(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """All first tokens, then all second ones."""
    return s.act(s.a(h.transpose(0, 1).flatten(0, 1))).unflatten(0, (h.shape[1], len(h))).transpose(0, 1)


def _one_place(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """The first token by one layer, the others by another, folded."""
    first, others = s.b(h[:, 0]), s.a(h[:, 1:].flatten(0, 1)).unflatten(0, (len(h), -1))
    return s.act(torch.cat([first[:, None], others], 1))


FOLDED: dict[str, Factory] = {  # tokens
    "folded": lambda k: Stage(_folded, a=k.layer(), act=k.act()),
    "folded by place": lambda k: Stage(_folded_by_place, a=k.layer(), act=k.act()),
    "one place": lambda k: Stage(_one_place, a=k.layer(), b=k.layer(), act=k.act()),
}
