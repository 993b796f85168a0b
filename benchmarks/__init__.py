"""Benchmarks: each times flatlens side by side with a peer or a floor, never as a timed test."""
