"""Flatness of attention heads that no change of their basis moves: relative flatness of what the heads compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatlens.curvature import Residual
from flatlens.curvature.probes import largest_of
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams.autograd import ignore_slow_batching_warning
from flatlens.grams.data_pass import random_signs
from flatlens.grams.record import read_heads, run_recorded
from flatlens.measures.definition import HEADWISE, LAYERWISE, PERMUTATION, Parts, Run, on_lens
from flatlens.measures.lens import Lens
from flatlens.measures.notes import ALL, LARGEST_OF_NOISY
from flatlens.measures.traces import Effort, FunctionalHessianPart, plus, sampled
from flatlens.operations.graph import LEAF, Graph, Node, walk
from flatlens.operations.pair_finders import HeadFinder, NormScale
from flatlens.operations.parameter_uses import features_of
from flatlens.operations.weight_pairs import Entries, NotUnderstood
from flatlens.problem import Batch
from flatlens.problem.eval_context import differentiable
from flatlens.progress import PRODUCTS

OTHER_PRODUCTS = "the network does other matrix products on other samples"

ProductKey: TypeAlias = "tuple[Hashable, ...]"
"""What finds a matrix product with a parameter in any pass: how its weight is made of the parameter, its turn among the
products whose weights are made alike, and how many there are."""


def products_of(graph: Graph) -> dict[ProductKey, Node]:
    """Return the matrix products of a pass, by what finds them in another one, where other samples take other ways."""
    ways: dict[Node, ProductKey] = {}
    for node in sorted(filter(graph.is_product, graph.nodes), key=lambda node: node._sequence_nr()):
        behind = walk([node.next_functions[-1]], lambda edge: [one for one in edge[0].next_functions if one[0]])
        ways[node] = tuple(
            graph.names.get(id(one.variable)) if one.name() == LEAF else (one.name(), number) for one, number in behind
        )
    many, turn = Counter(ways.values()), Counter[ProductKey]()
    found = {}
    for node, way in ways.items():
        turn[way] += 1
        found[*way, turn[way], many[way]] = node
    return found


@dataclass(frozen=True, eq=False)
class HeadWeight:
    """The weight of one head: it reads features (queries, keys, values), or it makes outputs of the head's values."""

    head: str
    part: str
    entries: Entries
    reads: bool
    uses: tuple[tuple[ProductKey, Tensor], ...]  #: (a matrix product, its outputs or inputs that are meant)
    norm: NormScale | None  #: the norm whose features it reads and nothing else does
    bias: Entries | None  #: what is added to the features that it makes by reading

    def derivatives(self, seen: SeenChunk, values: Mapping[str, Tensor]) -> Tensor:
        """Return the derivatives of the outputs in A, (N, n, a, a): W (I + A), or (I + A) W where it makes outputs."""
        # behind a norm, W is taken with the norm's scale, and features as they are before scale and shift
        W = self.entries.of(values).to(torch.float64)
        scale, shift = W.new_ones(W.shape[1]), W.new_zeros(W.shape[1])
        if self.norm is not None:
            scale = self.norm.scale.of(values)[:, 0].to(W)
            shift = shift if self.norm.shift is None else self.norm.shift.of(values)[:, 0].to(W)
        total = torch.zeros((), dtype=torch.float64, device=W.device)
        for product, features in self.uses:
            phi, slope = seen.read[product], seen.slopes[product]
            if self.reads:
                M = seen.summed(product, slope[..., features], (phi - shift) / scale)
                total = total + (W * scale).T @ M
            else:
                total = total + seen.summed(product, slope, phi[:, features] @ W)
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
        """The shape of the coordinates."""
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
    read: dict[ProductKey, Tensor]  #: (rows, inputs) float64
    slopes: dict[ProductKey, Tensor]  #: (N, rows, outputs) float64
    samples: dict[ProductKey, Tensor]  #: the sample of each row, (rows,); -1 where no output depends on the row

    def summed(self, product: ProductKey, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum over each sample's rows of outer products, (N, n, a, b), from (N, rows, a) and (rows, b)."""
        at = self.samples[product]
        each = [left[:, at == i].transpose(1, 2) @ right[at == i] for i in range(self.n)]
        return torch.stack(each, 1)


def heads_of(lens: Lens) -> tuple[list[HeadWeight], dict[str, str]]:
    """Return the weights of every head, and by part (queries and keys, values) why others are not understood."""
    with read_heads(lens.problem, lens.model) as (found, scales):
        products = products_of(found.graph)
        weights = {}
        for part, pairs in (("query_key", found.queries), ("value_output", found.values)):
            counts: dict[str, int] = {}
            for pair in {pair.key: pair for pair in pairs}.values():
                stem = pair.left[0].parameter.removesuffix("weight").rstrip("._")
                counts[stem] = counts.get(stem, -1) + 1
                for one in _weights(found, products, scales.norms, f"{stem}.{counts[stem]}", part, pair.entries):
                    weights[one.entries.key] = one
    refused = {"query_key": found.refused_queries, "value_output": found.refused_values}
    why = {part: "; ".join(sorted(set(left.values()))) for part, left in refused.items() if left}
    return list(weights.values()), why


def _weights(
    finder: HeadFinder,
    products: dict[ProductKey, Node],
    norms: list[NormScale],
    head: str,
    part: str,
    several: tuple[Entries, ...],
) -> Iterator[HeadWeight]:
    """Yield the weights among the entries of one product of a head; biases are left out."""
    for entries in several:
        rows: list[tuple[ProductKey, Tensor]] = []
        columns: list[tuple[ProductKey, Tensor]] = []
        for known, product in products.items():
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
                    uses.append((known, order))
        norm, bias = None, None
        if rows:
            # the norm whose features it reads, in their order, and what is added to the features that it makes
            (known, order), *_ = rows
            product, weights = products[known], finder.weights.of(products[known])
            at = weights.at.T
            near = (n for n in norms if product in n.nodes and any(torch.equal(read.at, at) for read, _ in n.readers))
            norm, bias = next(near, None), next(iter(weights.rows(order)[1:]), None)
        if rows or columns:
            yield HeadWeight(head, part, entries, bool(rows), tuple(rows or columns), norm, bias)


def seen_of(lens: Lens, batch: Batch, wanted: Collection[ProductKey]) -> tuple[SeenChunk, Tensor]:
    """Return what is seen of a chunk, and the losses' curvature in the outputs, (n, N, N)."""
    problem, model = lens.problem, lens.model
    tape, _, f, y = run_recorded(problem, model, batch)
    products = products_of(tape.graph)
    if not products.keys() >= {*wanted}:
        raise NotUnderstood(OTHER_PRODUCTS)
    n, N = f.shape
    units = torch.eye(N, dtype=f.dtype, device=f.device)[:, None].expand(N, n, N)
    some = (1 + torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(f)
    numbers = torch.arange(1, n + 1).to(f)
    u = torch.cat([units, some.expand(1, n, N), (numbers[:, None] * some).expand(1, n, N)])
    edges = [GradientEdge(products[one], 0) for one in wanted]
    # autograd frees these with the graph
    found = {one: features_of(products[one]) for one in wanted}
    read = {one: phi.to(torch.float64) for one, phi in found.items() if phi is not None}
    slopes = torch.autograd.grad([f], edges, [u], is_grads_batched=True, allow_unused=True)
    with torch.no_grad():
        C = problem.loss.output_hessian(f.detach(), y).to("cpu", torch.float64)
    each: dict[ProductKey, Tensor] = {}
    samples: dict[ProductKey, Tensor] = {}
    for product, slope in zip(wanted, slopes, strict=True):
        if slope is None:
            raise NotUnderstood(OTHER_PRODUCTS)
        each[product] = slope[:N].detach().to(torch.float64)
        samples[product] = _samples(slope[N].detach(), slope[N + 1].detach(), n)
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


NO_HEADS = "no attention heads could be identified in this network"
NO_BIAS = "projections without a bias read a norm's shift: no change of their weights keeps the shift's contribution"
FROZEN_BIAS = "projections with a frozen bias read a norm's shift, and only the bias can keep its contribution"
FROZEN = f"all of its weights are frozen: {ALL}"


of_heads = partial(
    on_lens,
    id="M9",
    family="flatness",
    unit="loss",
    invariant_under={LAYERWISE, PERMUTATION, HEADWISE},
    on_request=True,
)


@of_heads(
    symbol=r"\kappa_{heads}^{GN}",
    source="relative2021 Def. 3; symmetries2025",
    cost="N backward passes to the projections of attention",
)
def head_flatness_ggn(lens: Lens, run: Run) -> Estimate | Parts:
    """Relative flatness of attention heads, Gauss-Newton part, in the metric that no change of basis moves; summed.

    A head acts through two products alone: W_q^T W_k, and W_o W_v. Each of its four weights is changed relatively, on
    the side where no other basis can be chosen: W_q (I + A), W_k (I + A), W_v (I + A), (I + A) W_o. The value of a
    weight is the trace over A of the curvature of the risk, sum_{s,s'} <w_s, w_s'> Tr H_{s,s'}, the relative flatness
    of its rows (columns of W_o): the trace in the metric tr((W W^T)^-1 dW dW^T), for W_o tr(dW (W^T W)^-1 dW^T), which
    is that of the quotient. Behind a norm that attention alone reads, W stands with the norm's scale, so that a scale
    that moves out of the norm changes nothing. Rows are heads; `.query_key` and `.value_output` are the two products,
    `.max` is the largest head. Frozen weights are left out. Where a head of some attention is not understood, the sum
    is undefined, and rows of other heads are there.
    """
    try:
        heads = _measured_heads(lens, run)
        sums = _gauss_newton(lens, run, heads.weights)
    except NotUnderstood as reason:
        return undefined(str(reason))
    return _parts(heads, lambda numbers: Estimate(float(sums[numbers].sum())))


@of_heads(
    symbol=r"\kappa_{heads}",
    source="relative2021 Def. 3; symmetries2025",
    cost="N backward passes to the projections of attention, and probes of one Hessian product each",
)
def head_flatness(
    lens: Lens, run: Run, *, rtol: float = 0.01, probes: int | None = None, exact: bool = False
) -> Estimate | Parts:
    """Relative flatness of attention heads in the metric that no change of their basis moves; summed over heads.

    It is `head_flatness_ggn`, which describes the metric, plus the same trace of the functional Hessian, H - GGN.
    Random probes estimate the latter: as many as bring the standard error of the sum below `rtol` times the value, or
    `probes` of them; or with `exact=True` every direction in turn. `.gauss_newton` and `.functional_hessian` are the
    two parts; other parts and the rows are as in `head_flatness_ggn`. Undefined where projections without a bias, or
    with a frozen one, read the shift of a norm: the change that the definition asks for is then none of the parameters.
    """
    effort = Effort(rtol, probes, exact)
    try:
        heads = _measured_heads(lens, run)
        weights = heads.weights
        for one in weights:
            shifted = one.norm is not None and one.norm.shift is not None
            if shifted and (one.bias is None or not _measured(lens, run, one.bias)):
                raise NotUnderstood(NO_BIAS if one.bias is None else FROZEN_BIAS)
        sums = _gauss_newton(lens, run, weights)
    except NotUnderstood as reason:
        return undefined(str(reason))
    beyond = _functional_hessian(lens, run, weights, effort, float(sums.sum()))

    def part(numbers: list[int]) -> Estimate:
        return beyond.over([beyond.names[number] for number in numbers])

    parts = _parts(heads, lambda numbers: plus(Estimate(float(sums[numbers].sum())), part(numbers)))
    if parts["", None].kind != "undefined":
        whole = part(list(range(len(weights))))
        parts["gauss_newton", None] = with_note(Estimate(float(sums.sum())), heads.left_out)
        parts["functional_hessian", None] = with_note(replace(whole, arrays={}), heads.left_out)
    return parts


@dataclass(frozen=True, eq=False)
class _Heads:
    """The weights of the heads that are measured, and what is not."""

    weights: list[HeadWeight]
    why: Mapping[str, str]  #: by part, why some heads cannot be told
    frozen: list[HeadWeight]

    @property
    def left_out(self) -> str:
        layers = {one.entries.parameter for one in self.frozen}
        return f"{len(layers)} frozen layers left out" if layers else ""


def _measured_heads(lens: Lens, run: Run) -> _Heads:
    """Weights of the network's heads; raises NotUnderstood where there are none to measure."""
    if lens.probes is not None:
        raise NotUnderstood("it needs the derivative of every output: Lens(outputs='exact')")
    every, why = heads_of(lens)
    if not every:
        reasons = "; ".join(dict.fromkeys(why.values()))
        raise NotUnderstood(f"{NO_HEADS}{reasons and f': {reasons}'}")
    weights = [one for one in every if _measured(lens, run, one.entries)]
    if not weights:
        raise NotUnderstood(FROZEN)
    return _Heads(weights, why, [one for one in every if one not in weights])


def _measured(lens: Lens, run: Run, entries: Entries) -> bool:
    return run.frozen or entries.parameter in lens.problem.parameters


def _gauss_newton(lens: Lens, run: Run, weights: list[HeadWeight]) -> Tensor:
    """Return the trace over A of each weight's Gauss-Newton matrix, (weights,)."""
    sums = torch.zeros(len(weights), dtype=torch.float64)
    problem, model = lens.problem.as_asked(), lens.model
    values = dict(model.named_parameters())
    wanted = list(dict.fromkeys(product for one in weights for product, _ in one.uses))
    most = max(1, min(64, problem.memory // (4 * lens.plan.bytes_per_sample(problem.outputs))))
    with (
        problem.ranks.as_one(),
        problem.measuring(model),
        differentiable(model.parameters()),
        ignore_slow_batching_warning(),
    ):
        for _, raw in problem.shared(most, what="heads", progress=run.progress):
            seen, C = seen_of(lens, problem.place(raw), wanted)
            for at, one in enumerate(weights):
                D = one.derivatives(seen, values).flatten(2)  # (N, n, a a)
                sums[at] += float((C.transpose(0, 1) * torch.einsum("knz,lnz->knl", D, D)).sum())
    return problem.ranks.total(sums) / problem.mass


def _functional_hessian(
    lens: Lens, run: Run, weights: list[HeadWeight], effort: Effort, size: float
) -> FunctionalHessianPart:
    """Return the trace over A of each weight's functional Hessian: numbers, or probes of all weights at once."""
    # a probe changes all weights together; their signs are independent: terms between two weights have mean 0
    # all weights' directions, and one operator for all parameters that these change
    values = dict(lens.model.named_parameters())
    directions = [one.directions(values) for one in weights]
    shapes = [one.shape for one in directions]
    changed = {entries.parameter for one in directions for entries in (one.entries, one.bias) if entries is not None}
    operator = Residual(lens.problem, sorted(changed), model=lens.model)

    def forms(coordinates: Mapping[int, Tensor]) -> Tensor:
        """Return the quadratic form of each weight's own part, (weights,), for coordinates of some weights."""
        moved = {at: directions[at].along(Z) for at, Z in coordinates.items()}
        v = {name: torch.zeros_like(p).flatten() for name, p in operator.space.parameters.items()}
        for entries, part in chain.from_iterable(moved.values()):
            v[entries.parameter][entries.at] += part.to(v[entries.parameter])
        Fv = operator({name: row.reshape(values[name].shape) for name, row in v.items()})
        own = torch.zeros(len(weights), dtype=torch.float64)
        for at, parts in moved.items():
            own[at] = sum(float((part * entries.of(Fv).cpu()).sum()) for entries, part in parts)
        lens.count(1)
        return own

    def draw(probes: int) -> Tensor:
        like = torch.empty(0, dtype=torch.float64)
        signs = partial(random_signs, like=like, generator=run.generator)
        return torch.stack([forms(dict(enumerate(map(signs, shapes)))) for _ in run.counted(PRODUCTS, probes)])

    # random signs, or every direction in turn where those are fewer
    everything = sum(h * a for h, a in shapes)
    names = tuple(map(str, range(len(weights))))
    found = sampled(draw, effort, size, everything, run)
    if found is not None:
        return FunctionalHessianPart(names, *found, len(found[0]))
    total = torch.zeros(len(weights), dtype=torch.float64)
    units = ((at, e.reshape(h, a)) for at, (h, a) in enumerate(shapes) for e in torch.eye(h * a, dtype=total.dtype))
    for _, (at, unit) in zip(run.counted(PRODUCTS, everything), units, strict=True):
        total += forms({at: unit})
    return FunctionalHessianPart(names, total, None, everything)


def _parts(heads: _Heads, of: Callable[[list[int]], Estimate]) -> dict[tuple[str, str | None], Estimate]:
    """Return sum, heads and their two products, of sums over weights; undefined where some head is not understood."""
    # each head's row, and those of its two products
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(heads.weights):
        for part in ("", one.part):
            numbers.setdefault((part, one.head), []).append(number)
    rows = {key: of(mine) for key, mine in numbers.items()}
    # the largest head: of noisy values, its mean is biased
    heads_alone = [row for (part, _), row in rows.items() if not part]
    largest = max(heads_alone, key=lambda row: row.value)
    if any(row.margin for row in heads_alone) and all(row.kind != "undefined" for row in heads_alone):
        drawn = [(row.value, row.stderr if row.margin else 0.0) for row in heads_alone]
        means, errors = torch.tensor(drawn, dtype=torch.float64).T
        draws = min((len(row.arrays["probes"]) for row in heads_alone if "probes" in row.arrays), default=None)
        value, stderr = largest_of(means, errors, draws)
        largest = replace(largest, value=value, stderr=stderr, kind="estimate", arrays={}, note=LARGEST_OF_NOISY)
    parts: dict[tuple[str, str | None], Estimate] = {
        ("", None): of(list(range(len(heads.weights)))),
        ("max", None): largest,
    }
    for part in ("query_key", "value_output"):
        mine = [number for number, one in enumerate(heads.weights) if one.part == part]
        frozen = not mine and any(one.part == part for one in heads.frozen)
        parts[part, None] = undefined(FROZEN) if frozen else replace(of(mine), arrays={})
        if part in heads.why:
            unknown = undefined(f"some heads could not be identified: {heads.why[part]}")
            parts |= dict.fromkeys([("", None), ("max", None), (part, None)], unknown)
    parts = {key: with_note(whole, heads.left_out) for key, whole in parts.items()}
    return parts | {key: replace(row, arrays={}) for key, row in rows.items()}
