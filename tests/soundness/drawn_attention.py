"""Stages of tokens: attention put together from parts, blocks of it, and what else tells positions apart.

An attention has a description: its projections, masks, positions, and the function that multiplies. The name of a stage
fixes a part of it; the rest is drawn from the network's own seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from drawn_stages import Factory, Kit, Stage, rare
from torch import Tensor, nn
from torch.nn import functional as F

OPTIONS: dict[str, tuple[object, ...]] = {
    "heads": (2, 1, 3),
    "shared": (1, 2),
    "projections": ("separate", "fused", "fused by head", "keys and values"),
    "mask": ("none", "causal", "padding", "additive", "causal and padding", "by distance"),
    "turned": ("none", "none", "whole", "part", "neighbours"),
    "product": ("fused", "softmax", "einsum", "by head"),
    "normed": ("none", "layer", "rms"),
    "bias": (True, False),
}


@dataclass(frozen=True)
class Described:
    """An attention of tokens."""

    heads: int = 2  #: of keys and values
    shared: int = 1  #: heads of queries that share one of keys and values
    projections: str = "separate"
    mask: str = "none"
    turned: str = "none"  #: rotary positions: which coordinates of a head
    product: str = "fused"
    normed: str = "none"  #: the norm that projections read
    bias: bool = True
    by_norm: bool = False  #: queries and keys have length 1

    @property
    def size(self) -> int:
        """Coordinates of a head."""
        return {"none": 2, "whole": 2, "neighbours": 4, "part": 3}[self.turned]


def described(**fixed: object) -> Described:
    """With some parts fixed, and the others drawn from torch's random state."""
    choice = {name: options[int(torch.randint(len(options), ()))] for name, options in OPTIONS.items()}
    made = {**choice, **fixed}
    if made["shared"] > 1 and "projections" not in fixed and "fused" in str(made["projections"]):
        made["projections"] = "separate"  # a fused one has as many queries as keys
    return Described(**made)


class Attention(nn.Module):
    """Attention as it is described, with a projection of what comes out."""

    def __init__(self, width: int, this: Described) -> None:
        super().__init__()
        self.this = this
        queries, keys = this.heads * this.shared * this.size, this.heads * this.size
        if this.projections in ("fused", "fused by head"):
            self.qkv = nn.Linear(width, 3 * keys, bias=this.bias)
        else:
            self.q = nn.Linear(width, queries, bias=this.bias)
        if this.projections == "separate":
            self.k, self.v = (nn.Linear(width, keys, bias=this.bias) for _ in range(2))
        elif this.projections == "keys and values":
            self.kv = nn.Linear(width, 2 * keys, bias=this.bias)
        self.norm = {"none": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[this.normed](width)
        self.o = nn.Linear(queries, width)

    def extra_repr(self) -> str:
        return str(self.this)

    def projected(self, h: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (n, heads, positions, size)."""
        this = self.this
        if this.projections == "fused":
            parts = self.qkv(h).chunk(3, -1)
        elif this.projections == "fused by head":
            parts = self.qkv(h).unflatten(2, (this.heads, 3 * this.size)).chunk(3, -1)
        elif this.projections == "separate":
            parts = self.q(h), self.k(others), self.v(others)
        else:
            parts = self.q(h), *self.kv(others).split(this.heads * this.size, -1)
        q, k, v = (z.reshape(*z.shape[:2], -1, this.size).transpose(1, 2) for z in parts)
        return turned(q, this.turned), turned(k, this.turned), v

    def forward(self, h: Tensor, x: Tensor, others: Tensor | None = None) -> Tensor:
        this, read = self.this, self.norm(h)
        q, k, v = self.projected(read, read if others is None else others)
        if this.by_norm:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        mask = masked(this.mask, q, k, x)
        if this.product == "fused":
            plain = mask == 0 if this.mask in ("padding", "causal and padding") else mask
            causal = this.mask == "causal"
            out = F.scaled_dot_product_attention(
                q, k, v, None if causal else plain, is_causal=causal, enable_gqa=this.shared > 1
            )
            return self.o(out.transpose(1, 2).flatten(2))
        k, v = (z.repeat_interleave(this.shared, 1) for z in (k, v))
        if this.product == "einsum":
            scores = torch.einsum("nhqi,nhki->nhqk", q, k) / this.size**0.5
            return self.o(torch.einsum("nhqk,nhki->nqhi", (scores + mask).softmax(-1), v).flatten(2))
        if this.product == "by head":
            heads = zip(*(z.unbind(1) for z in (q, k, v, mask.expand(-1, q.shape[1], -1, -1))), strict=True)
            return self.o(torch.cat([weighed(*head) for head in heads], -1))
        return self.o(weighed(q, k, v, mask).transpose(1, 2).flatten(2))


def weighed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Values, by plain operations; with an axis of heads or without."""
    return (q * q.shape[-1] ** -0.5 @ k.mT + mask).softmax(-1) @ v


def turned(z: Tensor, coordinates: str) -> Tensor:
    """Rotary positions: coordinates of a head are turned in pairs, by an angle that grows with the position."""
    if coordinates == "none":
        return z
    angle = torch.arange(z.shape[2], dtype=z.dtype)[:, None]
    if coordinates == "neighbours":  # (0, 1) and (2, 3)
        angle = angle * z.new_tensor([1.0, 0.1])
        even, odd = z[..., ::2], z[..., 1::2]
        both = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(both, -1).flatten(3)
    mine, rest = z[..., :2], z[..., 2:]  # of a part, the last coordinate stays
    mine = mine * angle.cos() + torch.cat([-mine[..., 1:], mine[..., :1]], -1) * angle.sin()
    return torch.cat([mine, rest], -1)


def padding(x: Tensor) -> Tensor:
    """Which tokens are none, (n, positions); never the first one."""
    none = x == 1 if not x.is_floating_point() else x[..., 0] > 0.7
    return none & (torch.arange(none.shape[1]) > 0)


def masked(kind: str, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """What is added to scores, with axes that broadcast to (n, heads, queries, keys)."""
    many, few = q.shape[2], k.shape[2]
    far = torch.arange(many)[:, None] - torch.arange(few)
    mask = torch.zeros(1, 1, many, few, dtype=q.dtype)
    if "causal" in kind:
        mask = mask.masked_fill(far < 0, -torch.inf)
    if "padding" in kind:
        mask = mask.masked_fill(padding(x)[:, None, None, :few], -torch.inf)
    if kind == "additive":
        mask = mask + (0.3 * far).sin()
    if kind == "by distance":  # another slope for each head
        mask = mask - far.abs() * 2.0 ** -torch.arange(q.shape[1])[:, None, None]
    return mask


class Multihead(nn.Module):
    """nn.MultiheadAttention, with what it can be given."""

    def __init__(self, width: int, **options: object) -> None:
        super().__init__()
        few = int(torch.randint(2, ()))
        self.mha = nn.MultiheadAttention(width, 1 if width % 2 else 2, bool(few), batch_first=True, **options)
        self.masks, self.told = int(torch.randint(4, ())), bool(torch.randint(2, ()))

    def forward(self, h: Tensor, x: Tensor, others: Tensor | None = None) -> Tensor:
        others = h if others is None else others
        causal = torch.ones(h.shape[1], others.shape[1], dtype=torch.bool).triu(1)
        out, _ = self.mha(
            h, others, others, need_weights=self.told,
            key_padding_mask=padding(x)[:, : others.shape[1]] if self.masks % 2 else None,
            attn_mask=causal if self.masks > 1 else None,
        )  # fmt: skip
        return out


class Block(nn.Module):
    """Attention behind a norm, and a gated product behind another, each beside a skip."""

    def __init__(self, width: int, this: Described) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, this), nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 3), nn.Linear(width, 3), nn.Linear(3, width)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h = h + self.attention(h, x)
        z = self.norm(h)
        return h + self.down(F.silu(self.gate(z)) * self.up(z))


def _attended(k: Kit, attention: nn.Module) -> Stage:
    """Beside a skip or not."""
    skips = k.pick % 2 == 0
    return Stage(lambda s, h, x: s.o(skips * h + s.a(h, x)), a=attention, o=nn.Linear(k.i, k.o))


def _drawn(**fixed: object) -> Factory:
    """A stage of an attention some of whose parts are fixed."""
    return lambda k: _attended(k, Attention(k.i, described(**fixed)))


def _crossed(k: Kit, attention: nn.Module) -> Stage:
    """Keys and values of other features, and perhaps of fewer tokens."""
    few = k.one_of(2, None)
    return Stage(
        lambda s, h, x: s.o(h + s.a(h, x, s.act(s.b(h[:, :few])))), a=attention, b=nn.Linear(k.i, k.i), act=k.act(),
        o=nn.Linear(k.i, k.o),
    )  # fmt: skip


def _block(k: Kit, times: int) -> Stage:
    this = described(normed=("layer", "rms")[k.pick % 2])

    def wiring(s: Stage, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(times):
            h = s.a(h, x)
        return s.o(h)

    return Stage(wiring, a=Block(k.i, this), o=nn.Linear(k.i, k.o))


def _by_hand(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """Attention with a learned temperature and a learned bias of positions."""
    q, key, v = s.qkv(h).chunk(3, -1)
    scores = q @ key.mT / s.t + s.bias[: h.shape[1], : h.shape[1]]
    return s.o(scores.softmax(-1) @ v)


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


def _positioned(s: Stage, h: Tensor, x: Tensor) -> Tensor:
    """A part of a table is added, and rows of another one that are the same for all samples."""
    T = h.shape[1]
    return s.act(s.a(h + s.place[:, :T] + s.rows(torch.arange(T).flip(0)[None])))


ATTENTION: dict[str, Factory] = {
    "attention": _drawn(),
    "masked": _drawn(mask="causal and padding"),
    "padded": _drawn(mask="padding", projections="separate"),
    "added to scores": _drawn(mask="by distance"),
    "grouped queries": _drawn(shared=2),
    "rotary positions": _drawn(turned="whole"),
    "rotary neighbours": _drawn(turned="neighbours"),
    "rotary in part": _drawn(turned="part"),
    "plain softmax": _drawn(product="softmax", turned="none"),
    "fused": _drawn(projections="fused", shared=1),
    "fused by head": _drawn(projections="fused by head", shared=1),
    "unit queries": _drawn(by_norm=True),
    "attention twice": lambda k: Stage(
        lambda s, h, x: s.o(s.a(h + s.a(h, x), x)), a=Attention(k.i, described()), o=nn.Linear(k.i, k.o)
    ),
    "attention block": lambda k: _block(k, 1),
    "attention block twice": lambda k: _block(k, 2),
    "cross-attention": lambda k: _crossed(k, Attention(k.i, described(projections="separate"))),
    "cross-attention, fused": lambda k: _crossed(k, Attention(k.i, described(projections="keys and values"))),
    "multihead": lambda k: _attended(k, Multihead(k.i)),
    "multihead, more keys": lambda k: _attended(k, Multihead(k.i, add_bias_kv=True, add_zero_attn=k.pick % 3 == 0)),
    "multihead, crossed": lambda k: _crossed(k, Multihead(k.i, kdim=k.i, vdim=k.i)),
    "a block twice": lambda k: Stage(
        lambda s, h, x: s.o(s.a(s.a(h))), a=_encoder(k.i, k.pick), o=nn.Linear(k.i, k.o)
    ),
    "positions": lambda k: Stage(
        _positioned, a=k.layer(), act=k.act(), place=nn.Parameter(torch.randn(1, 5, k.i)), rows=nn.Embedding(4, k.i)
    ),
    "encoder layer": lambda k: Stage(lambda s, h, x: s.o(s.a(h)), a=_encoder(k.i, k.pick), o=nn.Linear(k.i, k.o)),
    "by hand": lambda k: Stage(
        _by_hand, qkv=nn.Linear(k.i, 3 * k.i), o=nn.Linear(k.i, k.o), t=nn.Parameter(torch.tensor(1.3)),
        bias=nn.Parameter(torch.randn(6, 6)),
    ),
    "a rare head": lambda k: Stage(
        lambda s, h, x: s.o(torch.where(rare(h, x), s.a(h, x), h)), a=Multihead(k.i), o=nn.Linear(k.i, k.o)
    ),
    "lstm": lambda k: Stage(lambda s, h, x: s.a(h)[0], a=nn.LSTM(k.i, k.o, batch_first=True)),
    "packed tokens": lambda k: Stage(_packed, lambda s, h: h[..., 0], a=nn.Linear(k.i, k.o), b=nn.Linear(k.i, k.o)),
    "mixed positions": lambda k: Stage(
        lambda s, h, x: s.b(h + s.act(s.a(h.mT).mT)), a=nn.Linear(3, 3), b=nn.Linear(k.i, k.o), act=k.act()
    ),
}  # fmt: skip
