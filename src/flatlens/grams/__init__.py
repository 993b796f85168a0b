"""The one pass: Gram matrices at every place of a network, from one forward and N backward passes.

Read the modules in this order:

    record            runs the network once, and keeps each linear layer's input and output and autograd's graph
    planner           makes the plan from trials on probe samples, and proves it against autograd there
    plan              the plan itself: what the graph proves, where the samples lie, and the check of a chunk
    data_pass         the loop over chunks
    output_jacobians  the N backward passes of a chunk, and the check that they agree with the plan
    jacobians         Jacobians and Gram matrices of every place, which measures read, from the output Jacobians
    weight_jacobians  the Jacobian in a weight: dense, at many positions, explicit; the contractions
"""

from flatlens.grams.autograd import singular
from flatlens.grams.data_pass import Sketch, feature_spread, features_read, one_pass, outside_keys, require_told_apart
from flatlens.grams.jacobians import ChunkGrams, LayerGrams
from flatlens.grams.plan import UNREAD_PRODUCT, Plan, PlanBroken, Weight, agreed
from flatlens.grams.planner import lay_out
from flatlens.grams.weight_jacobians import quadratic, row_factor, trace

__all__ = [
    "UNREAD_PRODUCT",
    "ChunkGrams",
    "LayerGrams",
    "Plan",
    "PlanBroken",
    "Sketch",
    "Weight",
    "agreed",
    "feature_spread",
    "features_read",
    "lay_out",
    "one_pass",
    "outside_keys",
    "quadratic",
    "require_told_apart",
    "row_factor",
    "singular",
    "trace",
]
