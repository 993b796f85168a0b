"""The parameter Jacobian of an embedding: rows that a sample does not look up have no slope, and are not held.

    df_k/dE_v = sum over the positions p with id v of df_k/dz_p

A sample with T ids has at most T rows: each id's slopes are summed at the place where it comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.grams.contract import joined
from flatlens.grams.record import Call
from flatlens.grams.shared import ExplicitJacobian
from flatlens.grams.trial import without_padding


def looked_up(weight: Tensor, calls: list[Call], slopes: list[Tensor], C: Tensor) -> ExplicitJacobian:
    """Of the embedding `weight` (V, D), from its calls and the slopes (n, N, T, D) at their outputs."""
    n = len(C)
    ids = joined([call.x.reshape(n, -1) for call in calls], 1)
    J = joined([_trained(call, slope) for call, slope in zip(calls, slopes, strict=True)], 2)
    first = (ids[:, :, None] == ids[:, None]).to(torch.uint8).argmax(2)  # where each id came up, (n, T)
    place = torch.nn.functional.one_hot(first, ids.shape[1]).to(J)  # (n, T, T)
    M = torch.einsum("nkpd,npq->nkqd", J, place)
    new = first == torch.arange(ids.shape[1], device=ids.device)
    theta = weight[ids].to(torch.float64) * new[..., None]
    return ExplicitJacobian(M.flatten(2).to(torch.float64), theta.flatten(1), C)


def _trained(call: Call, slopes: Tensor) -> Tensor:
    """Zero at the padding."""
    n, N = slopes.shape[:2]
    flat = Call(call.key, call.name, call.module, call.x.reshape(n, 1, -1).expand(n, N, -1), call.z)
    return without_padding(flat, slopes)
