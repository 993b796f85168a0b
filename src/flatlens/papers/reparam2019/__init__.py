"""Petzka, Adilova, Kamp, Sminchisescu, "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks".

Names of the paper's Table 1: kappa^l is `layer_sharpness.kappa` of layer l, kappa_tau^l is `kappa_trace`, rho_sigma^l
is `neuron_flatness`, rho^l is `neuron_flatness.max`.
"""

from __future__ import annotations

from flatlens.papers.reparam2019 import every_layer, layer_five

EXPERIMENTS = (*layer_five.EXPERIMENTS, *every_layer.EXPERIMENTS)
