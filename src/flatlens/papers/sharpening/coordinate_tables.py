"""Tables 1 and 2 of sharpening, printed and measured: norms of coordinate networks after their training."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from flatlens.data.points import POINTS
from flatlens.papers.contrasts import off
from flatlens.papers.evidence import Table, reached, where
from flatlens.papers.experiment import Plot
from flatlens.papers.predictions import Prediction, Results

TABLE_OF = {"gaussian": "Table 1", "relu": "Table 2"}
ACTIVATION_NAMES = {"gaussian": "Gaussian", "relu": "ReLU"}
STARTS = ("high", "low")
SUMMED_SHARPNESS = "sharpness of the sum"
TABLE_ROWS = {"Jacobian norm": "jacobian_norm", "sharpness": SUMMED_SHARPNESS, "first layer's norm": "weight_norm[fc1]"}
"""Rows of the tables, and the columns that hold them here."""
PUBLISHED: Mapping[str, Mapping[str, tuple[tuple[float, float], ...]]] = {
    "gaussian": {
        "Jacobian norm": ((326.80, 182.51), (84.07, 49.30)),
        "sharpness": ((13517.61, 3871.97), (18353.54, 5751.98)),
        "first layer's norm": ((9.09, 0.34), (0.56, 0.02)),
    },
    "relu": {
        "Jacobian norm": ((121.59, 80.79), (42.96, 7.82)),
        "sharpness": ((14211.05, 4767.26), (9922.45, 3330.37)),
        "first layer's norm": ((9.61, 0.28), (9.56, 0.16)),
    },
}
"""Tables 1 and 2: mean and standard deviation over 10 trials, for a high and for a low start."""


def measured(study: str) -> Table:
    """Return the networks, with the sharpness of the error summed over the points."""

    def found(results: Results) -> pd.DataFrame:
        networks = reached(study)(results)
        return networks.assign(**{SUMMED_SHARPNESS: POINTS * networks["sharpness"]})

    return found


def of_start(study: str, start: str) -> Table:
    """Return the networks of one start."""
    return where(measured(study), lambda t: t["start"] == start)


def printed() -> tuple[Prediction, ...]:
    """Return one prediction for each printed number."""
    return tuple(
        Prediction(
            f"{study}.{start}.{_slug(row)}",
            f"{ACTIVATION_NAMES[study]} networks, {start} start: {row} {mean:,g}. Reproduced where ours is nearer to "
            f"it than the printed standard deviation, {spread:,g}.",
            f"sharpening {TABLE_OF[study]}",
            off(of_start(study, start), TABLE_ROWS[row], mean, spread),
            "below",
            1.0,
        )
        for study, table in PUBLISHED.items()
        for row, cells in table.items()
        for start, (mean, spread) in zip(STARTS, cells, strict=True)
    )


def _slug(row: str) -> str:
    return row.replace("'s", "").replace(" ", "_").lower()


def beside_printed(results: Results) -> Plot:
    """Return the tables of our numbers beside the printed ones."""
    caption = (
        "Means and standard deviations over the trials, here and in the paper. The sharpness is that of the error "
        "summed over the points; that of its mean stands beside it: the paper does not say which it takes."
    )
    return Plot("tables", "Tables 1 and 2, here and in the paper", caption, "table", _cells(results))


def _cells(results: Results) -> pd.DataFrame:
    """Return one row per norm, start and source (here or the paper), with the numbers of each cell."""
    cells = []
    for study, table in PUBLISHED.items():
        for row, printed in table.items():
            ways = {"": TABLE_ROWS[row]} | ({" of the mean": "sharpness"} if row == "sharpness" else {})
            for of, column in ways.items():
                for start, (mean, spread) in zip(STARTS, printed, strict=True):
                    values = of_start(study, start)(results)[column]
                    where = {
                        "panel": f"{TABLE_OF[study]}: {ACTIVATION_NAMES[study]} networks",
                        "row": f"{row}{of}, {start}",
                    }
                    for where_from, m, s, n in (
                        ("here", float(values.mean()), float(values.std()), len(values)),
                        ("paper", mean, spread, 10),
                    ):
                        text = f"{m:,.2f} ± {s:,.2f}"
                        cells.append({**where, "column": where_from, "text": text, "mean": m, "deviation": s, "n": n})
    return pd.DataFrame(cells)
