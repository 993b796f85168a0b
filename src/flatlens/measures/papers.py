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
    "adaptive2022": "Cohen et al., Adaptive Gradient Methods at the Edge of Stability, arXiv 2207.14484, 2022",
    "critical2026": (
        "Kalra et al., A Scalable Measure of Loss Landscape Curvature for Analyzing the Training Dynamics of LLMs, "
        "arXiv 2601.16979, 2026"
    ),
    "noise2018": "McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, 2018",
    "norms2026": (
        "Islamov, Crawshaw, Cohen and Gower, Non-Euclidean Gradient Descent Operates at the Edge of Stability, "
        "arXiv 2603.05002, 2026"
    ),
    "relative2021": (
        "Petzka, Kamp, Adilova, Sminchisescu and Boley, Relative Flatness and Generalization, NeurIPS 2021"
    ),
    "symmetries2025": (
        "da Silva, Dangel and Oore, Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds "
        "It, ICML 2025"
    ),
}
