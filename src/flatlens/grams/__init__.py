"""The one pass: Gram matrices of every place of a network, from one forward and N backward passes."""

from flatlens.grams.broken import PlanBroken, agreed
from flatlens.grams.contractions import quadratic, trace
from flatlens.grams.features import feature_spread
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.layout import Layout, Weight
from flatlens.grams.one_pass import one_pass
from flatlens.grams.planner import lay_out
from flatlens.grams.sketch import Sketch
from flatlens.grams.weight import row_factor

__all__ = [
    "ChunkGrams",
    "LayerGrams",
    "Layout",
    "PlanBroken",
    "Sketch",
    "Weight",
    "agreed",
    "feature_spread",
    "lay_out",
    "one_pass",
    "quadratic",
    "row_factor",
    "trace",
]
