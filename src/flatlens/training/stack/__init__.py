"""Populations trained together: networks of one kind as lanes of one stack of weights, each step one batched product.

kinds.py     which networks can be lanes, and why others cannot
chain.py     their forward and backward passes
updates.py   what the optimisers do, on rows
lanes.py     the stack: who is in it, one step of all, looks at their losses
trial.py     whether the bits are those of each alone, and whether it is faster
together.py  the population: who waits, enters, ends; checkpoints; time
"""

from flatlens.training.stack.population import LANES, Ended, Member, train_together, why_alone

__all__ = ["LANES", "Ended", "Member", "train_together", "why_alone"]
