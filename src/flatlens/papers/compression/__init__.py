"""Chen et al., "A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks"."""

from __future__ import annotations

from flatlens.papers.compression import populations, training, transformers

EXPERIMENTS = (*training.EXPERIMENTS, *populations.EXPERIMENTS, *transformers.EXPERIMENTS)
