"""What a bound yields and what it reads: claims with their assumptions, and the context of one network.

`Target` is the function that the network should compute, if it is known: f* in sharpening's theorems. The quantities
are norms of each layer's input and Jacobian, per sample, that only bounds use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn

from flatlens.curvature import Hessian, eigenpairs
from flatlens.curvature.space import as_one_vector
from flatlens.distributions import Distribution, Rule, lipschitz_product
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate, Key, Progress, Report
from flatlens.grams import LayerGrams, Weight
from flatlens.grams.weight_jacobians import DenseJacobian, SharedJacobian
from flatlens.measures import Lens, PassMeasure, named
from flatlens.measures.definition import Run, per_sample
from flatlens.measures.pipeline import measure_with
from flatlens.measures.sensitivity import jacobian_frobenius, log_volume, mls, normalized_mls, positive
from flatlens.measures.traces import interpolation_sharpness
from flatlens.settings_json import require_setting

DECLARABLE = (
    "convex_support", "locally_constant_labels", "local_minimum", "iid_samples", "smooth_density", "bounded_loss",
    "large_sample", "smooth",
)  # fmt: skip
"""Assumptions that no sample can check, or that the user may declare."""

_Side: TypeAlias = Tensor | float  #: one number, or one per sample, (n,) float64
_T = TypeVar("_T")


@dataclass(frozen=True)
class Assumption:
    """An assumption of a theorem, and whether it holds here.

    >>> Assumption("nonzero_inputs", False, "1 of 4 inputs of 0 are 0").holds
    False
    """

    name: str
    holds: bool | None  #: None if it was neither checked nor declared
    detail: str = ""  #: why it does not hold; not read where it does
    declared: bool = False  #: whether the user declared it, because no sample can check it


@dataclass(frozen=True, eq=False)
class Claim:
    """The claim lhs <= rhs on this network: one row of the table.

    Sides with one number per sample make the claim for each; those in logarithms are compared as they are.

    >>> Claim(1.0, 2.0, "0").layer
    '0'
    """

    lhs: _Side
    rhs: _Side
    layer: str | None = None
    part: str = ""  #: the part of the name after the bound's name and a dot
    assumptions: tuple[Assumption, ...] = ()
    stderr: float = 0.0  #: standard error of the slack, if a side is an estimate
    logs: bool = False  #: whether the sides are logarithms of what the theorem compares
    rounding: float = 1e-6  #: share of the larger side below which slack counts as 0
    floor: float = 1e-150  #: absolute slack that counts as 0, because squares of it underflow
    note: str = ""


class Inapplicable(Exception):
    """Raised by a bound where an assumption fails without which there is nothing to compare: its last claim."""

    def __init__(self, *failing: Assumption, layer: str | None = None, part: str = "") -> None:
        super().__init__(failing)
        self.claim = Claim(math.nan, math.nan, layer, part, failing)


@final
@dataclass(frozen=True, eq=False)
class Target:
    """f*, from inputs as the network takes them to (n, N), and a bound of ||f*(x) - f*(y)|| / ||x - y|| on the support.

    For a network of known layers the bound is computed: the product of the norms of the layers (`lipschitz_product`).

    >>> Target(lambda x: x.sum(1, keepdim=True), lipschitz=2**0.5)(torch.ones(3, 2)).flatten()
    tensor([2., 2., 2.], dtype=torch.float64)
    """

    function: Callable[[Tensor], Tensor]
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            got = type(self.function).__name__
            raise BadInput(f"expected a function of a batch of inputs, got {got}", argument="function", call="Target")
        if self.lipschitz is None and not isinstance(self.function, nn.Module):
            computed = "only a network's Lipschitz constant is computed; for another function give lipschitz=..."
            raise BadInput(f"Target(lipschitz=None): {computed}")
        fits = self.lipschitz is None or 0 <= self.lipschitz < math.inf
        require_setting(self, "lipschitz", fits, "expected a finite number, not negative")

    def steepness(self, shape: tuple[int, ...]) -> float:
        """Return ||f*||_Lip or an upper bound, for one input of this shape."""
        if self.lipschitz is not None:
            return self.lipschitz
        assert isinstance(self.function, nn.Module)
        try:
            return lipschitz_product(self.function, shape)
        except BadInput as why:
            unknown = f"the Lipschitz constant of this network is not known ({why})"
            raise BadInput(f"Target(lipschitz=None): {unknown}: give lipschitz=...") from why

    def __call__(self, x: Tensor) -> Tensor:
        """Return f*(x), (n, N) float64."""
        parameters = self.function.parameters() if isinstance(self.function, nn.Module) else iter(())
        with torch.no_grad():
            y = self.function(x.to(next((p for p in parameters if p.is_floating_point()), x)))
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != len(x):
            got = f"{(*y.shape,)}" if isinstance(y, Tensor) else type(y).__name__
            needed = f"for inputs of shape {(*x.shape,)} the function must return shape ({len(x)}, N)"
            raise BadInput(f"{needed}, got {got}", call="Target")
        return y.to(x.device, torch.float64)


quantity = partial(per_sample, id="", family="", symbol="", source="", unit="")
"""Decorator of numbers per sample that bounds alone read: measured, not registered."""


@quantity(place="input", needs={"G"})
def input_norm2(g: LayerGrams) -> Tensor:
    """Return ||x||^2 of the place's input."""
    assert g.x_norm2 is not None
    return g.x_norm2


@quantity(place="weight", needs={"K"})
def weight_slope2(g: LayerGrams) -> Tensor:
    """Return ||df/dW||_F^2 of the layer's weight alone."""
    return g.K_weight.diagonal(dim1=1, dim2=2).sum(1)


@quantity(place="weight", needs={"K"})
def weight_spectral2(g: LayerGrams) -> Tensor:
    """Return ||df/dW||_2^2 of the layer's weight alone, df/dW an N x (d m) matrix; unshared, ||J||_2^2 ||x||^2."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(g.K_weight)
    return eigenvalues[:, -1].clamp(min=0)


@quantity(place="weight", needs={"K"})
def output_slope2(g: LayerGrams) -> Tensor:
    """Return ||J||_F^2, J = df/dz of the layer's output, over all its positions; NaN of a weight with other uses."""
    if not isinstance(g.weight, DenseJacobian | SharedJacobian):
        return torch.full((len(g.C),), math.nan, dtype=torch.float64, device=g.C.device)
    return g.at_output.flatten(1).double().square().sum(1)


@quantity(place="input", needs={"G"})
def rank(g: LayerGrams) -> Tensor:
    """Return the rank of df/dx per sample."""
    return positive(g).sum(1).to(torch.float64)


@quantity(place="input", needs={"G"})
def log_positive_volume(g: LayerGrams) -> Tensor:
    """Return log sqrt(product of the positive eigenvalues of G), 0 if there is none."""
    return 0.5 * torch.where(positive(g), g.eigenvalues, 1.0).log().sum(1)


@quantity(place="parameters", needs={"K"})
def adaptive_slope2(g: LayerGrams) -> Tensor:
    """Return sum_j theta_j^2 ||df/dtheta_j||^2 over the parameters here: `adaptive_sharpness_ggn` with C = I."""
    assert g.weight is not None
    return replace(g, C=_identity(g), weight=replace(g.weight, C=_identity(g))).adaptive


@quantity(place="weight", needs={"K"})
def adaptive_weight_slope2(g: LayerGrams) -> Tensor:
    """Return the same sum over the layer's weight alone, measured or not."""
    return replace(g.linear, C=_identity(g)).adaptive()


def _identity(g: LayerGrams) -> Tensor:
    return torch.eye(g.C.shape[1], dtype=g.C.dtype, device=g.C.device).expand_as(g.C)


MADE_TOGETHER = (
    input_norm2, weight_slope2, weight_spectral2, output_slope2, rank, log_positive_volume,
    mls, log_volume, normalized_mls, jacobian_frobenius, interpolation_sharpness,
)  # fmt: skip
"""Cheap quantities, made together in one pass with the first of them, or any measure, that a bound needs."""


NO_INPUT_LAYER = Assumption("reads_the_input", False, "the network's input is not read by exactly one linear layer")


@dataclass(eq=False)
class Context:
    """Everything that bounds read of a network: its lens, and what the user declared."""

    lens: Lens
    declared: frozenset[str]
    distribution: Distribution | None
    generator: torch.Generator
    progress: Progress | None = None
    target: Target | None = None  #: the function that the network should compute, if known
    delta: float | None = None  #: the data's covering radius, declared by the user
    rule: Rule = "exact"  #: the rule for finding the radius if the distribution is known
    _reports: dict[str, Report] = field(default_factory=dict)
    _kept: dict[Callable[[Context], Any], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, double = self.lens.problem, self.lens.problem.dtype == torch.float64
        self.n, self.outputs = problem.n, problem.outputs  #: samples, and outputs N
        self.rounding = 1e-9 if double else 1e-4  #: rounding error of the network's arithmetic, for slack
        self.floor = 1e-150 if double else 1e-35  #: value below which Jacobians, or their squares, underflow

    @cached_property
    def layers(self) -> dict[str, Weight]:
        """Return the linear layers by name, in execution order."""
        return {name: weight for name, weight in self.lens.plan.weights.items() if weight.calls}

    @property
    def first(self) -> str | None:
        """Return the only layer that reads the network's input; None if other operations (a BatchNorm) read it."""
        found = self.lens.plan.input_call
        return found if found in self.layers else None

    @cached_property
    def readable(self) -> dict[str, Weight]:
        """Return the layers with one call, which is W x + b of the input recorded there: the pass gives both sides."""
        return {name: weight for name, weight in self.layers.items() if _one_linear_call(name, weight).holds}

    def ask(self, *quantities: PassMeasure) -> Mapping[Key, Tensor]:
        """Compute numbers per sample at all places, in one pass for all measures that are asked for together."""
        asked = {one.key: one for one in (*quantities, *MADE_TOGETHER)}
        return self.lens.per_sample(asked.values(), self.progress, self.generator)

    def each(self, quantity: PassMeasure, place: str | None = None) -> Tensor:
        """Return one number per sample at a place: a layer, or None for the network's input."""
        return self.ask(quantity)[quantity.key, place]

    def total(self, quantity: PassMeasure) -> Tensor:
        """Return the sum over all places of parameters, per sample."""
        found = [v for (key, at), v in self.ask(quantity).items() if key == quantity.key and at is not None]
        return torch.stack(found).sum(0) if found else torch.zeros(self.n, dtype=torch.float64)

    def measured(self, key: str, layer: str | None = None, part: str = "") -> Estimate:
        """Return a measure's number, or its dotted part, by its name with options, as `flatlens.measure` gives it.

        The measure runs only once.
        """
        if key not in self._reports:
            # claims on a layer also hold for a frozen one
            run = Run(self.generator, self.progress, frozen=True, thorough=True)
            self._reports[key] = measure_with(self.lens, key, run)
        row = f"{named(key)[0].key}.{part}" if part else named(key)[0].key
        return self._reports[key][row, layer]

    def once(self, make: Callable[[Context], _T]) -> _T:
        """Return a value that several bounds use, made for the first of them."""
        if make not in self._kept:
            self._kept[make] = make(self)
        return cast(_T, self._kept[make])

    def unshared(self, layer: str) -> Assumption:
        """Return the assumption that the layer is applied once per sample, and is W x + b there."""
        weight = self.layers[layer]
        linear = _one_linear_call(layer, weight)
        if weight.dense or not linear.holds:
            return linear
        why = "is a convolution over one patch" if weight.positions == 1 else "acts at several positions"
        return Assumption("unshared_weights", False, f"{layer} {why}")

    def input_layer(self, part: str = "") -> str:
        """Return the layer that alone reads the network's input, with a gradient of its own; else stop."""
        if self.first is None:
            raise Inapplicable(NO_INPUT_LAYER, part=part)
        if self.first not in self.readable:
            raise Inapplicable(self.unshared(self.first), layer=self.first, part=part)
        return self.first

    def all_unshared(self) -> Assumption:
        """Return the assumption that every linear layer is applied once per sample."""
        return next((a for a in map(self.unshared, self.layers) if not a.holds), Assumption("unshared_weights", True))

    def counted(self, layers: Collection[str]) -> Assumption:
        """Return the assumption that these layers' weights are measured, so that S contains them."""
        missing = [name for name in layers if self.layers[name].parameter not in self.lens.problem.parameters]
        return Assumption("weights_measured", not missing, f"{', '.join(missing[:1])} is not measured")

    def nonzero(self, layer: str, norms2: Tensor) -> Assumption:
        """Return the assumption that no sample's input to the layer is 0."""
        zero = int((norms2 < torch.finfo(norms2.dtype).tiny).sum())
        return Assumption("nonzero_inputs", zero == 0, f"{zero} of {len(norms2)} inputs of {layer} are 0")

    def norm_found(self, layer: str) -> Assumption:
        """Return the assumption that the search for ||W||_2 has met its tolerance; else its value is too small."""
        found = self.layers[layer].searched_spectral_norm.converged
        why = f"the search for ||W||_2 of {layer} stopped early: its value is a lower bound"
        return Assumption("norm_found", found, why)

    @property
    def half_squared_error(self) -> Assumption:
        """Return the assumption that the loss is the half squared error: C = I."""
        loss = self.lens.problem.loss
        return Assumption("half_squared_error", loss.half_square, f"the loss is {loss.name}")

    def declare(self, name: str) -> Assumption:
        """Return an assumption that the user declares."""
        return Assumption(name, True if name in self.declared else None, declared=True)

    @cached_property
    def local_minimum(self) -> Assumption:
        """Return the assumption that the weights are at a local minimum.

        It is true if the gradient is small compared with its change by a step of the weights' size in the steepest
        direction, and no Ritz value is clearly negative.
        """
        if "local_minimum" in self.declared:
            return Assumption("local_minimum", True, declared=True)
        H = Hessian(self.lens.problem, model=self.lens.model)
        slope = float(as_one_vector(self.lens.gradient).norm())
        pairs = eigenpairs(H, top_k=1, bottom_k=1, rtol=0.05, generator=self.generator)
        high, low = float(pairs.values[0]), float(pairs.values[-1])
        if slope > 1e-3 * max(high, 0.0) * float(H.space.point().norm()):
            return Assumption("local_minimum", False, f"the gradient's norm is {slope:.2g}")
        curved = low < -1e-3 * max(high, 0.0)
        return Assumption("local_minimum", not curved, f"a Ritz value of the Hessian is {low:.2g}")


def _one_linear_call(layer: str, weight: Weight) -> Assumption:
    """The assumption that a layer has one call, and that it is W x + b of the input that the pass records."""
    if not weight.explained:
        return Assumption("unshared_weights", False, f"{layer} also acts outside its calls")
    if len(weight.calls) > 1:
        return Assumption("unshared_weights", False, f"{layer} is called several times")
    if not weight.as_given:
        return Assumption("linear_layer", False, f"a call of {layer} does more than W x + b")
    if weight.unplaced:
        return Assumption("samples_apart", False, f"{layer}: {weight.unplaced}")
    return Assumption("unshared_weights", True)


def declared(names: Collection[str]) -> frozenset[str]:
    """Return the names that the user declares, each known; a single name will do."""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Collection):
        raise BadInput("expected the names of assumptions", argument="assume", value=names, call="check_bounds")
    for name in names:
        if name not in DECLARABLE:
            raise UnknownName.among("assumption", name, DECLARABLE)
    return frozenset(names)
