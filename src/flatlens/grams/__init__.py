"""The one pass: Gram matrices at every place of a network, from one forward and N backward passes.

Read the modules in this order:

    record            runs the network once, and keeps each linear layer's input and output and autograd's graph
    structure         what the graph proves: which operations read a parameter, where the outputs are curved
    rows              on which axis of a tensor the samples lie, and a test that no sample affects another
    trial             a run on probe samples: the structure, and the possible positions of the samples
    planner           makes the plan from the trials (`proof` checks it against autograd there)
    layout            the plan itself, and the check that a chunk has its structure
    one_pass          the loop over chunks
    places            the places to which a chunk's outputs are differentiated
    output_jacobians  the N backward passes of a chunk
    certificate       the check that a chunk's Jacobians agree with the plan
    jacobians         Jacobians of parameters and inputs, from the output Jacobians
"""

from flatlens.grams.autograd import singular
from flatlens.grams.contractions import quadratic, trace
from flatlens.grams.data_pass import one_pass
from flatlens.grams.features import feature_spread, features_read, outside_keys, require_told_apart
from flatlens.grams.layer_grams import ChunkGrams, LayerGrams
from flatlens.grams.plan import UNREAD_PRODUCT, Layout, PlanBroken, Weight, agreed
from flatlens.grams.planner import lay_out
from flatlens.grams.sketch import Sketch
from flatlens.grams.weight_jacobians import row_factor

__all__ = [
    "UNREAD_PRODUCT",
    "ChunkGrams",
    "LayerGrams",
    "Layout",
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
