"""Spectral norms of the matrices of all samples' features, which no sum of per-sample terms gives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from flatlens.curvature.krylov import lanczos
from flatlens.grams import Layout, features_read, require_told_apart
from flatlens.grams.contractions import CACHE_BYTES, pieces
from flatlens.operations.operator_norm import SearchedNorm, power_of_two, searched_norm
from flatlens.problem import Problem
from flatlens.problem.samples import size
from flatlens.problem.state import differentiable

SMALLEST, LARGEST = 64, 1024
"""Numbers of features between which X^T X is computed, of at least twice as many samples."""
CHUNK = 256  #: samples read at a time; features of one chunk, no fewer than its samples, take X X^T and no search
_UNDERFLOWN = 1e-30
"""Squares below it have lost digits in float32."""
_USUAL = 1e-10  #: features between this and its inverse have squares, and squares of these, in float32, too
_TOLERANCE = 1e-9  #: relative residual of the squared norm; its error is of the order of the residual squared: rounding


def feature_norms(
    problem: Problem, model: nn.Module, layout: Layout, groups: Mapping[str, Collection[str]] | None = None
) -> dict[str, SearchedNorm]:
    """Return ||X_l||_2 of the features X_l (n x M_l) of each linear call and each weight outside layers.

    All rows of a sample count as one: those that a network folds into the batch, too. With `groups`, the norms are
    those of several calls' features side by side; a group with a call whose features are not known is left out.

    From X X^T if the samples are few; else by Lanczos on X^T X, and if that is small beside X, its vector is found on a
    float32 copy and corrected.

    The features are kept if they fit in half the problem's memory, else computed again for each product.
    """
    kept, complete, widths = _features(problem, model, layout)
    norms = {}
    for name, keys in (groups if groups is not None else {key: (key,) for key in widths}).items():
        if not widths.keys() >= {*keys}:
            continue
        width = sum(widths[key] for key in keys)
        unit = max(_unit(part[key]) for part in kept for key in keys) or 1.0
        if complete and len(kept) == 1 and problem.n <= width:
            K = torch.stack([_between_samples(kept[0][key], unit) for key in keys]).sum(0)
            norms[name] = SearchedNorm(unit * float(torch.linalg.eigvalsh(K)[-1].clamp(min=0).sqrt()))
            continue

        def apply(v: Tensor, keys: Collection[str] = keys, unit: float = unit) -> Tensor:
            total = torch.zeros_like(v)
            each = [widths[key] for key in keys]
            mine, sums = (dict(zip(keys, torch.split(vector, each), strict=True)) for vector in (v, total))
            for part in kept if complete else _walk(problem, model, layout):
                m = {key: part[key].shape[1] for key in keys}  # a chunk of shorter sentences has the first tokens alone
                rows = len(part[next(iter(keys))])
                for piece in pieces(rows, 8 * sum(m.values()), CACHE_BYTES):  # read twice, so kept in the cache
                    wide = {key: _wide(part[key][piece], unit) for key in keys}
                    along = torch.stack([wide[key] @ mine[key][: m[key]] for key in keys]).sum(0)
                    for key in keys:
                        sums[key][: m[key]].addmv_(wide[key].T, along)
            return total

        start = torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        start = start.to(next(iter(kept[0].values())).device)
        alone = next(iter(keys)) if len(keys) == 1 else None
        G = _squared([part[alone] for part in kept], width) if complete and alone is not None and unit == 1.0 else None
        if G is None:
            pairs = lanczos(apply, start, rtol=_TOLERANCE)
            norms[name] = SearchedNorm(unit * max(0.0, pairs.largest) ** 0.5, pairs.converged)
        else:
            top = float(G.diagonal().max())  # vectors in units of it stay within float32
            rough, gram = partial(torch.mv, G.div_(top)), lambda v, apply=apply, top=top: apply(v).div_(top)
            found = searched_norm(gram, rough, start, _TOLERANCE)
            norms[name] = SearchedNorm((top * found.value**2) ** 0.5, found.converged)
    return norms


def _unit(X: Tensor) -> float:
    """Return the unit in which squares of features neither overflow nor underflow; 0 if all are 0."""
    unit = float(power_of_two(X)) if bool(X.any()) else 0.0
    return 1.0 if _USUAL < unit < 1 / _USUAL else unit


def _wide(X: Tensor, unit: float) -> Tensor:
    """Return X in float64, in units of `unit`."""
    wide = X.to(torch.float64)
    return wide if unit == 1.0 else wide / unit


def _between_samples(X: Tensor, unit: float) -> Tensor:
    """Return X X^T in float64, with X in units of `unit`."""
    total = X.new_zeros(len(X), len(X), dtype=torch.float64)
    for piece in pieces(X.shape[1], 8 * len(X), CACHE_BYTES):
        wide = _wide(X[:, piece], unit)
        total.addmm_(wide, wide.T)
    return total


def _squared(parts: list[Tensor], width: int) -> Tensor | None:
    """Return X^T X of float32 features in float32, if it costs less than the products it saves."""
    n = sum(len(X) for X in parts)
    if not SMALLEST <= width <= min(LARGEST, n // 2) or any(X.dtype != torch.float32 for X in parts):
        return None
    total = parts[0].new_zeros(width, width)
    for X in parts:
        total[: X.shape[1], : X.shape[1]].addmm_(X.T, X)
    usable = bool(torch.isfinite(total).all()) and float(total.diagonal().max()) > _UNDERFLOWN
    return total if usable else None


def _features(
    problem: Problem, model: nn.Module, layout: Layout
) -> tuple[list[dict[str, Tensor]], bool, dict[str, int]]:
    """Return (the kept features by chunk, whether all chunks are kept, the largest number of features of each call)."""
    kept: list[dict[str, Tensor]] = []
    widths: dict[str, int] = {}
    held, complete = 0, True
    for part in _walk(problem, model, layout, check=not problem.coupled):
        widths |= {key: max(X.shape[1], widths.get(key, 0)) for key, X in part.items()}
        held += sum(X.numel() * X.element_size() for X in part.values())
        if kept and held > problem.memory // 2:
            kept, complete = kept[:1], False
        elif complete:
            kept.append(part)
    return kept, complete, widths


def _walk(problem: Problem, model: nn.Module, layout: Layout, *, check: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield the features of every linear call and of every weight outside layers, (n, M_l), chunk by chunk.

    With `check`, PlanBroken is raised where rows that are folded into the batch are not those of the planned samples.
    """
    # gradients stay on: the recorder skips only calls that the model itself runs under no_grad
    with problem.measuring(model), differentiable(model.parameters()):
        for raw in problem.batches(CHUNK):
            batch = problem.place(raw)
            tape, found = features_read(problem, model, layout, batch)
            n = size(batch)
            if check and any(len(found[key]) != n for key in tape.linear.keys() & found.keys()):
                require_told_apart(problem, model, layout, batch)
            yield {key: layout.unpadded(x, tape).reshape(n, -1) for key, x in found.items()}
