"""Traces and diagonals of the Gauss-Newton matrix and of the Hessian.

The Gauss-Newton part is exact from the pass; the functional Hessian is exact or estimated by probes. Of its diagonal,
with the products A v of random signs v,

    A_jj = E[v_j (A v)_j],  v_j (A v)_j = A_jj + sum_{k != j} A_jk v_j v_k

so the entries of one product are one draw of the whole diagonal, and their sum over a layer is one draw of its sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from flatlens.curvature import GaussNewton, Hessian, Operator, Residual
from flatlens.curvature.functional_hessian import (
    Directions,
    curved_parameters,
    diagonal,
    row_directions,
    shift_directions,
    unit_directions,
)
from flatlens.curvature.probes import mean_of_forms, quantile, wider
from flatlens.curvature.space import module_of
from flatlens.errors import BadOption
from flatlens.estimate import Estimate, Kind, undefined, with_note
from flatlens.grams import LayerGrams
from flatlens.grams.data_pass import random_signs
from flatlens.measures.definition import (
    PERMUTATION,
    THOROUGH_RTOL,
    UNITS_AND_ORDER,
    Parts,
    PassMeasure,
    Run,
    by_probes,
    mean,
    per_sample,
    require_count,
    require_one_of,
    require_positive,
)
from flatlens.measures.leading_eigenvalues import of_hessian
from flatlens.measures.lens import Lens
from flatlens.measures.normalised import adaptive_sharpness_ggn
from flatlens.measures.notes import NO_PARAMETER
from flatlens.progress import PRODUCTS, Watch, count_of

of_parameters = partial(
    per_sample,
    family="sharpness",
    unit="output^2 / parameter^2",
    place="parameters",
    needs={"K"},
    sketched="probes",
    invariant_under={PERMUTATION},
)


@of_parameters(id="M1", symbol="S", source="compression Eq. 3")
def interpolation_sharpness(g: LayerGrams) -> Tensor:
    """Size of the outputs' response to the parameters: mean_i ||df/dtheta||_F^2.

    It is mean_i tr K_i, summed over all measured parameters. It equals Tr H if the network interpolates the data under
    the half squared error. The paper's figures plot its square root.
    """
    return g.K.diagonal(dim1=1, dim2=2).sum(1)


@of_parameters(
    id="M2", symbol=r"\mathrm{Tr}\,GN", source="sharpening Eq. 3", unit="loss / parameter^2", needs={"C", "CK"}
)
def ggn_trace(g: LayerGrams) -> Tensor:
    """Trace of the Gauss-Newton matrix: mean_i tr(C_i K_i), summed over parameters.

    It equals Tr H if the outputs are an affine function of each weight, as in ReLU networks that use each
    weight once.
    """
    return g.CK


@of_parameters(id="M18", symbol=r"\overline{\|\partial f/\partial\theta\|_F^2}", source="sharpening App. D")
def parameter_jacobian_frobenius(g: LayerGrams) -> Tensor:
    """Squared Frobenius norm of the parameter-output Jacobian, under the name that regularisers use.

    The same number as `interpolation_sharpness`: mean_i ||df_i/dtheta||_F^2 = mean_i tr K_i.
    """
    found: Tensor = interpolation_sharpness.evaluate(g)
    return found


_FIRST = 8  #: probes of the pilot: fewer do not show their own spread
FEW_DIRECTIONS = 64  #: number of directions up to which all are taken: probes of few directions are far from normal
_SURE = 16  #: number of probes that do not all agree by chance: a form that varies takes no value more often than 3/4
_FEWEST = 4  #: number of probes where their work is limited
_MOST = 4096  #: largest number of probes
_ALIKE = 1e-5  #: spread of few probes, relative to the largest, below which they may agree by chance


@dataclass(frozen=True)
class Effort:
    """The accuracy that a trace estimate aims at, and its method."""

    rtol: float | None  #: standard error wanted, relative to the value
    probes: int | None  #: this many, whatever the error
    exact: bool  #: whether to use every direction and no probes
    few: int = _SURE  #: number of probes where neither `rtol` nor `probes` is given

    def __post_init__(self) -> None:
        if self.rtol is not None:
            require_positive(rtol=self.rtol)
        if self.exact and self.probes is not None:
            raise BadOption("options exact=True and probes=...: choose one")
        if self.probes is not None and not (isinstance(self.probes, int) and self.probes >= 2):
            raise BadOption(f"option probes={self.probes!r}: expected None or a whole number of at least 2")


def sampled(
    draw: Callable[[int], Tensor], effort: Effort, size: float, everything: int, run: Run
) -> tuple[Tensor, int | None] | None:
    """Return (probes that add to `size`, number in the pilot); None if `everything` costs less, or is requested."""
    few = FEW_DIRECTIONS if effort.probes is None else max(_SURE, effort.probes)
    if effort.exact or everything <= few:
        return None
    if effort.probes is not None or effort.rtol is None:
        probes = effort.probes or effort.few
        rows, more = draw(probes), _SURE - probes
        # where the rows' sums, or a column, are nearly one number that is not 0, signs may agree by chance
        values = torch.cat([rows, rows.sum(1, keepdim=True)], 1)
        largest = values.abs().amax(0)
        agree = (values.amax(0) - values.amin(0) <= _ALIKE * largest) & (largest > 0)
        return (torch.cat([rows, draw(more)]) if more > 0 and bool(agree.any()) else rows), None
    start = time.perf_counter()
    rows = draw(_FIRST)
    each = (time.perf_counter() - start) / _FIRST
    pilot = of_probes(rows.sum(1), _FIRST)
    if pilot.stderr == 0:  # equal values show nothing of their spread
        return None
    allowed = effort.rtol * abs(size + pilot.value)
    enough = allowed > 0 and pilot.stderr < allowed * _MOST
    needed = min(_MOST, max(_SURE, math.ceil(_FIRST * (pilot.stderr / allowed) ** 2))) if enough else _MOST
    if isinstance(run.progress, Watch):
        fits = int(run.progress.limit / 2 / each) if run.progress.limit < math.inf else needed
        less = f"probes={fits} take half of that time, with a wider interval; " if fits >= _FIRST else ""
        run.progress.allow(min(needed, everything), min(needed, everything) * each, mend=less)
    if needed >= everything:
        return None
    return torch.cat([rows, draw(needed - _FIRST)]), _FIRST


def of_probes(values: Tensor, pilot: int | None) -> Estimate:
    """Return the mean of the probes as an estimate.

    The spread of the pilot gives the error (Stein's two stages): if the spread of all probes decided how many to draw,
    the interval would cover too little. That of all probes counts where it is larger: where few parameters decide, the
    pilot's signs can agree by chance, and of these parameters alone when their number was drawn for all.
    """
    mean, stderr = (float(v) for v in mean_of_forms(values))
    if pilot is not None:
        stderr = max(stderr, float(mean_of_forms(values[:pilot])[1]) * (pilot / len(values)) ** 0.5)
    note = "" if stderr > 0 else f"all {len(values)} probes agree"
    return Estimate(mean, stderr, "estimate", note, arrays={"probes": values}, products=len(values))


@dataclass(frozen=True, eq=False)
class FunctionalHessianPart:
    """The part of a trace beyond its Gauss-Newton part, by parameter: numbers, or probes."""

    names: tuple[str, ...]
    values: Tensor  #: (names,), or (m, names) for m probes
    pilot: int | None
    products: int
    unknown: str = ""  #: why all values are 0 and should not be
    drawn: str = ""  #: what the probes are, if their number was not asked for

    def over(self, names: Collection[str]) -> Estimate:
        """Return the sum over some parameters: they share their probes, so the sum is taken per probe."""
        chosen = [number for number, name in enumerate(self.names) if name in names]
        if chosen and self.unknown:
            return undefined(self.unknown)
        total = self.values[..., chosen].sum(-1)
        if self.values.ndim == 1:
            return Estimate(float(total), products=self.products if chosen else 0)
        return with_note(of_probes(total, self.pilot), self.drawn) if chosen else Estimate(0.0)


def functional_hessian_part(lens: Lens, run: Run, effort: Effort, weighted: bool, size: float) -> FunctionalHessianPart:
    """Return the part of every curved parameter; `size` is the Gauss-Newton part that it is added to."""
    curved = curved_parameters(lens.problem, lens.plan)
    if not curved.names:
        return FunctionalHessianPart((), torch.zeros(0), None, 0)

    def draw(probes: int) -> Tensor:
        values = curved.traces(
            lens.model, probes=probes, weighted=weighted, generator=run.generator, progress=run.progress
        )
        return torch.stack([values[name] for name in curved.names], 1)

    drawn = sampled(draw, effort, size, curved.exact_products(lens.model), run)
    if drawn is not None:
        few = effort.rtol is None and effort.probes is None
        told = f"{count_of(len(drawn[0]), 'probe')}; the option rtol=0.01 takes more" if few else ""
        found = FunctionalHessianPart(curved.names, *drawn, len(drawn[0]), drawn=told)
    else:
        values, products = curved.exact_traces(lens.model, weighted=weighted, progress=run.progress)
        exact = torch.tensor([values[name] for name in curved.names], dtype=torch.float64)
        found = FunctionalHessianPart(curved.names, exact, None, products)
    lens.count(found.products)
    return found if found.values.any() else replace(found, unknown=lens.underflow)


def traced(
    lens: Lens, run: Run, gauss_newton: PassMeasure, effort: Effort, weighted: bool
) -> dict[tuple[str, str | None], Estimate]:
    """Return the Gauss-Newton part plus the functional Hessian's, at every place and in total."""
    places = passed(lens, run, gauss_newton)
    if not places:
        return {("", None): undefined(NO_PARAMETER)}
    whole = mean_over_samples(lens, sum(places.values()))
    beyond = lens.attempted(
        partial(functional_hessian_part, lens, run, effort, weighted, whole.value), gauss_newton.key
    )
    if isinstance(beyond, str):
        names = curved_parameters(lens.problem, lens.plan).names
        beyond = FunctionalHessianPart(tuple(names), torch.zeros(len(names)), None, 0, unknown=beyond)
    mine = {name: layer for layer, w in lens.plan.weights.items() for name in (w.parameter, w.bias) if name}
    parts: dict[tuple[str, str | None], Estimate] = {}
    for at, v in places.items():
        here = beyond.over([name for name in beyond.names if mine.get(name, name) == at])
        parts["", at] = replace(plus(mean_over_samples(lens, v), here), arrays={})
    all_of_it = beyond.over(beyond.names)
    return {
        ("", None): plus(whole, all_of_it),
        ("gauss_newton", None): whole,
        ("functional_hessian", None): replace(all_of_it, arrays={}),
        **parts,
    }


def passed(lens: Lens, run: Run, measure: PassMeasure) -> dict[str, Tensor]:
    """Return the values that the pass gives for a measure at each of its places."""
    values = lens.per_sample([measure], run.progress, run.generator)
    return {at: v for (key, at), v in list(values.items()) if key == measure.key and at is not None}


def mean_over_samples(lens: Lens, values: Tensor | int) -> Estimate:
    """Return the mean over samples, and over the probes of a sketch."""
    assert isinstance(values, Tensor)
    if lens.probes is None:
        return Estimate(float(values.mean()))
    found = by_probes(mean, values)
    return Estimate(found.value, found.stderr, "estimate")


def plus(a: Estimate, b: Estimate) -> Estimate:
    """Return the sum of estimates with independent errors; the probes of b are shifted to the sum."""
    if b.kind == "undefined":
        return b
    arrays = {"probes": a.value + b.arrays["probes"]} if b.arrays else {}
    kind: Kind = "exact" if a.kind == b.kind == "exact" else "estimate"
    return replace(b, value=a.value + b.value, stderr=math.hypot(a.stderr, b.stderr), kind=kind, arrays=arrays)


of_trace = partial(
    of_hessian, cost="one pass; nothing more on piecewise-linear networks, else probes of one Hessian product each"
)


def _effort(lens: Lens, run: Run, rtol: float | None, probes: int | None, exact: bool) -> Effort:
    """Return the effort that the options ask for; without any, few probes, or an error of 1% in a thorough run."""
    few = _SURE
    if run.budget < math.inf:
        few = max(_FEWEST, min(_SURE, int(run.budget / lens.product_size)))
    return Effort(THOROUGH_RTOL["hessian_trace"] if rtol is None and run.thorough else rtol, probes, exact, few)


@of_trace(id="H3", symbol=r"\mathrm{Tr}\,H", source="compression Eq. 2", works_coupled=True, reads=(ggn_trace,))
def hessian_trace(
    lens: Lens, run: Run, *, rtol: float | None = None, probes: int | None = None, exact: bool = False
) -> Estimate | Parts:
    """Trace of the risk's Hessian in the measured parameters, also of each layer's block.

    The value is the exact Gauss-Newton trace plus the trace of H - GGN. In piecewise-linear networks that use each
    weight once, the latter is 0. In other networks, random probes estimate it: `probes` of them (16 if fewer agree), or
    as many as bring the standard error below `rtol` times the value (at most 4,096). Without these options there are
    16; in studies, trackers, bounds and tables of invariance `rtol` is 0.01. It is exact if every direction in turn
    takes at most 64 products (with `probes`: 16), or no more than the probes, or with `exact=True`.
    `.gauss_newton` and `.functional_hessian` are the two parts. With `batchnorm="train"`, probes estimate all of Tr H,
    and there are neither parts nor layers.
    """
    effort = _effort(lens, run, rtol, probes, exact)
    if not lens.problem.coupled:
        return traced(lens, run, ggn_trace, effort, weighted=False)
    # where samples are coupled there is no pass: from random probes (Hutchinson), or from unit vectors
    operator = Hessian(lens.problem, model=lens.model)
    like = torch.empty(0, dtype=operator.dtype, device=operator.space.device)

    def draw(probes: int) -> Tensor:
        signs = (random_signs((operator.size,), like, run.generator) for _ in run.counted(PRODUCTS, probes))
        return torch.stack([(v * operator(v)).sum(dtype=torch.float64).cpu() for v in signs])[:, None]

    found = sampled(draw, effort, 0.0, operator.size, run)
    total = float(diagonal(operator, run.progress).sum()) if found is None else 0.0
    lens.count(operator.products)
    return Estimate(total, products=operator.products) if found is None else of_probes(found[0][:, 0], found[1])


@of_trace(
    id="M12",
    family="normalised",
    symbol=r"S_{adaptive}",
    source="compression Def. E.1",
    unit="loss",
    invariant_under=UNITS_AND_ORDER,
    reads=(adaptive_sharpness_ggn,),
)
def adaptive_sharpness(
    lens: Lens, run: Run, *, rtol: float | None = None, probes: int | None = None, exact: bool = False
) -> Parts:
    """Elementwise-adaptive sharpness: sum_j theta_j^2 d2L/dtheta_j^2, the limit of average-case sharpness as rho -> 0.

    It is `adaptive_sharpness_ggn` plus the same sum for the functional Hessian. Options and parts are as in
    `hessian_trace`.
    """
    return traced(lens, run, adaptive_sharpness_ggn, _effort(lens, run, rtol, probes, exact), weighted=True)


@of_trace(
    id="H7",
    symbol=r"\mathrm{Tr}\,H - S",
    source="compression Lemma B.1",
    cost="as hessian_trace with rtol=0.01; with bound=True a Hessian product for every direction",
)
def interpolation_gap(
    lens: Lens,
    run: Run,
    *,
    rtol: float = 0.01,
    probes: int | None = None,
    exact: bool = False,
    adaptive: bool = False,
    bound: bool = False,
) -> Estimate | Parts:
    """Difference between the Hessian's trace and `interpolation_sharpness`: Tr H - S, which vanishes at interpolation.

    The lemma is about the half squared error; under other losses the difference also contains C. `adaptive=True` is the
    version of Lemma E.2, with theta_j^2 before every term. `bound=True` adds `.bound`, the middle term of the lemma,
    mean_i sum_j |<f_i - y_i, d2f_i/dtheta_j2>|. It is never above the lemma's m M epsilon.
    """
    half_square = lens.problem.loss.half_square
    if adaptive and not half_square:
        return undefined("Lemma E.2 is about the half squared error")
    gauss_newton = adaptive_sharpness_ggn if adaptive else ggn_trace
    parts = traced(lens, run, gauss_newton, Effort(rtol, probes, exact), adaptive)
    if parts["", None].kind == "undefined":
        return parts["", None]
    apart = Estimate(0.0)  # C = I: the Gauss-Newton trace is S
    if not half_square:
        plain = mean_over_samples(lens, sum(passed(lens, run, interpolation_sharpness).values()))
        apart = plus(parts["gauss_newton", None], replace(plain, value=-plain.value))
    value = plus(apart, parts["functional_hessian", None])
    return {("", None): value, ("bound", None): _lemma_bound(lens, run, adaptive)} if bound else value


def _lemma_bound(lens: Lens, run: Run, adaptive: bool) -> Estimate:
    """Return mean_i sum_j |<dl_i/df, d2 f_i/dtheta_j2>|; a dense layer takes one direction per row."""
    if not lens.problem.loss.half_square:
        return undefined("Lemma B.1 is about the half squared error")
    curved = curved_parameters(lens.problem, lens.plan)
    if curved.others:
        return undefined(f"{curved.others[0]!r} and others act outside one call of a linear layer")
    total, before = 0.0, lens.products
    for layer in {**curved.weights, **curved.biases}:
        weight = lens.plan.weights[layer]
        W, b = weight.matrix.W, weight.matrix.b
        families: list[tuple[Directions, Tensor | None]] = []  # directions, and the scale of each
        if layer in curved.weights:
            by_row = weight.dense and not adaptive
            every = row_directions(torch.eye(W.shape[1]).expand(1, -1, -1)) if by_row else unit_directions()
            families.append((every, W.flatten().square() if adaptive else None))
        if layer in curved.biases:
            assert b is not None
            families.append((shift_directions(), b.square() if adaptive else None))
        for family, scale in families:

            def absolute(forms: Tensor, scale: Tensor | None = scale) -> Tensor:
                return (forms.abs() if scale is None else forms.abs() * scale).sum(1)

            total += float(lens.functional_hessian(layer, family, run, weigh=absolute).sum()) / lens.problem.n
    return Estimate(total, products=lens.products - before)


_PROBES = 16  #: of a diagonal
_FEWEST_SIGNS = 8  #: number of probes of which not all agree by chance: signs do in one of 128 draws


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
        require_count(_FEWEST_SIGNS, probes=probes)
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
