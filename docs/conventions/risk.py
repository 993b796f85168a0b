"""Losses, accuracies and gaps."""

from __future__ import annotations

import math

import torch
from torch import nn

import flatlens as fl
from conventions.literal import mean_of_batch_means
from conventions.networks import CLASSES, Networks
from conventions.table import Convention, Quantity, covers

SMOOTHING = 0.1


@covers("loss", "test_loss")
def loss(networks: Networks) -> Quantity:
    """The risk, and with it every curvature: whatever scales the loss scales its second derivatives."""
    net = networks.relu
    losses = net.losses(net.model(net.x)).detach()

    def squared_error(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (f - nn.functional.one_hot(y, CLASSES)).square().sum(1)

    rows = [
        Convention("mean over samples of 0.5 ‖f - y‖²", "compression section 2", net("loss")),
        Convention(
            'squares averaged over the outputs, too: `Problem(loss="mse")`',
            "torch `mse_loss`",
            fl.measure(fl.Lens(net.problem("mse")), "loss")["loss"].value,
            "2 / N",
        ),
        Convention(
            "‖f - y‖², no half",
            'reparam2019 section 2; sharpdim `vit_exp.py` (`MSELoss(reduction="sum")`, over a batch)',
            fl.measure(fl.Lens(net.problem(squared_error)), "loss")["loss"].value,
            "2",
        ),
        Convention("summed over samples", "RelativeFlatnessAndGeneralization `utils.py`", float(losses.sum()), "n"),
        Convention(
            "mean of batch means, the last batch smaller",
            "sharpdim `eval_accuracy`; hessian-eigenthings `HessianOperator`",
            mean_of_batch_means(losses),
        ),
    ]
    return Quantity(
        "`loss`, `test_loss`",
        net.name,
        "the loss you name, its mean over samples",
        "**A factor on the loss is a factor on its Hessian, and on everything computed from it.** Batches do "
        "not matter.",
        rows,
    )


@covers("loss")
def smoothed_loss(networks: Networks) -> Quantity:
    """Label smoothing."""
    net = networks.entropy
    smooth = fl.measure(fl.Lens(net.problem(nn.CrossEntropyLoss(label_smoothing=SMOOTHING))), "loss")["loss"].value
    target = torch.full((CLASSES,), SMOOTHING / CLASSES, dtype=torch.float64)
    target[0] += 1 - SMOOTHING
    entropy = float(-(target * target.log()).sum())
    rows = [
        Convention("smoothing counts as part of the loss", "sharpening B.3", smooth),
        Convention("less the entropy of the smoothed label", "sharpening Fig. 1", smooth - entropy),
        Convention("the plain loss", "for scale", net("loss")),
    ]
    return Quantity(
        f"`loss` with label smoothing {SMOOTHING}",
        net.name,
        "smoothing where the loss has it; no entropy subtracted",
        "The entropy is a constant: no derivative depends on it.",
        rows,
    )


@covers("accuracy", "test_accuracy")
def accuracy(networks: Networks) -> Quantity:
    """Share or per cent."""
    net = networks.relu
    value = net("test_accuracy")
    rows = [
        Convention("share, of 1", "sharpening B.3", value),
        Convention("per cent", "sharpdim `accuracy`", 100 * value, "100"),
    ]
    return Quantity("`accuracy`, `test_accuracy`", net.name, "a share", "It has no unit.", rows)


@covers("generalisation_gap")
def generalisation_gap(networks: Networks) -> Quantity:
    """Which gap."""
    net = networks.relu

    def gap(convention: str) -> float:
        return net(f"generalisation_gap(convention='{convention}')")

    mse = fl.measure(fl.Lens(net.problem("mse")), "generalisation_gap")["generalisation_gap"].value
    rows = [
        Convention("test loss less training loss, signed", "relative2021 section 2", net("generalisation_gap")),
        Convention('absolute: `convention="absolute"`', "sharpening section 6", gap("absolute"), "1"),
        Convention(
            '5 x summed test loss less summed training loss: `"summed_x5"`',
            "reparam2019 section 3; relativeFlatnessGeneralization `calculate_measures.py`",
            gap("summed_x5"),
            "n",
        ),
        Convention(
            'training less test accuracy: `"accuracy"`', "robust-generalization-measures `logs.py`", gap("accuracy")
        ),
        Convention(
            "training less test loss", "robust-generalization-measures `logs.py`", -net("generalisation_gap"), "-1"
        ),
        Convention('under `Problem(loss="mse")`', "torch `mse_loss`", mse, "2 / N"),
    ]
    assert math.isclose(len(net.test[1]) * 5, len(net.y)), "a fifth, as in the paper"
    return Quantity(
        "`generalisation_gap`",
        net.name,
        "the signed difference of mean losses",
        "A sign can be removed later, but not restored. As in reparam2019, the test set is a fifth of the "
        "training set.",
        rows,
    )
