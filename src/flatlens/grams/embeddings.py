"""The parameter Jacobian of an embedding, without the rows that a sample does not look up: those are 0.

    df_k/dE_v = sum over the positions p with id v of df_k/dz_p

A sample with T ids has at most T nonzero rows. The row of an id is kept at the position where the id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatlens.grams.contractions import concatenated
from flatlens.grams.explicit import ExplicitJacobian
from flatlens.operations.reads import GraphOperation, Lookup


def embedding_jacobian(
    weight: Tensor, lookups: list[tuple[GraphOperation | None, Tensor, Tensor]], C: Tensor
) -> ExplicitJacobian:
    """Return the Jacobian in the embedding `weight` (V, D), whose theta is each sample's own rows.

    Each lookup comes with its ids (n, T) and the output Jacobian (n, N, T, D) at its output.
    """
    ids = concatenated([mine for _, mine, _ in lookups], 1)
    trained = [
        J if not isinstance(lookup, Lookup) or lookup.padding < 0
        else J * torch.ne(mine, lookup.padding)[:, None, :, None].to(J)
        for lookup, mine, J in lookups
    ]  # fmt: skip
    J = concatenated(trained, 2)
    first = (ids[:, :, None] == ids[:, None]).to(torch.uint8).argmax(2)  # first position of each id, (n, T)
    place = torch.nn.functional.one_hot(first, ids.shape[1]).to(J)  # (n, T, T)
    M = torch.einsum("nkpd,npq->nkqd", J, place)
    new = first == torch.arange(ids.shape[1], device=ids.device)
    theta = weight[ids].to(torch.float64) * new[..., None]
    return ExplicitJacobian(M.flatten(2).to(torch.float64), theta.flatten(1), C)
