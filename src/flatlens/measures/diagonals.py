"""Diagonals of the Hessian and of the Gauss-Newton matrix, entry by entry.

The Gauss-Newton part is exact from the pass. Of H - GGN, with the products A v of random signs v,

    A_jj = E[v_j (A v)_j],  v_j (A v)_j = A_jj + sum_{k != j} A_jk v_j v_k

so the entries of one product are one draw of the whole diagonal, and their sum over a layer is one draw of its sum.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatlens.curvature import GaussNewton, Hessian, Operator, Residual
from flatlens.curvature.functional_hessian import curved_parameters, diagonal
from flatlens.curvature.probes import mean_of_forms, quantile, wider
from flatlens.curvature.space import module_of
from flatlens.errors import BadOption
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams import LayerGrams
from flatlens.grams.data_pass import random_signs
from flatlens.measures.definition import Parts, Run, per_sample, require_count, require_one_of
from flatlens.measures.leading_eigenvalues import of_hessian
from flatlens.measures.lens import Lens
from flatlens.measures.traces import FEW_DIRECTIONS, of_probes, passed, plus
from flatlens.progress import PRODUCTS

_PROBES = 16
_FEWEST = 8  #: number of probes of which not all agree by chance: signs do in one of 128 draws


@per_sample(
    id="own", family="hessian", symbol="", source="", unit="loss / parameter^2", place="parameters",
    needs={"C", "diagonal"}, sketched="probes", total=True,
)  # fmt: skip
def gauss_newton_diagonal(g: LayerGrams) -> Tensor:
    """Gauss-Newton diagonal of a place's measured parameters, summed over samples, (size,)."""
    return g.diagonal


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A diagonal by parameter: exact, or the mean of probes with a standard error for each entry."""

    values: dict[str, Tensor] = field(default_factory=dict)  #: in the parameters' shapes, float64
    stderr: dict[str, Tensor] = field(default_factory=dict)  #: in the same shapes; empty if exact
    sums: dict[str, Tensor] = field(default_factory=dict)  #: sum of the entries, (); with probes that of each, (m,)

    def over(self, names: Collection[str]) -> Estimate:
        """Return the sum over some parameters: they share their probes, so the sum is taken per probe."""
        chosen = [total for name, total in self.sums.items() if name in names]
        total = torch.stack(chosen).sum(0) if chosen else torch.zeros(())
        return of_probes(total, None) if total.ndim else Estimate(float(total))


def _of_pass(lens: Lens, run: Run) -> tuple[Diagonal, dict[str, list[str]]]:
    """Return (the Gauss-Newton diagonal, the parameters of each place)."""
    found, places = Diagonal(), dict[str, list[str]]()
    shapes = {name: p.shape for name, p in lens.model.named_parameters() if name in lens.problem.parameters}
    for at, entries in passed(lens, run, gauss_newton_diagonal).items():
        weight = lens.plan.weights.get(at)
        of_place = [at] if weight is None else [weight.parameter, weight.bias]
        places[at] = [name for name in of_place if name in shapes]
        sizes = [shapes[name].numel() for name in places[at]]
        lead = entries.shape[:-1]  # the probes of a sketch
        entries = entries.expand(*lead, sum(sizes))  # a parameter that nothing reads has one zero
        for name, own in zip(places[at], torch.split(entries, sizes, -1), strict=True):
            if weight is not None and name == weight.parameter:
                V = weight.embedded(own.reshape(*lead, *weight.matrix.W.shape))
                own = weight.adapter.as_stored(V, shapes[name])
            own = own.reshape(*lead, *shapes[name])
            found.sums[name] = own.flatten(len(lead)).sum(-1)
            if lead:
                own, found.stderr[name] = mean_of_forms(own)
            found.values[name] = own
    return found, places


def _of_products(operator: Operator, probes: int | None, run: Run) -> Diagonal:
    """Return the diagonal of an operator from probes of random signs; from all unit vectors for None."""
    space = operator.space
    if probes is None:
        values = space.named(diagonal(operator, run.progress))
        return Diagonal(values, sums={name: own.sum() for name, own in values.items()})
    # mean and squared deviations are updated with each probe (Welford): only three vectors are held
    like = torch.empty(0, dtype=operator.dtype, device=space.device)
    mean, squares = torch.zeros(2, operator.size, dtype=torch.float64)
    sums = []
    for done in run.counted(PRODUCTS, probes):
        v = random_signs((operator.size,), like, run.generator)
        draw = (v * operator(v)).to("cpu", torch.float64)
        sums.append(torch.stack([draw[at].sum() for at in space.slices().values()]))
        off = draw - mean
        mean += off / (done + 1)
        squares += off * (draw - mean)
    # a sum of products of signs is symmetric: the quantile needs no correction for skewness
    stderr = (squares / (probes * (probes - 1))).sqrt() * quantile(probes) * (1 + wider(probes))
    named = dict(zip(space.parameters, torch.stack(sums, 1), strict=True))
    return Diagonal(space.named(mean), space.named(stderr), named)


def _sum(parts: list[Diagonal], names: Collection[str]) -> Estimate:
    """Return the sum of independent parts over some parameters."""
    total = Estimate(0.0)
    for part in parts:
        total = plus(total, replace(part.over(names), arrays={}, products=0))
    return total


@of_hessian(
    id="H14",
    symbol=r"\partial^2 L / \partial\theta_j^2",
    source="sharpening Eq. 3",
    cost="one pass with per-sample gradients of shared weights; 16 Hessian products unless piecewise linear",
    works_coupled=True,
    networks=30,
)
def hessian_diagonal(
    lens: Lens, run: Run, *, of: str = "hessian", probes: int | None = None, exact: bool = False
) -> Estimate | Parts:
    """Diagonal of the risk's Hessian: d2L / dtheta_j^2 of each measured parameter, in `arrays` by name and shape.

    The value is the diagonal's sum, also for each layer. `of="gauss_newton"` is the diagonal of the Gauss-Newton
    matrix, exact from the pass (with `Lens(outputs=k)` an estimate). The Hessian adds the diagonal of H - GGN, which is
    0 in piecewise-linear networks that use each weight once. In other networks it is an estimate from `probes` products
    with random signs (16 if None, at least 8), or exact from all unit vectors with `exact=True`, or where 64 of them
    suffice. The standard error of the entries of `arrays["fc.weight"]` is `arrays["fc.weight.stderr"]`: an entry +-
    1.96 of it is a 95% interval. `hessian_trace` estimates sums with less error. With `batchnorm="train"`, and where
    combinations of outputs would not fit in the problem's memory, probes estimate all of it.
    """
    # what is asked
    require_one_of(("hessian", "gauss_newton"), of=of)
    if probes is not None:
        require_count(_FEWEST, probes=probes)
        if exact:
            raise BadOption("options exact=True and probes=...: choose one")
    # the pass gives the Gauss-Newton part; an operator the rest, or all of it where samples are coupled, or where the
    # pass would hold a vector for each combination of the outputs and these are too large
    problem, model = lens.problem, lens.model
    parts, places, operators = list[Diagonal](), dict[str, list[str]](), list[Operator]()
    size = sum(p.numel() for name, p in model.named_parameters() if name in problem.parameters)
    if problem.coupled or 8 * size * (lens.probes or 0) > problem.memory:
        operators.append((Hessian if of == "hessian" else GaussNewton)(problem, model=model))
        for name in operators[0].space.parameters:
            places.setdefault(module_of(name), []).append(name)
    else:
        found, places = _of_pass(lens, run)
        parts.append(found)
        curved = curved_parameters(problem, lens.plan).names if of == "hessian" else ()
        operators += [Residual(problem, curved, model=model)] if curved else []
    note = ""
    for operator in operators:
        draws = None if exact or operator.size <= (FEW_DIRECTIONS if probes is None else probes) else probes or _PROBES
        parts.append(_of_products(operator, draws, run))
        lens.count(operator.products)
        if lens.underflow and not any(bool(own.any()) for own in parts[-1].values.values()):
            return undefined(lens.underflow)
        note = "" if draws is None else f"{draws} probes for the entries of {operator.size:,} parameters"
    # the entries are sums of independent parts, and so are the squares of their standard errors
    values, squares = dict[str, Tensor](), dict[str, Tensor]()
    for part in parts:
        values |= {name: values[name] + own if name in values else own for name, own in part.values.items()}
        for name, own in part.stderr.items():
            squares[name] = squares[name] + own.square() if name in squares else own.square()
    estimated = {name: squares.get(name, torch.zeros_like(own)) for name, own in values.items()} if squares else {}
    arrays = values | {f"{name}.stderr": own.sqrt() for name, own in estimated.items()}
    # sums by layer, and of all; the entries are with the latter
    products = sum(operator.products for operator in operators)
    whole = replace(with_note(_sum(parts, problem.parameters), note), arrays=arrays, products=products)
    return {("", None): whole, **{("", at): _sum(parts, names) for at, names in places.items()}}
