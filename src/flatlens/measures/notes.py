"""Why there is no number; the notes on the layer that one is of, and on parameters that a sum over layers omits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.estimate import Estimate, joined_notes
from flatlens.measures.lens import Lens
from flatlens.operations.layers import is_linear
from flatlens.problem.batches import is_list
from flatlens.problem.diagnosis import why_no_slope

NO_MEASURED_LAYER = "the network has no linear layer whose weight is a measured parameter"
NO_PARAMETER = "no parameter is measured"
STOPPED = "the search stopped before its tolerance was reached"
LARGEST_OF_NOISY = "maximum of noisy estimates (biased upwards)"
UNUSED = "the outputs have no derivative with respect to them: unused, inside no_grad(), or detached"
UNSEEN = "calls inside torch.func cannot be recorded"
UNCHOSEN = "not requested"
NO_MATRIX = "not the weight of a linear layer"
ALL = "Problem(parameters='all') measures frozen ones, too"
NAMED = 3  #: names that a note lists


def no_linear_layer(lens: Lens) -> str:
    """Return why there is no linear layer to measure: the network has none, or the pass sees no call of one."""
    if lens.plan.unplaced:
        return "; ".join(f"{call}: {why}" for call, why in [*lens.plan.unplaced.items()][:NAMED])
    if any(is_linear(module) for module in lens.model.modules()):
        return "no call of a linear layer is seen: calls inside torch.func or no_grad() cannot be recorded"
    return "the network has no linear layer"


def no_input(lens: Lens) -> str:
    """Return why there is no derivative in the network's input."""
    given = lens.problem.probes[0]
    fed = given if lens.problem.forward is not None or not isinstance(given, tuple) else given[0]
    lists = [part for part in tree_leaves(fed, is_leaf=is_list) if is_list(part)]
    if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(lists)):
        return "the inputs are lists with one item per sample, of different sizes: no derivative with respect to these"
    return f"the outputs depend differentiably on no input: {why_no_slope(given)}"


def needs_every_output(lens: Lens) -> str:
    """Return why a measure has no estimate from combinations of outputs."""
    return f"it needs all {lens.problem.outputs} outputs: Lens(problem, outputs='exact')"


def left_out(lens: Lens, layers: Iterable[str], but: Collection[str] = ()) -> str:
    """Return a note that names the measured matrices outside these layers, `but` not these; empty if there are none."""
    # each cause is looked at: whether autograd's graph of the outputs has the matrix, and whose it is
    weights = [lens.plan.weights[name] for name in layers]
    counted = {weight.parameter for weight in weights}
    made = tuple(f"{weight.layer}." for weight in weights if weight.parameter is None)
    reads, known = lens.plan.structure.reads, {weight.parameter for weight in lens.plan.weights.values()}
    linear = {id(module._parameters.get("weight")) for module in lens.model.modules() if is_linear(module)}
    causes: dict[str, list[str]] = {}
    for name, p in lens.model.named_parameters():
        missing = not (name in counted or name.startswith(made) or name in but)
        if missing and name in lens.problem.parameters and p.ndim >= 2:
            cut = UNUSED if reads.get(name) == () else UNSEEN if id(p) in linear else NO_MATRIX
            causes.setdefault(UNCHOSEN if name in known else cut, []).append(name)
    more = {why: f" and {len(names) - NAMED} more" if len(names) > NAMED else "" for why, names in causes.items()}
    listed = (f"excluded ({why}): {', '.join(names[:NAMED])}{more[why]}" for why, names in causes.items())
    return "; ".join(listed)


def which_layer(lens: Lens, layer: str, layers: Iterable[str] | None = None) -> str:
    """Return the note on the layer of the network-level value, and on matrices outside `layers`, those with a value."""
    weights = lens.plan.weights
    small = {*lens.plan.embeddings, *lens.plan.small_parameters}
    others = "" if layers is None else left_out(lens, layers, but=small)
    later = list(weights)[list(weights).index(layer) + 1 :]
    if later:
        which = f"of {layer}: {later[0]} is {'left out' if weights[later[0]].measured else 'frozen'}"
    elif not weights[layer].measured:
        which = f"of {layer}, which is frozen"
    elif lens.plan.several_ends:
        which = f"of {layer}, one of several output layers"
    else:
        which = f"of {layer}" if others else ""
    return joined_notes(which, others)


def lost_at(layers: Mapping[str, Estimate]) -> str:
    """Return at how many layers there is no value, and why at the first of them; empty if all have one."""
    missing = [name for name, e in layers.items() if e.kind == "undefined"]
    if not missing:
        return ""
    return f"undefined at {len(missing)} of {len(layers)} layers, the first {missing[0]}: {layers[missing[0]].note}"
