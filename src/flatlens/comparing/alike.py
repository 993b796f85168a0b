"""The requirements for comparing lenses, and remarks on differences that are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flatlens.errors import BadInput
from flatlens.measures import Lens
from flatlens.problem import Problem
from flatlens.problem.data import Data
from flatlens.problem.samples import FORWARD_CHUNK, checksum

SAME = {
    "loss": "they must be measured under one loss",
    "samples": "they must be measured on the same data",
    "outputs": "they must answer the same task",
    "held-out data": "give the same test data to all, or to none",
    "batchnorm": "give all the same batchnorm and ghost_batch",
}
"""The facts that must be equal, and the advice if they are not."""


def require_alike(lenses: Mapping[str, Lens]) -> None:
    """Refuse networks that are not measured on the same task and data; name the first two that differ."""
    if not isinstance(lenses, Mapping) or not all(isinstance(lens, Lens) for lens in lenses.values()):
        raise BadInput(
            'compare(...): a dict of name -> Lens is needed, such as compare({"a": Lens(...), "b": Lens(...)})'
        )
    if len(lenses) < 2:
        raise BadInput(f"compare(...): at least two networks are needed, got {len(lenses)}")
    for (a, first), (b, second) in combinations(lenses.items(), 2):
        if first.problem.model is second.problem.model:
            raise BadInput(
                f"compare(...): {a} and {b} use the same model object: make one model for each checkpoint "
                f"(copy.deepcopy, or load the weights into a new one)"
            )
    (a, first), *others = lenses.items()
    for b, lens in others:
        mine, theirs = _facts(first.problem), _facts(lens.problem)
        for what, advice in SAME.items():
            if mine[what] != theirs[what]:
                raise BadInput(f"compare(...): {what} of {a}: {mine[what]}, of {b}: {theirs[what]}; {advice}")
    _require_same_data(lenses)
    _require_same_loss(lenses)


def _facts(problem: Problem) -> dict[str, object]:
    ghost = "eval" if problem.ghost_batch is None else f"train, ghost_batch={problem.ghost_batch}"
    held_out = "none" if problem.test is None else "given"
    facts: list[object] = [problem.loss.description, problem.n, problem.outputs, held_out, ghost]
    return dict(zip(SAME, facts, strict=True))


def _require_same_data(lenses: Mapping[str, Lens]) -> None:
    """Require the same bytes in the same order; a shared data object is read once."""
    for which, name in (("data", "data"), ("test", "held-out data")):
        (a, first), *others = ((model, getattr(lens.problem, which)) for model, lens in lenses.items())
        print_of_first: int | None = None
        for b, data in others:
            if data is first:
                continue
            print_of_first = _print(first) if print_of_first is None else print_of_first
            if _print(data) != print_of_first:
                raise BadInput(f"compare(...): the {name} of {a} and {b} differ: give all the same, in the same order")


def _require_same_loss(lenses: Mapping[str, Lens]) -> None:
    """Require the same losses of the first network's outputs: a description does not tell two functions apart."""
    (a, first), *others = lenses.items()
    problem = first.problem
    with problem.measuring(first.model), torch.no_grad():
        f, y = problem.run(first.model, problem.place(problem.probes[0]))
        f = f.to(torch.float64)
        mine = problem.loss.values(f, y)
        for b, lens in others:
            theirs = lens.problem.loss.values(f, y)
            if not torch.allclose(mine, theirs, rtol=1e-6, atol=1e-12, equal_nan=True):
                at = int((mine - theirs).abs().argmax())
                raise BadInput(
                    f"compare(...): the losses of {a} and {b} differ: {float(mine[at]):.6g} and "
                    f"{float(theirs[at]):.6g} for the same outputs of a sample; {SAME['loss']}"
                )


def _print(data: Data) -> int:
    found = 0
    for batch in data.chunks(FORWARD_CHUNK):
        for leaf in tree_leaves(batch):
            found = checksum(leaf, found) if isinstance(leaf, Tensor) else found
    return found


def remarks(lenses: Mapping[str, Lens]) -> tuple[str, ...]:
    """Return the allowed differences, one sentence each."""
    told = []
    sizes = {name: sum(p.numel() for p in lens.problem.model.parameters()) for name, lens in lenses.items()}
    if len({_shape(lens) for lens in lenses.values()}) > 1:
        each = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        told.append(
            f"The networks differ in architecture (parameters: {each}): measures that sum over parameters or layers, "
            f"or use units of a layer's features, also depend on the architecture itself."
        )
    for what, values in {
        "precision": {name: str(lens.problem.dtype).removeprefix("torch.") for name, lens in lenses.items()},
        "combinations of outputs": {name: str(lens.probes or "all") for name, lens in lenses.items()},
    }.items():
        if len(set(values.values())) > 1:
            told.append(f"They differ in {what}: {', '.join(f'{name} {value}' for name, value in values.items())}.")
    if len({tuple(sorted(lens.problem.parameters)) for lens in lenses.values()}) > 1 and not told:
        told.append("They differ in which parameters are measured.")
    return tuple(told)


def _shape(lens: Lens) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(p.shape)) for name, p in lens.problem.model.named_parameters())
