"""The papers' figures and tables as experiments: one module or folder per paper, and one for what goes beyond them."""

from __future__ import annotations

from collections.abc import Mapping

from flatlens.papers import beyond, compression, relative2021, reparam2019, sharpening
from flatlens.papers.experiment import Experiment

_ALL = (one for each in (compression, sharpening, reparam2019, relative2021, beyond) for one in each.EXPERIMENTS)
EXPERIMENTS: Mapping[str, Experiment] = {one.id: one for one in sorted(_ALL, key=lambda one: int(one.id[1:]))}
"""The experiments by the catalogue's row, in its order."""

__all__ = ["EXPERIMENTS"]
