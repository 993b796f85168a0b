"""One trial run on a few samples: what the graph proves there, and where each operation's samples lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.rows import CANDIDATES, Rows, agrees
from flatlens.grams.structure import Structure, structure_of
from flatlens.operations.graph import Node, Place
from flatlens.operations.reads import Bias, Entrywise, Operation, Product
from flatlens.problem import Batch, Problem
from flatlens.problem.sequences import unpadded


def operations_of(tape: Tape, structure: Structure) -> dict[str, Operation]:
    """The operations whose slopes tell how parameters act, by name: `z:CALL` for the product in a layer's call,
    `PARAMETER@k` for the k-th read of a parameter by another operation; of what the structure claims, and no more."""
    found: dict[str, Operation] = {
        f"z:{key}": call.product
        for key, call in tape.linear.items()
        if call.product is not None and structure.calls.get(key) is not None
    }
    known = {operation.node for operation in found.values()}
    for name, reads in tape.reads.items():
        for k, read in enumerate(reads or () if structure.reads[name] is not None else ()):
            if read.node not in known:
                found[f"{name}@{k}"] = read
                known.add(read.node)
    return found


class Trial:
    """Slopes of one random combination of all outputs, and of another in which each sample has a weight of its own."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch) -> None:
        self.tape, self.inputs, self.f, _ = run_recorded(problem, model, batch)
        if not self.f.requires_grad:
            raise BadModel(
                "Problem(model=...): the outputs do not depend differentiably on any input or weight: is there a "
                "torch.no_grad() or detach() inside forward()?"
            )
        self.n = len(self.f)
        self.embeds = bool(self.tape.embedded) and self.inputs == self.tape.embedded[:1]
        self.structure = structure_of(self.tape, self.inputs, model)
        self.operations: dict[str, Operation] = {}
        self.names: dict[Node, str] = {}
        self.slopes: dict[str, Tensor | None] = {}
        self.weighted: dict[str, Tensor | None] = {}

    def look(self, structure: Structure, generator: torch.Generator) -> None:
        """Take the slopes at all operations that the trials' common structure claims, at calls and at the inputs."""
        self.operations = operations_of(self.tape, structure)
        self.names = {operation.node: name for name, operation in self.operations.items()}
        at: dict[str, Place] = {name: found.edge for name, found in self.operations.items()}
        at |= {f"x:{key}": call.x for key, call in self.tape.linear.items() if call.x.requires_grad}
        at |= {f"input:{number}": x for number, x in enumerate(self.inputs)}
        u = torch.randn(self.f.shape, generator=generator).to(self.f)
        self.weights = 1 + torch.arange(self.n).to(self.f) / self.n
        self.slopes = dict(zip(at, _slopes((u * self.f).sum(), at), strict=True))
        self.weighted = dict(zip(at, _slopes((u * self.weights[:, None] * self.f).sum(), at), strict=True))

    def rows(self, name: str) -> list[Rows]:
        """Where the samples of an operation, or of a call's input, may lie: all that its slopes allow."""
        operation, once, weighted = self.operations.get(name), self.slopes.get(name), self.weighted.get(name)
        shape = self.tape.linear[name.removeprefix("x:")].x.shape if operation is None else operation.shape
        candidates = [rows for rows in CANDIDATES if rows.fit(shape, self.n)]
        if isinstance(operation, Product | Bias):
            candidates = [rows for rows in candidates if rows.axis == 0]
        if isinstance(operation, Entrywise):
            candidates = [rows for rows in candidates if operation.broadcast[rows.axis] == 1]
        if once is None or weighted is None:
            return candidates
        return [rows for rows in candidates if agrees(rows, once, weighted, self.weights)]

    @property
    def hides_padding(self) -> bool:
        """Whether nothing flows back to the features of padded tokens, at any call and at the input."""
        slopes = [slope for name, slope in self.slopes.items() if name.startswith(("x:", "input:"))]
        return self.tape.mask is not None and bool(hides(self.tape.mask, slopes))


def _slopes(of: Tensor, at: dict[str, Place]) -> tuple[Tensor | None, ...]:
    """Gradients; None where nothing depends on a place."""
    return torch.autograd.grad(of, list(at.values()), retain_graph=True, allow_unused=True) if at else ()


def hides(mask: Tensor, slopes: list[Tensor | None]) -> Tensor:
    """Whether slopes at inputs of calls are zero at padded tokens."""
    there = [(unpadded(slope, mask) == slope).all() for slope in slopes if slope is not None]
    return torch.stack(there).all() if there else torch.tensor(True)
