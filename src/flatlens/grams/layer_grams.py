"""The input of measures: the Gram matrices of one place of the network, for one chunk of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from flatlens.grams.contractions import RowProduct
from flatlens.grams.weight_jacobians import DenseJacobian, SharedJacobian, WeightJacobian
from flatlens.problem.row_layout import onto_softmax, softmax_of


@dataclass(eq=False)
class LayerGrams:
    """The Gram matrices of one place, for the n samples of a chunk; each is computed on first use.

    A place has an input side (derivatives in its input: G), a parameter side (derivatives in its weight and bias: K,
    R), or both. The network's input has an input side only. A call of a linear layer has both, but a second call of the
    same weight has its input side only: the weight belongs to the first. A parameter outside linear layers has a
    parameter side only.

    >>> import flatlens as fl, torch
    >>> about = dict(id="own", family="compression", symbol="", source="", unit="")
    >>> @fl.measures.per_sample(**about, place="input", needs={"G"})
    ... def squares(g):
    ...     return g.G.diagonal(dim1=1, dim2=2).sum(1)  # ||df/dx_i||_F^2
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> report = fl.measure(fl.Lens(problem), [squares])
    >>> abs(report["squares"].value - net.weight.square().sum().item()) < 1e-6
    True
    """

    C: Tensor  #: output Hessians d2 l_i / df2, (n, N, N), scaled so that the risk is the mean of l_i
    f: Tensor  #: outputs, (n, N)
    precision: float  #: machine epsilon of the arithmetic that computed the Jacobians
    input_side: Callable[[], Mapping[RowProduct, Tensor]] | None = None
    """Computes "gram", which is G; and if measures need them "squares": ||df/dx_p||^2 of each input entry p, (n, M),
    and "along": df/dx x, (n, N), where it equals <df/dW, W>."""
    x: Tensor | None = None  #: input of the place, (n, M)
    x_norm2: Tensor | None = None  #: ||x_i||^2, (n,)
    weight: WeightJacobian | None = None
    counts_weight: bool = False  #: whether the weight is among the measured parameters
    counts_bias: bool = False  #: whether the bias is
    has_derivative: bool = True  #: whether the derivative in the whole weight is known, so that R is that of the weight
    pure: bool = False  #: whether the layer's calls multiply, add the bias and do nothing else
    feature_scale: Tensor | None = None  #: spread of each feature over the data, (m,) or (g, m), if requested
    counted: Tensor | None = None  #: for outputs of tokens: which tokens count, (n, T)
    slope: Tensor | None = None
    """dl_i/df_i, (n, N), scaled so that mean_i slope slope^T weighs samples as the risk does."""
    softmax_size: int = 0  #: outputs that share each softmax at the network's end, 0 without: see `closing_softmax`
    rounding: Tensor | None = None
    """How far rounding moves df/dx, over its length, (n,), as the certificate shows it: its error may be larger where
    the forward pass itself cancels. None where the certificate does not test it."""
    shared: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict, init=False)
    """Numbers that several measures read, by name: each is computed for the first of them."""

    @cached_property
    def _input(self) -> Mapping[RowProduct, Tensor]:
        assert self.input_side is not None
        return self.input_side()

    @property
    def G(self) -> Tensor:
        """Return (df/dx)(df/dx)^T, (n, N, N)."""
        return self._input["gram"]

    @property
    def input_squares(self) -> Tensor:
        """Return ||df/dx_p||^2 of each input entry p, (n, M)."""
        return self._input["squares"]

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of G, (n, N), ascending and not negative."""
        return _eigenvalues(self.G)

    @cached_property
    def softmax_eigenvalues(self) -> Tensor:
        """Return those of P G P, the Gram matrix of softmax(f), with P = diag(p) - p p^T."""
        p = softmax_of(self.f, self.counted)
        half = onto_softmax(p, self.G.transpose(0, 1), self.counted)  # rows of G, (N, n, N)
        return _eigenvalues(onto_softmax(p, half.permute(2, 1, 0), self.counted).transpose(0, 1))

    @cached_property
    def outputs(self) -> Tensor:
        """Return the number of outputs of each sample, (n,): N, less the outputs of masked tokens."""
        n, N = self.f.shape
        if self.counted is None:
            return torch.full((n,), N, device=self.f.device)
        return self.counted.sum(1) * (N // self.counted.shape[1])

    @cached_property
    def K_weight(self) -> Tensor:
        """Return (df/dW)(df/dW)^T, (n, N, N)."""
        return self.linear.gram()

    @cached_property
    def K(self) -> Tensor:
        """Return K of the weight plus K of the bias, (df/db)(df/db)^T, without those that are not measured."""
        if not self.counts_bias:
            return self.K_weight if self.counts_weight else torch.zeros_like(self.C)
        return self.K_weight + self.linear.bias_gram() if self.counts_weight else self.linear.bias_gram()

    @cached_property
    def R(self) -> Tensor:
        """Return R_kk' = <W^T M_k, W^T M_k'> with M_k = df_k/dW, (n, N, N); for a dense layer ||phi||^2 G."""
        if isinstance(self.weight, DenseJacobian) and self.pure and self.input_side is not None:
            return self.weight.phi_norm2[:, None, None] * self.G
        return self.linear.relative_gram()

    def relative_gram(self, scale: Tensor) -> Tensor:
        """Return R of the layer with weight W * scale and features phi / scale: the same function in other units."""
        return self.linear.relative_gram(scale)

    @property
    def linear(self) -> WeightJacobian:
        """Return the Jacobian in the place's weight or parameter, which it has."""
        assert self.weight is not None
        return self.weight

    @property
    def at_output(self) -> Tensor:
        """Return df/dz of a linear layer's output, (n, N, d); (n, N, g, d, P) if it acts at several positions."""
        assert isinstance(self.weight, DenseJacobian | SharedJacobian)
        return self.weight.J

    @cached_property
    def adaptive(self) -> Tensor:
        """Return sum_j theta_j^2 ||C^(1/2) df/dtheta_j||^2 over the place's measured parameters, (n,)."""
        total = self.C.new_zeros(len(self.C))
        if self.counts_weight:
            total = total + self.linear.adaptive()
        if self.counts_bias:
            total = total + self.linear.adaptive_bias()
        return total

    @property
    def along(self) -> Tensor:
        """Return sum_j theta_j df/dtheta_j over the place's measured parameters, (n, N)."""
        known = self._input.get("along") if self.counts_weight and self.input_side is not None else None
        rest = self.linear.along(weight=self.counts_weight and known is None, bias=self.counts_bias)
        return rest if known is None else known + rest


def _eigenvalues(grams: Tensor) -> Tensor:
    """Return the eigenvalues of positive semidefinite matrices, ascending; NaN for matrices that overflowed."""
    there = grams.isfinite().all(2).all(1)
    values: Tensor = torch.linalg.eigvalsh(grams.where(there[:, None, None], 0.0))
    return values.clamp(min=0).where(there[:, None], torch.nan)


@dataclass(eq=False)
class ChunkGrams:
    """The results of the pass for one chunk: losses, network's input, layers, parameters outside layers."""

    number: int  #: number of the chunk's first sample, unique in the data
    losses: Tensor  #: losses, (n,), scaled as C
    correct: Tensor | None  #: whether each sample is classified correctly, (n,); None if targets are not classes
    outputs: LayerGrams  #: the outputs alone, with neither side
    input: LayerGrams | None
    layers: dict[str, LayerGrams]  #: calls of linear layers, in execution order
    others: dict[str, LayerGrams]  #: parameters outside linear layers, by name
    parts: dict[str, LayerGrams]  #: projections and heads of attention, if they are asked for, by name
