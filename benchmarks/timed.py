"""The networks that are timed, with initial weights and noise as input.

`TRANSFORMERS` holds networks that need transformers, or timm, which `.ci/timm` installs in `.venv-timm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks.resnet import resnet18
from benchmarks.zoo.shim import operators_of_torchvision
from flatlens.models import VGG11, ViT

OUTPUTS = 10


@dataclass(frozen=True)
class Timed:
    """A network, the number of samples it is timed on, and their shape."""

    build: Callable[[], nn.Module]
    n: int
    shape: tuple[int, ...] = ()
    outputs: int = OUTPUTS
    tokens: int = 0  #: length of a text; 0 for inputs that are no token ids

    def given(self, n: int | None = None, device: str = "cpu") -> tuple[nn.Module, str, tuple[Any, Tensor]]:
        """Return the network, its loss and its samples, equal at each call."""
        torch.manual_seed(0)
        n = n or self.n
        net = self.build().eval().to(device)
        x: Any = torch.randn(n, *self.shape).to(device)
        if self.tokens:
            ids = torch.randint(3, 1000, (n, self.tokens)).to(device)
            x = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return net, "cross_entropy", (x, torch.randint(self.outputs, (n,)).to(device))

    def case(self, n: int | None = None, device: str = "cpu", **options: Any) -> fl.Problem:
        """Return the problem of the network, its loss and its samples."""
        net, loss, data = self.given(n, device)
        return fl.Problem(net, loss, data, **options)


def mlp(*widths: int, seed: int | None = None) -> nn.Sequential:
    """Return dense layers with ReLU between them; with a seed, equal at each call."""
    if seed is not None:
        torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for into, out in pairwise(widths):
        parts += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def lenet() -> nn.Sequential:
    """Return LeNet-5 on three colours, with ReLU and 2 x 2 max pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, OUTPUTS),
    )  # fmt: skip


class Encoder(nn.Module):
    """nn.TransformerEncoder, the mean over tokens, and a linear layer."""

    def __init__(self, feedforward: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, feedforward, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(64, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (n, 10)."""
        return torch.as_tensor(self.head(self.encoder(x).mean(1)))


def vit_tiny() -> nn.Module:
    """Return timm's ViT-Tiny with ten classes."""
    operators_of_torchvision()
    import timm

    made: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=OUTPUTS)
    return made


def hugging_face(name: str, **settings: Any) -> nn.Module:
    """Return a classifier of transformers from its configuration, with random weights."""
    operators_of_torchvision()
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings, num_labels=OUTPUTS)
    made: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(config)
    return made


COLOURS = (3, 32, 32)
NETWORKS = {
    "MLP 784-512-512-10": Timed(lambda: mlp(784, 512, 512, OUTPUTS), 2000, (784,)),
    "MLP 784-512-512-512-10": Timed(lambda: mlp(784, 512, 512, 512, OUTPUTS), 2000, (784,)),
    "LeNet 3x32x32": Timed(lenet, 2000, COLOURS),
    "VGG-11 3x32x32": Timed(lambda: VGG11(batchnorm=False).build(), 64, COLOURS),
    "ResNet-18 3x32x32": Timed(lambda: resnet18(OUTPUTS), 64, COLOURS),
    "nn.TransformerEncoder, d 64, 4 layers, 256 hidden": Timed(partial(Encoder, 256), 64, (64, 64)),
    "nn.TransformerEncoder, d 64, 4 layers, 2048 hidden": Timed(partial(Encoder, 2048), 64, (64, 64)),
}
"""Networks that a processor measures in seconds."""

TRANSFORMERS = {
    "timm ViT-Tiny 224": Timed(vit_tiny, 8, (3, 224, 224)),
    "transformers BERT, d 256, 4 layers": Timed(
        partial(hugging_face, "Bert", hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                intermediate_size=1024), 64, tokens=64,
    ),
    "transformers GPT-2, d 768, 2 layers": Timed(
        partial(hugging_face, "GPT2", n_layer=2, pad_token_id=0), 16, tokens=64
    ),
}  # fmt: skip

VIT_B16 = Timed(ViT(image=224, patch=16, width=768, depth=12, heads=12).build, 1024, (3, 224, 224))
"""A network that needs a GPU."""
