"""Networks, losses and data that fail late, write where they must not, or give what they must not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Silent(Exception):
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no message")


def error(pick: int) -> BaseException:
    """An error of the user's code."""
    made: tuple[Callable[[], BaseException], ...] = (
        lambda: ValueError("first line\nsecond line"), lambda: SystemExit(3), lambda: KeyError("q"),
        lambda: AssertionError(),
        lambda: RuntimeError("a\n\nb"), lambda: OSError(2, "no file"), Silent, lambda: StopIteration(5),
        lambda: SystemExit(),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), lambda: RecursionError("deep"), lambda: TypeError(),
        lambda: RuntimeError("CUDA out of memory"), lambda: ImportError("x"),
        lambda: GeneratorExit("g") and Exception(1, 2),
        lambda: ExceptionGroup("many", [ValueError("one")]), lambda: IndexError("\x1b[31mred"), lambda: MemoryError(),
    )  # fmt: skip
    return made[pick % len(made)]()


class Wrapped(nn.Module):
    """A network in another."""

    def __init__(self, net: nn.Module, pick: int) -> None:
        super().__init__()
        self.net, self.pick, self.calls = net, pick, 0

    def forward(self, *x: Tensor) -> Any:
        self.calls += 1
        return self.after(self.net(*x), *x)

    def after(self, f: Any, *x: Tensor) -> Any:
        return f


class FailsLate(Wrapped):
    def after(self, f: Any, *x: Tensor) -> Any:
        if self.calls >= self.pick % 23:
            raise error(self.pick // 23)
        return f


class FailsOnSample(Wrapped):
    def after(self, f: Any, *x: Tensor) -> Any:
        if x[0].is_floating_point() and bool((x[0].sum() > self.pick % 7 - 3).any()):
            raise error(self.pick // 7)
        return f


class Gives(Wrapped):
    """Outputs of another kind."""

    def after(self, f: Any, *x: Tensor) -> Any:
        kinds: tuple[Callable[[], Any], ...] = (
            f.long, lambda: f > 0, lambda: None, lambda: (f, f), lambda: {"logits": f}, lambda: [f], lambda: f.detach(),
            lambda: f.detach().numpy(), lambda: f[0], lambda: f[:, None], lambda: f[:, None, None, None], lambda: f[:,
            :0],
            lambda: f.repeat(2, 1), lambda: f[:-1], lambda: f.softmax(0), lambda: f - f.mean(0),
            lambda: f.to(torch.complex64),
            lambda: f * float("nan"), lambda: f / 0, lambda: f * 1e300, lambda: f.sum(), lambda: f.half(),
            lambda: f.double(),
            lambda: f.to_sparse(), lambda: f.to("meta"), lambda: "text", lambda: f.repeat(1, 1 + self.calls % 3),
            lambda: f + torch.randn_like(f), lambda: f + self.calls, lambda: f * 0, lambda: f.sign(), lambda: iter(f),
            lambda: f.to(torch.float8_e4m3fn), lambda: f.repeat(1, 200), lambda: f.expand(len(f), *f.shape),
            lambda: f.bfloat16(),
            lambda: type("Output", (), {"logits": f})(), lambda: type("Output", (), {"logits": 3})(),
            lambda: f.as_subclass(Named),
            lambda: nn.Parameter(f.detach()), lambda: f.flip(0), lambda: f.T, lambda: f.requires_grad_(),
            lambda: f.round(),
        )  # fmt: skip
        return kinds[self.pick % len(kinds)]()


class Named(Tensor):
    """A class of tensors of the user's own."""


class Writes(Wrapped):
    """A forward() that writes to the network, or beyond."""

    def __init__(self, net: nn.Module, pick: int) -> None:
        super().__init__(net, pick)
        self.register_buffer("count", torch.zeros(2))
        self.norm, self.table = nn.BatchNorm1d(2), nn.Embedding(3, 2)

    def after(self, f: Tensor, *x: Tensor) -> Tensor:
        p, looked = next(self.net.parameters()), torch.zeros(len(f), dtype=torch.long)
        ways: tuple[Callable[[], Any], ...] = (
            lambda: p.data.mul_(1.01), lambda: p.data.mul_(-1), lambda: setattr(p, "data", p.data * 1.5),
            lambda: setattr(p, "data", p.data.clone()), lambda: self.count.data.add_(1), lambda: self.count.add_(1),
            lambda: setattr(self.count, "data", self.count.data + 1), lambda: setattr(self, "count", self.count + 1),
            lambda: self.norm.train()(torch.ones(4, 2)), lambda: F.batch_norm(f.detach().float()[:, :2],
            self.norm.running_mean[: f.shape[1]], self.norm.running_var[: f.shape[1]], training=True),
            lambda: F.embedding(looked, self.table.weight, max_norm=0.01), lambda: setattr(p, "grad",
            torch.ones_like(p)),
            lambda: p.requires_grad_(False), lambda: self.register_buffer("late", torch.ones(1)), lambda: self.train(),
            lambda: self.register_parameter("late", nn.Parameter(torch.ones(1))), lambda: self.add_module("more",
            nn.Linear(1, 1)),
            lambda: torch.manual_seed(self.calls), lambda: torch.rand(2), lambda: x[0].mul_(1), lambda: x[0].add_(1),
            lambda: setattr(self.table, "weight", nn.Parameter(torch.ones(3, 2))), lambda: self.zero_grad(),
            lambda: self.net.requires_grad_(False), lambda: self.table(looked).sum().backward(),
            lambda: self.count.resize_(3),
            lambda: delattr(self, "count") if hasattr(self, "count") else None, lambda: self.double(),
            lambda: f.data.add_(1),
        )  # fmt: skip
        with torch.enable_grad():
            ways[self.pick % len(ways)]()
        return f


def hook(net: nn.Module, pick: int) -> None:
    """A hook of the user's own on one of the modules."""
    modules = [m for m in net.modules() if not isinstance(m, torch.jit.ScriptModule)]
    module = modules[pick % len(modules)]

    def fails(*given: object) -> None:
        raise error(pick)

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: module.register_forward_hook(lambda *a: None),
        lambda: module.register_forward_pre_hook(lambda *a: None),
        lambda: module.register_forward_hook(lambda m, i, o: o * 2 if isinstance(o, Tensor) else None),
        lambda: module.register_forward_hook(lambda m, i, o: o.detach() if isinstance(o, Tensor) else None),
        lambda: module.register_forward_hook(lambda m, i, o: o.mul_(2) if isinstance(o, Tensor) else None),
        lambda: module.register_full_backward_hook(lambda *a: None),
        lambda: module.register_full_backward_hook(lambda m, i, o: tuple(g if g is None else 2 * g for g in i)),
        lambda: module.register_forward_hook(fails),
        lambda: module.register_full_backward_hook(fails),
        lambda: next(net.parameters()).register_hook(lambda g: g * 2),
        lambda: next(net.parameters()).register_hook(fails),
        lambda: module.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True),
    )
    kinds[pick // 8 % len(kinds)]()


class Samples(Dataset[Any]):
    """Samples of x and y, one of which is another thing."""

    def __init__(self, x: Tensor, y: Tensor, pick: int) -> None:
        self.x, self.y, self.pick, self.reads = x, y, pick, 0

    def __len__(self) -> int:
        if self.pick % 13 == 12:
            raise error(self.pick)
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        x, y = self.x[i], self.y[i]
        if i != self.pick // 13 % len(self.x):
            return x, y
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: (x, y), self.fail, lambda: (torch.cat([x, x]), y), lambda: (x, None), lambda: x, lambda: None,
            self.late,
            lambda: (x.to_sparse(), y), lambda: (x * float("nan"), y), lambda: (x + self.reads, y), lambda: {"x": x},
            self.drawn,
        )  # fmt: skip
        return kinds[self.pick % 13]() if self.pick % 13 < len(kinds) else (x, y)

    def fail(self) -> None:
        raise error(self.pick // 100)

    def late(self) -> tuple[Tensor, Tensor]:
        if self.reads > 3 * len(self.x):
            raise error(self.pick // 100)
        return self.x[0], self.y[0]

    def drawn(self) -> tuple[Tensor, Tensor]:
        return self.x[0] + random.random() * np.random.rand() * float(torch.rand(())), self.y[0]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self.samples.x)):
            yield self.samples[i]


def loader(x: Tensor, y: Tensor, pick: int) -> Any:
    """Data sets and loaders, some of which are broken."""
    samples = Samples(x, y, pick)

    def bad_collate(items: list[Any]) -> Any:
        if len(items) < 4:
            raise error(pick)
        return torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])

    class BadSampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from (0, 1, 2)
            raise error(pick)

        def __len__(self) -> int:
            return 6

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: samples, lambda: DataLoader(samples, batch_size=4), lambda: DataLoader(samples, batch_size=2,
        shuffle=True),
        lambda: Stream(samples), lambda: DataLoader(Stream(samples), batch_size=3), lambda: DataLoader(samples,
        batch_size=None),
        lambda: DataLoader(samples, batch_size=4, collate_fn=bad_collate), lambda: DataLoader(samples,
        sampler=BadSampler()),
        lambda: DataLoader(samples, batch_sampler=[[0, 1], [2], [3, 4, 5]]), lambda: DataLoader(samples,
        batch_sampler=[[99]]),
        lambda: DataLoader(samples, batch_size=4, drop_last=True), lambda: DataLoader(samples, batch_sampler=[[], [0]]),
        lambda: DataLoader(samples, batch_size=3, collate_fn=lambda items: items), lambda: DataLoader(samples,
        sampler=[5, 0]),
        lambda: DataLoader(samples, batch_size=9, generator=torch.Generator()), lambda: DataLoader(samples,
        batch_sampler=[5]),
        lambda: DataLoader(samples, batch_size=3, collate_fn=lambda items: sys.exit(1)),
    )  # fmt: skip
    return kinds[pick // 13 % len(kinds)]()


def loss(pick: int) -> Any:
    """Losses, few of which fit."""
    calls = [0]

    def late(f: Tensor, y: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > pick % 41:
            raise error(pick)
        return f.square().sum(1)

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: late, lambda: late, lambda: nn.MultiMarginLoss(), lambda: nn.MultiLabelMarginLoss(),
        lambda: nn.NLLLoss(),
        lambda: nn.CTCLoss(), lambda: nn.L1Loss(), lambda: nn.HuberLoss(), lambda: nn.BCEWithLogitsLoss(),
        lambda: nn.BCELoss(),
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1), lambda: nn.CrossEntropyLoss(weight=torch.ones(9)),
        lambda: None,
        lambda: nn.CrossEntropyLoss(reduction="sum"), lambda: nn.CrossEntropyLoss(ignore_index=0), lambda: 5,
        lambda: "mae",
        lambda: nn.CrossEntropyLoss, lambda: nn.Linear(2, 2), lambda: lambda f, y: f.mean(), lambda: lambda f, y: None,
        lambda: lambda f, y: f.sum(1).detach(), lambda: lambda f, y: f.sum(1).sqrt(), lambda: lambda f,
        y: f.abs().sum(1).sqrt(),
        lambda: lambda f, y: f.softmax(0).square().sum(1), lambda: lambda f, y: f.sum(1) * 0, lambda: lambda f,
        y: f.sum(1).long(),
        lambda: lambda f: f, lambda: lambda f, y: f.square().sum(1) * torch.rand(()), lambda: nn.MSELoss(),
        lambda: nn.KLDivLoss(),
        lambda: nn.PoissonNLLLoss(), lambda: nn.GaussianNLLLoss(), lambda: nn.SmoothL1Loss(),
        lambda: nn.SoftMarginLoss(),
        lambda: nn.MultiLabelSoftMarginLoss(), lambda: nn.HingeEmbeddingLoss(), lambda: nn.CosineEmbeddingLoss(),
        lambda: [],
        lambda: nn.TripletMarginLoss(), lambda: nn.MultiMarginLoss(p=2), lambda: nn.AdaptiveLogSoftmaxWithLoss(2, 9,
        [4]),
        lambda: lambda f, y: (f.argmax(1) == y).double(), lambda: lambda f, y: f.square().sum(1) * float("nan"),
        lambda: lambda f, y: f.square().sum(1).to(torch.complex64), lambda: lambda f, y: f.square().sum(1).tolist(),
        lambda: nn.MultiMarginLoss(weight=torch.ones(2)), lambda: lambda f, y: f.pow(2).sum(1).to_sparse(),
    )  # fmt: skip
    return kinds[pick // 41 % len(kinds)]()
