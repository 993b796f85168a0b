"""A network of the zoo, ready to be measured, and the results of measuring it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import flatlens as fl
from benchmarks.zoo import of_timm, of_transformers, truth
from benchmarks.zoo.shim import operators_of_torchvision
from flatlens.curvature import Hessian
from flatlens.errors import FlatlensError

MEASURES = ["interpolation_sharpness", "ggn_trace", "mls"]
LIBRARIES = {"timm": of_timm, "transformers": of_transformers}
TINY = 1e-300  #: errors of smaller numbers are relative to this
SMALL = 1e-9  #: a layer with a smaller share of the whole is compared with the whole


@dataclass(frozen=True, eq=False)
class Case:
    """A network in eval mode and in float64, with two samples and their labels."""

    network: nn.Module
    x: Any
    y: Tensor


def case(name: str) -> Case:
    """Return the case, equal at each call; `name` is "timm:vit_tiny_patch16_224" or "transformers:Bert"."""
    library, _, own = name.partition(":")
    operators_of_torchvision()
    torch.manual_seed(0)
    network = LIBRARIES[library].build(own).double().eval()
    x = LIBRARIES[library].samples(own, 16)
    lively(network, x)
    return Case(network, tree_map(lambda part: part[[0, -1]], x), torch.tensor([0, 2]))


@torch.no_grad()
def lively(network: nn.Module, x: Any) -> None:
    """Move parameters that start equal, and give every BatchNorm the statistics of some samples.

    These are zero biases, norms of one and layer scales of 1e-6: behind a zero no wrong derivative would show.
    """
    for p in network.parameters():
        if p.is_floating_point() and float(p.max() - p.min()) == 0:
            p.add_(torch.randn_like(p), alpha=0.05)
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        truth.as_it_is(network, x)
    network.eval()


def rounds(one: Case) -> bool:
    """Return whether the network itself works in float32 in places, whatever the dtype of its parameters."""
    kept: list[torch.dtype] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.dtype)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        truth.outputs(one.network, one.x)
    return torch.float32 in kept


def measured(one: Case, differences: bool = True) -> dict[str, Any]:
    """Return a row of the table: relative errors of flatlens, seconds of both, the share that goes through autograd."""
    sizes = {key: p.numel() for key, p in one.network.named_parameters() if p.requires_grad}
    row: dict[str, Any] = {
        "parameters": sum(sizes.values()),
        "outputs": 3,
        "rounds": rounds(one),
        "errors": {},
        "troubles": [],
    }
    v = truth.direction(one.network)
    with truth.evaluated(one.network):
        start = time.perf_counter()
        true, shares = truth.first_order(one.network, one.x)
        product = truth.hessian_product(one.network, one.x, one.y, v)
        row["seconds_brute_force"] = time.perf_counter() - start
        if differences:
            steps = truth.LONG if row["rounds"] else truth.STEPS
            row["differences"] = truth.by_differences(one.network, one.x, one.y, v, product, steps)
    row["true"] = true | {"hessian_product_norm": float(product.norm())}
    start = time.perf_counter()
    for part in (lambda: _of_the_pass(one, row, sizes, shares), lambda: _of_products(one, row, v, product)):
        try:
            part()
        except FlatlensError as error:
            row["troubles"].append(f"refused: {error}")
        except Exception as error:
            row["troubles"].append(f"crashed: {type(error).__name__}: {error}".replace("\n", " "))
    row["seconds_flatlens"] = time.perf_counter() - start
    return row


def _of_the_pass(one: Case, row: dict[str, Any], sizes: dict[str, int], shares: dict[str, float]) -> None:
    report = fl.measure(fl.Lens(fl.Problem(one.network, "cross_entropy", (one.x, one.y))), MEASURES)
    row["share_by_autograd"] = sum(sizes[name] for name in report.about["by_autograd"]) / row["parameters"]
    for name in MEASURES:
        estimate = report[name]
        if estimate.kind != "exact":
            row["troubles"].append(f"{name} is {estimate.kind}: {estimate.note}")
        else:
            row["errors"][name] = abs(estimate.value - row["true"][name]) / max(row["true"][name], TINY)
    places = {at: report[MEASURES[0], at].value for measure, at in report if measure == MEASURES[0] and at is not None}
    off = {at: abs(value - true) / (true + SMALL * row["true"][MEASURES[0]])
           for at, value in places.items() for true in [share_of(at, shares, places)]}  # fmt: skip
    row["worst_layer"] = max(off, key=lambda at: off[at])
    row["errors"]["by_layer"] = off[row["worst_layer"]]


def share_of(at: str, shares: dict[str, float], places: Collection[str]) -> float:
    """Return the sharpness of a parameter, or of those parameters of a layer that have no row of their own."""
    own = [name for name in shares if name.rpartition(".")[0] == at and name not in places]
    return shares[at] if at in shares else sum(shares[name] for name in own)


def _of_products(one: Case, row: dict[str, Any], v: Tensor, product: Tensor) -> None:
    found = Hessian(fl.Problem(one.network, "cross_entropy", (one.x, one.y)))(v)
    row["errors"]["hessian_product"] = truth.relative(found, product)
