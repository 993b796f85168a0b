"""Inside the networks: each measure layer by layer, and how the training went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import pandas as pd

from flatlens.report import frames
from flatlens.report.figures.figure import Drawing, Figure, Grid, Width, dashed, empty, log_axis

if TYPE_CHECKING:
    from flatlens.experiments import StudyResult

_PANELS_A_ROW = 3


def layer_profiles(result: StudyResult) -> Figure:
    """Return a panel for each measure: a thin line for each network, a thick one for the median of a learning rate."""
    data = frames.profile_frame(result)
    grid = Grid.of(result)
    whose = f"its {frames.spoken(grid.colour)}" if grid.known_colours else "all of them"
    names = list(dict.fromkeys(data["measure"]))

    def draw(width: Width) -> list[Drawing]:
        return [_profile(data[data["measure"] == name], name, grid, width) for name in names]

    panels = draw("container") or [empty("no value by layer")]
    whole = alt.concat(*draw(300), columns=_PANELS_A_ROW).resolve_scale(color="shared") if names else panels[0]
    return Figure(
        name="layer_profiles",
        title="Layer by layer",
        caption=f"Layers from input to output. A thin line is one network{dashed(data['included'])}, a thick one the "
        f"median of {whose}. The axis is logarithmic where every value is positive.",
        data=data,
        whole=whole,
        panels=tuple(panels),
        layout="grid",
    )


def _profile(data: pd.DataFrame, measure: str, grid: Grid, width: Width) -> Drawing:
    data = grid.told(data)
    layers = list(data.sort_values("position")["layer"].drop_duplicates())
    logarithmic = bool((data["value"] > 0).all())
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(type="log", nice=False) if logarithmic else alt.Scale(zero=False),
        axis=log_axis(data["value"], None) if logarithmic else alt.Axis(title=None, tickCount=5),
    )
    x = alt.X("layer:O", sort=layers, title=None, axis=alt.Axis(labelAngle=0, labelOverlap=True))
    colour = grid.colour_of(alt.Color, width != "container")
    thin = (
        alt.Chart(data)
        .mark_line(strokeWidth=1, strokeOpacity=0.5)  # plain opacity takes the PNG twenty times as long
        .encode(x=x, y=y, color=colour, detail="key:N", strokeDash=_dashed_if_excluded())
    )
    thick = (
        alt.Chart(frames.middle_profiles(data, frames.plain_field(grid.colour)))
        .mark_line(strokeWidth=2.6, point=alt.OverlayMarkDef(size=38, filled=True))
        .encode(
            x=x,
            y=y,
            color=colour,
            tooltip=[
                alt.Tooltip("layer:N"),
                alt.Tooltip(f"{frames.plain_field(grid.colour)}:N", title=frames.spoken(grid.colour)),
                alt.Tooltip("value:Q", title=f"median {measure}", format=".4g"),
            ],
        )
    )
    scale = "log scale" if logarithmic else "linear scale"
    return alt.layer(thin, thick).properties(
        width=width, height=190, title=alt.TitleParams(text=measure, subtitle=scale)
    )


def training_curves(result: StudyResult) -> Figure:
    """Return a panel for each batch size: the training loss over steps, on log axes, and the loss trained to."""
    data = frames.curve_frame(result)
    grid = Grid.of(result)
    bound = result.settings.get("base", {}).get("training", {}).get("until", {}).get("loss_below")
    extent = (float(data["step"].min()), float(data["step"].max())) if len(data) else (1.0, 1.0)

    def draw(width: Width) -> list[Drawing]:
        parts = data.groupby("batch_size", sort=True)
        return [_curves(part, f"batch size {size}", bound, extent, grid, width) for size, part in parts]

    panels = draw("container") or [empty("no training curve")]
    whole = alt.concat(*draw(300), columns=_PANELS_A_ROW).resolve_scale(color="shared") if len(data) else panels[0]
    stop = f" The dashed level is the loss every network was trained to ({bound:g})." if bound else ""
    return Figure(
        name="training_curves",
        title="Training",
        caption="Loss over the whole training set against the number of updates, one line a "
        f"network{dashed(data['included'])}.{stop}",
        data=data,
        whole=whole,
        panels=tuple(panels),
        layout="grid",
    )


def _curves(
    data: pd.DataFrame, title: str, bound: float | None, extent: tuple[float, float], grid: Grid, width: Width
) -> Drawing:
    lines = (
        alt.Chart(grid.told(data))
        .mark_line(strokeWidth=1.2, strokeOpacity=0.85, clip=True)
        .encode(
            x=alt.X(
                "step:Q",
                scale=alt.Scale(type="log", domain=list(extent), nice=False),
                axis=log_axis(data["step"], "step"),
            ),
            y=alt.Y("loss:Q", scale=alt.Scale(type="log"), axis=log_axis(data["loss"], "training loss")),
            color=grid.colour_of(alt.Color, width != "container"),
            detail="key:N",
            strokeDash=_dashed_if_excluded(),
            tooltip=grid.tooltip(alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".3g")),
        )
    )
    layers: list[alt.Chart] = [lines]
    if bound:
        layers.append(alt.Chart(pd.DataFrame({"loss": [bound]})).mark_rule(strokeDash=[4, 3]).encode(y="loss:Q"))
    return alt.layer(*layers).properties(width=width, height=210, title=title)


def _dashed_if_excluded() -> alt.StrokeDash:
    solid = [1, 0]
    return alt.StrokeDash("included:N", scale=alt.Scale(domain=[True, False], range=[solid, [4, 3]]), legend=None)
