"""X5: many vision transformers, published ones or small ones trained here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.measures.registry import named
from flatlens.models import Published, ViT
from flatlens.papers.compression.timm_vits import VIT_NAMES
from flatlens.papers.evidence import correlated
from flatlens.papers.experiment import Experiment, Plot, Scale
from flatlens.papers.plots import scatter
from flatlens.papers.predictions import Prediction, Results
from flatlens.papers.remarks import SMOKE_ONLY
from flatlens.papers.units import with_units
from flatlens.training import Adam, Training

SHARPNESS_46, SEARCHED = (
    one.key for one in named(["average_sharpness(probes=16,scale='published46')", "mls_by_search(normalized=True)"])
)
POOLINGS: tuple[Literal["class"], Literal["mean"]] = ("class", "mean")
VARIANTS = tuple(
    ViT(classes=2, patch=patch, width=width, depth=depth, heads=heads, pooling=POOLINGS[mean], sigmoid=True)
    for patch, width, depth, heads, mean in (
        (8, 24, 2, 2, 0), (8, 24, 2, 2, 1), (8, 48, 2, 4, 0), (8, 48, 4, 4, 1),
        (8, 96, 2, 4, 0), (8, 96, 4, 8, 0), (4, 24, 2, 2, 0), (4, 24, 4, 2, 1),
        (4, 48, 2, 4, 1), (4, 48, 4, 4, 0), (16, 48, 4, 4, 0), (16, 96, 6, 8, 1),
    )
)  # fmt: skip


def _x5(scale: Scale) -> Mapping[str, Study]:
    data = DataSettings("patches", train=200, test=200)
    variants: tuple[ViT | Published, ...] = VARIANTS
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: tuple[int, ...] = (0, 300)
    if scale == "smoke":
        data, variants, seeds, steps = DataSettings("patches", train=10, test=10), VARIANTS[:2], (0, 1), (0, 2)
    if scale == "paper":
        data = DataSettings("imagenet", train=100, test=100)
        variants = tuple(Published(f"timm:{name}", sigmoid=True) for name in VIT_NAMES)
        seeds, steps = (0,), (0,)
    training = Training(Adam(1e-3), batch_size=32, loss="mse", max_steps=0)
    exact = () if scale == "paper" else ("normalized_mls", "adaptive_sharpness_ggn")
    measures = (SHARPNESS_46, SEARCHED, *exact)
    samples = data.train if scale == "paper" else min(32, data.train or 32)
    base = NetworkSettings(data, variants[0], training, measures, samples=samples)
    networks: tuple[ViT | Published, ...] = tuple(replace(variant, seed=seed) for variant in variants for seed in seeds)
    return {"transformers": Study("transformers", base, (Axis("model", networks), Axis("max_steps", steps)))}


def _trained_most(results: Results) -> pd.DataFrame:
    """Return the networks that were trained longest."""
    networks = with_units(results["transformers"], results["transformers"].networks)
    kept: pd.DataFrame = networks[networks["steps"] == networks["steps"].max()]
    return kept


def _x5_plots(results: Results) -> list[Plot]:
    networks = results["transformers"].networks
    classes = networks["model"].map(_class_of) + networks["steps"].map(_training_of)
    drawn = scatter(
        networks.assign(kind=classes),
        "sharpness_mls",
        "Adaptive sharpness against normalised MLS",
        "One mark a network: adaptive sharpness (Eq. 46) over normalised MLS, both as Appendix F approximates them.",
        {f"{len(networks)} networks": SEARCHED},
        SHARPNESS_46,
        "kind",
        x="normalised MLS",
        y="adaptive sharpness",
    )
    return [replace(drawn, log_x=True)]


def _training_of(steps: int) -> str:
    return f", {steps} steps" if steps else ""


def _class_of(model: str) -> str:
    """Return the class that a colour stands for: the family of a published network, the pooling of ours."""
    if name := re.search(r"timm:([a-z0-9]+)", model):
        return name[1]
    return "mean pooling" if "mean" in model else "class token"


_OWN = "Twelve small vision transformers, three starts each, untrained and after 300 steps on patches of photographs."
_CLUSTERS = "Not weighed: the outlying clusters of MobileViT and FastViT."

EXPERIMENTS = (
    Experiment(
        "X5",
        "Vision transformers: adaptive sharpness against normalised sensitivity",
        "compression Fig. 3",
        _x5,
        (
            Prediction(
                "general_trend",
                "For most models sharpness and MLS correlate positively: lower sharpness implies lower MLS.",
                "compression section 4.4, Fig. 3",
                correlated(_trained_most, SHARPNESS_46, SEARCHED, "spearman"),
            ),
        ),
        _x5_plots,
        {
            "smoke": (SMOKE_ONLY, _OWN),
            "laptop": (_OWN, _CLUSTERS),
            "paper": (
                f"{len(VIT_NAMES)} networks of timm 1.0; the paper's list of 181 is not published.",
                "100 images from a folder of ImageNet's, resized to each network's size; the paper names no data.",
                _CLUSTERS,
            ),
        },
    ),
)
