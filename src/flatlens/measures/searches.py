"""The eigenpairs that one measurement leaves for the next, in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
from torch import Tensor

from flatlens.curvature.krylov import Remembered
from flatlens.estimate import Key
from flatlens.result import Result


class Searches(Result):
    """Leading eigenpairs by search and layer, from which `Lens(after=searches.pairs)` starts its searches."""

    _KIND = "warm start"

    def __init__(self, pairs: Mapping[Key, Remembered], about: Mapping[str, Any]) -> None:
        self.pairs = dict(pairs)
        self.about = dict(about)

    def frame(self) -> pd.DataFrame:
        """Return one row for each search: its measure, its layer, how many pairs it left, the first eigenvalue."""
        rows = [
            (search, layer or "", len(found.values), float(found.values[0]))
            for (search, layer), found in self.pairs.items()
        ]
        return pd.DataFrame(rows, columns=["measure", "layer", "pairs", "value"])

    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {
            f"{number}/{name}": tensor.detach().cpu().contiguous()
            for number, found in enumerate(self.pairs.values())
            for name, tensor in (("values", found.values), ("vectors", found.vectors))
        }
        return {"searches": list(self.pairs)}, tensors

    @classmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        pairs = {
            (search, layer): Remembered(tensors[f"{number}/values"], tensors[f"{number}/vectors"])
            for number, (search, layer) in enumerate(content["searches"])
        }
        return cls(pairs, content["about"])
