"""Eigenvalues and spectrum of the Hessian and of the Gauss-Newton matrix, by layer too; the leading eigenspace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flatlens.curvature import Eigenpairs, GaussNewton, Hessian, Operator, eigenpairs, lanczos
from flatlens.curvature.functional_hessian import shift_directions
from flatlens.curvature.krylov import Remembered, relative_residual
from flatlens.curvature.leading import eigenspace as found_space
from flatlens.curvature.spectral_norms import batch_jacobians, feature_norms
from flatlens.curvature.spectrum import SMALL_MATRIX, row_block_maxima
from flatlens.curvature.spectrum import spectral_density as density_of
from flatlens.estimate import Estimate, undefined, with_note
from flatlens.grams import Weight, one_pass, outside_keys, quadratic
from flatlens.grams.weight_jacobians import gram
from flatlens.measures.definition import (
    LAYERWISE,
    PERMUTATION,
    THOROUGH_RTOL,
    Parts,
    Run,
    require_count,
    require_tolerance,
)
from flatlens.measures.leading_eigenvalues import (
    as_estimate,
    closed_form,
    in_batches,
    largest_residual,
    of_hessian,
    of_jacobian,
    of_norm,
    proven_by,
    sharded_top,
    top_of,
    whole_weights,
    within_share,
)
from flatlens.measures.lens import Lens
from flatlens.measures.notes import NO_MEASURED_LAYER, left_out, lost_at, needs_every_output, which_layer
from flatlens.perturbation.features import SEVERAL
from flatlens.problem.forward import forwards
from flatlens.progress import ROWS

SHARPNESS_RTOL = 1e-2  #: relative residual at which the search for the sharpness ends

of_spectrum = partial(of_hessian, works_coupled=True)
of_rows = partial(of_hessian, family="flatness", unit="loss", invariant_under={LAYERWISE, PERMUTATION})


def owners(lens: Lens) -> dict[str, list[str]]:
    """Return the measured parameters of each linear layer, by layer; every other parameter under its own name."""
    found: dict[str, list[str]] = {}
    for layer, weight in lens.plan.weights.items():
        if mine := [name for name in (weight.parameter, weight.bias) if name and name in lens.problem.parameters]:
            found[layer] = mine
    known = {name for names in found.values() for name in names}
    return found | {name: [name] for name in sorted(lens.problem.parameters - known)}


def _attempted(lens: Lens, what: str, work: Callable[[], Estimate]) -> Estimate:
    found = lens.attempted(work, what)
    return undefined(found) if isinstance(found, str) else found


@of_spectrum(
    id="H1",
    symbol=r"\lambda_{max}(H)",
    source="sharpening section 3",
    cost="Lanczos: about 10 Hessian products",
    works_sharded=True,
    networks=lambda one: 30 + 4 * (int(one.option("top_k")) + int(one.option("bottom_k"))),
)
def sharpness(
    lens: Lens,
    run: Run,
    *,
    top_k: int = 1,
    bottom_k: int = 0,
    rtol: float | None = None,
    layers: bool = False,
    batch_statistics: int | None = None,
) -> Estimate | Parts:
    """Sharpness: the largest eigenvalue of the risk's Hessian in the measured parameters.

    It is the largest eigenvalue, not the largest in absolute value. Lanczos with full reorthogonalisation runs until
    the residual is below `rtol` times the value. The value is then a lower bound, and some eigenvalue lies within the
    residual of it. This need not be the largest one. Without `rtol` it is 1e-2, and 1e-3 in studies, trackers, bounds
    and tables of invariance. With 1e-2, eigenvalues within 1% of each other count as one, and searches of random
    spectra missed the first eigenvalue in 3 to 11% of the cases if the second was 2% below it. With 1e-3 it was 9 to
    16% if the second was 0.2% below, 4% if 0.5%, and 1% if 2%. For a random start, the note gives a bound on what was
    missed (van Dorsselaer, Hochstenbach and van der Vorst 2000); it takes some seven products to say anything.

    `arrays` has the `top_k` largest and `bottom_k` smallest eigenvalues and their residuals. Of several, each occurs as
    often as in the spectrum: further searches, of ten products or more, end when one shows, with probability 99.9%,
    that no other eigenvalue exceeds the last one by more than 1% of the spectrum's range.
    `layers=True` adds the block of each layer, weight and bias. `batch_statistics=k`: BatchNorm normalises k samples
    together by their own statistics, as in training (sharpening A.1), even if the problem has it in eval mode.

    Where parameters are spread over processes and have no second derivative, a product comes from central differences
    of four gradients, and the value is an estimate with the error of these. It is undefined where gradients jump.
    """
    if rtol is None:
        rtol = THOROUGH_RTOL["sharpness"] if run.thorough else SHARPNESS_RTOL
    if lens.problem.sharded:
        require_tolerance(rtol)
        if layers or batch_statistics is not None:
            return undefined("layers= and batch_statistics= need parameters in one process")
        return sharded_top(lens, run, "sharpness", rtol, top_k=top_k, bottom_k=bottom_k)
    return _ends(lens, run, Hessian, "sharpness", rtol, layers, batch_statistics, (top_k, bottom_k))


@of_spectrum(
    id="H2", symbol=r"\lambda_{max}(GN)", source="sharpening B.3", cost="Lanczos: about 10 Gauss-Newton products"
)
def ggn_norm(
    lens: Lens,
    run: Run,
    *,
    top_k: int = 1,
    rtol: float = 1e-3,
    layers: bool = False,
    alignment: bool = False,
    batch_statistics: int | None = None,
) -> Parts:
    """Largest eigenvalue of the Gauss-Newton matrix: its operator norm, if the loss is convex in the outputs.

    Options, except `bottom_k`, and what may be missed: as `sharpness`.

    `alignment=True` adds how the outliers of the Hessian and of its Gauss-Newton part align (sharpening section 3.1),
    for the `top_k` largest eigenvalues of each: as many as outputs are usual. `.alignment` is the mean squared cosine
    between the spaces of their eigenvectors, ||V_H^T V_GN||_F^2 / k: 1 for the same space, k over the number of
    parameters for random ones. `.difference` is max_j |lambda_j(H) - lambda_j(GN)| / lambda_1(H). The errors come from
    the residuals and the gap to the next eigenvalue (Davis and Kahan); an eigenvalue that no search found is not in
    them. `arrays` of `.alignment` has the cosines of the principal angles, `overlaps`, the squared cosine of each
    eigenvector of H (row) with each of GN, and both lists of eigenvalues. This takes a search in each matrix more.
    """
    parts = dict(_ends(lens, run, GaussNewton, "ggn_norm", rtol, layers, batch_statistics, (top_k, 0)))
    if not alignment:
        return parts
    # the first eigenvectors of both matrices
    require_count(1, top_k=top_k)
    problem = in_batches(lens, batch_statistics)
    found: list[Eigenpairs] = []
    for kind in (Hessian, GaussNewton):
        operator = kind(problem, None, model=lens.model)
        more = min(top_k + 1, operator.size)  # one more than asked for, so that the gap is known
        search = partial(eigenpairs, operator, top_k=more, rtol=rtol, generator=run.generator, progress=run.progress)
        pairs = lens.attempted(search, "ggn_norm")
        lens.count(operator.products)
        if isinstance(pairs, str):
            return parts | dict.fromkeys([("alignment", None), ("difference", None)], undefined(pairs))
        found.append(pairs)
    # the eigenvalues, each within its residual
    (H, G), products = found, sum(pairs.products for pairs in found)
    exact, k = H.exact and G.exact, min(top_k, len(H.values))
    top, apart = float(H.values[0]), (H.values - G.values)[:k].abs()
    error = float((H.residuals + G.residuals)[:k].max())
    kind_of: Literal["exact", "estimate"] = "exact" if exact else "estimate"
    if top <= 0:
        flat = undefined("no eigenvalue of the Hessian is positive")
        return parts | dict.fromkeys([("alignment", None), ("difference", None)], flat)
    stderr = 0.0 if exact else error / top / 1.96
    difference = Estimate(float(apart.max()) / top, stderr, kind_of, unit="share", products=products)
    # the spaces, each within the sine of its angle to the true one
    sines = 0.0
    for pairs, name in ((H, "Hessian"), (G, "Gauss-Newton matrix")):
        rounding = 100 * torch.finfo(pairs.vectors.dtype).eps * abs(float(pairs.values[0]))
        gap = float(pairs.values[k - 1] - pairs.values[k] - pairs.residuals[k]) if len(pairs.values) > k else math.inf
        residual = max(rounding, float(pairs.residuals[:k].norm()))
        if gap <= residual:
            near = f"eigenvalues {k} and {k + 1} of the {name} lie within their residuals: take another top_k"
            return parts | {("alignment", None): undefined(near), ("difference", None): difference}
        sines += residual / gap
    overlaps = (H.vectors[:k].double() @ G.vectors[:k].double().T).cpu()
    arrays = {
        "cosines": torch.linalg.svdvals(overlaps).clamp(max=1.0), "overlaps": overlaps.square(),
        "hessian": H.values[:k], "gauss_newton": G.values[:k],
    }  # fmt: skip
    stderr = 0.0 if exact else math.sqrt(2 / k) * sines / 1.96
    value = float(overlaps.square().sum()) / k
    aligned = Estimate(value, stderr, kind_of, unit="share", products=products, arrays=arrays)
    return parts | {("alignment", None): aligned, ("difference", None): difference}


def _ends(
    lens: Lens, run: Run, kind: type[Operator], name: str, rtol: float, layers: bool, batch_statistics: int | None,
    ends: tuple[int, int],
) -> Parts:  # fmt: skip
    """Return the ends of a matrix's spectrum; with `layers` the largest eigenvalue of each layer's block, too."""
    problem = in_batches(lens, batch_statistics)
    name = name if problem is lens.problem else f"{name} in ghost batches"
    whole = partial(top_of, lens, run, name, kind(problem, None, model=lens.model), rtol, *ends)
    parts: dict[tuple[str, str | None], Estimate] = {("", None): _attempted(lens, name, whole)}
    for layer, names in owners(lens).items() if layers else ():
        operator = kind(problem, names, model=lens.model)
        parts["", layer] = _attempted(lens, name, partial(top_of, lens, run, f"{name} {layer}", operator, rtol))
    return parts


@of_hessian(
    id="H4",
    symbol=r"\sum_l \lambda_{max}(H_l)",
    source="reparam2019 Def. 1, Table 1",
    cost="one pass for dense layers of piecewise-linear networks; else about 10 Hessian products per layer",
)
def layer_sharpness(lens: Lens, run: Run, *, rtol: float = 1e-3) -> Estimate | Parts:
    """Sharpness of each layer: lmax(H_l), H_l the Hessian in the layer's weight alone; summed over layers.

    `.kappa` is ||W_l||_F^2 lmax(H_l), the flatness measure of 2019, invariant under layer-wise rescaling. `.max` and
    `.kappa_max` are the largest layer's. For a convolution, H_l is the Hessian in its kernel.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return undefined(NO_MEASURED_LAYER)
    # of dense layers with nothing curved above, one pass gives the block itself
    blocks = closed_form(lens, run, [name for name in weights if name in lens.plan.affine])
    values, kappas = {}, {}
    for name, weight in weights.items():
        if name in blocks:
            found = as_estimate(blocks[name].largest(rtol, run.progress), 0)
        else:
            assert weight.parameter is not None
            operator = Hessian(lens.problem, [weight.parameter], model=lens.model)
            search = partial(top_of, lens, run, f"layer_sharpness {name}", operator, rtol)
            found = _attempted(lens, "layer_sharpness", search)
        values[name] = kappas[name] = found
        if found.kind != "undefined":
            factor, exact = float(weight.matrix.W.square().sum()), found.kind == "exact"
            note = "" if exact else proven_by(factor * float(found.arrays["residuals"][0]), math.inf)
            kappas[name] = Estimate(
                found.value * factor, kind=found.kind, note=note, unit="loss", products=found.products
            )
    share = largest_residual(found for found in values.values() if found.kind != "undefined")
    parts: dict[tuple[str, str | None], Estimate] = {}
    for name in weights:
        parts |= {("", name): values[name], ("kappa", name): kappas[name]}
    for part, rows, combine in (
        ("", values, sum), ("max", values, max), ("kappa", kappas, sum), ("kappa_max", kappas, max)
    ):  # fmt: skip
        parts[part, None] = with_note(_combined(rows, combine, share), left_out(lens, weights))
    return parts


def _combined(layers: Mapping[str, Estimate], combine: Callable[[Iterable[float]], float], share: float) -> Estimate:
    """Return the sum or maximum over layers, whose residuals are at most this share of their eigenvalues."""
    if lost := lost_at(layers):
        return undefined(lost)
    every = list(layers.values())
    whole = Estimate(combine([e.value for e in every]), unit=every[0].unit, products=sum(e.products for e in every))
    exact = all(e.kind == "exact" for e in every)
    return whole if exact else replace(whole, kind="lower bound", note=within_share(share))


@of_rows(
    id="H5",
    symbol=r"\kappa^\phi",
    source="relative2021 Def. 13",
    cost="one pass for dense layers (d Hessian products more below a smooth activation); else Lanczos for each row",
)
def maximal_relative_flatness(lens: Lens, run: Run, *, rtol: float = 1e-3) -> Estimate | Parts:
    """Maximal relative flatness: sum_s ||w_s||^2 lmax(H_ss), over the rows s of a layer's weight.

    H_ss is the Hessian of the risk in row s alone. The rows of a convolution are its output channels. The network's
    number is that of the last linear layer; `.sum` and `.max` are over layers.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return undefined(NO_MEASURED_LAYER)
    blocks = closed_form(lens, run, weights)
    shares = [0.0]

    def at(name: str, weight: Weight) -> Estimate:
        # the largest eigenvalue of each row's block: of all rows together where one pass gives the blocks
        before = lens.products
        if name in blocks:
            # D_i[s,s], (n, d): the Gauss-Newton part, and the functional Hessian's
            D = quadratic(blocks[name].C.to(torch.float64), blocks[name].J)
            if name not in lens.plan.affine:
                D = D + lens.functional_hessian(name, shift_directions(), run, weigh=lambda forms: forms).to(D)
            maxima, share = row_block_maxima(D, blocks[name].phi, rtol, run.progress)
        else:
            maxima, share = _rows_one_by_one(lens, run, weight, rtol)
        shares.append(share)
        norms = weight.matrix.W.flatten(0, 1).square().sum(1).cpu()
        value, products = float((norms * maxima).sum()), lens.products - before
        found = Estimate(value, products=products, arrays={"rows": maxima})
        outright = name in blocks and blocks[name].phi.shape[1] <= SMALL_MATRIX
        return found if outright else replace(found, kind="lower bound", note=within_share(share))

    layers = {
        name: _attempted(lens, "maximal_relative_flatness", partial(at, name, weight))
        for name, weight in weights.items()
    }
    # the network's rows
    last = next(reversed(weights))
    others, share = left_out(lens, weights), max(shares)
    return {
        ("", None): with_note(layers[last], which_layer(lens, last, weights)),
        ("sum", None): with_note(_combined(layers, sum, share), others),
        ("max", None): with_note(_combined(layers, max, share), others),
        **{("", name): found for name, found in layers.items()},
    }


def _rows_one_by_one(lens: Lens, run: Run, weight: Weight, rtol: float) -> tuple[Tensor, float]:
    """Return lmax of each row's block of H, (g d,), by Lanczos, and the largest relative residual."""
    assert weight.parameter is not None
    operator = Hessian(lens.problem, [weight.parameter], model=lens.model)
    stored, W = operator.space.tensors[0].shape, weight.matrix.W.shape
    maxima, share = [], 0.0
    for s in run.counted(ROWS, weight.neurons):

        def apply(v: Tensor, s: int = s) -> Tensor:
            mine = v.new_zeros(weight.neurons, W[2])
            mine[s] = v
            whole = operator(weight.adapter.as_stored(mine.reshape(W), stored).flatten())
            return weight.adapter.matrix(whole.reshape(stored)).flatten(0, 1)[s]

        start = torch.randn(W[2], generator=run.generator, dtype=torch.float64)
        found = lanczos(apply, start.to(operator.space.device, operator.dtype), rtol=rtol)
        maxima.append(found.values[0])
        share = max(share, relative_residual(float(found.residuals[0]), found.largest))
    lens.count(operator.products)
    return torch.stack(maxima), share


@of_spectrum(
    id="H6",
    symbol=r"\rho(\lambda)",
    source="density2019 section 2 (also in PyHessian)",
    cost="probes x steps Hessian products",
)
def spectral_density(
    lens: Lens, run: Run, *, probes: int = 8, steps: int = 40, ggn: bool = False, layers: bool = False
) -> Parts:
    """Density of the Hessian's eigenvalues; the value is their root mean square, ||H||_F / sqrt(P).

    `arrays` has `grid`, `density` and `stderr`, the standard error of the density. The density is smoothed over 1% of
    the spectrum's range, or over 0.75 / `steps` of the range if that is more and the matrix has more rows than `steps`,
    since `steps` products resolve nothing finer. `ggn=True` gives the density of the Gauss-Newton matrix. `layers=True`
    adds the block of each layer.
    """

    def of(names: list[str] | None) -> Estimate:
        operator = (GaussNewton if ggn else Hessian)(lens.problem, names, model=lens.model)
        found = density_of(operator, probes=probes, steps=steps, generator=run.generator, progress=run.progress)
        lens.count(operator.products)
        arrays = {"grid": found.grid, "density": found.density, "stderr": found.stderr}
        return Estimate(found.rms, found.rms_stderr, "estimate", arrays=arrays, products=operator.products)

    blocks: dict[str | None, list[str] | None] = {None: None}
    if layers:
        blocks.update(owners(lens))
    return {("", at): _attempted(lens, "spectral_density", partial(of, names)) for at, names in blocks.items()}


@of_spectrum(
    id="M17",
    symbol=r"\lambda_{max}(C\,Jf\,Df_l\,Df_l^T Jf^T C^T)",
    source="sharpening Eq. 4, App. C",
    cost="one pass; Lanczos: about 10 Gauss-Newton products per layer that is not dense",
)
def layer_factors(
    lens: Lens, run: Run, *, blocks: bool = True, rtol: float = 1e-3, batch_statistics: int | None = None
) -> Estimate | Parts:
    """Largest eigenvalue of each layer's Gauss-Newton block, summed over layers, and of the factors of the block.

    The value of a layer is the largest eigenvalue of its Gauss-Newton block, in the layer's weight alone. The block
    couples all samples, so it is used by products only. The sum over layers is an upper bound of the largest eigenvalue
    for all these weights together, without biases, norms and weights outside layers. The factors are `.loss_curvature`,
    ||C^(1/2)|| with C divided by the number of samples, undefined where the loss is not convex in the outputs;
    `.features`, the spectral norm of the layer's features f_{l-1}(X), with the features of all its calls side by side;
    and `.jacobian`, the largest norm over samples of the derivative of the outputs with respect to the layer's output.
    If the layer's weight is used once per sample, the block is at most the product of the squares of the three. For
    shared weights there is no such bound. `blocks=False` leaves the eigenvalues out, and with them most of the cost.

    With BatchNorm in train mode (`batch_statistics`, as in `sharpness`), all numbers describe the network in that
    mode, and `.jacobian` is the norm of the Jacobian of a whole ghost batch.
    """
    require_tolerance(rtol)
    weights = whole_weights(lens, run)
    if not weights:
        return undefined(NO_MEASURED_LAYER)
    problem = in_batches(lens, batch_statistics)
    if lens.probes is not None and not problem.coupled:
        return undefined(needs_every_output(lens))
    # the smallest and largest eigenvalues of C in each chunk, and the Jacobians from the layers' outputs up: of single
    # samples from one pass, or where BatchNorm couples the samples of a batch by Lanczos
    curvature: list[tuple[Tensor, Tensor]] = []
    explained = {name: weight for name, weight in weights.items() if weight.explained}
    if problem.coupled:
        for f, y in forwards(problem, lens.model):
            C = problem.loss.output_hessian(f.to(torch.float64), y) * (problem.n / problem.mass)
            curvature.append(torch.linalg.eigvalsh(C).aminmax())
        once = {name: weight.calls[0] for name, weight in explained.items() if len(weight.calls) == 1}
        norms = batch_jacobians(
            problem, lens.model, list(once.values()), softmax=False, rtol=rtol, generator=run.generator,
            progress=run.progress,
        )  # fmt: skip
        jacobians = {name: of_jacobian(norms[call]) for name, call in once.items()}
    else:
        above = dict.fromkeys(explained, 0.0)
        with closing(one_pass(problem, lens.model, lens.plan, None, run.progress, {"C", "K"})) as chunks:
            for chunk in chunks:
                curvature.append(torch.linalg.eigvalsh(chunk.outputs.C).aminmax())
                for name in above:
                    JJ = gram(chunk.layers[name].at_output)
                    above[name] = max(above[name], float(torch.linalg.eigvalsh(JJ)[:, -1].max()))
        jacobians = {name: Estimate(max(0.0, value) ** 0.5) for name, value in above.items()}
    # the factors: features, that Jacobian, and ||C^(1/2)||, C divided by n, as the risk is the mean of the losses
    calls = {name: weight.calls or outside_keys(weight) for name, weight in weights.items()}
    features = feature_norms(problem, lens.model, lens.plan, calls)
    elsewhere = "the weight is also used outside the products in the layer's calls"
    parts: dict[tuple[str, str | None], Estimate] = {}
    for name, weight in weights.items():
        unread = undefined(lens.plan.unread(weight) or elsewhere)
        parts["features", name] = of_norm(features[name], unit="feature") if name in features else unread
        unmoved = undefined(SEVERAL if weight.explained and problem.coupled else elsewhere)
        parts["jacobian", name] = replace(jacobians.get(name, unmoved), unit="output / feature")
    least, largest = min([0.0, *(float(low) for low, _ in curvature)]), max([0.0, *(float(up) for _, up in curvature)])
    parts["loss_curvature", None] = Estimate((largest / lens.problem.n) ** 0.5, unit="sqrt loss / output")
    if least < -1e-9 * max(largest, -least):  # beyond rounding
        parts["loss_curvature", None] = undefined("the loss is not convex in the outputs: C has no root")
    if not blocks:
        return parts | {("", None): undefined("blocks=False leaves the blocks out")}
    # the blocks' largest eigenvalues: in closed form of dense layers, else by Lanczos
    dense = {} if problem.coupled else closed_form(lens, run, weights)
    rows = {name: as_estimate(block.largest(rtol, run.progress), 0) for name, block in dense.items()}
    for name, weight in weights.items():
        if name not in dense:
            assert weight.parameter is not None
            key = f"layer_factors {name}" + (" in ghost batches" if problem.coupled else "")
            rows[name] = top_of(lens, run, key, GaussNewton(problem, [weight.parameter], model=lens.model), rtol)
    if not any(row.value for row in rows.values()) and lens.underflow:
        return parts | {("", at): undefined(lens.underflow) for at in (None, *rows)}
    parts["", None] = with_note(_combined(rows, sum, largest_residual(rows.values())), left_out(lens, weights))
    return parts | {("", name): row for name, row in rows.items()}


_SPACE, _WEIGHTS = ("eigenspace", None), ("eigenspace.weights", None)
_FIRST = "there is no earlier look: Lens(after=...), or the next step of a tracker"


@of_spectrum(
    id="H15",
    symbol=r"\|P_k g\|^2 / \|g\|^2",
    source="flatlens",
    unit="share",
    cost="Lanczos with a proof: some 10 Hessian products for each search",
    networks=lambda one: 34 + 4 * int(one.option("top_k")),
)
def eigenspace(lens: Lens, run: Run, *, top_k: int = 10, rtol: float = 1e-3) -> Parts:
    """Share of the gradient in the space of the Hessian's `top_k` leading eigenvectors: ||P g||^2 / ||g||^2.

    The eigenvalues are the largest, each as often as it occurs; where `top_k` cuts a multiplet, the space has all of
    it (`flatlens.curvature.eigenspace`). `.update` is the share of the last update: of the change of the weights since
    the look before, at a tracker's step before or of `Lens(after=...)`. `.overlap` is the mean squared cosine to the
    space of that look, ||V^T V'||_F^2 / k. The errors come from the residuals and from the gap that is proved, with
    probability 99.9%. `arrays` has the eigenvalues, their residuals and gaps.
    """
    require_count(1, top_k=top_k)
    require_tolerance(rtol)
    operator = Hessian(lens.problem, model=lens.model)
    space = found_space(operator, top_k, rtol=rtol, most=300, generator=run.generator, progress=run.progress)
    lens.count(space.products)
    why = "" if space.converged else "the search ended before no other eigenvalue was proved to be left"
    # what an earlier look left, if it measured the same parameters
    old, weights = lens.remembered.get(_SPACE), lens.remembered.get(_WEIGHTS)
    here, share = operator.space.point(), with_note(space.share(lens.gradient), why)
    gaps = space.gaps[space.gaps.isfinite()]  # none below the last of all eigenvalues
    arrays: dict[str, Tensor] = {"values": space.values, "residuals": space.residuals, "gaps": gaps}
    whole = Estimate(share.value, share.stderr, share.kind, share.note, products=space.products, arrays=arrays)
    parts: dict[tuple[str, str | None], Estimate] = {("", None): whole}
    if old is None or weights is None or weights.vectors.shape[1] != operator.size:
        parts |= {(part, None): undefined(_FIRST) for part in ("update", "overlap")}
    else:
        moved = here.to(torch.float64) - weights.vectors[0].to(here.device, torch.float64)
        overlap = space.overlap_with(old.vectors.to(here), float(weights.values[0]))
        parts |= {("update", None): with_note(space.share(moved), why), ("overlap", None): with_note(overlap, why)}
    lens.remember(_SPACE, Remembered(space.values, space.vectors))
    lens.remember(_WEIGHTS, Remembered(torch.tensor([space.sine], dtype=torch.float64), here[None].clone()))
    return parts
