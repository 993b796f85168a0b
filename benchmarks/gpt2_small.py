"""One run of each measure of training on GPT-2 small's shape: `python -m benchmarks.gpt2_small [--only WORDS]`.

Random weights (transformers' GPT2Config), 124 million parameters, 2 samples of 8 tokens, one thread. Each row has the
seconds, the memory that was announced before where there is an announcement, and the peak above what was in use.
Rows go to results/gpt2_small.csv as soon as they are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

import flatlens as fl
from benchmarks import machine
from flatlens.comparing.expansion import forgetting_memory
from flatlens.curvature import Hessian, eigenspace
from flatlens.curvature.leading import eigenspace_memory
from flatlens.measures.definition import NetworkMeasure, named
from flatlens.memory import OfProcess
from flatlens.tracking import edge_of

ROWS = Path(__file__).parent / "results" / "gpt2_small.csv"
SAMPLES, TOKENS, BATCHES, PROBES, K, MOST = 2, 8, 2, 8, 1, 40


def made() -> tuple[fl.Problem, torch.optim.Optimizer]:
    """Return GPT-2 small on random tokens, and AdamW after a step, so that it has a state."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    ids = torch.randint(0, model.config.vocab_size, (SAMPLES, TOKENS))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return fl.Problem(model, "cross_entropy", {"input_ids": ids, "labels": ids}), optimiser


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="names of the rows to run, separated by spaces")
    chosen = options.parse_args().only.split()
    torch.set_num_threads(1)
    problem, optimiser = made()
    lens = fl.Lens(problem, optimiser=optimiser)
    hessian = Hessian(problem, model=lens.model)

    def measured(name: str) -> str:
        return str(fl.measure(lens, name, progress=False)[name])

    def told(name: str) -> int | None:
        """Return the memory that a measure announces."""
        (one,) = named(name)
        return one.memory(problem) if isinstance(one, NetworkMeasure) else None

    adam = edge_of(optimiser).value
    sharp, diagonal = f"batch_sharpness(samples=1, batches={BATCHES})", f"hessian_diagonal(probes={PROBES})"
    worst = "worst_sharpness(restarts=1, steps=2)"
    work: dict[str, tuple[int | None, Callable[[], str]]] = {
        "edges": (told("critical_sharpness"), lambda: f"edge {adam:.4g}, {measured('critical_sharpness')}"),
        "directional": (told("directional_sharpness"), lambda: measured("directional_sharpness")),
        "worst": (told(worst), lambda: measured(worst)),
        "batch_sharpness": (told(sharp), lambda: measured(sharp)),
        "eigenspace": (eigenspace_memory(hessian, K, most=MOST), lambda: repr(eigenspace(hessian, K, most=MOST))),
        "diagonal": (told(diagonal), lambda: measured(diagonal)),
        "forgetting": (forgetting_memory(lens), lambda: fl.forgetting(lens).answer[0]),
    }
    for name, (announced, run) in work.items():
        if chosen and name not in chosen:
            continue
        memory = OfProcess()
        memory.begin()
        used, start = memory.used() or 0, time.perf_counter()
        answer = run()
        peak = (memory.peak() or 0) - used
        row = {"measure": name, "seconds": round(time.perf_counter() - start, 1),
               "announced_gib": "" if announced is None else round(announced / 2**30, 2),
               "peak_gib": round(peak / 2**30, 2), "found": answer}  # fmt: skip
        print(row, flush=True)
        machine.merged(ROWS, pd.DataFrame([row]), ["measure"]).to_csv(ROWS, index=False)


if __name__ == "__main__":
    main()
