"""What an optimiser's own steps meet: the geometry of its preconditioner, its updates, and its noise."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

import flatlens as fl
from conventions.literal import batch_hessian, hessian, slopes, top
from conventions.networks import BATCHES, Network, Networks
from conventions.table import FOR_SCALE, Agreed, Convention, Quantity, covers

LR, STEPS = 1e-3, 30


def _by_adam(net: Network) -> tuple[Network, torch.optim.Adam]:
    """The network after some full-batch steps of Adam from where it is, and the optimiser."""
    moved = copy.deepcopy(Network(net.name, net.model, net.loss, net.x, net.y, net.test))
    adam = torch.optim.Adam(moved.model.parameters(), lr=LR)
    for _ in range(STEPS):
        adam.zero_grad()
        moved.losses(moved.model(moved.x)).mean().backward()
        adam.step()
    return moved, adam


def _root(net: Network, adam: torch.optim.Adam, *, first: bool, second: bool) -> Tensor:
    """P, with or without the corrections of the first and the second moment."""
    beta1, beta2 = adam.defaults["betas"]
    v = torch.cat([adam.state[p]["exp_avg_sq"].flatten() for p in net.parameters.values()])
    P = (v / (1 - beta2**STEPS if second else 1)).sqrt() + adam.defaults["eps"]
    return P * (1 - beta1**STEPS if first else 1)


def _with(net: Network, adam: torch.optim.Adam, measure: str) -> fl.Estimate:
    return fl.measure(fl.Lens(net.problem(), optimiser=adam), measure)[measure]


@covers("preconditioned_sharpness")
def preconditioned_sharpness(networks: Networks) -> Quantity:
    """Which corrections of Adam's moments."""
    net, adam = _by_adam(networks.relu)
    H, plain = hessian(net), fl.measure(fl.Lens(net.problem()), "sharpness")["sharpness"].value

    def between(P: Tensor) -> float:
        return top(H / (P[:, None] * P).sqrt())

    rows = [
        Convention(
            "lmax(P^-1/2 H P^-1/2), P = (1 - β₁^t) (√(v / (1 - β₂^t)) + ε)",
            "adaptive2022 section 2",
            _with(net, adam, "preconditioned_sharpness").value,
        ),
        Convention("P without the correction of β₁", FOR_SCALE, between(_root(net, adam, first=False, second=True))),
        Convention("P = √v + ε, no correction", FOR_SCALE, between(_root(net, adam, first=False, second=False))),
        Convention("lmax(H): `sharpness`", "sharpening section 3", plain),
    ]
    return Quantity(
        "`preconditioned_sharpness`",
        net.name,
        f"P of the optimiser's next step, after {STEPS} steps of Adam",
        "The corrections tend to 1.",
        rows,
        at=" after these steps",
    )


@covers("critical_sharpness", "directional_sharpness")
def critical_sharpness(networks: Networks) -> Quantity:
    """Searched, or from the quadratic form; over which square."""
    net, adam = _by_adam(networks.relu)
    lens = fl.Lens(net.problem(), optimiser=adam)
    from flatlens.perturbation.weights import next_update

    update = next_update(adam, net.model, lens.gradient)
    D, g = (torch.cat([d[name].flatten() for name in net.parameters]) for d in (update, lens.gradient))
    H = hessian(net)
    form = float(D @ H @ D)
    rows = [
        Convention(
            "2 / η_c, η_c the step along Adam's next update where the loss rises above its value: `critical_sharpness`",
            "critical2026",
            _with(net, adam, "critical_sharpness").value,
        ),
        Convention("Dᵀ H D / ⟨D, g⟩, D the update: its value on a quadratic", FOR_SCALE, form / float(D @ g)),
        Convention("Dᵀ H D / ‖D‖²: `directional_sharpness`", FOR_SCALE, form / float(D @ D)),
        Convention("gᵀ H g / ‖g‖²: `directional_sharpness(along='gradient')`", FOR_SCALE, float(g @ H @ g / (g @ g))),
    ]
    return Quantity(
        "`critical_sharpness` and `directional_sharpness`",
        net.name,
        f"the update that the optimiser makes next on all the data, after {STEPS} steps of Adam",
        "Divided by ⟨D, g⟩, a curvature is comparable with 2 / lr; divided by ‖D‖², with `sharpness`.",
        rows,
        at=" after these steps",
    )


@covers("gradient_noise_scale")
def gradient_noise_scale(networks: Networks) -> Quantity:
    """The samples as a population, or as a sample of one."""
    net = networks.tanh
    n = len(net.y)
    rows_of = list(net.parameters.values())
    each = [net.losses(net.model(net.x[i : i + 1]), slice(i, i + 1)).sum() for i in range(n)]
    G = torch.stack([torch.cat([p.flatten() for p in torch.autograd.grad(one, rows_of)]) for one in each])
    small, big = G[: BATCHES[-1]].mean(0).square().sum(), G.mean(0).square().sum()
    b, B = BATCHES[-1], n
    square, spread = (B * big - b * small) / (B - b), (small - big) / (1 / b - 1 / B)
    whole = "gradient_noise_scale(batches=250, sampled=False)"
    rows = [
        Convention("tr Σ / ‖g‖² of the samples, all there are: `sampled=False`", "noise2018", net(whole)),
        Convention(f"from two gradients, of {b} and of {B} samples", "noise2018 App. A.1", float(spread / square)),
    ]
    return Quantity(
        "`gradient_noise_scale`",
        net.name,
        "the gradients of single samples, or of many groups; by default ‖g‖² is freed of its own noise",
        "Near a minimum ‖g‖² of the distribution cannot be told from 0; that of the samples is known. Two "
        "gradients, one of a small batch, have a large unknown error.",
        rows,
    )


@covers("minibatch_sharpness")
def minibatch_sharpness(networks: Networks) -> Quantity:
    """One batch, or the mean over random ones."""
    net = networks.relu
    size = BATCHES[-1]
    name = f"minibatch_sharpness(samples={size})"
    told = f"mean of lmax over 8 random batches of {size}: `samples={size}` (default 32)"
    rows = [
        Convention(told, "flatlens", net(name)),
        Convention("one batch, the last one", "PyHessian `data=`", top(batch_hessian(net, len(BATCHES) - 1))),
        Convention("all the data: `sharpness`", "sharpening section 3", net("sharpness")),
    ]
    assert math.isfinite(rows[0].value)
    return Quantity(
        "`minibatch_sharpness`",
        net.name,
        "the mean over batches drawn at random, with Student's error",
        "A single batch has no error; on fewer samples the largest eigenvalue is larger on average.",
        rows,
    )


@covers("batch_sharpness")
def batch_sharpness(networks: Networks) -> Quantity:
    """The mean of ratios, or the ratio of means; along a batch's gradient, or along that of all the data."""
    net = networks.relu
    size = BATCHES[-1]
    name = f"batch_sharpness(samples={size})"
    g, H = slopes(net).mean(0), hessian(net)
    generator = torch.Generator().manual_seed(0)
    forms, squares = [], []
    for _ in range(32):
        part = torch.randperm(len(net.x), generator=generator)[:size]
        own, product = _along_its_gradient(net, part)
        forms.append(float(own @ product))
        squares.append(float(own.square().sum()))
    rows = [
        Convention(f"mean of g_B^T H_B g_B / ‖g_B‖² over 32 random batches of {size}", "batches2024", net(name)),
        Convention("mean of g_B^T H_B g_B over the mean of ‖g_B‖²", FOR_SCALE, sum(forms) / sum(squares)),
        Convention("g^T H g / ‖g‖² of all the data: `directional_sharpness(along='gradient')`", "critical2026",
                   float(g @ H @ g / g.square().sum())),
    ]  # fmt: skip
    return Quantity(
        "`batch_sharpness`",
        net.name,
        "the mean of ratios over batches drawn at random, with its interval",
        "Plain SGD hovers where this is 2 / lr; the ratio of means gives batches of large gradients more weight.",
        rows,
    )


@covers("eigenspace")
def eigenspace(networks: Networks) -> Agreed:
    """Of a dense decomposition."""
    value = networks.tanh("eigenspace")
    return Agreed("eigenspace", "tanh", value, "the gradient's part in the ten last vectors of `torch.linalg.eigh`")


def _along_its_gradient(net: Network, part: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a batch's loss, and its Hessian times that gradient."""
    tensors = list(net.parameters.values())
    risk = net.losses(net.model(net.x))[part].mean()
    own = torch.cat([row.flatten() for row in torch.autograd.grad(risk, tensors, create_graph=True)])
    rows = torch.autograd.grad(own @ own.detach(), tensors)
    return own.detach(), torch.cat([row.flatten() for row in rows])
