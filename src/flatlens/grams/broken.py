"""Errors of the pass: a plan that does not hold on a chunk, samples that affect each other, errors of autograd."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flatlens.errors import BadModel, FlatlensError, LossFailed, NotDifferentiable, one_line
from flatlens.problem import Batch
from flatlens.problem.ranks import Ranks

BATCHING = "backward passes in one"
"""A name in `distrusted`, beside those of places: it stands for torch's batching of backward passes."""


class PlanBroken(Exception):
    """The network does not do on a chunk what the plan says: make the plan again, with this chunk as a trial."""

    def __init__(self, batches: list[Batch], distrusted: Collection[str] = ()) -> None:
        super().__init__("the plan of the pass does not hold on every chunk of the data")
        self.batches = batches
        self.distrusted = frozenset(distrusted)  #: places whose samples do not lie as planned, or `BATCHING`


def samples_coupled() -> BadModel:
    """Return the error for a network whose samples affect each other on some batch."""
    return BadModel(
        "Problem(model=...): in some batch a sample's outputs depend on other samples, so per-sample derivatives do "
        "not exist: a branch that few batches take, batch statistics, and attention over samples are possible causes"
    )


_IN_PLACE = "do not change tensors or frozen parameters in place"
_MENDS = {
    "inplace operation": _IN_PLACE,
    "in-place operation": _IN_PLACE,
    "torch.utils.checkpoint": "use checkpoint(..., use_reentrant=False)",
    "derivative for": "write this operation by others, which torch differentiates as often as is needed",
    "implement either the backward or vjp": "give the autograd.Function a backward() of torch operations",
    "functorch": "write this part of forward() without torch.func",
}
"""Ways to mend autograd's own errors, by parts of their messages; other errors come from the network."""


@contextmanager
def clear_autograd_errors() -> Iterator[None]:
    """Raise errors of autograd as one clear line, `NotDifferentiable`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FlatlensError) or not any(word in str(error) for word in _MENDS):
            raise
        if "loss" in str(error):  # a kernel of torch's for a loss
            raise LossFailed(
                f"Problem(loss=...): the loss cannot be differentiated as often as is needed ({one_line(error, 160)}): "
                f"write it as a function of plain operations, (outputs, targets) -> losses of shape (n,)"
            ) from error
        mend = next(mend for word, mend in _MENDS.items() if word in str(error))
        raise NotDifferentiable(
            f"Problem(model=...): the network cannot be differentiated ({one_line(error, 160)}): {mend}"
        ) from error


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """Raise PlanBroken on all ranks, with all their reasons, if one of them raised it inside the block.

    Any other error of one rank is raised on all, too.
    """
    broken = None
    with ranks.as_one():
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
