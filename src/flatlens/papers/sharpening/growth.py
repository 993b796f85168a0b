"""X6: Theorem 5.1's lower bound on the Jacobian norm, in the course of training, on known distributions.

The bound needs a sample that covers the support, so the inputs are drawn from a known law: cubes, whose support is
convex. A network of its own for each number of steps, from the same start: the same training.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from flatlens.column import Column
from flatlens.data.named import DataSettings
from flatlens.data.waves import RECIPES
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.models import MLP
from flatlens.papers.contrasts import mean_of
from flatlens.papers.evidence import Table, along, reached
from flatlens.papers.experiment import Plot, Scale
from flatlens.papers.plots import BANDS, banded
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import seed_axis
from flatlens.training import Adam, Training

LAWS_OF_INPUTS = ("interval", "square")
BOUND, NORM = (str(Column.parse("jacobian_growth").of_side(side)) for side in ("lhs", "rhs"))
"""Columns of the lower bound and of the Jacobian norm."""
_STUDY = "bound_{}"
_STEPS: Mapping[Scale, tuple[int, ...]] = {
    "smoke": (1, 100),
    "laptop": (1, 10, 30, 100, 300, 1000),
    "desk": (1, 10, 30, 100, 300, 1000),
    "paper": (1, 10, 30, 100, 300, 1000, 3000),
}


def bound_studies(scale: Scale) -> dict[str, Study]:
    """Return one study per law of the inputs: networks by the number of steps of their training."""
    samples, seeds = {"smoke": (60, 4), "desk": (300, 12)}.get(scale, (300, 8))
    training = Training(Adam(0.003), batch_size=64, loss="mse", max_steps=1, check_every=1000)
    studies = {}
    for law in LAWS_OF_INPUTS:
        data = DataSettings(f"waves_{law}", train=samples, test=100)
        base = NetworkSettings(
            data,
            MLP(1 + LAWS_OF_INPUTS.index(law), (32,), 1, "tanh"),
            training,
            ("jacobian_norm", "sharpness", "loss", "generalisation_gap"),
            bounds=("jacobian_growth",),
        )
        shown = (GAP, Quantity("training loss", "loss"), Quantity("Jacobian norm", NORM), Quantity("bound", BOUND))
        axes = (Axis("max_steps", _STEPS[scale]), seed_axis(seeds))
        studies[_STUDY.format(law)] = Study(f"Theorem 5.1 on {RECIPES[law]}", base, axes, shown, scale=scale)
    return studies


def _on(law: str) -> Table:
    def found(results: Results) -> pd.DataFrame:
        networks = reached(_STUDY.format(law))(results)
        return networks.assign(law=law, holds=(networks[BOUND] <= networks[NORM]).astype(float))

    return found


def of_laws(results: Results) -> pd.DataFrame:
    """Return the networks on both laws, with `law` and `holds`: 1 if the bound is at most the Jacobian norm, else 0."""
    return pd.concat([_on(law)(results) for law in LAWS_OF_INPUTS], ignore_index=True)


_THEOREM = "for any Lipschitz function $f : \\mathbb{R}^d \\to \\mathbb{R}^{d'}$ satisfying"
_GROWS = (
    "a data-dependent, high probability lower bound on the empirical Jacobian norm of a model that grows during any "
    "effective training procedure"
)


def bound_predictions() -> tuple[Prediction, ...]:
    """Return what Theorem 5.1 and the contributions say of the bound."""
    return (
        Prediction(
            "bound.holds",
            "Theorem 5.1: the largest Jacobian norm is above its lower bound, in 95% of the samples at least.",
            "sharpening Thm 5.1, Eq. 9",
            mean_of(of_laws, "holds", shares=True),
            "above",
            0.95,
            kind="theorem",
            quote=_THEOREM,
        ),
        Prediction(
            "bound.grows",
            "The lower bound on the Jacobian norm grows with the steps of training.",
            "sharpening section 1, 3rd contribution",
            along(of_laws, "max_steps", BOUND, ("law", "seed")),
            kind="claim",
            quote=_GROWS,
            headline=True,
        ),
        *(
            Prediction(
                f"bound.grows.{law}",
                f"The lower bound grows with the steps of training, for inputs uniform on {RECIPES[law]}.",
                "sharpening section 1, 3rd contribution",
                along(_on(law), "max_steps", BOUND, ["seed"]),
                kind="claim",
                quote=_GROWS,
            )
            for law in LAWS_OF_INPUTS
        ),
    )


def bound_plot(results: Results) -> Plot:
    """Return the bound and the Jacobian norm over the steps of training."""
    table = of_laws(results)
    long = table.melt(["law", "max_steps"], [BOUND, NORM], "line", "y")
    long["line"] = long["line"].map({BOUND: "lower bound", NORM: "Jacobian norm"})
    long["panel"] = long["law"].map(RECIPES)
    caption = f"{BANDS}. Below 0 the bound says nothing. The paper has no such figure."
    rows = long.rename(columns={"max_steps": "x"})
    return banded(rows, "bound", "Theorem 5.1 through training", caption, "steps", log_x=True)
