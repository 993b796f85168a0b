"""Chen et al.'s bounds where they are attained, where their assumptions fail, and on random networks."""

import math

import pytest
import torch
from builders import chain, lens_on, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import module_of
from torch import Tensor, nn

from flatlens import Lens, Problem
from flatlens.bounds import BOUNDS, check_bounds

NAMES = [name for name, one in BOUNDS.items() if one.id in {f"B{k}" for k in range(1, 9)}]
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "leaky": nn.LeakyReLU}


# equality


def tightness(net: nn.Module, x: Tensor, **more):
    report = check_bounds(lens_on(net, x, **more), NAMES)
    assert not report.violated
    return {(v.bound, v.layer): v.tightness for v in report}


def on_a_sphere(n: int, m: int, radius: float = 2.0) -> Tensor:
    x = normal(n, m, seed=3)
    return radius * x / x.norm(dim=1, keepdim=True)


def linear(*weights: Tensor) -> nn.Sequential:
    net = nn.Sequential(*(nn.Linear(W.shape[1], W.shape[0], bias=False, dtype=torch.float64) for W in weights))
    with torch.no_grad():
        for module, W in zip(net, weights, strict=True):
            module.weight.copy_(W)
    return net


def orthogonal(d: int) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=5))[0]


def test_one_linear_neuron_on_a_sphere_attains_every_bound():
    tight = tightness(linear(normal(1, 5, seed=1)), on_a_sphere(7, 5))
    for name in NAMES:
        for key in ((name, "0"), (name, None)):
            if key in tight and name != "residual_bound":
                assert tight[key] >= 0.999999, key
    for part in ("frobenius", "sound", "mean"):
        assert tight[f"linear_stability.{part}", "0"] >= 0.999999
    for row in ("adaptive_bound.mean", "matrix_normalized_bound.inner", "matrix_normalized_bound.frobenius"):
        assert tight[row, "0"] >= 0.999999


def test_an_isometry_below_a_jacobian_of_rank_one_attains_the_chain():
    net = linear(orthogonal(4), torch.outer(torch.tensor([1.0, -2.0, 3.0]).double(), normal(1, 4, seed=8)[0]))
    tight = tightness(net, on_a_sphere(6, 4), parameters=["0.weight"])
    for row in (
        "linear_stability",
        "linear_stability.mean",
        "mls_chain",
        "mls_chain.A_B",
        "mls_chain.B_C",
        "mls_chain.C_D",
    ):
        assert tight[row, "0"] >= 0.999999, row
    assert tight["matrix_normalized_bound", "0"] >= 0.999999
    assert tight["normalized_mls_bound", "0"] >= 0.999999


def test_without_equal_norms_only_the_link_of_cauchy_is_slack():
    net = linear(orthogonal(4), torch.outer(torch.tensor([1.0, -2.0]).double(), normal(1, 4, seed=8)[0]))
    tight = tightness(net, normal(6, 4), parameters=["0.weight"])
    assert tight["mls_chain.A_B", "0"] >= 0.999999
    assert tight["mls_chain.B_C", "0"] < 0.99
    assert tight["mls_chain.C_D", "0"] >= 0.999999


def test_equal_layers_attain_the_bound_over_layers():
    net = linear(orthogonal(3), orthogonal(3)[:1])
    tight = tightness(net, on_a_sphere(5, 3))
    assert tight["nmls_bound", None] >= 0.999999
    assert tight["matrix_normalized_bound", None] >= 0.999999


def test_an_isometry_attains_the_volume_of_one_sample():
    tight = tightness(linear(orthogonal(3)), on_a_sphere(1, 3))
    for part in ("", ".lemma", ".mean", ".published"):
        assert tight[f"volume_bound{part}", "0"] >= 0.999999
    assert tight["network_volume_bound", None] >= 0.999999


def test_the_d_of_proposition_e4_is_the_rows():
    """Rows alike and the same slope at each: an equality. With the columns for d (2), the bound would fail."""
    net = linear(torch.tensor([[1.0, -2.0]]).double().repeat(5, 1), torch.ones(1, 5).double())
    tight = tightness(net, normal(4, 2))
    assert tight["adaptive_bound", "0"] >= 0.999999
    assert tight["adaptive_bound", "0"] * 5 / 2 > 1


# where assumptions fail


def row(net: nn.Module, x: Tensor, name: str, layer: str | None, **more):
    return check_bounds(lens_on(net, x, **more), NAMES).of(name, layer)


def test_published_positive_eigenvalues_fail_at_lower_rank():
    found = row(linear(0.5 * torch.eye(2).double()[:, :1]), normal(3, 1), "volume_bound.published", "0")
    assert found.violated_share == 1.0
    assert (found.status, found.assumption) == ("not applicable", "full_rank: the rank is below 2 for 3 of 3 samples")


def test_the_printed_middle_of_equation_5_fails_where_inputs_are_small():
    net = linear(2 * orthogonal(3))
    assert row(net, on_a_sphere(4, 3, 0.5), "linear_stability.middle", "0").violated_share == 1.0
    assert row(net, on_a_sphere(4, 3, 0.5), "linear_stability.middle", "0").status == "not applicable"
    assert row(net, on_a_sphere(4, 3, 2.5), "linear_stability.middle", "0").status == "holds"


def cnn(seed: int, padding: int, stride: int) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second = nn.Conv2d(1, 3, 3, padding=padding, stride=stride), nn.Conv2d(3, 2, 3, padding=padding)
    size = nn.Sequential(first, second)(torch.zeros(1, 1, 8, 8)).numel()
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(size, 2)).double()


@pytest.mark.parametrize(("padding", "stride"), [(0, 1), (1, 1), (1, 2)])
def test_on_convolutions_the_published_form_fails_and_the_sound_one_holds(padding, stride):
    shares = []
    with torch.random.fork_rng():
        for seed in range(6):
            x = normal(8, 64, seed=seed).reshape(8, 1, 8, 8)
            report = check_bounds(lens_on(cnn(seed, padding, stride), x), "linear_stability")
            assert not report.violated
            shares.append(report.of("linear_stability.published", "0").violated_share)
            assert report.of("linear_stability.published", "0").status == "not applicable"
            for layer in ("0", "2", "5"):
                found = report.of("linear_stability.sound", layer)
                assert (found.status, found.violated_share) == ("holds", 0.0)
                assert found.tightness > 0.01
    assert max(shares) > 0


def normed() -> nn.Module:
    """The first linear layer reads what a norm made of the input."""
    net = module_of(
        lambda net, x: net.last(torch.tanh(net.first(net.norm(x)))), norm=nn.BatchNorm1d(3), first=(3, 4), last=(4, 2)
    )
    net.norm.running_var.fill_(4.0)
    return net


def tied() -> nn.Module:
    """A decoder with the encoder's weight: its gradient is not that of the encoder's call alone."""
    return module_of(lambda net, x: torch.tanh(net.encode(x)) @ net.encode.weight, encode=(3, 2))


def twice() -> nn.Module:
    return module_of(lambda net, x: net.last(torch.tanh(net.mid(torch.tanh(net.mid(x))))), mid=(3, 3), last=(3, 2))


@pytest.mark.parametrize(
    ("net", "why"), [(normed(), "reads_the_input"), (tied(), "unshared_weights"), (twice(), "unshared_weights")]
)
def test_what_speaks_of_the_first_layer_does_not_apply_without_one(net, why):
    report = check_bounds(lens_on(net.double(), normal(5, 3)), NAMES)
    assert not report.violated
    found = {v.bound: v for v in report}
    for name in ("linear_stability.mean", "volume_bound", "mls_chain", "adaptive_bound.mean", "normalized_mls_bound"):
        assert found[name].status == "not applicable", name
        assert found[name].assumption.startswith(why), name


def test_a_frozen_weight_is_not_in_the_sharpness():
    net = chain([3, 4, 2], 4)
    report = check_bounds(lens_on(net, normal(5, 3), parameters=["2.weight"]), NAMES)
    assert report.of("linear_stability", "0").status == "holds"  # of its own slope, not of S
    for name, layer in (("mls_chain", "0"), ("mls_chain.C_D", "0"), ("nmls_bound", None), ("volume_bound", "0")):
        assert report.of(name, layer).assumption == "weights_measured: 0 is not measured"
    assert report.of("mls_chain.A_B", "0").status == "holds"


def test_a_dead_network_violates_nothing():
    net = chain([3, 4, 2], 4, nn.ReLU)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.zero_()
    for parameters in ("trainable", ["0.weight"]):  # S > 0, and S = 0
        report = check_bounds(lens_on(net, normal(5, 3), parameters=parameters), NAMES)
        assert not report.violated
        assert report.of("linear_stability", "0").lhs == 0.0
        assert report.of("network_volume_bound").lhs == -math.inf
        assert report.of("nmls_bound").lhs == 0.0


def test_an_input_of_zero_is_named():
    x = normal(5, 3)
    x[2] = 0
    report = check_bounds(lens_on(chain([3, 4, 2], 4), x), NAMES)
    assert report.of("linear_stability", "0").assumption == "nonzero_inputs: 1 of 5 inputs of 0 are 0"
    assert report.of("linear_stability.sound", "0").status == "holds"
    assert report.of("adaptive_bound", "0").status == "holds"  # no division there
    assert not report.violated


def test_a_loss_that_curves_downwards_leaves_the_scales_without_a_minimum():
    net, x = chain([3, 4, 2], 4), normal(5, 3)
    problem = Problem(
        net, lambda f, y: torch.cos(3 * f).sum(1) + (f - y).square().sum(1), (x, torch.zeros(5, 2).double())
    )
    found = check_bounds(Lens(problem), "matrix_normalized_bound").of("matrix_normalized_bound.inner", "0")
    assert found.assumption.startswith("convex_loss")


BY_THE_NORM = {
    *((name, "0") for name in ("linear_stability", "volume_bound", "mls_chain", "matrix_normalized_bound")),
    *((f"linear_stability.{part}", "0") for part in ("frobenius", "middle", "sound", "mean", "mean_1", "mean_4")),
    *((name, "0") for name in ("volume_bound.second", "mls_chain.A_B", "mls_chain.A_B.aligned")),
    *((name, None) for name in ("network_volume_bound", "network_volume_bound.second", "nmls_bound")),
    ("matrix_normalized_bound", None),
}
"""The rows that hold by a norm below, of a hundred close singular values; the norm of the layer above is known."""


def test_a_norm_whose_search_stopped_early_violates_nothing(monkeypatch):
    found = {}
    for most in (5000, 15):
        monkeypatch.setattr("flatlens.operations.operator_norm._MOST", most)
        values = torch.linspace(1, 0.9, 100).double()
        net = linear(orthogonal(100) * values, torch.eye(100, dtype=torch.float64)[:1] @ orthogonal(100).T)
        report = check_bounds(lens_on(net, on_a_sphere(20, 100)), NAMES)
        found[most] = {(v.bound, v.layer): v for v in report}
    for key, known in found[5000].items():
        lacking = found[15][key]
        if key in BY_THE_NORM:
            assert known.status == "holds", key
            assert lacking.status == "not applicable", key
            assert lacking.assumption.startswith("norm_found: the search for ||W||_2 of 0 stopped early"), key
            assert lacking.rhs <= known.rhs, key
        else:
            assert (lacking.status, lacking.assumption) == (known.status, known.assumption), key
    assert found[15]["linear_stability", "0"].violated_share == 1
    assert found[15].keys() >= BY_THE_NORM


# random networks


@st.composite
def networks(draw):
    """(net, data, loss): dense chains with all that can go wrong in them: dead layers, zero samples, one of each."""
    widths = draw(st.lists(st.integers(1, 8), min_size=2, max_size=5))
    seed = draw(st.integers(0, 2**20))
    net = chain(widths, seed, ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))], draw(st.booleans()))
    linear = [module for module in net if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for module in linear:
            module.weight.mul_(10.0 ** draw(st.integers(-1, 1)))
        if draw(st.integers(0, 9)) == 0:
            linear[draw(st.integers(0, len(linear) - 1))].weight.zero_()
    x = normal(draw(st.integers(1, 8)), widths[0], seed=seed + 1) * 10.0 ** draw(st.integers(-3, 3))
    if draw(st.integers(0, 9)) == 0:
        x[0] = 0
    return net, x, draw(st.sampled_from(["half_squared_error", "mse", "cross_entropy"]))


def nothing_is_violated(network) -> None:
    net, x, loss = network
    powers = [f"{name}(k={k})" for name in ("volume_bound", "network_volume_bound") for k in (1, 1.7, 6)]
    report = check_bounds(lens_on(net, x, loss), [*NAMES, *powers])
    assert not report.violated, report


CALM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=200, **CALM)
@given(networks())
def test_no_bound_is_violated_on_random_networks(network):
    nothing_is_violated(network)


@pytest.mark.slow
@settings(max_examples=1000, **CALM)
@given(networks())
def test_no_bound_is_violated_on_a_thousand_random_networks(network):
    nothing_is_violated(network)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_of_float32_is_no_violation(seed):
    net = chain([5, 8, 6, 3], seed, nn.ReLU).float()
    nothing_is_violated((net, 30 * normal(20, 5, seed=seed).float(), ["half_squared_error", "cross_entropy"][seed % 2]))


# layers whose call is not W x + b of the recorded input, alone


def normalised(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1)


def behind_autograd(x: Tensor) -> Tensor:
    x = x.clone()
    x.data.mul_(0.1)
    return x


BEFORE = {
    "normalises": normalised,
    "clamps": lambda x: x.clamp(-0.5, 0.5),
    "scales": lambda x: 0.1 * x,
    "shifts": lambda x: x + 3,
    "straight through": lambda x: x + (normalised(x) - x).detach(),
    "writes to data": behind_autograd,
}
BEHIND = {
    "clamps": lambda x, z: z.clamp(-0.1, 0.1),
    "scales": lambda x, z: 7 * z,
    "adds the input": lambda x, z: z + 5 * x[..., : z.shape[-1]],
    "gates": lambda x, z: z * x[..., :1],
    "normalises": lambda x, z: normalised(z),
}


class Changed(nn.Linear):
    """A linear layer that changes its input first."""

    def __init__(self, change, *sizes: int) -> None:
        super().__init__(*sizes)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(x))


def changed(how: str, change, d: int) -> nn.Linear:
    if how == "subclass":
        return Changed(change, d, d)
    layer = nn.Linear(d, d)
    if how == "hook":
        layer.register_forward_hook(lambda module, given, z: change(given[0], z))
    else:
        own = layer.forward
        layer.forward = lambda x: change(x, own(x))
    return layer


CHANGES = [
    *(("subclass", name) for name in BEFORE),
    *((how, name) for how in ("hook", "patched forward") for name in BEHIND),
]


@pytest.mark.parametrize(("how", "change"), CHANGES)
@settings(max_examples=3, deadline=None)
@given(d=st.integers(2, 4), first=st.booleans(), scale=st.sampled_from([0.1, 1.0, 20.0]), seed=st.integers(0, 99))
def test_nothing_is_claimed_of_a_layer_that_does_more_than_its_product(how, change, d, first, scale, seed):
    layer = changed(how, (BEFORE if how == "subclass" else BEHIND)[change], d).double()
    below = [] if first else [*chain([d, d], seed), nn.Tanh()]
    net, name = nn.Sequential(*below, layer, nn.GELU(), *chain([d, 2], seed + 1)), str(len(below))
    with torch.no_grad():
        layer.weight.copy_(normal(d, d, seed=seed))
    report = check_bounds(lens_on(net, scale * normal(5, d, seed=seed)), NAMES)
    assert not report.violated
    claimed = [v for v in report if v.layer == name]
    assert {v.status for v in claimed} == {"not applicable"}
    for row in report:
        if row.bound in ("linear_stability", "network_volume_bound", "nmls_bound") and row.layer in (name, None):
            assert row.assumption == f"linear_layer: a call of {name} does more than W x + b"


def viewing(views: int, how: str, first: bool) -> nn.Module:
    """A layer that reads several views of a sample, folded into the batch or beside it, averaged behind it."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = x if net.below is None else torch.tanh(net.below(x))
        views, n = [x * (-2) ** k for k in range(net.views)], len(x)
        if net.how == "calls":
            return net.last(torch.stack([torch.sigmoid(net.mid(view)) for view in views]).mean(0))
        if net.how == "inner":
            return net.last(torch.sigmoid(net.mid(torch.cat(views))).view(-1, n, 3).mean(0))
        if net.how == "outer":
            return net.last(torch.sigmoid(net.mid(torch.stack(views, 1).flatten(0, 1))).view(n, -1, 3).mean(1))
        return net.last(torch.sigmoid(net.mid(torch.stack(views, 1))).mean(1))

    return module_of(forward, below=None if first else nn.Linear(3, 3), mid=(3, 3), last=(3, 2), views=views, how=how)


@pytest.mark.parametrize("how", ["calls", "inner", "outer", "beside"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("views", [2, 3])
def test_views_of_a_sample_are_no_unshared_layer(how, first, views):
    report = check_bounds(lens_on(viewing(views, how, first).double(), normal(4, 3)), NAMES)
    assert not report.violated
    row = report.of("linear_stability", "mid")
    assert row.status == "not applicable"
    assert row.assumption.partition(":")[0] in ("unshared_weights", "samples_apart")
    assert report.of("linear_stability", "last").status == "holds"
