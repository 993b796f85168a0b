"""Kinds of networks in a study: its architectures, with BatchNorm and without it."""

from __future__ import annotations

import re

import pandas as pd

from flatlens.experiments.vary import last_field


def kinds_of(networks: pd.DataFrame) -> pd.Series[str]:
    """Return each network's kind in the words that differ, "" where all are of one kind; as the column `kind`.

    BatchNorm is named only of architectures that can have it, and if it differs among them.

    Args:
        networks: a study's table, whose columns `model` and `batchnorm` are settings that vary, if they are there.

    >>> models = ["VGG11(classes=10, batchnorm=False)", "ResNet18(classes=10, batchnorm=True)", "LeNet5(classes=10)"]
    >>> kinds_of(pd.DataFrame({"model": models})).tolist()
    ['VGG11 without BatchNorm', 'ResNet18 with BatchNorm', 'LeNet5']
    >>> kinds_of(pd.DataFrame({"model.batchnorm": [True, False]})).tolist()
    ['with BatchNorm', 'without BatchNorm']
    """
    model = networks["model"].map(str) if "model" in networks else pd.Series("", index=networks.index)
    setting = next((name for name in networks if last_field(str(name)) == "batchnorm"), None)
    told = model.map(_batchnorm_in) if setting is None else networks[setting].map(str)
    said = told.map({"True": "with BatchNorm", "False": "without BatchNorm"})
    words = [part.fillna("") for part in (model.map(lambda m: m.partition("(")[0]), said) if part.nunique() > 1]
    named = pd.concat(words, axis=1).agg(" ".join, axis=1) if words else pd.Series("", index=networks.index)
    return named.str.strip().rename("kind")


def _batchnorm_in(model: str) -> str:
    """Return whether a network has BatchNorm, "True" or "False", from its settings in words; "" if they do not say."""
    found = re.search(r"\bbatchnorm=(True|False)", model)
    return found[1] if found else ""
