"""Tiny networks of every kind the pass must get right, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatlens import Lens, Problem


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a network of parts; its forward() is a function of the network and its inputs.

    A pair of sizes is a linear layer, a tensor a buffer; all else becomes an attribute.
    """
    net = type("Of", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            net.register_buffer(name, part)
        else:
            setattr(net, name, nn.Linear(*part) if isinstance(part, tuple) else part)
    return net


def applied(function: Callable[..., Tensor]) -> nn.Module:
    """Return a module without parts that applies a function."""
    return module_of(lambda net, *x: function(*x))


def elementwise(
    name: str, forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], once: bool = False
) -> Any:
    """Return an autograd.Function that says its derivative itself; if `once`, that has no derivative."""

    def kept(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return forward(x)

    def backward(ctx: Any, given: Tensor) -> Tensor:
        return given * slope(ctx.saved_tensors[0])

    back = once_differentiable(backward) if once else backward
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(kept), "backward": staticmethod(back)})


class SquaredReLU(nn.ReLU):
    """relu(x)^2 under the name of a ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def mlp(activation: str) -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(nn.Linear(6, 7), act(), nn.Linear(7, 5), act(), nn.Linear(5, 3))


def cnn(activation: str) -> nn.Module:
    """Stride, padding, dilation, groups, an in-place activation shared by all layers, pooling."""
    act = nn.ReLU(inplace=True) if activation == "relu" else ACTIVATIONS[activation]()
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), act, nn.Conv2d(4, 6, 2, groups=2, dilation=2), act,
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 5), act, nn.Linear(5, 3),
    )  # fmt: skip


def cnn_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), nn.ReLU(),
        nn.Conv1d(3, 4, 3, dilation=2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def cnn_3d() -> nn.Module:
    """Volumes, which torch does not unfold by itself."""
    return nn.Sequential(
        nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 0), groups=2), nn.Tanh(),
        nn.Conv3d(4, 3, 2, dilation=(1, 1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def residual() -> nn.Module:
    """A skip around a convolution and a norm, with in-place sums; branches that meet."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = nn.functional.relu_(net.norm(net.stem(x)))
        branch = net.left(h)
        branch += net.right(h)
        branch += h
        return net.head(nn.functional.relu(branch).flatten(1))

    stem, norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
    left, right = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
    return module_of(forward, stem=stem, norm=norm, left=left, right=right, head=(12, 3))


def twice(activation: str = "relu") -> nn.Module:
    """One module called twice, the second call reading what the first one made."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.act(net.first(x))
        return net.last(net.act(net.mid(net.act(net.mid(h)))))

    return module_of(forward, first=(6, 4), mid=(4, 4), act=ACTIVATIONS[activation](), last=(4, 3))


def attention(batch_first: bool = True) -> nn.Module:
    """An encoder layer: attention's bare in_proj, an out_proj that fires no hook, LayerNorms, token-wise linears."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        tokens = x if batch_first else x.transpose(0, 1)
        return net.head(net.encoder(tokens).mean(1 if batch_first else 0))

    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, activation="gelu", batch_first=batch_first)
    return module_of(forward, encoder=encoder, head=(4, 3))


def bare() -> nn.Module:
    """A parameter that belongs to no layer, used as a scale, and a weight used through a bare function."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(net.first(x)) * net.scale
        return net.last(torch.relu(net.tied(h)) + nn.functional.linear(h, net.tied.weight))

    return module_of(forward, scale=nn.Parameter(torch.ones(5)), first=(6, 5), tied=(5, 5), last=(5, 3))


def flat(n: int) -> Tensor:
    return torch.randn(n, 6)


Made = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]
NETWORKS: dict[str, Made] = {
    "mlp-relu": (lambda: mlp("relu"), flat),
    "mlp-tanh": (lambda: mlp("tanh"), flat),
    "mlp-gelu": (lambda: mlp("gelu"), flat),
    "cnn-relu-inplace": (lambda: cnn("relu"), lambda n: torch.randn(n, 2, 8, 8)),
    "cnn-tanh": (lambda: cnn("tanh"), lambda n: torch.randn(n, 2, 8, 8)),
    "cnn-1d": (cnn_1d, lambda n: torch.randn(n, 2, 7)),
    "cnn-3d": (cnn_3d, lambda n: torch.randn(n, 2, 3, 4, 5)),
    "residual": (residual, lambda n: torch.randn(n, 1, 2, 2)),
    "twice-relu": (lambda: twice("relu"), flat),
    "twice-tanh": (lambda: twice("tanh"), flat),
    "attention": (attention, lambda n: torch.randn(n, 3, 4)),
    "attention-tokens-first": (lambda: attention(False), lambda n: torch.randn(n, 3, 4)),
    "bare": (bare, flat),
}


def tied_words() -> tuple[nn.Module, Tensor, Tensor]:
    """(a network in float64, ids, labels): norms compute in float32, and word 0 has a gradient only as an output."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.words(x).mean(1)
        for _ in range(4):
            z = h.to(torch.float32)
            h = h + 3 * torch.tanh(net.mix((z * z.square().mean(1, keepdim=True).rsqrt()).to(h.dtype)))
        return h @ net.words.weight.T

    net = module_of(forward, words=nn.Embedding(3, 4, padding_idx=0), mix=(4, 4)).double()
    nn.init.normal_(net.words.weight)
    return net, torch.tensor([[0, 1, 2], [0, 0, 1], [2, 1, 0]]), torch.tensor([0, 1, 2])


def drawn(made: Made, n: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """(a network in eval mode, inputs, labels), in float64; norm statistics and affine entries not at their
    defaults."""
    make, inputs = made
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        net = make().double().eval()
        x = inputs(n).double()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
        return net, x, torch.randint(0, 3, (n,))


def network(name: str, n: int = 5, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network by its name, its inputs and labels, as `drawn` makes them."""
    return drawn(NETWORKS[name], n, seed)


def lens(name: str = "mlp-relu", **options: object) -> Lens:
    """Return a lens on 5 samples of a network, under cross-entropy; the options are those of `Problem`."""
    net, x, y = network(name)
    return Lens(Problem(net, "cross_entropy", (x, y), **options))
