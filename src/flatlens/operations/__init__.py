"""What single operations do: the one place that knows layers, activations and autograd's own nodes."""
