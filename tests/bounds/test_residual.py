"""Residual blocks: Equation 17 and its telescoped sum, found and checked on the network."""

import math

import modern
import pytest
import torch
from builders import lens_on, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from literal_bounds import sharpness
from networks import module_of
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from flatlens import Lens, Problem
from flatlens.bounds import BOUNDS, check_bounds
from flatlens.bounds.context import Context

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "identity": nn.Identity}


class Residual(nn.Module):
    """x + act(W x), a few times, and a linear head."""

    def __init__(self, width: int, depth: int, outputs: int, seed: int, act: str = "tanh", *, project: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.skips = nn.ModuleList(nn.Linear(width, width) if project else nn.Identity() for _ in range(depth))
        self.act, self.head = ACTIVATIONS[act](), nn.Linear(width, outputs)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
        self.double()

    def block(self, k: int, x: Tensor) -> Tensor:
        return self.skips[k](x) + self.act(self.blocks[k](x))

    def behind(self, k: int, x: Tensor) -> Tensor:
        for later in range(k, len(self.blocks)):
            x = self.block(later, x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        for k in range(len(self.blocks)):
            x = self.block(k, x)
        return self.head(x)


def table(net: nn.Module, x: Tensor, **more):
    report = check_bounds(lens_on(net, x, **more), "residual_bound")
    assert not report.violated
    return report


NET, X = Residual(4, 3, 2, 1), normal(5, 4)


def seen() -> list[dict[str, Tensor]]:
    """Of each block, per sample: norms of df/dx and df/dy, the weight's slope, the input's norm, ||df/dz||_F."""
    found, x = [], X
    for k, linear in enumerate(NET.blocks):
        y = NET.block(k, x).detach()
        W = linear.weight.detach()

        def of_weight(W: Tensor, one: Tensor, k: int = k) -> Tensor:
            z = functional_call(NET.blocks[k], {"weight": W}, (one,))
            return NET.behind(k + 1, one + NET.act(z))

        def of_z(z: Tensor, one: Tensor, k: int = k) -> Tensor:
            return NET.behind(k + 1, one + NET.act(z))

        found.append(
            {
                "before": torch.linalg.matrix_norm(vmap(jacrev(lambda one, k=k: NET.behind(k, one)))(x), 2),
                "after": torch.linalg.matrix_norm(vmap(jacrev(lambda one, k=k: NET.behind(k + 1, one)))(y), 2),
                "slope": vmap(jacrev(of_weight), (None, 0))(W, x).flatten(1).norm(dim=1),
                "x": x.norm(dim=1),
                "W": torch.linalg.matrix_norm(W, 2),
                "F": W.norm(),
                "z": vmap(jacrev(of_z))(linear(x).detach(), x).flatten(1).norm(dim=1),
            }
        )
        x = y
    return [{name: value.detach() for name, value in one.items()} for one in found]


SEEN, S, HEAD = seen(), sharpness(NET, X).mean(), torch.linalg.matrix_norm(NET.head.weight.detach(), 2)
ADDED = [s["W"] * s["slope"] / s["x"] for s in SEEN]
INSIDE = sum((s["W"] ** 2 / s["x"] ** 2).mean() for s in SEEN)
LITERAL = {
    ("", "blocks.0"): (SEEN[0]["before"], SEEN[0]["after"] + ADDED[0]),
    ("", "blocks.2"): (SEEN[2]["before"], SEEN[2]["after"] + ADDED[2]),
    ("sound", "blocks.1"): (SEEN[1]["before"], SEEN[1]["after"] + SEEN[1]["W"] * SEEN[1]["z"]),
    ("sum", None): (SEEN[0]["before"], HEAD + sum(ADDED)),
    ("mean", None): (SEEN[0]["before"].mean(), HEAD + (INSIDE * S).sqrt()),
}
MUTANTS = [
    (("", "blocks.0"), 0, SEEN[0]["after"]),
    (("", "blocks.0"), 1, ADDED[0] - SEEN[0]["after"]),
    (("", "blocks.0"), 1, ADDED[0]),
    (("", "blocks.0"), 1, SEEN[0]["after"] + SEEN[0]["F"] * SEEN[0]["slope"] / SEEN[0]["x"]),
    (("", "blocks.0"), 1, SEEN[0]["after"] + SEEN[0]["W"] * SEEN[0]["slope"] / SEEN[0]["x"] ** 2),
    (("", "blocks.2"), 1, SEEN[1]["after"] + ADDED[2]),
    (("sound", "blocks.1"), 1, SEEN[1]["after"] + SEEN[1]["F"] * SEEN[1]["z"]),
    (("sum", None), 0, SEEN[1]["before"]),
    (("sum", None), 1, NET.head.weight.detach().norm() + sum(ADDED)),
    (("sum", None), 1, HEAD + sum(ADDED[1:])),
    (("mean", None), 1, HEAD + INSIDE * S),
    (("mean", None), 1, HEAD + (sum((s["W"] ** 2 / s["x"] ** 2).sum() for s in SEEN) * S).sqrt()),
    (("mean", None), 0, SEEN[0]["before"].sum()),
]


@pytest.fixture(scope="module")
def made():
    context = Context(lens_on(NET, X), frozenset(), None, torch.Generator())
    return {(claim.part, claim.layer): (claim.lhs, claim.rhs) for claim in BOUNDS["residual_bound"].claims(context)}


def agree(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-9 * other.abs()).all())


@pytest.mark.parametrize("row", LITERAL, ids=str)
def test_both_sides_are_the_literal_definitions(made, row):
    assert agree(made[row][0], LITERAL[row][0])
    assert agree(made[row][1], LITERAL[row][1])


@pytest.mark.parametrize(("row", "number", "wrong"), MUTANTS)
def test_a_slip_of_the_pen_would_be_caught(made, row, number, wrong):
    assert not agree(made[row][number], wrong)


@st.composite
def networks(draw):
    seed = draw(st.integers(0, 2**20))
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    net = Residual(*shape, seed, draw(st.sampled_from(sorted(ACTIVATIONS))))
    return net, normal(draw(st.integers(1, 8)), shape[0], seed=seed) * 10.0 ** draw(st.integers(-3, 3))


CALM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, **CALM)
@given(networks())
def test_no_residual_network_violates_it(network):
    table(*network)


@pytest.mark.slow
@settings(max_examples=1000, **CALM)
@given(networks())
def test_no_residual_network_of_a_thousand_violates_it(network):
    table(*network)


def test_scaled_identities_below_a_head_of_rank_one_attain_it():
    net = Residual(3, 2, 2, 0, "identity")
    with torch.no_grad():
        for c, linear in zip((0.5, 2.0), net.blocks, strict=True):
            linear.weight.copy_(c * torch.eye(3))
            linear.bias.zero_()
        net.head.weight.copy_(torch.outer(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0, 2.0])))
    report = table(net, normal(4, 3))
    for row in (("residual_bound", "blocks.0"), ("residual_bound", "blocks.1"), ("residual_bound.sum", None)):
        assert report.of(*row).tightness >= 0.999999
        assert report.of(*row).status == "holds"


def test_with_a_projection_on_the_skip_it_fails_and_does_not_apply():
    shares = []
    for seed in range(20):
        net = Residual(4, 2, 2, seed, project=True)
        with torch.no_grad():
            for skip in net.skips:
                skip.weight.mul_(3)
        report = table(net, normal(5, 4))
        for layer in ("blocks.0", "blocks.1"):
            found = report.of("residual_bound", layer)
            assert found.status == "not applicable"
            assert found.assumption.startswith("identity_skips: the skip at add")
            shares.append(found.violated_share)
        assert report.of("residual_bound.sum").status == "not applicable"
    assert max(shares) > 0


def behind_sum(kind: str) -> nn.Module:
    """What a block's sum is followed by, and what reads its input, as told."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = x
        if kind == "norm first":
            h = h + net.one(net.norm(h))
        elif kind == "in place":
            h = 2 * h
            h += torch.relu_(net.one(h))
        elif kind == "dropout":
            h = net.drop(h) + net.drop(torch.tanh(net.one(net.drop(h))))
        elif kind == "two readers":
            h = h + net.one(h) * net.other(h)
        else:
            h = h + torch.tanh(net.one(h))
        if kind == "data":
            h = h if h.sum() > 0 else h * 2
        if kind == "relu between":
            h = nn.functional.leaky_relu(h)
        h = h.add(net.two(h))
        return net.head(torch.tanh(net.deep(h)) if kind == "deep head" else h)

    return module_of(
        forward,
        norm=nn.LayerNorm(4),
        one=(4, 4),
        two=(4, 4),
        other=(4, 4),
        drop=nn.Dropout(0.5),
        head=(4, 2),
        deep=(4, 4),
    ).double()


@pytest.mark.parametrize(
    ("kind", "assumption"),
    [
        (
            "norm first",
            "branch_begins_linear: the branch of add begins with norm, not",
        ),
        (
            "two readers",
            "branch_begins_linear: the branch of add begins with one, other, not",
        ),
        ("relu between", "consecutive_blocks: leaky_relu does not follow a sum"),
        ("deep head", "ends_in_linear"),
        ("in place", ""),
        ("dropout", ""),
    ],
)
def test_what_the_telescoped_sum_supposes_is_read_off_the_network(kind, assumption):
    report = table(behind_sum(kind), normal(6, 4))
    found = report.of("residual_bound.sum")
    assert found.assumption.startswith(assumption)
    assert found.status == ("not applicable" if assumption else "holds")
    assert report.of("residual_bound", "two").status == "holds"


def test_a_block_changed_in_place_is_the_block_it_was():
    net, x = behind_sum("in place"), normal(6, 4)
    found = check_bounds(lens_on(net, x), "residual_bound").of("residual_bound", "one")
    one = 2 * x
    J = vmap(jacrev(lambda h: net.head((y := h + torch.relu(net.one(h))) + net.two(y))))(one)
    assert any(abs(found.lhs - float(norm)) < 1e-12 for norm in torch.linalg.matrix_norm(J.detach(), 2))


def test_a_norm_whose_search_stopped_early_bounds_nothing(monkeypatch):
    monkeypatch.setattr("flatlens.operations.operator_norm._MOST", 15)
    net, rows = Residual(100, 2, 1, 1), [("", "blocks.1"), ("sound", "blocks.1"), ("sum", None), ("mean", None)]
    with torch.no_grad():
        net.blocks[1].weight.copy_(torch.diag(torch.linspace(1, 0.9, 100)))
    report = table(net, normal(5, 100))
    for part, layer in rows:
        found = report.of(f"residual_bound{part and '.'}{part}", layer)
        assert found.status == "not applicable", part
        assert found.assumption.startswith("norm_found: the search for ||W||_2 of blocks."), part


def test_a_network_that_cannot_be_traced_says_so():
    found = table(behind_sum("data"), normal(1, 4))[0]
    assert (found.status, found.layer) == ("not applicable", None)
    assert "torch.fx cannot trace it" in found.assumption


def traced_otherwise() -> nn.Module:
    """Does something else when traced: its proxies are no tensors."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = x + net.one(x)
        return net.head(h) * (2 if isinstance(x, Tensor) else 1)

    return module_of(forward, one=(3, 3), head=(3, 2)).double()


def test_a_trace_that_computes_something_else_is_not_believed():
    assert "computes something else" in table(traced_otherwise(), normal(4, 3))[0].assumption


def test_a_network_without_skips_says_so():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    (found,) = table(net, normal(4, 3))
    assert found.status == "not applicable"
    assert found.assumption.startswith("identity_skips: no residual block")
    assert math.isnan(found.lhs)


def convolutional() -> nn.Module:
    return module_of(
        lambda net, x: net.head((x + torch.relu(net.conv(x))).flatten(1)),
        conv=nn.Conv2d(2, 2, 3, padding=1),
        head=(32, 2),
    ).double()


def test_of_shared_weights_the_sound_form_holds():
    with torch.random.fork_rng():
        for seed in range(5):
            torch.manual_seed(seed)
            report = table(convolutional(), normal(4, 2, 4, 4, seed=seed))
            assert report.of("residual_bound", "conv").assumption.startswith("unshared_weights")
            assert report.of("residual_bound.sound", "conv").status == "holds"
            assert report.of("residual_bound.sum").status == "not applicable"


def test_both_sides_of_a_convolutional_block_are_literal():
    """||df/dx|| at both ends of layer1, and ||T|| ||df/dz||_F of its first convolution, by explicit Jacobians."""
    this = modern.case("resnet", "half_squared_error")
    net, (x, _) = this.net, this.data
    found = check_bounds(Lens(Problem(net, this.loss, this.data)), "residual_bound")
    block, act = net.layer1, nn.functional.relu

    def above(y: Tensor) -> Tensor:
        return net.fc(net.pool(net.layer2(y)).flatten(1))[0]

    def from_sum(s: Tensor) -> Tensor:
        return above(act(s))

    def from_z(z: Tensor, start: Tensor) -> Tensor:
        return from_sum(block.bn2(block.conv2(act(block.bn1(z)))) + start)

    def norm(of, at: Tensor, kind: int | str) -> Tensor:
        J = torch.autograd.functional.jacobian(of, at).flatten(1)
        return torch.linalg.matrix_norm(J, kind)

    units = torch.eye(32, dtype=torch.float64).reshape(32, 2, 4, 4)
    T = torch.linalg.matrix_norm(block.conv1(units).flatten(1).T, 2)
    left, right = [], []
    for one in x[:, None]:
        start = act(net.bn(net.conv(one))).detach()
        z = block.conv1(start).detach()
        total = (block.bn2(block.conv2(act(block.bn1(z)))) + start).detach()
        left.append(norm(lambda s: from_z(block.conv1(s), s), start, 2))
        right.append(norm(from_sum, total, 2) + T * norm(lambda z, start=start: from_z(z, start), z, "fro"))
    context = Context(Lens(Problem(net, this.loss, this.data)), frozenset(), None, torch.Generator())
    claims = {(c.part, c.layer): c for c in BOUNDS["residual_bound"].claims(context)}
    assert agree(claims["sound", "layer1.conv1"].lhs, torch.stack(left).detach())
    assert agree(claims["sound", "layer1.conv1"].rhs, torch.stack(right).detach())
    assert found.of("residual_bound.sound", "layer1.conv1").status == "holds"
    assert found.of("residual_bound", "layer1.conv1").assumption.startswith("unshared_weights")
    for part in ("", ".sound"):
        row = found.of(f"residual_bound{part}", "layer2.conv1")
        assert (row.status, row.assumption.partition(":")[0]) == ("not applicable", "identity_skips")


@pytest.mark.parametrize(
    ("name", "layer", "why"),
    [
        ("vit-sdpa", "blocks.0.norm1", "begins with blocks.0.norm1, not with one linear layer"),
        ("vit-mha", "blocks.1.norm2", "begins with blocks.1.norm2, not with one linear layer"),
        ("encoder", None, "torch.fx does not look into TransformerEncoder"),
        ("gpt2", None, "torch.fx cannot trace it"),
        ("low-rank", None, "the skip at add_1 goes through blocks.0.attn.qkv.base"),
    ],
)
def test_transformers_are_told_why_not(name, layer, why):
    this = modern.case(name, "half_squared_error")
    report = check_bounds(Lens(Problem(this.net, this.loss, this.data), outputs="exact"), "residual_bound")
    assert not report.violated
    rows = [row for row in report if layer is None or row.layer == layer]
    assert {row.status for row in report} == {"not applicable"}
    assert rows
    assert all(why in row.assumption for row in rows if layer is not None or row.layer is None)


def test_a_skip_that_repeats_its_input_is_no_identity() -> None:
    torch.manual_seed(0)
    net = module_of(lambda net, x: net.h(x + torch.tanh(net.f(x))), f=(1, 4), h=(4, 1)).double()
    nn.init.ones_(net.h.weight)
    net.f.weight.data *= 0.1
    problem = Problem(net, "half_squared_error", (torch.randn(5, 1).double(), torch.zeros(5, 1).double()))
    statuses = {row.status for row in check_bounds(Lens(problem), "residual_bound")}
    assert statuses == {"not applicable"}


@pytest.mark.parametrize("scale", [0.07, 100.0])
def test_what_forward_does_after_the_last_layer_counts(scale: float) -> None:
    net, x = Residual(4, 2, 3, seed=0), normal(5, 4)
    plain = Problem(net, "half_squared_error", (x, torch.zeros(5, 3).double()))
    scaled = Problem(
        net, "half_squared_error", (x, torch.zeros(5, 3).double()), forward=lambda m, b: (m(b[0]) / scale, b[1])
    )
    for part in ("residual_bound.sum", "residual_bound.mean"):
        one, other = (check_bounds(Lens(problem), "residual_bound").of(part) for problem in (plain, scaled))
        assert other.lhs == pytest.approx(one.lhs / scale)
        assert other.rhs == pytest.approx(one.rhs / scale)
        assert other.status == one.status == "holds"
