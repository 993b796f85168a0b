"""MacDonald et al., A.1: the difference of a BatchNorm's Jacobian in training from that with fixed statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flatlens.bounds.context import Assumption, Claim, Context, Inapplicable
from flatlens.bounds.definition import bound

LEAST, MOST = 16, 256  #: columns in the smallest and the largest batch; sizes double in between
_FEATURES = 16  #: largest number of features of a layer that are examined
_DOUBLINGS = 4  #: batch sizes up to all columns, from which the order is estimated
_DRAWS = 8  #: nested sequences of batches
KEPT = 4096  #: largest number of columns of a layer's input


@bound(id="B15", symbol=r"J bn_T = J bn_V + O(N^{-1})", source="sharpening Thm A.2",
       cost="one forward, Jacobians of the BatchNorm layers only", on_request=True)  # fmt: skip
def batchnorm_limit(context: Context) -> Iterator[Claim]:
    r"""Each entry of a BatchNorm's Jacobian is in large batches as if its statistics were fixed; its norm is not.

    Theorem A.2 for each BatchNorm, on columns of its own input: N values per feature, with the positions of a
    convolution among them. bn_T uses the statistics of the batch. bn_V has the mean and variance of the SAME batch
    fixed, as in the proof (running statistics would be another difference). With s^2 = eps + sigma^2 and y = x - mean,
    for each feature,

        J bn_T - J bn_V = -(gamma / N s) (1 1^T + y y^T / s^2).

    The undotted row compares N times the largest entry of the difference, with torch's own Jacobians, to
    (|gamma| / s) (1 + R^2 / s^2), where R is the range of the feature over all data: the meaning of "the coordinates
    are O(1)" at a finite N. It has one number for each batch size. `.order` claims that -d log(entry) / d log(N) is 1
    up to 0.1, for the entries of the first samples while the batch around them doubles; a larger difference does not
    refute the limit. `.operator` shows that the operator norm has no limit: as 1 is orthogonal to y,
    ||J bn_T - J bn_V||_2 = max |gamma| / s = ||J bn_V||_2 for every N. The row is
    ||J bn_V||_2 <= ||J bn_T - J bn_V||_2, of tightness 1.
    """
    layers = {name: m for name, m in context.lens.model.named_modules() if isinstance(m, _BatchNorm)}
    if not layers:
        raise Inapplicable(Assumption("batchnorm", False, "the network has none"))
    inputs = _inputs(context, layers)
    for name, layer in layers.items():
        columns = inputs[name].shape[1] if name in inputs else 0
        if columns < 4 * LEAST:
            few = Assumption("enough_samples", False, f"{columns} values per feature, {4 * LEAST} are needed")
            yield Claim(math.nan, math.nan, name, assumptions=(few,))
        else:
            yield from _of_layer(context, name, Layer.of(layer, inputs[name]))


@dataclass(frozen=True, eq=False)
class Layer:
    """A BatchNorm and its input."""

    x: Tensor  #: (d, columns) float64, the features whose values vary most
    gamma: Tensor  #: (d,)
    eps: float

    @classmethod
    def of(cls, module: _BatchNorm, x: Tensor) -> Layer:
        """Return the layer in float64, with at most `_FEATURES` features."""
        gamma = torch.ones(len(x)) if module.weight is None else module.weight.detach()
        top = x.std(1).topk(min(_FEATURES, len(x))).indices
        return cls(x[top], gamma.to(torch.float64).cpu()[top], module.eps)

    def s(self, X: Tensor) -> Tensor:
        """Return sqrt(eps + sigma^2) of a batch (d, N), (d,)."""
        return (self.eps + X.var(1, correction=0)).sqrt()

    def difference(self, X: Tensor, rows: int) -> Tensor:
        """Return J bn_T - J bn_V of a batch X (d, N), for the outputs of the first columns: (d, rows, N)."""
        return self._jacobian(X, rows, None) - self._jacobian(X, rows, (X.mean(1), X.var(1, correction=0)))

    def fixed_norm(self, X: Tensor) -> float:
        """Return ||J bn_V||_2."""
        J = self._jacobian(X, X.shape[1], (X.mean(1), X.var(1, correction=0)))
        return float(torch.linalg.matrix_norm(J, 2).max())

    def _jacobian(self, X: Tensor, rows: int, fixed: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return d bn(X)^i_j / d x^i_l at [i, j, l]; features do not depend on each other."""
        leaf = X.mT.clone().requires_grad_()
        mean, variance = fixed if fixed is not None else (None, None)
        out = F.batch_norm(leaf, mean, variance, self.gamma, None, fixed is None, 0.0, self.eps)
        slopes = [torch.autograd.grad(out[j].sum(), leaf, retain_graph=True)[0] for j in range(rows)]
        return torch.stack(slopes).permute(2, 0, 1)


def _of_layer(context: Context, name: str, layer: Layer) -> Iterator[Claim]:
    columns = layer.x.shape[1]
    sizes = [LEAST * 2**k for k in range(int(math.log2(min(MOST, columns) / LEAST)) + 1)]
    large = [columns // 2**k for k in range(_DOUBLINGS, -1, -1) if columns // 2**k >= LEAST]
    orders = torch.stack([_orders(layer, _shuffled(layer.x, context.generator), large) for _ in range(_DRAWS)])
    # Both sides, and the operator norms, for each size of batch
    X = _shuffled(layer.x, context.generator)
    spread = layer.x.amax(1) - layer.x.amin(1)
    left, right, norms, differences = (torch.empty(len(sizes), dtype=torch.float64) for _ in range(4))
    for k, N in enumerate(sizes):
        D, s = layer.difference(X[:, :N], N), layer.s(X[:, :N])
        left[k] = N * float(D.abs().max())
        right[k] = float((layer.gamma.abs() / s * (1 + (spread / s) ** 2)).max())
        differences[k] = float(torch.linalg.matrix_norm(D, 2).max())
        norms[k] = layer.fixed_norm(X[:, :N])
    told = f"batches of {', '.join(map(str, sizes))}"
    yield Claim(left, right, name, note=told)
    # |order - 1| <= 0.1, over draws; undecided otherwise, because no finite size refutes a limit
    seen = orders[:, torch.isfinite(orders).all(0)]
    if seen.numel() == 0:
        yield Claim(math.nan, 0.1, name, "order", (Assumption("nonzero_slopes", False, "gamma is 0"),))
    else:
        each = seen.mean(1)
        order, stderr = float(each.mean()), float(each.std()) / math.sqrt(len(each))
        off, observed = abs(order - 1), f"observed order {order:.3f} +- {1.96 * stderr:.2g}"
        note = f"{observed}, batches of {large[0]} to {large[-1]}"
        yield Claim(off, 0.1, name, "order", stderr=math.inf if off > 0.1 else stderr, note=note)
    shown = ", ".join(f"{value:.3g}" for value in differences.tolist())
    yield Claim(norms, differences, name, "operator", note=f"{told}: {shown}")


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    return x[:, torch.randperm(x.shape[1], generator=generator)]


def _orders(layer: Layer, X: Tensor, sizes: list[int]) -> Tensor:
    """-d log(largest entry of the first columns) / d log(N), by least squares over nested batches: (d,)."""
    entries = torch.stack([layer.difference(X[:, :N], LEAST)[:, :, :LEAST].abs().amax((1, 2)) for N in sizes])
    t = torch.tensor(sizes, dtype=torch.float64).log()
    t = t - t.mean()
    return -(t @ entries.log()) / t.square().sum()


def _inputs(context: Context, layers: dict[str, _BatchNorm]) -> dict[str, Tensor]:
    """The input of each BatchNorm in eval mode, (d, columns) float64, at most `KEPT` columns."""
    found: dict[str, list[Tensor]] = {}

    def hook(name: str) -> torch.utils.hooks.RemovableHandle:
        def before(_: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
            x = arguments[0] if arguments else options["input"]
            rows = _shuffled(x.detach().movedim(1, 0).flatten(1).to(torch.float64).cpu(), context.generator)
            found.setdefault(name, []).append(rows[:, :KEPT])

        return layers[name].register_forward_pre_hook(before, with_kwargs=True)

    handles = [hook(name) for name in layers]
    try:
        with torch.no_grad():
            for raw in context.lens.problem.data.chunks(256):
                context.lens.problem.run(context.lens.model, context.lens.problem.place(raw))
                if all(sum(t.shape[1] for t in found.get(name, [])) >= KEPT for name in layers):
                    break
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts, 1)[:, :KEPT] for name, parts in found.items()}
