"""The definitions of a case of `modern`, over the parameters that are trained: explicit Jacobians and Hessians, sample
by sample, sentences without their padding."""

from __future__ import annotations

import pytest
import torch
from literal import definition_3
from literal_curvature import along_columns, twice_differentiable
from modern import Case
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import flatlens as fl


class Literal:
    """The definitions of one case, over the parameters that are trained."""

    def __init__(self, this: Case) -> None:
        self.case, self.n = this, this.n
        self.values = {name: p.detach() for name, p in this.net.named_parameters()}
        self.names = [name for name, p in this.net.named_parameters() if p.requires_grad]
        flat = torch.cat([self.values[name].flatten() for name in self.names])
        with twice_differentiable():
            self.f = [this.rows(self.values, i) for i in range(self.n)]
            self.J = [jacobian(lambda v, i=i: this.rows(self.at(v), i), flat, vectorize=True) for i in range(self.n)]
            self.H = hessian(self.risk, flat, vectorize=True)
            self.C = [hessian(lambda f, i=i: this.cost(f, i), f) for i, f in enumerate(self.f)]
            self.Jx = [
                jacobian(lambda x, i=i: this.at_input(x, i), this.inputs[i]).reshape(len(self.f[i]), -1)
                for i in range(self.n)
            ]
        self.GN = sum(J.T @ C @ J for J, C in zip(self.J, self.C, strict=True)) / self.n

    def at(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self.values[name].numel() for name in self.names])
        moved = {name: part.reshape(self.values[name].shape) for name, part in zip(self.names, parts, strict=True)}
        return {**self.values, **moved}

    def risk(self, flat: Tensor) -> Tensor:
        return sum(self.case.cost(self.case.rows(self.at(flat), i), i) for i in range(self.n)) / self.n

    def mean(self, of) -> float:
        return sum(float(of(i)) for i in range(self.n)) / self.n

    def columns(self, J: Tensor, name: str) -> Tensor:
        """The columns of one parameter."""
        sizes = [self.values[other].numel() for other in self.names]
        return J.split(sizes, dim=1)[self.names.index(name)]

    def block(self, A: Tensor, name: str, transposed: bool) -> Tensor:
        """The rows and columns of one weight (d, m), row by row."""
        start = 0
        for other in self.names:
            size = self.values[other].numel()
            if other == name:
                place = torch.arange(start, start + size).reshape(self.values[name].shape)
                place = (place.T if transposed else place).flatten()
                return A[place][:, place]
            start += size
        raise KeyError(name)


def close(value: float, truth: float, tolerance: float = 1e-9) -> None:
    assert value == pytest.approx(float(truth), rel=tolerance, abs=1e-12)


def top(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A, 2)


def assert_flatness(truth: Literal, lens: fl.Lens, report: fl.Report) -> None:
    """Of every trained weight, tied ones included: relative flatness by Definition 3, and its kin."""
    checked = {name: w.parameter for name, w in lens.plan.weights.items() if w.measured}
    assert checked
    for name, parameter in checked.items():
        transposed = "c_attn" in name or "c_proj" in name or "c_fc" in name  # GPT-2 stores weights as (m, d)
        H, GN = (truth.block(A, parameter, transposed) for A in (truth.H, truth.GN))
        value = truth.values[parameter]
        W = value.T if transposed else value.flatten(1)
        close(report["relative_flatness", name].value, definition_3(H, W, 1), 1e-8)
        close(report["relative_flatness_ggn", name].value, definition_3(GN, W, 1))
        close(report["kappa_trace", name].value, W.square().sum() * H.trace(), 1e-8)
        flat = nn.Linear(W.shape[1], W.shape[0], bias=False)
        flat.weight = nn.Parameter(W)
        close(report["neuron_flatness", name].value, along_columns(H, flat).sum(), 1e-8)
        close(report["neuron_flatness_ggn", name].value, along_columns(GN, flat).sum())
        squares = truth.mean(lambda i, p=parameter: truth.columns(truth.J[i], p).square().sum())
        if W.shape == value.shape:  # the operator of a convolution has another norm than its kernel
            close(report["matrix_normalized_sharpness", name].value, top(W) * squares**0.5)
