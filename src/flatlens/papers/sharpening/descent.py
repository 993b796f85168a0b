"""X6: progressive sharpening under label smoothing, by full-batch gradient descent.

With it Theorem 5.1's lower bound on the Jacobian norm in the course of training, which needs a sample that covers the
support of a known law: cubes, whose support is convex (a network of its own for each number of steps, from the same
start, is the same training). And the end of section 5, for which the paper cites Cohen et al. (2021) and shows no
experiment: wide networks sharpen less, and linear models not at all while their Jacobian grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import RECIPES
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.experiments.tables import kinds_of
from flatlens.models import MLP, Architecture
from flatlens.papers.contrasts import mean_of, of_each_case
from flatlens.papers.evidence import CASE, Evidence, Table, along, histories, reached, trained_ones
from flatlens.papers.experiment import (
    FEW_SEEDS,
    ONE_DRAW,
    SMOKE_ONLY,
    Experiment,
    Plot,
    Prediction,
    Results,
    Scale,
    claim,
    seed_axis,
)
from flatlens.papers.figures import BANDS, banded, course_curves
from flatlens.papers.sharpening.networks import (
    BATCH_SHARPNESS,
    GHOSTS,
    NARROW,
    NARROW_RESNET,
    NARROW_VGG,
    PATCH_ROWS,
    RESNET,
    SMOOTHING,
    SOFTMAXED,
    UNTOLD_INIT,
    VGG,
    of_smoothing,
    rows,
    smoothings,
)
from flatlens.papers.trajectories import (
    correlated_changes,
    growth_beyond,
    in_course,
    largest,
    late,
    rise,
    until_partner,
    up_to_edge,
)
from flatlens.training import SGD, Adam, Training

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


_SHOWN = (Quantity("training loss", "loss"), BATCH_SHARPNESS, SOFTMAXED)
_SIZES: Mapping[Scale, tuple[tuple[int, ...], int, int, int]] = {
    "smoke": ((4, 8), 20, 20, 4),
    "laptop": ((16, 48, 144), 400, 80, 8),
    "desk": ((16, 48, 144), 400, 40, 12),
    "paper": ((16, 64, 256, 1024), 400, 20, 8),
}
"""Widths, steps, steps between measurements, and seeds."""
WIDTH = "width"


def width_studies(scale: Scale) -> dict[str, Study]:
    """Return networks of three hidden layers by their width, and linear models at a learning rate that suits them."""
    data, model = rows("smoke" if scale == "smoke" else "laptop")
    widths, steps, every, seeds = _SIZES[scale]
    followed = tuple(q.column for q in _SHOWN)
    training = Training(SGD(0.02), max_steps=steps)
    base = NetworkSettings(
        data,
        model,
        training,
        (*followed, "accuracy", "generalisation_gap"),
        followed=Followed(followed, every),
    )
    seed = Axis("seed", tuple(range(seeds)))
    wide = Axis("model.widths", tuple((width,) * 3 for width in widths))
    linear = replace(base, model=replace(model, widths=()), training=replace(training, optimiser=SGD(0.001)))
    shown = (GAP, *_SHOWN)
    return {
        "width": Study("full-batch gradient descent, by width", base, (wide, seed), shown, scale=scale),
        "linear": Study("full-batch gradient descent, linear models", linear, (seed,), shown, scale=scale),
    }


def with_width(table: Table) -> Table:
    """Return the networks with a column `width`: the size of the first hidden layer."""

    def found(results: Results) -> pd.DataFrame:
        networks = table(results)
        sizes = networks["model.widths"].astype(str).str.extract(r"(\d+)", expand=False)
        return networks.assign(**{WIDTH: sizes.astype(int)})

    return found


_LESS = "wide networks exhibit less severe sharpening, and linear (kernel) models exhibit none at all"
_GROW = "these models nonetheless must increase in Jacobian norm during training by Theorem 5.1"


def width_predictions() -> tuple[Prediction, ...]:
    """Return section 5's claims about wide networks and linear models."""
    numbers = {
        "rise of sharpness": rise(BATCH_SHARPNESS.column),
        "rise of the Jacobian norm": rise(SOFTMAXED.column),
    }
    wide, linear = with_width(in_course("width", numbers)), in_course("linear", numbers)
    section = "sharpening section 5"
    return (
        Prediction(
            "width.sharpness",
            "The wider the network, the less the sharpness rises.",
            section,
            along(wide, WIDTH, "rise of sharpness", ["seed"]),
            "below",
            kind="claim",
            quote=_LESS,
        ),
        Prediction(
            "linear.sharpness",
            "The sharpness of linear models does not rise: it falls.",
            section,
            mean_of(linear, "rise of sharpness"),
            "below",
            kind="claim",
            quote=_LESS,
        ),
        Prediction(
            "linear.jacobian",
            "The softmaxed Jacobian norm of linear models rises nevertheless.",
            section,
            mean_of(linear, "rise of the Jacobian norm"),
            kind="claim",
            quote=_GROW,
        ),
    )


def width_plots(results: Results) -> list[Plot]:
    """Return the curves of networks by their width, and of linear models."""
    caption = f"Full-batch gradient descent. {BANDS}. {{}} The paper has no such figure."
    plots = []
    for study, title, said in (
        ("width", "Section 5: networks by their width", "Learning rate 0.02."),
        ("linear", "Section 5: linear models", "Learning rate 0.001."),
    ):
        networks = reached(study)(results)
        lines = with_width(reached(study))(results) if study == "width" else networks.assign(**{WIDTH: "linear"})
        courses = histories(results[study])
        plots.append(course_curves(lines, courses, WIDTH, _SHOWN, f"by_{study}", title, caption.format(said)))
    return plots


_EXCESS = Quantity("loss less label entropy", "loss(excess=True)")

_ALIKE = ("model", "lr", "seed")
FITTED = until_partner(SMOOTHING, "accuracy", 0.99, _ALIKE)
_HOVERS = 1.5
"""Largest mean sharpness, as a multiple of 2/lr, that still counts as oscillating around it."""


def _x6(scale: Scale) -> Mapping[str, Study]:
    data, model = rows(scale)
    models: tuple[Architecture, ...] = (model,)
    paces: tuple[tuple[float, int, int], ...] = {
        "smoke": ((0.08, 60, 5),),
        "laptop": ((0.08, 150, 5), (0.04, 300, 10), (0.02, 600, 20)),
        "desk": ((0.08, 120, 10),),
        "paper": ((0.08, 1000, 5), (0.04, 2000, 10), (0.02, 4000, 20)),
    }[scale]
    seeds, samples, ghosts = {
        "smoke": (4, None, None),
        "laptop": (8, None, None),
        "desk": (10, 200, None),
        "paper": (5, 2500, 5000),
    }[scale]
    if scale == "desk":
        data = DataSettings("cifar10", train=500, test=1000, standardise="component")
        models = (NARROW_VGG, replace(NARROW_VGG, batchnorm=False), NARROW_RESNET)
    if scale == "paper":
        data, models = DataSettings("cifar10", standardise="component"), (VGG, RESNET)
    shown = (_EXCESS, BATCH_SHARPNESS, SOFTMAXED)
    followed = (*(q.column for q in shown), "accuracy")
    training = Training(SGD(0.08), ghost_batch=ghosts, max_steps=1)
    base = NetworkSettings(
        data,
        models[0],
        training,
        (*followed, "generalisation_gap"),
        samples=samples,
        followed=Followed(followed, 5, samples),
    )
    axes = (
        Axis("model", models),
        Axis("lr+max_steps+every", paces),
        smoothings(scale),
        Axis("seed", tuple(range(seeds))),
    )
    descent = Study("full-batch gradient descent", base, axes, (GAP, *shown), scale=scale)
    return {"descent": descent, **width_studies(scale), **bound_studies(scale)}


def _in_all_figures(table: Table, rise: str) -> Evidence:
    """Return Kendall's tau of the smoothing and a rise for each figure: a network at a learning rate."""

    def figures(results: Results) -> pd.DataFrame:
        networks = table(results)
        lrs = networks["lr"].astype(str)
        kinds = kinds_of(networks).astype(str)
        cases = networks.assign(**{CASE: lrs.where(kinds == "", kinds + ", " + lrs)})
        shown, _ = trained_ones(cases)  # a figure without curves is none
        return cases[cases[CASE].isin(set(shown[CASE]))]

    name = f"Kendall tau-b of {SMOOTHING} and {rise} in each figure"
    return of_each_case(figures, lambda case: along(case, SMOOTHING, rise, _ALIKE), name, side="below")


def _x6_predictions() -> tuple[Prediction, ...]:
    sharp, jacobian, edge = BATCH_SHARPNESS.column, SOFTMAXED.column, "edge"
    changes, of_ranks = correlated_changes(sharp, jacobian), correlated_changes(sharp, jacobian, "spearman")
    table = in_course(
        "descent",
        {
            "sharpness / (2/lr), largest": largest(sharp, edge),
            "sharpness / (2/lr), later half": late(sharp, edge),
            "rise of sharpness": rise(sharp),
            "rise of the Jacobian norm": rise(jacobian),
            "r of the changes of sharpness and Jacobian norm": changes,
            "of ranks": of_ranks,
            "r of these changes up to 2/lr": up_to_edge(changes, sharp, edge),
            "of ranks up to 2/lr": up_to_edge(of_ranks, sharp, edge),
            "growth of the Jacobian norm beyond 2/lr": growth_beyond(jacobian, sharp, edge),
            "growth of the loss beyond 2/lr": growth_beyond(_EXCESS.column, sharp, edge),
        },
        FITTED,
        without="the network without label smoothing never reached 99% accuracy",
    )
    fastest = of_smoothing(table, False, fastest=True)
    return (
        *_at_edge(fastest),
        *_rises(table),
        *_follows(table, fastest),
        *width_predictions(),
        *bound_predictions(),
    )


def _at_edge(fastest: Table) -> tuple[Prediction, ...]:
    """Return what is said of the edge of stability, of the networks with the largest learning rate."""
    source = "sharpening section 2, of Cohen et al. 2021"
    return (
        Prediction(
            "sharpness.reaches_edge",
            "At the largest learning rate and without label smoothing sharpness rises to 2/lr.",
            source,
            mean_of(fastest, "sharpness / (2/lr), largest"),
            "above",
            1.0,
            kind="claim",
            quote=_EDGE,
        ),
        Prediction(
            "sharpness.halts",
            f"There the increase halts at around 2/lr: in the later half its mean is below {_HOVERS:g} of it.",
            source,
            mean_of(fastest, "sharpness / (2/lr), later half"),
            "below",
            _HOVERS,
            quote=_EDGE,
            reason='The text says "around" 2/lr, and gives no width: half of it here.',
        ),
        claim(
            "loss.beyond_edge",
            "There the loss continues to decrease.",
            source,
            mean_of(fastest, "growth of the loss beyond 2/lr"),
            "while loss continued to decrease nonmonotonically",
            "below",
        ),
    )


def _rises(table: Table) -> tuple[Prediction, ...]:
    """Return what is claimed of the rise of sharpness and Jacobian norm, and of smoother labels."""
    return (
        claim(
            "sharpness.rises",
            "Sharpness rises in the course of training: progressive sharpening.",
            "sharpening section 5, Fig. 1, 6-11",
            mean_of(table, "rise of sharpness"),
            "a corresponding increase in the magnitude of the loss Hessian (see Appendix A.1): progressive sharpening",
        ),
        claim(
            "sharpness.smoothing",
            "In all figures smoother labels are associated with a less severe increase in sharpness.",
            "sharpening section 1, 3rd contribution; B.1, Fig. 1, 6-11",
            _in_all_figures(table, "rise of sharpness"),
            _LESS_SEVERE,
            "below",
            headline=True,
        ),
        claim(
            "jacobian.smoothing",
            "In all figures smoother labels are associated with a less severe increase in the softmaxed Jacobian norm.",
            "sharpening B.1, Fig. 1, 6-11",
            _in_all_figures(table, "rise of the Jacobian norm"),
            _LESS_SEVERE,
            "below",
        ),
    )


def _follows(table: Table, fastest: Table) -> tuple[Prediction, ...]:
    """Return what is said of the Jacobian norm beside the sharpness, through training and beyond the edge."""
    return (
        Prediction(
            "jacobian.follows_sharpness",
            "Through training sharpness and softmaxed Jacobian norm change together from step to step.",
            "sharpening section 1, 1st contribution; section 5, Fig. 1, 6-11",
            mean_of(table, "r of the changes of sharpness and Jacobian norm", "of ranks"),
            quote=_ANSATZ,
            reason="The text names no statistic, and no test of its conditions: step by step, whatever holds, is ours.",
            headline=True,
        ),
        Prediction(
            "jacobian.follows_sharpness.below_edge",
            "They do so until sharpness first reaches 2/lr; networks that are there within three measurements take no "
            "part.",
            "sharpening section 1, 1st contribution; section 5, Fig. 1, 6-11",
            mean_of(table, "r of these changes up to 2/lr", "of ranks up to 2/lr"),
            quote=_ANSATZ,
            reason="The text says that at the edge the Jacobian need not plateau as sharpness does.",
        ),
        claim(
            "jacobian.loss",
            "Training that reduces the loss over all data increases the largest Jacobian norm.",
            "sharpening section 5, Thm 5.1",
            mean_of(table, "rise of the Jacobian norm"),
            "any training procedure that reduces the loss over all data points will thus also increase the "
            "sample-maximum Jacobian norm from a low starting point",
        ),
        Prediction(
            "jacobian.beyond_edge",
            "At the edge of stability the Jacobian norm need not plateau as sharpness does: here, that it grows on.",
            "sharpening section 5",
            mean_of(fastest, "growth of the Jacobian norm beyond 2/lr"),
            quote="it *need not* cause the Jacobian to *plateau* in the same way that loss sharpness does",
            reason="A plateau would not contradict the text, which says that there need not be one.",
        ),
    )


_EDGE = "the sharpness increase halted at around $2/\\eta$ and oscillated there"
_LESS_SEVERE = (
    "In all cases, the smoother labels are associated with less severe increase in Jacobian and sharpness during "
    "training"
)
_ANSATZ = (
    "under certain conditions, the largest eigenvalues of the loss Hessian control the growth of the largest singular "
    "values of the model's input-output Jacobian"
)
_FIGURES: Mapping[float, Mapping[str, str]] = {
    0.08: {"VGG11": "Fig. 1, 6", "ResNet18": "Fig. 9"},
    0.04: {"VGG11": "Fig. 7", "ResNet18": "Fig. 10"},
    0.02: {"VGG11": "Fig. 8", "ResNet18": "Fig. 11"},
}
"""Figures by learning rate and network."""


def _x6_plots(results: Results) -> list[Plot]:
    courses = FITTED(results["descent"])
    networks = reached("descent")(results)
    networks = networks[networks["key"].isin(set(courses))]
    kinds = kinds_of(networks)
    plots = []
    for _, same in networks.groupby([kinds, "lr"], sort=False):
        kind, lr = str(kinds[same.index[0]]), float(same["lr"].iloc[0])
        figures = _FIGURES[lr].get(kind.partition(" ")[0]) or " and ".join(_FIGURES[lr].values())
        plots.append(
            course_curves(
                same,
                courses,
                SMOOTHING,
                (_EXCESS, BATCH_SHARPNESS, SOFTMAXED),
                f"{kind.lower().replace(' ', '_')}_lr_{lr:g}".strip("_").replace(".", "_"),
                f"{figures}: {f'{kind}, ' if kind else ''}learning rate {lr:g}",
                f"Until the network without label smoothing has 99% accuracy. {BANDS}; dashed is 2/lr.",
                {BATCH_SHARPNESS.name: ("2/lr", "edge")},
                log_y=(SOFTMAXED.name,),  # the caption of Fig. 1 names this axis alone
            )
        )
    return [*plots, *width_plots(results), bound_plot(results)]


_UP_TO = (
    "Every network is trained on, and its curves are cut where the one without label smoothing first has 99% accuracy "
    "on the points that are measured: the paper trains for as many iterations as that takes."
)

_SECTION_5 = (
    "Wide networks and linear models, for which section 5 cites Cohen et al. (2021), and Theorem 5.1's bound in the "
    "course of training are not shown in the paper: networks, learning rates and data are ours (of the former two, 300 "
    "patches of two photographs)."
)

EXPERIMENTS = (
    Experiment(
        "X6",
        "Progressive sharpening, and less of it the smoother the labels",
        "sharpening section 5, Fig. 1, 6, 7, 8, 9, 10, 11",
        _x6,
        _x6_predictions(),
        _x6_plots,
        {
            "smoke": (SMOKE_ONLY, PATCH_ROWS, _SECTION_5),
            "laptop": (
                PATCH_ROWS,
                "300 patches, all of them measured on. At the lower learning rates 2/lr is above what the sharpness "
                "reaches before 99% accuracy.",
                _UP_TO,
                _SECTION_5,
            ),
            "desk": (
                NARROW,
                "500 images of CIFAR-10, 200 of them measured on; learning rate 0.08 alone, 120 iterations at most, 10 "
                "seeds. VGG-11 was trained without BatchNorm, too, but did not reach 99% accuracy in them: it takes no "
                "part. Nor does ResNet-18 of four seeds, at 93 to 96.5%: what is said of it is of the other six.",
                _UP_TO,
                UNTOLD_INIT,
                ONE_DRAW,
                _SECTION_5,
            ),
            "paper": (
                _UP_TO,
                "1000, 2000 and 4000 iterations at most.",
                FEW_SEEDS,
                UNTOLD_INIT,
                GHOSTS,
                _SECTION_5,
            ),
        },
    ),
)
