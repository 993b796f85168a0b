"""Inputs that a tanh network maps to given features: "Relative Flatness and Generalization", appendix C.1, step 3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from flatlens.data.clusters import clusters
from flatlens.data.split import Split
from flatlens.errors import BadInput, BadModel
from flatlens.models import MLP

REACH = 0.9
"""The largest feature, in absolute value, once they are scaled: atanh(0.9) is 1.5."""

BOX = 0.95
"""Hidden values are sought within this; at 1 atanh is infinite."""

AIM = 0.9
"""The sweeps project onto [-AIM, AIM], a little inside the box: they then end within it, on a solution."""

SHRINK = 0.8
"""The factor of the features where some sample has no hidden values in the box."""

SHRINKS = 20
"""0.8^20 is 0.01: beyond, it is the biases that leave no room."""

CLUSTER_SCALE = 1 / 256
"""The scale of the clusters' features in `inverted_clusters`: the same for every seed, and far within reach of tanh."""

SWEEPS = 300
"""Projections onto the box and back; those that have an inner point in common meet long before."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Inversion:
    """Inputs, the features they were made for, and how far the network's features are from these.

    The errors are those of the network as it is, in its own precision, on the inputs as they are handed over.
    """

    split: Split  #: inputs in place of features, in the network's precision; the same labels
    features: Split  #: the features times `scale`, in the network's precision: what it maps the inputs to
    scale: float  #: one number for all features of all samples; 1 where they were within reach
    max_error: float  #: the largest |network(x) - feature|
    rms_error: float  #: the root of their mean square
    clipped: int  #: samples of which a hidden value had to be cut off; 0 but for biases that leave no room


def inverted(features: Split, network: nn.Sequential, reach: float = REACH, scale: float | None = None) -> Inversion:
    """Return the data set whose features in `network` are `features`.

    `network` is an `nn.Sequential` of Linear and Tanh. From its output backwards, tanh is undone by atanh, and
    W x + b = z solved for x. A layer with fewer outputs than inputs has many solutions; taken is the shortest, and
    where that leaves [-0.95, 0.95] (its own atanh must exist), the solution in there which projections in turn onto
    the box and the solutions lead to. All in float64.

    Features beyond (-1, 1) are no outputs of a tanh: all are multiplied by one `scale`, the same in the training and
    the test data, so that the largest is `reach`. Where some sample then still has no solution in the box, the scale
    is lowered by steps of 0.8 until all have. A given `scale` is used as it is, or refused. What sees the features next
    (a linear head) is to be trained on the scaled ones, `Inversion.features`.

    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh()).double()
    >>> _ = nn.init.constant_(net[0].weight, 1.0)
    >>> x = torch.tensor([[0.5], [-0.5]], dtype=torch.float64)
    >>> found = inverted(Split("two", x, torch.tensor([0, 1]), x, torch.tensor([0, 1]), classes=2), net)
    >>> [round(v, 9) for v in found.split.x[0].tolist()], found.max_error < 1e-15  # half of atanh(0.5) each
    ([0.274653072, 0.274653072], True)

    Raises:
        BadModel: other layers than Linear and Tanh.
        BadInput: features of another number than the network's outputs, not finite, or out of reach at that scale.
    """
    if not 0 < reach < 1:
        raise BadInput(f"inverted(reach={reach}): a number between 0 and 1 is needed")
    layers = _layers(network)
    wanted = torch.cat([features.x, features.test_x]).double()
    _check(wanted, next(m for m in reversed(layers) if isinstance(m, nn.Linear)))
    largest, ends = float(wanted.abs().max()), isinstance(layers[-1], nn.Tanh)
    back = _Backwards(layers)
    if scale is not None:
        if ends and largest * scale >= 1:
            raise BadInput(f"inverted(scale={scale:g}): {largest:g} times it is no output of a tanh; set less")
        inputs, clipped = back(wanted * scale)
        if clipped.any():
            raise BadInput(f"inverted(scale={scale:g}): out of reach for {int(clipped.sum())} samples; set less")
        return _result(features, network, inputs, wanted * scale, scale, 0)
    scale = min(1.0, reach / largest) if ends else 1.0
    for shrunk in range(SHRINKS + 1):
        inputs, clipped = back(wanted * scale * SHRINK**shrunk)
        if not clipped.any():
            return _result(features, network, inputs, wanted * scale * SHRINK**shrunk, scale * SHRINK**shrunk, 0)
    inputs, clipped = back(wanted * scale)
    return _result(features, network, inputs, wanted * scale, scale, int(clipped.sum()))


def inverted_clusters(
    separation: float = 4.0, n: int = 500, test: int = 4500, seed: int = 0, fold: int | None = None
) -> Split:
    """Return `clusters` as inputs (., 784) of relative2021's random network, `MLP.feature_extractor(seed)`, uniform.

    A network whose first four layers are those, `MLP(784, (512, 128, 16, 8), 2, "tanh", seed, "xavier_uniform")`, has
    the clusters' features times `CLUSTER_SCALE` before its last layer. Ridge regression with the penalty p on the
    clusters themselves is that with the penalty p * CLUSTER_SCALE^2 on these. The law is that of the authors' code,
    where the paper says Glorot and no more. With `fold` the samples are cut into equal parts of `test`, of which that
    one is held out, for cross-validation.

    Raises:
        BadInput: as `clusters`, or there is no such fold.
    """
    features = clusters(separation, n, test, seed)
    if fold is not None:
        features = _other_fold(features, fold)
    network = MLP.feature_extractor(seed, init="xavier_uniform").build()
    return inverted(features, network, scale=CLUSTER_SCALE).split


def _other_fold(split: Split, fold: int) -> Split:
    n, size = len(split.x) + len(split.test_x), len(split.test_x)
    if n % size or not 0 <= fold < n // size:
        raise BadInput(
            f"inverted_clusters(fold={fold}): {n} samples in parts of {size} give the folds 0 to {n // size - 1}"
        )
    x, y = torch.cat([split.test_x, split.x]), torch.cat([split.test_y, split.y])
    held = torch.zeros(n, dtype=torch.bool)
    held[fold * size : (fold + 1) * size] = True
    said = f"{split.description}; fold {fold} held out"
    return replace(split, x=x[~held], y=y[~held], test_x=x[held], test_y=y[held], description=said)


def _layers(network: nn.Sequential) -> list[nn.Module]:
    layers = list(network) if isinstance(network, nn.Sequential) else []
    others = [type(m).__name__ for m in layers if not isinstance(m, nn.Linear | nn.Tanh)]
    if others or not any(isinstance(m, nn.Linear) for m in layers):
        found = f"has {', '.join(sorted(set(others)))}" if others else f"is a {type(network).__name__}"
        raise BadModel(f"inverted(network=...): an nn.Sequential of Linear and Tanh is needed; this one {found}")
    for below, above in pairwise(layers):
        if isinstance(below, nn.Tanh) and isinstance(above, nn.Tanh):
            raise BadModel("inverted(network=...): two Tanh in a row; put a Linear between them")
    return layers


def _check(wanted: Tensor, last: nn.Linear) -> None:
    if wanted.ndim != 2 or wanted.shape[1] != last.out_features:
        raise BadInput(
            f"inverted(features=...): features of shape (n, {last.out_features}) are needed, the network's outputs; "
            f"these are {tuple(wanted.shape)}"
        )
    if not wanted.isfinite().all():
        raise BadInput("inverted(features=...): some features are NaN or inf")


class _Backwards:
    """The network from its outputs to its inputs; the factorisations are kept."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._steps = [
            (
                _Solver(layer, boxed=i > 0 and isinstance(layers[i - 1], nn.Tanh))
                if isinstance(layer, nn.Linear)
                else None
            )
            for i, layer in enumerate(layers)
        ]

    def __call__(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs, and which samples had to be clipped on the way."""
        clipped = torch.zeros(len(values), dtype=torch.bool)
        for solver in reversed(self._steps):
            if solver is None:
                values = values.atanh()
            else:
                values, outside = solver(values)
                clipped |= outside
        return values, clipped


class _Solver:
    """The solutions x of W x + b = z, all (n, ...) by rows."""

    def __init__(self, layer: nn.Linear, boxed: bool) -> None:
        self._W = layer.weight.detach().double().cpu()
        self._b = torch.zeros(len(self._W)).double() if layer.bias is None else layer.bias.detach().double().cpu()
        self._inverse = torch.linalg.pinv(self._W)
        self._boxed = boxed

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return a solution for each row, and which of them had to be clipped into the box."""
        x = self._nearest(torch.zeros(len(z), self._W.shape[1], dtype=torch.float64), z)
        outside = torch.zeros(len(z), dtype=torch.bool)
        if not self._boxed:
            return x, outside
        for _ in range(SWEEPS):
            outside = (x.abs() > BOX).any(1)
            if not outside.any():
                return x, outside
            x[outside] = self._nearest(x[outside].clamp(-AIM, AIM), z[outside])
        outside = (x.abs() > BOX).any(1)
        return x.clamp(-BOX, BOX), outside

    def _nearest(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the solution nearest to x, computed twice: the second time removes the rounding error of the first."""
        for _ in range(2):
            x = x + (z - self._b - x @ self._W.T) @ self._inverse.T
        return x


def _result(
    features: Split, network: nn.Sequential, inputs: Tensor, scaled: Tensor, scale: float, clipped: int
) -> Inversion:
    like = next(network.parameters())
    n = len(features.x)
    x, scaled = inputs.to(like.dtype), scaled.to(like.dtype)
    with torch.no_grad():
        error = network(x.to(like.device)).cpu().double() - scaled.double()
    made = f"{features.description}{'' if scale == 1 else f'; multiplied by {scale:.3g}'}"
    inputs_of = f"inputs that a network of {len(network)} layers maps to these features: {made}"
    return Inversion(
        split=replace(features, name=f"inverted {features.name}", x=x[:n], test_x=x[n:], description=inputs_of),
        features=replace(features, x=scaled[:n], test_x=scaled[n:], description=made),
        scale=scale,
        max_error=float(error.abs().max()),
        rms_error=float(error.square().mean().sqrt()),
        clipped=clipped,
    )
