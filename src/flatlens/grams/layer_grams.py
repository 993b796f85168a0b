"""What a measure is handed: one place of the network, one chunk of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.dense import DenseJacobian
from flatlens.grams.shared import ExplicitJacobian, SharedJacobian
from flatlens.problem.sequences import Tokens, onto_softmax, softmax_of


@dataclass(eq=False)
class LayerGrams:
    """The Gram matrices of one place, for n samples of a chunk; each computed when first asked for.

    A place is the network's input (input side only), a call of a linear layer (both sides; a second call of the same
    weight has its input side alone, the first carries the weight), or a parameter outside linear layers (parameter
    side only).
    """

    C: Tensor  #: output Hessians d2 l_i / df2, (n, N, N), scaled so that the risk is the mean of l_i
    f: Tensor  #: the outputs, (n, N)
    precision: float  #: eps of the arithmetic the slopes were computed in
    input_gram: Callable[[], Tensor] | None = None  #: makes G, where the place has an input side
    input_squares: Callable[[], Tensor] | None = None  #: makes ||df/dx_p||^2 of each input entry p, (n, M)
    x: Tensor | None = None  #: this place's input, (n, M)
    x_norm2: Tensor | None = None  #: ||x_i||^2 of it, (n,)
    weight: DenseJacobian | SharedJacobian | ExplicitJacobian | None = None
    counts_weight: bool = False  #: whether the weight is among the parameters measured
    counts_bias: bool = False
    has_derivative: bool = True  #: whether the derivative in the whole weight is had, so that R is about it
    pure: bool = False  #: whether the layer is dense and does nothing else, so that R follows from G
    feature_scale: Tensor | None = None  #: spread of each feature over the data, (m,) or (g, m), where asked for
    tokens: Tokens | None = None  #: where the outputs are rows of tokens: which of them count

    @cached_property
    def G(self) -> Tensor:
        """The input side: (df/dx)(df/dx)^T, (n, N, N)."""
        assert self.input_gram is not None
        return self.input_gram()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of G, ascending, not negative, (n, N)."""
        return _eigenvalues(self.G)

    @cached_property
    def softmax_eigenvalues(self) -> Tensor:
        """Of P G P, the Gram of softmax(f), P = diag(p) - p p^T: ascending, not negative, (n, N)."""
        p = softmax_of(self.f, self.tokens)
        half = onto_softmax(p, self.G.transpose(0, 1), self.tokens)  # rows of G, (N, n, N)
        return _eigenvalues(onto_softmax(p, half.permute(2, 1, 0), self.tokens).transpose(0, 1))

    @cached_property
    def rows(self) -> Tensor:
        """How many outputs each sample has, (n,): N, less where tokens are masked."""
        n, N = self.f.shape
        if self.tokens is None:
            return torch.full((n,), N, device=self.f.device)
        counted = self.tokens.counted
        return counted.sum(1) * (N // counted.shape[1])

    @cached_property
    def K_weight(self) -> Tensor:
        """The weight's parameter side: (df/dW)(df/dW)^T, (n, N, N)."""
        assert self.weight is not None
        return self.weight.gram()

    @cached_property
    def K_bias(self) -> Tensor:
        """The bias's parameter side."""
        assert isinstance(self.weight, DenseJacobian | SharedJacobian)
        return self.weight.bias_gram()

    @cached_property
    def K(self) -> Tensor:
        """Weight and bias together, as far as they are among the parameters measured."""
        if self.counts_weight and self.counts_bias:
            return self.K_weight + self.K_bias
        if self.counts_weight:
            return self.K_weight
        return self.K_bias if self.counts_bias else torch.zeros_like(self.C)

    @cached_property
    def R(self) -> Tensor:
        """The flatness family's Gram: (W^T M_k . W^T M_k')_kk', (n, N, N); ||phi||^2 G for a dense layer."""
        if isinstance(self.linear, SharedJacobian):
            return self.linear.relative_gram()
        if self.input_gram is None or not self.pure:
            return self.linear.relative_gram()
        return self.linear.phi_norm2[:, None, None] * self.G

    def relative_gram(self, scale: Tensor) -> Tensor:
        """R of the layer that reads phi / scale with weight W * scale: the same function in other units."""
        return self.linear.relative_gram(scale)

    @property
    def linear(self) -> DenseJacobian | SharedJacobian:
        """The weight of a linear layer."""
        assert isinstance(self.weight, DenseJacobian | SharedJacobian)
        return self.weight

    @cached_property
    def adaptive(self) -> Tensor:
        """sum_j theta_j^2 ||C^(1/2) df/dtheta_j||^2 over the parameters measured here, (n,)."""
        assert self.weight is not None
        total = self.C.new_zeros(len(self.C))
        if self.counts_weight:
            total = total + self.weight.adaptive()
        if self.counts_bias:
            total = total + self.linear.adaptive_bias()
        return total


def _eigenvalues(grams: Tensor) -> Tensor:
    """Eigenvalues of positive semidefinite matrices, ascending; NaN of those that overflow left without numbers."""
    there = grams.isfinite().all(2).all(1)
    values: Tensor = torch.linalg.eigvalsh(grams.where(there[:, None, None], 0.0))
    return values.clamp(min=0).where(there[:, None], torch.nan)


@dataclass(eq=False)
class ChunkGrams:
    """One chunk: the outputs' side, the network's input, its layers and the parameters outside them."""

    number: int  #: tells where in the data the chunk is
    losses: Tensor  #: (n,), scaled as C is
    correct: Tensor | None  #: (n,), None where targets are no classes
    input: LayerGrams | None
    layers: dict[str, LayerGrams]  #: linear calls, in execution order
    others: dict[str, LayerGrams]  #: parameters outside linear layers, by name
