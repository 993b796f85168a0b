"""Sensitivities to the input, volumes and dimensions."""

from __future__ import annotations

import math

import torch

from conventions.literal import input_jacobian, searched
from conventions.networks import Networks
from conventions.table import Agreed, Convention, Quantity, covers

RANK = 1e-12  #: eigenvalues below this share of the largest are 0


@covers("mls")
def mls(networks: Networks) -> Quantity:
    """Mean or maximum, spectral or Frobenius, logits or probabilities."""
    net = networks.relu
    singular = torch.linalg.svdvals(input_jacobian(net))
    rows = [
        Convention("mean of ‖df/dx‖₂, of the logits", "compression Def. 3.7; sharpdim `get_dim`", net("mls")),
        Convention("the largest sample's: `jacobian_norm`", "sharpening section 4", net("jacobian_norm")),
        Convention("of softmax(f): `mls(softmax=True)`", "sharpening B.1 (with the maximum)", net("mls(softmax=True)")),
        Convention(
            "mean of ‖df/dx‖_F², squared: `jacobian_frobenius`",
            "sharpening App. D; sharpdim `get_dim` (its G)",
            net("jacobian_frobenius"),
        ),
        Convention("mean of ‖df/dx‖_F", "for scale", float(singular.square().sum(1).sqrt().mean())),
    ]
    return Quantity(
        "`mls`",
        net.name,
        "the mean of spectral norms, of the network's own outputs, not squared",
        "As defined; a softmax or sigmoid at the end of your network is part of f.",
        rows,
    )


@covers("nmls")
def nmls(networks: Networks) -> Agreed:
    """Sum over layers."""
    return Agreed("nmls", "relu", networks.relu("nmls"), "sharpdim `get_nmls` computes the same sum")


@covers("representation_mls")
def representation_mls(networks: Networks) -> Agreed:
    """The map below a layer."""
    found = networks.relu("representation_mls")
    return Agreed("representation_mls", "relu", found, "no other library has it; sharpdim measures layer to output")


@covers("jacobian_norm")
def jacobian_norm(networks: Networks) -> Quantity:
    """Logits or probabilities, maximum or mean."""
    net = networks.entropy
    rows = [
        Convention("maximum over samples, of the logits", "sharpening Thm 4.3", net("jacobian_norm")),
        Convention(
            "of softmax(f): `jacobian_norm(softmax=True)`", "sharpening B.1", net("jacobian_norm(softmax=True)")
        ),
        Convention("mean over samples: `mls`", "compression Def. 3.7", net("mls")),
        Convention("mean over samples, of softmax(f)", "for scale", net("mls(softmax=True)")),
    ]
    return Quantity(
        "`jacobian_norm`",
        net.name,
        "the maximum, of the logits",
        "The softmax saturates during training and hides the growth of the logits.",
        rows,
    )


@covers("batch_jacobian_norm")
def batch_jacobian_norm(networks: Networks) -> Quantity:
    """Batch or running statistics, and the size of the batches."""
    net = networks.conv
    rows = [
        Convention(
            "statistics of batches of 50",
            "sharpening B.3 (1000 samples)",
            net("batch_jacobian_norm(batch_statistics=50)"),
        ),
        Convention("of batches of 10", "for scale", net("batch_jacobian_norm(batch_statistics=10)")),
        Convention(
            "running statistics, the largest sample's: `jacobian_norm`", "sharpening Thm 4.3", net("jacobian_norm")
        ),
    ]
    return Quantity(
        "`batch_jacobian_norm`",
        net.name,
        "the norm of a whole batch's Jacobian with BatchNorm as in training",
        "In train mode samples influence each other, so none has a Jacobian of its own.",
        rows,
    )


@covers("normalized_mls")
def normalized_mls(networks: Networks) -> Quantity:
    """Squared or not."""
    net = networks.relu
    J, sizes = input_jacobian(net), net.x.norm(dim=1)
    spectral = torch.linalg.matrix_norm(J, 2)
    rows = [
        Convention("mean of ‖x‖² ‖df/dx‖₂²", "compression Def. F.1", net("normalized_mls")),
        Convention(
            "mean of ‖x‖ ‖f(x + d) - f(x)‖² / ‖d‖, d searched in a box of 0.1",
            "sharpdim `eval_mls_adv` (behind a sigmoid or softmax)",
            float((sizes * searched(net)).mean()),
        ),
        Convention("mean of ‖x‖ ‖df/dx‖₂, not squared", "for scale", float((sizes * spectral).mean())),
        Convention(
            "Frobenius: mean of ‖x‖² ‖df/dx‖_F²", "for scale", float((sizes * J.norm(dim=(1, 2))).square().mean())
        ),
    ]
    return Quantity(
        "`normalized_mls`",
        net.name,
        "both squared",
        "For C = 1, and where one layer with unshared weights alone reads the input, it is at most its "
        "`relative_flatness_ggn`.",
        rows,
    )


@covers("input_invariant_mls")
def input_invariant_mls(networks: Networks) -> Agreed:
    """As published."""
    return Agreed("input_invariant_mls", "relu", networks.relu("input_invariant_mls"), "compression Def. E.3 alone")


@covers("jacobian_frobenius")
def jacobian_frobenius(networks: Networks) -> Quantity:
    """Squared, halved, summed, sketched."""
    net = networks.relu
    J = input_jacobian(net)
    n, outputs = J.shape[:2]
    u = torch.randn(n, outputs, generator=torch.Generator().manual_seed(0), dtype=J.dtype)
    sketch = torch.einsum("nk,nkm->nm", u / u.norm(), J).norm()
    own = net("jacobian_frobenius")
    rows = [
        Convention("mean of ‖df/dx‖_F²", "sharpening App. D; sharpdim `get_dim` (its G)", own),
        Convention("half of it", "jacobian_regularizer", own / 2, "1 / 2"),
        Convention("mean of ‖df/dx‖_F, not squared", "for scale", float(J.norm(dim=(1, 2)).mean())),
        Convention("‖J‖_F of the whole batch, one n N x n M matrix", "sharpening Fig. 33", float(J.norm())),
        Convention(
            "‖uᵀJ‖₂ of the whole batch, one random unit u, in place of ‖J‖_F", "sharpening Fig. 33", float(sketch)
        ),
    ]
    return Quantity(
        "`jacobian_frobenius`",
        net.name,
        "the mean over samples, squared, no half",
        "It does not grow with the data. The estimate with u lacks a factor sqrt(n N).",
        rows,
    )


@covers("local_volume", "network_volume")
def local_volume(networks: Networks) -> Quantity:
    """Which determinant, how many eigenvalues, which mean."""
    net = networks.relu
    eigenvalues = torch.linalg.svdvals(input_jacobian(net)).square()
    positive = eigenvalues > RANK * eigenvalues[:, :1]
    products = torch.where(positive, eigenvalues, 1.0).log().sum(1) / 2
    rows = [
        Convention("mean of sqrt det(J Jᵀ), J = df/dx (N x M)", "compression Eq. 7, its meaning", net("local_volume")),
        Convention("sqrt det(Jᵀ J), singular for N < M", "compression Def. 3.1 as printed", 0.0, "0"),
        Convention(
            "product of the 3 largest singular values: `local_volume(top_k=3)`",
            "sharpdim `cal_logvol` (in logs)",
            net("local_volume(top_k=3)"),
        ),
        Convention(
            "product of all positive eigenvalues, whatever the rank",
            "compression, below Eq. 7",
            float(products.exp().mean()),
        ),
        Convention(
            "geometric mean: exp of `log_volume`", "compression Fig. 1 plots the log", math.exp(net("log_volume"))
        ),
        Convention("summed over layers: `network_volume`", "compression Def. 3.5", net("network_volume")),
        Convention("the same, `network_volume(top_k=3)`", "for scale", net("network_volume(top_k=3)")),
    ]
    return Quantity(
        "`local_volume`, `network_volume`",
        net.name,
        "det(J Jᵀ), all N eigenvalues; 0 where the rank is lower",
        "As the definition means it where N < M. With `top_k`, state k: the unit changes.",
        rows,
    )


@covers("log_volume")
def log_volume(networks: Networks) -> Quantity:
    """Which volumes' log."""
    net = networks.relu
    eigenvalues = torch.linalg.svdvals(input_jacobian(net)).square()
    positive = eigenvalues > RANK * eigenvalues[:, :1]
    products = torch.where(positive, eigenvalues, 1.0).log().sum(1) / 2
    rows = [
        Convention("mean log over samples of full rank", "compression Fig. 1", net("log_volume")),
        Convention("`log_volume(top_k=3)`", "sharpdim `cal_logvol`", net("log_volume(top_k=3)")),
        Convention("log of the mean volume", "compression Def. 3.3", math.log(net("local_volume"))),
        Convention("all positive eigenvalues, every sample", "compression, below Eq. 7", float(products.mean())),
    ]
    return Quantity(
        "`log_volume`",
        net.name,
        "the natural log, before the mean; samples of lower rank are left out, and a note gives their share",
        "The log of 0 does not exist.",
        rows,
        difference=True,
    )


@covers("local_dimension")
def local_dimension(networks: Networks) -> Agreed:
    """Participation ratio."""
    value = networks.relu("local_dimension")
    return Agreed("local_dimension", "relu", value, "sharpdim `get_dim` computes the same mean of ratios")
