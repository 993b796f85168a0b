"""Packs of networks for the workers of a study: networks of one kind together, to be trained as one stack."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import zip_longest
from typing import TypeAlias

from flatlens.experiments.settings import NetworkSettings
from flatlens.models import Architecture
from flatlens.training.elsewhere import TrainedElsewhere
from flatlens.training.optimisers import SGD
from flatlens.training.ridge import Ridge
from flatlens.training.settings import Training
from flatlens.training.stack import LANES, why_alone
from flatlens.training.stack.updates import kind_of

Pack: TypeAlias = tuple[NetworkSettings, ...]
FEW, MANY = LANES, 64
"""Least number of networks in a pack, as smaller stacks gain less; and largest, as a lost pack is redone one by one."""
TURNS = 3
"""Least number of packs for each worker, so that none is idle for long."""


def packs(networks: Sequence[NetworkSettings], *, together: int, hands: int | None, pack: int) -> list[Pack]:
    """Return the networks in packs: of one kind each, in turns, large batches first, for their steps take longest.

    Args:
        networks: all that are to be trained.
        together: how many may be trained in a stack; 1 for none.
        hands: how many packs are worked on at a time; None where that is not known.
        pack: how many of those that no stack takes go to a worker at a time.
    """
    kinds: dict[Hashable, list[NetworkSettings]] = {}
    for one in networks:
        kinds.setdefault(None if together == 1 else _kind(one), []).append(one)
    alone = kinds.pop(None, [])
    stacked = sum(map(len, kinds.values()))
    size = FEW if hands is None else min(max(-(-stacked // (TURNS * hands)), FEW), -(-stacked // hands) or 1, MANY)
    longest = sorted(kinds.values(), key=lambda alike: _batch_size(alike[0]) or math.inf, reverse=True)
    turns = zip_longest(*(list(_pieces(alike, size)) for alike in longest))
    return [one for turn in turns for one in turn if one] + list(_pieces(alone, pack))


def _pieces(networks: Sequence[NetworkSettings], size: int) -> Iterator[Pack]:
    """Yield packs of at most `size` networks, as equal in size as possible."""
    count = -(-len(networks) // size)
    for number in range(count):
        yield tuple(networks[len(networks) * number // count : len(networks) * (number + 1) // count])


def _kind(settings: NetworkSettings) -> Hashable:
    """Return what networks in one stack must share; None where no stack takes them."""
    model, training = _of_any_seed(settings.model), settings.training
    if isinstance(training, TrainedElsewhere) or _why_alone(model, training):
        return None
    assert not isinstance(training.optimiser, Ridge)
    return settings.data, model, training.loss, training.batch_size, kind_of(training.optimiser)


def _batch_size(settings: NetworkSettings) -> int | None:
    return settings.training.batch_size if isinstance(settings.training, Training) else None


def _why_alone(model: Architecture, training: Training) -> str:
    return _own_steps(training) or _of_model(model)


def _own_steps(training: Training) -> str:
    from torch import nn

    return why_alone(nn.Linear(1, 1), training)


@cache
def _of_model(model: Architecture) -> str:
    try:
        return why_alone(model.build(), Training(SGD(1.0), max_steps=1))
    except Exception as error:  # the worker that builds it notes it as the failure of its network
        return type(error).__name__


def _of_any_seed(model: Architecture) -> Architecture:
    return replace(model, seed=0) if any(field.name == "seed" for field in fields(model)) else model
