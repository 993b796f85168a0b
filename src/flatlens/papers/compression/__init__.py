"""Chen et al., "A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks"."""

from __future__ import annotations

from flatlens.papers.compression import chain, populations, training, transformers

EXPERIMENTS = (*training.EXPERIMENTS, *chain.EXPERIMENTS, *populations.EXPERIMENTS, *transformers.EXPERIMENTS)
