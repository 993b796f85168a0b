"""Transforms of attention: heads in other bases and in another order, and scales that move out of norms and gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flatlens.operations.pair_finders import NormScale
from flatlens.transforms.definition import Moving, Offer, transform
from flatlens.transforms.symmetries import OfKind, move_symmetry
from flatlens.transforms.wiring import Wiring

NO_ATTENTION = "no attention is found"
NO_NORM = "no norm with a scale that matrix products read is found"


def _offered(kind: str, otherwise: str) -> Callable[[Wiring], Offer]:
    def where(wiring: Wiring) -> Offer:
        found: OfKind = getattr(wiring.symmetries, kind)
        return Offer(found.symmetries, found.left or ({} if found.symmetries else {"": otherwise}))

    return where


in_heads = partial(transform, source="symmetries2025", declared_as="headwise", traced=False)


def _move_all(moving: Moving) -> None:
    for one in moving.links:
        move_symmetry(moving.model, one, moving.generator)


@in_heads(id="R6", where=_offered("queries", NO_ATTENTION))
def query_key_basis(moving: Moving) -> None:
    """Another basis for each head's queries and keys: A W_q, A^-T W_k, A random with singular values in [5, 25].

    (A q)^T A^-T k = q^T k; biases go along. Queries that share a key share A. Where positions turn queries and keys
    (rotary positions), A is a rotation and a scale in each pair of coordinates that is turned: these commute with every
    turn.
    """
    _move_all(moving)


@in_heads(id="R7", where=_offered("values", NO_ATTENTION))
def value_output_basis(moving: Moving) -> None:
    """Another basis for each head's values: A W_v, and W_o A^-1 in the columns that read it, A as above.

    W_o A^-1 (A v) = W_o v. Heads that share values share A.
    """
    _move_all(moving)


@transform(id="R8", source="definition of attention", declared_as="permutation", traced=False,
           where=_offered("orders", "no attention of several heads is found"))  # fmt: skip
def head_permutation(moving: Moving) -> None:
    """Random order of the heads of each attention: rows of W_q, W_k, W_v, columns of W_o.

    Where several queries share a key, groups change places, and queries within a group.
    """
    _move_all(moving)


def foldable(wiring: Wiring) -> Offer:
    """Return the norms whose scale and shift the layers that read them can take."""
    found, folds = wiring.symmetries.norms, {}
    for one in found.symmetries:
        assert isinstance(one, NormScale)
        unbiased = one.shift is not None and any(bias is None for _, bias in one.readers)
        folds[str(one)] = one, "a layer that reads its features has no bias to take the shift" if unbiased else ""
    offer = Offer.of(folds)
    left = {**found.left, **offer.left}
    return Offer(offer.links, left or ({} if offer.links else {"": NO_NORM}))


@transform(id="R9", source="LayerNorm's definition", where=foldable, declared_as=None, traced=False)
def norm_folding(moving: Moving) -> None:
    """Each LayerNorm's or RMSNorm's scale and shift written into the layers that read it: it keeps 1 and 0.

    W' = W diag(gamma), b' = b + W beta.
    """
    parameters = dict(moving.model.named_parameters())
    for one in moving.links:
        assert isinstance(one, NormScale)
        scale = one.scale.of(parameters)
        for columns, bias in one.readers:
            weight = columns.of(parameters)
            if one.shift is not None and bias is not None:
                bias.set(parameters, bias.of(parameters) + weight.T @ one.shift.of(parameters))
            columns.set(parameters, weight * scale)
        one.scale.set(parameters, torch.ones_like(scale))
        if one.shift is not None:
            one.shift.set(parameters, torch.zeros_like(scale))


@transform(
    id="R9", source="LayerNorm's definition", where=_offered("norms", NO_NORM), declared_as="neuronwise", traced=False
)
def norm_scale(moving: Moving) -> None:
    """Scale moved out of the layers that read a LayerNorm or RMSNorm: gamma and beta times random factors in [5, 25].

    The columns that read a feature are divided by its factor.
    """
    _move_all(moving)


@transform(id="R10", source="definition of a gated layer", where=_offered("gates", "no gated layer is found"),
           declared_as="neuronwise", traced=False)  # fmt: skip
def gate_scale(moving: Moving) -> None:
    """Factor of each gated product times random factors in [5, 25], the columns that read the product divided.

    W (s(G x) * U x) = W a^-1 (s(G x) * a U x): s may be any activation.
    """
    _move_all(moving)
