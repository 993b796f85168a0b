"""What was run, in words, from a study's settings."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from flatlens.data import DataSettings
from flatlens.experiments import Study
from flatlens.experiments.settings import Axis
from flatlens.report.prose import what_was_run
from flatlens.training import SGD, Adam


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        (Axis("batch_size+lr", ((4, 0.1), (8, 0.2))), "batch sizes with learning rates 4 with 0.1 and 8 with 0.2, 2"),
        (Axis("training.optimiser", (SGD(0.1), Adam(1e-4))), "optimiser SGD at 0.1 and Adam at 0.0001, 2 seeds"),
        (Axis("lr", (0.1, 0.2)), "learning rates 0.1 and 0.2, 2 seeds for each"),
    ],
)
def test_axes_are_told_with_their_values(axis, said):
    study = Study("told", Study.digits("smoke").base, (axis, Axis("seed", (0, 1))))
    networks = pd.DataFrame({"seed": [0, 1, 0, 1]})
    assert said in what_was_run(SimpleNamespace(settings=study.as_json(), networks=networks))


def test_seeds_are_counted_and_not_listed():
    seeds = Axis("data.seed+model.seed+training.seed", tuple((k, k, k) for k in range(100)))
    study = Study("told", Study.digits("smoke").base, (seeds,))
    told = what_was_run(SimpleNamespace(settings=study.as_json(), networks=pd.DataFrame({"seed": range(100)})))
    assert ": 100 seeds." in told
    assert "seed+" not in told


def test_seeds_that_differ_with_other_settings_are_not_listed():
    own = Axis("lr+batch_size+seed", ((0.1, 4, 0), (0.1, 4, 1), (0.2, 8, 2)))
    study = Study("told", Study.digits("smoke").base, (own,))
    told = what_was_run(SimpleNamespace(settings=study.as_json(), networks=pd.DataFrame({"seed": range(3)})))
    assert "learning rates with batch sizes 0.1 with 4 and 0.2 with 8, each network with a seed of its own." in told


def test_values_with_different_numbers_of_seeds_are_told_so():
    starts = Axis("batch_size+seed", ((4, 0), (4, 1), (8, 0), (8, 1), (8, 2)))
    study = Study("told", Study.digits("smoke").base, (Axis("lr", (0.1, 0.2)), starts))
    networks = pd.DataFrame({"seed": [0, 1, 0, 1, 2] * 2})
    told = what_was_run(SimpleNamespace(settings=study.as_json(), networks=networks))
    assert "learning rates 0.1 and 0.2, batch sizes 4 and 8, 2 or 3 seeds for each combination." in told


def test_optimisers_with_seeds_of_their_own_are_listed_once():
    own = Axis("training.optimiser+seed", ((SGD(0.1), 0), (SGD(0.1), 1), (Adam(1e-4), 2)))
    study = Study("told", Study.digits("smoke").base, (own,))
    told = what_was_run(SimpleNamespace(settings=study.as_json(), networks=pd.DataFrame({"seed": range(3)})))
    assert "optimiser SGD at 0.1 and Adam at 0.0001, each network with a seed of its own." in told
    assert "trained by" not in told


def test_architectures_are_counted_and_not_listed(laptop):
    axes = [{"name": "model", "values": [{"type": "ViT", "depth": d} for d in range(36)]}]
    base = {**laptop.settings["base"], "training": {"max_steps": 0, "loss": "mse"}, "model": {"type": "ViT"}}
    networks = laptop.networks.assign(seed=0, outcome="finished")
    told = what_was_run(replace(laptop, networks=networks, settings={"base": base, "axes": axes}))
    trained = (
        "48 networks (ViT), at their initial weights on 600 training samples of digits with the mean squared error"
    )
    assert told == f"{trained}: 36 models."


def test_few_architectures_are_named(laptop):
    values = [{"type": "SmallVGG"}, {"type": "UserNetwork", "source": "/here/net.py:build"}]
    settings = {**laptop.settings, "axes": [{"name": "model", "values": values}]}
    told = what_was_run(replace(laptop, networks=laptop.networks.assign(seed=0), settings=settings))
    assert told.startswith("48 networks, trained by SGD on")
    assert ": models SmallVGG and net.py:build." in told


def test_networks_that_did_not_get_there_are_named(laptop):
    """The laptop fixture has one; of many, the first few are."""
    laptop = replace(laptop, varied=["lr", "batch_size", "seed"])
    told = what_was_run(laptop)
    (short,) = laptop.networks[laptop.networks["outcome"] == "out of steps"].to_dict("records")
    said = f"out of steps (learning rate {short['lr']:g}, batch size {short['batch_size']}, seed {short['seed']})."
    assert told.endswith(f" 1 network did not get there: {said}")
    every = what_was_run(replace(laptop, networks=laptop.networks.assign(outcome="diverged")))
    assert "48 networks did not get there:" in every
    assert every.count("diverged (") == 4
    assert every.endswith("; and 44 more (44 diverged).")


def test_an_end_by_epochs_is_said_and_data_that_are_an_axis_are_named():
    base = Study.digits("smoke").base
    training = replace(base.training, max_epochs=50)
    study = Study("told", replace(base, training=training), (Axis("lr", (0.1, 0.2)),))
    networks = pd.DataFrame({"seed": [0, 0]})
    told = what_was_run(SimpleNamespace(settings=study.as_json(), networks=networks))
    assert told.endswith("was under 0.01, or for 10,000 steps or 50 epochs, whichever came first.")
    alone = Study("told", replace(base, training=replace(training, max_steps=None)), (Axis("lr", (0.1, 0.2)),))
    assert what_was_run(SimpleNamespace(settings=alone.as_json(), networks=networks)).endswith("or for 50 epochs.")
    pairs = ((DataSettings("digits", train=200), 4), (DataSettings("clusters"), 8))
    both = Study("told", base, (Axis("data+batch_size", pairs),))
    told = what_was_run(SimpleNamespace(settings=both.as_json(), networks=networks))
    assert "digits with 4 and clusters with 8" in told
    assert "None" not in told
