"""Families of perturbations V of one layer's weight W. Each V gives a quadratic form, <V, H V>.

    RowDirections(T, scale)  V = T_r (x) e_t / scale_t   the forms' sum is Tr H_l for T = I, relative flatness for
                                                         T^T T = W W^T
    EntryDirections()        V = W_st e_s (x) e_t        the sum is sum_st W_st^2 H_st,st: adaptive sharpness
    ColumnDirections()       V = w_j (x) e_j             each form is w_j^T H_jj w_j: neuron-wise flatness
    UnitDirections()         V = e_s (x) e_t             each form is H_st,st
    ShiftDirections(b)       z + b_s e_s                 each form is b_s^2 times the bias's H_ss; b = 1 if None

V changes the pre-activation z = W phi + b at the positions p by U = V phi. Where only the sum of the forms is needed,
phi (m, P) is replaced by a factor E with E^T E = phi^T phi, which has only min(m, P) rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


class Directions(ABC):
    """A family of perturbations of a layer with weight W (g, d, m)."""

    @abstractmethod
    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield the changes U of the pre-activation, (n, g, d, P) each, from phi (n, g, m, P)."""

    @abstractmethod
    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations of a weight that acts at P positions; None: those of the weight itself."""


class WeightDirections(Directions):
    """A family of perturbations of the weight itself."""

    @abstractmethod
    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield the changes V of the weight, (g, d, m) each."""


def factor(phi: Tensor) -> Tensor:
    """Return E with E^T E = phi^T phi, (n, g, min(m, P), P)."""
    one_position = phi.shape[3] == 1
    E: Tensor = torch.linalg.vector_norm(phi, dim=2, keepdim=True) if one_position else torch.linalg.qr(phi, mode="r").R
    return E


def _columns(W: Tensor, positions: int | None) -> int:
    """Return the rows of the factor of phi; m where the weight itself is perturbed."""
    return W.shape[2] if positions is None else min(W.shape[2], positions)


def _put(like: Tensor, group: int, row: int | slice, value: Tensor) -> Tensor:
    U = torch.zeros_like(like)
    U[..., group, row, :] = value
    return U


@final
@dataclass(frozen=True, eq=False)
class RowDirections(WeightDirections):
    """The perturbations T_r (x) e_t / scale_t; T is (g, rows, d), scale (g, m)."""

    T: Tensor
    scale: Tensor | None = None

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return self.T.shape[0] * self.T.shape[1] * _columns(W, positions)

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield the outer product of each T_r with each row of the factor of phi / scale."""
        E = factor(phi if self.scale is None else phi / self.scale[..., None].to(phi.dtype))
        T = self.T.to(phi)
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for row in T[group]:
                for e in E[:, group].unbind(1):
                    yield _put(like, group, slice(None), row[:, None] * e[:, None])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield T_r (x) e_t / scale_t for each r and t."""
        T, columns = self.T.to(W), torch.ones_like(W[:, 0]) if self.scale is None else 1 / self.scale.to(W)
        for group in range(len(W)):
            for row in T[group]:
                for t in range(W.shape[2]):
                    V = torch.zeros_like(W)
                    V[group, :, t] = row * columns[group, t]
                    yield V


@final
class EntryDirections(WeightDirections):
    """The perturbations W_st e_s (x) e_t: each entry along its own value."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[1] * _columns(W, positions)

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, along each row of the factor of (W_st phi_t)_t."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s, row in enumerate(W[group].to(phi)):
                for e in factor(phi[:, group : group + 1] * row[:, None])[:, 0].unbind(1):
                    yield _put(like, group, s, e)

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield W_st in entry (s, t), 0 elsewhere."""
        for V, w in zip(UnitDirections().of_weight(W), W.flatten(), strict=True):
            yield V * w


@final
class ColumnDirections(WeightDirections):
    """The perturbations w_j (x) e_j: each column along itself."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[2]

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield w_j phi_j for each column j."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for j, w in enumerate(W[group].T.to(phi)):
                yield _put(like, group, slice(None), w[:, None] * phi[:, group, j, None])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield each column of W with zeros elsewhere."""
        for group in range(len(W)):
            for j in range(W.shape[2]):
                V = torch.zeros_like(W)
                V[group, :, j] = W[group, :, j]
                yield V


@final
class UnitDirections(WeightDirections):
    """The perturbations e_s (x) e_t: one entry by 1."""

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.numel()

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, by phi_t."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s in range(W.shape[1]):
                for t in range(W.shape[2]):
                    yield _put(like, group, s, phi[:, group, t])

    def of_weight(self, W: Tensor) -> Iterator[Tensor]:
        """Yield 1 in one entry, 0 elsewhere."""
        for entry in range(W.numel()):
            V = torch.zeros_like(W)
            V.view(-1)[entry] = 1
            yield V


@final
@dataclass(frozen=True, eq=False)
class ShiftDirections(Directions):
    """The perturbations z_s + b_s, the same at every position; b is (g, d), 1 if None."""

    b: Tensor | None = None

    def count(self, W: Tensor, positions: int | None) -> int:
        """Return the number of perturbations."""
        return W.shape[0] * W.shape[1]

    def at_preactivation(self, W: Tensor, phi: Tensor) -> Iterator[Tensor]:
        """Yield changes of row s alone, by b_s at all positions."""
        like = phi.new_empty(len(phi), len(W), W.shape[1], phi.shape[3])
        for group in range(len(W)):
            for s in range(W.shape[1]):
                value = like.new_ones(()) if self.b is None else self.b[group, s].to(like)
                yield _put(like, group, s, value)
