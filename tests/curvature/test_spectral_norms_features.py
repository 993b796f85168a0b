"""Spectral norms of features are those of a dense decomposition, whatever their size, shape and arithmetic."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.spectral_norms import feature_norms
from flatlens.grams import lay_out


def norm_of(x: Tensor, memory: str = "1GiB") -> float:
    """The norm of the features that the last of two layers reads, where the first leaves them as they are."""
    net = nn.Sequential(nn.Identity(), nn.Linear(x.shape[1], 2)).to(x.dtype)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(len(x), 2, dtype=x.dtype)), memory=memory)
    (norm,) = feature_norms(problem, problem.model, lay_out(problem, problem.model)).values()
    return norm.value


def drawn(n: int, width: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return (scale * x).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "width"), [(300, 100), (700, 64), (700, 63), (300, 400), (90, 100), (1, 5)])
def test_of_noise(n: int, width: int, dtype: torch.dtype) -> None:
    x = drawn(n, width, dtype=dtype)
    assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-15, 1e15, 1e22])
def test_of_very_small_and_very_large_features(scale: float) -> None:
    """Their squares leave the range of float32."""
    x = drawn(300, 100, scale)
    assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


def test_of_equal_singular_values_and_of_few_directions() -> None:
    orthogonal = torch.linalg.qr(drawn(300, 100, dtype=torch.float64)).Q.float()
    few = torch.cat([drawn(300, 3), torch.zeros(300, 97)], 1)
    assert norm_of(orthogonal) == pytest.approx(float(torch.linalg.matrix_norm(orthogonal.double(), 2)), rel=1e-9)
    for x in (few, torch.zeros(300, 100), torch.ones(300, 100)):
        assert norm_of(x) == pytest.approx(float(torch.linalg.matrix_norm(x.double(), 2)), rel=1e-12)


def test_it_is_the_same_where_features_are_computed_again_for_each_product() -> None:
    x = drawn(600, 100)
    assert norm_of(x, "100KB") == pytest.approx(norm_of(x), rel=1e-12)


# one function written in several ways: tokens beside each other, or folded into the batch


def middle(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)


def shuffled(x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return rows[rows[:, 0].argsort()]


FOLDS = {  # (n, T, m) -> what the layer reads, and back
    "beside": (lambda x: x, lambda z, n: z),
    "outer": (lambda x: x.reshape(-1, x.shape[-1]), lambda z, n: z.unflatten(0, (n, -1))),
    "inner": (
        lambda x: x.transpose(0, 1).reshape(-1, x.shape[-1]),
        lambda z, n: z.unflatten(0, (-1, n)).transpose(0, 1),
    ),
    "tokens first": (lambda x: x.transpose(0, 1), lambda z, n: z.transpose(0, 1)),
    "tokens turned": (lambda x: x.flip(1).flatten(0, 1), lambda z, n: z.unflatten(0, (n, -1)).flip(1)),
    "windows": (lambda x: x.unflatten(1, (2, -1)).flatten(0, 1), lambda z, n: z.unflatten(0, (n, -1)).flatten(1, 2)),
    "windows first": (
        lambda x: x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1),
        lambda z, n: z.unflatten(0, (2, n)).transpose(0, 1).flatten(1, 2),
    ),
    "middle": (middle, lambda z, n: z.unflatten(0, (2, n, -1)).transpose(0, 1).flatten(1, 2)),
    "shuffled": (shuffled, None),
    "routed": (lambda x: x.flatten(0, 1)[x.flatten(0, 1)[:, 0] > 0], None),
}
NEVER = {"middle", "shuffled", "routed"}  #: no axis of theirs has the samples in an order that a plan knows


class Folded(nn.Module):
    """A shared encoder of two layers, then a head; a gate of 0 makes every slope of the outputs 0."""

    def __init__(self, how: str, m: int, gate: float = 1.0, odd: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(m, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        self.how, self.gate, self.odd = how, gate, odd

    def through(self, layer: nn.Module, x: Tensor) -> Tensor:
        fold, back = FOLDS[self.how]
        if self.odd and bool((x[..., 0] > 50).any()):  # on few batches samples change places inside
            return self.through_odd(layer, x)
        z = layer(fold(x))
        if back is not None:
            return back(z, len(x))
        rows, out = x.flatten(0, 1), z.new_zeros(len(x) * x.shape[1], z.shape[-1])
        at = rows[:, 0].argsort() if self.how == "shuffled" else (rows[:, 0] > 0).nonzero()[:, 0]
        return out.index_copy(0, at, z).unflatten(0, x.shape[:2])

    def through_odd(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.flip(0).flatten(0, 1)).unflatten(0, x.shape[:2]).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        z = self.through(self.b, torch.tanh(self.through(self.a, x)))
        return self.gate * self.head(torch.tanh(z).mean(1))


def norms_of(net: nn.Module, x: Tensor) -> dict[str, tuple[fl.Estimate, fl.Estimate]]:
    """feature_norm and the factor of layer_factors, by layer."""
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(len(x), 2, dtype=x.dtype)))
    found, factors = fl.measure(fl.Lens(problem), ["feature_norm", "layer_factors(blocks=False)"]), "layer_factors"
    rows = {layer for name, layer in found if name == "feature_norm"}
    return {at: (found["feature_norm", at], found.get((f"{factors}(blocks=False).features", at))) for at in rows}


@pytest.mark.parametrize("how", FOLDS)
@pytest.mark.parametrize("gate", [1.0, 0.0])
@pytest.mark.parametrize(("n", "m", "T"), [(6, 3, 4), (5, 5, 2), (4, 2, 8), (1, 3, 4)])
def test_a_sample_is_one_row_however_its_tokens_are_folded(how: str, gate: float, n: int, m: int, T: int) -> None:
    torch.manual_seed(n)
    net, x = Folded(how, m, gate).double(), torch.randn(n, T, m, dtype=torch.float64)
    with torch.no_grad():
        read = {"a": x.flatten(1), "b": torch.tanh(Folded.through(net, net.a, x)).flatten(1)}
    found = norms_of(net, x)
    for layer, X in read.items():
        for norm in found[layer]:
            if how not in NEVER:
                assert norm.kind == "exact"
            if norm.kind == "undefined":
                assert n > 1
                assert "samples of a batch" in norm.note or "not called in the same way" in norm.note
            elif how != "routed" or n > 1:  # a router's features of one sample are those that it routes
                assert norm.value == pytest.approx(float(torch.linalg.matrix_norm(X, 2)), rel=1e-9)
    assert found[None][0].kind in ("exact", "lower bound")
    assert (found[None][0].kind == "exact") == all(norm.kind == "exact" for norm, _ in found.values())


def test_a_batch_that_folds_otherwise_than_the_probes_is_seen() -> None:
    torch.manual_seed(0)
    net, x = Folded("outer", 3, odd=True).double(), torch.randn(300, 4, 3, dtype=torch.float64)
    at = torch.arange(300) == 270  # in the second chunk
    x[at] += 100
    net.head.weight.data.mul_(10)
    norm, factor = norms_of(net, x)["a"]
    assert norm.kind == factor.kind == "undefined"


class Within(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(x, dim=-1))


@pytest.mark.parametrize("shape", [(6, 3), (6, 4, 3)])
def test_features_are_what_the_weight_multiplies(shape: tuple[int, ...]) -> None:
    """A layer that normalises its input inside its call has the features of one behind a module that does."""
    torch.manual_seed(0)
    x, last = torch.randn(shape).double(), [nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)]
    apart = nn.Sequential(module_of(lambda net, x: nn.functional.normalize(x, dim=-1)), nn.Linear(3, 3), *last).double()
    apart(x)
    within = nn.Sequential(Within(3, 3), *last).double()
    within[0].load_state_dict(apart[1].state_dict())
    X = nn.functional.normalize(x, dim=-1).flatten(1)
    for net, name in ((apart, "1"), (within, "0")):
        for norm in norms_of(net, x)[name]:
            assert norm.value == pytest.approx(float(torch.linalg.matrix_norm(X, 2)), rel=1e-9)
    values = []
    for net in (apart, within):
        problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(6, 2).double()))
        found = fl.measure(fl.Lens(problem), "relative_flatness_ggn(normalized='std')")
        values.append(found["relative_flatness_ggn(normalized='std')", "1" if net is apart else "0"].value)
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.parametrize("calls", [2, 3])
def test_a_layer_called_several_times_has_the_factor_of_all_its_features(calls: int) -> None:
    """The calls' features beside each other: those of one call in which they are folded."""

    class Calls(Folded):
        def through(self, layer: nn.Module, x: Tensor) -> Tensor:
            return torch.stack([layer(x[:, t]) for t in range(calls)], 1)

    torch.manual_seed(0)
    x = torch.randn(300, calls, 3).double()
    (several, folded) = Calls("outer", 3).double(), Folded("outer", 3).double()
    folded.load_state_dict(several.state_dict())
    assert norms_of(several, x)["a"][1].value == pytest.approx(norms_of(folded, x)["a"][1].value, rel=1e-9)
