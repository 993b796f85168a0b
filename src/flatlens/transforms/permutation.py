"""Permutation of neurons or channels, with everything that belongs to them."""

from __future__ import annotations

import torch

from flatlens.transforms.moves import order_reader, order_source
from flatlens.transforms.rescaling import UNREAD
from flatlens.transforms.transform import Moving, Offer, transform
from flatlens.transforms.wiring import Wiring


def feature_by_feature(wiring: Wiring) -> Offer:
    """Return the linear layers with only operations on single features between them and their readers."""
    links = {name: link for name, link in wiring.orders.items() if link.readers and not link.refused}
    left = {name: link.refused or UNREAD for name, link in wiring.orders.items() if name not in links}
    return Offer(tuple(links.values()), left)


@transform(id="R3", source="relative2021 section 4", where=feature_by_feature, declared_as="permutation")
def permutation(moving: Moving) -> str:
    """Random order of the neurons or channels of each layer, with their norms and outgoing weights.

    W_2 P^T s(P W_1 x + P b_1), for any activation s that acts on each neuron separately.
    """
    for link in moving.links:
        order = torch.randperm(link.features, generator=moving.generator)
        for name in (link.source, *(norm.name for norm in link.norms)):
            order_source(moving.module(name), order)
        for reader in link.readers:
            order_reader(moving.module(reader.name), reader.owner, order)
    return ""
