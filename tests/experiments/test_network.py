"""What a worker does: networks of equal data read it once and leave it as it is."""

from dataclasses import replace

import pytest
import torch

from flatlens.data import DataSettings
from flatlens.experiments import Study, network
from flatlens.experiments.network import compute
from flatlens.models import SmallVGG
from flatlens.training import SAM, Augmentation, Mixup, Until

SHORT = {"max_steps": 3, "until": Until(gradient_norm=1e-9)}
DIGITS = Study.digits("smoke").base
DIGITS = replace(DIGITS, training=replace(DIGITS.training, **SHORT), measures=("mls",))
PATCHES = replace(
    DIGITS,
    data=DataSettings("patches", train=10, test=10),
    model=SmallVGG(classes=2),
    training=replace(DIGITS.training, loss="cross_entropy", augmentation=Augmentation(), mixup=Mixup(1.0)),
)
POINTS = replace(
    DIGITS,
    data=DataSettings("eight_points"),
    model=replace(DIGITS.model, inputs=1, outputs=1),
    training=replace(DIGITS.training, batch_size=None, until=Until(loss_below=1e-9)),
)


@pytest.fixture
def read(monkeypatch):
    """The settings of all data that is read."""
    found = []
    monkeypatch.setattr(network, "_kept", {})
    monkeypatch.setattr(DataSettings, "load", lambda self, load=DataSettings.load: found.append(self) or load(self))
    return found


@pytest.mark.parametrize("settings", [DIGITS, PATCHES, POINTS], ids=lambda settings: settings.data.name)
def test_networks_of_equal_data_read_it_once_and_leave_it_as_it_is(settings, read):
    compute(settings)
    compute(replace(settings, training=replace(settings.training, ascent=SAM(0.1))))
    assert read == [settings.data]
    (kept,), fresh = network._kept.values(), settings.data.load()
    for before, after in zip((*fresh.train, *fresh.test), (*kept.train, *kept.test), strict=True):
        assert torch.equal(before, after)


def test_other_data_takes_the_place_of_what_was_kept(read, monkeypatch, tmp_path):
    first = compute(DIGITS)
    other = replace(DIGITS, data=replace(DIGITS.data, seed=1))
    assert compute(other).result["loss"] != first.result["loss"]
    assert read == [DIGITS.data, other.data]
    assert len(network._kept) == 1
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))  # where other files may be
    compute(other)
    assert read == [DIGITS.data, other.data, other.data]
