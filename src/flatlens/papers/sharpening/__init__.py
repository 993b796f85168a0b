"""MacDonald, Valmadre and Lucey, "On Progressive Sharpening, Flat Minima and Generalisation"."""

from __future__ import annotations

from flatlens.papers.sharpening import coordinates, descent, ends, epochs, regularised, scales

EXPERIMENTS = tuple(
    one for module in (descent, ends, regularised, epochs, scales, coordinates) for one in module.EXPERIMENTS
)
