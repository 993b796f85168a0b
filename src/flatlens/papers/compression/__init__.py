"""Chen et al., "A Simple Connection from Loss Flatness to Compressed Representations in Neural Networks"."""
