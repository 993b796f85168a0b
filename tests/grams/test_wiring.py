"""Networks for which a careless plan would be silently wrong: compared with brute force, or refused in one line."""

from __future__ import annotations

import pytest
import torch
from builders import cross_entropy
from literal import definition_3, input_jacobian, parameter_jacobian, weight_hessian
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadModel

G = torch.Generator().manual_seed(4)
X = torch.randn(12, 6, generator=G).double()
Y = torch.tensor([0, 1, 2] * 4)
CUT = float(X[0, 0])  #: a gate at it is shut for sample 0


def wired(wiring, width: int = 6) -> nn.Module:
    """Two layers a and b and an output layer o, connected by a function."""
    return module_of(lambda net, x: net.wiring(net, x), a=(6, width), b=(width, 6), o=(6, 3), wiring=wiring)


WIRINGS = {
    "two readers of the input, one shut for sample 0": lambda s, x: s.o(F.relu(s.a(x)) * (x[:, :1] > CUT) + s.b(x)),
    "a branch by sample": lambda s, x: s.o(torch.where(x[:, :1] > 0, s.a(x), s.b(x))),
    "a weight used again behind a gate": lambda s, x: s.o(s.a(x) + F.relu(x[:, :1] - CUT) * F.linear(x, s.a.weight)),
    "a weight's norm": lambda s, x: s.o(F.relu(s.b(s.a(x) * s.a.weight.norm()))),
    "tied to its own transpose": lambda s, x: s.o(F.linear(F.relu(s.a(x)), s.a.weight.t())),
    "arguments by keyword": lambda s, x: s.o(input=F.relu(s.a(input=x))),
    "an in-place start": lambda s, x: s.o(F.relu(s.a(F.relu_(x)))),
    "a loop": lambda s, x: s.o(s.b(F.relu(s.b(F.relu(s.b(x)))))),
}


def not_in_place(s: nn.Module, x: Tensor) -> Tensor:
    """Compute what "an in-place start" does, in a form that functional transforms accept."""
    return s.o(F.relu(s.a(F.relu(x))))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_sums_and_sensitivities_are_right_however_layers_are_wired(wiring: str, frozen: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = wired(WIRINGS[wiring]).double()
    before = X.clone()
    net.wiring = not_in_place if wiring == "an in-place start" else net.wiring
    J = parameter_jacobian(net, X)
    s = torch.linalg.svdvals(input_jacobian(net, X))[:, 0]
    net.wiring = WIRINGS[wiring]
    if frozen:
        for p in (net.a.weight, net.b.bias):
            p.requires_grad_(False)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y), parameters="all")), "pass")
    assert torch.equal(X, before)
    assert net.a.weight.requires_grad != frozen
    truth = sum(float(j.square().sum()) for j in J.values()) / len(X)
    assert report["interpolation_sharpness"].value == pytest.approx(truth, rel=1e-10)
    assert report["mls"].value == pytest.approx(float(s.mean()), rel=1e-10)


@pytest.mark.parametrize("wiring", [w for w in WIRINGS if w not in ("a loop",)])
def test_relative_flatness_is_definition_3_or_undefined(wiring: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = wired(WIRINGS[wiring]).double()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y))), "relative_flatness")
    seen = 0
    for name in ("a", "b", "o"):
        if ("relative_flatness", name) in report and report["relative_flatness", name].kind == "exact":
            module = net.get_submodule(name)
            net.wiring = not_in_place if wiring == "an in-place start" else net.wiring
            H = weight_hessian(net, cross_entropy, X, Y, f"{name}.weight")
            truth = definition_3(H, module.weight, 1)
            assert report["relative_flatness", name].value == pytest.approx(truth, rel=1e-9, abs=1e-12)
            seen += 1
    assert seen >= 1


@pytest.mark.parametrize(
    "activation", [torch.tanh, lambda z: F.relu(z) ** 2, lambda z: torch.where(z.abs() > 1, z * z, z)]
)
def test_curvature_hidden_from_the_first_samples_is_found(activation) -> None:
    """On the first samples the second derivative is 0."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = wired(lambda s, x: s.o(activation(s.a(x)))).double()
    with torch.no_grad():
        net.a.bias.zero_()
    x = torch.cat([torch.zeros(9, 6).double(), X])
    y = torch.cat([torch.zeros(9, dtype=torch.long), Y])
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), "relative_flatness")
    truth = definition_3(weight_hessian(net, cross_entropy, x, y, "a.weight"), net.a.weight, 1)
    assert report["relative_flatness", "a"].value == pytest.approx(truth, rel=1e-9)


def normed() -> nn.Module:
    """Two weight-normed layers of one shape, and a spectral-normed one."""
    return module_of(
        lambda net, x: net.o(F.relu(net.b(F.relu(net.a(x))))),
        a=nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        b=nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        o=nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)),
    )


def test_reparametrised_layers() -> None:
    """S counts the trained parameters; relative flatness reads the weight that is computed from them."""
    net = normed().double().eval()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y))), "pass")
    truth = sum(float(j.square().sum()) for j in parameter_jacobian(net, X).values()) / len(X)
    assert report["interpolation_sharpness"].value == pytest.approx(truth, rel=1e-10)
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for mine, theirs in ((plain[0], net.a), (plain[2], net.b), (plain[4], net.o)):
            mine.weight.copy_(theirs.weight)
            mine.bias.copy_(theirs.bias)
    same = fl.measure(fl.Lens(fl.Problem(plain, "cross_entropy", (X, Y))), "pass")
    for mine, theirs in (("0", "a"), ("2", "b"), ("4", "o")):
        assert report["relative_flatness", theirs].value == pytest.approx(
            same["relative_flatness", mine].value, rel=1e-10
        )


def tokens(sparse: bool = False) -> nn.Module:
    """A network of token ids whose embedding is tied to its head."""
    net = module_of(
        lambda net, ids: net.head(torch.tanh(net.mid(net.embed(ids))).mean(1)),
        embed=nn.Embedding(7, 4, padding_idx=0, sparse=sparse),
        mid=nn.Linear(4, 4),
        head=nn.Linear(4, 7, bias=False),
    )
    if not sparse:
        net.head.weight = net.embed.weight
    return net


@pytest.mark.parametrize("kind", ["tied", "sparse", "frozen"])
def test_token_ids(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = tokens(kind == "sparse").double()
    ids = torch.randint(0, 7, (9, 3), generator=G)
    dense = tokens().double()
    if kind == "sparse":
        dense.head.weight = nn.Parameter(net.head.weight.detach().clone())
    dense.load_state_dict(net.state_dict())
    J = parameter_jacobian(dense, ids)
    if kind == "frozen":
        net.embed.weight.requires_grad_(False)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (ids, ids[:, 0]), parameters="all")), "pass")
    truth = sum(float(j.square().sum()) for j in J.values()) / len(ids)
    assert report["interpolation_sharpness"].value == pytest.approx(truth, rel=1e-10)
    assert report["mls"].value > 0
    assert "embedding's output" in report["mls"].note
    if kind == "tied":
        assert "relative_flatness" not in report  # it is another number than its Gauss-Newton part


def test_a_frozen_backbone_under_no_grad() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.relu(net.a(x))
        return net.o(h)

    net = module_of(forward, a=(6, 5), o=(5, 3)).double()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y), parameters=["o.weight", "o.bias"])), "pass")
    h2 = torch.relu(net.a(X)).detach().square().sum(1)
    assert report["interpolation_sharpness"].value == pytest.approx(float(3 * (h2 + 1).mean()), rel=1e-12)
    assert report["mls"].kind == "undefined"
    assert "detach" in report["mls"].note


def test_a_recurrence_over_samples_is_refused() -> None:
    net = wired(lambda s, x: s.o(s.a(x).cumsum(0))).double()
    with pytest.raises(BadModel, match="outputs change with the other samples"):
        fl.Problem(net, "cross_entropy", (X, Y))


def packed() -> nn.Module:
    """A layer that sees only some tokens of each sample."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        seen = x[..., 0] > -0.5
        h = torch.zeros(*x.shape[:2], 4, dtype=x.dtype)
        h[seen] = torch.tanh(net.a(x[seen]))
        return net.o(h.mean(1))

    return module_of(forward, a=(2, 4), o=(4, 3))


def test_packed_tokens_go_through_per_sample_autograd() -> None:
    x = torch.randn(11, 5, 2, generator=G).double()
    net = packed().double()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, torch.zeros(11, dtype=torch.long)))), "pass")
    truth = 0.0
    for i in range(11):
        rows = [torch.autograd.grad(net(x[i : i + 1])[0, k], list(net.parameters())) for k in range(3)]
        truth += sum(float(g.square().sum()) for row in rows for g in row) / 11
    assert report["interpolation_sharpness"].value == pytest.approx(truth, rel=1e-10)
    assert report.about["by_autograd"] == ["a.weight", "a.bias"]


def test_a_network_that_changes_its_calls_half_way_is_right() -> None:
    """Longer sequences come only after the probed batches: the plan is made anew."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 2)
        for t in range(x.shape[1]):
            h = torch.tanh(net.c(torch.cat([x[:, t, None], h], 1)))
        return net.o(h)

    lengths = [2, 2, 2, 4]
    batches = [(torch.randn(4, T, generator=G).double(), torch.zeros(4, dtype=torch.long)) for T in lengths]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    net = module_of(forward, c=(3, 2), o=(2, 3)).double()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", loader)), "pass")
    S = sum(float(J.square().sum()) for x, _ in batches for J in parameter_jacobian(net, x).values()) / 16
    assert report["interpolation_sharpness"].value == pytest.approx(S, rel=1e-10)
    norms = [float(top) for x, _ in batches for top in torch.linalg.svdvals(input_jacobian(net, x))[:, 0]]
    assert report["mls"].value == pytest.approx(sum(norms) / 16, rel=1e-10)
    assert report["nmls"].kind == "undefined"
    assert "not called in the same way on every batch" in report["nmls"].note


def test_a_dead_feature_does_not_spoil_theorem_4() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        net[0].bias[1] = -100  # dead
        net[0].weight[2] = 0  # constant
        net[0].bias[2] = 2
    key = "relative_flatness(normalized='std')"
    before = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y))), key)[key]
    factors = torch.tensor([3.0, 5.0, 7.0, 0.1, 2.0]).double()
    with torch.no_grad():
        net[0].weight.mul_(factors[:, None])
        net[0].bias.mul_(factors)
        net[2].weight.div_(factors)
    after = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (X, Y))), key)[key]
    assert after.value == pytest.approx(before.value, rel=1e-10)
    assert "2 features constant" in before.note


def test_parameters_without_any_axis_count() -> None:
    # a tanh(b x), a and b single numbers.
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    net = module_of(
        lambda net, x: net.a * torch.tanh(net.b * x),
        a=nn.Parameter(torch.tensor(2.0)),
        b=nn.Parameter(torch.tensor(0.5)),
    ).double()
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(5, 3).double()))
    t = torch.tanh(0.5 * x)
    truth = float((t.square().sum(1) + (2 * (1 - t.square()) * x).square().sum(1)).mean())
    assert fl.measure(fl.Lens(problem), "ggn_trace")["ggn_trace"].value == pytest.approx(truth)


def test_an_input_that_is_shifted_first_is_not_the_first_layers() -> None:
    # The Jacobian at the layer's input is the network's own, but the input is not.
    net = module_of(lambda net, x: net.fc(x - 5), fc=(6, 3)).double()
    problem = fl.Problem(net, "cross_entropy", (X, Y))
    J = net.fc.weight.detach()
    truth = float(X.square().sum(1).mean() * torch.linalg.matrix_norm(J, 2) ** 2)
    found = fl.measure(fl.Lens(problem), ["normalized_mls", "input_invariant_mls"])
    assert found["normalized_mls"].value == pytest.approx(truth)
    assert found["input_invariant_mls"].value == pytest.approx(float((X.square() * J.square().sum(0)).sum(1).mean()))
