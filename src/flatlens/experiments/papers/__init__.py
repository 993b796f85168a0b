"""The papers' figures and tables as recipes, one module a paper."""

from __future__ import annotations

from collections.abc import Mapping

from flatlens.experiments.experiment import Experiment
from flatlens.experiments.papers import compression, relative2021, reparam2019, sharpening

EXPERIMENTS: Mapping[str, Experiment] = {
    one.id: one for paper in (compression, sharpening, reparam2019, relative2021) for one in paper.EXPERIMENTS
}
"""By the catalogue's row."""

__all__ = ["EXPERIMENTS"]
