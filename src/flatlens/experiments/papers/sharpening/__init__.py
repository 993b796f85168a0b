"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""

from __future__ import annotations

from flatlens.experiments.papers.sharpening import decay, descent, epochs, jacobians, populations, regularised

EXPERIMENTS = (
    *descent.EXPERIMENTS,
    *decay.EXPERIMENTS,
    *populations.EXPERIMENTS,
    *regularised.EXPERIMENTS,
    *epochs.EXPERIMENTS,
    *jacobians.EXPERIMENTS,
)
