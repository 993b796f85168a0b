"""Every transform on every kind of network: offered only where it is valid, and the function stays."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from networks import module_of
from torch import nn

import flatlens as fl
from flatlens.errors import BadInput, BadModel, FunctionChanged
from flatlens.problem import measuring
from flatlens.transforms import OUTPUTS, TRANSFORMS, read_wiring
from flatlens.transforms.definition import transform
from flatlens.transforms.neurons import between_layers, rescale_source

LINKS = {  # layer-wise and neuron-wise; permutation; folding; scale through norms
    "mlp-relu": (["0 -> 2", "2 -> 4"], ["0 -> 2", "2 -> 4"], [], []),
    "mlp-tanh": ([], ["0 -> 2", "2 -> 4"], [], []),
    "mlp-gelu": ([], ["0 -> 2", "2 -> 4"], [], []),
    "nested": (["0.0 -> 1.0", "1.0 -> 2"], ["0.0 -> 1.0", "1.0 -> 2"], [], []),
    "cnn": (
        ["8 -> 11"],
        ["0 -> 4", "4 -> 8", "8 -> 11"],
        ["0 -> 1", "4 -> 5"],
        ["0 -> 1", "1 -> 4", "4 -> 5", "5 -> 8"],
    ),
    "fx-residual": (
        ["mid -> left, right"],
        ["block.conv1 -> block.conv2", "mid -> left, right"],
        ["block.conv1 -> block.bn1", "block.conv2 -> block.bn2"],
        ["block.conv1 -> block.bn1", "block.bn1 -> block.conv2", "block.conv2 -> block.bn2"],
    ),
    "residual": ([], [], ["stem -> norm"], ["stem -> norm"]),
    "cnn-relu-inplace": (["0 -> 2", "2 -> 6", "6 -> 8"], ["6 -> 8"], [], []),
    "cnn-tanh": ([], ["6 -> 8"], [], []),
    "cnn-1d": (["0 -> 2", "2 -> 5"], ["0 -> 2", "2 -> 5"], [], []),
    "cnn-3d": (["2 -> 5"], ["2 -> 5"], [], []),
    "tokens": (
        ["embed -> mix", "mix -> conv", "conv -> depthwise", "depthwise -> wide", "wide -> head"],
        ["embed -> mix", "mix -> conv", "wide -> head"],
        [],
        [],
    ),
    "flattened": (["embed -> head"], ["embed -> head"], [], []),
    "twice-relu": ([], [], [], []),
    "twice-tanh": ([], [], [], []),
    "attention": ([], [], [], []),
    "attention-tokens-first": ([], [], [], []),
    "bare": ([], [], [], []),
}  # fmt: skip


def offered(problem: fl.Problem, name: str) -> list[str]:
    return [str(link) for link in TRANSFORMS[name].offer(read_wiring(problem, copy.deepcopy(problem.model))).links]


def test_only_what_is_valid_is_offered(problem_of, network_name):
    problem = problem_of(network_name)
    rescaled, permuted, folded, scaled = LINKS[network_name]
    assert offered(problem, "layerwise") == offered(problem, "neuronwise") == rescaled
    assert offered(problem, "permutation") == permuted
    assert offered(problem, "batchnorm_folding") == folded
    assert offered(problem, "batchnorm_scale") == scaled


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_function_stays_and_the_users_model_is_not_touched(problem_of, network_name, name):
    problem = problem_of(network_name)
    before = copy.deepcopy(problem.model.state_dict())
    if not offered(problem, name):
        with pytest.raises(BadModel, match=f"transform {name}: cannot be applied to this network: ") as error:
            TRANSFORMS[name].apply(problem)
        assert "\n" not in str(error.value)
        return
    moved = TRANSFORMS[name].apply(problem, torch.Generator().manual_seed(3))
    x, _ = next(problem.data.chunks(99))
    with torch.no_grad(), measuring(moved.model), measuring(problem.model):  # fast kernels round otherwise
        apart = float((moved.model(x) - problem.model(x)).abs().max())
    assert apart <= moved.difference <= 1e-10
    after = moved.model.state_dict()
    if (network_name, name) == ("bare", "norm_folding"):
        return  # its norm has 1 and 0 already
    assert any(key not in after or not torch.equal(value, after[key]) for key, value in before.items())
    assert all(torch.equal(value, before[key]) for key, value in problem.model.state_dict().items())
    assert moved.problem.parameters <= {key for key, _ in moved.model.named_parameters()}


@pytest.mark.parametrize(
    ("network", "layer", "why"),
    [
        ("mlp-tanh", "0", r"1 \(Tanh\) is not positively homogeneous"),
        ("mlp-relu", "4", OUTPUTS),
        ("fx-residual", "stem", r"they meet another tensor at add\(\)"),
        ("fx-residual", "block.conv1", "block.bn1 comes before the next layer"),
        ("twice-relu", "first", "mid reads them: it is called 2 times"),
        ("bare", "tied", "its parameters are used outside its call, too"),
    ],
)
def test_what_is_left_out_says_why(problem_of, network, layer, why):
    problem = problem_of(network)
    left = TRANSFORMS["layerwise"].offer(read_wiring(problem, problem.model)).left
    assert re.search(why, left[layer]), left


def square(*layers: nn.Module) -> fl.Problem:
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    return fl.Problem(nn.Sequential(*layers).double(), "mse", (x, torch.zeros(6, 4, dtype=torch.float64)))


def tied() -> list[nn.Module]:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return [one, nn.ReLU(), two, nn.ReLU(), nn.Linear(4, 4)]


def hooked() -> list[nn.Module]:
    act = nn.ReLU()
    act.register_forward_hook(lambda module, inputs, z: z + 1)
    return [nn.Linear(4, 4), act, nn.Linear(4, 4)]


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        (tied, "0, 2: its parameters are tied to another layer's"),
        (hooked, "0: 1 (ReLU) is not known to act on each feature separately"),
        (
            lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4)],
            "0: its weight is made from other parameters",
        ),
        (
            lambda: [nn.Linear(4, 4), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))],
            "0: 2 reads them: its weight is made from other parameters",
        ),
        (lambda: [nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4)], "1 (Softmax) is not known to act on each"),
        (lambda: [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)], "1 (LayerNorm) is not known to act on each"),
        (
            lambda: [nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Linear(2, 2), nn.Flatten()],
            "0: 2 reads them: some of its inputs are several features in turn",
        ),
        (
            lambda: [nn.Linear(4, 4), nn.Unflatten(1, (1, 4)), nn.AvgPool1d(3, 1, 1), nn.Flatten()],
            "2 (AvgPool1d) mixes",
        ),
    ],
)
def test_layers_that_must_not_be_moved_are_left_out(layers, why):
    problem = square(*layers())
    wiring = read_wiring(problem, problem.model)
    for name in ("layerwise", "permutation"):
        assert why in TRANSFORMS[name].offer(wiring).refused


def test_a_network_that_cannot_be_traced_says_so(problem_of):
    x = torch.ones(1, 6)
    net = module_of(lambda net, x: net.fc(x) if x.sum() > 0 else net.fc(-x), fc=(6, 3))
    problem = fl.Problem(net, "mse", (x, torch.zeros(1, 3)))
    report = fl.check_invariance(fl.Lens(problem))
    traced = [name for name in report.left_out if TRANSFORMS[name].traced]
    assert len(traced) > 5
    assert all("torch.fx cannot trace the network" in report.left_out[name] for name in traced)
    assert len(report) == 0


def test_forward_of_the_users_own(problem_of):
    net = problem_of("mlp-relu").model
    data = {"x": torch.randn(9, 6).double(), "y": torch.arange(9) % 3}
    problem = fl.Problem(net, "cross_entropy", data, forward=lambda model, batch: (model(batch["x"]), batch["y"]))
    assert TRANSFORMS["permutation"].apply(problem).difference < 1e-12

    def by_layers(model, batch):
        return model[4](model[:4](batch["x"])), batch["y"]

    inside = fl.Problem(net, "cross_entropy", data, forward=by_layers)
    with pytest.raises(BadModel, match=r"torch\.fx cannot trace"):  # what it does with the layers is out of sight
        TRANSFORMS["permutation"].apply(inside)


def test_a_transform_that_changes_the_function_is_caught(problem_of):
    @transform(id="own", source="nowhere", where=between_layers, declared_as=None)
    def half(moving):
        """Half a rescaling."""
        for link in moving.links:
            rescale_source(moving.module(link.source), moving.factors(link.features))
        return ""

    with pytest.raises(FunctionChanged, match=r"^transform half: the outputs changed by .* an error in flatlens"):
        half.apply(problem_of("mlp-relu"))
    with pytest.raises(FunctionChanged):
        fl.check_invariance(fl.Lens(problem_of("mlp-relu")), transforms=[half])


def test_factors_are_those_published_and_one_a_layer(problem_of):
    problem = problem_of("mlp-relu")
    for name, different in (("layerwise", 1), ("neuronwise", 7)):
        moved = TRANSFORMS[name].apply(problem, torch.Generator().manual_seed(5))
        ratio = (moved.model[0].weight / problem.model[0].weight).detach()
        assert bool(((ratio >= 5 - 1e-9) & (ratio <= 25 + 1e-9)).all())
        assert len(ratio[:, 0].mul(1e9).round().unique()) == different
        again = TRANSFORMS[name].apply(problem, torch.Generator().manual_seed(5))
        assert torch.equal(again.model[0].weight, moved.model[0].weight)


def test_folding_writes_the_norm_into_the_weights(problem_of):
    problem = problem_of("cnn", parameters=["0.weight", "8.weight", "1.weight"])
    moved = TRANSFORMS["batchnorm_folding"].apply(problem)
    conv, norm = problem.model[0], problem.model[1]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert torch.allclose(moved.model[0].weight, conv.weight * scale[:, None, None, None])
    assert torch.allclose(moved.model[0].bias, norm.bias - norm.running_mean * scale)
    assert isinstance(moved.model[1], nn.Identity)
    assert moved.problem.parameters == {"0.weight", "0.bias", "8.weight"}  # the new bias counts where its weight does


def test_a_half_frozen_float32_network_in_float64(problem_of):
    net = problem_of("cnn").model.float()
    net[0].weight.requires_grad_(False)
    x = torch.randn(20, 1, 6, 6)
    problem = fl.Problem(net, "cross_entropy", (x, torch.arange(20) % 3), dtype=torch.float64)
    traced = [one for one in TRANSFORMS.values() if one.traced]
    for one in traced:
        moved = one.apply(problem)
        assert moved.difference < 1e-12
        assert not moved.model[0].weight.requires_grad
        assert net[0].weight.dtype == torch.float32
    single = fl.Problem(net, "cross_entropy", (x, torch.arange(20) % 3))
    assert all(one.apply(single).difference < 1e-3 for one in traced)


def test_norms_that_see_the_batch_are_left_alone(problem_of):
    problem = problem_of("cnn", batchnorm="train", ghost_batch=6)
    assert offered(problem, "layerwise") == offered(problem, "permutation") == ["8 -> 11"]
    assert offered(problem, "batchnorm_scale") == offered(problem, "feature_normalization") == []
    assert TRANSFORMS["layerwise"].apply(problem).difference < 1e-12


def test_bad_input_is_one_line(problem_of):
    with pytest.raises(BadInput, match="expected a Problem, got Linear"):
        TRANSFORMS["layerwise"].apply(nn.Linear(2, 2))
    old = nn.utils.weight_norm(nn.Linear(4, 4))
    problem = square(old, nn.ReLU(), nn.Linear(4, 4))
    old(torch.ones(1, 4).double())
    with pytest.raises(BadModel, match=r"cannot be copied .*torch.nn.utils.parametrizations") as error:
        fl.check_invariance(fl.Lens(problem))
    assert "\n" not in str(error.value)


def test_one_link_alone(problem_of):
    """Transforms are data: where one is offered can be narrowed."""
    narrow = replace(
        TRANSFORMS["neuronwise"],
        where=lambda wiring: replace(between_layers(wiring), links=between_layers(wiring).links[:1]),
    )
    assert narrow.apply(problem_of("mlp-relu")).links == ("0 -> 2",)


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_under_two_names_is_one_norm(affine: bool) -> None:
    torch.manual_seed(0)
    net = module_of(lambda net, x: net.head(net.body(x)), fc=(3, 4), norm=nn.BatchNorm1d(4, affine=affine), head=(4, 2))
    net.body = nn.Sequential(net.fc, net.norm, nn.ReLU())
    net.double()(torch.randn(30, 3).double())
    problem = fl.Problem(net.eval(), "mse", (torch.randn(9, 3).double(), torch.randn(9, 2).double()))
    report = fl.check_invariance(fl.Lens(problem), "mls", ["batchnorm_folding", "permutation"])
    assert set(report.moved) == {"batchnorm_folding", "permutation"}


def test_what_torch_fx_does_not_look_into_is_named() -> None:
    net = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 2)).eval()
    problem = fl.Problem(net, "mse", (torch.randn(3, 5, 4), torch.randn(3, 5, 2)))
    report = fl.check_invariance(fl.Lens(problem), "mls", "layerwise")
    assert "0: torch.fx does not look into TransformerEncoderLayer" in report.left_out["layerwise"]


def test_a_norm_that_is_called_twice_says_so() -> None:
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm, nn.Linear(3, 2)).double().eval()
    problem = fl.Problem(net, "mse", (torch.randn(9, 3).double(), torch.randn(9, 2).double()))
    report = fl.check_invariance(fl.Lens(problem), "mls", "batchnorm_scale")
    assert "it is called 2 times" in report.left_out["batchnorm_scale"]


def in_double(net: nn.Module) -> fl.Problem:
    torch.manual_seed(0)
    x = torch.randn(9, 3, dtype=torch.float64)
    return fl.Problem(net.double().eval(), "mse", (x, torch.randn(9, 2, dtype=torch.float64)))


@pytest.mark.parametrize("viewed", [False, True])
def test_what_changes_features_in_place_lies_between_a_layer_and_its_norm(viewed: bool) -> None:
    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = net.fc(x)
        nn.functional.relu_(h.view(-1, 4) if viewed else h)
        return net.head(net.norm(h))

    net = module_of(forward, fc=(3, 4), norm=nn.BatchNorm1d(4), head=(4, 2))
    report = fl.check_invariance(fl.Lens(in_double(net)), "mls")
    assert "something lies between it and its BatchNorm" in report.left_out["batchnorm_folding"]
    assert {"permutation", "batchnorm_scale"} <= set(report.moved)


def twins() -> nn.Module:
    """The difference of two equal networks: its outputs are 0 at first, as in studies of wide networks."""
    one = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return module_of(lambda net, x: net.one(x) - net.other(x), one=one, other=copy.deepcopy(one))


def test_outputs_that_cancel_round_like_what_they_are_the_difference_of() -> None:
    problem = in_double(twins())
    report = fl.check_invariance(fl.Lens(problem), "mls")
    assert {"layerwise", "neuronwise", "permutation"} <= set(report.moved)
    assert not report.disagreeing

    @transform(id="own", source="nowhere", where=between_layers, declared_as=None)
    def slightly(moving):
        """A change a little larger than rounding."""
        rescale_source(moving.module("one.2"), torch.full((2,), 1 + 1e-10, dtype=torch.float64))
        return ""

    with pytest.raises(FunctionChanged):
        slightly.apply(problem)
