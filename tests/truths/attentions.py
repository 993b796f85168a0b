"""Networks with attention of every kind, tiny, in float64, and their symmetries as said by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import modern
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS, CLASSES = 8, 5, 3


def turned(x: Tensor, base: float = 3.0) -> Tensor:
    """Rotary positions: coordinates i and i + h/2 are turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).to(x)[:, None] * base ** -torch.arange(half).to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    """Attention by hand: heads of `size`, queries that share keys, rotary positions, what a variant adds."""

    def __init__(self, heads: int = 2, groups: int | None = None, size: int = 4, bias: bool = True, **variant: bool):
        super().__init__()
        self.heads, self.groups, self.size, self.variant = heads, groups or heads, size, variant
        self.q = nn.Linear(WIDTH, heads * size, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, self.groups * size, bias=bias) for _ in range(2))
        self.o = nn.Linear(heads * size, WIDTH, bias=bias)
        if variant.get("tied"):
            self.k.weight = self.q.weight
        self.norm = nn.LayerNorm(size) if variant.get("normed") else None
        self.shift = nn.Parameter(torch.randn(heads, 1, size)) if variant.get("shifted") else None
        self.talk = nn.Parameter(torch.randn(heads, heads)) if variant.get("talking") else None
        self.place = nn.Parameter(torch.randn(heads, TOKENS, TOKENS)) if variant.get("placed") else None
        self.low = nn.Linear(WIDTH, 1), nn.Linear(1, heads * size)
        self.down, self.up = self.low if variant.get("adapted") else (None, None)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q = self.q(x) if self.up is None else self.q(x) + self.up(self.down(x))
        q, k, v = (z.unflatten(-1, (-1, self.size)).transpose(1, 2) for z in (q, self.k(other), self.v(other)))
        if self.norm is not None:
            q = self.norm(q)
        if self.shift is not None:
            q = q + self.shift
        if self.variant.get("of length one"):
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.variant.get("rotary"):
            q, k = turned(q), turned(k)
        if self.variant.get("partly"):
            q, k = (torch.cat([turned(z[..., :2]), z[..., 2:]], -1) for z in (q, k))
        k, v = (z.repeat_interleave(self.heads // self.groups, 1) for z in (k, v))
        scores = q @ k.mT / self.size**0.5
        if self.place is not None:
            scores = scores + self.place
        if self.variant.get("causal"):
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1).to(scores)
        if self.variant.get("read twice"):
            scores = scores + q.sum(-1, keepdim=True) * torch.arange(scores.shape[-1]).to(q)
        seen = scores.softmax(-1)
        if self.talk is not None:
            seen = torch.einsum("hg,ngtu->nhtu", self.talk, seen)
        return self.o((seen @ v).transpose(1, 2).flatten(2))


def gated(fused: bool = False) -> nn.Module:
    """W (silu(G x) * U x), perhaps with gate and factor in one weight."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        a, b = net.gate(x).chunk(2, -1) if fused else (net.gate(x), net.up(x))
        return net.down(F.silu(a) * b)

    parts = {"gate": nn.Linear(WIDTH, 12 if fused else 6, bias=False)}
    if not fused:
        parts["up"] = nn.Linear(WIDTH, 6, bias=False)
    return module_of(forward, **parts, down=nn.Linear(6, WIDTH, bias=False))


def net(
    attention: nn.Module,
    mlp: nn.Module | None = None,
    norm: Callable[[int], nn.Module] = nn.LayerNorm,
    times: int = 1,
) -> nn.Module:
    """x + attention(norm x), perhaps twice, x + mlp(norm x), a norm and a head on the mean of the tokens."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(times):
            x = x + net.attention(net.norm1(x))
        if mlp is not None:
            x = x + net.mlp(net.norm2(x))
        return net.head(net.norm3(x).mean(1))

    norms = {f"norm{k}": norm(WIDTH) for k in (1, 2, 3)}
    return module_of(forward, **norms, attention=attention, mlp=mlp, head=(WIDTH, CLASSES))


def crossed() -> nn.Module:
    """Attention to other tokens: what a layer makes of the first ones."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.head(net.norm3(net.attention(net.norm1(x), net.other(x).tanh())).mean(1))

    norms = {f"norm{k}": nn.LayerNorm(WIDTH) for k in (1, 3)}
    return module_of(forward, **norms, attention=Attention(2), head=(WIDTH, CLASSES), other=(WIDTH, WIDTH))


def last() -> nn.Module:
    """Attention whose last weight gives the outputs: no other layer stands between a head and them."""
    attention = Attention(2)
    attention.o = nn.Linear(8, CLASSES)
    return module_of(lambda net, x: net.attention(x).mean(1), attention=attention)


class OnePlus(nn.Module):
    """RMSNorm whose scale is 1 + its weight, as Gemma has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    @property
    def scale(self) -> Tensor:
        """What the features are multiplied by; literal definitions read it."""
        return 1 + self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale


@dataclass(frozen=True)
class Said:
    """How many symmetries a network has, and why something has none."""

    queries: int
    values: int
    orders: int
    norms: int = 0
    gates: int = 0
    why: str = ""  #: a reason that must be given


def llama_shaped() -> nn.Module:
    """Rotary positions, four queries on two keys, RMSNorm, a gated layer, no biases."""
    attention = Attention(4, 2, bias=False, rotary=True, causal=True)
    return net(attention, gated(), lambda width: nn.RMSNorm(width, eps=1e-6))


MADE: dict[str, tuple[Callable[[], nn.Module], Said]] = {
    "plain": (lambda: net(Attention()), Said(2, 2, 1, 2)),
    "causal": (lambda: net(Attention(causal=True)), Said(2, 2, 1, 2)),
    "no biases": (lambda: net(Attention(bias=False)), Said(2, 2, 1, 2)),
    "grouped": (lambda: net(Attention(4, 2)), Said(2, 2, 1, 2)),
    "one key": (lambda: net(Attention(3, 1)), Said(1, 1, 1, 2)),
    "one head": (lambda: net(Attention(1)), Said(1, 1, 0, 2)),
    "rotary": (lambda: net(Attention(rotary=True)), Said(2, 2, 1, 2)),
    "partly rotary": (lambda: net(Attention(partly=True)), Said(2, 2, 1, 2)),
    "llama-shaped": (llama_shaped, Said(2, 2, 1, 3, 1)),
    "gemma-shaped": (lambda: net(Attention(4, 2, bias=False), gated(), OnePlus), Said(2, 2, 1, 3, 1)),
    "gate and factor fused": (lambda: net(Attention(), gated(True)), Said(2, 2, 1, 3, 1)),
    "called twice": (lambda: net(Attention(), times=2), Said(2, 2, 1, 2)),
    "crossed": (crossed, Said(2, 2, 1, 2)),
    "last": (last, Said(2, 2, 1)),
    "placed": (lambda: net(Attention(placed=True)), Said(2, 2, 0, 2, why="distinguishes the heads")),
    "talking": (lambda: net(Attention(talking=True)), Said(2, 2, 0, 2, why="distinguishes the heads")),
    "normed queries": (lambda: net(Attention(normed=True)), Said(0, 2, 0, 2, why="NativeLayerNorm")),
    "unit queries": (lambda: net(Attention(**{"of length one": True})), Said(0, 2, 0, 2, why="queries or keys pass")),
    "shifted queries": (lambda: net(Attention(shifted=True)), Said(0, 2, 0, 2, why="Add")),
    "adapted queries": (lambda: net(Attention(adapted=True)), Said(0, 2, 0, 2, why="come from several weights")),
    "tied": (lambda: net(Attention(tied=True)), Said(0, 2, 1, 2, why="share a weight")),
    "read twice": (lambda: net(Attention(**{"read twice": True})), Said(0, 2, 1, 2, why="something else reads")),
}  # fmt: skip


def made(name: str, n: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    """(a network in eval mode, tokens, labels), in float64; nothing at its default."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = modern._spread(MADE[name][0]())
        return net, torch.randn(n, TOKENS, WIDTH).double(), torch.randint(0, CLASSES, (n,))


def hf_llama() -> modern.Case:
    """A causal language model of transformers with rotary positions, grouped queries and gated layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=6, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LlamaForCausalLM(config)
        return modern.tokens(net, "cross_entropy", "model.embed_tokens", 7, True, lambda out: out.logits)
