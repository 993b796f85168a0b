"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""

from __future__ import annotations

from flatlens.papers.sharpening import (
    coordinates,
    decay,
    descent,
    epochs,
    jacobians,
    populations,
    regularised,
    scales,
)

EXPERIMENTS = (
    *descent.EXPERIMENTS,
    *decay.EXPERIMENTS,
    *populations.EXPERIMENTS,
    *regularised.EXPERIMENTS,
    *epochs.EXPERIMENTS,
    *scales.EXPERIMENTS,
    *coordinates.EXPERIMENTS,
    *jacobians.EXPERIMENTS,
)
