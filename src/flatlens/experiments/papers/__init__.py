"""The papers' figures and tables as recipes, one file a paper."""

from __future__ import annotations

from collections.abc import Mapping

from flatlens.experiments.experiment import Experiment
from flatlens.experiments.papers import compression

EXPERIMENTS: Mapping[str, Experiment] = {one.id: one for one in compression.EXPERIMENTS}
"""By the catalogue's row."""

__all__ = ["EXPERIMENTS"]
