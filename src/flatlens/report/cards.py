"""What a measure's card says, found by the names of rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

from flatlens.measures import LAYERWISE, MEASURES, NEURONWISE, PERMUTATION, Card, named

#: A move of the weights that leaves the network's function as it is: (name on a card, short, in words).
MOVES = (
    (LAYERWISE, "layer", "layer-wise rescaling"),
    (NEURONWISE, "neuron", "neuron-wise rescaling"),
    (PERMUTATION, "order", "permuting the neurons"),
)


def spelling(name: str) -> str:
    """The measure, with its options, that a row or column belongs to: without its part and its layer.

    >>> [spelling(n) for n in ("local_volume(top_k=3)[fc1]", "relative_flatness.sum", "mls[fc1]")]
    ['local_volume(top_k=3)', 'relative_flatness', 'mls']
    """
    if ")" in name:
        return name[: name.index(")") + 1]
    return name.split("[", 1)[0].split(".", 1)[0]


def card_of(name: str, cards: Sequence[Card]) -> Card | None:
    """The card of the measure that `name` belongs to."""
    return next((card for card in cards if card.name == spelling(name).split("(", 1)[0]), None)


def survives(name: str, card: Card) -> tuple[bool, ...]:
    """For each of MOVES, whether the measure `name`, whose card this is, stays the same; an option may change that.

    >>> from flatlens.measures import catalogue
    >>> [survives(n, card_of(n, catalogue())) for n in ("mls", "ggn_trace")]
    [(True, True, True), (False, False, True)]
    """
    under = card.invariant_under
    if "(" in name and card.name in MEASURES:
        under = named([spelling(name)])[0].invariant_under
    return tuple(move in under for move, _, _ in MOVES)
