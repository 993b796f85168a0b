"""Every number the slow way, in float64: a backward per sample and output on a batch of one, Hessians by explicit
double backward.

`torch.func` has no part in it: forward-over-reverse and `vmap(jacrev)` are wrong for some layers of torch 2.13. torch's
fused weight norm, whose double backward is wrong, is replaced by the formula it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from unittest.mock import patch

import torch
from literal_curvature import LossOf, twice_differentiable
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


@contextmanager
def literally() -> Iterator[None]:
    """Plain operations in place of fused ones."""
    by_hook = torch.nn.utils.weight_norm.__module__
    with (
        twice_differentiable(),
        patch("torch._weight_norm", _weight_norm),
        patch(f"{by_hook}._weight_norm", _weight_norm),
    ):
        yield


def gradients(of: Tensor, at: list[Tensor], **options: bool) -> list[Tensor]:
    """d of / d at, zeros where nothing depends."""
    if not of.requires_grad:
        return [torch.zeros_like(p) for p in at]
    found = torch.autograd.grad(of, at, allow_unused=True, **options)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, at, strict=True)]


def side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)


def hessian_at(risk: Callable[[], Tensor], at: list[Tensor]) -> Tensor:
    """The Hessian of the risk between some tensors, by a second backward for each of their entries."""
    with literally():
        g = side_by_side(gradients(risk(), at, create_graph=True))
        return torch.stack([side_by_side(gradients(entry, at, retain_graph=True)) for entry in g])


@contextmanager
def first_output(module: nn.Module) -> Iterator[list[Tensor]]:
    """What a module gives in its first call."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda m, i, o: seen.append(o) if not seen else None)
    try:
        yield seen
    finally:
        handle.remove()


class Truth:
    """The definitions of one network on its data; `net` in eval mode, of this alone."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, loss: LossOf) -> None:
        self.net, self.x, self.y, self.loss = net.eval(), x, y, loss
        self.parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(f (n, N), df/dtheta (n, N, P), df/dinput (n, N, M), the input (n, M))."""
        with literally():
            return tuple(torch.stack(part) for part in zip(*map(self._row, range(len(self.x))), strict=True))

    def _row(self, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        one = self.x[i : i + 1]
        if one.is_floating_point():
            at = one.clone().requires_grad_()
            f = self.net(at.clone())[0].flatten()
        else:
            with first_output(self.net.embed) as seen:
                f = self.net(one)[0].flatten()
            at = seen[0]
        every = [gradients(out, [*self.parameters.values(), at], retain_graph=True) for out in f]
        J = torch.stack([side_by_side(row[:-1]) for row in every])
        return f.detach(), J, torch.stack([row[-1].flatten() for row in every]), at.detach().flatten()

    @cached_property
    def C(self) -> Tensor:
        """d2 loss / d output2 of each sample, (n, N, N); a loss sees its own sample alone."""
        leaf = self.rows[0].clone().requires_grad_()
        (g,) = gradients(self.loss(leaf, self.y).sum(), [leaf], create_graph=True)
        return torch.stack([gradients(out.sum(), [leaf], retain_graph=True)[0] for out in g.unbind(1)], 1)

    def risk(self) -> Tensor:
        """The mean loss."""
        return self.loss(self.net(self.x.clone()).flatten(1), self.y).mean()

    @cached_property
    def H(self) -> Tensor:
        """The risk's Hessian in all parameters."""
        return hessian_at(self.risk, list(self.parameters.values()))

    def slice(self, name: str) -> slice:
        """Where a parameter lies among all."""
        start = 0
        for other, p in self.parameters.items():
            if other == name:
                return slice(start, start + p.numel())
            start += p.numel()
        raise KeyError(name)

    def by_parameter(self, per_entry: Tensor) -> dict[str, float]:
        """Sums of something (P,) over each parameter."""
        return {name: float(per_entry[self.slice(name)].sum()) for name in self.parameters}

    @cached_property
    def sizes_of_parameters(self) -> Tensor:
        """||df_i/dtheta||_F^2, (n,)."""
        return self.rows[1].square().sum((1, 2))

    @cached_property
    def traces(self) -> Tensor:
        """tr(C_i J_i J_i^T), (n,)."""
        J = self.rows[1]
        return torch.einsum("nkl,nka,nla->n", self.C, J, J)

    @cached_property
    def norms(self) -> Tensor:
        """||df_i/dx||_2, (n,)."""
        return torch.linalg.matrix_norm(self.rows[2], 2)

    @cached_property
    def invariant(self) -> Tensor:
        """sum_p x_ip^2 ||df_i/dx_p||^2, (n,)."""
        return (self.rows[2].square().sum(1) * self.rows[3].square()).sum(1)

    def of_weight(self, name: str, second: bool) -> tuple[Tensor, Tensor | None]:
        """(Gauss-Newton matrix, Hessian) in one weight alone."""
        J = self.rows[1][..., self.slice(name)]
        GN = torch.einsum("nka,nkl,nlb->ab", J, self.C, J) / len(J)
        return GN, hessian_at(self.risk, [self.parameters[name]]) if second else None


def plainly(net: nn.Module) -> bool:
    """Take every reparametrised tensor of the network as it acts, a parameter; whether there was any."""
    changed = False
    for module in net.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):
                parametrize.remove_parametrizations(module, name)
            changed = True
        for remove in (nn.utils.remove_weight_norm, nn.utils.remove_spectral_norm):
            try:
                remove(module)
            except ValueError:
                continue
            changed = True
    return changed


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """The places (g, d, m) of a weight's entries as matrices, rows what comes out, in the weight as it is stored."""
    place = torch.arange(weight.numel())
    if isinstance(module, _ConvTransposeNd):
        i, o = module.in_channels // module.groups, module.out_channels // module.groups
        return place.reshape(module.groups, i, o, -1).transpose(1, 2).flatten(2)
    return place.reshape(module.groups if isinstance(module, _ConvNd) else 1, -1, weight[0].numel())


def definition_3(A: Tensor, w: Tensor, place: Tensor) -> float:
    """sum_{s,s'} <w_s, w_s'> Tr A_{s,s'} over the rows of each block."""
    total = 0.0
    for block in place:
        for s in block:
            for t in block:
                total += float(w[s] @ w[t]) * float(A[s, t].sum())
    return total


def along_columns(A: Tensor, w: Tensor, place: Tensor) -> float:
    """sum_j w_j^T A_jj w_j over the columns of each block."""
    return sum(float(w[j] @ A[j][:, j] @ w[j]) for block in place for j in block.T)
