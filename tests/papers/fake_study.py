"""Results of a study that was never run: its tables, and axes as its tables have them."""

from types import SimpleNamespace

import pandas as pd


def fake_result(columns, **tables):
    """A result with these columns of networks; the study varies the seed if there is a column of seeds."""
    networks = pd.DataFrame(columns)
    if "outcome" not in networks:
        networks["outcome"] = "finished"
    if "key" not in networks:
        networks["key"] = [f"k{i}" for i in range(len(networks))]
    settings = [name for name in networks if name in ("seed", "smoothing")]
    axes = [{"name": "seed", "values": [0, 1]}] if "seed" in networks else []
    return SimpleNamespace(networks=networks, settings={"axes": axes}, varied=settings, **tables)
