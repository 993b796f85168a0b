"""The Jacobian in a weight, in three kinds: dense, at many positions, and stored entry by entry.

Dense layer: df_k/dW = J_k (x) phi, so K = ||phi||^2 J J^T.

Many positions (convolution pixels, tokens, several calls): the sum over positions comes before the square: df_k/dW =
M_k = sum_p J_kp (x) phi_p, and K_kk' = <M_k, M_k'>. With fewer positions than features, phi is replaced by E with
E^T E = phi^T phi, which has only P rows. R_kk' = <W^T M_k, W^T M_k'> is the Gram matrix of T M, with T^T T = W W^T, or
of sum_p (W^T J_kp) (x) phi_p where the pass has W^T J, the derivative at the layer's input, and that takes less. A
grouped convolution is a block-diagonal matrix: the Gram matrices of its groups add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flatlens.grams.contractions import (
    CACHE_BYTES,
    FEW_OUTPUTS,
    RowProduct,
    gram,
    norm2,
    pieces,
    quadratic,
    root_of,
    row_products,
)


def row_factor(W: Tensor) -> Tensor:
    """Return T with T^T T = W W^T, (..., min(d, m), d), zero below the diagonal."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


def _by_rows(J: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `multiply` of all rows of J (n, N, d) in one call, (n, N, m), whichever of n and N is stored first."""
    held = J.transpose(0, 1) if J.stride(0) < J.stride(1) else J
    out = multiply(held.reshape(-1, J.shape[2])).reshape(*held.shape[:2], -1)
    return out if held is J else out.transpose(0, 1)


def times_triangle(rows: Tensor, T: Tensor) -> Tensor:
    """Return `rows` times T^T, without half of the products with T's zeros."""
    out = rows.new_empty(len(rows), len(T))
    half = len(T) // 2  # more blocks leave out more products, but are not faster
    torch.mm(rows, T[:half].T, out=out[:, :half])
    torch.mm(rows[:, half:], T[half:, half:].T, out=out[:, half:])
    return out


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, which is computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64
    b: Tensor | None = None  #: bias, (g d,) float64
    rounded: bool = False  #: whether Jacobians have fewer digits than float64

    @cached_property
    def row_factor(self) -> Tensor:
        """Return T with T^T T = W W^T, (g, min(d, m), d).

        Where the Jacobians' own rounding is larger than that of W W^T, T is its Cholesky factor: a third of the time.
        """
        if self.rounded and self.W.shape[1] <= self.W.shape[2]:
            lower, failed = torch.linalg.cholesky_ex(self.W @ self.W.mT)
            if not failed.any():
                factor: Tensor = lower.mT
                return factor
        return row_factor(self.W)

    @cached_property
    def squares(self) -> Tensor:
        """Return the squares of the weight's entries, (g, d, m)."""
        return self.W.square()

    def at_input(self, J: Tensor) -> Tensor:
        """Return J W: a dense layer's output Jacobian at its input, (n, N, m), from that at its output, (n, N, d)."""
        W = self.W[0].to(J.dtype)  # the network's own arithmetic, as autograd would use
        return _by_rows(J, lambda rows: rows @ W)

    def gram_at_input(self, J: Tensor) -> Tensor:
        """Return (J W)(J W)^T, (n, N, N), as (J T^T)(J T^T)^T, with min(d, m) columns.

        >>> W, J = torch.randn(1, 3, 7, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
        >>> torch.allclose(WeightMatrix(W).gram_at_input(J), (J @ W) @ (J @ W).mT)
        True
        """
        T = self.row_factor[0].to(J.dtype)
        return gram(_by_rows(J, lambda rows: times_triangle(rows, T)))


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """The Jacobian in a weight that is applied once per sample."""

    J: Tensor  #: df/dz, (n, N, d), in the network's dtype
    weight: WeightMatrix
    at_x: Tensor | None  #: df/dx through the layer, (n, N, m), if the pass has it; else it is J W
    phi: Tensor  #: the layer's input, (n, m), in the network's dtype
    phi_norm2: Tensor  #: (n,) float64
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[str] = frozenset()  #: needs of the measures: what several of them share is computed in one walk

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> DenseJacobian:
        """Return the Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        J = self.J if rows is None else self.J[..., rows.to(self.J.device)]
        phi = self.phi if columns is None else self.phi[:, columns.to(self.phi.device)]
        return replace(self, J=J, weight=weight, at_x=None, phi=phi, phi_norm2=norm2(phi))

    @cached_property
    def Jx(self) -> Tensor:
        """Return df/dx through the layer, J W, (n, N, m)."""
        if self.at_x is not None:
            return self.at_x
        return self.weight.at_input(self.J)

    @cached_property
    def _of_J(self) -> dict[RowProduct, Tensor]:
        needs: dict[RowProduct, set[str]] = {"gram": {"K"}, "weighted": {"diagonal", "adaptive"}}
        needs["along"] = set() if self.weight.b is None else {"along"}
        return self._of(self.J, self._b, needs)

    @cached_property
    def _of_Jx(self) -> dict[RowProduct, Tensor]:
        needs: dict[RowProduct, set[str]] = {"gram": {"G"}, "squares": {"squares"}, "weighted": {"columns"}}
        needs["along"] = {"along"}
        return self._of(self.Jx, self.phi, needs)

    @property
    def _b(self) -> Tensor | None:
        """Return the bias, (n, d), if there is one."""
        return None if self.weight.b is None else self.weight.b.expand(len(self.J), -1)

    def _of(self, rows: Tensor, x: Tensor | None, needs: Mapping[RowProduct, set[str]]) -> dict[RowProduct, Tensor]:
        return row_products(rows, [what for what, read in needs.items() if read & self.wanted], self.C, x)

    def _get(self, what: RowProduct, *, input: bool = False) -> Tensor:
        """Return a product of J, or with `input` of Jx."""
        found = self._of_Jx if input else self._of_J
        if what not in found:
            rows, x = (self.Jx, self.phi) if input else (self.J, self._b)
            found |= row_products(rows, (what,), self.C, x)
        return found[what]

    @property
    def _JJ(self) -> Tensor:
        return self._get("gram")

    def gram(self) -> Tensor:
        """Return K of the weight, (n, N, N)."""
        return self.phi_norm2[:, None, None] * self._JJ

    def bias_gram(self) -> Tensor:
        """Return K of the bias, (n, N, N)."""
        return self._JJ

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """Return R, (n, N, N); with `scale` (m,), R of the layer with weight W * scale and features phi / scale."""
        if scale is None:
            return self.phi_norm2[:, None, None] * self.weight.gram_at_input(self.J)
        return norm2(self.phi.to(torch.float64) / scale)[:, None, None] * gram(self.Jx * scale)

    @cached_property
    def _phi2(self) -> Tensor:
        return self.phi.to(torch.float64).square()

    @property
    def _J2(self) -> Tensor:
        """Return sum_kk' C_kk' J_k J_k', (n, d)."""
        return self._get("weighted")

    def at_input(self, what: RowProduct) -> Tensor:
        """Return G ("gram"), ||df/dx_p||^2 of each input entry p ("squares"), (n, m), or df/dx x ("along"), (n, N)."""
        return self._get(what, input=True)

    def diagonal(self) -> Tensor:
        """Return the Gauss-Newton diagonal of the weight, summed over samples, (d, m)."""
        return self._J2.T @ self._phi2

    def columns(self) -> Tensor:
        """Return ||C^(1/2) df/dx_j||^2 phi_j^2 for each column j of W, (n, m)."""
        return self._get("weighted", input=True) * self._phi2

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """Return <df_k/dW, W> + <df_k/db, b>, each if asked for: J_k times the layer's output, (n, N)."""
        total = self._get("along") if bias else self.C.new_zeros(self.C.shape[:2])
        if not weight:
            return total
        what: RowProduct = "along"
        return total + row_products(self.J, (what,), x=self.phi @ self.weight.W[0].T.to(self.phi.dtype))[what]

    def adaptive(self) -> Tensor:
        """Return sum_st W_st^2 times entry st of the sample's own Gauss-Newton diagonal, (n,)."""
        return (self._J2 * (self._phi2 @ self.weight.squares[0].T)).sum(1)

    def adaptive_bias(self) -> Tensor:
        """Return sum_s b_s^2 times entry s of the sample's own Gauss-Newton diagonal of the bias, (n,)."""
        assert self.weight.b is not None
        return self._J2 @ self.weight.b.square()


GramKind: TypeAlias = Literal["K", "R", "diagonal", "columns", "adaptive"]

FEW_COLUMNS = 8  #: with fewer, a product for each sample and output would take longer to read T than to compute


@dataclass(frozen=True, eq=False)
class SharedJacobian:
    """The Jacobian in a weight that is applied at P positions; the positions of several calls are concatenated."""

    J: Tensor  #: df/dz, (n, N, g, d, P); or df/dW itself, (n, N, g, d, m), if phi is None
    phi: Callable[[slice], Tensor] | None
    """Features of a slice of samples, (n', g, m, P); None if J is df/dW."""
    weight: WeightMatrix
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[GramKind] = frozenset({"K", "R"})  #: quantities that will be read; one loop computes them
    convex: bool = False  #: whether C is known to have no negative eigenvalue
    at_x: Tensor | None = None  #: W^T J, (n, N, 1, m, P), if the pass has it

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> SharedJacobian:
        """Return the Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        J, phi = self.J if rows is None else self.J[:, :, :, rows.to(self.J.device)], self.phi
        if columns is not None and phi is None:
            J = J[..., columns.to(J.device)]
        elif columns is not None and phi is not None:
            whole, at = phi, columns.to(J.device)
            phi = lambda piece: whole(piece)[:, :, at]  # noqa: E731
        return replace(self, J=J, phi=phi, weight=weight, at_x=None)

    @cached_property
    def _m(self) -> int:
        return self.weight.W.shape[2]

    @cached_property
    def _narrow(self) -> bool:
        """Return whether phi is replaced by its factor E for Gram matrices: the QR factorisation must pay."""
        _, N, _, d, P = self.J.shape
        return self.phi is not None and N * d * (self._m - P) > 3 * self._m * P

    def _pieces(self, m: int | None = None) -> Iterator[slice]:
        """Return slices of samples, so that their M, with m columns, fits in the scratch memory."""
        _, N, g, d, P = self.J.shape
        return pieces(len(self.J), (N * d * ((m or self._m) + P) + self._m * P) * g * 8)

    def _rows(self, d: int, m: int | None = None) -> list[slice]:
        """Return slices of d rows, so that one sample's M, with m columns, fits in the scratch memory for a slice."""
        return list(pieces(d, self.J.shape[1] * self.J.shape[2] * (m or self._m) * 8, CACHE_BYTES))

    def _features(self, piece: slice, scale: Tensor | None = None) -> Tensor | None:
        """Return phi of some samples, divided by `scale` (g, m)."""
        if self.phi is None:
            return None
        phi = self.phi(piece)
        return phi if scale is None else phi / scale[..., None].to(phi.dtype)

    def _M(self, J: Tensor, phi: Tensor | None) -> Tensor:
        """Return M for some samples and rows, (n', N, g, d', m), from J (n', N, g, d', P) and phi (n', g, m, P)."""
        if phi is None:
            return J
        n, N, g, d, P = J.shape
        m = phi.shape[2]
        if J.stride(3) == 1 and g == 1:  # tokens: a product for each sample needs no copy
            M = J.new_empty(n, N, d, m)
            for each, rows, features in zip(M, J[:, :, 0], phi[:, 0], strict=True):
                torch.bmm(rows, features.T.expand(N, P, m), out=each)
            return M[:, :, None]
        M = J.transpose(1, 2).reshape(-1, N * d, P) @ phi.flatten(0, 1).mT
        return M.reshape(-1, g, N, d, m).transpose(1, 2)

    @cached_property
    def _computed(self) -> dict[GramKind, Tensor]:
        """Return everything in `wanted`; M is formed only once for all of it."""
        wanted = set(self.wanted)
        return self._compute(wanted | {"K"} if wanted & {"K", "R"} else wanted)

    def _get(self, what: GramKind) -> Tensor:
        if what not in self.wanted and not (what == "K" and "R" in self.wanted):
            return self._compute({what})[what]
        return self._computed[what]

    def _compute(self, wanted: set[GramKind]) -> dict[GramKind, Tensor]:
        """Return the quantities in `wanted`, from one loop over pieces of the samples that fit in the cache."""
        found: dict[GramKind, Tensor] = {}
        if wanted - {"K", "R"}:
            self._element_wise(wanted, found)
        elif wanted:
            factors = {"K": None, "R": self.weight.row_factor}
            chosen: list[GramKind] = [what for what in ("K", "R") if what in wanted]
            found |= dict(zip(chosen, self._grams(tuple(factors[what] for what in chosen), None), strict=True))
        return found

    def _element_wise(self, wanted: set[GramKind], found: dict[GramKind, Tensor]) -> None:
        """Compute sums over outputs and add them to `found`.

        Most need M: for a few samples or a few rows of one. Gram matrices come from it if that is cheaper and all fit.
        """
        n, N, W = len(self.J), self.J.shape[1], self.weight.W
        rows = self._rows(W.shape[1])
        factors = {"K": None, "R": self.weight.row_factor if "R" in wanted else None}
        chosen: list[GramKind] = [what for what in ("K", "R") if what in wanted]
        if self._narrow or len(rows) > 1:
            found |= dict(zip(chosen, self._grams(tuple(factors[what] for what in chosen), None), strict=True))
            chosen = []
        for what in wanted - found.keys():
            shapes: dict[str, tuple[int, ...]] = {"K": (n, N, N), "R": (n, N, N), "adaptive": (n,)}
            shape = shapes.get(what, (n, W.shape[0] * W.shape[2]))
            found[what] = torch.zeros_like(W) if what == "diagonal" else W.new_zeros(shape)
        by_position = self.phi is not None and self.J.shape[4] <= W.shape[1]  # else columns of M take less
        reads_M = bool(chosen) or not by_position
        root = root_of(self.C) if self.convex and N <= FEW_OUTPUTS and not reads_M else None
        if by_position and "columns" in wanted:
            self._columns(found)
            wanted = wanted - {"columns"}
        if wanted & {"diagonal", "adaptive"} and root is not None and self._few_pairs:
            self._from_pairs(found)
            return
        for piece in self._pieces() if chosen or wanted - {"K", "R"} else ():
            column: Tensor | float = 0.0
            phi, J = self._features(piece), self.J[piece]
            C: Tensor | None = self.C[piece]
            sizes2 = self.C.new_ones(len(J))
            if root is not None:  # sum_kk' C_kk' M_k M_k' is a sum of squares of the rows of root^T M
                mixed, sizes = _mixed(root[piece], J.flatten(2))
                J, C, sizes2 = mixed.view(J.shape), None, sizes.square()  # in float64, so that the squares are, too
            for part in rows:
                M = self._M(J[:, :, :, part], phi)
                for what in chosen:
                    T = factors[what]
                    found[what][piece] = gram(M) if T is None else _gram_of_product(T, M)
                if "columns" in wanted:
                    column = column + (M * W[:, part].to(M.dtype)).sum(3)
                if wanted & {"diagonal", "adaptive"}:
                    # the sum of a few squares has the digits of M in float32, too
                    squares = quadratic(C, M) if C is not None else M.square().sum(1) * sizes2[:, None, None, None]
                    if "diagonal" in wanted:
                        found["diagonal"][:, part] += squares.sum(0)
                    if "adaptive" in wanted:
                        found["adaptive"][piece] += squares.flatten(1) @ self.weight.squares[:, part].flatten()
            if isinstance(column, Tensor):
                self._put_columns(column, piece, found)

    def _columns(self, found: dict[GramKind, Tensor]) -> None:
        """Compute columns as sum_p phi_pj (W^T J_p)_j, without M."""
        _, N, g, d, P = self.J.shape
        W = self.weight.W.to(self.J.dtype)
        for piece in pieces(len(self.J), 8 * N * g * P * (d + 2 * self._m)):
            phi, J = self._features(piece), self.J[piece]
            assert phi is not None
            at = (J.mT.reshape(-1, g, P, d) @ W).view(len(J), N, g, P, self._m)
            self._put_columns((at * phi.mT[:, None]).sum(3), piece, found)

    def _put_columns(self, column: Tensor, piece: slice, found: dict[GramKind, Tensor]) -> None:
        """Add what follows from the columns (n', N, g, m) of some samples."""
        found["columns"][piece] = quadratic(self.C[piece], column).flatten(1)

    @property
    def _few_pairs(self) -> bool:
        """Return whether a sum over pairs of positions is cheaper than M, with all its digits: not in float64."""
        N, P = self.J.shape[1], self.J.shape[4]
        return self.phi is not None and self.J.dtype != torch.float64 and P * (P + 1) <= N * (P / 4 + 12)

    def _from_pairs(self, found: dict[GramKind, Tensor]) -> None:
        """Compute the diagonal and the adaptive sums from products of two positions, in float64.

        sum_kk' C_kk' M_kst M_k'st = sum_pq B_pqs phi_pt phi_qt with B_pqs = sum_kk' C_kk' J_kps J_k'qs, for C without
        negative eigenvalues.
        """
        _, N, g, d, P = self.J.shape
        i, j = torch.triu_indices(P, P, device=self.J.device)
        times = torch.where(i == j, 1.0, 2.0).to(self.C)
        for piece in pieces(len(self.J), 8 * g * len(i) * (self._m + 2 * N * d)):
            phi, J, C = self._features(piece), self.J[piece].to(torch.float64), self.C[piece]
            assert phi is not None
            wide = phi.to(torch.float64)
            B = ((C @ J.flatten(2)).view(J.shape)[..., i] * J[..., j]).sum(1) * times  # (n', g, d, pairs)
            F = wide[..., i] * wide[..., j]  # (n', g, m, pairs)
            if "diagonal" in found:
                found["diagonal"] += B.permute(1, 2, 0, 3).flatten(2) @ F.permute(1, 0, 3, 2).flatten(1, 2)
            if "adaptive" in found:
                found["adaptive"][piece] = (B * (self.weight.squares @ F)).sum((1, 2, 3))
        for what in found.keys() & {"diagonal", "adaptive"}:
            found[what].clamp_(min=0)  # below 0 only by rounding

    def _grams(self, factors: tuple[Tensor | None, ...], scale: Tensor | None) -> tuple[Tensor, ...]:
        """Return the Gram matrices of T M for each T (g, r, d), None for I, with phi divided by `scale` (g, m)."""
        n, N, _, d, P = self.J.shape
        grams = tuple(self.J.new_empty(n, N, N, dtype=torch.float64) for _ in factors)
        for piece in self._pieces(P if self._narrow else None):
            phi, J = self._features(piece, scale), self.J[piece]
            if phi is None and scale is not None:
                J = J / scale[:, None].to(J.dtype)
            if phi is not None and self._narrow:
                phi = torch.linalg.qr(phi, mode="r").R
            m = self._m if phi is None else phi.shape[2]
            M = self._M(J, phi) if len(self._rows(d, m)) == 1 else None
            for K, T in zip(grams, factors, strict=True):
                if T is not None and scale is None and self.at_x is not None and P * self._m < T.shape[1] * d:
                    K[piece] = self._gram_of(self.at_x[piece], phi, m)
                elif T is None:
                    K[piece] = self._gram_of(J, phi, m) if M is None else gram(M)
                elif M is None:
                    K[piece] = self._gram_of(_times(T, J), phi, m)
                else:
                    K[piece] = _gram_of_product(T, M)
        return grams

    def _gram_of(self, J: Tensor, phi: Tensor | None, m: int) -> Tensor:
        """Return the Gram matrix of M for J (n', N, g, d, P), a few rows of M at a time."""
        parts = [gram(self._M(J[:, :, :, part], phi)) for part in self._rows(J.shape[3], m)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def gram(self) -> Tensor:
        """Return K of the weight, (n, N, N)."""
        return self._get("K")

    def gram_at_input(self) -> Tensor:
        """Return the Gram matrix of W^T J at all tokens, (n, N, N), for a layer that maps tokens one by one."""
        n, N = self.J.shape[:2]
        K = self.J.new_empty(n, N, N, dtype=torch.float64)
        for piece in self._pieces():
            K[piece] = gram(_times(self.weight.row_factor, self.J[piece]).mT)
        return K

    def bias_gram(self) -> Tensor:
        """Return K of the bias, (sum_p J_p)(sum_p J_p)^T, (n, N, N)."""
        return gram(self.J.sum(4))

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """Return R_kk' = <W^T M_k, W^T M_k'>, (n, N, N); with `scale` (g, m), R for W * scale and phi / scale.

        With the QR factorisation W^T = Q T, W^T M = Q (T M) and Q cancels in the products; T is min(d, m) x d.
        """
        if scale is None:
            return self._get("R")
        return self._grams((row_factor(self.weight.W * scale[:, None]),), scale)[0]

    def diagonal(self) -> Tensor:
        """Return the Gauss-Newton diagonal of the weight, summed over samples, (g d, m)."""
        return self._get("diagonal").flatten(0, 1)

    def columns(self) -> Tensor:
        """Return ||C^(1/2) sum_p phi_pj J_p w_j||^2 for each column w_j of W, (n, g m)."""
        return self._get("columns")

    def adaptive(self) -> Tensor:
        """Return sum_st W_st^2 times entry st of the sample's own Gauss-Newton diagonal, (n,)."""
        return self._get("adaptive")

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """Return <df_k/dW, W> + <df_k/db, b>, each if asked for: J_k times the layer's output, (n, N)."""
        total, W = self.C.new_zeros(self.C.shape[:2]), self.weight.W.to(self.J.dtype)
        for piece in self._pieces(1) if weight else ():
            J, phi = self.J[piece], self._features(piece)
            total[piece] = _rows_times(J, W.expand(len(J), -1, -1, -1) if phi is None else W @ phi)
        if bias:
            assert self.weight.b is not None
            total += self.J.sum(4).flatten(2).to(torch.float64) @ self.weight.b
        return total

    def adaptive_bias(self) -> Tensor:
        """Return sum_s b_s^2 times entry s of the sample's own Gauss-Newton diagonal of the bias, (n,)."""
        assert self.weight.b is not None
        return quadratic(self.C, self.J.sum(4).flatten(2)) @ self.weight.b.square()


def _mixed(root: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, sizes) with root_i^T J_i = sizes_i B_i, in J's dtype, for root (n', N, N) float64 and J (n', N, M).

    Whatever the units of a sample's C and J, squares of B's entries neither overflow nor underflow: samples beyond
    doubt keep their digits. Sizes are (n',).
    """
    sizes = root.abs().amax((1, 2)) * J.abs().amax((1, 2)).to(root.dtype)
    sizes = torch.where((sizes > 0) & sizes.isfinite(), sizes, 1.0)
    return (root / sizes[:, None, None]).mT.to(J.dtype) @ J, sizes


def _rows_times(J: Tensor, z: Tensor) -> Tensor:
    """Return sum_gdp J_kgdp z_gdp, (n', N), for J (n', N, g, d, P), read as it is stored, and z (n', g, d, P)."""
    if J.shape[2] == 1 and J.stride(3) == 1:
        J, z = J[:, :, 0].mT, z[:, 0].mT
    return (J.flatten(2) @ z.flatten(1)[..., None])[..., 0]


def _gram_of_product(T: Tensor, M: Tensor) -> Tensor:
    """Return the Gram matrices of T M, for the triangular T (g, r, d) and M (n', N, g, d, m)."""
    T, (n, N, g, d, m) = T.to(M.dtype), M.shape
    if g > 1:
        return gram(T @ M)
    if m <= FEW_COLUMNS:
        return gram(times_triangle(M[:, :, 0].mT.reshape(-1, d), T[0]).view(n, N, -1))
    rows, half = M.reshape(n * N, d, m), T.shape[1] // 2  # T is 0 left of its diagonal
    upper = torch.bmm(T[0, :half].expand(n * N, -1, -1), rows)
    lower = torch.bmm(T[0, half:, half:].expand(n * N, -1, -1), rows[:, half:])
    return gram(upper.view(n, N, -1)) + gram(lower.view(n, N, -1))


def _times(T: Tensor, J: Tensor) -> Tensor:
    """Return T J, (n', N, g, r, P), stored as J is, for the triangular T (g, r, d)."""
    if len(T) > 1 or J.stride(3) != 1:
        return T.to(J.dtype) @ J
    rows = J[:, :, 0].mT
    return times_triangle(rows.reshape(-1, J.shape[3]), T[0].to(J.dtype)).view(*rows.shape[:3], -1).mT[:, :, None]


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """The Jacobian in a parameter, stored entry by entry: small, unexplained and embedding parameters."""

    M: Tensor  #: df/dtheta, (n, N, size)
    theta: Tensor  #: values of the parameter, (size,) float64; (n, size) if each sample has its own entries
    C: Tensor  #: output Hessians, (n, N, N)

    def gram(self) -> Tensor:
        """Return K, (n, N, N)."""
        return gram(self.M)

    def adaptive(self) -> Tensor:
        """Return sum_j theta_j^2 times entry j of the sample's own Gauss-Newton diagonal, (n,)."""
        return (quadratic(self.C, self.M) * self.theta.square()).sum(1)

    def along(self) -> Tensor:
        """Return sum_j theta_j df_k/dtheta_j, (n, N)."""
        return (self.M.to(torch.float64) @ self.theta.expand(len(self.M), -1)[..., None])[..., 0]
