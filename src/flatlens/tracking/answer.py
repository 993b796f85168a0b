"""The answer to a tracked training run: its edge of stability, its loss, the noise of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from flatlens.column import Column
from flatlens.curvature.optimiser_geometry import WITH_EDGE

AT_EDGE = 0.9  #: least ratio of a sharpness to its edge at which a run counts as at the edge
ABOVE_EDGE = 1.2  #: ratio from which it is above it


def answer_of_run(history: pd.DataFrame) -> list[str]:
    """Return the answer to a history: the edge of stability, the loss, and the noise of gradients.

    >>> rows = [{"step": s, "measure": "sharpness", "layer": "", "value": v, "stderr": 0.0, "kind": "lower bound",
    ...          "lr": 0.1, "edge": 20.0} for s, v in ((0, 5.0), (100, 21.0), (200, 20.2))]
    >>> answer_of_run(pd.DataFrame(rows))[0]
    'Training has been at its edge of stability since step 100: since then sharpness is 1.03 times the edge.'
    """
    columns = [Column.parse(name) for name in history["measure"]]
    named = history.assign(name=["" if one.part else one.name for one in columns])
    known = named[(named["layer"] == "") & (named["name"] != "") & (named["kind"] != "undefined")]
    by = {str(name): rows for name, rows in known.groupby("name", sort=False)}
    return [*_of_edge(by), *_of_loss(by), *_of_noise(by, history.attrs.get("batch_size"))]


def _of_edge(by: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    beside = {name: rows[rows["edge"] > 0] for name, rows in by.items() if name in WITH_EDGE}
    # the first of the measures with an edge, in the order of WITH_EDGE: several may be there
    name = next((one for one in WITH_EDGE if len(beside.get(one, ()))), None)
    if name is None:
        yield f"No edge of stability is known: track one of {', '.join(WITH_EDGE)}, and give the optimiser to step."
        return
    rows = beside[name]
    ratio = (rows["value"] / rows["edge"]).set_axis(rows["step"])
    above = ratio.index[ratio >= 1]
    if not len(above):
        at = f"{name} is at most {ratio.max():.2f} times the edge, at step {ratio.index[int(ratio.argmax())]:,}"
        yield f"Training has not come to its edge of stability: {at}."
        return
    first, now, median = above[0], float(ratio.iloc[-1]), float(ratio.loc[above[0] :].median())
    since = f"since then {name} is {median:.2f} times the edge"
    if median > ABOVE_EDGE:
        yield f"Training has been above its edge of stability since step {first:,}: {since}."
    elif now < AT_EDGE:
        yield f"Training came to its edge of stability at step {first:,}; {name} is now {now:.2f} times the edge."
    else:
        yield f"Training has been at its edge of stability since step {first:,}: {since}."


def _of_loss(by: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    rows = by.get("loss", pd.DataFrame())
    if len(rows) > 1:
        (first, *_, last), steps = rows["value"], int(rows["step"].iloc[-1] - rows["step"].iloc[0])
        verb = "fell" if last < first else "rose" if last > first else "is the same:"
        yield f"The loss {verb} from {first:.3g} to {last:.3g} in {steps:,} steps."


def _of_noise(by: Mapping[str, pd.DataFrame], batch: int | None) -> Iterator[str]:
    if (rows := by.get("gradient_noise_scale")) is not None:
        last = rows.iloc[-1]
        least = "at least " if last["kind"] == "lower bound" else ""
        size = f"{least}{_in_words(float(last['value']))} samples"
        own = "" if batch is None else f"; training takes batches of {batch:,}"
        at = f"At step {int(last['step']):,}"
        yield f"{at} the gradient's noise is as large as the gradient in batches of {size}{own}."


def _in_words(value: float) -> str:
    """Return a size in words: two digits, no exponent below a million."""
    return f"{float(f'{value:.2g}'):,.0f}" if value < 1e6 else f"{value:.2g}"
