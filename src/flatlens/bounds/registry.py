"""Every bound by name, in the catalogue's order. A new one is added here."""

from __future__ import annotations

from flatlens.bounds.bound import Bound
from flatlens.bounds.compression import linear_stability, mls_chain, network_volume_bound, nmls_bound, volume_bound

BOUNDS: dict[str, Bound] = {
    one.name: one
    for one in (
        linear_stability,
        volume_bound,
        network_volume_bound,
        mls_chain,
        nmls_bound,
    )
}
