"""Vision transformers for small images: Dosovitskiy et al. 2021, at any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadInput
from flatlens.models.activations import ACTIVATIONS
from flatlens.models.checks import require_known, require_sizes

STD = 0.02
"""Standard deviation of the initial weights and tokens."""


@dataclass(frozen=True)
class ViT:
    """Patches, a class token, positions, `depth` blocks with the norms first, and a linear output.

    Weights, positions and the class token are drawn from N(0, 0.02^2), biases are 0, as in most public code.
    `sigmoid` puts its outputs between 0 and 1.

    >>> net = ViT(image=32, patch=8, width=32, depth=2, heads=2).build()
    >>> sum(p.numel() for p in net.parameters())
    32554
    >>> net(torch.zeros(5, 3, 32, 32)).shape
    torch.Size([5, 10])
    """

    classes: int = 10
    channels: int = 3
    image: int = 32
    patch: int = 4
    width: int = 64
    depth: int = 4
    heads: int = 4
    mlp: float = 4.0  #: the hidden width of a block, in units of `width`
    pooling: Literal["class", "mean"] = "class"
    activation: Literal["gelu", "relu", "tanh"] = "gelu"
    sigmoid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = (self.classes, self.channels, self.image, self.patch, self.width, self.depth, self.heads)
        require_sizes("ViT(classes=..., channels=..., image=..., patch=..., width=..., depth=..., heads=...)", sizes)
        require_known("ViT(pooling=...)", self.pooling, ("class", "mean"))
        require_known("ViT(activation=...)", self.activation, ("gelu", "relu", "tanh"))
        for name, whole, part in (("image", self.image, self.patch), ("width", self.width, self.heads)):
            if whole % part:
                of = "patches" if name == "image" else "heads"
                raise BadInput(f"ViT({name}={whole}): it must be a multiple of {part}, for whole {of}")
        if round(self.width * self.mlp) < 1:
            raise BadInput(f"ViT(mlp={self.mlp!r}): no hidden unit would be left")

    def build(self) -> nn.Module:
        """Return the network with its initial weights, float32 on the CPU; the global random state does not change."""
        with torch.device("meta"):  # draws nothing
            network = VisionTransformer(self)
        network.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, STD, generator=generator)
                else:
                    parameter.fill_(float("norm" in name and name.endswith("weight")))
        return network


class VisionTransformer(nn.Module):
    """The network that `ViT` describes."""

    def __init__(self, settings: ViT) -> None:
        super().__init__()
        s = settings
        tokens = (s.image // s.patch) ** 2 + (s.pooling == "class")
        self.embedding = nn.Conv2d(s.channels, s.width, s.patch, stride=s.patch)
        self.token = nn.Parameter(torch.empty(1, 1, s.width)) if s.pooling == "class" else None
        self.positions = nn.Parameter(torch.empty(1, tokens, s.width))
        self.blocks = nn.ModuleList(TransformerBlock(s) for _ in range(s.depth))
        self.norm = nn.LayerNorm(s.width)
        self.head = nn.Linear(s.width, s.classes)
        self.output = nn.Sigmoid() if s.sigmoid else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, image, image) to outputs (n, classes)."""
        x = self.embedding(images).flatten(2).transpose(1, 2)  # (n, patches, width)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        outputs: Tensor = self.output(self.head(x.mean(1) if self.token is None else x[:, 0]))
        return outputs


class TransformerBlock(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self, settings: ViT) -> None:
        super().__init__()
        width, hidden = settings.width, round(settings.width * settings.mlp)
        self.heads = settings.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = nn.GELU() if settings.activation == "gelu" else ACTIVATIONS[settings.activation]()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (n, tokens, width) to tokens."""
        looked = x + self.attend(self.norm1(x))
        added: Tensor = self.fc2(self.act(self.fc1(self.norm2(looked))))
        return looked + added

    def attend(self, x: Tensor) -> Tensor:
        """Return the attention of every token to all others, for each head."""
        n, tokens, width = x.shape
        qkv = self.qkv(x).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv)  # (n, heads, tokens, width / heads)
        projected: Tensor = self.projection(seen.transpose(1, 2).reshape(n, tokens, width))
        return projected
