"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""

from __future__ import annotations

from flatlens.experiments.papers.sharpening import descent, jacobians, populations, regularised

EXPERIMENTS = (
    *descent.EXPERIMENTS,
    *populations.EXPERIMENTS,
    *regularised.EXPERIMENTS,
    *jacobians.EXPERIMENTS,
)
