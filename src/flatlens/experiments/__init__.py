"""Populations of networks: train, measure, store, relate."""

from flatlens.experiments.quantities import Quantity
from flatlens.experiments.result import StudyResult
from flatlens.experiments.settings import Study
from flatlens.experiments.study import load_study, run_study

__all__ = ["Quantity", "Study", "StudyResult", "load_study", "run_study"]
