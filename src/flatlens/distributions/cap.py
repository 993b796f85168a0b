"""The measure of a ball about a point of a sphere: a spherical cap, for every radius up to the diameter."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc, betaln, roots_laguerre

_SMALL = 1e-200  #: smaller values of the incomplete beta function are near underflow: their log is computed
LAGUERRE = roots_laguerre(32)  #: points and weights for int_0^inf exp(-w) f(w) dw


def log_cap_measure(d: int, r: float) -> float:
    """Return the log of the share of S^d (in R^{d+1}) within the distance r, through space, of one of its points.

    With I = I_x(d/2, 1/2), the regularised incomplete beta function at x = r^2 - r^4/4, the squared sine of the cap's
    angle, the share is I/2 up to r = sqrt 2, the half sphere, and 1 - I/2 beyond (Li 2011).

    >>> math.exp(log_cap_measure(2, 1.0))  # r^2 / 4, for every r
    0.25
    >>> round(math.exp(log_cap_measure(1, 3**0.5)), 12)  # 120 of 180 degrees
    0.666666666667
    """
    if r >= 2:
        return 0.0
    x = r * r * (1 - r * r / 4)
    half = float(betainc(d / 2, 0.5, min(x, 1.0))) / 2
    if r * r > 2:
        return math.log1p(-half)
    return math.log(half) if half > _SMALL else _log_small(d / 2, r) - math.log(2)


def _log_small(a: float, r: float) -> float:
    """Return log I_x(a, 1/2) for a value that underflows, x = r^2 - r^4/4.

        I_x(a, 1/2) = x^a / (a B(a, 1/2)) int_0^inf e^-w (1 - x e^(-w/a))^(-1/2) dw,

    the integral over t = x e^(-w/a). Where it is used, x^a is so small that 1 - x is hundreds of times 1/a, or that x
    is near 0. Then the root hardly changes, and a few points are exact to rounding.
    """
    log_x = 2 * math.log(r) + math.log1p(-r * r / 4)
    w, weight = LAGUERRE
    mean = float(weight @ (1 - np.exp(log_x - w / a)) ** -0.5)
    return a * log_x - math.log(a) - float(betaln(a, 0.5)) + math.log(mean)
