"""The certificate of a chunk: one backward pass of a random combination of all samples' outputs.

Let s = sum_ik u_ik f_ik with random u. At every place of the plan, ds/d(row of sample i) must be sum_k u_ik J_ik, to
rounding, with the Jacobians J that the pass computed. And ds/dtheta, by autograd, must be the gradient that the plan
gives for a small or unexplained parameter theta (weights are proved on the trials, see `proof`). If one of these fails,
then samples affect each other, or lie elsewhere than planned, or a parameter does not act as planned, or torch's
batching is wrong. Up to rounding a wrong Jacobian passes with probability 0: its error in the sum is a linear function
of u that is not 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from flatlens.problem.samples import take

SMALLEST2 = 1e-30  #: squared length above which no square in float32 that counts is lost
_PARAMETER = "parameter "
"""Prefix of a place's name in a check of the parameter that acts there, not of the samples' positions."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A random combination s = sum_ik u_ik f_ik of all outputs, and its derivatives."""

    u: Tensor  #: random weights, (n, N)
    totals: dict[str, Tensor]  #: ds/d(place), samples in front, by place
    raw: dict[str, Tensor | None]  #: the same in the shape that autograd returned
    parameters: dict[str, Tensor]  #: ds/dtheta, by parameter

    def apart(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ||sum_k u_ik J_ik - ds/d(row of sample i)||^2 at each place, (n,), with the Jacobians `found`."""
        return {name: _apart(self.u, found[name], total) for name, total in self.totals.items()}

    def holds(self, apart: dict[str, Tensor], rtol: float) -> Tensor:
        """Return a flag for each place: whether both derivatives are the same, to rounding; not of overflows."""
        within = {name: rtol**2 * norm2(total).max() for name, total in self.totals.items()}
        flags = [((apart[name] <= most) | ~apart[name].isfinite()).all() for name, most in within.items()]
        return torch.stack(flags) if flags else self.u.new_ones(0, dtype=torch.bool)


def _apart(u: Tensor, J: Tensor, total: Tensor) -> Tensor:
    """Return the squared distance of sum_k u_ik J_ik from sample i's row of `total`, (n,)."""
    if J.ndim > 3 and J.stride(-2) == 1:  # in the order in which it is stored, so that nothing is copied
        J, total = J.mT, total.mT
    combined = (u[:, None].to(J) @ J.flatten(2))[:, 0]
    return norm2(combined - total.reshape(combined.shape))


def shown_rounding(apart: dict[str, Tensor], found: dict[str, Tensor], places: Iterable[str]) -> Tensor | None:
    """Return how far rounding moves each sample's Jacobians at these places, over their length, (n,).

    Both derivatives of the certificate come from the same forward pass, in another order of arithmetic, and differ by
    rounding alone. As u is normal, ||sum_k u_ik dJ_ik|| is about ||dJ_i||_F. It is large where derivatives cancel, as
    behind a confident softmax. None if no place is tested.
    """
    tested = [place for place in places if place in apart]
    if not tested:
        return None
    length2 = torch.stack([_length2(found[place]) for place in tested]).sum(0)
    apart2 = torch.stack([apart[place] for place in tested]).sum(0)
    return torch.where(length2 > 0, apart2 / length2, 0.0).sqrt()


def _length2(J: Tensor) -> Tensor:
    """Return ||J_i||_F^2, (n,); float64 only where squares leave float32, as it takes longer than the rest."""
    places = tuple(range(2, J.ndim))
    rows = torch.linalg.vector_norm(J, dim=places)  # in two steps: half the time
    length2: Tensor = rows.to(torch.float64).square().sum(1)
    if J.dtype != torch.float64 and not bool(((length2 > SMALLEST2) & length2.isfinite()).all()):
        length2 = torch.linalg.vector_norm(J, dim=places, dtype=torch.float64).square().sum(1)
    return length2


@dataclass(frozen=True, eq=False)
class Checker:
    """The check of chunks against their certificates."""

    problem: Problem
    model: nn.Module
    layout: Layout

    @property
    def rtol(self) -> float:
        """Return the tolerated relative difference between a derivative and the same one from other passes."""
        return max(1e4 * torch.finfo(self.problem.dtype).eps, min(0.3, 30 * self.problem.precision))

    def check(
        self,
        tape: Tape,
        batch: Batch,
        apart: dict[str, Tensor],
        certificate: Certificate,
        rebuilt: dict[str, tuple[Tensor, Tensor]],
        batched: bool,
    ) -> ChunkCheck:
        """Compare the derivatives at all places of the plan, and the gradients `rebuilt` from them, with autograd's.

        The flags stay on the device: reading them would wait for it. `require` reads them.
        """
        flags = torch.cat([certificate.holds(apart, self.rtol), *self.same_gradients(certificate, rebuilt)])
        padding_holds = flags.new_ones(())
        if self.layout.ignores_padding and tape.mask is not None:
            at_inputs = [raw for name, raw in certificate.raw.items() if name.startswith(("x:", "input:"))]
            padding_holds = padding_ignored(tape.mask, at_inputs)
        places = [*certificate.totals, *(_PARAMETER + self.place_of(tape, name) for name in rebuilt)]
        return ChunkCheck(batch, places, torch.cat([flags, padding_holds[None]]), batched)

    def same_gradients(self, certificate: Certificate, rebuilt: dict[str, tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield a flag for each parameter: whether its rebuilt gradient equals autograd's, to rounding."""
        for name, (gradient, size) in rebuilt.items():
            true = certificate.parameters[name].to(torch.float64).flatten()
            off, scale = (gradient - true).norm(), torch.maximum(true.norm(), size.max())
            yield ((off <= self.rtol * scale) | ~off.isfinite())[None]

    def place_of(self, tape: Tape, parameter: str) -> str:
        """Return the first place where a parameter acts; if it is distrusted, the parameter becomes unexplained."""
        return self.layout.places(tape, parameter)[0][1]

    def require(self, check: ChunkCheck) -> None:
        """Raise PlanBroken or BadModel if the check failed.

        A difference at a place may be mere rounding. Then an exact test decides whether samples affect each other.
        """
        *passed, padding_holds = check.flags.tolist()
        failing = [name for name, holds in zip(check.places, passed, strict=True) if not holds]
        wrong = [name.removeprefix(_PARAMETER) for name in failing if name.startswith(_PARAMETER)]
        suspected = [name for name in failing if not name.startswith(_PARAMETER)]
        coupled = self._coupled_places(check.batch, suspected) if suspected else []
        if any(name.startswith("input:") for name in coupled):
            raise samples_coupled()
        if coupled or wrong or not padding_holds:
            raise PlanBroken([check.batch], [*coupled, *wrong])
        if suspected and check.batched:  # rounding, or a wrong batching rule: re-run without batching
            raise PlanBroken([], [BATCHING])

    def unexplained(
        self, batch: Batch, explicit: dict[str, Tensor], certificate: Certificate, rows: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the per-sample gradients of unexplained parameters, computed without batching where that is wrong."""
        wrong = self._wrong(certificate, explicit)
        if wrong:  # torch's batching rules are wrong for some operations
            explicit = explicit | each_sample_alone(self.problem, self.model, batch, wrong, rows)
            inputs = [f"input:{number}" for number in range(len(self.layout.inputs))]
            still = self._wrong(certificate, explicit)  # may be mere rounding, of derivatives that cancel
            if still and (self._alone_differ(batch) or self._coupled_places(batch, inputs)):
                raise samples_coupled()
        return explicit

    def _wrong(self, certificate: Certificate, explicit: dict[str, Tensor]) -> tuple[str, ...]:
        """Return the parameters whose per-sample gradients, combined by u, do not give ds/dtheta."""
        sums = {}
        for name, M in explicit.items():
            u = certificate.u.to(M)
            sums[name] = torch.einsum("nk,nkp->p", u, M), (u[..., None] * M).square().sum().sqrt()
        same = self.same_gradients(certificate, sums)
        return tuple(name for name, right in zip(sums, same, strict=True) if not bool(right))

    def _coupled_places(self, batch: Batch, places: list[str]) -> list[str]:
        """Return those of the given places where samples do not lie as planned, or affect each other's outputs."""
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
        """Return whether some sample alone has other outputs than in its batch."""
        with torch.no_grad():
            together = self.problem.run(self.model, batch)[0]
            alone = [self.problem.run(self.model, take(batch, i, i + 1))[0] for i in range(len(together))]
        off = (torch.cat(alone) - together).abs().max()
        return float(off) > self.rtol * float(together.abs().max())


@dataclass(frozen=True, eq=False)
class ChunkCheck:
    """The result of a chunk's certificate, still on the device."""

    batch: Batch
    places: list[str]  #: names of the places and parameters that were compared
    flags: Tensor  #: whether each place passes; the last flag says whether padding has no effect
    batched: bool  #: whether several backward passes ran as one batched pass
