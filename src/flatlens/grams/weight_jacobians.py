"""The Jacobian in a weight, in three kinds: dense, at many positions, and stored entry by entry; their contractions.

Dense layer: df_k/dW = J_k (x) phi, so K = ||phi||^2 J J^T.

Many positions (convolution pixels, tokens, several calls): the sum over positions comes before the square: df_k/dW =
M_k = sum_p J_kp (x) phi_p, and K_kk' = <M_k, M_k'>. With fewer positions than features, phi is replaced by E with
E^T E = phi^T phi, which has only P rows. R_kk' = <W^T M_k, W^T M_k'> is the Gram matrix of T M, with T^T T = W W^T, or
of sum_p (W^T J_kp) (x) phi_p where the pass has W^T J, the derivative at the layer's input, and that takes less. A
grouped convolution is a block-diagonal matrix: the Gram matrices of its groups add.

All kinds have the same methods:

    gram, bias_gram          K of the weight and of its bias, (n, N, N)
    relative_gram            R, (n, N, N); with `scale`, R for W * scale and M / scale: the same function in other units
    trace, bias_trace        tr(C K) of the weight and of its bias, (n,)
    relative_trace           tr(C R), (n,)
    diagonal, bias_diagonal  Gauss-Newton diagonal of the weight and of its bias, summed over samples, (g d, m), (g d,)
    columns                  ||C^(1/2) sum_s W_sj M_sj||^2 for each column j of W, (n, g m)
    along                    <df_k/dW, W> + <df_k/db, b>, each if asked for, (n, N)
    adaptive, adaptive_bias  sum_st W_st^2 times entry st of the sample's own Gauss-Newton diagonal, (n,); that of b
    block                    the Jacobian in some rows and columns of the weight, given as a weight; None for all

Gram matrices are made by few contractions (`row_products`), which accumulate in float64. Where traces alone are read
and C = root root^T, tr(C K) = ||root^T M||^2: lengths of mixed Jacobians take the place of Gram matrices (`Roots`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def power_of_two(t: Tensor, dim: int | None = None) -> Tensor:
    """Return the power of 2 just below the largest entry in size, 1 if there is none: dividing by it rounds nothing.

    >>> power_of_two(torch.tensor([3.0, -5.0])), power_of_two(torch.zeros(2))
    (tensor(4.), tensor(1.))
    """
    size = t.detach().abs()
    top = size.max() if dim is None else size.amax(dim, keepdim=True)
    usual = (top > 0) & top.isfinite()
    powers: Tensor = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent - 1)
    return powers.where(usual, 1.0)


def euclidean(t: Tensor, dim: int | None = None) -> Tensor:
    """Return the norm of a tensor, or of its rows along `dim`, whose squares neither overflow nor underflow.

    >>> euclidean(torch.tensor([3e-200, 4e-200], dtype=torch.float64))
    tensor(5.0000e-200, dtype=torch.float64)
    """
    unit = power_of_two(t, dim) if t.numel() else torch.ones_like(t[..., :1])
    norms: Tensor = torch.linalg.vector_norm(t / unit, dim=dim)
    return norms * (unit if dim is None else unit.squeeze(dim))


_MANY = 4096  #: entries of a sample with which roundings of rows are negligible
SMALLEST2 = 1e-30  #: squared length above which no square in float32 that counts is lost
FEW_PAIRED = 32  #: with fewer positions, products of their pairs are too small to be fast
_LOST = 64  #: how far pairs of P positions may cancel, in units of P
FEW_OUTPUTS = 32  #: with more, a root of C takes longer than what it saves
SCRATCH_BYTES = 2**23  #: bytes of scratch memory of a contraction; more would not fit in the cache
CACHE_BYTES = 2**21  #: bytes of a Jacobian widened to float64 at a time on a CPU: it stays in one core's cache
DEVICE_BYTES = 2**26  #: the same on other devices, where many small products cost more time to launch than to compute


RowProduct: TypeAlias = Literal["gram", "squares", "weighted", "along"]


def row_products(
    A: Tensor, wanted: Collection[RowProduct], C: Tensor | None = None, x: Tensor | None = None
) -> dict[RowProduct, Tensor]:
    """Return products of each sample's rows A, (n, N, M), in float64; the rows are widened once for all of them.

    "gram": A A^T, (n, N, N). "squares": sum_k A_k^2 of each entry, (n, M). "weighted": sum_kk' C_kk' A_k A_k', (n, M).
    "along": A x, (n, N), for x (n, M). With "gram" x is a row more of A, so that one product gives both.
    """
    A = A.detach()  # products written into memory have no derivative
    C, x = (None if v is None else v.detach() for v in (C, x))
    n, N, M = A.shape
    if n > 1 and A.stride(0) == 0 and set(wanted) <= {"gram", "squares"}:  # all samples share one matrix
        return {what: found.expand(n, *found.shape[1:]) for what, found in row_products(A[:1], wanted).items()}
    # The rows of a few samples at a time are widened, so that they stay in the cache.
    cuts = list(pieces(n, N * M * 8, CACHE_BYTES if A.device.type == "cpu" else DEVICE_BYTES))
    shapes: dict[RowProduct, tuple[int, ...]] = {"gram": (N, N), "squares": (M,), "weighted": (M,), "along": (N,)}
    out = {what: A.new_empty(n, *shapes[what], dtype=torch.float64) for what in wanted}
    joined = {"gram", "along"} <= out.keys()
    wide = A.new_empty(cuts[0].stop if cuts else 0, N + joined, M, dtype=torch.float64)
    scratch = torch.empty_like(wide[:, :N]) if out.keys() & {"squares", "weighted"} else wide
    for piece in cuts:
        held = piece.stop - piece.start
        rows = A[piece] if A.dtype == torch.float64 and not joined else wide[:held, :N].copy_(A[piece])
        if joined:
            assert x is not None
            wide[:held, N] = x[piece]
            products = torch.bmm(wide[:held], wide[:held].mT)
            out["gram"][piece], out["along"][piece] = products[:, :N, :N], products[:, :N, N]
        elif "gram" in out:
            torch.bmm(rows, rows.mT, out=out["gram"][piece])
        elif "along" in out:
            assert x is not None
            out["along"][piece] = (rows @ x[piece].to(torch.float64)[..., None])[..., 0]
        if "squares" in out:
            torch.sum(torch.mul(rows, rows, out=scratch[:held]), dim=1, out=out["squares"][piece])
        if "weighted" in out:
            assert C is not None
            torch.sum(torch.bmm(C[piece], rows, out=scratch[:held]).mul_(rows), dim=1, out=out["weighted"][piece])
    return out


def gram(A: Tensor) -> Tensor:
    """Return A A^T of each sample, (n, N, N), accumulated in float64, for A of shape (n, N, ...).

    >>> gram(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[25.]]], dtype=torch.float64)
    """
    return row_products(A.flatten(2), ["gram"])["gram"]


def concatenated(parts: list[Tensor], dim: int) -> Tensor:
    """Return torch.cat of the parts, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def norm2(x: Tensor) -> Tensor:
    """Return ||x_i||^2 of each sample, (n,), accumulated in float64.

    >>> norm2(torch.tensor([[3.0, 4.0]]))
    tensor([25.], dtype=torch.float64)
    """
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()


def length2(x: Tensor) -> Tensor:
    """Return ||x_i||^2 of each sample, (n,) float64, faster than `norm2`, if no square leaves the tensor's arithmetic.

    Rows of 64 are squared and added in it. Many roundings of rows are independent, and rows add in float64.
    """
    if x[:1].numel() < _MANY:
        return norm2(x)
    rows = x.view(len(x), -1, 64) if x.is_contiguous() and x[:1].numel() % 64 == 0 else x
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1).to(torch.float64).square().flatten(1).sum(1)
    return found


def lengths2(compute: Callable[[Callable[[Tensor], Tensor]], Mapping[_T, Tensor]], like: Tensor) -> Mapping[_T, Tensor]:
    """Return what `compute` gives with `length2`; with `norm2` where squares over- or underflow the dtype of `like`.

    >>> tiny = torch.full((1, 4, 64), 1e-30)
    >>> lengths2(lambda of: {"": of(tiny)}, tiny)[""] / 256
    tensor([1.0000e-60], dtype=torch.float64)
    """
    if like.dtype != torch.float64 and like.device.type != "cpu":  # reading a flag would wait for the device
        return compute(norm2)
    found = compute(length2)
    fits = like.dtype == torch.float64 or all(((each > SMALLEST2) & each.isfinite()).all() for each in found.values())
    return found if fits else compute(norm2)


def _diagonal_sums(A: Tensor) -> Tensor:
    return A.diagonal(dim1=1, dim2=2).sum(1)


def trace(A: Tensor, B: Tensor) -> Tensor:
    """Return tr(A_i B_i), (n,), for symmetric matrices."""
    return (A * B).sum((1, 2))


def quadratic(C: Tensor | None, A: Tensor) -> Tensor:
    """Return sum_{k,k'} C_kk' A_k A_k' for each entry, (n, ...) float64, with A (n, N, ...); None stands for C = I."""
    what: RowProduct = "squares" if C is None else "weighted"
    return row_products(A.flatten(2), (what,), C)[what].reshape(len(A), *A.shape[2:])


def root_of(C: Tensor) -> Tensor:
    """Return R with R R^T = C, (n, N, N), for symmetric C without negative eigenvalues.

    Cholesky's elimination, column by column. A pivot within rounding of 0 gets no column: cross-entropy has one such.

    >>> root_of(torch.tensor([[[4.0, -4.0], [-4.0, 4.0]]], dtype=torch.float64))[0].tolist()
    [[2.0, 0.0], [-2.0, 0.0]]
    """
    N = C.shape[1]
    left, R = C, torch.zeros_like(C)
    nothing = 10 * N * torch.finfo(C.dtype).eps * C.diagonal(dim1=1, dim2=2)
    for k in range(N):
        pivot = left[:, k, k]
        there = pivot > nothing[:, k]
        R[:, k:, k] = left[:, k:, k] * torch.where(there, pivot.where(there, 1.0).rsqrt(), 0.0)[:, None]
        left = left - R[:, :, k, None] * R[:, None, :, k]
    return R


@dataclass(frozen=True, eq=False)
class Roots:
    """Roots of output Hessians C, found once for all layers of a chunk."""

    convex: bool = False  #: whether C is known to have no negative eigenvalue
    _found: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)

    def of(self, C: Tensor) -> Tensor | None:
        """Return R with R R^T = C, (n, N, r); None if it need not exist, or takes longer than what it saves.

        On a processor last columns that are 0 are left out: cross-entropy has one. Other devices need not wait.
        """
        if not self.convex or C.shape[1] > FEW_OUTPUTS:
            return None
        for known, root in self._found:
            if known is C:
                return root
        root = root_of(C)
        if C.device.type == "cpu":
            root = root[..., : max([1, *(1 + root.any(0).any(0).nonzero()[:, 0]).tolist()])]
        self._found.append((C, root))
        return root


def pieces(n: int, bytes_each: int, within: int = SCRATCH_BYTES) -> Iterator[slice]:
    """Yield slices of n samples, so that `bytes_each` per sample stay within `within` bytes.

    >>> [piece.stop - piece.start for piece in pieces(5, SCRATCH_BYTES // 2)]
    [2, 2, 1]
    """
    most = max(1, within // max(1, bytes_each))
    for start in range(0, n, most):
        yield slice(start, min(start + most, n))


GramKind: TypeAlias = Literal["K", "R", "CK", "CR", "diagonal", "columns", "adaptive"]

FEW_COLUMNS = 8  #: with fewer, a product for each sample and output would take longer to read T than to compute


def row_factor(W: Tensor) -> Tensor:
    """Return T with T^T T = W W^T, (..., min(d, m), d), zero below the diagonal."""
    T: Tensor = torch.linalg.qr(W.mT, mode="r").R
    return T


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A layer's weight as g diagonal blocks, and their row factor, which is computed once for all chunks."""

    W: Tensor  #: (g, d, m) float64
    b: Tensor | None = None  #: bias, (g d,) float64
    rounded: bool = False  #: whether Jacobians have fewer digits than float64

    @cached_property
    def row_factor(self) -> Tensor:
        """T with T^T T = W W^T, (g, min(d, m), d).

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
        """Squares of the weight's entries, (g, d, m)."""
        return self.W.square()

    def at_input(self, J: Tensor) -> Tensor:
        """J W: a dense layer's output Jacobian at its input, (n, N, m), from that at its output, (n, N, d)."""
        W = self.W[0].to(J.dtype)  # the network's own arithmetic, as autograd would use
        return _by_rows(J, lambda rows: rows @ W)

    def gram_at_input(self, J: Tensor) -> Tensor:
        """(J W)(J W)^T, (n, N, N), as (J T^T)(J T^T)^T, with min(d, m) columns.

        >>> W, J = torch.randn(1, 3, 7, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
        >>> torch.allclose(WeightMatrix(W).gram_at_input(J), (J @ W) @ (J @ W).mT)
        True
        """
        T = self.row_factor[0].to(J.dtype)
        return gram(_by_rows(J, partial(_times_triangle, T=T)))


def _by_rows(J: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """`multiply` of all rows of J (n, N, d) in one call, (n, N, m), whichever of n and N is stored first."""
    held = J.transpose(0, 1) if J.stride(0) < J.stride(1) else J
    out = multiply(held.reshape(-1, J.shape[2])).reshape(*held.shape[:2], -1)
    return out if held is J else out.transpose(0, 1)


def _times_triangle(rows: Tensor, T: Tensor) -> Tensor:
    """`rows` times T^T, without half of the products with T's zeros."""
    out = rows.new_empty(len(rows), len(T))
    half = len(T) // 2  # more blocks leave out more products, but are not faster
    torch.mm(rows, T[:half].T, out=out[:, :half])
    torch.mm(rows[:, half:], T[half:, half:].T, out=out[:, half:])
    return out


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """The Jacobian in a weight that is applied once per sample, in factors: M_k = J_k (x) phi."""

    J: Tensor  #: df/dz, (n, N, d), in the network's dtype
    weight: WeightMatrix
    at_x: Tensor | None  #: df/dx through the layer, (n, N, m), if the pass has it; else it is J W
    phi: Tensor  #: the layer's input, (n, m), in the network's dtype
    phi_norm2: Tensor  #: (n,) float64
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[str] = frozenset()  #: needs of the measures: what several of them share is computed in one walk
    roots: Roots = field(default_factory=Roots)
    _products: dict[tuple[str, RowProduct], Tensor] = field(default_factory=dict, init=False)

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> DenseJacobian:
        """Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        J = self.J if rows is None else self.J[..., rows.to(self.J.device)]
        phi = self.phi if columns is None else self.phi[:, columns.to(self.phi.device)]
        return replace(self, J=J, weight=weight, at_x=None, phi=phi, phi_norm2=norm2(phi))

    @cached_property
    def Jx(self) -> Tensor:
        """df/dx through the layer, J W, (n, N, m)."""
        return self.weight.at_input(self.J) if self.at_x is None else self.at_x

    def product(self, side: Literal["x", "z"], what: RowProduct) -> Tensor:
        """A row product of J (side "z") or Jx ("x"), computed with all others of this side that measures will read."""
        if (side, what) not in self._products:
            b = self.weight.b
            rows, x = (self.Jx, self.phi) if side == "x" else (self.J, None if b is None else b.expand(len(self.J), -1))
            also = {kind for kind, needs in _READ_FROM[side].items() if needs & self.wanted and kind != what}
            also -= {"along"} if x is None else set()
            missing = [kind for kind in (what, *sorted(also)) if (side, kind) not in self._products]
            self._products.update(
                {(side, kind): found for kind, found in row_products(rows, missing, self.C, x).items()}
            )
        return self._products[side, what]

    def gram(self) -> Tensor:
        """K of the weight, ||phi||^2 J J^T."""
        return self.phi_norm2[:, None, None] * self.bias_gram()

    def bias_gram(self) -> Tensor:
        """K of the bias, J J^T."""
        return self.product("z", "gram")

    def trace(self) -> Tensor:
        """tr(C K) of the weight, ||phi||^2 tr(C J J^T)."""
        return self.phi_norm2 * self.bias_trace()

    def bias_trace(self) -> Tensor:
        """tr(C K) of the bias, tr(C J J^T)."""
        return self._bias_trace

    @cached_property
    def _bias_trace(self) -> Tensor:
        root = self.roots.of(self.C)
        if "K" in self.wanted or root is None:
            return trace(self.C, self.bias_gram())
        if self.wanted & {"diagonal", "adaptive"}:
            return self.product("z", "weighted").sum(1)
        left, sizes = _unit(root, self.J.dtype)
        cuts = list(pieces(len(self.J), 4 * self.J[0].numel(), CACHE_BYTES))

        def lengths(of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            return {"": torch.cat([of(_mixed(left[piece], self.J[piece])) for piece in cuts])}

        return lengths2(lengths, self.J)[""] * sizes.square()

    def relative_trace(self) -> Tensor:
        """tr(C R)."""
        return trace(self.C, self.relative_gram())

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R = ||phi||^2 (J W)(J W)^T; `scale` is (1, m)."""
        if scale is None:
            return self.phi_norm2[:, None, None] * self.weight.gram_at_input(self.J)
        return norm2(self.phi.to(torch.float64) / scale)[:, None, None] * gram(self.Jx * scale)

    @cached_property
    def _phi2(self) -> Tensor:
        return self.phi.to(torch.float64).square()

    def diagonal(self) -> Tensor:
        """sum_i (sum_kk' C_kk' J_k J_k')_s phi_t^2, (d, m)."""
        return self.product("z", "weighted").T @ self._phi2

    def bias_diagonal(self) -> Tensor:
        """sum_i sum_kk' C_kk' J_k J_k' of each entry, (d,)."""
        return self.product("z", "weighted").sum(0)

    def columns(self) -> Tensor:
        """||C^(1/2) df/dx_j||^2 phi_j^2 for each column j of W, (n, m)."""
        return self.product("x", "weighted") * self._phi2

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """J_k times the layer's output, W phi and b, each if asked for, (n, N)."""
        total = self.product("z", "along") if bias else self.C.new_zeros(self.C.shape[:2])
        if not weight:
            return total
        z = self.phi @ self.weight.W[0].T.to(self.phi.dtype)
        return total + row_products(self.J, ["along"], x=z)["along"]

    def adaptive(self) -> Tensor:
        """sum_st W_st^2 (sum_kk' C_kk' J_k J_k')_s phi_t^2, (n,)."""
        return (self.product("z", "weighted") * (self._phi2 @ self.weight.squares[0].T)).sum(1)

    def adaptive_bias(self) -> Tensor:
        """sum_s b_s^2 (sum_kk' C_kk' J_k J_k')_s, (n,)."""
        assert self.weight.b is not None
        return self.product("z", "weighted") @ self.weight.b.square()


_READ_FROM: dict[str, dict[RowProduct, set[str]]] = {
    "z": {"gram": {"K"}, "weighted": {"diagonal", "adaptive"}, "along": {"along"}},
    "x": {"gram": {"G"}, "squares": {"squares"}, "weighted": {"columns"}, "along": {"along"}},
}
"""The needs of measures that read each row product of a dense layer's Jacobians at its output and at its input."""


@dataclass(frozen=True, eq=False)
class ExplicitJacobian:
    """The Jacobian stored entry by entry, for parameters that are not a matrix of a known product."""

    M: Tensor  #: df/dtheta, (n, N, size); (n, N, g, d, m) if theta is a weight
    theta: Tensor  #: values of the parameter, (size,) float64; (n, size) if each sample has its own entries
    C: Tensor  #: output Hessians, (n, N, N)
    matrix: WeightMatrix | None = None  #: theta as a weight, if it is one
    ids: Tensor | None = None  #: for a table: the rows of it that each sample's entries are, (n, T)
    table: int = 0  #: number of rows of that table

    @property
    def weight(self) -> WeightMatrix:
        """The weight as a matrix."""
        assert self.matrix is not None
        return self.matrix

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> ExplicitJacobian:
        """Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        M = self.M if rows is None else self.M[:, :, :, rows.to(self.M.device)]
        M = M if columns is None else M[..., columns.to(M.device)]
        return replace(self, M=M, theta=weight.W, matrix=weight)

    def gram(self) -> Tensor:
        """K = M M^T."""
        return gram(self.M)

    def bias_gram(self) -> Tensor:
        """0: such a weight's bias is a parameter of its own."""
        return torch.zeros_like(self.C)

    def trace(self) -> Tensor:
        """tr(C K)."""
        return trace(self.C, self.gram())

    def bias_trace(self) -> Tensor:
        """0, as `bias_gram`."""
        return self.C.new_zeros(len(self.C))

    def relative_trace(self) -> Tensor:
        """tr(C R)."""
        return trace(self.C, self.relative_gram())

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R, the Gram matrix of T M; `scale` is (g, m)."""
        T = self.weight.row_factor if scale is None else row_factor(self.weight.W * scale[:, None])
        found = torch.empty_like(self.C)
        for piece in self._pieces():
            M = self.M[piece] if scale is None else self.M[piece] / scale[:, None].to(self.M.dtype)
            found[piece] = _of_product(gram, T, M)
        return found

    def diagonal(self) -> Tensor:
        """sum_i sum_kk' C_kk' M_k M_k' of each entry: of a weight (g d, m), of a table or another parameter (size,)."""
        each = quadratic(self.C, self.M)
        if self.ids is None:
            return each.sum(0).flatten(0, max(0, self.M.ndim - 4))
        rows = each.reshape(self.ids.numel(), -1)
        return rows.new_zeros(self.table, rows.shape[1]).index_add_(0, self.ids.flatten(), rows).flatten()

    def bias_diagonal(self) -> Tensor:
        """Nothing, as `bias_gram`."""
        return self.C.new_zeros(0)

    def columns(self) -> Tensor:
        """||C^(1/2) sum_s W_sj M_sj||^2 for each column j of W, (n, g m)."""
        W = self.weight.W.to(self.M.dtype)
        return torch.cat([quadratic(self.C[piece], (self.M[piece] * W).sum(3)).flatten(1) for piece in self._pieces()])

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """sum_j theta_j df_k/dtheta_j, (n, N)."""
        theta = self.theta.reshape(-1, self.M.shape[2:].numel()).expand(len(self.M), -1)
        return (self.M.flatten(2).to(torch.float64) @ theta[..., None])[..., 0]

    def adaptive(self) -> Tensor:
        """sum_j theta_j^2 sum_kk' C_kk' M_kj M_k'j, (n,)."""
        return (quadratic(self.C, self.M) * self.theta.square()).flatten(1).sum(1)

    def adaptive_bias(self) -> Tensor:
        """0: such a weight's bias is a parameter of its own."""
        return self.C.new_zeros(len(self.C))

    def _pieces(self) -> Iterator[slice]:
        """Slices of samples whose M, twice, fits in the scratch memory."""
        return pieces(len(self.M), 16 * self.M.shape[1:].numel())


@dataclass(frozen=True, eq=False)
class SharedJacobian:
    """The Jacobian in a weight that is applied at P positions; the positions of several calls are concatenated."""

    J: Tensor  #: df/dz, (n, N, g, d, P)
    phi: Callable[[slice], Tensor]  #: features of a slice of samples, (n', g, m, P)
    weight: WeightMatrix
    C: Tensor  #: output Hessians, (n, N, N)
    wanted: frozenset[GramKind] = frozenset({"K", "R"})  #: quantities that will be read; one loop computes them
    roots: Roots = field(default_factory=Roots)
    at_x: Tensor | None = None  #: W^T J, (n, N, 1, m, P), if the pass has it
    _found: dict[GramKind, Tensor] = field(default_factory=dict, init=False)

    def block(self, weight: WeightMatrix, rows: Tensor | None, columns: Tensor | None) -> SharedJacobian:
        """Jacobian in some rows and columns of the weight, given as a weight; None for all."""
        J, phi = self.J if rows is None else self.J[:, :, :, rows.to(self.J.device)], self.phi
        if columns is not None:
            whole, at = phi, columns.to(J.device)
            phi = lambda piece: whole(piece)[:, :, at]  # noqa: E731
        return replace(self, J=J, phi=phi, weight=weight, at_x=None)

    def gram(self) -> Tensor:
        """K of the weight, (n, N, N)."""
        return self._get("K")

    def bias_gram(self) -> Tensor:
        """K of the bias, (sum_p J_p)(sum_p J_p)^T, (n, N, N)."""
        return gram(self.J.sum(4))

    def trace(self) -> Tensor:
        """tr(C K) of the weight, (n,)."""
        return trace(self.C, self._get("K")) if self._root is None else self._get("CK")

    def bias_trace(self) -> Tensor:
        """tr(C K) of the bias, (n,)."""
        return trace(self.C, self.bias_gram())

    def relative_trace(self) -> Tensor:
        """tr(C R), (n,)."""
        return trace(self.C, self._get("R")) if self._root is None else self._get("CR")

    @cached_property
    def _root(self) -> Tensor | None:
        """The root of C, if no Gram matrix is read: root^T M then takes the place of M."""
        return None if self.wanted & {"K", "R"} else self.roots.of(self.C)

    def relative_gram(self, scale: Tensor | None = None) -> Tensor:
        """R_kk' = <W^T M_k, W^T M_k'>, (n, N, N); with `scale` (g, m), R for W * scale and phi / scale.

        With the QR factorisation W^T = Q T, W^T M = Q (T M) and Q cancels in the products; T is min(d, m) x d.
        """
        if scale is None:
            return self._get("R")
        return self._products({"R": row_factor(self.weight.W * scale[:, None])}, scale=scale)["R"]

    def gram_at_input(self) -> Tensor:
        """Gram matrix of W^T J at all tokens, (n, N, N), for a layer that maps tokens one by one."""
        K = torch.empty_like(self.C)
        for piece in self._pieces():
            K[piece] = gram(_times(self.weight.row_factor, self.J[piece]).mT)
        return K

    def diagonal(self) -> Tensor:
        """Gauss-Newton diagonal of the weight, summed over samples, (g d, m)."""
        return self._get("diagonal").flatten(0, 1)

    def bias_diagonal(self) -> Tensor:
        """Gauss-Newton diagonal of the bias, summed over samples, (g d,)."""
        return quadratic(self.C, self.J.sum(4).flatten(2)).sum(0)

    def columns(self) -> Tensor:
        """||C^(1/2) sum_p phi_pj J_p w_j||^2 for each column w_j of W, (n, g m)."""
        return self._get("columns")

    def along(self, *, weight: bool, bias: bool) -> Tensor:
        """J_k times the layer's output, W phi and b, each if asked for, (n, N)."""
        total, W = self.C.new_zeros(self.C.shape[:2]), self.weight.W.to(self.J.dtype)
        for piece in self._pieces(1) if weight else ():
            J, z = self.J[piece], W @ self.phi(piece)
            if J.shape[2] == 1 and J.stride(3) == 1:  # tokens: J is read as it is stored
                J, z = J[:, :, 0].mT, z[:, 0].mT
            total[piece] = (J.flatten(2) @ z.flatten(1)[..., None])[..., 0]
        if bias:
            assert self.weight.b is not None
            total += self.J.sum(4).flatten(2).to(torch.float64) @ self.weight.b
        return total

    def adaptive(self) -> Tensor:
        """sum_st W_st^2 times entry st of the sample's own Gauss-Newton diagonal, (n,)."""
        return self._get("adaptive")

    def adaptive_bias(self) -> Tensor:
        """sum_s b_s^2 times entry s of the sample's own Gauss-Newton diagonal of the bias, (n,)."""
        assert self.weight.b is not None
        return quadratic(self.C, self.J.sum(4).flatten(2)) @ self.weight.b.square()

    @cached_property
    def cheapest(self) -> dict[str, str]:
        """The strategy that takes least for each part of the work, by multiplications of a sample or measured times."""
        (_, N, _, d, P), m = self.J.shape, self.weight.W.shape[2]
        double = self.J.dtype == torch.float64
        costs: dict[str, dict[str, float]] = {
            # M for Gram matrices: from the features, or from their factor E, which a QR factorisation gives
            "grams": {"features": N * d * m * P, "factor": N * d * P * P + 3 * m * P * P},
            # W^T M: as T M, or from W^T J, if the pass has it
            "R": {"factor of W": min(d, m) * d, "input": math.inf if self.at_x is None else P * m},
            # sum_s W_sj M_sj: at each position, or from M
            "columns": {"positions": P, "M": d},
            # sum_kk' C_kk' M_k M_k': from pairs of positions, which keep the digits of float32 alone, or from M
            "squares": {"pairs": math.inf if double else P * (P + 1), "M": N * (P / 4 + 12)},
        }
        # lengths of mixed M and W^T M: from pairs of positions, or from M by either way of "grams"; times were measured
        k, T = min(d, m), 0.75 * min(d, m) * d
        at_input = math.inf if self.at_x is None else P * m
        costs["R of pairs"] = {"factor of W": (T + k * P) * P, "input": at_input * (P + 20)}
        costs["lengths"] = {
            "pairs": math.inf if P < FEW_PAIRED else (N * d + m) * P * P + N * min(costs["R of pairs"].values()),
            "M": min(
                1.3 * N * (d * m * P + min(T, at_input) * m),
                1.15 * N * (d * P + min(T, at_input)) * P + 4 * m * P * P,
            ),
        }
        return {part: min(by, key=by.__getitem__) for part, by in costs.items()}

    def _get(self, what: GramKind) -> Tensor:
        if what not in self._found:
            wanted: set[Any] = {what, *self.wanted, *(("K",) if "R" in self.wanted else ())}
            if self._root is None:  # traces are those of Gram matrices
                wanted = {one.removeprefix("C") for one in wanted}
            self._compute(wanted - self._found.keys())
        return self._found[what]

    def _compute(self, wanted: set[GramKind]) -> None:
        """Compute quantities by the cheapest strategies; M is formed once for all that are made from it."""
        by, sums, root = self.cheapest, wanted - {"K", "R", "CK", "CR"}, self._root
        factors = {what: self.weight.row_factor if what in ("R", "CR") else None for what in sorted(wanted - sums)}
        if "columns" in sums and by["columns"] == "positions":
            self._columns_at_positions()
            sums = sums - {"columns"}
        mixed = root is not None and "columns" not in sums
        pairs = mixed and bool(sums) and by["squares"] == "pairs"
        # Products share the M of the sums if that is made from the features, whole, and mixed as theirs.
        apart = pairs or by["grams"] == "factor" or len(self._rows(self.J.shape[3])) > 1 or mixed != (root is not None)
        if apart or not sums:
            if root is None or not factors:
                self._found.update(self._products(factors))
            else:
                self._found.update(self._lengths(factors, root))
            factors = {}
        if pairs:
            self._squares_of_pairs(sums)
        elif sums or factors:
            self._sums_of_M(factors, sums, root if mixed else None)

    def _products(
        self,
        factors: Mapping[GramKind, Tensor | None],
        of: Callable[[Tensor], Tensor] | None = None,
        root: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> dict[GramKind, Tensor]:
        """Gram matrices of T M for each T (g, r, d), None for I, with phi divided by `scale` (g, m).

        With a root and `of` squared lengths, those of root^T T M, (n,): M is mixed, or J where it has fewer numbers.
        """
        d, P, m = *self.J.shape[3:], self.weight.W.shape[2]
        narrow, of = self.cheapest["grams"] == "factor", of or gram
        factors = {what: None if T is None else T.to(self.J.dtype) for what, T in factors.items()}
        found = {what: torch.empty_like(self.C if root is None else self.C[:, 0, 0]) for what in factors}
        left, sizes = (None, None) if root is None else _unit(root, self.J.dtype)
        for piece in self._pieces(P if narrow else m) if factors else ():
            J, phi = self.J[piece], self.phi(piece)
            if scale is not None:
                phi = phi / scale[..., None].to(phi.dtype)
            if narrow:
                phi = torch.linalg.qr(phi, mode="r").R
            by = None if left is None else left[piece]
            early, late = (by, None) if phi.shape[2] >= P else (None, by)
            J = _mixed(early, J)
            M = _mixed(late, self._M(J, phi)) if len(self._rows(d, phi.shape[2])) == 1 else None
            for what, T in factors.items():
                if T is not None and scale is None and self.at_x is not None and self.cheapest["R"] == "input":
                    found[what][piece] = self._in_rows(of, _mixed(early, self.at_x[piece]), phi, late)
                elif M is None:
                    found[what][piece] = self._in_rows(of, J if T is None else _times(T, J), phi, late)
                else:
                    found[what][piece] = of(M) if T is None else _of_product(of, T, M)
        return found if sizes is None else {what: lengths * sizes.square() for what, lengths in found.items()}

    def _lengths(self, factors: Mapping[GramKind, Tensor | None], root: Tensor) -> Mapping[GramKind, Tensor]:
        """Squared lengths of root^T T M for each T (g, r, d), None for I, (n,).

        With B = root^T T J, sum_k ||B_k phi^T||^2 = <sum_k B_k^T B_k, phi^T phi>, from pairs of positions, without M.
        Where positions cancel in M so far that this loses digits, the lengths are those of M.
        """
        if self.cheapest["lengths"] == "pairs" and self.J.device.type == "cpu":
            found = self._lengths_of_pairs(factors, root)
            if found is not None:
                return found
        return lengths2(partial(self._products, factors, root=root), self.J)

    def _lengths_of_pairs(
        self, factors: Mapping[GramKind, Tensor | None], root: Tensor
    ) -> Mapping[GramKind, Tensor] | None:
        """`_lengths` from pairs of positions; None where they have lost digits."""
        (g, _, P), (left, sizes) = self.J.shape[2:], _unit(root, self.J.dtype)
        at_input = self.at_x if self.cheapest["R of pairs"] == "input" else None
        found = {what: torch.empty_like(sizes) for what in factors}
        for piece in self._pieces(P):
            phi, B = self.phi(piece).flatten(0, 1), _mixed(left[piece], self.J[piece])
            X = torch.bmm(phi.mT, phi)
            for what, T in factors.items():
                if T is not None and at_input is not None:
                    rows = _mixed(left[piece], at_input[piece])
                else:
                    rows = B if T is None else _times(T, B)
                D = torch.zeros_like(X)
                for row in rows.unbind(1):
                    D.baddbmm_(row.flatten(0, 1).mT, row.flatten(0, 1))
                own, bound = (D * X).sum((1, 2), dtype=torch.float64), _diagonal_sums(D) * _diagonal_sums(X)
                if not ((own >= bound / (_LOST * P)) & (bound > SMALLEST2) & bound.isfinite()).all():
                    return None
                found[what][piece] = own.view(-1, g).sum(1)
        return {what: lengths * sizes.square() for what, lengths in found.items()}

    def _sums_of_M(
        self, factors: Mapping[GramKind, Tensor | None], sums: Collection[GramKind], root: Tensor | None
    ) -> None:
        """Compute products and sums over outputs from M, mixed by a root if given: for few samples, or rows of one."""
        n, W, squares2 = len(self.J), self.weight.W, self.weight.squares
        of = gram if root is None else length2  # of levelled numbers
        found: dict[GramKind, Tensor] = {
            what: torch.empty_like(self.C if root is None else self.C[:, 0, 0]) for what in factors
        }
        shapes: dict[GramKind, tuple[int, ...]] = {
            "diagonal": W.shape,
            "adaptive": (n,),
            "columns": (n, W.shape[0] * W.shape[2]),
        }
        found |= {what: W.new_zeros(shapes[what]) for what in sums}
        early = self.J.shape[4] <= W.shape[2]
        units = {what: 1.0 if T is None else power_of_two(T) for what, T in factors.items()}
        factors = {what: None if T is None else T / units[what] for what, T in factors.items()}
        for piece in self._pieces():
            J, phi, C, top = self.J[piece], self.phi(piece), self.C[piece], W.new_ones(1)
            by = None if root is None else root[piece]
            if early:
                J, top = _levelled(by, J)
            column = J.new_zeros(1)
            for rows in self._rows(W.shape[1]):
                M = self._M(J[:, :, :, rows], phi)
                if not early:
                    M, top = _levelled(by, M)
                for what, T in factors.items():
                    found[what][piece] = (of(M) if T is None else _of_product(of, T, M)) * (top * units[what]) ** 2
                if "columns" in sums:
                    column = column + (M * W[:, rows].to(M.dtype)).sum(3)
                if "diagonal" in sums or "adaptive" in sums:
                    # A sum of a few squares has the digits of M in float32, too.
                    squares = quadratic(C, M) if by is None else M.square().sum(1) * top.square()[:, None, None, None]
                    if "diagonal" in sums:
                        found["diagonal"][:, rows] += squares.sum(0)
                    if "adaptive" in sums:
                        found["adaptive"][piece] += squares.flatten(1) @ squares2[:, rows].flatten()
            if "columns" in sums:
                found["columns"][piece] = quadratic(C, column).flatten(1)
        self._found.update(found)

    def _columns_at_positions(self) -> None:
        """Compute columns as sum_p phi_pj (W^T J_p)_j, without M."""
        n, N, g, d, P = self.J.shape
        W, m = self.weight.W.to(self.J.dtype), self.weight.W.shape[2]
        found = self._found["columns"] = self.C.new_empty(n, g * m)
        for piece in pieces(n, 8 * N * g * P * (d + 2 * m)):
            J = self.J[piece]
            at = (J.mT.reshape(-1, g, P, d) @ W).view(len(J), N, g, P, m)
            found[piece] = quadratic(self.C[piece], (at * self.phi(piece).mT[:, None]).sum(3)).flatten(1)

    def _squares_of_pairs(self, sums: Collection[GramKind]) -> None:
        """Compute the diagonal and the adaptive sums from products of two positions, in float64.

        sum_kk' C_kk' M_kst M_k'st = sum_pq B_pqs phi_pt phi_qt with B_pqs = sum_kk' C_kk' J_kps J_k'qs, for C without
        negative eigenvalues.
        """
        n, N, g, d, P = self.J.shape
        diagonal, adaptive = torch.zeros_like(self.weight.W), self.C.new_zeros(n)
        i, j = torch.triu_indices(P, P, device=self.J.device)
        times = torch.where(i == j, 1.0, 2.0).to(self.C)
        for piece in pieces(n, 8 * g * len(i) * (self.weight.W.shape[2] + 2 * N * d)):
            J, phi, C = self.J[piece].to(torch.float64), self.phi(piece).to(torch.float64), self.C[piece]
            B = ((C @ J.flatten(2)).view(J.shape)[..., i] * J[..., j]).sum(1) * times  # (n', g, d, pairs)
            F = phi[..., i] * phi[..., j]  # (n', g, m, pairs)
            if "diagonal" in sums:
                diagonal += B.permute(1, 2, 0, 3).flatten(2) @ F.permute(1, 0, 3, 2).flatten(1, 2)
            if "adaptive" in sums:
                adaptive[piece] = (B * (self.weight.squares @ F)).sum((1, 2, 3))
        # They are below 0 only by rounding.
        found: dict[GramKind, Tensor] = {"diagonal": diagonal.clamp_(min=0), "adaptive": adaptive.clamp_(min=0)}
        self._found.update({what: found[what] for what in sums})

    def _M(self, J: Tensor, phi: Tensor) -> Tensor:
        """M for some samples and rows, (n', N, g, d', m), from J (n', N, g, d', P) and phi (n', g, m, P)."""
        n, N, g, d, P = J.shape
        m = phi.shape[2]
        if J.stride(3) == 1 and g == 1:  # tokens: a product for each sample needs no copy
            M = J.new_empty(n, N, d, m)
            for each, rows, features in zip(M, J[:, :, 0], phi[:, 0], strict=True):
                torch.bmm(rows, features.T.expand(N, P, m), out=each)
            return M[:, :, None]
        M = J.transpose(1, 2).reshape(-1, N * d, P) @ phi.flatten(0, 1).mT
        return M.reshape(-1, g, N, d, m).transpose(1, 2)

    def _in_rows(self, of: Callable[[Tensor], Tensor], J: Tensor, phi: Tensor, left: Tensor | None) -> Tensor:
        """`of` (a sum over entries) of M, mixed by `left`, for J (n', N, g, d, P), a few rows of M at a time."""
        slices = self._rows(J.shape[3], phi.shape[2])
        parts = [of(_mixed(left, self._M(J[:, :, :, rows], phi))) for rows in slices]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _pieces(self, m: int | None = None) -> Iterator[slice]:
        """Slices of samples whose M, with m columns, fits in the scratch memory."""
        (n, N, g, d, P), features = self.J.shape, self.weight.W.shape[2]
        return pieces(n, (N * d * ((m or features) + P) + features * P) * g * 8)

    def _rows(self, d: int, m: int | None = None) -> list[slice]:
        """Slices of d rows, so that one sample's M, with m columns, fits in the cache for a slice."""
        return list(pieces(d, self.J.shape[1] * self.J.shape[2] * (m or self.weight.W.shape[2]) * 8, CACHE_BYTES))


def _unit(root: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(root^T / sizes, sizes) of each sample, (n, r, N) and (n,), so that no C is too small for float32."""
    sizes = root.abs().amax((1, 2))
    sizes = torch.where((sizes > 0) & sizes.isfinite(), sizes, 1.0)
    return (root / sizes[:, None, None]).mT.to(dtype), sizes


def _mixed(left: Tensor | None, X: Tensor) -> Tensor:
    """left_i X_i of each sample, (n', r, ...), for left (n', r, N) and X (n', N, ...), stored as X is; X for None."""
    if left is None:
        return X
    turned = X.ndim > 3 and X.stride(-2) == 1
    held = X.mT if turned else X
    B = (left.to(X.dtype) @ held.flatten(2)).view(len(X), -1, *held.shape[2:])
    return B.mT if turned else B


def _levelled(root: Tensor | None, X: Tensor) -> tuple[Tensor, Tensor]:
    """(B, sizes) with root_i^T X_i = sizes_i B_i, for root (n', N, r) and X (n', N, ...); X and 1 for None.

    Whatever the units of a sample's C and X, squares of B's entries neither overflow nor underflow: samples beyond
    doubt keep their digits. Sizes are (n',).
    """
    if root is None:
        return X, X.new_ones(1)
    left, sizes = _unit(root, root.dtype)
    top = X.abs().amax(tuple(range(1, X.ndim))).to(sizes)
    top = torch.where((top > 0) & top.isfinite(), top, 1.0)
    return _mixed(left / top[:, None, None], X), sizes * top


def _of_product(of: Callable[[Tensor], Tensor], T: Tensor, M: Tensor) -> Tensor:
    """`of` (a sum over entries) of T M, for the triangular T (g, r, d) and M (n', N, g, d, m)."""
    T, (n, N, g, d, m) = T.to(M.dtype), M.shape
    if g > 1:
        return of(T @ M)
    if m <= FEW_COLUMNS:
        return of(_times_triangle(M[:, :, 0].mT.reshape(-1, d), T[0]).view(n, N, -1))
    rows, half = M.reshape(n * N, d, m), T.shape[1] // 2  # T is 0 left of its diagonal
    upper = torch.bmm(T[0, :half].expand(n * N, -1, -1), rows)
    lower = torch.bmm(T[0, half:, half:].expand(n * N, -1, -1), rows[:, half:])
    return of(upper.view(n, N, -1)) + of(lower.view(n, N, -1))


def _times(T: Tensor, J: Tensor) -> Tensor:
    """T J, (n', N, g, r, P), stored as J is, for the triangular T (g, r, d)."""
    if len(T) > 1:
        return T.to(J.dtype) @ J
    if J.stride(3) != 1:
        T, half = T[0].to(J.dtype), T.shape[1] // 2
        return torch.cat([T[:half] @ J, T[half:, half:] @ J[:, :, :, half:]], 3)
    rows = J[:, :, 0].mT
    return _times_triangle(rows.reshape(-1, J.shape[3]), T[0].to(J.dtype)).view(*rows.shape[:3], -1).mT[:, :, None]


WeightJacobian: TypeAlias = DenseJacobian | SharedJacobian | ExplicitJacobian
