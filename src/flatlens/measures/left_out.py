"""The note on parameters that a sum over linear layers leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flatlens.measures.lens import Lens

NAMED = 3  #: names that a note lists


def left_out(lens: Lens, layers: Iterable[str], but: Collection[str] = ()) -> str:
    """Return a note that names the measured matrices outside these layers, `but` not these; empty if there are none."""
    weights = [lens.layout.weights[name] for name in layers]
    counted = {weight.parameter for weight in weights}
    made = tuple(f"{weight.layer}." for weight in weights if weight.parameter is None)
    missing = [
        name
        for name, p in lens.model.named_parameters()
        if name in lens.problem.parameters
        and p.ndim >= 2
        and not (name in counted or name.startswith(made) or name in but)
    ]
    if not missing:
        return ""
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"left out, because they are no matrix of a linear layer or product: {', '.join(missing[:NAMED])}{more}"
