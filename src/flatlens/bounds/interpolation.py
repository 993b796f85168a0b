"""The difference of the Hessian's trace from the sharpness in the bounds (Chen et al., Lemma B.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flatlens.bounds.bound import bound
from flatlens.bounds.claim import Assumption, Claim
from flatlens.bounds.context import Context

_KEY = "interpolation_gap(exact=True, bound=True)"


@bound(
    id="H7",
    symbol=r"|\mathrm{Tr}\,H - S| \leq \overline{\sum_j |\langle f - y, \partial^2 f/\partial\theta_j^2 \rangle|}",
    source="compression Lemma B.1",
    cost="a Hessian product for every direction of curved parameters",
    on_request=True,
)
def interpolation_bound(context: Context) -> Iterator[Claim]:
    """Interpolation sharpness is near tr H if f nearly interpolates or its second derivatives are small: Lemma B.1.

    The row is the lemma's middle term, |Tr H - S| <= mean_i sum_j |<f_i - y_i, d2f_i/dtheta_j2>|. It needs bounded
    second derivatives, and no interpolation. The note says how large the right side is relative to Tr H: if it is
    small, S can replace the trace in the other bounds.
    """
    premises = (context.half_squared_error,)
    if not context.half_squared_error.holds:
        yield Claim(math.nan, math.nan, assumptions=premises)
        return
    gap, middle = context.measured(_KEY), context.measured(_KEY, part="bound")
    finite = math.isfinite(middle.value)
    bounded = Assumption("bounded_second_derivatives", finite, "" if finite else middle.note or "they are not finite")
    trace = abs(context.measured("hessian_trace(exact=True)").value)
    note = f"{middle.value / trace:.2g} of Tr H" if finite and trace > 0 else ""
    yield Claim(abs(gap.value), middle.value, None, "", (*premises, bounded), stderr=gap.stderr, note=note)
