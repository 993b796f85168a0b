"""The table of docs/comparing.md: a tiny GPT-2 learns one text, then another one by LoRA. What does it forget, and how?

`python docs/forgetting.py` trains it on two made-up texts, without a download, in half a minute.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl

LENGTH, RANK, SCALE = 16, 4, 2.0
FIRST = "the hen sat by the pond and saw the fox run to the barn and the fox saw the hen by the barn and ran on. "
SECOND = "a ship lay at sea under a pale moon; a sail tore; an old sailor spoke: a storm is near, keep a steady hand. "
LETTERS = sorted(set(FIRST + SECOND))


class LoRA(nn.Module):
    """A layer with frozen weight W (m, d), as GPT-2 stores it, plus SCALE A B."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(base.weight.shape[0], RANK) / base.weight.shape[0] ** 0.5)
        self.B = nn.Parameter(torch.zeros(RANK, base.weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + SCALE B^T A^T x."""
        return self.base(x) + SCALE * (x @ self.A @ self.B)


def merged(net: nn.Module) -> dict[str, Tensor]:
    """Return W + SCALE A B of each layer with factors, by the name of W."""
    layers = {name: m for name, m in net.named_modules() if isinstance(m, LoRA)}
    return {f"{name}.base.weight": m.base.weight + SCALE * m.A @ m.B for name, m in layers.items()}


def windows(text: str) -> tuple[Tensor, Tensor]:
    """Return every window of a text (read round and round), and the letter that follows each of its letters."""
    ids = torch.tensor([LETTERS.index(letter) for letter in text + text[: LENGTH + 1]])
    rows = ids.unfold(0, LENGTH + 1, 1)[: len(text)]
    return rows[:, :-1].clone(), rows[:, 1:].clone()


def train(net: nn.Module, text: str, steps: int, lr: float, at: tuple[int, ...] = ()) -> dict[int, nn.Module]:
    """Train the trainable parameters on a text with Adam; return copies of the network at some steps."""
    x, y = windows(text)
    optimiser = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr)
    kept = {}
    for step in range(steps + 1):
        if step in at:
            kept[step] = copy.deepcopy(net)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x).logits.flatten(0, 1), y.flatten()).backward()
        optimiser.step()
    return kept


def network() -> nn.Module:
    """Return a tiny GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds to import

    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=len(LETTERS), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(settings)


def run(steps: int = 150, at: tuple[int, ...] = (0, 2, 10, 50)) -> dict[tuple[int, str], fl.Forgetting]:
    """Return how the first text is forgotten, by (step of the training on the second, coordinates)."""
    net = network()
    train(net, FIRST, steps, 1e-2)
    net.requires_grad_(False)
    for block in net.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = LoRA(block.attn.c_attn), LoRA(block.mlp.c_fc)
    kept = train(net, SECOND, max(at), 1e-3, at)
    task = fl.Problem(kept[at[0]], "cross_entropy", windows(FIRST))
    return {
        (step, name): fl.forgetting(task, kept[step], coordinates=how)
        for step in at[1:]
        for name, how in (("factors", "parameters"), ("merged", merged))
    }


if __name__ == "__main__":
    print("| step | coordinates | change of the loss | first order | second order | rest |\n|---|---|---|---|---|---|")
    for (step, name), found in run().items():
        cells = [found[part] for part in ("change", "first_order", "second_order", "rest")]
        shown = [f"{cell.value:+.2g}" if cell.kind != "undefined" else "refused" for cell in cells]
        print(f"| {step} | {name} | {' | '.join(shown)} |")
