"""What breaks a plan: a chunk on which the network does something else, or samples that see each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flatlens.errors import BadLoss, BadModel, FlatlensError, one_line
from flatlens.problem import Batch
from flatlens.problem.ranks import Ranks

BATCHING = "backward passes in one"
"""A name for `distrusted`, beside those of places: torch's batching of several backward passes."""


class PlanBroken(Exception):
    """A chunk on which the network does not do what the plan says: the plan is to be made anew with it."""

    def __init__(self, batches: list[Batch], distrusted: Collection[str] = ()) -> None:
        super().__init__("the plan of the pass does not hold on every chunk of the data")
        self.batches = batches
        self.distrusted = frozenset(
            distrusted
        )  #: places whose samples do not lie where the plan has them, or `BATCHING`


def samples_coupled() -> BadModel:
    """The error of a network whose samples see each other on some batch."""
    return BadModel(
        "Problem(model=...): on some batch the outputs of a sample depend on other samples: per-sample derivatives do "
        "not exist. Is there a statistic over the batch, or an attention or recurrence over samples, in a rare branch?"
    )


_AUTOGRAD_WORDS = ("inplace operation", "in-place operation", "torch.utils.checkpoint", "derivative for", "functorch")
"""What autograd's own errors speak of; others are the network's."""


@contextmanager
def clear_autograd_errors() -> Iterator[None]:
    """Give what autograd refuses in one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FlatlensError) or not any(word in str(error) for word in _AUTOGRAD_WORDS):
            raise
        if "loss" in str(error):  # a kernel of torch's for a loss
            raise BadLoss(
                f"Problem(loss=...): the loss cannot be differentiated as often as is needed ({one_line(error, 160)}): "
                f"write it as a function of plain operations, (outputs, targets) -> losses of shape (n,)"
            ) from error
        raise BadModel(
            f"Problem(model=...): the network cannot be differentiated ({one_line(error, 160)}): is a tensor or a "
            f"frozen parameter changed in place, or a checkpoint reentrant? use_reentrant=False is measured"
        ) from error


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """Let a plan that broke on one rank break on all of them, for the same reasons, before they meet again."""
    broken = None
    try:
        yield
    except PlanBroken as error:
        broken = error
    told = None if broken is None else (broken.batches, broken.distrusted)
    every = [one for one in ranks.together(told) if one is not None]
    if every:
        raise PlanBroken(
            [batch for batches, _ in every for batch in batches], frozenset().union(*(places for _, places in every))
        ) from broken
