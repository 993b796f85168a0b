"""What happens when weights, features or inputs are moved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import flatlens as fl
from conventions.literal import searched
from conventions.networks import Network, Networks
from conventions.table import Agreed, Convention, Quantity, covers

RHO, RADIUS, DELTA = 0.1, 0.05, 0.1  #: flatlens's defaults


@covers("average_sharpness")
def average_sharpness(networks: Networks) -> Quantity:
    """With or without 2 / rho^2, adaptive or not."""
    net = networks.relu
    published = "average_sharpness(scale='published46')"

    def squared_error(f: Tensor, y: Tensor) -> Tensor:
        return (f - torch.nn.functional.one_hot(y, f.shape[1])).square().sum(1)

    summed = fl.measure(fl.Lens(net.problem(squared_error)), published)[published].value / RHO**2
    rows = [
        Convention(
            f"(2/ρ²) E[L(θ + d) - L(θ)], d of size ρ |θ_j|, ρ = {RHO}", "compression Eq. 38", net("average_sharpness")
        ),
        Convention(
            'no 2/ρ²: `scale="published46"`',
            "compression Eq. 46; sharpness-vs-generalization `eval_average_sharpness`; sharpdim, one version",
            net(published),
            "ρ² / 2",
        ),
        Convention(
            "1/ρ², of ‖f - y‖² without a half", "sharpdim `eval_average_sharpness`, another version", summed, "1"
        ),
        Convention(
            "d of size ρ in every parameter: `adaptive=False`",
            "sharpness-vs-generalization (`adaptive=False`)",
            net("average_sharpness(adaptive=False)"),
        ),
        Convention("its limit ρ → 0: `adaptive_sharpness`", "compression Def. E.1", net("adaptive_sharpness")),
    ]
    return Quantity(
        "`average_sharpness`",
        net.name,
        "with 2/ρ², adaptive, in pairs +d and -d",
        "With the factor, a curvature comparable between values of ρ; without, it shrinks like ρ².",
        rows,
    )


def _one_step(net: Network, units: Tensor, rho: float, *, sign: bool = False) -> float:
    """The rise of the risk after one step of ascent in these units."""
    slope = torch.autograd.grad(net.losses(net.model(net.x)).mean(), list(net.parameters.values()))
    g = units * torch.cat([s.flatten() for s in slope])
    step = rho * units * (g.sign() if sign else g / g.norm())
    return net.outcome(net.theta + step)[0] - net.outcome(net.theta)[0]


@covers("worst_sharpness")
def worst_sharpness(networks: Networks) -> Quantity:
    """Which ball, which samples, how many steps."""
    net = networks.relu
    ones = torch.ones_like(net.theta)
    asam = torch.where(net.is_weight, net.theta.abs() + 0.01, 1.0)
    rows = [
        Convention(
            f"largest rise of the risk over ‖d‖₂ ≤ ρ = {RADIUS}, by search",
            "SAM (Foret et al. 2021)",
            net("worst_sharpness"),
        ),
        Convention("one step along the gradient", "davda54/sam `first_step`", _one_step(net, ones, RADIUS)),
        Convention(
            "every 50 samples apart: `m=50`",
            "sharpness-vs-generalization (batch by batch)",
            net("worst_sharpness(m=50)"),
        ),
        Convention("‖d / |θ|‖₂ ≤ ρ: `adaptive=True`", "ASAM (Kwon et al. 2021)", net("worst_sharpness(adaptive=True)")),
        Convention(
            "one step, units |w| + 0.01 for weights, 1 for biases", "ASAM `asam.py`", _one_step(net, asam, RADIUS)
        ),
        Convention(
            "one step in the box |d_j| ≤ ρ",
            'sharpness-vs-generalization (`norm="linf"`, its default, with more steps)',
            _one_step(net, ones, RADIUS, sign=True),
        ),
    ]
    return Quantity(
        "`worst_sharpness`",
        net.name,
        "the Euclidean ball, all samples together, the best of several searches",
        "A single step does not find the maximum. State ρ and its ball.",
        rows,
    )


def _noise_that_costs(net: Network, level: float, draws: int = 10) -> float:
    """The s at which noise of deviation s θ² + 1e-6 costs so much accuracy on average."""
    noise = torch.randn(draws, len(net.theta), generator=torch.Generator().manual_seed(0), dtype=net.theta.dtype)
    here = net.outcome(net.theta)[1]

    def cost(s: float) -> float:
        return here - sum(net.outcome(net.theta + (s * net.theta.square() + 1e-6) * d)[1] for d in noise) / draws

    low, high = 0.0, 1.0
    while cost(high) <= level:
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) > level else (middle, high)
    return (low + high) / 2


@covers("pac_bayes_flatness")
def pac_bayes_flatness(networks: Networks) -> Quantity:
    """What sigma is."""
    net = networks.relu
    own = net("pac_bayes_flatness")
    rows = [
        Convention("1/σ², noise of standard deviation σ, accuracy less 0.1", "flatlens", own),
        Convention(
            "σ² handed over as the standard deviation",
            "robust-generalization-measures `_perturbed_model`, and from there relative2021 Fig. 5",
            math.sqrt(own),
            "σ",
        ),
        Convention(
            "the same, then sqrt(. / n)",
            "robust-generalization-measures `adjust_measure`",
            math.sqrt(math.sqrt(own) / len(net.y)),
        ),
        Convention("noise of size σ |θ_j|: `adaptive=True`", "flatlens", net("pac_bayes_flatness(adaptive=True)")),
        Convention(
            "noise of size σ² θ_j² + ε², ε = 0.001",
            "robust-generalization-measures `_perturbed_model` (magnitude-aware; it searches σ up to 2)",
            1 / _noise_that_costs(net, 0.1),
        ),
        Convention('a loss higher by 0.1: `of="loss"`', "for scale", net("pac_bayes_flatness(of='loss')")),
    ]
    return Quantity(
        "`pac_bayes_flatness`",
        net.name,
        "σ is the standard deviation",
        "In a PAC-Bayes bound σ² is the variance. Values with σ² as the standard deviation are the square "
        "root of these.",
        rows,
    )


@covers("feature_robustness")
def feature_robustness(networks: Networks) -> Quantity:
    """Which A."""
    net = networks.entropy
    phi, head = net.model[:-1](net.x).detach(), net.model[-1]

    @torch.no_grad()
    def rise(k: int) -> float:
        moved = phi.clone()
        moved[:, k] *= 1 + DELTA
        return float((net.losses(head(moved)) - net.losses(head(phi))).mean())

    single = [rise(k) for k in range(phi.shape[1])]
    rows = [
        Convention(
            f"mean over rotations A, δ = {DELTA}, last layer", "relative2021 Eq. 4, Thm 5", net("feature_robustness")
        ),
        Convention(
            "its leading term, δ²/(2m) κ",
            "relative2021 Thm 5",
            DELTA**2 / (2 * phi.shape[1]) * net("relative_flatness"),
        ),
        Convention('the worst A: `over="worst"`', "relative2021 Thm 14", net("feature_robustness(over='worst')")),
        Convention(
            'uniform in the ball: `over="ball"`', "relative2021 Prop. 2", net("feature_robustness(over='ball')")
        ),
        Convention("one feature at a time: the largest", "relativeFlatnessGeneralization (δ = 0.001)", max(single)),
        Convention("one feature at a time: the mean", "the same", sum(single) / len(single)),
    ]
    return Quantity(
        "`feature_robustness`",
        net.name,
        "random rotations in pairs A and -A, labels kept, last linear layer",
        "Theorem 5 bounds this. The mean over A and -A has no first-order term; the change of a single "
        "feature has one.",
        rows,
    )


@covers("local_variation")
def local_variation(networks: Networks) -> Agreed:
    """As published."""
    net = networks.tanh
    upper = net("local_variation", "upper")
    remark = f"sharpening Eq. 5 alone, from below; `.upper` certifies it from above: {upper:.4g}"
    return Agreed("local_variation", net.name, net("local_variation"), remark)


@covers("mls_by_search")
def mls_by_search(networks: Networks) -> Quantity:
    """Secants or slopes, squares or not."""
    net = networks.relu
    rows = [
        Convention("mean of the steepest ‖f(x + d) - f(x)‖ / ‖d‖, ‖d‖ = 0.001 ‖x‖", "flatlens", net("mls_by_search")),
        Convention("the derivative itself: `mls`", "compression Def. 3.7", net("mls")),
        Convention("long secants, ‖d‖ = ‖x‖ / 2: `delta=0.5`", "for scale", net("mls_by_search(delta=0.5)")),
        Convention(
            "mean of ‖f(x + d) - f(x)‖² / ‖d‖, d in a box of 0.1, 30 steps",
            "sharpdim `eval_mls_adv` (behind a sigmoid or softmax)",
            float(searched(net).mean()),
        ),
    ]
    return Quantity(
        "`mls_by_search`",
        net.name,
        "one length of d for all, relative to the input; nothing squared, as in compression Eq. 47",
        "A secant across kinks can be steeper than the derivative. A square in the numerator grows with the box.",
        rows,
    )
