"""Every transform by name, in the catalogue's order. A new one is added here."""

from __future__ import annotations

from collections.abc import Iterable

from flatlens.errors import BadInput, UnknownName
from flatlens.transforms.batchnorm import batchnorm_folding, batchnorm_scale
from flatlens.transforms.permutation import permutation
from flatlens.transforms.rescaling import as_published, feature_normalisation, layerwise, neuronwise
from flatlens.transforms.transform import Transform

TRANSFORMS: dict[str, Transform] = {
    one.name: one
    for one in (
        layerwise,
        neuronwise,
        permutation,
        batchnorm_folding,
        batchnorm_scale,
        feature_normalisation,
        as_published,
    )
}


def chosen(transforms: str | Transform | Iterable[str | Transform] | None) -> list[Transform]:
    """Transforms from names or transforms, one alone will do; those that are applied unasked for None.

    >>> chosen("layerwise"), len(chosen(None))
    ([layerwise], 6)
    """
    if transforms is None:
        return [one for one in TRANSFORMS.values() if one.default]
    if not isinstance(transforms, str | Transform | Iterable):
        raise BadInput(f"check_invariance(transforms={transforms!r}): names or transforms are needed")
    named = [transforms] if isinstance(transforms, str | Transform) else list(transforms)
    if not named:
        raise BadInput(f"check_invariance(transforms=[]): at least one of {', '.join(TRANSFORMS)} is needed")
    for one in named:
        if not isinstance(one, str | Transform):
            raise BadInput(f"check_invariance(transforms=...): names or transforms are needed, got {one!r}")
        if isinstance(one, str) and one not in TRANSFORMS:
            raise UnknownName.among("transform", one, TRANSFORMS)
    return list(dict.fromkeys(TRANSFORMS[one] if isinstance(one, str) else one for one in named))
