"""A study at other seeds and of another size."""

from dataclasses import fields, is_dataclass

import pytest

from flatlens.papers import EXPERIMENTS
from flatlens.papers.reproduction import SHIFT, rerun


def seeds(settings):
    """Every field called seed, at any depth."""
    if not is_dataclass(settings):
        return []
    found = [settings.seed] if hasattr(settings, "seed") else []
    return found + [seed for field in fields(settings) for seed in seeds(getattr(settings, field.name))]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_seed_is_another_and_nothing_else_is_but_the_size(name):
    for study in EXPERIMENTS[name].studies("smoke").values():
        for before, after in zip(study.networks(), rerun(study).networks(), strict=True):
            assert seeds(after) == [seed + SHIFT for seed in seeds(before)] != []
            assert after.measures == before.measures
            assert type(after.model) is type(before.model)
            for size in ("train", "test"):
                one, two = getattr(before.data, size), getattr(after.data, size)
                assert two is one is None or two == round(1.5 * one)
