"""Kinds of networks in a study: its architectures, with BatchNorm and without it."""

from __future__ import annotations

import pandas as pd


def kinds_of(networks: pd.DataFrame) -> pd.Series[str]:
    """Return each network's kind in the words that differ, "" where all are of one kind; as the column `kind`.

    Args:
        networks: a study's table, whose columns `model` and `batchnorm` are settings that vary, if they are there.

    >>> kinds_of(pd.DataFrame({"model": ["VGG11(classes=10, batchnorm=False)", "ResNet18(classes=10)"]})).tolist()
    ['VGG11 without BatchNorm', 'ResNet18 with BatchNorm']
    >>> kinds_of(pd.DataFrame({"model": ["MLP(widths=(64,))", "LeNet()"]})).tolist()
    ['MLP', 'LeNet']
    """
    model = networks["model"].map(str) if "model" in networks else pd.Series("", index=networks.index)
    told = (
        networks["batchnorm"].map(bool) if "batchnorm" in networks else model.map(lambda m: "batchnorm=False" not in m)
    )
    said = told.map({True: "with BatchNorm", False: "without BatchNorm"})
    words = [part for part in (model.map(lambda m: m.partition("(")[0]), said) if part.nunique() > 1]
    named = pd.concat(words, axis=1).agg(" ".join, axis=1) if words else pd.Series("", index=networks.index)
    return named.rename("kind")
