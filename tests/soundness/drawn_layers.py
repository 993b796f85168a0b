"""Layers whose forward is not what their class, or their stored weight, promises."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LowRank(nn.Linear):
    """A linear layer with a trained change of low rank, W + B A, in its own forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(1, inputs) / 2)
        self.up = nn.Parameter(torch.randn(outputs, 1) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class Equalised(nn.Linear):
    """Equalised learning rate: the stored weight is scaled in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (2 / self.in_features) ** 0.5, self.bias)


class Standardised(nn.Linear):
    """Weight standardisation: each row to mean 0 and variance 1 in each call."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, w / (w.var(1, unbiased=False, keepdim=True) + 1e-3).sqrt(), self.bias)


class Skipping(nn.Linear):
    """A square linear layer that adds its input."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        reach = min(self.in_features, self.out_features)
        return out + F.pad(x[..., :reach], (0, self.out_features - reach))


class Saturating(nn.Linear):
    """A linear layer that clips what it reads, which only outliers notice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3))


class Normalising(nn.Linear):
    """A linear layer that divides what it reads by its norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1, eps=1e-3))


class Clipping(nn.Linear):
    """A linear layer that clips what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-3, 3)


class Rescaling(nn.Linear):
    """A linear layer that scales its input by one trained number and its output by another."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.before, self.after = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.after * super().forward(self.before * x)


class RarelySquaredReLU(nn.ReLU):
    """A ReLU but beyond 3, where it squares."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return torch.where(z > 3, z * z / 3, z)


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm of the channels of a picture or signal, permuted in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class TemperedNorm(nn.LayerNorm):
    """A LayerNorm that scales its output by its own weight's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.mean()


class Same2d(nn.Conv2d):
    """Pads inside forward, one side more than the other where the kernel is even."""

    def forward(self, x: Tensor) -> Tensor:
        pads = [p for k in reversed(self.kernel_size) for p in ((k - 1) // 2, k // 2)]
        return super().forward(F.pad(x, pads))


class Standardised2d(nn.Conv2d):
    """Weight standardisation of a convolution by a batch norm of its kernel, as timm's StdConv2d does."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        w = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-3).reshape_as(self.weight)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Module):
    """A parametrisation: the weight is half of what is stored."""

    def forward(self, stored: Tensor) -> Tensor:
        return stored / 2


class LowRankChange(nn.Module):
    """A parametrisation: what is stored plus a trained outer product."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        flat = weight.flatten(1)
        self.up = nn.Parameter(torch.randn(len(flat), 1) / 2)
        self.down = nn.Parameter(torch.randn(1, flat.shape[1]) / 2)

    def forward(self, stored: Tensor) -> Tensor:
        return stored + (self.up @ self.down).reshape(stored.shape)


class Routed(nn.Module):
    """A mixture of experts: each row goes to the one its router prefers, by index and back, times its share."""

    def __init__(self, inputs: int, outputs: int, experts: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(nn.Linear(inputs, outputs) for _ in range(experts))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.router(rows).softmax(1).max(1)
        out = rows.new_zeros(len(rows), self.outputs)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_put((mine,), expert(rows[mine]) * share[mine, None])
        return out.reshape(*x.shape[:-1], -1)
