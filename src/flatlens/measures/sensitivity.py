"""Sensitivity of the outputs to the input: norms of df/dx, searches, volumes and dimension of the image.

The Gram matrices of the pass have the derivatives from a layer to the output. Those below the layer, dx^l/dx, take a
backward pass for each feature of the layer's input; of many features Lanczos gives the largest singular value alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from flatlens.curvature.operators import bytes_saved
from flatlens.curvature.spectral_norms import batch_jacobians, squared_jacobian, top_of_each
from flatlens.errors import BadOption
from flatlens.estimate import Estimate, Progress, joined_notes, undefined, with_note
from flatlens.grams import LayerGrams, Plan
from flatlens.grams.plan import FRONT, agreed, coupled_places
from flatlens.grams.record import run_recorded
from flatlens.measures.definition import (
    FUNCTION,
    PERMUTATION,
    Parts,
    Reduced,
    Run,
    largest,
    mean_of_finite,
    number_of,
    on_lens,
    per_sample,
    require_count,
    require_positive,
    require_tolerance,
)
from flatlens.measures.leading_eigenvalues import in_batches, of_jacobian
from flatlens.measures.lens import Lens
from flatlens.perturbation.inputs import Refused, steepest_secants
from flatlens.perturbation.variation import certified_variation, found_variation
from flatlens.problem import Problem
from flatlens.problem.batches import size
from flatlens.problem.eval_context import differentiable
from flatlens.problem.ranks import ChunkBuffer

FEATURES = 1024  #: features of a layer's input up to which each takes a backward pass
_CHUNK = 256  #: largest number of samples in a chunk


@dataclass(frozen=True, eq=False)
class Representation:
    """dx^l/dx of the samples of a chunk, by its singular values."""

    singular: Tensor  #: (n, min(m, M)) float64, descending; (n, 1) where only the largest was searched
    residual: float | None = None  #: of the largest, relative to it, where it was searched


def representations(
    problem: Problem,
    model: nn.Module,
    plan: Plan,
    calls: Collection[str],
    rtol: float,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Generator[tuple[int, dict[str, Representation]], None, None]:
    """Yield (number of the chunk, representations by call); a call whose samples depend on each other is left out."""
    problem = problem.as_asked()
    probe = problem.place(problem.probes[0])
    seed = int(torch.randint(2**62, (), generator=generator))
    with problem.measuring(model), differentiable(model.parameters()):
        # a chunk whose graph and Jacobians fit in the memory
        tape, inputs, f, _ = run_recorded(problem, model, probe)
        rows = max((tape.linear[key].x.numel() // len(f) for key in calls), default=1)
        entries = sum(x.numel() for x in inputs) // len(f) * min(rows, FEATURES)
        each = bytes_saved(model, size(probe), lambda: run_recorded(problem, model, probe))
        most = max(1, min(_CHUNK, problem.memory // (3 * each + 24 * entries)))
        for number, raw in problem.shared(most, what="hidden representations", progress=progress):
            own = torch.Generator().manual_seed(seed + number)  # the same on whichever process has the chunk
            batch = problem.place(raw)
            tape, inputs, f, _ = run_recorded(problem, model, batch)
            problem.require_as_seen(model, batch, number, f)
            plan.require_same(tape, inputs, batch)
            at = [inputs[k] for k in plan.inputs]
            found: dict[str, Representation] = {}
            for key in calls:
                h = plan.unpadded(tape.linear[key].x.movedim(plan.batch_axis[key], 0), tape).flatten(1)
                named = {str(k): x for k, x in enumerate(at)}
                if coupled_places(h, named, dict.fromkeys(named, FRONT), torch.Generator().manual_seed(0)):
                    continue
                found[key] = _below(h, at, rtol, own)
            yield number, found


def _below(h: Tensor, at: list[Tensor], rtol: float, generator: torch.Generator) -> Representation:
    if h.shape[1] > FEATURES:
        apply, shape = squared_jacobian(h, at, softmax=False, counted=None, in_front=True)
        values, residuals, _ = top_of_each(apply, shape, rtol, generator)
        largest = values.clamp(min=1e-300)
        return Representation(values.clamp(min=0).sqrt()[:, None], float((residuals / largest).max()) / 2)
    J = []
    for feature in range(h.shape[1]):
        slopes = torch.autograd.grad(h[:, feature].sum(), at, retain_graph=True, allow_unused=True)
        J.append(torch.cat([(torch.zeros_like(x) if s is None else s).flatten(1).double()
                            for s, x in zip(slopes, at, strict=True)], 1))  # fmt: skip
    return Representation(torch.linalg.svdvals(torch.stack(J, 1)))


of_input = partial(
    per_sample,
    family="sensitivity",
    unit="output / input",
    place="input",
    needs={"G"},
    answer="input",
    sketched="top",
    cost="one pass, eigenvalues",
    invariant_under=FUNCTION,
)
searched = partial(
    on_lens,
    family="perturbation",
    unit="output / input",
    invariant_under=FUNCTION,
    of_parameters=False,
    on_request=True,
)


def _norm(g: LayerGrams, softmax: bool = False) -> Tensor:
    """Return ||df/dx||_2 per sample, (n,), or that of softmax(f)."""
    return (g.softmax_eigenvalues if softmax else g.eigenvalues)[:, -1].sqrt()


@of_input(id="M3", symbol=r"\mathrm{MLS}", source="compression Def. 3.7")
def mls(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Maximum local sensitivity: mean_i ||df/dx_i||_2, to the network's input, or through one layer.

    `softmax=True` takes the derivatives of softmax(f) in place of f; `jacobian_norm(softmax=True)` is the maximum of
    the same norms.
    """
    return _norm(g, softmax)


@of_input(
    id="M3",
    symbol=r"\mathrm{NMLS}",
    source="compression Def. 3.9",
    unit="output / feature",
    answer="sum",
    invariant_under={PERMUTATION},
)
def nmls(g: LayerGrams) -> Tensor:
    """Network MLS: the sum over linear layers of mean_i ||df/dx^l_i||_2, each through its layer (rows of `mls`)."""
    return _norm(g)


@of_input(id="M4", symbol=r"\max_i \|Jf(x_i)\|_2", source="sharpening section 4, A.1, B.1", reduce=largest)
def jacobian_norm(g: LayerGrams, *, softmax: bool = False) -> Tensor:
    """Largest sensitivity over the samples: max_i ||df/dx_i||_2 of the logits, or of softmax(f).

    `softmax=True` takes the derivatives of p = softmax(f). Their Gram matrix is P G P, with P = diag(p) - p p^T.
    """
    return _norm(g, softmax)


@of_input(id="M7", symbol=r"\overline{\|x\|^2 \|Jf\|_2^2}", source="compression Def. F.1", unit="output^2")
def normalized_mls(g: LayerGrams) -> Tensor:
    """Sensitivity in units of the input's size: mean_i ||x_i||^2 ||df/dx_i||_2^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is at most that layer's
    `relative_flatness_ggn`.
    """
    assert g.x_norm2 is not None
    return g.x_norm2 * g.eigenvalues[:, -1]


of_input_trace = partial(of_input, sketched="probes", cost="one pass")  # linear in G


@of_input_trace(
    id="M8",
    symbol=r"\overline{\sum_p x_p^2 \|\partial f/\partial x_p\|^2}",
    source="compression Def. E.3",
    unit="output^2",
    needs={"G", "squares"},
)
def input_invariant_mls(g: LayerGrams) -> Tensor:
    """Sensitivity that a rescaling of single inputs cannot change: mean_i sum_p x_ip^2 ||df/dx_ip||^2.

    For C = I, and where one linear layer with unshared weights alone reads the input, it is that layer's
    `neuron_flatness_ggn`.
    """
    assert g.x is not None
    return (g.input_squares * g.x.to(torch.float64).square()).sum(1)


@of_input_trace(id="M18", symbol=r"\overline{\|Jf\|_F^2}", source="sharpening App. D", unit="output^2 / input^2")
def jacobian_frobenius(g: LayerGrams) -> Tensor:
    """Squared Frobenius norm of the input-output Jacobian: mean_i ||df/dx_i||_F^2 = mean_i tr G_i."""
    return g.G.diagonal(dim1=1, dim2=2).sum(1)


@searched(
    id="M4",
    family="sensitivity",
    symbol=r"\|Jf(X)\|_2",
    source="sharpening A.1, B.3",
    cost="Lanczos: about 10 products with each batch's Jacobian",
    works_coupled=True,
)
def batch_jacobian_norm(
    lens: Lens, run: Run, *, softmax: bool = False, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Estimate:
    """Norm of the Jacobian of whole batches, ||df(X)/dX||_2, BatchNorm as in training; the largest over ghost batches.

    Where BatchNorm couples the samples of a batch its Jacobian is one matrix; in eval mode it has a block for each
    sample, and the norm is `jacobian_norm`. `batch_statistics` and `rtol` are as in `sharpness`, `softmax` as in
    `jacobian_norm`.
    """
    require_tolerance(rtol)
    problem = in_batches(lens, batch_statistics)
    found = batch_jacobians(
        problem, lens.model, [None], softmax=softmax, rtol=rtol, generator=run.generator, progress=run.progress
    )
    return of_jacobian(found[None])


@on_lens(
    id="M3",
    family="sensitivity",
    symbol=r"\overline{\|\partial x^l / \partial x\|_2}",
    source="compression sections 3.1 to 3.3, for the map below a layer",
    unit="feature / input",
    cost="a backward pass for each feature of a layer's input; of more than 1024, Lanczos",
    invariant_under={PERMUTATION},
    of_parameters=False,
    on_request=True,
)
def representation_mls(lens: Lens, run: Run, *, top_k: int | None = None, rtol: float = 1e-3) -> Parts:
    """Sensitivity of hidden representations: mean_i ||dx^l/dx_i||_2, of each layer's input x^l; the last layer's.

    `mls` of a layer is that from the representation to the output, df/dx^l; this is that from the input to the
    representation, and ||df/dx|| is at most the product of the two for each sample.

    `.log_volume` is the mean of log sqrt(det) of the derivative's smaller Gram matrix, m x m or M x M: by how much the
    volume of a small ball of inputs grows. Where a layer is wider than the input, this is Definition 3.1 as printed,
    det(df^T df). `top_k` keeps the largest singular values. Samples of lower rank, which dead ReLUs leave, have volume
    0; they are left out, and counted. `.dimension` is Eq. 15 of the representation, between 1 and min(m, M).

    A layer that reads more than 1024 features has its norm alone, a lower bound with a residual of `rtol`.
    """
    require_tolerance(rtol)
    if top_k is not None:
        require_count(1, top_k=top_k)
    plan = lens.plan
    calls = [key for key in plan.batch_axis if key != plan.input_call]
    if not calls or not plan.inputs:
        return {("", None): undefined("no layer reads a representation: each reads the network's input")}
    return lens.planned(partial(_of_representations, lens, run, calls, top_k, rtol))


def _of_representations(lens: Lens, run: Run, calls: list[str], top_k: int | None, rtol: float) -> Parts:
    kept: ChunkBuffer[str] = ChunkBuffer()
    residuals, coupled = dict[str, float](), set[str]()
    ranks = lens.problem.ranks
    walk = representations(lens.problem, lens.model, lens.plan, calls, rtol, run.generator, run.progress)
    least = 100 * max(lens.problem.precision, torch.finfo(torch.float64).eps)
    # three numbers of each sample and call, chunk by chunk: the norm alone where it was searched
    with agreed(ranks), closing(walk) as chunks:
        for number, found in chunks:
            coupled |= set(calls) - set(found)
            for key, one in found.items():
                s, top = one.singular, one.singular[:, 0]
                if one.residual is None:
                    k = min(top_k or s.shape[1], s.shape[1])
                    logs = torch.where(s[:, k - 1] > least * top, s[:, :k].log().sum(1), -math.inf)
                    dimensions = s.square().sum(1).square() / s.pow(4).sum(1)
                else:
                    residuals[key] = max(residuals.get(key, 0.0), one.residual)
                    logs = dimensions = torch.full_like(top, math.nan)
                kept.add(number, {key: torch.stack([top, logs, dimensions], 1)})
    rows, every = kept.joined(ranks), ranks.together((residuals, coupled))
    # their means, undefined where a process saw that samples depend on each other
    parts: dict[tuple[str, str | None], Estimate] = {}
    for key in calls:
        if any(key in dependent for _, dependent in every):
            parts["", key] = undefined("samples depend on each other there")
            continue
        norms, logs, dimensions = rows[key].unbind(1)
        norm = Estimate(float(norms.mean()), samples=norms)
        searched_to = [found[key] for found, _ in every if key in found]
        if searched_to:
            note = f"each to a residual of {max(searched_to):.1g} of its size; a larger singular value may exist"
            norm = replace(norm, kind="lower bound", note=note)
            many = undefined(f"{key} reads more than {FEATURES} features: its norm alone is known")
            parts |= {("", key): norm, ("log_volume", key): many, ("dimension", key): many}
            continue
        volume, dimension = mean_of_finite(logs, DEFICIENT), mean_of_finite(dimensions, "without any response")
        parts["", key] = norm
        for name, of_all, unit in (("log_volume", volume, "log"), ("dimension", dimension, "dimensions")):
            parts[name, key] = Estimate(
                of_all.value, kind=of_all.kind, note=of_all.note, samples=of_all.samples, unit=unit
            )
    # the network's answer is the last call's
    last = calls[-1]
    return parts | {(name, None): estimate for (name, at), estimate in parts.items() if at == last}


@searched(
    id="P5",
    symbol=r"\max_i V_{B(x_i, \delta)}(Jf)",
    source="sharpening Eq. 5",
    cost="N backward passes at 128 points of each ball (512 up to 3 dimensions, 16 above 256), and at "
    "2 x restarts x steps more",
)
def local_variation(lens: Lens, run: Run, *, delta: float = 0.1, restarts: int = 4, steps: int = 20) -> Parts:
    """Local variation of the Jacobian: max_i sup ||Jf(u) - Jf(v)||_2 over u, v within delta of x_i.

    `delta` is a Euclidean distance in the input's units. The value is the result of a search, a lower bound: the
    rounding error of the Jacobians is taken off. `.upper` is a certified upper bound; it exists for chains of affine
    layers and common activations that are small enough to be written out as matrices. `samples` has each sample's own
    bound for both. For a linear network both are 0.
    """
    require_positive(delta=delta)
    require_count(1, restarts=restarts, steps=steps)
    try:
        found = found_variation(
            lens.problem, lens.model, delta, restarts=restarts, steps=steps, generator=run.generator,
            progress=run.progress,
        )  # fmt: skip
    except Refused as why:
        return {("", None): undefined(str(why)), ("upper", None): undefined(str(why))}
    value = Estimate(float(found.max()), kind="lower bound", samples=found)
    try:
        bound = certified_variation(lens.problem, lens.model, delta, progress=run.progress)
    except Refused as why:
        return {("", None): value, ("upper", None): undefined(str(why))}
    return {("", None): value, ("upper", None): Estimate(float(bound.max()), kind="upper bound", samples=bound)}


@searched(
    id="P6",
    symbol=r"\overline{\max_d \|f(x + d) - f(x)\| / \|d\|}",
    source="compression Eq. 47, App. F",
    cost="restarts x steps forward and backward passes",
    differentiates=False,
)
def mls_by_search(
    lens: Lens, run: Run, *, delta: float = 1e-3, restarts: int = 4, steps: int = 20, normalized: bool = False
) -> Estimate:
    """Maximum local sensitivity by search: mean_i max ||f(x_i + d) - f(x_i)|| / ||d|| over ||d|| = delta ||x_i||.

    `delta` is relative to the norm of each input, so that it means the same at any scale of the data. The value is a
    lower bound of the steepest secants of this length, found by gradient ascent from random starts, and evaluated in
    float64; where the network does not run in it, the rounding error is taken off. As delta shrinks, these tend to
    `mls`, which one pass gives exactly; at a kink (a ReLU whose input is exactly 0, as on dark patches without bias)
    they can stay above it. `normalized=True` is Definition F.1 with the slopes that were found, mean_i ||x_i||^2
    slope_i^2, as Appendix F approximates `normalized_mls`; its unit is output^2.
    """
    require_positive(delta=delta)
    require_count(1, restarts=restarts, steps=steps)
    try:
        slopes, coarse = steepest_secants(
            lens.problem, lens.model, delta, restarts=restarts, steps=steps, generator=run.generator,
            normalized=normalized, progress=run.progress,
        )  # fmt: skip
    except Refused as why:
        return undefined(str(why))
    if beyond := int(slopes.isinf().sum()):
        return undefined(f"the search met outputs that are not finite around {beyond} of {len(slopes)} samples")
    reduced = mean_of_finite(slopes**2 if normalized else slopes, "0, so that no relative length is defined")
    rounded = f"{coarse} of {len(slopes)} differences are mostly rounding: try a larger delta, or float64"
    found = Estimate(reduced.value, kind=reduced.kind, samples=reduced.samples)
    if reduced.kind == "exact":
        secants = "mean over the steepest secants of that length, not over slopes"
        found = replace(found, kind="lower bound", note=secants)
    return with_note(with_note(found, reduced.note), rounded if coarse else "")


STATED = 1e-3
"""Smallest relative error of a volume by rounding that is told."""
DEFICIENT = "rank-deficient within rounding"
WITHOUT = "with fewer directions, because the network ends in a softmax"
IS_ROUNDING = "its error is rounding error, which moves small singular values"
TAKEN_OFF = "less the error by rounding"
BEHIND_SOFTMAX = "the network ends in a softmax, so its outputs move in fewer directions than there are outputs"
_LOST = 0.1  #: share of a Jacobian that is rounding, from which on its shape is that of rounding
LOST_BELOW = torch.finfo(torch.float64).tiny / torch.finfo(torch.float64).eps  #: of G, which squares derivatives


def positive(g: LayerGrams) -> Tensor:
    """Return which eigenvalues of G are above 0 beyond rounding, (n, N).

    Rounding hides those below 100 eps of lmax(G) in float64, in which G is accumulated; below (100 eps)^2 of it in the
    arithmetic of the derivatives (G squares them: 1.4e-10 for a float32 network); and below (100 r)^2 of tr G, where r
    is the error of the sample's own Jacobian by rounding, relative to its length, which is larger where derivatives
    cancel. Behind a closing softmax the smallest ones are 0 whatever the digits.
    """
    values = g.eigenvalues
    least = max(100 * torch.finfo(torch.float64).eps, (100 * g.precision) ** 2) * values[:, -1:]
    if g.rounding is not None:
        least = torch.maximum(least, (100 * g.rounding[:, None]).square() * values.sum(1, keepdim=True))
    numbers = torch.arange(values.shape[1], device=values.device)
    return (values > least.clamp(min=LOST_BELOW)) & (numbers >= values.shape[1] - _directions(g)[:, None])


def _directions(g: LayerGrams) -> Tensor:
    """Return how many directions the outputs can move in, (n,): each closing softmax takes one.

    Of tokens the softmax may be over the tokens. It is taken as one over the classes where no other is as long; else
    it counts only in samples without masked tokens, which have all parts of it.
    """
    size = g.softmax_size
    if not size:
        return g.outputs
    less = g.outputs - g.outputs // size
    if g.counted is None:
        return less
    tokens = g.counted.shape[1]
    if size * tokens == g.f.shape[1] and size != tokens:
        return less
    return torch.where(g.counted.all(1), less, g.outputs)


def log_volumes(g: LayerGrams, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Return log sqrt(det G_i), or of the `top_k` largest eigenvalues, and how far rounding may move it, (n,) each.

    Where the rank is lower, it is -inf: with an infinite error within rounding, and with none behind a closing softmax.
    Only the sample's own rows count: rows of masked tokens have eigenvalue 0, and are left out.
    """
    N = g.eigenvalues.shape[1]
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= N):
        raise BadOption(f"option top_k={top_k!r}: expected a whole number between 1 and the number of outputs, {N}")
    key = "log volumes", top_k
    if key not in g.shared:
        values, k = g.eigenvalues, g.outputs.clamp(max=top_k or N)[:, None]
        # eigenvalues have errors of about sqrt(N) eps lmax in float64, singular values that of the Jacobian
        share = torch.full_like(values[:, 0], g.precision) if g.rounding is None else g.rounding.clamp(min=g.precision)
        of_jacobian = share * values.sum(1).sqrt()
        of_gram = N**0.5 * torch.finfo(torch.float64).eps * values[:, -1]
        each = of_gram[:, None] / (2 * values) + of_jacobian[:, None] / values.sqrt()
        kept = torch.arange(N, device=k.device) >= N - k  # ascending
        full = positive(g).gather(1, (N - k).clamp(max=N - 1))[:, 0]
        logs = torch.where(full, 0.5 * torch.where(kept, values, 1.0).log().sum(1), -math.inf)
        moved = torch.where(full, torch.where(kept, each, 0.0).sum(1), math.inf)
        overflow = values[:, -1].isnan()
        known = overflow | (k[:, 0] > _directions(g))
        g.shared[key] = torch.where(overflow, math.nan, logs), torch.where(known, 0.0, moved)
    logs, moved = g.shared[key]
    return logs, moved


def mean_of_dimensions(values: Tensor) -> Reduced:
    """Return the mean over samples; NaN stands for no response, inf for one that is rounding, -inf for one unknown."""
    if bool((values == -math.inf).any()):
        return Reduced(math.nan, values)
    lost, finite = values.isinf(), values.isfinite()
    samples = values.where(~lost, torch.nan)
    if int(lost.sum()) > int(finite.sum()):
        why = f"the response of {int(lost.sum())} of {len(values)} samples is rounding"
        return Reduced(math.nan, samples, why, "undefined")
    return mean_of_finite(samples, f"without any response ({'rounding, or ' if lost.any() else ''}G = 0)")


def mean_of_volumes(logs: Tensor, moved: Tensor) -> Reduced:
    """Return the mean of exp(logs), computed in logarithms so that nothing overflows.

    `moved`, (n,), is how far rounding may move each logarithm: infinite where it hides the rank, and the volume counts
    as 0; 0 with a logarithm of -inf where the volume is known to be 0.
    """
    total, volumes = logs.logsumexp(0), logs.exp()
    log, value = float(total) - math.log(len(logs)), float((total - math.log(len(logs))).exp())
    known = (logs == -math.inf) & (moved == 0)
    if bool(known.all()):
        return Reduced(0.0, volumes, BEHIND_SOFTMAX)
    beyond = f"float64, its logarithm is {log:.6g}: see log_volume"
    if math.isfinite(log) and math.isinf(value):
        return Reduced(math.nan, volumes, f"above {beyond}", "undefined")
    error = float(torch.where(logs.isfinite(), (logs - total).exp() * moved, 0.0).sum())  # relative
    hidden = number_of(moved.isinf(), f"{DEFICIENT}, their volume counted as 0")
    none = number_of(known, f"{WITHOUT}, their volume is 0")
    if math.isfinite(log) and value < torch.finfo(torch.float64).tiny:
        return Reduced(0.0, volumes, joined_notes(f"below {beyond}", hidden, none), "lower bound")
    if hidden:
        less = max(1 - error, 0.0) if error > STATED else 1.0
        return Reduced(value * less, volumes, joined_notes(hidden, none, TAKEN_OFF if less < 1 else ""), "lower bound")
    if error > STATED:
        return Reduced(value, volumes, joined_notes(none, IS_ROUNDING), "estimate", value * error / 1.96)
    return Reduced(value, volumes, none)


def mean_of_logs(logs: Tensor, moved: Tensor) -> Reduced:
    """Return the mean over the samples with a volume above 0; `moved` is that of `mean_of_volumes`."""
    there = logs != -math.inf
    known = ~there & (moved == 0)
    if not bool(there.any()):
        why = BEHIND_SOFTMAX if bool(known.all()) else f"every sample is {DEFICIENT}"
        return Reduced(math.nan, logs, why, "undefined")
    value, error = float(logs[there].mean()), float(moved[there].mean())
    left_out = joined_notes(
        number_of(moved.isinf(), f"{DEFICIENT}, left out"), number_of(known, f"{WITHOUT}, left out")
    )
    if error > STATED:
        return Reduced(value, logs, joined_notes(left_out, IS_ROUNDING), "estimate", error / 1.96)
    return Reduced(value, logs, left_out)


of_image = partial(
    per_sample, family="compression", place="input", needs={"G"}, answer="input", invariant_under=FUNCTION
)
of_volumes = partial(of_image, id="M5", reduce=mean_of_volumes, cost="one pass, eigenvalues", needs_full_precision=True)


@of_volumes(symbol=r"\overline{d\mathrm{Vol}}", source="compression Def. 3.1, 3.3", unit="(output / input)^N")
def local_volume(g: LayerGrams, *, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Mean local volumetric ratio: mean_i sqrt(det(df/dx df/dx^T)).

    The paper prints det(df^T df), which is 0 if there are fewer outputs than inputs. `top_k` keeps only the largest
    eigenvalues, as the authors' figures do with `top_k=3`. The product is computed in logarithms. Where the smallest
    singular value of df/dx is below 1.5e-7 of the largest (1.2e-5 in float32), or where derivatives cancel so far that
    it is below 100 times the rounding error of df/dx, rounding hides it: the sample's volume counts as 0, and the value
    is a lower bound. An error by rounding of more than 0.1% is stated, or taken off a lower bound. Behind a closing
    softmax the whole volume is 0: the sum of the outputs, or of their exponentials, is 1.
    """
    return log_volumes(g, top_k)


@of_volumes(
    symbol=r"\overline{\log d\mathrm{Vol}}", source="compression Fig. 1, Eq. 7", unit="log", reduce=mean_of_logs
)
def log_volume(g: LayerGrams, *, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Mean log volume: mean_i log sqrt(det G_i) over the samples of full rank; the note counts the others."""
    return log_volumes(g, top_k)


@of_volumes(
    symbol=r"dV_{net}",
    source="compression Def. 3.5",
    unit="(output / feature)^N",
    answer="sum",
    invariant_under={PERMUTATION},
)
def network_volume(g: LayerGrams, *, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Network volumetric ratio: the sum over linear layers of their mean local volume (rows of `local_volume`)."""
    return log_volumes(g, top_k)


@of_image(id="M6", symbol=r"D_{PR}", source="compression Eq. 15", unit="dimensions", reduce=mean_of_dimensions)
def local_dimension(g: LayerGrams) -> Tensor:
    """Participation ratio of the image of a small ball: mean_i (tr G_i)^2 / tr(G_i^2), between 1 and N.

    Samples with G = 0 have no image. They are left out, and the note counts them; so are those whose response is
    rounding, as of a layer that shifts all outputs before a softmax. Where these are more than the others, the value is
    undefined: some of them look like a response by chance.
    """
    total = g.G.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)[..., None]
    share = g.G / total  # NaN where G = 0
    dimension = torch.where(total[:, 0, 0].isfinite(), 1 / share.square().sum((1, 2)), -math.inf)
    if g.rounding is None:
        return dimension
    return torch.where((g.rounding > _LOST) & (dimension > 0), math.inf, dimension)
