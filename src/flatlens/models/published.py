"""A network of timm or Hugging Face as an architecture: by name, with its trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.models.checks import require_known
from flatlens.models.sources import load_model


@dataclass(frozen=True)
class Published:
    """The network of `timm:NAME` or `hf:NAME`, after a preparation that makes any image in [0, 1] fit it.

    Images are resized (bilinear) to the size that the network was trained on and brought to its mean and standard
    deviation, so that many networks are measured on the same images; `sigmoid` puts the outputs between 0 and 1.
    """

    name: str  #: "timm:vit_tiny_patch16_224"
    weights: Literal["trained", "random"] = "trained"
    sigmoid: bool = False
    seed: int = 0  #: seed of random weights

    def __post_init__(self) -> None:
        require_known("Published(weights=...)", self.weights, ("trained", "random"))
        if not self.name.startswith(("timm:", "hf:")):
            raise BadModel(f"Published(name={self.name!r}): timm:NAME, hf:NAME or hf:FOLDER is needed")

    def build(self) -> nn.Module:
        """Return the network on the CPU; its weights come from the hub or from the local cache.

        Raises:
            BadModel: there is no such network, or its weights are not available.
        """
        network = load_model(self.name, self.weights).network.float()
        known = getattr(network, "pretrained_cfg", None) or {}
        return AsTrained(network, known.get("input_size"), known.get("mean"), known.get("std"), self.sigmoid)


class AsTrained(nn.Module):
    """A network after a resizing and a normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        size: tuple[int, int, int] | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        sigmoid: bool,
    ) -> None:
        super().__init__()
        self.network = network
        self.size = None if size is None else tuple(size[1:])
        self.register_buffer("mean", torch.tensor(mean or (0.0,))[:, None, None])
        self.register_buffer("std", torch.tensor(std or (1.0,))[:, None, None])
        self.output = nn.Sigmoid() if sigmoid else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, rows, columns) between 0 and 1 to outputs (n, classes)."""
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bilinear", align_corners=False)
        found = self.network((images - self.mean) / self.std)
        outputs: Tensor = self.output(getattr(found, "logits", found))
        return outputs
