"""Reports with made-up numbers, of networks and of groups."""

import numpy as np
import torch

from flatlens.comparing import Comparison, GroupComparison
from flatlens.estimate import Estimate, Report
from flatlens.measures import MEASURES

CHANCE = float(np.log(10))
ABOUT = {
    "n": 50,
    "outputs": 10,
    "loss": "cross_entropy",
    "dtype": "float64",
    "arithmetic": "full",
    "constant": {"loss": CHANCE, "share": 0.1},
}


def samples(mean, n=50, spread=0.1):
    """Losses of single samples with exactly this mean, most of them small and few large."""
    drawn = np.random.default_rng(int(abs(mean) * 1e6) if mean == mean else 0).exponential(1.0, n)
    return torch.from_numpy(mean * (1 + spread * (drawn - drawn.mean())))


def report(train, test=None, accuracy=None, **measures):
    """The losses of samples, or their mean, and values of measures."""
    train, test = (samples(one) if isinstance(one, float) else one for one in (train, test))
    rows = {
        "loss": Estimate(float(train.mean()), samples=train),
        "accuracy": Estimate(accuracy or (1.0 if float(train.mean()) < 2 else 0.1)),
    }
    if test is not None:
        rows["test_loss"] = Estimate(float(test.mean()), 0.1, "estimate", samples=test)
        rows["test_accuracy"] = Estimate(0.9 - float(test.mean()) / 10, 0.01, "estimate")
        rows["generalisation_gap"] = Estimate(float(test.mean() - train.mean()), 0.1, "estimate")
    rows |= {name: one if isinstance(one, Estimate) else Estimate(float(one)) for name, one in measures.items()}
    return Report({(name, None): one for name, one in rows.items()}, dict(ABOUT))


def chosen(reports):
    names = {name for report in reports.values() for name, _ in report} - {"loss", "accuracy"}
    return {
        name: MEASURES[name] for name in MEASURES if name in names and MEASURES[name].card.family != "generalisation"
    }


def compared(same_architecture=True, **reports):
    return Comparison(reports, chosen(reports), same_architecture=same_architecture)


def grouped(paired=True, **groups):
    """Groups of reports; the first is the reference."""
    reports = {f"{group} {i}": one for group, of in groups.items() for i, one in enumerate(of, 1)}
    names = {group: [f"{group} {i}" for i in range(1, len(of) + 1)] for group, of in groups.items()}
    return GroupComparison(Comparison(reports, chosen(reports)), names, paired)
