"""Petzka, Kamp, Adilova, Sminchisescu and Boley, "Relative Flatness and Generalization".

X16: the correlation of relative flatness and the gap, and how far labels are locally constant (class separation). Two
populations: networks as in C.1, 100 for each class separation; and data sets in feature space alone, 90 times as many,
for a correlation of 100 has a standard error of 0.1 (`feature_space`). The gap's loss is not named: the squared error
and the 0-1 error are two readings, and so are Pearson's correlation and that of ranks.

X17: the gap, and the bound on it that is approximated by kernel densities, by class separation; and the same as the
authors' code computes it (`coded_bound`). X18: many minima of LeNet5, and relative flatness (Definition 3, last layer)
compared with other measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from flatlens.bounds.relative_generalisation import constants, rate, sharp_right
from flatlens.column import Column
from flatlens.data.sources import DataSettings
from flatlens.data.synthetic import CLUSTER_SCALE, CLUSTERS, INFORMATIVE, Mixture, clusters, mixture
from flatlens.distributions import GaussianMixture
from flatlens.experiments.quantities import GAP, Quantity
from flatlens.experiments.settings import Axis, Followed, NetworkSettings, Study
from flatlens.models import MLP, LeNet5
from flatlens.papers.coded_bound import coded_bound
from flatlens.papers.contrasts import DRAWS, all_of, draws_of, less_over_draws, mean_of, ranks_within, readings
from flatlens.papers.evidence import (
    ACCURACY_GAP,
    UNIT,
    Evidence,
    Table,
    correlated,
    labelled,
    reached,
    these,
    where,
)
from flatlens.papers.experiment import (
    MOVED,
    MOVED_NEURONS,
    ON_PAPERS_DATA,
    SUMMED_GAP,
    NotRun,
    Plot,
    Results,
    Scale,
    Side,
    deferred,
    own_seeds,
    seed_axis,
    tested,
)
from flatlens.papers.feature_space import FOLDS, SEEN_COLUMNS, Generator, measured
from flatlens.papers.figures import pairwise, scatter
from flatlens.perturbation.features import KernelDensity, kernel_density, mismatch, units
from flatlens.statistics import Statistic, in_cases
from flatlens.statistics.statistic import Array
from flatlens.training import SGD, Adam, Augmentation, Ridge, RMSProp, Training, Until
from flatlens.training.optimisers import solution

# ---- X16 and X17: clusters mapped back through a random tanh network, and a ridge head on its features, which is the
# last linear layer. There `relative_flatness_ggn` equals Definition 3 and needs no curvature products of layers below.

CLUSTER_FEATURES = 8
FLATNESS = "relative_flatness_ggn"
OF_FC4 = f"{FLATNESS}[fc4]"
ACCURACIES = ("accuracy", "test_accuracy")
AS_CODED = "relative_flatness_ggn(normalized='variance')"
ZERO_ONE, BY_DEVIATION, OF_LABELS = SEEN_COLUMNS[3:]


def of_clusters(data: DataSettings, measures: tuple[str, ...]) -> NetworkSettings:
    """Return the settings of the network of C.1 on such data."""
    model = MLP(784, (512, 128, 16, CLUSTER_FEATURES), 2, "tanh", init="xavier_uniform")
    training = Training(Ridge(CLUSTER_SCALE**2), loss="half_squared_error", max_steps=1)  # 1 on the clusters as drawn
    return NetworkSettings(data, model, training, (*measures, "loss", *ACCURACIES, "generalisation_gap"))


def by_separation(
    table: pd.DataFrame, columns: Mapping[str, str], of: Callable[[Table, str], Evidence], panel: str
) -> pd.DataFrame:
    """Return curves over the class separation: one line per column, a statistic of each separation's rows."""
    rows = []
    for line, column in columns.items():
        for separation, among in table.groupby("separation"):
            found = of(these(among), column)({})
            rows.append((panel, separation, line, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["panel", "x", "line", "y", "low", "high"])


TIMES = 90
"""Data sets in feature space for each network."""
SEPARATIONS_BELOW = (0.1, 0.25)
"""Separations below those of the networks, in feature space alone."""


def _x16(scale: Scale) -> Mapping[str, Study]:
    train, test, repeats = (60, 140, 4) if scale == "smoke" else (500, 4500, 100)
    separations = (1.0, 4.0) if scale == "smoke" else (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)
    base = of_clusters(DataSettings("inverted_clusters", train=train, test=test, separation=4.0), (FLATNESS, AS_CODED))
    shown = (
        GAP,
        Quantity("relative flatness", FLATNESS),
        Quantity("relative flatness, features by their variance", AS_CODED),
        Quantity("class separation", "separation", role="setting"),
    )
    axes = (Axis("separation", separations), seed_axis(repeats))
    return {"clusters": Study("clusters", base, axes, shown, scale=scale)}


READINGS: Mapping[str, tuple[str, str, bool]] = {
    "squared error, r": (FLATNESS, "generalisation_gap", False),
    "squared error, ranks": (FLATNESS, "generalisation_gap", True),
    "0-1 error, r": (FLATNESS, ZERO_ONE, False),
    "0-1 error, ranks": (FLATNESS, ZERO_ONE, True),
    "features by their variance": (AS_CODED, "generalisation_gap", False),
    "features by their variance, ranks": (AS_CODED, "generalisation_gap", True),
    "features by their variance, 0-1 error": (AS_CODED, ZERO_ONE, False),
    "features by their variance, 0-1 error, ranks": (AS_CODED, ZERO_ONE, True),
    "features by their deviation": (BY_DEVIATION, "generalisation_gap", False),
    "features by their deviation, ranks": (BY_DEVIATION, "generalisation_gap", True),
    "features by their deviation, 0-1 error": (BY_DEVIATION, ZERO_ONE, False),
    "features by their deviation, 0-1 error, ranks": (BY_DEVIATION, ZERO_ONE, True),
    "labels 0 and 1, r": (FLATNESS, OF_LABELS, False),
    "labels 0 and 1, ranks": (FLATNESS, OF_LABELS, True),
}
"""Columns that are correlated, and whether by ranks; the first four are the readings of the main claim, whose text does
not name the gap's loss."""


@deferred
def in_blocks(results: Results, generator: Generator, *, small: bool = False) -> pd.DataFrame:
    """Return Fisher's z of each reading for each separation and block: the 90 data sets of one network's seed.

    Of the generator `folds` it is the mean of z over the block's nine distributions, each with ten data sets.

    Blocks are independent. `labelled` is the separation under which the stored generator returns a data set: its list
    of separations is read backwards, so that the largest separation has the smallest one's label. `small`: those of
    SEPARATIONS_BELOW beside the networks' own.
    """
    networks, n = results["clusters"].networks, int(results["clusters"].settings["base"]["data"]["train"])
    separations = (*(SEPARATIONS_BELOW if small else ()), *sorted(map(float, networks["separation"].unique())))
    label = dict(zip(separations, reversed(separations), strict=True))
    rows = []
    for block in sorted(map(int, networks["seed"].unique())):
        for separation, found in zip(separations, of_block(block, separations, n, generator), strict=True):
            rows.append((separation, label[separation], block, *found))
    return labelled(pd.DataFrame(rows, columns=["separation", "labelled", "block", *READINGS]), ["block"])


@lru_cache(2048)
def of_block(block: int, separations: tuple[float, ...], n: int, generator: Generator) -> tuple[tuple[float, ...], ...]:
    """Return Fisher's z of each reading over a block's data sets, for each separation."""
    rows = []
    for values in measured(separations, n, range(TIMES * block, TIMES * (block + 1)), generator):
        found, sets = [], values.unflatten(0, (-1, FOLDS if generator == "folds" else TIMES))
        for x, y, ranks in READINGS.values():
            pairs = sets[:, :, [SEEN_COLUMNS.index(x), SEEN_COLUMNS.index(y)]].mT
            pairs = pairs.argsort(2).argsort(2).double() if ranks else pairs
            apart = pairs - pairs.mean(2, keepdim=True)
            found.append(float(torch.cosine_similarity(apart[:, 0], apart[:, 1], dim=1).atanh().mean()))
        rows.append(tuple(found))
    return tuple(rows)


def rises(
    reading: str, by: str = "separation", generator: Generator = "printed", least: float = 0.0, *, small: bool = False
) -> Evidence:
    """Return the slope of Fisher's z over a setting from a least value on, the mean of that of each block."""

    def slopes(results: Results) -> pd.DataFrame:
        among = where(in_blocks(generator, small=small), f"{by} >= {least}")(results)
        wide = among.pivot(index=UNIT, columns=by, values=reading)
        centred = np.array(wide.columns, dtype=float) - np.mean(wide.columns)
        with np.errstate(invalid="ignore"):
            slope = wide.to_numpy() @ centred / (centred @ centred)
        return pd.DataFrame({UNIT: wide.index, name: slope})

    over = f"{by} from {least or min(SEPARATIONS_BELOW):g} on" if least or small else by
    name = f"slope over {over} of Fisher's z of relative flatness and the gap: {reading}"
    return mean_of(slopes, name)


def risen(reading: str) -> Evidence:
    """Return Fisher's z of a reading at the largest separation less that at the smallest, the mean over blocks."""

    def ends(results: Results) -> pd.DataFrame:
        wide = in_blocks("printed")(results).pivot(index=UNIT, columns="separation", values=reading)
        return pd.DataFrame({UNIT: wide.index, name: (wide.iloc[:, -1] - wide.iloc[:, 0]).to_numpy()})

    name = f"Fisher's z at the largest separation less that at the smallest: {reading}"
    return mean_of(ends, name)


def each_step(table: Table, column: str, side: Side = "above") -> Evidence:
    """Return the mean change of a column from each separation to the next; all have to be on a side of 0."""

    def steps(results: Results) -> Statistic:
        wide = table(results).pivot(index=UNIT, columns="separation", values=column)
        changes = wide.diff(axis=1).iloc[:, 1:].rename(columns=lambda to: f"change up to separation {to:g}")
        parts = {str(step): mean_of(these(changes.reset_index()), str(step))(results) for step in changes}
        return in_cases(parts, "all", f"change of {column} from each separation to the next", side)

    return steps


def at_end(reading: str, largest: bool, generator: Generator = "printed", by: str = "separation") -> Evidence:
    """Return Fisher's z of a reading at the largest or the smallest value of a setting, the mean over blocks."""
    return mean_of(where(in_blocks(generator), f"{by} == {by}.{'max' if largest else 'min'}()"), reading)


def none_near(
    reading: str,
    most: float = 0.1,
    generator: Generator = "printed",
    by: str = "separation",
    *,
    small: bool = False,
) -> Evidence:
    """Return how far Fisher's z at a setting's smallest value is from both ends of [-most, most], above 0 inside."""
    below, above = f"{most:g} less z", f"z + {most:g}"

    def room(results: Results) -> pd.DataFrame:
        table = where(in_blocks(generator, small=small), f"{by} == {by}.min()")(results)
        return table.assign(**{below: most - table[reading], above: most + table[reading]})

    return all_of({side: mean_of(room, side) for side in (below, above)}, f"{most:g} less |z|: {reading}")


def network_ranks(results: Results) -> pd.DataFrame:
    """Return the networks with ranks, within each separation, of relative flatness (of fc4, too) and both gaps."""
    columns = [FLATNESS, OF_FC4, "generalisation_gap", ACCURACY_GAP]
    return ranks_within(reached("clusters")(results), columns, "separation")


rises_in_each_reading = readings(
    {reading: rises(reading) for reading in list(READINGS)[:4]},
    "Fisher's z of r(relative flatness, gap): its slope over the separation",
)
near_in_each_reading = readings(
    {reading: none_near(reading) for reading in list(READINGS)[:4]},
    "0.1 less |Fisher's z| of r(relative flatness, gap) at the smallest separation",
)


def _x16_plots(results: Results) -> list[Plot]:
    networks, of_networks = reached("clusters")(results), {"Definition 3": FLATNESS, "by their variance": AS_CODED}
    correlations = partial(correlated, y="generalisation_gap")
    printed, stored = ({one: one for one in list(READINGS)[:number]} for number in (5, 4))
    shown = [
        by_separation(networks, of_networks, correlations, "networks, squared error"),
        by_separation(in_blocks("printed")(results), printed, mean_of, "data sets"),
        by_separation(in_blocks("stored")(results), stored, mean_of, "stored generator"),
    ]
    return [
        Plot(
            "fig3", "Fig. 3: the correlation of relative flatness and the gap, by class separation",
            "Pearson's r over the networks; Fisher's z (almost r where it is small) of data sets in feature space, the "
            "mean over blocks of 90; bands are 95% intervals. Nothing in the authors' code calls the stored generator.",
            "curves", pd.concat(shown, ignore_index=True), "class separation", "correlation with gap",
        ),
        scatter(
            networks, "gaps", "Relative flatness and the gap", "One mark a network.",
            {"all class separations": FLATNESS}, "generalisation_gap", "separation",
            x="relative flatness", y="generalisation gap",
        ),
    ]  # fmt: skip


# ---- X17: the approximated bound

_FOLDS = 3
TIGHT = 10
"""Largest ratio of bound and gap at which the bound is called tight."""
MUCH = -math.log(10)
"""Largest logarithm of a ratio that is called much smaller."""
PER_KERNEL = 20
"""Points drawn of each kernel."""


def _x17(scale: Scale) -> Mapping[str, Study]:
    size, repeats = {"smoke": (90, 2), "laptop": (600, 10), "desk": (600, 30), "paper": (600, 30)}[scale]
    separations = (1.0, 4.0) if scale == "smoke" else (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
    test = size // _FOLDS
    data = DataSettings("inverted_clusters", train=size - test, test=test, separation=4.0, fold=0)
    base = of_clusters(data, (FLATNESS, "representativeness"))
    shown = (
        GAP,
        Quantity("relative flatness", FLATNESS),
        Quantity("representativeness, by kernel densities", "representativeness"),
        Quantity("class separation", "separation", role="setting"),
    )
    axes = (Axis("separation", separations), seed_axis(repeats), Axis("fold", tuple(range(_FOLDS))))
    return {"folds": Study("folds", base, axes, shown, scale=scale)}


def approximated(results: Results) -> pd.DataFrame:
    """Return one row per sample, the mean over its folds: gap, density estimate's part, approximated bound.

    The bound is |S|^(-2/(4+m)) kappa_Tr / (2 m) + |int (p - p_hat) l|, as in `relative_generalisation.kde`. "delta 0.1"
    has 0.01 / m in place of the first factor: the authors' delta, and no half. "worst case" is a lower bound of
    Proposition 12's bound on representativeness, with the sharp constants (see `worst_case`). "of Eq. 5" is |E_Rep|:
    the test loss less that of training features moved by 0.1 of their length in random directions, with labels kept.
    """
    networks = reached("folds")(results)
    settings = results["folds"].settings["base"]["data"]
    n = int(settings["train"])
    found = networks[["separation", "seed", "generalisation_gap", "test_accuracy"]].copy()
    shift, kappa = networks["representativeness"], networks[FLATNESS]
    found["representativeness"] = shift
    found["of Eq. 5"] = networks["representativeness.split.representativeness"].astype(float).abs()
    found["bound"] = shift + rate(n, CLUSTER_FEATURES) * kappa / (2 * CLUSTER_FEATURES)
    found["delta 0.1"] = shift + 0.01 * kappa / CLUSTER_FEATURES
    found["test loss"] = networks["loss"] + networks["generalisation_gap"]
    samples = labelled(found.groupby(["separation", "seed"], as_index=False).mean(), ["seed"])
    for bound, of in (("bound", ""), ("delta 0.1", ", delta 0.1")):
        samples = samples.assign(**_of_bound(samples[bound], samples["generalisation_gap"], of))
    drawn = zip(samples["separation"], samples["seed"], samples["test loss"], strict=True)
    return samples.assign(**{"worst case": [worst_case(c, int(seed), n) * loss for c, seed, loss in drawn]})


def _of_bound(bound: pd.Series, gap: pd.Series, of: str = "") -> dict[str, pd.Series]:
    """Return the differences of a bound and the gap that the claims are about."""
    return {
        f"slack{of}": bound - gap,
        f"room{of}": TIGHT * gap - bound,
        f"half the gap{of}": 2 * gap - bound,
        f"0.1 less slack{of}": 0.1 - (bound - gap),
        f"above{of}": (bound > gap).astype(float),
    }


@lru_cache(1024)
def density_error(separation: float, seed: int, train: int, test: int, bandwidth: str, way: str) -> float:
    """Return int (p - p_hat) l of a sample's folds, the mean over ten random splits of it or of its absolute value.

    From the features as drawn, of which the networks' own are a multiple. `way`: "size" or "signed"; "drawn" is the
    size by points drawn from both densities in place of the sample's own, with the clusters' own law of labels.
    """
    drawn, generator = clusters(separation, train, test, seed), torch.Generator().manual_seed(seed)
    law = mixture(separation, torch.Generator().manual_seed(seed))
    x, y = (torch.cat(pair) for pair in ((drawn.test_x, drawn.x), (drawn.test_y, drawn.y)))
    errors = []
    for held_out in torch.arange(train + test).chunk(_FOLDS):
        rows = torch.ones(train + test, dtype=torch.bool).index_fill(0, held_out, False)
        phi, targets = x[rows].double(), torch.eye(2, dtype=torch.float64)
        W, b = solution(phi, targets[y[rows]], Ridge().penalty)

        def losses(at: Tensor, W: Tensor = W, b: Tensor = b, targets: Tensor = targets) -> Tensor:  # of each class
            return ((at @ W.T + b)[:, None] - targets).square().sum(2) / 2

        def risk(density: KernelDensity, losses: Callable[[Tensor], Tensor] = losses) -> float:
            at = density.around(PER_KERNEL, generator)
            return float((chances(law, at) * losses(at)).sum(1).mean())

        seen, scale = losses(phi)[range(train), y[rows]], units(phi, bandwidth)
        for _ in range(10):
            order = torch.randperm(train, generator=generator)
            held, kept = order[: train // 3], order[train // 3 :]
            if way == "drawn":
                of_p, of_q = (risk(kernel_density(phi[part], bandwidth, scale)) for part in (held, kept))
                errors.append(of_p - of_q)
            else:
                errors.append(mismatch(phi[held], phi[kept], seen[held], seen[kept], bandwidth)[1])
    return float(np.mean(errors if way == "signed" else np.abs(errors)))


def chances(law: Mixture, features: Tensor) -> Tensor:
    """Return the probability of each class at features, (k, 2), by the informative ones."""
    at = features[:, :INFORMATIVE]
    normals = zip(law.centroids[:, None], law.factors @ law.factors.mT, strict=True)
    each = [GaussianMixture(mean, covariance[None], torch.ones(1)).log_density(at) for mean, covariance in normals]
    return torch.stack(each, 1).softmax(1).reshape(len(at), 2, -1).sum(2)


@deferred
def estimated(results: Results, bandwidth: str = "scott", way: str = "size") -> pd.DataFrame:
    """Return `approximated` with both bounds by another estimate of the representativeness (see `density_error`)."""
    samples, data = approximated(results), results["folds"].settings["base"]["data"]
    drawn = zip(samples["separation"].astype(float), samples["seed"].astype(int), strict=True)
    sizes = int(data["train"]), int(data["test"])
    found = np.array([density_error(*one, *sizes, bandwidth, way) for one in drawn])
    for bound, of in (("bound", ""), ("delta 0.1", ", delta 0.1")):
        other = samples[bound] - samples["representativeness"] + found
        samples = samples.assign(**{bound: other}, **_of_bound(other, samples["generalisation_gap"], of))
    return samples.assign(representativeness=found)


def as_coded(results: Results) -> pd.DataFrame:
    """Return one row per sample of the authors' code, the mean over its folds: bound, gap and their differences.

    Separations and seeds are the study's; nothing else is (see `coded_bound`).
    """
    pairs = reached("folds")(results)[["separation", "seed"]].drop_duplicates()
    rows = []
    for separation, seed in zip(pairs["separation"].astype(float), pairs["seed"].astype(int), strict=True):
        rows.append((separation, seed, *np.mean(coded_bound(separation, seed), 0)))
    columns = ["separation", "seed", "bound", "generalisation_gap", "representativeness", "cross-validated 0-1 error"]
    found = labelled(pd.DataFrame(rows, columns=columns), ["seed"])
    bound, gap = found["bound"], found["generalisation_gap"]
    return found.assign(**_of_bound(bound, gap), rest=bound - found["representativeness"])


@lru_cache(1024)
def worst_case(separation: float, seed: int, n: int) -> float:
    """Return Proposition 12's bound on |E_Rep| for the clusters of a seed, sharp, for losses of at most 1.

    As printed it is infinite for every mixture of Gaussians. Times the mean test loss, which the largest loss exceeds,
    it is a lower bound of the proposition's.
    """
    law = in_subspace(mixture(separation, torch.Generator().manual_seed(seed)))
    found = constants(law, torch.Generator().manual_seed(seed))
    first, second = found.first(1.0, sharp=True), found.second(1.0, sharp=True)
    return sharp_right(n, found.m, 0.0, first, second, found.tau, 1.0)


def in_subspace(drawn: Mixture) -> GaussianMixture:
    """Return the law of the features in the 6 dimensions that they span, in coordinates of the same norms.

    In all 8 dimensions they have no density, as two features are combinations of the other six.
    """
    features = torch.cat([torch.eye(INFORMATIVE, dtype=torch.float64), drawn.mixing], 1)
    kept = torch.linalg.cholesky(features @ features.T)  # ||informative @ kept|| = ||informative @ features||
    factors = kept.T @ drawn.factors
    return GaussianMixture(drawn.centroids @ kept, factors @ factors.mT, torch.full((CLUSTERS,), 1 / CLUSTERS))


@deferred
def at_each_separation(results: Results, table: Table, columns: Sequence[str]) -> Statistic:
    """Return the means of columns over the samples of each separation, which all have to be above 0."""
    parts = {}
    for separation, samples in table(results).groupby("separation"):
        for column in columns:
            parts[f"{column} at separation {separation:g}"] = mean_of(these(samples), column)(results)
    return in_cases(parts, "all", f"Mean of {' and '.join(columns)} at each separation")


tight_in_each_reading = readings(
    {
        "as printed": at_each_separation(approximated, ["slack", "room"]),
        "delta 0.1": at_each_separation(approximated, ["slack, delta 0.1", "room, delta 0.1"]),
        "as coded": at_each_separation(as_coded, ["slack", "room"]),
    },
    "smallest mean, over separations, of slack (the bound less the gap) and room (10 times the gap less the bound)",
)


def _x17_plots(results: Results) -> list[Plot]:
    samples, half = approximated(results), "half squared error"
    drawn = {"gap": "generalisation_gap", "approximated bound": "bound", "approximated bound, delta = 0.1": "delta 0.1"}
    beside = {"worst case, at least": "worst case", "by kernel densities": "representativeness"}
    coded = {"gap": "generalisation_gap", "bound": "bound", "cross-validated 0-1 error": "cross-validated 0-1 error"}
    said = "Means over samples, each the mean of its three folds; bands are 95% intervals."
    return [
        Plot(
            name, f"{title}, by class separation", said, "curves",
            by_separation(table, columns, mean_of, "over all samples"), "class separation", unit,
            group="mean of", log_y=log_y,
        )
        for name, title, table, columns, unit, log_y in (
            ("fig4", "Fig. 4: the gap and its approximated bound", samples, drawn, half, False),
            ("as_coded", "Fig. 4 as the authors' code computes it", as_coded(results), coded, "squared error", False),
            ("worst_case", "Representativeness and the worst-case bound on it", samples, beside, half, True),
        )
    ]  # fmt: skip


# ---- X18: minima

LAST, ANOTHER = "fc3", "fc2"
STEPS_OF_64 = 50_000 // 64 + 1
"""Steps of an epoch of all images, in batches of 64."""
PAC_BAYES = "pac_bayes_flatness(probes=4)"
NORMALISED = "relative_flatness(normalized='std')"
THEOREM_4 = "relative flatness, normalised"
OF_ANOTHER, OF_FC1 = f"relative flatness, {ANOTHER}", "relative flatness, fc1"
RIGHT: Mapping[str, str] = {
    "relative flatness": "relative_flatness",
    "Hessian trace": "hessian_trace",
    "Fisher-Rao norm": "fisher_rao",
    "PAC-Bayes": PAC_BAYES,
    "weight norm": "weight_norm",
}
"""The five measures of Fig. 5 as flatlens defines them: trace and norm are of the whole network."""
FLAT, TRACE, FISHER_RAO, PAC, NORM = RIGHT
CODED = ("relative flatness (code)", "last layer's trace (code)", "Fisher-Rao norm", "PAC-Bayes (code)",
         "last layer's squared norm (code)")  # fmt: skip
"""The five measures as the authors' code computes them, up to constant factors and terms."""


def _x18(scale: Scale) -> Mapping[str, Study]:
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
    looks, accuracies = 2000 if scale == "desk" else 100, ACCURACIES if scale == "paper" else ()
    base = NetworkSettings(
        data,
        LeNet5(classes=10 if scale in ON_PAPERS_DATA else 2),
        Training(SGD(0.02), batch_size=64, until=until, max_epochs=epochs, check_every=looks),
        measures=(*RIGHT.values(), NORMALISED, "kappa_trace", "loss", *accuracies, "generalisation_gap", SUMMED_GAP),
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
    lenet = Study("lenet", base, (axis,), shown, scale=scale)
    if scale != "desk":
        return {"lenet": lenet}
    # two more networks of each setup, with both accuracies, the relative flatness and the gap alone
    of_two = replace(base, measures=(RIGHT[FLAT], "loss", *ACCURACIES, "generalisation_gap"), moved=())
    axis, loss = own_seeds("training.optimiser+batch_size", setups, 2), Quantity("training loss", "loss")
    two_each = Study("lenet, accuracies", of_two, (axis,), (GAP, Quantity(FLAT, RIGHT[FLAT]), loss), scale=scale)
    # one network on all images with the crops and flips of the authors' loader, and their initial weights: does an
    # epoch's mean loss come below 0.1, the paper's criterion, within 40 epochs? Of the printed rates and batch sizes
    # SGD's largest rate and the smallest batch, which take the longest way in an epoch
    training = Training(
        SGD(0.05), batch_size=64, augmentation=Augmentation(), until=until, max_epochs=40, check_every=5 * STEPS_OF_64
    )
    of_one = NetworkSettings(
        DataSettings("cifar10"),
        LeNet5(classes=10, init="xavier_normal"),
        training,
        ("loss", *ACCURACIES, "generalisation_gap"),
        samples=2000,
        followed=Followed(("loss", "accuracy"), STEPS_OF_64, 2000),
        dtype="float32",
    )
    told = (GAP, loss, Quantity("test accuracy", "test_accuracy", role="result"))
    loader = Study("LeNet5, all images, crops and flips", of_one, (Axis("seed", (0,)),), told, scale=scale)
    return {"lenet": lenet, "accuracies": two_each, "loader": loader}


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
        "loss": column("loss", ""),
        "setup": setups.str.rpartition(",")[0],
        "batch size": networks["batch_size"],
        "optimiser": setups.str.extract(r"(\w+)\(", expand=False),
    }
    for prefix, at in (("", ""), ("moved ", MOVED), ("neurons moved ", MOVED_NEURONS)):
        norm, sharpness = column("weight_norm", at, LAST), column(PAC_BAYES, at)
        columns |= {f"{prefix}{name}": column(measured, at) for name, measured in RIGHT.items()}
        columns |= {
            f"{prefix}{OF_ANOTHER}": column("relative_flatness", at, ANOTHER),
            f"{prefix}{OF_FC1}": column("relative_flatness", at, "fc1"),
            f"{prefix}{OF_ANOTHER} (code)": column(NORMALISED, at, ANOTHER),
            f"{prefix}{OF_FC1} (code)": column(NORMALISED, at, "fc1"),
            f"{prefix}{THEOREM_4}": column(NORMALISED, at),
            f"{prefix}{CODED[0]}": column(NORMALISED, at),
            f"{prefix}{CODED[1]}": column("kappa_trace", at, LAST) / norm**2,
            f"{prefix}{CODED[3]}": column("weight_norm", at) ** 2 * sharpness**0.5 / 4 + np.log(sharpness) / 4,
            f"{prefix}{CODED[4]}": norm**2,
        }
    # the code's own move: the last layer times a whole number from 5 to 25, one of each network
    factors = np.array([np.random.default_rng(int(seed)).integers(5, 26) for seed in networks["seed"]])
    columns[f"code moved {CODED[1]}"] = columns[CODED[1]] / factors**2
    columns[f"code moved {CODED[4]}"] = columns[CODED[4]] * factors**2
    return pd.DataFrame(columns)


_LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")


def moved_by(networks: pd.DataFrame, factors: Array) -> tuple[Array, Array]:
    """Return Hessian trace and weight norm after each layer but the last is multiplied by a factor of its own.

    factors: (..., 4, networks). A bias has its layer's factor, a weight this over that of the layer before.
    """
    squares, hessian, kappa = (
        np.stack([networks[str(Column(name, layer=layer))].astype(float) ** power for layer in _LAYERS])
        for name, power in (("weight_norm", 2), ("hessian_trace", 1), ("kappa_trace", 1))
    )
    one = np.ones_like(factors[..., :1, :])
    of_biases = np.concatenate([factors, one], -2)
    of_weights = of_biases / np.concatenate([one, factors], -2)
    of_trace = kappa / squares
    trace = of_trace / of_weights**2 + (hessian - of_trace) / of_biases**2
    return trace.sum(-2), np.sqrt((squares * of_weights**2).sum(-2))


@deferred
def minima_redrawn(results: Results, move: str, measure: str) -> pd.DataFrame:
    """Return `minima` with a trace or norm after a layer-wise move, its factors drawn again: "moved ..., draw 7"."""
    networks, generator = minima(results), np.random.default_rng(0)
    factors = generator.uniform(5, 25, (DRAWS, len(_LAYERS) - 1, len(networks)))
    whole = generator.integers(5, 26, (DRAWS, len(networks)))
    trace, norm = moved_by(reached("lenet")(results), factors)
    last = (factors[:, -1] if move == "moved" else 1 / whole) ** 2  # by which the last layer's square is divided
    own = networks[measure].to_numpy()
    after = {TRACE: trace, NORM: norm, CODED[1]: own * last, CODED[4]: own / last}[measure]
    return networks.join(pd.DataFrame(after.T, networks.index, draws_of(f"{move} {measure}")))


def weaker_over_draws(move: str, measure: str, *, positive: bool = False) -> Evidence:
    """Return `weaker` of a measure after a layer-wise move, in the mean over draws of its factors."""
    table = minima_redrawn(move, measure)
    return less_over_draws(table, measure, f"{move} {measure}", "gap", size=True, positive=positive)


def minima_ranks(results: Results) -> pd.DataFrame:
    """Return the networks of `minima` with ranks of all measures and of the gap."""
    networks = minima(results)
    return ranks_within(networks, list(networks.columns.drop(["key", UNIT, "setup", "batch size", "optimiser"])))


converged = where(minima, "loss < 0.1")
but_three = where(minima, lambda networks: networks["gap"].rank() > 3)
"""As the authors' code draws them: all but the three networks of the smallest gaps."""


def of_accuracies(results: Results) -> pd.DataFrame:
    """Return the networks whose accuracies were measured: of a study of their own at desk scale."""
    table = reached("accuracies" if "accuracies" in results else "lenet")(results)
    if ACCURACY_GAP not in table:
        raise NotRun("no accuracies were measured")
    return table.rename(columns={RIGHT[FLAT]: FLAT})


def of_all_images(results: Results) -> pd.DataFrame:
    """Return the networks of `minima` if they were trained on all of CIFAR-10, as the paper's."""
    data = results["lenet"].settings["base"]["data"]
    if data["name"] != "cifar10" or data["train"] is not None:
        raise NotRun("the population was not trained on all 50,000 images")
    return minima(results)


def _x18_plots(results: Results) -> list[Plot]:
    networks, one = minima(results), "One mark a network."
    shown = (
        ("fig5", "Fig. 5 and 6: measures and the gap", {name: name for name in RIGHT}, one),
        ("fig5_as_coded", "Fig. 5 as the authors' code computes it", {name: name for name in CODED}, one),
        ("fig7", "Fig. 7: the same after a layer-wise reparametrisation", {name: f"moved {name}" for name in RIGHT},
         "Each layer times a random factor in [5, 25], the next divided by it; one mark a network."),
        ("neurons", "C.2: the same after a neuron-wise reparametrisation",
         {name: f"neurons moved {name}" for name in RIGHT},
         "Each neuron or channel times a random factor in [5, 25], its readers divided by it; one mark a network."),
        ("fig8", "Fig. 8: relative flatness of two layers", {LAST: "relative flatness", "fc2": OF_ANOTHER}, one),
    )  # fmt: skip
    plots = [
        scatter(networks, name, title, said, panels, "gap", "optimiser", x="measure", y="generalisation gap")
        for name, title, panels, said in shown
    ]
    plots.append(pairwise("lenet", results["lenet"]))
    if "loader" in results:
        found = results["loader"].histories
        rows = found[found["measure"].isin(["loss", "accuracy"])]
        data = pd.DataFrame({
            "panel": rows["measure"], "x": rows["step"] / STEPS_OF_64, "line": "one network", "y": rows["value"],
            "low": rows["value"], "high": rows["value"],
        })  # fmt: skip
        title = "The authors' loader: the loss by epoch"
        caption = "LeNet5 on all images with crops and flips, measured on 2,000 training images as they are."
        plots.append(Plot("loader", title, caption, "curves", data, "epoch", "on 2,000 images"))
    return plots
