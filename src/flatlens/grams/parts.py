"""Parts of attention's weights: queries, keys, values and what reads them, and each head's share.

A projection that is fused with others has rows of its own in one weight. So has each head in a projection, and columns
in the weight that reads the heads. Such a part is the matrix of a linear map itself, and measures of weights have a
value for it. Sums over weights do not count it, as they count the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flatlens.grams.layout import Weight
from flatlens.operations.head_sides import HeadPairs
from flatlens.operations.pairs import Entries


def parts_of(weights: Mapping[str, Weight], heads: HeadPairs) -> dict[str, Weight]:
    """Return the projections and heads of attention as weights, by name, in the order of `weights`.

    `attn.qkv/query` has the rows of all queries in the weight of `attn.qkv`, `attn.qkv/query/0` those of the first
    head, and `attn.proj/output/0` the columns that read its values. A part that would be the whole weight is left out.
    """
    owners = {w.parameter: w for w in weights.values() if w.parameter is not None and w.adapter.token_wise}
    found: dict[str, dict[str, set[tuple[int, ...]]]] = {name: {} for name in weights}
    for kind, entries in _entries(heads):
        if (weight := owners.get(entries.parameter)) is not None and weight.has_derivative:
            found[weight.layer].setdefault(kind, set()).add(_indices(weight, entries, kind))
    parts: dict[str, Weight] = {}
    for name, kinds in found.items():
        for kind, indices in kinds.items():
            each = sorted(indices)
            named = {f"{name}/{kind}": tuple(sorted(set().union(*each)))}
            named |= {f"{name}/{kind}/{number}": one for number, one in enumerate(each)}
            axis = 2 if kind == "output" else 1
            size = weights[name].matrix.W.shape[axis]
            parts |= {
                part: _part(weights[name], part, axis, torch.tensor(one))
                for part, one in named.items()
                if len(one) < size and not (part.endswith("/0") and len(each) == 1)
            }
    return parts


def _entries(heads: HeadPairs) -> Iterator[tuple[str, Entries]]:
    """Yield the entries of every head, with what they make or read."""
    for kind, pairs, side in (
        ("query", heads.queries, "left"),
        ("key", heads.queries, "right"),
        ("value", heads.values, "left"),
        ("output", heads.values, "right"),
    ):
        yield from ((kind, entries) for pair in pairs for entries in getattr(pair, side))


def _indices(weight: Weight, entries: Entries, kind: str) -> tuple[int, ...]:
    """Return the rows of the matrix that make a head's features, or the columns that read them, ascending."""
    stored = torch.zeros(weight.value.shape, dtype=torch.bool)
    stored.view(-1)[entries.at[:, 0].cpu()] = True
    return tuple(weight.adapter.matrix(stored)[0].any(int(kind != "output")).nonzero()[:, 0].tolist())


def _part(weight: Weight, name: str, axis: int, indices: Tensor) -> Weight:
    """Return some rows (axis 1) or columns (axis 2) of a weight, as a weight."""
    rows, columns = (indices, None) if axis == 1 else (None, indices)
    return replace(weight, layer=name, part_of=weight.layer, rows=rows, columns=columns, bias=None, bias_value=None)
