"""Options of measures that cannot be used."""

from __future__ import annotations

import pytest
from networks import network

import flatlens as fl
from flatlens.errors import BadOption


@pytest.mark.parametrize(("key", "told"), [
    ("average_sharpness(rho=0)", "rho=0: expected a positive number"),
    ("average_sharpness(rho=True)", "rho=True"),
    ("average_sharpness(probes=1)", "probes=1: expected a whole number of at least 2"),
    ("average_sharpness(scale='sum')", "'curvature', 'published46'"),
    ("worst_sharpness(rho=-1)", "rho=-1"),
    ("worst_sharpness(m=0)", "m=0"),
    ("worst_sharpness(steps=0)", "steps=0"),
    ("pac_bayes_flatness(level=0)", "level=0"),
    ("pac_bayes_flatness(of='f1')", "of='f1': expected one of 'accuracy', 'loss'"),
    ("feature_robustness(over='all')", "'rotations', 'ball', 'truncated_normal', 'noise', 'worst'"),
    ("average_sharpness(adaptive='no')", "adaptive='no': expected True or False"),
    ("feature_robustness(layers=3)", "layers=3: expected True or False"),
    ("feature_robustness(sigma=0)", "sigma=0"),
    ("locally_constant_labels(delta=0)", "delta=0"),
    ("representativeness(folds=1)", "folds=1"),
    ("representativeness(bandwidth='wide')", "'scott', 'relative'"),
    ("representativeness(over='noise')", "'rotations', 'ball', 'truncated_normal'"),
    ("generalisation_gap(convention='ratio')", "'signed', 'absolute', 'summed_x5', 'accuracy'"),
    ("directional_sharpness(along='Adam')", "along='Adam': expected one of 'update', 'gradient'"),
    ("minibatch_sharpness(rtol=0)", "rtol=0: expected a number between 0 and 1"),
])  # fmt: skip
def test_bad_options_are_told_in_one_line(key: str, told: str) -> None:
    net, x, y = network("mlp-relu", n=9)
    with pytest.raises(BadOption) as error:
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), key)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rtol", [0, 1, 2.0, "small"])
def test_a_tolerance_is_between_0_and_1(rtol: object) -> None:
    net, x, y = network("mlp-relu", n=9)
    with pytest.raises(BadOption, match=r"measure sharpness: option rtol=.*: expected a number between 0 and 1"):
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), fl.measures.MEASURES["sharpness"](rtol=rtol))
