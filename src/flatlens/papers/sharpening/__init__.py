"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""

from __future__ import annotations

from flatlens.papers.sharpening import coordinates, decay, descent, ends, epochs, jacobians, regularised, scales

EXPERIMENTS = (
    *descent.EXPERIMENTS,
    *decay.EXPERIMENTS,
    *ends.EXPERIMENTS,
    *regularised.EXPERIMENTS,
    *epochs.EXPERIMENTS,
    *scales.EXPERIMENTS,
    *coordinates.EXPERIMENTS,
    *jacobians.EXPERIMENTS,
)
