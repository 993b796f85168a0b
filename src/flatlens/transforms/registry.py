"""Every transform by name, in the catalogue's order: a transform registers itself when its module is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from flatlens.errors import BadInput
from flatlens.transforms import batchnorm, heads, permutation, rescaling
from flatlens.transforms.transform import TRANSFORMS, Transform

_HOMES = (batchnorm, heads, permutation, rescaling)
"""The modules of transforms: importing one registers its transforms."""

__all__ = ["TRANSFORMS", "named_transforms"]


def named_transforms(transforms: str | Transform | Iterable[str | Transform] | None) -> list[Transform]:
    """Return transforms from names or transforms, one alone is enough; for None, those that are applied unasked.

    >>> named_transforms("layerwise"), len(named_transforms(None))
    ([layerwise], 12)
    """
    if transforms is None:
        return [one for one in TRANSFORMS.values() if one.default]
    found = TRANSFORMS.named(transforms, "check_invariance(transforms=...)")
    if not found:
        raise BadInput(f"check_invariance(transforms=[]): name at least one of {', '.join(TRANSFORMS)}")
    return list(dict.fromkeys(found))
