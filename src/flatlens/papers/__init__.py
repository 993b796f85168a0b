"""The papers' figures and tables as experiments: one module or folder per paper, and one for what goes beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from flatlens.papers import beyond, relative2021, reparam2019
from flatlens.papers.claims import experiment
from flatlens.papers.compression import populations, training, transformers
from flatlens.papers.experiment import Experiment
from flatlens.papers.sharpening import coordinates, descent, ends, regularised

_MODULES: Mapping[str, Mapping[ModuleType, tuple[int, ...]]] = {
    "compression": {training: (1, 2, 3), populations: (4,), transformers: (5,)},
    "sharpening": {descent: (6, 10, 11), ends: (7, 8), regularised: (9, 13), coordinates: (12,), beyond: (19,)},
    "reparam2019": {reparam2019: (14, 15)},
    "relative2021": {relative2021: (16, 17, 18)},
}
"""The modules of each paper, with the numbers of their experiments: `_x7` returns the studies of X7, `_x7_plots` its
figures."""
_FOUND = {
    number: experiment(paper, f"X{number}", vars(module))
    for paper, modules in _MODULES.items()
    for module, numbers in modules.items()
    for number in numbers
}
EXPERIMENTS: Mapping[str, Experiment] = {one.id: one for _, one in sorted(_FOUND.items())}
"""The experiments by the catalogue's row, in its order."""

__all__ = ["EXPERIMENTS"]
