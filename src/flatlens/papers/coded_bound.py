"""X17's bound as the authors' code computes it (the notebook on representativeness, and what it calls).

It differs from the text in nearly everything, so that nothing of it is shared with X17's own study:

- scikit-learn's `make_classification`: 600 samples of 10 features, 3 of them informative, 4 redundant and 3 noise.
- Each of three folds in turn gives 50 training samples; the other two folds are the test samples.
- The head is scikit-learn's ridge classifier on labels +-1; gap and Hessian are of squared errors on labels 0 and 1.
- tanh is not undone where inputs are sought: only the four linear layers are, by least squares. The network's features
  are tanh of its last layer, so they are not those that the head was trained on.
- The Hessian is that of fc4, the layer below the features, of its 16 inputs: Tr H / 16, with the weights of the layer
  after its first 10 columns are multiplied by the variances of the 10 features; divided by 10 and times 0.1^2.
- Representativeness is the mean 0-1 error of tenfold cross-validation among the 50, less that of a kernel density
  estimate whose values are divided by the number of samples twice. Its delta of 0.01 cancels.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from flatlens.training.optimisers import solution

SAMPLES, FOLDS, TRAINED_ON, CROSS = 600, 3, 50, 10


class CodedBound(NamedTuple):
    """The numbers of one fold."""

    bound: float
    gap: float
    representativeness: float
    error: float  #: the mean 0-1 error of the cross-validation alone


@lru_cache(1024)
def coded_bound(separation: float, seed: int) -> tuple[CodedBound, ...]:
    """Return bound and gap of each fold of one sample.

    >>> one = coded_bound(1.0, seed=0)[0]
    >>> 0 <= one.error <= 1, abs(one.representativeness - one.error) < 0.01
    (True, True)
    """
    from sklearn.datasets import make_classification  # only here: the extra `study` has it

    features, labels = make_classification(SAMPLES, 10, n_informative=3, n_redundant=4, class_sep=separation,
                                           random_state=seed)  # fmt: skip
    phi, y = torch.from_numpy(features), torch.from_numpy(labels).double()
    generator = torch.Generator().manual_seed(seed)
    folds = torch.randperm(SAMPLES, generator=generator).chunk(FOLDS)
    found = []
    for at in range(FOLDS):
        train, test = folds[at][:TRAINED_ON], torch.cat([fold for other, fold in enumerate(folds) if other != at])
        error, representativeness = cross_validated(phi[train], y[train], generator)
        W, b = head(phi[train], y[train])
        layers = network(seed * FOLDS + at)
        sides = [flatness(layers, W, b, preimages(layers, phi[rows]), y[rows]) for rows in (train, test)]
        (kappa, train_loss), (_, test_loss) = sides
        bound = 0.1**2 / phi.shape[1] * kappa + representativeness
        found.append(CodedBound(bound, test_loss - train_loss, representativeness, error))
    return tuple(found)


def head(phi: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return W (1, m) and b (1,) of a ridge classifier: ridge regression on labels +-1."""
    return solution(phi, 2 * y[:, None] - 1, 1.0)


def cross_validated(phi: Tensor, y: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """Return the mean 0-1 error of tenfold cross-validation, and the code's representativeness, which is nearly it."""
    order = torch.randperm(len(phi), generator=generator)
    errors, found = [], []
    for held_out in order.chunk(CROSS):
        kept = order[~torch.isin(order, held_out)]
        W, b = head(phi[kept], y[kept])

        def wrong(rows: Tensor, W: Tensor = W, b: Tensor = b) -> Tensor:
            return ((phi[rows] @ W.T + b).squeeze(1) > 0).double().sub(y[rows]).square()

        weights = phi[kept].norm(dim=1)
        kernel = torch.exp(-torch.cdist(phi[held_out], phi[kept]) / 2) / sqrt(2 * pi)  # of the root of the distance
        of_density = kernel @ (weights / weights.sum() * wrong(kept)) / len(kept)
        errors.append(float(wrong(held_out).mean()))
        found.append(float((wrong(held_out) - of_density).mean()))
    return sum(errors) / CROSS, sum(found) / CROSS


@lru_cache(128)
def network(seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """Return weight, bias and right inverse of each of four layers: Glorot's uniform weights, PyTorch's biases."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(reach: float, *shape: int) -> Tensor:
        return reach * (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1)

    layers = []
    for inputs, outputs in pairwise((784, 512, 128, 16, 10)):
        W = uniform(sqrt(6 / (inputs + outputs)), outputs, inputs)
        layers.append((W, uniform(1 / sqrt(inputs), outputs), torch.linalg.solve(W @ W.T, W).T))
    return tuple(layers)


def preimages(layers: tuple[tuple[Tensor, Tensor, Tensor], ...], phi: Tensor) -> Tensor:
    """Return the inputs (n, 784) that the linear layers alone map to these features: the shortest at each layer."""
    for _, b, back in reversed(layers):
        phi = (phi - b) @ back.T
    return phi


def flatness(
    layers: tuple[tuple[Tensor, Tensor, Tensor], ...], W: Tensor, b: Tensor, x: Tensor, y: Tensor
) -> tuple[float, float]:
    """Return the code's relative flatness of fc4 on these samples, and the mean squared error."""
    below = x
    for weight, bias, _ in layers[:-1]:
        below = torch.tanh(below @ weight.T + bias)
    weight, bias, _ = layers[-1]
    phi = torch.tanh(below @ weight.T + bias)
    off = (phi @ W.T + b).squeeze(1) - y
    # Tr H_ij = mean 2 (v_i s'_i v_j s'_j + [i = j] off v_i s''_i) ||h||^2, s = tanh
    slope = W * (1 - phi.square())
    bend = W * -2 * phi * (1 - phi.square())
    size = below.square().sum(1)
    traces = 2 * (slope.T @ (slope * size[:, None]) + torch.diag((off * size) @ bend)) / len(x)
    scaled = weight.clone()
    scaled[:, : phi.shape[1]] *= phi.var(0, correction=0)  # columns of fc4 by the variances of its outputs, as coded
    return float((scaled @ scaled.T * traces).sum() / weight.shape[1]), float(off.square().mean())
