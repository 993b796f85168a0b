"""Compression of one network, as a terminal screen and as a page: forecast and measured rises, and the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.comparing import Compression
from flatlens.comparing.compressing import CompressedLayer
from flatlens.progress import by_key
from flatlens.report.screen import Fitted, head_of_screen, remark

ALL_LAYERS = "all layers"
COLUMNS_MEAN = (
    "forecast: g^T dw + 1/2 dw^T H dw; rise: measured, with its 95% interval over samples; flagged: higher orders "
    "exceed a quarter of the forecast, which may be more than 1.5 times too large or too small; size: bits after over "
    "bits before."
)
"""The meaning of the columns."""


def compression_screen(found: Compression) -> RenderableType:
    """Return the screen of `flatlens compress`: the answer, a row for each layer and scheme, the plan."""
    table = Fitted("What each layer costs", names=["layer"], values=["size", "forecast", "rise", "flagged"])
    for scheme, rows in by_key((row.scheme, row) for row in found.rows).items():
        table.section(scheme)
        for row in rows:
            flagged = Text("" if row.valid else "flagged", style="yellow")
            table.row(row.layer or ALL_LAYERS, f"{row.size:.2f}", f"{row.forecast:.3g}", rise_of(row), flagged)
    plan = Fitted("The plan", names=["layer", "parameter"], values=["scheme", "bits", "rise alone"])
    for name, layer in found.plan["layers"].items():
        plan.row(name, layer["parameter"], layer["scheme"], str(layer["bits"]), f"{layer['rise_alone']:.2g}")
    return Group(*head_of_screen({"": found.about}, found.answer), table, plan, remark("\n", COLUMNS_MEAN))


def rise_of(row: CompressedLayer | Mapping[str, Any]) -> str:
    """Return a measured rise with its margin."""
    rise, stderr = (
        (row.rise, row.rise_stderr) if isinstance(row, CompressedLayer) else (row["rise"], row["rise_stderr"])
    )
    return f"{rise:.3g}" + (f" ± {1.96 * stderr:.1g}" if stderr == stderr else "")


def write_compression_page(found: Compression, path: Path) -> Path:
    """Write one HTML file that needs no network: forecast and rise as a picture and in a table, and the plan."""
    from flatlens.report.figures.measured import rises_figures  # not above: the screen draws nothing
    from flatlens.report.page import write_page

    return write_page(
        "compression",
        path,
        {"": found.about},
        answer=found.answer,
        figures=rises_figures(found),
        groups=by_key((row.scheme, row) for row in found.rows),
        correlations=found.correlations().to_dict("records"),
        plan=found.plan,
        all_layers=ALL_LAYERS,
        rise_of=rise_of,
        meaning=COLUMNS_MEAN,
    )
