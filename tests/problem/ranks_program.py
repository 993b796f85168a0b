"""What test_ranks.py runs in several processes: `torchrun ranks_program.py OUT CASES`.

The first of them leaves the values of measures in each case as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import flatlens as fl
from flatlens.problem.ranks import ALONE

NEED_MORE = ("covering_radius", "corner_measure")
"""A distribution that is known."""


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 4))
    return nn.Sequential(*layers).double()


def measured(samples, memory, batch, measures="", ranks=ALONE):
    """The value and the margin of each measure; by default of one process."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, 1, 6, 6, generator=generator), torch.arange(samples) % 4)
    data = DataLoader(list(zip(x, y, strict=True)), batch_size=batch) if batch else (x, y)
    problem = fl.Problem(network(), "cross_entropy", data, test=(x[:7] + 1, y[:7]), memory=memory, ranks=ranks)
    names = measures.split(",") if measures else [card.name for card in fl.catalogue() if card.name not in NEED_MORE]
    found = {}
    for outputs in ("exact", 2):
        lens = fl.Lens(problem, outputs=outputs)
        for name in names:
            report = fl.measure(lens, [name], generator=torch.Generator().manual_seed(0))
            found |= {f"{outputs} {key}": (e.value, e.margin) for key, e in report.items()}
        each = fl.measure(lens, ["mls"])["mls"].samples
        found |= {f"{outputs} mls of sample {number}": (float(value), 0.0) for number, value in enumerate(each)}
    coupled = fl.Problem(network(), "cross_entropy", (x, y), batchnorm="train", ghost_batch=4, ranks=ranks)
    sharpness = fl.measure(fl.Lens(coupled), ["sharpness"])["sharpness"]
    return found | {"in ghost batches": (sharpness.value, sharpness.margin)}


def main(out, cases):
    ranks = fl.Ranks.joined()
    found = [measured(*case, ranks=ranks) for case in json.loads(cases)]
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
