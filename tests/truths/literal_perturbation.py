"""Literal definitions of what happens near a network, and answers in closed form."""

from __future__ import annotations

import torch
from torch import Tensor


def on_the_ball(H: Tensor, g: Tensor, rho: float) -> float:
    """max of <g, e> + e^T H e / 2 over ||e|| <= rho, H positive semidefinite: the secular equation, by bisection."""
    values, Q = torch.linalg.eigh(H)
    a = Q.T @ g
    low, high = float(values[-1]) + 1e-14, float(values[-1]) + float(g.norm()) / rho + 1.0
    for _ in range(300):
        mu = (low + high) / 2
        low, high = (mu, high) if float((a / (mu - values)).norm()) > rho else (low, mu)
    e = Q @ (a / (high - values))
    return float(g @ e + e @ H @ e / 2)
