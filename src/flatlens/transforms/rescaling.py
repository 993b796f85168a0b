"""Rescalings: features times a positive factor, their readers' weights divided by it. ReLU keeps such a factor."""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.grams import lay_out
from flatlens.grams.features import feature_moments, is_constant
from flatlens.transforms.moves import rescale_reader, rescale_source
from flatlens.transforms.transform import Moving, Offer, transform
from flatlens.transforms.wiring import Link, Wiring

NORM_FIRST = "{} comes before the next layer and absorbs the scale: batchnorm_scale moves it"
UNREAD = "nothing reads its features"


def between_layers(wiring: Wiring) -> Offer:
    """Return the linear layers read by linear layers only, with only positively homogeneous operations between."""
    links, left = [], {}
    for name in wiring.orders:
        link = wiring.scales[name]
        norm = next((reader.name for reader in link.readers if reader.name not in wiring.orders), None)
        if link.refused or not link.readers or norm is not None:
            left[name] = link.refused or (UNREAD if norm is None else NORM_FIRST.format(norm))
        else:
            links.append(link)
    return Offer(tuple(links), left)


def rescale(moving: Moving, link: Link, factors: Tensor) -> None:
    """Move factors (features,) from the readers of a link to its source."""
    rescale_source(moving.module(link.source), factors)
    for reader in link.readers:
        rescale_reader(moving.module(reader.name), reader.owner, factors)


@transform(id="R1", source="reparam2019 Thm 2, section 3", where=between_layers, declared_as="layerwise")
def layerwise(moving: Moving) -> str:
    """Each layer times a random factor in [5, 25], the next one divided by it.

    f = W_2 relu(W_1 x + b_1) becomes (W_2 / a) relu(a W_1 x + a b_1).
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(1).expand(link.features))
    return ""


@transform(id="R2", source="reparam2019 section 3, Thm 3; relative2021 section 4", where=between_layers,
           declared_as="neuronwise")  # fmt: skip
def neuronwise(moving: Moving) -> str:
    """Each neuron's or channel's incoming weights times a random factor in [5, 25] of its own, its outgoing divided.

    W_2 A^-1 relu(A W_1 x + A b_1), A a positive diagonal matrix.
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(link.features))
    return ""


def one_to_one(wiring: Wiring) -> Offer:
    """Return the layers and norms whose features one linear layer reads, each once: its inputs can have any unit."""
    if wiring.coupled:
        return Offer((), {"": "batchnorm='train' couples the samples: features have no spread of their own"})
    links, left = [], {}
    for name, link in wiring.scales.items():
        readers = link.readers
        if link.refused or not readers:
            left[name] = link.refused or UNREAD
        elif len(readers) > 1:
            left[name] = f"{' and '.join(reader.name for reader in readers)} read its features, each at its own spread"
        elif readers[0].name in wiring.scales and readers[0].name not in wiring.orders:
            left[name] = f"{readers[0].name} normalises its features already"
        elif len(readers[0].owner) != link.features:
            left[name] = f"each of its channels becomes several inputs of {readers[0].name}, with different spreads"
        else:
            links.append(link)
    return Offer(tuple(links), left)


@transform(id="R5", source="relative2021 Thm 4, Cor. 8", where=one_to_one, declared_as="neuronwise")
def feature_normalization(moving: Moving) -> str:
    """Features that a layer reads, divided by their standard deviation over the data, its weights multiplied by it.

    V^-1 W_{l-1}, V^-1 b_{l-1} and W_l V, V the diagonal of the deviations, over samples and positions: relative
    flatness of layer l becomes `relative_flatness(normalized="std")` of the original, where no feature is always 0. A
    constant feature is divided by its absolute value. One that is always 0 has no unit, and no factor can take its
    weights out of the flatness, as the option does: it stays as it is.
    """
    return _normalise(moving, 1)


@transform(id="R5", source="relative2021 Thm 4, as printed", where=one_to_one, declared_as="neuronwise", default=False,
           name="feature_normalization.published")  # fmt: skip
def as_published(moving: Moving) -> str:
    """Features divided by their variance, as printed: this removes no neuron-wise rescaling, but squares it."""
    return _normalise(moving, 2)


def _normalise(moving: Moving, power: int) -> str:
    layout = lay_out(moving.problem, moving.model)
    moments = feature_moments(moving.problem, moving.model, layout)
    notes = []
    for link in moving.links:
        reader = link.readers[0]
        count, mean, squares = moments[reader.name]
        spread = (squares / count).sqrt().cpu()
        units = torch.where(is_constant(mean.cpu(), spread), mean.cpu().abs(), spread) ** power
        dead = units == 0
        units = torch.where(dead, 1.0, units)
        rescale(moving, link, torch.empty_like(units).index_copy_(0, reader.owner, 1 / units))
        if bool(dead.any()):
            notes.append(f"{int(dead.sum())} features that {reader.name} reads are 0 for all data and have no unit")
    return "; ".join(notes)
