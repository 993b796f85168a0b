"""Petzka, Kamp, Adilova, Sminchisescu and Boley, "Relative Flatness and Generalization"."""

from __future__ import annotations

from flatlens.papers.relative2021 import clusters, minima

EXPERIMENTS = (*clusters.EXPERIMENTS, *minima.EXPERIMENTS)
