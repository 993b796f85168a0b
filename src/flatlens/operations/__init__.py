"""Properties of single operations: the only package that knows layers, activations and autograd's own nodes."""
