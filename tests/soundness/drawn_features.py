"""Stages for one kind of features: norms, tokens, signals and pictures."""

from __future__ import annotations

import torch
from drawn_layers import ChannelNorm, Same2d, Standardised2d
from drawn_stages import Factory, Kit, Stage, rare
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


def _after(k: Kit, norm: nn.Module) -> Stage:
    return Stage(lambda s, h, x: s.act(s.norm(s.a(h))), a=k.layer(), norm=norm, act=k.act())


def _even(k: Kit) -> int:
    """Groups of the channels that come out."""
    return 2 if k.o % 2 == 0 and k.o > 2 and k.pick % 2 else 1


NORMS_OF_ROWS: dict[str, Factory] = {  # vectors and tokens
    "layer norm": lambda k: _after(k, nn.LayerNorm(k.o)),
    "rms norm": lambda k: _after(k, nn.RMSNorm(k.o, eps=1e-3)),
    "layer norm twice": lambda k: Stage(
        lambda s, h, x: s.norm(s.a(s.norm(h))), a=nn.Linear(k.i, k.i), norm=nn.LayerNorm(k.i)
    ) if k.i == k.o else _after(k, nn.LayerNorm(k.o, bias=False)),
    "a rare layer norm": lambda k: Stage(
        lambda s, h, x: (lambda z: torch.where(rare(z, x), s.norm(z), z))(s.a(h)), a=k.layer(), norm=nn.LayerNorm(k.o)
    ),
    "norm's weight, bare": lambda k: Stage(
        lambda s, h, x: s.norm(s.a(h)) + rare(h, x) * s.norm.weight, a=k.layer(), norm=nn.LayerNorm(k.o)
    ),
}  # fmt: skip

NORMS_OF_VECTORS: dict[str, Factory] = {
    "group norm": lambda k: _after(k, nn.GroupNorm(_even(k), k.o)),
    "batch norm": lambda k: _after(k, nn.BatchNorm1d(k.o)),
    "prelu by channel": lambda k: _after(k, nn.PReLU(k.o)),
}

NORMS_OF_CHANNELS: dict[str, Factory] = {
    "group norm": lambda k: _after(k, nn.GroupNorm(_even(k), k.o)),
    "batch norm": lambda k: _after(k, (nn.BatchNorm1d if k.dims == 1 else nn.BatchNorm2d)(k.o)),
    "prelu by channel": lambda k: _after(k, nn.PReLU(k.o)),
    "channel norm": lambda k: _after(k, ChannelNorm(k.o)),
    "instance norm": lambda k: _after(k, (nn.InstanceNorm1d if k.dims == 1 else nn.InstanceNorm2d)(k.o, affine=True)),
}


def _convolution(k: Kit, **options: object) -> nn.Module:
    return (nn.Conv1d if k.dims == 1 else nn.Conv2d)(k.i, k.o, **options)


def _transposed(k: Kit, **options: object) -> nn.Module:
    return (nn.ConvTranspose1d if k.dims == 1 else nn.ConvTranspose2d)(k.i, k.o, **options)


def _groups(k: Kit) -> int:
    return 2 if k.i % 2 == 0 == k.o % 2 else 1


def _of(k: Kit, layer: nn.Module) -> Stage:
    return Stage(lambda s, h, x: s.act(s.a(h)), a=layer, act=k.act())


def _mode(k: Kit) -> str:
    return k.one_of("circular", "reflect")


CONVOLUTIONS: dict[str, Factory] = {
    "grouped": lambda k: _of(k, _convolution(k, kernel_size=3, padding=1, groups=_groups(k))),
    "strided": lambda k: _of(k, _convolution(k, kernel_size=2, stride=2, padding=1)),
    "wrapped": lambda k: _of(k, _convolution(k, kernel_size=3, padding=1, padding_mode=_mode(k))),
    "same": lambda k: _of(k, _convolution(k, kernel_size=2, padding="same", padding_mode="replicate")),
    "dilated": lambda k: _of(k, _convolution(k, kernel_size=2, padding=1, dilation=2, bias=False)),
    "transposed": lambda k: _of(k, _transposed(k, kernel_size=2, stride=k.one_of(1, 2), padding=1)),
    "transposed in groups": lambda k: _of(k, _transposed(k, kernel_size=3, padding=1, groups=_groups(k))),
    "pooled": lambda k: Stage(
        lambda s, h, x: s.pool(s.act(s.a(h))),
        a=k.layer(), act=k.act(), pool=(nn.MaxPool1d if k.dims == 1 else nn.MaxPool2d)(2, 1),
    ),
    "pointwise": lambda k: _of(k, _convolution(k, kernel_size=1)),
    "weight norm": lambda k: _of(k, parametrizations.weight_norm(_convolution(k, kernel_size=2, padding=1))),
}  # fmt: skip

PICTURES: dict[str, Factory] = {
    "padded inside": lambda k: _of(k, Same2d(k.i, k.o, k.one_of(2, 3))),
    "standardised": lambda k: _of(k, Standardised2d(k.i, k.o, 3, padding=1)),
}


def _by_hand(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """Attention with a learned temperature and a learned bias of positions."""
    q, key, v = s.qkv(h).chunk(3, -1)
    scores = q @ key.mT / s.t + s.bias[: h.shape[1], : h.shape[1]]
    return s.o(scores.softmax(-1) @ v)


class Attended(nn.Module):
    """nn.MultiheadAttention of tokens to themselves."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.mha(h, h, h, need_weights=False)[0]


def _encoder(width: int, pick: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, 2 - width % 2, 3, dropout=0.1, activation=("relu", "gelu")[pick % 2], batch_first=True,
        norm_first=pick % 3 == 0,
    )  # fmt: skip


def _packed(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """A layer that sees only the tokens whose first feature is large."""
    seen = h[..., 0] > s.cut
    z = s.a(h)
    return z.index_put((seen,), s.b(h[seen])) if bool(seen.any()) else z


class Attending(nn.Module):
    """nn.MultiheadAttention of tokens to others, perhaps behind a causal mask."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.mha, self.causal = nn.MultiheadAttention(width, heads, batch_first=True), causal

    def forward(self, h: Tensor, others: Tensor) -> Tensor:
        mask = torch.ones(h.shape[1], others.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.mha(h, others, others, attn_mask=mask, need_weights=False)[0]


def _grouped(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """Two heads of queries share one of keys and values, behind a causal mask."""
    q, kv = s.q(h).unflatten(2, (2, -1)).transpose(1, 2), s.kv(h)[:, None]
    key, v = kv.chunk(2, -1)
    z = F.scaled_dot_product_attention(q, key.expand_as(q), v.expand_as(q), is_causal=True)
    return s.o(z.transpose(1, 2).flatten(2))


def _rotary(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """Queries and keys are turned by an angle that grows with the position."""
    angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * h.new_tensor([1.0, 0.1]).repeat(2)
    q, key = (z * angle.cos() + torch.cat([-z[..., 2:], z[..., :2]], -1) * angle.sin() for z in s.qk(h).chunk(2, -1))
    return s.o(F.scaled_dot_product_attention(q, key, s.v(h)))


def _positioned(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """A part of a table is added, and rows of another one that are the same for all samples."""
    T = h.shape[1]
    return s.act(s.a(h + s.place[:, :T] + s.rows(torch.arange(T).flip(0)[None])))


ATTENTION: dict[str, Factory] = {
    "masked": lambda k: Stage(
        lambda s, h, x: s.o(h + s.a(h, h)), a=Attending(k.i, 2 - k.i % 2, True), o=nn.Linear(k.i, k.o)
    ),
    "cross-attention": lambda k: Stage(
        lambda s, h, x: s.o(h + s.a(h, s.act(s.b(h)))), a=Attending(k.i, 1, k.pick % 2 == 0), b=nn.Linear(k.i, k.i),
        act=k.act(), o=nn.Linear(k.i, k.o),
    ),
    "grouped queries": lambda k: Stage(
        _grouped, q=nn.Linear(k.i, 4), kv=nn.Linear(k.i, 4), o=nn.Linear(4, k.o)
    ),
    "rotary positions": lambda k: Stage(
        _rotary, qk=nn.Linear(k.i, 8, bias=False), v=nn.Linear(k.i, 3), o=nn.Linear(3, k.o)
    ),
    "a block twice": lambda k: Stage(
        lambda s, h, x: s.o(s.a(s.a(h))), a=_encoder(k.i, k.pick), o=nn.Linear(k.i, k.o)
    ),
    "positions": lambda k: Stage(
        _positioned, a=k.layer(), act=k.act(), place=nn.Parameter(torch.randn(1, 5, k.i)), rows=nn.Embedding(4, k.i)
    ),
    "multihead": lambda k: Stage(
        lambda s, h, x: s.o(h + s.a(h)), a=Attended(k.i, 2 - k.i % 2, k.pick % 2 == 0), o=nn.Linear(k.i, k.o)
    ),
    "encoder layer": lambda k: Stage(lambda s, h, x: s.o(s.a(h)), a=_encoder(k.i, k.pick), o=nn.Linear(k.i, k.o)),
    "by hand": lambda k: Stage(
        _by_hand, qkv=nn.Linear(k.i, 3 * k.i), o=nn.Linear(k.i, k.o), t=nn.Parameter(torch.tensor(1.3)),
        bias=nn.Parameter(torch.randn(6, 6)),
    ),
    "fused": lambda k: Stage(
        lambda s, h, x: s.o(F.scaled_dot_product_attention(*s.qkv(h).chunk(3, -1))),
        qkv=nn.Linear(k.i, 3 * k.i), o=nn.Linear(k.i, k.o),
    ),
    "a rare head": lambda k: Stage(
        lambda s, h, x: s.o(torch.where(rare(h, x), s.a(h), h)), a=Attended(k.i, 1, True), o=nn.Linear(k.i, k.o)
    ),
    "lstm": lambda k: Stage(lambda s, h, x: s.a(h)[0], a=nn.LSTM(k.i, k.o, batch_first=True)),
    "packed tokens": lambda k: Stage(_packed, lambda s, h: h[..., 0], a=nn.Linear(k.i, k.o), b=nn.Linear(k.i, k.o)),
    "mixed positions": lambda k: Stage(
        lambda s, h, x: s.b(h + s.act(s.a(h.mT).mT)), a=nn.Linear(3, 3), b=nn.Linear(k.i, k.o), act=k.act()
    ),
}  # fmt: skip
