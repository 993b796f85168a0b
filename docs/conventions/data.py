"""What the sample says of its distribution."""

from __future__ import annotations

from conventions.networks import Networks
from conventions.table import Convention, Quantity, covers


@covers("representativeness")
def representativeness(networks: Networks) -> Quantity:
    """Which density estimate."""
    net = networks.entropy
    name = "representativeness"
    rows = [
        Convention("3 parts, Scott's bandwidth, absolute value", "relative2021 C.1 (3-fold)", net(name)),
        Convention(
            "10 parts: `folds=10`",
            "RelativeFlatnessAndGeneralization `interpolatingness.py` (its default)",
            net(f"{name}(folds=10)"),
        ),
        Convention(
            'bandwidth in units of ‖φ‖: `bandwidth="relative"`',
            "relative2021 Prop. 2; RelativeFlatnessAndGeneralization `interpolatingness.py` (its docstring)",
            net(f"{name}(bandwidth='relative')"),
        ),
        Convention(
            "the gap's own term, with held-out data: `.split.representativeness`",
            "relative2021 Eq. 5",
            net(name, "split.representativeness"),
        ),
    ]
    return Quantity(
        f"`{name}`",
        net.name,
        "random splits, Gaussian kernels, absolute value, spread over splits as its error",
        "All rows but the last estimate it from the sample alone and are rough; the last needs held-out data.",
        rows,
    )


@covers("locally_constant_labels")
def locally_constant_labels(networks: Networks) -> Quantity:
    """Mean or worst."""
    net = networks.entropy
    name, wide = "locally_constant_labels", "locally_constant_labels(delta=1.0)"
    rows = [
        Convention("mean change of the loss, label of the nearest sample, δ = 1", "flatlens", net(wide)),
        Convention("each sample's largest: `.worst`", "relative2021 Def. 9 (all directions)", net(wide, "worst")),
        Convention("δ = 0.5", "for scale", net(f"{name}(delta=0.5)")),
        Convention("share of labels that differ: `.changed`", "for scale", net(wide, "changed")),
    ]
    return Quantity(
        f"`{name}`",
        net.name,
        "the mean; `.worst` is given, too",
        "The definition is about all directions, of which draws are some. At the default, δ = 0.1, it is 0 here.",
        rows,
    )
