"""Transforms of neurons and channels: rescaling, permutation, and BatchNorm's scale.

Rescalings multiply features by a positive factor, and divide their readers' weights by it; ReLU keeps such a factor.
BatchNorm in eval mode is an affine map: it is folded into the layer before, or scale moves across it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatlens.grams import lay_out
from flatlens.grams.data_pass import feature_moments, is_constant
from flatlens.operations.layers import layer_of
from flatlens.transforms.definition import Moving, Offer, transform
from flatlens.transforms.wiring import Link, Wiring


def rescale_source(module: nn.Module, factors: Tensor) -> None:
    """Multiply the features of a layer or a norm by factors (features,): its rows and biases."""
    weight, bias = _tensors(module)
    a = factors.to(weight)
    with torch.no_grad():
        weight.mul_(a.reshape(-1, *(1,) * (weight.ndim - 1)))
        if bias is not None:
            bias.mul_(a)


def rescale_reader(module: nn.Module, owner: Tensor, factors: Tensor) -> None:
    """Divide a reader's weights by factors (features,): it reads multiplied features and gives the same outputs."""
    a = factors[owner]
    with torch.no_grad():
        # the running statistics of a BatchNorm take the factor: the mean a mu, the variance a^2 (sigma^2 + eps) - eps
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            assert module.running_mean is not None
            assert module.running_var is not None
            a = a.to(module.running_mean)
            module.running_mean.mul_(a)
            module.running_var.add_(module.eps).mul_(a.square()).sub_(module.eps)
            return
        weight, _ = _tensors(module)
        by_group = weight.view(layer_of(module).groups, -1, *weight.shape[1:])  # (g, d / g, m / g, kernel...)
        a = a.to(weight).reshape(len(by_group), 1, -1, *(1,) * (weight.ndim - 2))
        by_group.div_(a)


def order_source(module: nn.Module, order: Tensor) -> None:
    """Permute the features of a layer: new feature j is old feature order[j]. For a BatchNorm, its statistics, too."""
    held = {**module._parameters, **module._buffers}
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (tensor := held.get(name)) is not None:
                tensor.copy_(tensor[order.to(tensor.device)].clone())


def order_reader(module: nn.Module, owner: Tensor, order: Tensor) -> None:
    """Permute the inputs of a layer; the inputs of a channel that spans several keep their order."""
    weight, _ = _tensors(module)
    with torch.no_grad():
        weight.copy_(weight[:, entries_in(owner, order).to(weight.device)].clone())


def entries_in(owner: Tensor, order: Tensor) -> Tensor:
    """Return the old input of each new one, for inputs that belong to permuted features.

    >>> entries_in(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0])).tolist()
    [2, 3, 0, 1]
    """
    mine = owner.argsort(stable=True).reshape(len(order), -1)  # (features, inputs of each, in order)
    found = torch.empty_like(owner)
    found[mine.reshape(-1)] = mine[order].reshape(-1)
    return found


def _tensors(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    return weight, bias


def _reason(link: Link) -> str:
    # Why the features of a link stay, whatever the transform
    return link.refused or ("" if link.readers else "nothing reads its features")


def between_layers(wiring: Wiring) -> Offer:
    """Return the linear layers read by linear layers only, with only positively homogeneous operations between."""
    found = {}
    for name in wiring.orders:
        link = wiring.scales[name]
        norm = next((reader.name for reader in link.readers if reader.name not in wiring.orders), "")
        first = f"{norm} comes before the next layer and absorbs the scale: batchnorm_scale moves it" if norm else ""
        found[name] = link, _reason(link) or first
    return Offer.of(found)


def rescale(moving: Moving, link: Link, factors: Tensor) -> None:
    """Move factors (features,) from the readers of a link to its source."""
    rescale_source(moving.module(link.source), factors)
    for reader in link.readers:
        rescale_reader(moving.module(reader.name), reader.owner, factors)


@transform(id="R1", source="reparam2019 Thm 2, section 3", where=between_layers, declared_as="layerwise")
def layerwise(moving: Moving) -> None:
    """Each layer times a random factor in [5, 25], the next one divided by it.

    f = W_2 relu(W_1 x + b_1) becomes (W_2 / a) relu(a W_1 x + a b_1).
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(1).expand(link.features))


@transform(id="R2", source="reparam2019 section 3, Thm 3; relative2021 section 4", where=between_layers,
           declared_as="neuronwise")  # fmt: skip
def neuronwise(moving: Moving) -> None:
    """Each neuron's or channel's incoming weights times a random factor in [5, 25] of its own, its outgoing divided.

    W_2 A^-1 relu(A W_1 x + A b_1), A a positive diagonal matrix.
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(link.features))


def one_to_one(wiring: Wiring) -> Offer:
    """Return the layers and norms whose features one linear layer reads, each once: its inputs can have any unit."""
    if wiring.coupled:
        return Offer((), {"": "batchnorm='train' couples the samples: features have no spread of their own"})
    found = {}
    for name, link in wiring.scales.items():
        why, names = _reason(link), [reader.name for reader in link.readers]
        if not why and len(names) > 1:
            why = f"{' and '.join(names)} read its features, each at its own spread"
        elif not why and names[0] in wiring.scales and names[0] not in wiring.orders:
            why = f"{names[0]} normalises its features already"
        elif not why and len(link.readers[0].owner) != link.features:
            why = f"each of its channels becomes several inputs of {names[0]}, with different spreads"
        found[name] = link, why
    return Offer.of(found)


@transform(id="R5", source="relative2021 Thm 4, Cor. 8", where=one_to_one, declared_as="neuronwise")
def feature_normalization(moving: Moving) -> str:
    """Features that a layer reads, divided by their standard deviation over the data, its weights multiplied by it.

    V^-1 W_{l-1}, V^-1 b_{l-1} and W_l V, V the diagonal of the deviations, over samples and positions: relative
    flatness of layer l becomes `relative_flatness(normalized="std")` of the original, where no feature is always 0. A
    constant feature is divided by its absolute value. One that is always 0 has no unit, and no factor can take its
    weights out of the flatness, as the option does: it stays as it is.
    """
    return _normalise(moving, 1)


@transform(id="R5", source="relative2021 Thm 4, as printed", where=one_to_one, declared_as="neuronwise", default=False,
           name="feature_normalization.published")  # fmt: skip
def as_published(moving: Moving) -> str:
    """Features divided by their variance, as printed: this removes no neuron-wise rescaling, but squares it."""
    return _normalise(moving, 2)


def _normalise(moving: Moving, power: int) -> str:
    plan = lay_out(moving.problem, moving.model)
    moments = feature_moments(moving.problem, moving.model, plan)
    notes = []
    for link in moving.links:
        reader = link.readers[0]
        count, mean, squares = moments[reader.name]
        spread = (squares / count).sqrt().cpu()
        units = torch.where(is_constant(mean.cpu(), spread), mean.cpu().abs(), spread) ** power
        dead = units == 0
        units = torch.where(dead, 1.0, units)
        rescale(moving, link, torch.empty_like(units).index_copy_(0, reader.owner, 1 / units))
        if bool(dead.any()):
            notes.append(f"{int(dead.sum())} features that {reader.name} reads are 0 for all data and have no unit")
    return "; ".join(notes)


def feature_by_feature(wiring: Wiring) -> Offer:
    """Return the linear layers with only operations on single features between them and their readers."""
    return Offer.of({name: (link, _reason(link)) for name, link in wiring.orders.items()})


@transform(id="R3", source="relative2021 section 4", where=feature_by_feature, declared_as="permutation")
def permutation(moving: Moving) -> None:
    """Random order of the neurons or channels of each layer, with their norms and outgoing weights.

    W_2 P^T s(P W_1 x + P b_1), for any activation s that acts on each neuron separately.
    """
    for link in moving.links:
        order = torch.randperm(link.features, generator=moving.generator)
        for name in (link.source, *(norm.name for norm in link.norms)):
            order_source(moving.module(name), order)
        for reader in link.readers:
            order_reader(moving.module(reader.name), reader.owner, order)


_NONE = "the network has no BatchNorm with running statistics"


def folds(wiring: Wiring) -> Offer:
    """Return the linear layers that one BatchNorm alone reads, with nothing between."""
    found, norms = {}, wiring.scales.keys() - wiring.orders.keys()
    for link in (wiring.scales[name] for name in wiring.orders):
        if any(reader.name in norms for reader in link.readers):
            apart = len(link.readers) > 1 or not link.direct
            why = "something lies between it and its BatchNorm, or reads it, too" if apart else ""
            found[link.source] = link, link.refused or why
    return Offer.of(found if norms else {"": (None, _NONE)})


@transform(id="R4", source="BatchNorm's definition in eval mode", where=folds, declared_as=None)
def batchnorm_folding(moving: Moving) -> str:
    """Each BatchNorm's affine map, with its running statistics, written into the weights before it; the norm goes.

    W' = S W, b' = S (b - mu) + beta, S = diag(gamma / sqrt(sigma^2 + eps)).
    """
    for link in moving.links:
        layer, norm = moving.module(link.source), moving.module(link.readers[0].name)
        assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        _fold(layer, norm)
        for above in list(moving.model.modules()):  # under each of its names
            for last in [own for own, module in above._modules.items() if module is norm]:
                setattr(above, last, nn.Identity())
    return f"{len(moving.links)} BatchNorms became biases: their parameters count no longer"


@torch.no_grad()
def _fold(
    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale * norm.weight if norm.affine else scale
    shift = norm.bias if norm.affine else torch.zeros_like(scale)
    bias = torch.zeros_like(scale) if layer.bias is None else layer.bias
    folded = (bias - norm.running_mean) * scale + shift
    layer.weight.mul_(scale.reshape(-1, *(1,) * (layer.weight.ndim - 1)))
    layer.bias = nn.Parameter(folded, requires_grad=layer.weight.requires_grad)


def around_norms(wiring: Wiring) -> Offer:
    """Return BatchNorms and their readers, and layers with the BatchNorms that read them."""
    norms = wiring.scales.keys() - wiring.orders.keys()
    near = {
        name: (link, _reason(link))
        for name, link in wiring.scales.items()
        if name in norms or any(reader.name in norms for reader in link.readers)
    }
    return Offer.of(near if norms else {"": (None, _NONE)})


@transform(id="R4", source="BatchNorm's definition in eval mode", where=around_norms, declared_as="neuronwise")
def batchnorm_scale(moving: Moving) -> None:
    """Scale moved through each BatchNorm: from its statistics to the weights before, from the next layer to its affine.

    Channels times random factors a in [5, 25]: W, b and mu times a, sigma^2 to a^2 (sigma^2 + eps) - eps; gamma and
    beta times a, the next layer's columns divided.
    """
    for link in moving.links:
        rescale(moving, link, moving.factors(link.features))
