"""The weights of attention heads, and the derivatives of a chunk's outputs in their relative changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatlens.grams.record import read_heads, run_recorded
from flatlens.measures.lens import Lens
from flatlens.operations.graph import Node
from flatlens.operations.heads import HeadFinder
from flatlens.operations.pairs import Entries
from flatlens.operations.paths import Paths, is_product
from flatlens.operations.product_weights import NotUnderstood
from flatlens.operations.reads import features_of
from flatlens.operations.scales import NormScale
from flatlens.problem import Batch

OTHER_PRODUCTS = "the network does other matrix products on other samples"


@dataclass(frozen=True, eq=False)
class HeadWeight:
    """The weight of one head: it reads features (queries, keys, values), or it makes outputs of the head's values."""

    head: str
    part: str
    entries: Entries
    reads: bool
    uses: tuple[tuple[int, Tensor], ...]  #: (which matrix product of the pass, its outputs or inputs that are meant)
    norm: NormScale | None  #: the norm whose features it reads and nothing else does
    bias: Entries | None  #: what is added to the features that it makes by reading

    def derivatives(self, seen: SeenChunk, values: Mapping[str, Tensor]) -> Tensor:
        """Return the derivatives of the outputs in A, (N, n, a, a): W (I + A), or (I + A) W where it makes outputs.

        Behind a norm, W is taken with the norm's scale, and features as they are before scale and shift.
        """
        W = self.entries.of(values).to(torch.float64)
        shift = scale = None
        if self.norm is not None:
            scale = self.norm.scale.of(values)[:, 0].to(W)
            shift = None if self.norm.shift is None else self.norm.shift.of(values)[:, 0].to(W)
        total = torch.zeros((), dtype=torch.float64, device=W.device)
        for product, features in self.uses:
            phi, slope = seen.read[product], seen.slopes[product]
            if not self.reads:
                total = total + seen.summed(product, slope, phi[:, features] @ W)
                continue
            phi = phi if shift is None else phi - shift
            M = seen.summed(product, slope[..., features], phi if scale is None else phi / scale)
            total = total + (W if scale is None else W * scale).T @ M
        return total

    def directions(self, values: Mapping[str, Tensor]) -> HeadDirections:
        """Return the directions of the weight's relative changes, at these parameters."""
        W = self.entries.of(values).to("cpu", torch.float64)
        scale, shift = torch.ones(W.shape[1], dtype=torch.float64), None
        if self.norm is not None:
            scale = self.norm.scale.of(values)[:, 0].to(scale)
            shift = None if self.norm.shift is None else self.norm.shift.of(values).to(scale)
        U, singular, _ = torch.linalg.svd(W * scale, full_matrices=False)
        return HeadDirections(self.entries, U * singular, scale, None if shift is None else self.bias, shift)


@dataclass(frozen=True, eq=False)
class HeadDirections:
    """Directions of relative changes of a head's weight, W A, one for each matrix of coordinates Z.

    Summed over coordinates, the squares of the changes are those of W A over all A: W W^T = L L^T, so L Z has as many
    coordinates as W has entries, where W A has a^2.
    """

    entries: Entries
    L: Tensor  #: (h, rank) float64: L L^T = W W^T, W with the norm's scale
    scale: Tensor  #: (a,) float64, of the norm
    bias: Entries | None  #: it keeps W's product with the norm's shift as it is
    shift: Tensor | None  #: (a, 1) float64

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the coordinates."""
        return self.L.shape[1], len(self.scale)

    def along(self, Z: Tensor) -> list[tuple[Entries, Tensor]]:
        """Return the entries that change along coordinates Z, each with its change, float64."""
        change = self.L @ Z / self.scale
        moved = [(self.entries, change)]
        if self.bias is not None and self.shift is not None:
            moved.append((self.bias, -change @ self.shift))
        return moved


@dataclass(frozen=True, eq=False)
class SeenChunk:
    """The features that each matrix product reads in a chunk, and the derivatives of the outputs at what it gives."""

    n: int
    read: dict[int, Tensor]  #: (rows, inputs) float64
    slopes: dict[int, Tensor]  #: (N, rows, outputs) float64
    samples: dict[int, Tensor]  #: the sample of each row, (rows,); -1 where no output depends on the row

    def summed(self, product: int, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum over each sample's rows of outer products, (N, n, a, b), from (N, rows, a) and (rows, b)."""
        at = self.samples[product]
        each = [left[:, at == i].transpose(1, 2) @ right[at == i] for i in range(self.n)]
        return torch.stack(each, 1)


def heads_of(lens: Lens) -> tuple[list[HeadWeight], dict[str, str]]:
    """Return the weights of every head, and by part (queries and keys, values) why others are not understood."""
    with read_heads(lens.problem, lens.model) as (finder, scales):
        found, paths = finder.found, finder.paths
        products = [node for node in paths.graph.nodes if is_product(paths, node)]
        weights = {}
        for part, pairs in (("query_key", found.queries), ("value_output", found.values)):
            counts: dict[str, int] = {}
            for pair in {pair.key: pair for pair in pairs}.values():
                stem = pair.left[0].parameter.removesuffix("weight").rstrip("._")
                counts[stem] = counts.get(stem, -1) + 1
                for one in _weights(finder, products, scales.norms, f"{stem}.{counts[stem]}", part, pair.entries):
                    weights[one.entries.key] = one
    refused = {"query_key": found.refused_queries, "value_output": found.refused_values}
    why = {part: "; ".join(sorted(set(left.values()))) for part, left in refused.items() if left}
    return list(weights.values()), why


def _weights(
    finder: HeadFinder,
    products: list[Node],
    norms: list[NormScale],
    head: str,
    part: str,
    several: tuple[Entries, ...],
) -> Iterator[HeadWeight]:
    """Yield the weights among the entries of one product of a head; biases are left out."""
    for entries in several:
        rows: list[tuple[int, Tensor]] = []
        columns: list[tuple[int, Tensor]] = []
        for number, product in enumerate(products):
            try:
                weights = finder.weights.of(product)
            except NotUnderstood:
                continue
            if weights.parameter != entries.parameter:
                continue
            for uses, at in ((rows, weights.at), (columns, weights.at.T)):
                features = torch.isin(at[:, 0], entries.at[:, 0]).nonzero()[:, 0]
                if len(features) != len(entries.at):
                    continue
                order = features[at[features, 0].argsort()][entries.at[:, 0].argsort().argsort()]
                if torch.equal(at[order], entries.at):
                    uses.append((number, order))
        if rows or columns:
            norm = next((norm for norm in norms if rows and _reads(norm, finder, products[rows[0][0]])), None)
            made = finder.weights.of(products[rows[0][0]]).rows(rows[0][1])[1:] if rows else ()
            yield HeadWeight(head, part, entries, bool(rows), tuple(rows or columns), norm, next(iter(made), None))


def _reads(norm: NormScale, finder: HeadFinder, product: Node) -> bool:
    """Return whether a product reads a norm's features, in their order."""
    at = finder.weights.of(product).at.T
    return product in norm.nodes and any(torch.equal(columns.at, at) for columns, _ in norm.readers)


def seen_of(lens: Lens, batch: Batch, wanted: list[int]) -> tuple[SeenChunk, Tensor]:
    """Return what is seen of a chunk, and the losses' curvature in the outputs, (n, N, N)."""
    problem, model = lens.problem, lens.model
    tape, _, f, y = run_recorded(problem, model, batch)
    assert tape.graph is not None
    paths = Paths(tape.graph, model)
    products = [node for node in paths.graph.nodes if is_product(paths, node)]
    if wanted[-1] >= len(products):
        raise NotUnderstood(OTHER_PRODUCTS)
    n, N = f.shape
    one = torch.eye(N, dtype=f.dtype, device=f.device)[:, None].expand(N, n, N)
    some = (1 + torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(f)
    numbers = torch.arange(1, n + 1).to(f)
    u = torch.cat([one, some.expand(1, n, N), (numbers[:, None] * some).expand(1, n, N)])
    edges = [GradientEdge(products[number], 0) for number in wanted]
    # autograd frees these with the graph
    found = {number: features_of(products[number]) for number in wanted}
    read = {number: phi.to(torch.float64) for number, phi in found.items() if phi is not None}
    slopes = torch.autograd.grad([f], edges, [u], is_grads_batched=True, allow_unused=True)
    with torch.no_grad():
        C = problem.loss.output_hessian(f.detach(), y).to("cpu", torch.float64)
    each: dict[int, Tensor] = {}
    samples: dict[int, Tensor] = {}
    for number, slope in zip(wanted, slopes, strict=True):
        if slope is None:
            raise NotUnderstood(OTHER_PRODUCTS)
        each[number] = slope[:N].detach().to(torch.float64)
        samples[number] = _samples(slope[N].detach(), slope[N + 1].detach(), n)
    return SeenChunk(n, read, each, samples), C.to(f.device)


def _samples(plain: Tensor, numbered: Tensor, n: int) -> Tensor:
    """Return the sample of each row, from derivatives of all outputs, and of these times the samples' numbers.

    Rows whose derivatives are rounding tell no sample. They take that of their place if the others are in the order of
    the samples, else -1.
    """
    rounded = min(100 * n * torch.finfo(plain.dtype).eps, 1e-3)  # of the largest row: a softmax cancels what it sums
    plain, numbered = plain.to(torch.float64), numbered.to(torch.float64)
    size = plain.abs().amax(1)
    ratio = (plain * numbered).sum(1) / plain.square().sum(1).clamp(min=torch.finfo(size.dtype).tiny)
    number = ratio.round()
    error = (numbered - number[:, None] * plain).abs().amax(1)
    floor = rounded * size.max()
    if bool(((error > 1e-3 * size) & (error > floor)).any()):
        raise NotUnderstood("the rows of a projection belong to several samples at once")
    told, sample = (size > floor) & (error < 0.1 * size), number.long() - 1
    in_order = torch.arange(len(size), device=size.device) * n // len(size)
    return in_order if torch.equal(sample[told], in_order[told]) else torch.where(told, sample, -1)
