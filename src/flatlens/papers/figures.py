"""The data of figures, from the tables of studies; and every figure of the papers with its counterpart here.

A figure without a counterpart has the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import pandas as pd

from flatlens.experiments.quantities import Quantity, in_words
from flatlens.experiments.result import StudyResult
from flatlens.papers.evidence import histories
from flatlens.papers.experiment import Plot
from flatlens.progress import count_of

BANDS = "Lines are means over seeds, bands one standard deviation to either side"
"""Beginning of the captions of `banded`."""


def pairwise(name: str, result: StudyResult) -> Plot:
    """Return the matrix of all pairs of quantities, over the networks that reached the end of training."""
    names = [q.name for q in result.quantities if q.name in result.values]
    data = result.values.loc[result.values["included"], names].reset_index(drop=True)
    caption = f"One mark a network, {len(data)} of them. Above the diagonal Pearson's r."
    return Plot(f"pairs_{name}", f"All pairs of quantities: {name}", caption, "matrix", data, study=name)


def followed_curves(
    result: StudyResult,
    networks: pd.DataFrame,
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    held: str,
) -> Plot:
    """Return curves of the quantities followed in training, one line per value of the setting.

    `networks`: those of the result that are drawn; `held`: what they have in common, in words.
    """
    caption = f"{BANDS}; {count_of(networks['seed'].nunique(), 'seed')}, {held}."
    return trajectory_curves(networks, histories(result), setting, shown, name, title, caption)


def trajectory_curves(
    networks: pd.DataFrame,
    trajectories: Mapping[str, pd.DataFrame],
    setting: str,
    shown: Sequence[Quantity],
    name: str,
    title: str,
    caption: str,
    dashed: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return curves of trajectories, one line per value of the setting: the mean over its networks, with a band.

    `dashed` adds a line to the panel of a quantity: its name, and its column of the trajectories.
    """
    parts = []
    for one in shown:
        for key, value in zip(networks["key"], networks[setting], strict=True):
            if (trajectory := trajectories.get(key)) is None:
                continue
            lines = {value: one.of(trajectory)}
            if one.name in dashed:
                line, column = dashed[one.name]
                lines[line] = trajectory[column]
            parts += [
                pd.DataFrame({"panel": one.name, "x": y.index, "line": line, "y": y}) for line, y in lines.items()
            ]
    rows = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["panel", "x", "line", "y"])
    drawn = banded(rows, name, title, caption, "step", in_words(setting), log_y=log_y)
    return replace(drawn, dashed=tuple(line for line, _ in dashed.values()))


def banded(
    rows: pd.DataFrame,
    name: str,
    title: str,
    caption: str,
    x: str,
    line: str = "",
    *,
    log_x: bool = False,
    log_y: bool | tuple[str, ...] = True,
) -> Plot:
    """Return one curve per panel and `line`: the mean `y` at each `x`, with a band of one standard deviation.

    Of positive values the band stays positive: where it would reach 0 or below, it ends at the smallest.
    """
    grouped = rows.groupby(["panel", "x", "line"], sort=False)["y"]
    data = grouped.agg(y="mean", least="min", spread="std").reset_index()
    spread = data["spread"].fillna(0.0)  # of one value
    data["low"], data["high"] = data["y"] - spread, data["y"] + spread
    data["low"] = data["low"].where((data["low"] > 0) | (data["least"] <= 0), data["least"])
    columns = ["panel", "x", "line", "y", "low", "high"]
    return Plot(name, title, caption, "curves", data[columns], x, line, log_y=log_y, log_x=log_x)


def scatter(
    networks: pd.DataFrame,
    name: str,
    title: str,
    caption: str,
    panels: Mapping[str, str],
    against: str,
    group: str,
    *,
    x: str,
    y: str,
) -> Plot:
    """Return one panel per column, over the column `against`; marks differ by `group`, and have their network's key."""
    data = pd.DataFrame(columns=["panel", "x", "y", "group", "key"])
    if there := [panel for panel, column in panels.items() if {column, against, group} <= set(networks.columns)]:
        own = networks[["key"]].assign(y=networks[against], group=networks[group].astype(str))
        parts = [own.assign(panel=panel, x=networks[panels[panel]]) for panel in there]
        data = pd.concat(parts, ignore_index=True)[data.columns]
    data = data.dropna(subset=["x", "y"]).reset_index(drop=True)
    return Plot(name, title, caption, "scatter", data, x, y, group=in_words(group))


@dataclass(frozen=True)
class PaperFigure:
    """A figure or table of a paper."""

    paper: str
    name: str  #: as the paper numbers it: "Fig. G.5"
    shows: str  #: networks and quantities, with the axes that the paper names
    experiment: str = ""  #: identifier of the experiment that draws its counterpart; "" if there is none
    plots: tuple[str, ...] = ()  #: names of the counterpart's plots, at laptop, desk or paper scale
    remark: str = ""  #: what the counterpart has otherwise, or why there is none

    def among(self, drawn: Sequence[Plot]) -> list[Plot]:
        """Return the plots that are its counterpart, among those of its experiment."""
        return [plot for plot in drawn if plot.name in self.plots]


_ENDS = "Jacobian norm, sharpness and gap at the end"
_SAME_PICTURE = "a stand-in at laptop scale, CIFAR-10 at desk scale; CIFAR-100 needs paper scale"


def _all() -> Iterator[PaperFigure]:
    # ---- compression
    trajectory = "training loss, NMLS, sqrt(S), log volume, MLS and local dimension over training"
    for name, experiment, network, setting in (
        ("Fig. 1", "X1", "VGG-11", "lr"),
        ("Fig. 2", "X1", "VGG-11", "batch_size"),
        ("Fig. H.8", "X2", "a 4-layer MLP", "batch_size"),
        ("Fig. H.9", "X2", "a 4-layer MLP", "lr"),
    ):
        said = "three learning rates" if setting == "lr" else "three batch sizes"
        yield PaperFigure("compression", name, f"{network}, {said}: {trajectory}", experiment,
                          (f"through_training_{setting}",),
                          "the logarithm of the dimension, and the volume of three eigenvalues, are drawn, too, as in "
                          "the authors' code")  # fmt: skip
    yield PaperFigure("compression", "Fig. 3", "181 vision transformers: adaptive sharpness over normalised MLS, log "
                      "axes, a colour a class", "X5", ("sharpness_mls",),
                      "small ones trained here at laptop scale; the published list is not known")  # fmt: skip
    yield PaperFigure("compression", "Fig. G.4", "an MLP through training: A, B, C and D of Eq. 48", "X3",
                      ("tightness",), "a network of its own for each number of steps")  # fmt: skip
    pairs = "local dimension, sqrt(S), log volume, MLS, NMLS, gap, D, bound and relative flatness, each against each"
    for name, network, study in (("G.5", "VGG-11s", "vgg"), ("G.6", "MLPs", "mlp"), ("G.7", "LeNets", "lenet")):
        plots = tuple(f"pairs_{study}{protocol}" for protocol in ("", "_printed", "_coded"))
        yield PaperFigure("compression", f"Fig. {name}", f"100 {network}: {pairs}", "X4", plots,
                          "coefficients stand above the diagonal; the paper's stand in each panel")  # fmt: skip
    # ---- sharpening
    trajectory = "loss less label entropy, sharpness and (log axis) Jacobian norm of the softmax over full-batch steps"
    both = (
        "one fully connected network stands for both at laptop scale; ResNet-18 and VGG-11, narrow ones at desk scale, "
        "whole ones at paper scale"
    )
    # descent: a figure for each network and learning rate
    descents = [("Fig. 1", "VGG11", 0.08)]
    descents += [(f"Fig. {6 + i}", "VGG11", lr) for i, lr in enumerate((0.08, 0.04, 0.02))]
    descents += [(f"Fig. {9 + i}", "ResNet18", lr) for i, lr in enumerate((0.08, 0.04, 0.02))]
    for name, network, lr in descents:
        at = f"lr_{lr:g}".replace(".", "_")
        yield PaperFigure("sharpening", name, f"{network}, learning rate {lr:g}, three label smoothings: {trajectory}",
                          "X6", (at, f"{network.lower()}_{at}"), both)  # fmt: skip
    # ends of training: by weight decay, and by learning rate or batch size for each network and data set
    yield PaperFigure("sharpening", "Fig. 2", f"ResNet18: {_ENDS}, over weight decay, a line a learning rate", "X7",
                      ("fig2",))  # fmt: skip
    over = {"lr": "learning rate, a line a batch size", "batch": "batch size, a line a learning rate"}
    grids = product(("lr", "batch"), ("resnet", "vgg"), ("cifar10", "cifar100"))
    ends = [("Fig. 3", "lr", "resnet", "cifar10"), ("Fig. 4", "batch", "resnet", "cifar10")]
    ends += [(f"Fig. {number}", *grid) for number, grid in enumerate(grids, 12)]
    for name, setting, network, data in ends:
        log = "; log axis of sharpness" if name == "Fig. 4" else ""
        kind = {"resnet": "ResNet18", "vgg": "VGG11"}[network]
        yield PaperFigure("sharpening", name, f"{kind} on {data.upper()}: {_ENDS}, over the {over[setting]}{log}",
                          "X8", (f"{network}_{setting}", f"{network}_{data}_{setting}"), _SAME_PICTURE)  # fmt: skip
    # regularisers: one figure for each network, with and without BatchNorm, and data set
    strengths = "over the strengths of label smoothing, mixup, augmentation and SAM, a line an initial learning rate"
    yield PaperFigure("sharpening", "Fig. 5", f"ResNet18 with BatchNorm on CIFAR10: gap, sharpness and Jacobian norm "
                      f"{strengths}", "X9", ("regularised_resnet18_bn", "regularised_resnet18_cifar10_bn"),
                      "the same picture as Fig. 23, which has three more rows")  # fmt: skip
    six = "gap, sharpness, Jacobian norm, Gauss-Newton norm, training loss and test accuracy"
    kinds = product(("cifar10", "cifar100"), ("vgg11", "resnet18"), ("", "_bn"))
    for number, (data, network, norm) in enumerate(kinds, 20):
        said = f"{network.upper().replace('RESNET', 'ResNet')} with{'' if norm else 'out'} BatchNorm on {data.upper()}"
        yield PaperFigure("sharpening", f"Fig. {number}", f"{said}: {six} {strengths}", "X9",
                          (f"regularised_{network}{norm}", f"regularised_{network}_{data}{norm}"),
                          _SAME_PICTURE)  # fmt: skip
    # the appendices: epochs, scales of the inputs, coordinate networks, Jacobian regularisers
    outputs = "sharpness, Jacobian norm of the softmax and Frobenius norm of the outputs"
    for number, said in ((28, "the first epoch"), (29, "90 epochs")):
        yield PaperFigure("sharpening", f"Fig. {number}", f"VGG11 by SGD, three label smoothings: {outputs}, over "
                          f"{said}", "X10", (f"fig{number}",),
                          "a row with the norm of C is added" if number == 29 else "")  # fmt: skip
    for number, name in ((30, "relu"), (31, "tanh")):
        yield PaperFigure("sharpening", f"Fig. {number}", f"a three-layer {name} network, three scales of the inputs: "
                          "loss, Jacobian norm, sharpness and norms of the features, over 300 steps", "X11",
                          (f"fig{number}",), "Jacobian norms with and without softmax")  # fmt: skip
    yield PaperFigure("sharpening", "Fig. 32", "networks from R to R through eight points, from a high and a low start",
                      "X12", ("fig32",), "the paper's points are not published")  # fmt: skip
    for table, name in (("Table 1", "Gaussian"), ("Table 2", "ReLU")):
        yield PaperFigure("sharpening", table, f"{name} networks: Jacobian norm, sharpness and first layer's norm "
                          "after each start", "X12", ("tables",), "our numbers beside the printed ones")  # fmt: skip
    yield PaperFigure("sharpening", "Fig. 33", "networks with regularised Jacobians on CIFAR10 and CIFAR100: measures "
                      "over the coefficient, and two references", "X13", ("fig33",), _SAME_PICTURE)  # fmt: skip
    # ---- reparam2019
    setups = "one mark a network, colours by initialisation; the paper's by initialisation, batch size and rate"
    yield PaperFigure("reparam2019", "Fig. 1", "LeNet5: gap over kappa^5 and kappa_tau^5", "X14", ("fig1",), setups)
    yield PaperFigure("reparam2019", "Fig. 2", "the same after a layer-wise reparametrisation, beside the largest "
                      "eigenvalue and the trace", "X14", ("fig2",), setups)  # fmt: skip
    for number, symbol in ((3, "kappa_tau^l"), (4, "rho_sigma^l"), (5, "rho^l")):
        yield PaperFigure("reparam2019", f"Fig. {number}", f"a fully connected network: gap over {symbol} of each of "
                          "four hidden layers", "X15", (f"fig{number}",))  # fmt: skip
    yield PaperFigure("reparam2019", "Fig. 6", "gap over kappa_tau^max, kappa_tau^Sigma, rho^max and rho^Sigma", "X15",
                      ("fig6",))  # fmt: skip
    yield PaperFigure("reparam2019", "Table 1", "definitions and invariances of all measures", "X15", ("table1",),
                      "measures of the whole network, with the change that is measured; definitions are in "
                      "[measures.md](measures.md)")  # fmt: skip
    # ---- relative2021
    yield PaperFigure("relative2021", "Fig. 1", "a network as feature extractor and model",
                      remark="a drawing of the notation: nothing is measured")  # fmt: skip
    yield PaperFigure("relative2021", "Fig. 2", "the steps of the theory", remark="an overview: nothing is measured")
    yield PaperFigure("relative2021", "Fig. 3", "correlation of relative flatness and gap over class separation", "X16",
                      ("fig3",))  # fmt: skip
    yield PaperFigure("relative2021", "Fig. 4", "gap and approximated bound over class separation", "X17", ("fig4",))
    measures = "gap over relative flatness, Hessian trace, Fisher-Rao norm, PAC-Bayes measure and weight norm"
    yield PaperFigure("relative2021", "Fig. 5", f"minima of LeNet5: {measures}", "X18", ("fig5", "fig5_as_coded"),
                      "two readings: the text's, and the authors' code's")  # fmt: skip
    yield PaperFigure("relative2021", "Fig. 6", f"the minima of Fig. 5, larger: {measures}", "X18",
                      ("fig5", "fig5_as_coded"), "the same picture as Fig. 5")  # fmt: skip
    yield PaperFigure("relative2021", "Fig. 7", f"after a layer-wise reparametrisation: {measures}", "X18", ("fig7",))
    yield PaperFigure("relative2021", "Fig. 8", "gap over relative flatness of another layer", "X18", ("fig8",))


FIGURES = tuple(_all())
"""All figures and tables of the four papers."""
