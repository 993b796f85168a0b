"""A Gauss-Newton product of a language model beside hessian-eigenthings': `python -m benchmarks.language_model`.

The network is transformers' GPT-NeoX in the shape of Pythia-160M (12 layers, width 768, 50,304 words), with random
weights, on 4 and on 16 random sequences of 128 tokens; `--layers` and `--sequences` choose others. Each contestant
multiplies the same vector, in a fresh process, several times. flatlens keeps autograd's graphs between products where
they fit in `--memory`, so its first product, which also checks that the two Jacobian products are adjoint, takes longer
than the later ones; both stand in the result. hessian-eigenthings builds its graphs in each product. Memory is the most
bytes resident in the process, network included. The products must agree: the result has the relative differences of
<v, Gv> and ||Gv||. A contestant that needs more than `--most` GB of address space is stopped, and the result says so.
hessian-eigenthings is installed as `benchmarks/peers` says; without it flatlens runs alone. Seconds are processor time
of one thread. Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from flatlens.curvature import GaussNewton

LAYERS, TOKENS, WORDS = 12, 128, 50_304


def pythia(layers: int) -> nn.Module:
    """Return a network in the shape of Pythia-160M with random weights, equal at each call."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    shape = GPTNeoXConfig(
        vocab_size=WORDS, hidden_size=768, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=12,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    made: nn.Module = GPTNeoXForCausalLM(shape).eval()
    return made


def sequences(n: int) -> Tensor:
    """Return random token ids, (n, 128), equal at each call."""
    return torch.randint(0, WORDS, (n, TOKENS), generator=torch.Generator().manual_seed(1))


def ours(layers: int, n: int, memory: str) -> Callable[[Tensor], Tensor]:
    """Return flatlens' product; the Problem is made here."""
    ids = sequences(n)
    problem = fl.Problem(pythia(layers), "cross_entropy", {"input_ids": ids, "labels": ids}, memory=memory)
    return GaussNewton(problem)


def theirs(layers: int, n: int, memory: str) -> Callable[[Tensor], Tensor]:
    """Return hessian-eigenthings' product, with its helpers for causal language models of transformers."""
    from hessian_eigenthings.loss_fns.huggingface import hf_lm_forward, hf_lm_loss_of_output
    from hessian_eigenthings.operators.ggn import GGNOperator

    ids = sequences(n)
    batch = {"input_ids": ids, "labels": ids}
    operator = GGNOperator(pythia(layers), [batch], hf_lm_forward(), hf_lm_loss_of_output())
    product: Callable[[Tensor], Tensor] = operator.matvec
    return product


CONTESTANTS = {"flatlens": ours, "hessian-eigenthings": theirs}


def measured(who: str, layers: int, n: int, memory: str, products: int, most: int) -> dict[str, Any]:
    """Run one contestant, in this process."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (most * 10**9, most * 10**9))
    product = CONTESTANTS[who](layers, n, memory)
    prepared = _most()
    v = torch.randn(sum(p.numel() for p in pythia(layers).parameters()), generator=torch.Generator().manual_seed(2))
    wall, processor = [], []
    for _ in range(products):
        start, began = time.perf_counter(), time.process_time()
        found = product(v)
        wall.append(round(time.perf_counter() - start, 2))
        processor.append(round(time.process_time() - began, 2))
    return {
        "seconds": wall,
        "processor_seconds": processor,
        "resident_gb_before": prepared,
        "resident_gb": _most(),
        "form": float(v.double() @ found.double()),
        "norm": float(found.double().norm()),
    }


def _most() -> float:
    """Return the most bytes resident so far, in GB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)


def in_a_child(*arguments: object) -> dict[str, Any]:
    """Run `measured` in a fresh process; the last argument is the limit of its address space in GB."""
    try:
        found: dict[str, Any] = machine.answer("language_model", "measured", *arguments)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [f"exit status {error.returncode}"]
        found = {"failed": last[0][:200]}
        print(arguments, found, file=sys.stderr)
    return {**found, "most_gb": arguments[-1]}


def compared(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the ratios of processor time, and how far the products differ."""
    if len(rows) < 2 or any("failed" in row for row in rows.values()):
        return {}
    mine, other = rows.values()
    later, peer = min(mine["processor_seconds"]), min(other["processor_seconds"])
    return {
        "ratio": round(later / peer, 3),
        "ratio_of_first": round(mine["processor_seconds"][0] / other["processor_seconds"][0], 3),
        "difference_of_forms": abs(mine["form"] / other["form"] - 1),
        "difference_of_norms": abs(mine["norm"] / other["norm"] - 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=LAYERS)
    options.add_argument("--sequences", type=int, nargs="+", default=[4, 16])
    options.add_argument("--products", type=int, default=2)
    options.add_argument("--memory", default="8GiB", help="what flatlens may take")
    options.add_argument("--most", type=int, default=18, help="GB of address space")
    chosen = options.parse_args()
    there = importlib.util.find_spec("hessian_eigenthings") is not None
    versions = {"hessian-eigenthings": importlib.metadata.version("hessian-eigenthings")} if there else {}
    result: dict[str, Any] = {"layers": chosen.layers, "tokens": TOKENS, "words": WORDS, "memory": chosen.memory}
    result |= {"versions": versions, "sequences": {}}
    for n in chosen.sequences:
        sizes = (chosen.layers, n, chosen.memory, chosen.products, chosen.most)
        rows = {who: in_a_child(who, *sizes) for who in CONTESTANTS if who == "flatlens" or there}
        result["sequences"][n] = {"contestants": rows, **compared(rows)}
        if chosen.layers == LAYERS:
            machine.save("language_model", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
