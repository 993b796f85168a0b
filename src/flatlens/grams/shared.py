"""The parameter Jacobian of a weight used at many positions: convolution pixels, tokens, several calls.

df_k/dW = M_k = sum_p J_kp (x) phi_p sums BEFORE it squares. Two exact roads to K_kk' = <M_k, M_k'>, the cheaper
taken per layer:

    form M              N d m P + N^2 d m        multiplications per sample
    position Gram       P^2 m + N P^2 d + N^2 P d,  K_kk' = sum_{p,q} <phi_p, phi_q> <J_kp, J_k'q>

A grouped convolution is a block-diagonal matrix: its groups' Grams add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flatlens.grams.contractions import gram, pieces, quadratic
from flatlens.grams.weight import WeightMatrix, row_factor

GramKind: TypeAlias = Literal["K", "R", "diagonal", "columns", "adaptive", "plain diagonal", "plain columns"]

_NARROW = 16  #: rows of a weight below which a product for each position takes longer to begin than to do


@dataclass(frozen=True, eq=False)
class SharedJacobian:
    """A weight applied at positions p (or called more than once: its calls' positions one after another)."""

    J: Tensor  #: df/dz, (n, N, g, d, P); or df/dW itself, (n, N, g, d, m), where there is no phi
    phi: Callable[[slice], Tensor] | None
    """What the weight multiplies, of some samples, (n', g, m, P), made piece by piece; None of a weight whose
    derivatives are all there."""
    weight: WeightMatrix
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[GramKind] = frozenset({"K", "R"})  #: what will be asked for, to be made in one walk

    @cached_property
    def _m(self) -> int:
        return self.weight.W.shape[2]

    @cached_property
    def _forms_M(self) -> bool:
        _, N, _, d, P = self.J.shape
        m = self._m
        if self.phi is None:
            return True
        # the position road runs in float64, at half the speed of float32
        return N * d * m * (P + N) <= 2 * (P * P * m + N * P * P * d + N * N * P * d)

    def _pieces(self, *, form: bool) -> Iterator[slice]:
        _, N, g, d, P = self.J.shape
        held = N * d * (self._m + P) + self._m * P if form else P * P + 2 * N * d * P + self._m * P
        return pieces(len(self.J), held * g * 8)

    def _rows(self, d: int) -> list[slice]:
        """Cuts d rows of a weight so that one sample's gradients of each part stay within a piece."""
        return list(pieces(d, self.J.shape[1] * self.J.shape[2] * self._m * 8))

    def _features(self, piece: slice, scale: Tensor | None = None) -> Tensor | None:
        """phi of some samples, divided by `scale` (g, m)."""
        if self.phi is None:
            return None
        phi = self.phi(piece)
        return phi if scale is None else phi / scale[..., None].to(phi.dtype)

    def _M(self, J: Tensor, phi: Tensor | None) -> Tensor:
        """Per-sample gradients of some samples' rows, (n', N, g, d', m), from J (n', N, g, d', P)."""
        if phi is None:
            return J
        _, N, g, d, P = J.shape
        M = J.transpose(1, 2).reshape(-1, N * d, P) @ phi.flatten(0, 1).mT
        return M.reshape(-1, g, N, d, self._m).transpose(1, 2)

    @cached_property
    def _computed(self) -> dict[GramKind, Tensor]:
        """Whatever the pass was asked for, from per-sample gradients formed once."""
        wanted = set(self.wanted)
        return self._compute(wanted | {"K"} if wanted & {"K", "R"} else wanted)

    def _get(self, what: GramKind) -> Tensor:
        if what not in self.wanted and not (what == "K" and "R" in self.wanted):
            return self._compute({what})[what]
        return self._computed[what]

    def _compute(self, wanted: set[GramKind]) -> dict[GramKind, Tensor]:
        """One walk over the samples, a cache's worth at a time."""
        found: dict[GramKind, Tensor] = {}
        if wanted & {"diagonal", "columns", "adaptive", "plain diagonal", "plain columns"}:
            self._element_wise(wanted, found)
        elif wanted:
            factors = {"K": None, "R": self.weight.row_factor}
            chosen: list[GramKind] = [what for what in ("K", "R") if what in wanted]
            found |= dict(zip(chosen, self._grams(tuple(factors[what] for what in chosen), None), strict=True))
        return found

    def _element_wise(self, wanted: set[GramKind], found: dict[GramKind, Tensor]) -> None:
        """Sums over outputs need the gradients themselves, M: some samples' at a time, or some rows of one sample's.

        Grams are made of the same M where that is the cheaper road and all rows are there.
        """
        n, N, W = len(self.J), self.J.shape[1], self.weight.W
        rows = self._rows(W.shape[1])
        factors = {"K": None, "R": self.weight.row_factor if "R" in wanted else None}
        chosen: list[GramKind] = [what for what in ("K", "R") if what in wanted]
        if not (self._forms_M and len(rows) == 1):
            found |= dict(zip(chosen, self._grams(tuple(factors[what] for what in chosen), None), strict=True))
            chosen = []
        for what in wanted - found.keys():
            shape = (n, N, N) if what in ("K", "R") else (n, W.shape[0] * W.shape[2]) if "columns" in what else (n,)
            found[what] = torch.zeros_like(W) if "diagonal" in what else W.new_zeros(shape)
        for piece in self._pieces(form=True):
            C, phi, J = self.C[piece], self._features(piece), self.J[piece]
            column: Tensor | float = 0.0
            for part in rows:
                M, W_part = self._M(J[:, :, :, part], phi), W[:, part]
                for what in chosen:
                    T = factors[what]
                    found[what][piece] = gram(M if T is None else T.to(M.dtype) @ M)
                if wanted & {"columns", "plain columns"}:
                    column = column + (M * W_part.to(M.dtype)).sum(3)
                if wanted & {"diagonal", "adaptive"}:
                    squares = quadratic(C, M)
                    if "diagonal" in wanted:
                        found["diagonal"][:, part] += squares.sum(0)
                    if "adaptive" in wanted:
                        found["adaptive"][piece] += (squares * W_part.square()).flatten(1).sum(1)
                if "plain diagonal" in wanted:
                    found["plain diagonal"][:, part] += quadratic(None, M).sum(0)
            for what, weight in (("columns", C), ("plain columns", None)):
                if what in wanted:
                    assert isinstance(column, Tensor)
                    found[what][piece] = quadratic(weight, column).flatten(1)

    def _grams(self, factors: tuple[Tensor | None, ...], scale: Tensor | None) -> tuple[Tensor, ...]:
        """Grams of T M for each T of shape (g, r, d) (I where None), phi divided by `scale` (g, m)."""
        n, N = self.J.shape[:2]
        grams = tuple(self.J.new_empty(n, N, N, dtype=torch.float64) for _ in factors)
        for piece in self._pieces(form=self._forms_M):
            phi, J = self._features(piece, scale), self.J[piece]
            if phi is None and scale is not None:
                J = J / scale[:, None].to(J.dtype)
            if phi is not None and not self._forms_M:
                wide = phi.to(torch.float64)
                A = wide.mT @ wide  # (n', g, P, P)
                for K, T in zip(grams, factors, strict=True):
                    K[piece] = _position_gram(A, J, T)
            elif len(self._rows(J.shape[3])) == 1:
                M = self._M(J, phi)
                for K, T in zip(grams, factors, strict=True):
                    K[piece] = gram(M if T is None else T.to(M.dtype) @ M)
            else:
                for K, T in zip(grams, factors, strict=True):
                    TJ = J if T is None else T.to(J.dtype) @ J
                    K[piece] = torch.stack([
                        gram(self._M(TJ[:, :, :, part], phi)) for part in self._rows(TJ.shape[3])
                    ]).sum(0)  # fmt: skip
        return grams

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self._get("K")

    def bias_gram(self) -> Tensor:
        """K of the bias: (sum_p J_p)(sum_p J_p)^T."""
        return gram(self.J.sum(4))

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R_kk' = <W^T M_k, W^T M_k'>, (n, N, N).

        With W^T = Q T (QR), W^T M = Q (T M) and Q drops out: T is min(d, m) x d. With `scale` (g, m), of W * scale
        reading phi / scale.
        """
        if scale is None:
            return self._get("R")
        return self._grams((row_factor(self.weight.W * scale[:, None]),), scale)[0]

    def diagonal(self, *, plain: bool = False) -> Tensor:
        """sum_i diag(M_i^T C_i M_i), the Gauss-Newton diagonal of the weight over the chunk, (g d, m)."""
        return self._get("plain diagonal" if plain else "diagonal").flatten(0, 1)

    def columns(self, *, plain: bool = False) -> Tensor:
        """||C^(1/2) sum_p phi_pj J_p w_j||^2 for each column j of each group's W, (n, g m)."""
        return self._get("plain columns" if plain else "columns")

    def adaptive(self) -> Tensor:
        """sum_st W_st^2 times the sample's own Gauss-Newton diagonal, (n,)."""
        return self._get("adaptive")

    def adaptive_bias(self) -> Tensor:
        """The same of the bias."""
        assert self.weight.b is not None
        return quadratic(self.C, self.J.sum(4).flatten(2)) @ self.weight.b.square()


def _position_gram(A: Tensor, J: Tensor, T: Tensor | None) -> Tensor:
    """Return sum_{p,q} <phi_p, phi_q> <T J_kp, T J_k'q> of some samples, (n', N, N), from A (n', g, P, P).

    J is (n', N, g, d, P). Its positions go before its rows, so that T, the same for all of them, is one product.
    """
    laid = J.permute(2, 0, 4, 1, 3)
    rows = torch.empty(laid.shape, dtype=torch.float64, device=J.device).copy_(laid)  # (g, n', P, N, d)
    if T is not None:
        rows = (rows.flatten(1, 3) @ T.mT).reshape(*rows.shape[:4], -1)
    moved = (A.transpose(0, 1) @ rows.flatten(3)).view(rows.shape)
    if rows.shape[4] < _NARROW:
        return (moved.transpose(2, 3).flatten(3) @ rows.transpose(2, 3).flatten(3).mT).sum(0)
    return (moved @ rows.mT).sum((0, 2))


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """A parameter whose per-sample gradients are held as they are: a norm's affine entries, or anything no layer
    explains."""

    M: Tensor  #: df/dtheta, (n, N, size)
    theta: Tensor  #: the parameter's values, (size,) float64; (n, size) where each sample has entries of its own
    C: Tensor  #: output Hessians, (n, N, N)

    def gram(self) -> Tensor:
        """K, (n, N, N)."""
        return gram(self.M)

    def adaptive(self) -> Tensor:
        """sum_j theta_j^2 times the sample's own Gauss-Newton diagonal, (n,)."""
        return (quadratic(self.C, self.M) * self.theta.square()).sum(1)
