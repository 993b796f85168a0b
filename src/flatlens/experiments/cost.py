"""Expected duration of an experiment, from a short trial of one network of each study."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from flatlens.experiments.measuring import tracker_of
from flatlens.experiments.network import compute
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.training import Ridge, Training, Until

WARM, TRIED = 3, 13
"""Steps of two trials, after a trial that is not counted; their difference cancels work that is done once."""
FOLD, CLEAR = 4, 0.5
"""The second trial's steps are multiplied by FOLD until it takes 1 + CLEAR times as long as the first: a look at all
data at the end takes as long as hundreds of steps, and so does what else the machine does."""


@dataclass(frozen=True)
class Cost:
    """Seconds on one thread; training counts all steps, although it may end earlier."""

    networks: int
    training: float
    measuring: float

    @property
    def seconds(self) -> float:
        """Seconds of training and measuring in one process."""
        return self.training + self.measuring

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.networks + other.networks, self.training + other.training, self.measuring + other.measuring)


def cost_of(studies: Iterable[Study], done: Collection[str] = ()) -> Cost:
    """Return the cost of all networks of the studies, estimated from the first of each; right within a factor of 2.

    `done`: the keys of networks that are not trained again.

    Raises:
        BadInput: the data of a study cannot be read.
    """
    left = ([one for one in study.networks() if one.key not in done] for study in studies)
    return sum((_of_networks(networks) for networks in left if networks), Cost(0, 0.0, 0.0))


def _of_networks(networks: Sequence[NetworkSettings]) -> Cost:
    first = networks[0]
    unmeasured = replace(first, measures=("loss",), moved=())  # some measure for minutes
    _, (short, _, samples) = [_trial(unmeasured, WARM) for _ in range(2)]
    steps = [_steps(one, samples) for one in networks]
    step = short if _is_solved(first) else _seconds_per_step(unmeasured, short, max(steps))
    measuring = _trial(first, WARM)[1]
    moments = sum(_moments(one, samples) for one in networks)
    measured = len(networks) * measuring + (moments * _moment(first) if moments else 0.0)
    return Cost(len(networks), step * sum(steps), measured)


def _is_solved(settings: NetworkSettings) -> bool:
    """Return whether the training is a ridge regression: one step, whatever number of steps the settings give."""
    return isinstance(settings.training, Training) and isinstance(settings.training.optimiser, Ridge)


def _steps(settings: NetworkSettings, samples: int) -> int:
    return 1 if _is_solved(settings) else settings.training.steps(samples)


def _seconds_per_step(settings: NetworkSettings, short: float, most: int) -> float:
    """Return the seconds of a step; `short` are those of the first trial, `most` is the largest number of steps."""
    tried = TRIED
    while True:
        long = _trial(settings, tried)[0]
        if long > (1 + CLEAR) * short or tried >= most:
            break
        tried = min(FOLD * tried, most)
    return (long - short) / (tried - WARM) if long > short else long / tried  # noise: a step takes next to nothing


def _trial(settings: NetworkSettings, steps: int) -> tuple[float, float, int]:
    """Return the seconds of training this number of steps, the seconds of measuring, and the training samples."""
    assert isinstance(settings.training, Training)
    training = replace(settings.training, max_steps=steps, max_epochs=None, until=Until())
    result = compute(replace(settings, training=training, followed=None)).result
    return result["seconds_training"], result["seconds_measuring"], result["samples"]


def _moments(settings: NetworkSettings, samples: int) -> int:
    if (followed := settings.followed) is None:
        return 0
    steps = _steps(settings, samples)
    return 1 + steps // followed.every if isinstance(followed.every, int) else len(followed.every)


def _moment(settings: NetworkSettings) -> float:
    """Return the seconds of one measurement during training: the second one, without the work that is done once."""
    assert settings.followed is not None
    followed = replace(settings.followed, every=1)
    tracker = tracker_of(settings.model.build(), settings.data.load(), replace(settings, followed=followed))
    assert tracker is not None
    tracker.step(0)
    start = time.perf_counter()
    tracker.step(1)
    return time.perf_counter() - start
