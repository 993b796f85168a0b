"""Chen et al., "A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks": X1 to X4.

All networks are trained by SGD on the half squared error. As in the paper's figures sharpness is sqrt(S), volume is
its logarithm, relative flatness is the last layer's, D (Eq. 48) and MLS are of the first layer and of the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd

from flatlens.data.named import DataSettings
from flatlens.experiments.claims import Claim, Results
from flatlens.experiments.evidence import changes, correlated, related, together, trend
from flatlens.experiments.experiment import Experiment, Plot, Scale
from flatlens.experiments.papers.remarks import QUICK
from flatlens.experiments.papers.timm_vits import NAMES
from flatlens.experiments.plots import banded, followed_curves, pairwise
from flatlens.experiments.quantities import GAP, SHARPNESS, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.measures.registry import named
from flatlens.models import MLP, Architecture, LeNet5, Published, SmallVGG, ViT
from flatlens.statistics import Statistic, average
from flatlens.training import SGD, Adam, Training, Until

LRS, BATCHES = (0.05, 0.1, 0.2), (8, 20, 32)
FIXED_LR, FIXED_BATCH = 0.1, 20
INTERPOLATES = 0.01
"""The loss below which a network is taken to interpolate, where the paper says "after the loss is minimized"."""
SAMPLES = 100
IN_TRAINING = ("loss", "nmls", "interpolation_sharpness", "log_volume", "mls", "local_dimension")
TITLES = {
    "loss": "training loss",
    "nmls": "NMLS",
    "interpolation_sharpness": "S",
    "log_volume": "log volume",
    "mls": "MLS",
    "local_dimension": "local dimension",
}


# X1 and X2: through training, at three learning rates and three batch sizes


def _through_training(base: NetworkSettings, seeds: int) -> dict[str, Study]:
    trial = Axis("seed", tuple(range(seeds)))
    both = Study("", base, ()).setting("lr", FIXED_LR).setting("batch_size", FIXED_BATCH).base
    return {
        "learning_rates": Study("learning rates", both, (Axis("lr", LRS), trial)),
        "batch_sizes": Study("batch sizes", both, (Axis("batch_size", BATCHES), trial)),
    }


def _vgg(scale: Scale) -> tuple[DataSettings, Architecture]:
    if scale == "paper":
        return DataSettings("cifar10", classes=(0, 1)), SmallVGG(classes=2)
    return DataSettings("patches", train=600 if scale == "laptop" else 60), SmallVGG(classes=2)


def _mlp(scale: Scale) -> tuple[DataSettings, Architecture]:
    if scale == "paper":
        return DataSettings("fashion_mnist", flat=True), MLP(784, (784, 784, 784), 10)
    train, width = (600, 64) if scale == "laptop" else (100, 16)
    return DataSettings("digits", train=train), MLP(64, (width, width, width), 10)


def _lenet(scale: Scale) -> tuple[DataSettings, Architecture]:
    if scale == "paper":
        return DataSettings("cifar10"), LeNet5()
    return DataSettings("patches", train=600 if scale == "laptop" else 60), LeNet5(classes=2)


def _x1(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (2000, 100, 3), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*_vgg(scale), steps, every), seeds)


def _x2(scale: Scale) -> Mapping[str, Study]:
    steps, every, seeds = {"smoke": (40, 20, 1), "laptop": (10_000, 400, 5), "paper": (100_000, 1000, 5)}[scale]
    return _through_training(_followed(*_mlp(scale), steps, every), seeds)


def _followed(data: DataSettings, model: Architecture, steps: int, every: int) -> NetworkSettings:
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=steps)
    measures = (*IN_TRAINING, "generalisation_gap", "test_accuracy", "accuracy")
    followed = Followed(IN_TRAINING, every, _samples(data))
    return NetworkSettings(data, model, training, measures, samples=_samples(data), followed=followed)


def _samples(data: DataSettings) -> int:
    return min(SAMPLES, data.train or SAMPLES)


def _in_training_claims(figures: str) -> tuple[Claim, ...]:
    sharp, late = "interpolation_sharpness", INTERPOLATES
    claims = []
    for study, setting, side in (("learning_rates", "lr", "below"), ("batch_sizes", "batch_size", "above")):
        larger = {"lr": "Higher learning rates", "batch_size": "Larger batches"}[setting]
        less = "lower" if side == "below" else "higher"
        claims += [
            Claim(
                f"{study}.volume_follows_sharpness",
                "Once the loss is minimised, sharpness and volume decrease together.",
                f"compression {figures}",
                together(study, sharp, "log_volume", below=late),
            ),
            Claim(
                f"{study}.mls_follows_sharpness",
                "MLS follows sharpness.",
                f"compression {figures}, section 4.1",
                together(study, sharp, "mls", below=late),
            ),
            Claim(
                f"{study}.sharpness",
                f"{larger} lead to {less} sharpness.",
                f"compression {figures}",
                trend(study, setting, sharp),
                side,  # type: ignore[arg-type]
            ),
            Claim(
                f"{study}.volume",
                f"{larger} lead to {'stronger' if side == 'below' else 'weaker'} compression of volume.",
                f"compression {figures}",
                trend(study, setting, "log_volume"),
                side,  # type: ignore[arg-type]
            ),
            Claim(
                f"{study}.dimension",
                "Local dimension decreases as the loss decreases to near 0.",
                "compression section 4.2",
                changes(study, "local_dimension"),
                "below",
            ),
        ]
    return tuple(claims)


def _in_training_plots(results: Results) -> list[Plot]:
    return [
        followed_curves(results["learning_rates"], "lr", TITLES, f"batch size {FIXED_BATCH}"),
        followed_curves(results["batch_sizes"], "batch_size", TITLES, f"learning rate {FIXED_LR:g}"),
    ]


# X3: the steps of the bound, network by network trained longer

CHAIN = {
    "A": "mls_chain.A_B.lhs[fc1]",
    "B": "mls_chain.B_C.lhs[fc1]",
    "C": "mls_chain.C_D.lhs[fc1]",
    "D": "mls_chain.C_D.rhs[fc1]",
}


def _x3(scale: Scale) -> Mapping[str, Study]:
    steps = {
        "smoke": (1, 40),
        "laptop": (1, 30, 100, 300, 1000, 3000, 10_000),
        "paper": (1, 100, 1000, 10_000, 100_000),
    }
    data, model = _mlp(scale)
    training = Training(SGD(FIXED_LR), batch_size=FIXED_BATCH, loss="half_squared_error", max_steps=1)
    base = NetworkSettings(data, model, training, ("mls", "loss"), ("mls_chain",), samples=_samples(data))
    seeds = {"smoke": 2, "laptop": 5, "paper": 5}[scale]
    trained = Study("tightness", base, (Axis("max_steps", steps[scale]), Axis("seed", tuple(range(seeds)))))
    return {"tightness": trained}


def _looseness(results: Results) -> Statistic:
    """How much looser the last step of the chain is than the looser of the other two, in logarithms."""
    a, b, c, d = (np.log(results["tightness"].networks[column]) for column in CHAIN.values())
    return average((d - c) - np.maximum(b - a, c - b), name="log(D/C) - max(log(B/A), log(C/B))")


def _x3_plots(results: Results) -> list[Plot]:
    networks = results["tightness"].networks.assign(panel="mean over the samples")
    long = networks.melt(["panel", "max_steps", "seed"], list(CHAIN.values()), "line", "y")
    long["line"] = long["line"].map({column: name for name, column in CHAIN.items()})
    caption = "A <= B <= C <= D of Eq. 48 at the first layer. Lines are means over seeds, bands from least to largest."
    return [banded(long.rename(columns={"max_steps": "x"}), "tightness", "The steps of the bound", caption, "step")]


# X4: a hundred networks each, everything against everything

SHOWN = (
    GAP,
    SHARPNESS,
    Quantity("log volume", "log_volume"),
    Quantity("local dimension", "local_dimension"),
    Quantity("MLS", "mls"),
    Quantity("NMLS", "nmls"),
    Quantity("D", "mls_chain.rhs[fc1]"),
    Quantity("bound of NMLS", "nmls_bound.rhs"),
    Quantity("relative flatness, last layer", "relative_flatness"),
)
"""The nine quantities of Fig. G.5 to G.7."""

KINDS = {"vgg": "VGGs", "mlp": "MLPs", "lenet": "LeNets"}

GRIDS: Mapping[Scale, tuple[tuple[float, ...], tuple[int, ...], int]] = {
    "smoke": ((0.05, 0.1), (8,), 2),
    "laptop": ((0.05, 0.1, 0.2), (8, 16, 32), 3),
    "paper": ((0.01, 0.02, 0.05, 0.1, 0.2), (8, 16, 32, 64), 5),
}


def _x4(scale: Scale) -> Mapping[str, Study]:
    lrs, batches, seeds = GRIDS[scale]
    axes = (Axis("lr", lrs), Axis("batch_size", batches), Axis("seed", tuple(range(seeds))))
    steps = {"smoke": 400, "laptop": 20_000, "paper": 200_000}[scale]
    loss = {"smoke": 0.2, "laptop": INTERPOLATES, "paper": INTERPOLATES}[scale]
    studies = {}
    for name, (data, model), first in (
        ("vgg", _vgg(scale), "conv1"),
        ("mlp", _mlp(scale), "fc1"),
        ("lenet", _lenet(scale), "conv1"),
    ):
        training = Training(
            SGD(FIXED_LR),
            batch_size=FIXED_BATCH,
            loss="half_squared_error",
            until=Until(loss_below=loss),
            max_steps=steps,
        )
        columns = {q.column.partition(".rhs")[0].partition("[")[0] for q in SHOWN}
        base = NetworkSettings(
            data, model, training,
            measures=tuple(c for c in sorted(columns) if not c.endswith(("_chain", "_bound"))),
            bounds=("mls_chain", "nmls_bound"),
            samples=_samples(data),
        )  # fmt: skip
        shown = tuple(Quantity(q.name, q.column.replace("fc1", first), q.transform, q.role) for q in SHOWN)
        studies[name] = Study(name, base, axes, shown, scale=scale)
    return studies


def _x4_claims() -> tuple[Claim, ...]:
    claims = []
    for study in ("vgg", "mlp", "lenet"):
        for x, y, number in (
            ("bound of NMLS", GAP.name, 1),
            ("MLS", GAP.name, 1),
            ("NMLS", GAP.name, 1),
            ("log volume", SHARPNESS.name, 2),
            ("log volume", "MLS", 2),
            (SHARPNESS.name, GAP.name, 3),
            ("bound of NMLS", "NMLS", 4),
        ):
            says = f"{KINDS[study]}: {x} correlates positively with {y}."
            claims.append(Claim(_slug(study, x, y), says, f"compression G.2 ({number})", related(study, x, y)))
        weak = related(study, "relative flatness, last layer", GAP.name)
        claims.append(
            Claim(
                f"{study}.relative_flatness",
                f"{KINDS[study]}: relative flatness of the last layer correlates weakly with the gap, r below 1/2.",
                "compression G.2 (6)",
                weak,
                "below",
                0.5,
            )
        )
    claims.append(
        Claim(
            "mlp.D_against_mls",
            "MLPs: D, the bound of MLS by the sharpness of all layers, correlates negatively with MLS.",
            "compression Fig. G.4, G.2 (5)",
            related("mlp", "D", "MLS"),
            "below",
        )
    )
    return tuple(claims)


def _slug(*words: str) -> str:
    return ".".join(word.replace(" ", "_").replace(",", "") for word in words)


PATCHES = "Patches of two photographs in place of two classes of CIFAR-10."
# X5: many vision transformers as they are, untrained or published

SHARPNESS_46, SEARCHED = (
    one.key for one in named(["average_sharpness(pairs=16,scale='published46')", "mls_by_search(normalized=True)"])
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
        variants = tuple(Published(f"timm:{name}", sigmoid=True) for name in NAMES)
        seeds, steps = (0,), (0,)
    training = Training(Adam(1e-3), batch_size=32, loss="mse", max_steps=0)
    exact = () if scale == "paper" else ("normalized_mls", "adaptive_sharpness_ggn")
    measures = (SHARPNESS_46, SEARCHED, *exact)
    samples = data.train if scale == "paper" else min(32, data.train or 32)
    base = NetworkSettings(data, variants[0], training, measures, samples=samples)
    networks: tuple[ViT | Published, ...] = tuple(replace(variant, seed=seed) for variant in variants for seed in seeds)
    return {"transformers": Study("transformers", base, (Axis("model", networks), Axis("max_steps", steps)))}


def _trained_most(results: Results) -> pd.DataFrame:
    """Those that were trained, where some were."""
    networks = results["transformers"].networks
    kept: pd.DataFrame = networks[networks["steps"] == networks["steps"].max()]
    return kept


def _x5_plots(results: Results) -> list[Plot]:
    networks = results["transformers"].networks
    classes = networks["model"].map(_class_of) + networks["steps"].map(_training_of)
    shown = {"x": networks[SEARCHED], "y": networks[SHARPNESS_46], "group": classes}
    data = pd.DataFrame({"panel": f"{len(networks)} networks", **shown})
    caption = (
        "One mark a network: adaptive sharpness (Eq. 46) over normalised MLS, both as Appendix F approximates them."
    )
    title = "Adaptive sharpness against normalised MLS"
    return [Plot("sharpness_mls", title, caption, "scatter", data, "normalised MLS", "adaptive sharpness", log_x=True)]


def _training_of(steps: int) -> str:
    return f", {steps} steps" if steps else ""


def _class_of(model: str) -> str:
    """What a colour stands for: the family of a published network, the pooling of ours."""
    if name := re.search(r"timm:([a-z0-9]+)", model):
        return name[1]
    return "mean pooling" if "mean" in model else "class token"


OWN = "Twelve small vision transformers, three starts each, untrained and after 300 steps on patches of photographs."
DIGITS = "scikit-learn's digits and narrower layers in place of FashionMNIST."
GRID = "A grid of learning rates, batch sizes and seeds; the paper does not say how its 100 networks were chosen."
SMALL = "The authors' VGG-11 has 97,018 parameters (their code): five convolutions."

EXPERIMENTS = (
    Experiment(
        "X1",
        "Sharpness, volume and sensitivity through the training of a VGG",
        "compression Fig. 1, 2",
        _x1,
        _in_training_claims("Fig. 1, 2"),
        _in_training_plots,
        {"smoke": (QUICK, PATCHES), "laptop": (PATCHES, SMALL, "3 seeds."), "paper": (SMALL,)},
    ),
    Experiment(
        "X2",
        "The same through the training of a 4-layer MLP",
        "compression Fig. H.8, H.9",
        _x2,
        _in_training_claims("Fig. H.8, H.9"),
        _in_training_plots,
        {"smoke": (QUICK, DIGITS), "laptop": (DIGITS,), "paper": ("Widths are not given: 784 in every layer.",)},
    ),
    Experiment(
        "X3",
        "How tight each step is from the sensitivity of an MLP to its sharpness",
        "compression Fig. G.4",
        _x3,
        (
            Claim(
                "C_D_is_the_loose_step",
                "The gap between C and D is large compared to those between A and B, and B and C.",
                "compression Fig. G.4",
                _looseness,
            ),
        ),
        _x3_plots,
        {
            "smoke": (QUICK, DIGITS),
            "laptop": (
                DIGITS,
                "A network of its own for each number of steps, from the same start: the same training.",
            ),
            "paper": ("Widths are not given: 784 in every layer.",),
        },
    ),
    Experiment(
        "X5",
        "Vision transformers: adaptive sharpness against normalised sensitivity",
        "compression Fig. 3",
        _x5,
        (
            Claim(
                "general_trend",
                "For most models sharpness and MLS correlate positively: lower sharpness implies lower MLS.",
                "compression section 4.4, Fig. 3",
                correlated(_trained_most, SHARPNESS_46, SEARCHED, "spearman"),
            ),
        ),
        _x5_plots,
        {
            "smoke": (QUICK, OWN),
            "laptop": (OWN,),
            "paper": (
                f"{len(NAMES)} networks of timm 1.0; the paper's list of 181 is not published.",
                "100 images from a folder of ImageNet's, resized to each network's size; the paper names no data.",
            ),
        },
    ),
    Experiment(
        "X4",
        "A hundred networks each: how sharpness, compression, bounds and the gap go together",
        "compression Fig. G.5, G.6, G.7",
        _x4,
        _x4_claims(),
        lambda results: [pairwise(name, result) for name, result in results.items()],
        {
            "smoke": (QUICK, PATCHES, DIGITS),
            "laptop": (PATCHES, DIGITS, "27 networks of each kind, not 100.", GRID),
            "paper": (SMALL, GRID, "Measured on 100 training samples."),
        },
    ),
)
