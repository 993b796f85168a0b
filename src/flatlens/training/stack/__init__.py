"""Populations trained together: networks of one kind as lanes of one stack of weights, each step one batched product.

chain.py       forward and backward passes of many networks at once
lanes.py       the stack: who is in it, one step of all, looks at their losses; what the optimisers do, on rows
population.py  which networks are lanes, and why others are not: the trial; who waits, enters, ends; checkpoints; time
"""

from flatlens.training.stack.population import LANES, Ended, Member, train_together, why_alone

__all__ = ["LANES", "Ended", "Member", "train_together", "why_alone"]
