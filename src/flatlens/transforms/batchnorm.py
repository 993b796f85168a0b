"""Transforms of BatchNorm in eval mode, an affine map: folding it into the layer before, and moving scale across it."""

from __future__ import annotations

import torch
from torch import nn

from flatlens.transforms.rescaling import UNREAD, rescale
from flatlens.transforms.transform import Moving, Offer, transform
from flatlens.transforms.wiring import Wiring

_NONE = "the network has no BatchNorm with running statistics"


def folds(wiring: Wiring) -> Offer:
    """Return the linear layers that one BatchNorm alone reads, with nothing between."""
    links, left = [], {}
    norms = wiring.scales.keys() - wiring.orders.keys()
    for name in wiring.orders:
        link = wiring.scales[name]
        if not any(reader.name in norms for reader in link.readers):
            continue
        if link.refused or len(link.readers) > 1 or not link.direct:
            left[name] = link.refused or "something lies between it and its BatchNorm, or reads it, too"
        else:
            links.append(link)
    return Offer(tuple(links), left if norms else {"": _NONE})


@transform(id="R4", source="BatchNorm's definition in eval mode", where=folds, declared_as=None)
def batchnorm_folding(moving: Moving) -> str:
    """Each BatchNorm's affine map, with its running statistics, written into the weights before it; the norm goes.

    W' = S W, b' = S (b - mu) + beta, S = diag(gamma / sqrt(sigma^2 + eps)).
    """
    for link in moving.links:
        layer, name = moving.module(link.source), link.readers[0].name
        norm = moving.module(name)
        assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        _fold(layer, norm)
        for above in list(moving.model.modules()):  # under each of its names
            for last in [own for own, module in above._modules.items() if module is norm]:
                setattr(above, last, nn.Identity())
    return f"{len(moving.links)} BatchNorms became biases: their parameters count no longer"


@torch.no_grad()
def _fold(
    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale * norm.weight if norm.affine else scale
    shift = norm.bias if norm.affine else torch.zeros_like(scale)
    bias = torch.zeros_like(scale) if layer.bias is None else layer.bias
    folded = (bias - norm.running_mean) * scale + shift
    layer.weight.mul_(scale.reshape(-1, *(1,) * (layer.weight.ndim - 1)))
    layer.bias = nn.Parameter(folded, requires_grad=layer.weight.requires_grad)


def around_norms(wiring: Wiring) -> Offer:
    """Return BatchNorms and their readers, and layers with the BatchNorms that read them."""
    norms = wiring.scales.keys() - wiring.orders.keys()
    near = {
        name: link
        for name, link in wiring.scales.items()
        if name in norms or any(reader.name in norms for reader in link.readers)
    }
    links = {name: link for name, link in near.items() if link.readers and not link.refused}
    left = {name: link.refused or UNREAD for name, link in near.items() if name not in links}
    return Offer(tuple(links.values()), left if norms else {"": _NONE})


@transform(id="R4", source="BatchNorm's definition in eval mode", where=around_norms, declared_as="neuronwise")
def batchnorm_scale(moving: Moving) -> str:
    """Scale moved through each BatchNorm: from its statistics to the weights before, from the next layer to its affine.

    Channels times random factors a in [5, 25]: W, b and mu times a, sigma^2 to a^2 (sigma^2 + eps) - eps; gamma and
    beta times a, the next layer's columns divided.
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(link.features))
    return ""
