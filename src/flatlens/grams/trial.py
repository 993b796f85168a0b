"""A trial run on a few samples: the structure that its graph proves, and where each operation's samples may lie."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.errors import BadModel
from flatlens.grams.record import Tape, made_reads, run_recorded
from flatlens.grams.rows import CANDIDATES, Rows, independent_rows, of_own_inputs
from flatlens.grams.structure import Structure, structure_of
from flatlens.operations.graph import Node, Place
from flatlens.operations.reads import Bias, Entrywise, GraphOperation, Product
from flatlens.problem import Batch, Problem
from flatlens.problem.causes import if_found, why_cut
from flatlens.problem.sequences import unpadded


def operations_of(tape: Tape, structure: Structure) -> dict[str, GraphOperation]:
    """Return the operations through which parameters act, by name.

    `z:CALL` is the product in a layer's call, `PARAMETER@k` the k-th other operation that reads a parameter, and
    `PARAMETER~k` the k-th that reads a tensor made from it. Output Jacobians at these operations give the Jacobians of
    the parameters. Only operations in `structure` are included.
    """
    found: dict[str, GraphOperation] = {
        f"z:{key}": call.product
        for key, call in tape.linear.items()
        if call.product is not None and structure.calls.get(key) is not None
    }
    known = {operation.node for operation in found.values()}
    claimed = [
        (f"{name}@{k}", read)
        for name, reads in tape.reads.items()
        for k, read in enumerate(reads or () if structure.reads[name] is not None else ())
    ]
    claimed += [(f"{name}~{k}", read) for name in structure.made for k, read in enumerate(made_reads(tape, name))]
    # Products first: a bias that is added in the same operation then shares the product's entry.
    for name, read in sorted(claimed, key=lambda one: not isinstance(one[1], Product)):
        if read.node not in known:
            found[name] = read
            known.add(read.node)
    return found


class Trial:
    """A recorded forward pass, and the possible arrangements of samples at its operations and inputs."""

    def __init__(self, problem: Problem, model: nn.Module, batch: Batch) -> None:
        self.tape, self.inputs, self.f, _ = run_recorded(problem, model, batch)
        if not self.f.requires_grad:
            why = if_found(lambda: why_cut(model, lambda: problem.run(model, batch)[0]))
            raise BadModel(
                f"Problem(model=...): the outputs do not depend differentiably on any input or weight: "
                f"{why or 'torch.no_grad() or detach() inside forward() is possible'}"
            )
        self.n = len(self.f)
        self.input_is_embedding = len(self.inputs) == 1 and any(self.inputs[0] is x for x in self.tape.embedded[:1])
        self.structure = structure_of(self.tape, self.inputs, model)
        self.operations: dict[str, GraphOperation] = {}
        self.names: dict[Node, str] = {}
        self.rows: dict[str, list[Rows]] = {}  #: all possible arrangements of the samples, by place

    def find_rows(self, structure: Structure, generator: torch.Generator) -> None:
        """Find the possible arrangements at all operations of the trials' common structure, and at inputs of calls."""
        self.operations = operations_of(self.tape, structure)
        self.names = {operation.node: name for name, operation in self.operations.items()}
        at, shapes = self._places()
        candidates = {name: self._candidates(name, shape) for name, shape in shapes.items()}
        moving: set[str] = set()
        self.rows = independent_rows(self.f, at, candidates, generator, moving)
        for name, possible in self.rows.items():  # where the outputs do not tell, as behind a gate that is shut
            if self.unclear(name, possible) or (name[:2] in ("x:", "z:") and name not in moving):
                like = self.f.new_empty(shapes[name])
                self.rows[name] = of_own_inputs(at[name], like, self.inputs, possible, self.n, generator)

    def unclear(self, name: str, possible: list[Rows]) -> bool:
        """Return whether a sample has several rows at a call's input or product, and several arrangements are left."""
        if len(possible) < 2 or self.n == 1 or name[:2] not in ("x:", "z:"):
            return False
        shape = self.tape.linear[name[2:]].x.shape if name.startswith("x:") else self.operations[name].shape
        return shape[possible[0].axis] != self.n

    def _places(self) -> tuple[dict[str, Place], dict[str, torch.Size]]:
        at: dict[str, Place] = {name: found.edge for name, found in self.operations.items()}
        shapes = {name: found.shape for name, found in self.operations.items()}
        tensors = {f"x:{key}": call.x for key, call in self.tape.linear.items() if call.x.requires_grad}
        tensors |= {f"input:{number}": x for number, x in enumerate(self.inputs)}
        return at | tensors, shapes | {name: x.shape for name, x in tensors.items()}

    def _candidates(self, name: str, shape: torch.Size) -> list[Rows]:
        """Return the arrangements that a place's shape and operation allow."""
        operation = self.operations.get(name)
        fitting = [rows for rows in CANDIDATES if rows.fit(shape, self.n)]
        if isinstance(operation, Product | Bias):
            return [rows for rows in fitting if rows.axis == 0]
        if isinstance(operation, Entrywise):
            return [rows for rows in fitting if operation.broadcast[rows.axis] == 1]
        return fitting

    @property
    def ignores_padding(self) -> bool:
        """Return whether the derivative is 0 at padded tokens, at every call's input and at the network's."""
        if self.tape.mask is None:
            return False
        read = [call.x for call in self.tape.linear.values() if call.x.requires_grad]
        u = torch.randn(self.f.shape, generator=torch.Generator().manual_seed(0)).to(self.f)
        derivatives = torch.autograd.grad(
            (u * self.f).sum(), [*read, *self.inputs], retain_graph=True, allow_unused=True
        )
        return bool(padding_ignored(self.tape.mask, list(derivatives)))


def padding_ignored(mask: Tensor, derivatives: list[Tensor | None]) -> Tensor:
    """Return whether derivatives at inputs are 0 at padded tokens, as a tensor."""
    zero = [(unpadded(derivative, mask) == derivative).all() for derivative in derivatives if derivative is not None]
    return torch.stack(zero).all() if zero else torch.tensor(True)
