"""The networks of X18: many minima of LeNet5, their relative flatness (Definition 3, last layer) and other measures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from flatlens.column import Column
from flatlens.data.named import DataSettings
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import NetworkSettings, Study
from flatlens.models import LeNet5
from flatlens.papers.evidence import reached
from flatlens.papers.experiment import ON_PAPERS_DATA, Scale, tested
from flatlens.papers.predictions import Results
from flatlens.papers.remarks import MOVED, MOVED_NEURONS, SUMMED_GAP, own_seeds
from flatlens.papers.units import UNIT
from flatlens.training import SGD, Adam, RMSProp, Training, Until

LAST, ANOTHER = "fc3", "fc2"
PAC_BAYES = "pac_bayes_flatness(probes=4)"
NORMALISED = "relative_flatness(normalized='std')"
THEOREM_4 = "relative flatness, normalised"
OF_ANOTHER = f"relative flatness, {ANOTHER}"
RIGHT: Mapping[str, str] = {
    "relative flatness": "relative_flatness",
    "Hessian trace": "hessian_trace",
    "Fisher-Rao norm": "fisher_rao",
    "PAC-Bayes": PAC_BAYES,
    "weight norm": "weight_norm",
}
"""The five measures of Fig. 5 as flatlens defines them: trace and norm are of the whole network."""
CODED = ("relative flatness (code)", "last layer's trace (code)", "Fisher-Rao norm", "PAC-Bayes (code)",
         "last layer's squared norm (code)")  # fmt: skip
"""The five measures as the authors' code computes them, up to constant factors and terms."""
REPARAMETRISED: Mapping[str, str] = {"": "", "moved ": MOVED, "neurons moved ": MOVED_NEURONS}
"""Prefix of the columns after each reparametrisation."""


def lenet_studies(scale: Scale) -> Mapping[str, Study]:
    """Return the study of LeNets, each from a start of its own."""
    data = {
        "smoke": DataSettings("patches", train=30, test=30),
        "laptop": DataSettings("patches", train=120, test=600),
        "desk": DataSettings("cifar10", train=2000, test=tested(scale)),
        "paper": DataSettings("cifar10"),
    }[scale]
    optimisers = {
        "smoke": (SGD(0.02), Adam(1e-3)),
        "laptop": (SGD(0.02), SGD(0.05), Adam(5e-4), Adam(2e-3), RMSProp(1e-4), RMSProp(5e-4)),
        "desk": (SGD(0.02), SGD(0.05), Adam(5e-4), Adam(2e-3), RMSProp(2e-4), RMSProp(5e-4)),
        "paper": tuple(kind(lr) for kind in (SGD, Adam, RMSProp) for lr in (1e-4, 0.02, 0.05)),
    }[scale]
    batches, seeds, epochs = {
        "smoke": ((5, 10), 1, 60),
        "laptop": ((8, 16, 32, 64), 2, 200),
        "desk": ((16, 32, 64, 128), 5, 300),
        "paper": ((64, 128, 256, 512, 1024), 10, 300),
    }[scale]
    until = Until(loss_below=0.3 if scale == "smoke" else 0.1, loss_over="epoch")
    looks = 2000 if scale == "desk" else 100
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale in ON_PAPERS_DATA else 2),
        Training(SGD(0.02), batch_size=64, until=until, max_epochs=epochs, check_every=looks),
        measures=(*RIGHT.values(), NORMALISED, "kappa_trace", "loss", "generalisation_gap", SUMMED_GAP),
        moved=(MOVED, MOVED_NEURONS),
        samples=500 if scale == "desk" else None,  # convolutions in float64 take six times as long as in float32
    )
    shown = (
        GAP,
        *(Quantity(name, column) for name, column in RIGHT.items()),
        Quantity(OF_ANOTHER, str(Column("relative_flatness", layer=ANOTHER))),
        Quantity(THEOREM_4, NORMALISED),
        Quantity("1/sigma", PAC_BAYES, "sqrt"),
    )
    setups = [(optimiser, batch) for optimiser in optimisers for batch in batches]
    axis = own_seeds("training.optimiser+batch_size", setups, seeds)
    return {"lenet": Study("lenet", base, (axis,), shown, scale=scale)}


def minima(results: Results) -> pd.DataFrame:
    """Return the values of Fig. 5 to 8 for each network, named as in RIGHT and CODED, and after moves ("moved ...")."""
    networks = reached("lenet")(results)
    nothing = pd.Series(np.nan, index=networks.index)

    def column(name: str, at: str, layer: str | None = None) -> pd.Series:
        found = networks.get(str(Column(name, transform=at, layer=layer)))
        return nothing if found is None else found.astype(float)

    setups = networks["training.optimiser+batch_size+seed"]  # "(SGD(lr=0.02, ...), 8, 0)"
    columns = {
        "key": networks["key"],
        UNIT: networks[UNIT],
        "gap": column("generalisation_gap", ""),
        "batch size": networks["batch_size"],
        "optimiser": setups.str.extract(r"(\w+)\(", expand=False),
    }
    for prefix, at in REPARAMETRISED.items():
        norm, sharpness = column("weight_norm", at, LAST), column(PAC_BAYES, at)
        columns |= {f"{prefix}{name}": column(measured, at) for name, measured in RIGHT.items()}
        columns |= {
            f"{prefix}{OF_ANOTHER}": column("relative_flatness", at, ANOTHER),
            f"{prefix}{THEOREM_4}": column(NORMALISED, at),
            f"{prefix}{CODED[0]}": column(NORMALISED, at),
            f"{prefix}{CODED[1]}": column("kappa_trace", at, LAST) / norm**2,
            f"{prefix}{CODED[3]}": column("weight_norm", at) ** 2 * sharpness**0.5 / 4 + np.log(sharpness) / 4,
            f"{prefix}{CODED[4]}": norm**2,
        }
    return pd.DataFrame(columns)
