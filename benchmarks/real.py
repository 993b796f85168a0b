"""The summary on networks of real size: `python -m benchmarks.real [CASE ...] [--samples N] [--tiny]`.

For each case three processes of their own, on one thread, with random weights and data: what `fl.cost` announces, the
floor, and what `Problem`, `Lens` and the summary then take. Each result is saved when it comes, and a run that was
stopped goes on with the first that is missing; `--again` starts anew. Seconds are the processor's; memory is the peak
of the process. The floor is one forward pass and as many backward passes as the pass of the summary takes, to the
floating input or the first embedding and to all parameters but tables of embeddings, one by one. Up to 128 outputs that
is N; beyond, 16 random combinations for each of two kinds of measure. `--tiny` tries the script on small networks, and
saves them apart. Most cases take hours.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.announced import noise
from benchmarks.resnet import resnet18
from benchmarks.typical import of_transformers, resnet50
from flatlens.measures.lens import EXACT, PROBES

TINY: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A network, and its samples: images of so many rows, or texts of so many tokens."""

    build: Callable[[bool], nn.Module]  #: from whether it is the tiny one
    classes: int
    rows: int = 224
    tokens: int = 0
    words: int = 0
    language_model: bool = False  #: whether the next token is the label

    def given(self, samples: int, tiny: bool) -> tuple[nn.Module, str, Any]:
        """Return the network, its loss and its samples, equal at each call."""
        torch.manual_seed(0)
        net = self.build(tiny).eval()
        if not self.tokens:
            rows = 32 if tiny else self.rows
            return net, "cross_entropy", noise(samples, 3, rows, rows, classes=self.classes)
        ids = torch.randint(99 if tiny else self.words, (samples, 8 if tiny else self.tokens))
        labels = ids if self.language_model else torch.randint(self.classes, (samples,))
        return net, "cross_entropy", {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def vit(tiny: bool) -> nn.Module:
    small = TINY | {"image_size": 32} if tiny else {}
    return of_transformers("ViTForImageClassification", num_labels=1000, **small)


def bert(tiny: bool) -> nn.Module:
    small = TINY | {"vocab_size": 99} if tiny else {}
    return of_transformers("BertForSequenceClassification", num_labels=2, **small)


def gpt2(tiny: bool) -> nn.Module:
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 99} if tiny else {}
    return of_transformers("GPT2LMHeadModel", **small)


CASES = {
    "ResNet-18": Case(lambda tiny: resnet18(), 1000),
    "ResNet-50": Case(lambda tiny: resnet50(), 1000),
    "ViT-B/16": Case(vit, 1000),
    "BERT (base)": Case(bert, 2, tokens=128, words=30_522),
    "GPT-2 (124 million)": Case(gpt2, 50_257, tokens=128, words=50_257, language_model=True),
}


def announced(name: str, samples: int, tiny: bool) -> dict[str, Any]:
    """Return what `fl.cost` expects; its wall-clock seconds are scaled to those of the processor."""
    given = CASES[name].given(samples, tiny)
    wall, own = time.monotonic(), time.process_time()
    expected = fl.cost(*given)
    share = (time.process_time() - own) / (time.monotonic() - wall)
    return {
        "seconds": round(expected.seconds * share, 1), "memory_mib": round(expected.memory / 2**20),
        "products": expected.products,
    }  # fmt: skip


def floor(name: str, samples: int, tiny: bool) -> dict[str, Any]:
    """Return the seconds of the floor, measured on a few samples at a time for all of them."""
    net, loss, data = CASES[name].given(samples, tiny)
    problem = fl.Problem(net, loss, data)
    tables = [module for module in net.modules() if isinstance(module, nn.Embedding)]
    embedded: list[Tensor] = []
    for table in tables:
        table.register_forward_hook(lambda module, ids, z: embedded.append(z))
    weights = [p for p in net.parameters() if not any(p is table.weight for table in tables)]
    passes = problem.outputs if problem.outputs <= EXACT else 2 * PROBES
    start = time.process_time()
    for batch in problem.batches(8):
        embedded.clear()
        inputs = batch if isinstance(batch, dict) else batch[0]
        if isinstance(inputs, Tensor):
            inputs = inputs.detach().requires_grad_()
            f, at = net(inputs), [inputs, *weights]
        else:
            f = net(**{key: value for key, value in inputs.items() if key != "labels"}).logits
            at = [embedded[0], *weights]
        for number in range(passes):
            unit = torch.zeros_like(f)
            unit.flatten(1)[:, number] = 1
            torch.autograd.grad(f, at, unit, retain_graph=number + 1 < passes, allow_unused=True)
    return {"seconds": round(time.process_time() - start, 1), "backward_passes": passes}


def taken(name: str, samples: int, tiny: bool) -> dict[str, Any]:
    """Return what making the problem and the lens and measuring the summary take."""
    given = CASES[name].given(samples, tiny)
    start = time.process_time()
    lens = fl.Lens(fl.Problem(*given))
    made = time.process_time() - start
    fl.measure(lens, anyway=True, progress=False)
    return {
        "seconds": round(time.process_time() - start, 1), "problem_seconds": round(made, 1),
        "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10),
        "products": lens.products, "outputs": lens.problem.outputs,
        "parameters": sum(p.numel() for p in lens.problem.model.parameters()),
    }  # fmt: skip


STAGES = {"announced": announced, "floor": floor, "taken": taken}


def stage(which: str, name: str, samples: int, tiny: bool) -> dict[str, Any]:
    """Return one result, on one thread."""
    torch.set_num_threads(1)
    return {"samples": samples, **STAGES[which](name, samples, tiny), "load": round(machine.BUSY, 1)}


def compared(row: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of a case whose results are all there."""
    if not STAGES.keys() <= row.keys():
        return {}
    took = row["taken"]
    ratios = {f"announced_{what}": row["announced"][what] / took[what] for what in ("seconds", "memory_mib")}
    ratios["floors"] = took["seconds"] / max(row["floor"]["seconds"], 1e-9)
    return {what: round(ratio, 2) for what, ratio in ratios.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("cases", nargs="*", choices=[[], *CASES], help="all, where none is named")
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--again", action="store_true")
    chosen = options.parse_args()
    file = "real_tiny" if chosen.tiny else "real"
    rows = machine.earlier(file).get("rows", {})
    for name in chosen.cases or CASES:
        row = rows.setdefault(name, {})
        for which in STAGES:
            if chosen.again or row.get(which, {}).get("samples") != chosen.samples:
                row[which] = machine.answer("real", "stage", which, name, chosen.samples, chosen.tiny)
                row["ratios"] = compared(row)
                machine.save(file, {"rows": rows})
    print(json.dumps({name: row.get("ratios") for name, row in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
