"""The one pass on transformers beside its floor: `.venv-timm/bin/python -m benchmarks.transformers [--repeats 5]`.

The floor is autograd's time for every Jacobian once: N backward passes to all parameters and the input (of token ids:
the first embedding's output), in one call with `is_grads_batched`, with weight gradients summed over the samples of a
chunk. Tables of embeddings are left out of the floor, as their gradients are dense there, which would make it slower.
Attention is torch's own choice there; the pass takes the plain one, which was slower in the floor, too. `floor, one by
one` has N separate backward passes, and is often faster. The pass gives, per sample, G, K, R and C of every layer and
K of every other parameter, with certificates. Seconds are processor time: run it with OMP_NUM_THREADS=1. Some five
minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.one_pass import chunk_of, on_trust
from benchmarks.zoo.shim import operators_of_torchvision
from flatlens.grams import lay_out, one_pass

OUTPUTS = 10


class Encoder(nn.Module):
    """nn.TransformerEncoder, the mean over tokens, and a linear layer."""

    def __init__(self, feedforward: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, feedforward, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(64, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (n, 10)."""
        return torch.as_tensor(self.head(self.encoder(x).mean(1)))


def vit() -> nn.Module:
    """Return timm's ViT-Tiny with ten classes."""
    operators_of_torchvision()
    import timm

    made: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=OUTPUTS)
    return made


def hugging_face(name: str, **settings: Any) -> nn.Module:
    """Return a classifier of transformers from its configuration, with random weights."""
    operators_of_torchvision()
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings, num_labels=OUTPUTS)
    made: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(config)
    return made


@dataclass(frozen=True)
class Timed:
    """A network, the number of samples, and how one of them looks."""

    build: Callable[[], nn.Module]
    n: int
    shape: tuple[int, ...] = ()
    tokens: int = 0  #: length of a text; 0 for inputs that are no token ids

    def case(self) -> fl.Problem:
        """Return the cross-entropy of the network on noise, equal at each call."""
        torch.manual_seed(0)
        net = self.build().eval()
        x: Any = torch.randn(self.n, *self.shape)
        if self.tokens:
            ids = torch.randint(3, 1000, (self.n, self.tokens))
            x = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return fl.Problem(net, "cross_entropy", (x, torch.arange(self.n) % OUTPUTS))


NETWORKS = {
    "nn.TransformerEncoder, d 64, 4 layers, 2048 hidden": Timed(partial(Encoder, 2048), 32, (64, 64)),
    "nn.TransformerEncoder, d 64, 4 layers, 256 hidden": Timed(partial(Encoder, 256), 128, (64, 64)),
    "timm ViT-Tiny 224": Timed(vit, 2, (3, 224, 224)),
    "transformers BERT, d 256, 4 layers": Timed(
        partial(hugging_face, "Bert", hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                intermediate_size=1024), 32, tokens=64,
    ),
    "transformers GPT-2, d 768, 2 layers": Timed(
        partial(hugging_face, "GPT2", n_layer=2, pad_token_id=0), 6, tokens=64
    ),
}  # fmt: skip


def floor(problem: fl.Problem, chunk: int, *, batched: bool = True) -> None:
    """Compute every Jacobian once by autograd."""
    model = problem.model
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    weights = [p for p in model.parameters() if not any(p is table for table in tables)]
    embedded: list[Tensor] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(lambda m, i, o: embedded.append(o)).remove)
        for inputs, _ in problem.batches(chunk):
            embedded.clear()
            if isinstance(inputs, Tensor):
                inputs = inputs.detach().requires_grad_()
                f, at = model(inputs), inputs
            else:
                f = model(**inputs).logits
                at = embedded[0]
            units = torch.eye(f.shape[1])[:, None].expand(-1, *f.shape)
            if batched:
                torch.autograd.grad(f, [at, *weights], units, is_grads_batched=True, allow_unused=True)
                continue
            for unit in units:
                torch.autograd.grad(f, [at, *weights], unit, retain_graph=True, allow_unused=True)


def the_pass(problem: fl.Problem) -> Callable[[], None]:
    """Return a run of the pass alone: its Grams are made and dropped."""
    plan = lay_out(problem, problem.model)

    def run() -> None:
        for chunk in one_pass(problem, problem.model, plan):
            for g in chunk.layers.values():
                _ = g.C, g.x_norm2
                if g.input_side is not None:
                    _ = g.G
                if g.weight is not None:
                    _ = g.K, g.R
            for g in chunk.others.values():
                _ = g.K

    return run


def contestants(problem: fl.Problem, chunk: int) -> dict[str, Callable[[], Any]]:
    """Return what is timed on a network."""
    run = the_pass(problem)
    return {
        "floor": partial(floor, problem, chunk),
        "floor, one by one": partial(floor, problem, chunk, batched=False),
        "pass": run,
        "without certificates": on_trust(run),
    }


def measured(name: str, repeats: int) -> dict[str, Any]:
    """Return a network's sizes and what each contestant takes."""
    problem = NETWORKS[name].case()
    chunk = chunk_of(problem)
    rows = machine.beside_the_floor(machine.interleaved(contestants(problem, chunk), repeats, time.process_time))
    return {"n": problem.n, "chunk": chunk, "repeats": repeats, "contestants": rows}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--only", default="", help="networks whose names hold this")
    chosen = options.parse_args()
    networks = {name: partial(measured, name, chosen.repeats) for name in NETWORKS if chosen.only in name}
    machine.each_network("transformers", OUTPUTS, networks, whole=not chosen.only)


if __name__ == "__main__":
    main()
