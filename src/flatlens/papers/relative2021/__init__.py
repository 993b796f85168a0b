"""Petzka, Kamp, Adilova, Sminchisescu and Boley, "Relative Flatness and Generalization"."""

from __future__ import annotations

from flatlens.papers.relative2021 import locally_constant, minima, representative

EXPERIMENTS = (*locally_constant.EXPERIMENTS, *representative.EXPERIMENTS, *minima.EXPERIMENTS)
