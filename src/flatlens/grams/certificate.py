"""The certificate of a chunk: one backward pass of a random combination of all samples' outputs.

The slopes of single outputs, combined in the same way sample by sample, must be the same at every place of the plan, to
rounding; so must the gradients of parameters, put together from these slopes or taken by sample. Where they are not,
samples see each other or lie elsewhere than planned, a parameter does not act as planned, or torch's batching of single
samples is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatlens.grams.broken import BATCHING, PlanBroken, samples_coupled
from flatlens.grams.contractions import norm2
from flatlens.grams.layout import Layout
from flatlens.grams.record import Tape, run_recorded
from flatlens.grams.rows import FRONT, Rows, independent_rows
from flatlens.grams.trial import padding_ignored
from flatlens.grams.unexplained import each_sample_alone
from flatlens.operations.graph import Place
from flatlens.problem import Batch, Problem
from flatlens.problem.data import take

_PARAMETER = "parameter "  #: before the name of a place where a parameter acts, not samples lie, otherwise than planned


@dataclass(frozen=True, eq=False)
class Certificate:
    """A random combination of all outputs, and its slopes at every place, with their samples in front."""

    u: Tensor  #: (n, N)
    totals: dict[str, Tensor]
    raw: dict[str, Tensor | None]  #: the same as autograd gave them
    parameters: dict[str, Tensor]  #: its slopes in the parameters asked for

    def holds(self, found: dict[str, Tensor], tolerance: float) -> Tensor:
        """Return a flag for each place: whether the slopes of single outputs, combined by sample, are the same."""
        flags = [_same(self.u, found[name], total, tolerance) for name, total in self.totals.items()]
        return torch.stack(flags) if flags else self.u.new_ones(0, dtype=torch.bool)


def _same(u: Tensor, J: Tensor, total: Tensor, tolerance: float) -> Tensor:
    """Return whether sum_k u_ik J_ik is each sample's row of `total`, to rounding; overflows are not compared."""
    combined = (u[:, None].to(J) @ J.flatten(2))[:, 0]
    total = total.reshape(combined.shape)
    apart, size = norm2(combined - total), norm2(total).max()
    return ((apart <= tolerance**2 * size) | ~apart.isfinite()).all()


@dataclass(frozen=True, eq=False)
class Checker:
    """Holds a chunk's slopes against its certificate."""

    problem: Problem
    model: nn.Module
    layout: Layout

    @property
    def tolerance(self) -> float:
        """Return how far slopes of one backward pass may be from sums of those of many, relative to their size."""
        return max(1e4 * torch.finfo(self.problem.dtype).eps, min(0.3, 30 * self.problem.precision))

    def verdict(
        self,
        tape: Tape,
        batch: Batch,
        found: dict[str, Tensor],
        certificate: Certificate,
        rebuilt: dict[str, tuple[Tensor, Tensor]],
        batched: bool,
    ) -> ChunkCheck:
        """Compare at every place of the plan, and in the parameters whose gradients are `rebuilt` from these places.

        Nothing is looked at yet, so that no device is waited for.
        """
        flags = torch.cat([certificate.holds(found, self.tolerance), *self.same_gradients(certificate, rebuilt)])
        hidden = flags.new_ones(())
        if self.layout.ignores_padding and tape.mask is not None:
            at_inputs = [raw for name, raw in certificate.raw.items() if name.startswith(("x:", "input:"))]
            hidden = padding_ignored(tape.mask, at_inputs)
        places = [*certificate.totals, *(_PARAMETER + self.place_of(tape, name) for name in rebuilt)]
        return ChunkCheck(batch, places, torch.cat([flags, hidden[None]]), batched)

    def same_gradients(self, certificate: Certificate, rebuilt: dict[str, tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield a flag for each parameter: whether its gradient put together is autograd's, to rounding."""
        for name, (gradient, size) in rebuilt.items():
            true = certificate.parameters[name].to(torch.float64).flatten()
            off, scale = (gradient - true).norm(), torch.maximum(true.norm(), size.max())
            yield ((off <= self.tolerance * scale) | ~off.isfinite())[None]

    def place_of(self, tape: Tape, parameter: str) -> str:
        """Return where a parameter acts first: without its samples' arrangement there the parameter is left over."""
        return self.layout.places(tape, parameter)[0][1]

    def require(self, verdict: ChunkCheck) -> None:
        """Raise where the plan does not hold; whether samples are apart is then checked exactly, without rounding."""
        *held, hidden = verdict.flags.tolist()
        failing = [name for name, holds in zip(verdict.places, held, strict=True) if not holds]
        wrong = [name.removeprefix(_PARAMETER) for name in failing if name.startswith(_PARAMETER)]
        suspected = [name for name in failing if not name.startswith(_PARAMETER)]
        coupled = self._coupled_places(verdict.batch, suspected) if suspected else []
        if any(name.startswith("input:") for name in coupled):
            raise samples_coupled()
        if coupled or wrong or not hidden:
            raise PlanBroken([verdict.batch], [*coupled, *wrong])
        if suspected and verdict.batched:  # rounding, or a wrong batching rule: one by one there is none
            raise PlanBroken([], [BATCHING])

    def unexplained(
        self, batch: Batch, explicit: dict[str, Tensor], certificate: Certificate, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the gradients by sample of the parameters left over, sample by sample where batching is wrong."""
        wrong = self._wrong(certificate, explicit)
        if wrong:  # torch's batching rules are wrong for some operations
            explicit = explicit | each_sample_alone(self.problem, self.model, batch, wrong, rows)
            inputs = [f"input:{number}" for number in range(len(self.layout.inputs))]
            still = self._wrong(certificate, explicit)  # as rounding alone is, of slopes that cancel
            if still and (self._alone_differ(batch) or self._coupled_places(batch, inputs)):
                raise samples_coupled()
        return explicit

    def _wrong(self, certificate: Certificate, explicit: dict[str, Tensor]) -> tuple[str, ...]:
        """The unexplained whose gradients by sample do not add up to the gradient of the combination."""
        sums = {}
        for name, M in explicit.items():
            u = certificate.u.to(M)
            sums[name] = torch.einsum("nk,nkp->p", u, M), (u[..., None] * M).square().sum().sqrt()
        same = self.same_gradients(certificate, sums)
        return tuple(name for name, right in zip(sums, same, strict=True) if not bool(right))

    def _coupled_places(self, batch: Batch, places: list[str]) -> list[str]:
        """Return the places, of those given, where samples do not lie as planned or see each other."""
        layout = self.layout
        tape, inputs, f, _ = run_recorded(self.problem, self.model, batch)
        operations, at, planned = layout.operations(tape), dict[str, Place](), dict[str, list[Rows]]()
        for name in places:
            kind, _, key = name.partition(":")
            if kind == "input":
                at[name], planned[name] = inputs[layout.inputs[int(key)]], [FRONT]
            elif kind == "x":
                at[name], planned[name] = tape.linear[key].x, [Rows(layout.batch_axis[key])]
            else:
                at[name], planned[name] = operations[name].edge, [layout.rows[name]]
        left = independent_rows(f, at, planned, torch.Generator().manual_seed(0))
        return [name for name in places if not left[name]]

    def _alone_differ(self, batch: Batch) -> bool:
        """Return whether a sample alone gives other outputs than in its batch."""
        with torch.no_grad():
            together = self.problem.run(self.model, batch)[0]
            alone = [self.problem.run(self.model, take(batch, i, i + 1))[0] for i in range(len(together))]
        off = (torch.cat(alone) - together).abs().max()
        return float(off) > self.tolerance * float(together.abs().max())


@dataclass(frozen=True, eq=False)
class ChunkCheck:
    """The result of a chunk's certificate, on the chunk's device."""

    batch: Batch
    places: list[str]
    flags: Tensor  #: whether it holds at each, and whether padding has no effect
    batched: bool  #: whether several backward passes were taken in one
