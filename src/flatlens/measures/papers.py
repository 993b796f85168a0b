"""The papers that cards cite, by their short names."""

from __future__ import annotations

PAPERS = {
    "compression": (
        "Chen et al., A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks"
    ),
    "sharpening": "MacDonald et al., On Progressive Sharpening, Flat Minima and Generalisation",
    "density2019": (
        "Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian Eigenvalue Density, "
        "ICML 2019"
    ),
    "reparam2019": (
        "Petzka, Adilova, Kamp and Sminchisescu, A Reparameterization-Invariant Flatness Measure for Deep Neural "
        "Networks, NeurIPS workshop Science meets Engineering of Deep Learning, 2019"
    ),
    "relative2021": (
        "Petzka, Kamp, Adilova, Sminchisescu and Boley, Relative Flatness and Generalization, NeurIPS 2021"
    ),
}


def paper(source: str) -> str:
    """Return the paper that a card's source names.

    >>> paper("relative2021 Def. 3").partition(",")[0]
    'Petzka'
    """
    return PAPERS[source.split()[0]]
