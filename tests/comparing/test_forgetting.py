"""A task's change of loss between two sets of weights, against the split written out with dense derivatives."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from builders import chain, normal, seeded
from literal_curvature import LOSSES, flat_parameters, hessian_of, slices, with_parameters
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadInput

PARTS = ("first_order", "second_order", "rest")


def moved(net: nn.Module, distance: float = 0.1, seed: int = 1) -> nn.Module:
    """A copy of a network with other weights."""
    other, generator = copy.deepcopy(net), seeded(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(distance * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p))
    return other


def task() -> tuple[nn.Module, Tensor, Tensor]:
    return chain([4, 5, 3], 2), normal(6, 4, seed=1), torch.arange(6) % 3


def literal(net: nn.Module, other: nn.Module, x: Tensor, y: Tensor) -> tuple[float, Tensor, Tensor]:
    """(change of the risk, terms g_j d_j, terms d_j (H d)_j / 2)."""
    theta, d = flat_parameters(net), flat_parameters(other) - flat_parameters(net)

    def risk(f: Tensor) -> Tensor:
        return LOSSES["cross_entropy"](f, y).mean()

    at = theta.clone().requires_grad_()
    (g,) = torch.autograd.grad(risk(with_parameters(net, at, x)), at)
    with torch.no_grad():
        change = float(risk(other(x)) - risk(net(x)))
    return change, g * d, d * (hessian_of(net, risk, x) @ d) / 2


def values(report: fl.Report) -> dict[str, float]:
    return {part: report[part].value for part in ("change", *PARTS)}


def test_the_parts_are_those_of_dense_derivatives() -> None:
    net, x, y = task()
    other = moved(net)
    change, first, second = literal(net, other, x, y)
    found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)
    truth = change, float(first.sum()), float(second.sum()), change - float(first.sum() + second.sum())
    assert list(values(found).values()) == pytest.approx(truth, rel=1e-9, abs=1e-14)
    for part, terms in (("first_order", first), ("second_order", second)):
        for layer in ("0", "2"):
            own = sum(float(terms[at].sum()) for name, at in slices(net).items() if name.startswith(f"{layer}."))
            assert found[part, layer].value == pytest.approx(own, rel=1e-9)
    assert found["change"].samples is not None
    assert float(found["change"].samples.mean()) == pytest.approx(change, rel=1e-12)
    assert all(0 < found[part].stderr < 1e-14 for part in ("change", *PARTS))


def test_every_way_to_give_the_weights_is_the_same() -> None:
    net, x, y = task()
    other = moved(net)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    truth = values(fl.forgetting(problem, other))
    assert values(fl.forgetting(fl.Lens(problem), other.state_dict())) == truth
    assert values(fl.forgetting(problem, fl.Problem(other, "cross_entropy", (x, y)))) == truth
    assert values(fl.forgetting(problem, fl.Lens(fl.Problem(other, "cross_entropy", (x, y))))) == truth
    assert values(fl.forgetting(problem, {"0.weight": net[0].weight.detach()}))["change"] == 0


def test_the_rest_falls_as_the_cube_of_the_step() -> None:
    net, x, y = task()
    problem, far = fl.Problem(net, "cross_entropy", (x, y)), moved(net, 0.02)
    found = []
    for share in (1.0, 0.5, 0.25):
        near = {
            name: p.detach() + share * (q.detach() - p.detach())
            for (name, p), (_, q) in zip(net.named_parameters(), far.named_parameters(), strict=True)
        }
        found.append(values(fl.forgetting(problem, near)))
    for half, whole in ((1, 0), (2, 1)):
        for part, factor, tolerance in (("first_order", 2, 1e-9), ("second_order", 4, 1e-9), ("rest", 8, 0.1)):
            assert found[whole][part] / found[half][part] == pytest.approx(factor, rel=tolerance)


@pytest.mark.parametrize(
    ("distance", "seed", "exceeded"), [(1, 3, "the first order and the second"), (3, 5, "the change")]
)
def test_a_long_step_has_no_split_and_keeps_its_change(distance: float, seed: int, exceeded: str) -> None:
    net, x, y = task()
    other = moved(net, distance, seed)
    change, *terms = literal(net, other, x, y)
    first, second = (float(term.sum()) for term in terms)
    rest, larger = abs(change - first - second), max(abs(first), abs(second))
    assert rest > (max(abs(change), larger / 10) if exceeded == "the change" else larger)
    found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)
    assert found["change"].value == pytest.approx(change, rel=1e-12)
    assert {found[part].kind for part in PARTS} == {"undefined"}
    assert f"exceeds {exceeded}" in found["rest"].note
    assert "shorter step" in " ".join(found.answer)
    assert ("first_order", "0") not in found


class LoRA(nn.Module):
    """W x + b + scale B A x, W and b frozen: a plain implementation."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.A = nn.Parameter(normal(rank, base.in_features, seed=3).to(base.weight) / 2)
        self.B = nn.Parameter(normal(base.out_features, rank, seed=4).to(base.weight) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


def merged(net: nn.Module) -> dict[str, Tensor]:
    own = net[0]
    return {"0.base.weight": own.base.weight + own.scale * own.B @ own.A}


def lora() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    net, x, y = task()
    net = nn.Sequential(LoRA(net[0], 2, 1.5), *net[1:])
    other = copy.deepcopy(net)
    with torch.no_grad():
        for number, p in enumerate((other[0].A, other[0].B, other[2].weight)):
            p.add_(0.1 * normal(*p.shape, seed=5 + number))
    return net, other, x, y


def test_factors_and_merged_weights_are_two_coordinates_of_one_change() -> None:
    net, other, x, y = lora()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    factors, whole = fl.forgetting(problem, other), fl.forgetting(problem, other, coordinates=merged)
    # in the factors: literally, over all parameters, of which the frozen ones do not move
    change, first, second = literal(net, other, x, y)
    truth = change, float(first.sum()), float(second.sum())
    assert list(values(factors).values())[:3] == pytest.approx(truth, rel=1e-9)
    # merged: the same network with a plain layer, whose weight is W + scale B A
    plain = [nn.Sequential(nn.Linear(4, 5), *copy.deepcopy(one[1:])).double() for one in (net, other)]
    with torch.no_grad():
        for one, of in zip(plain, (net, other), strict=True):
            one[0].weight.copy_(merged(of)["0.base.weight"])
            one[0].bias.copy_(of[0].base.bias)
    change, first, second = literal(*plain, x, y)
    truth = change, float(first.sum()), float(second.sum())
    assert list(values(whole).values())[:3] == pytest.approx(truth, rel=1e-9)
    assert whole["change"].value == pytest.approx(factors["change"].value, rel=1e-12)
    assert abs(whole["first_order"].value - factors["first_order"].value) > 1e-3  # g^T (dB dA) is of second order


def without_scale(net: nn.Module) -> dict[str, Tensor]:
    return {"0.base.weight": net[0].base.weight + net[0].B @ net[0].A}


def test_merged_weights_that_do_not_act_so_are_refused() -> None:
    net, other, x, y = lora()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    with pytest.raises(BadInput, match="do not give the loss"):
        fl.forgetting(problem, other, coordinates=without_scale)
    with pytest.raises(BadInput, match="peft"):
        fl.forgetting(problem, other, coordinates="merged")


def test_networks_that_differ_in_more_than_numbers_are_refused() -> None:
    net, other, x, y = lora()
    other[0].scale = 2.0
    with pytest.raises(BadInput, match="more than their parameters"):
        fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)


def test_buffers_that_change_have_a_row_of_their_own() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x, y = normal(6, 4, seed=1), torch.arange(6) % 3
    other = moved(net, 0.02)
    alone = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)
    assert ("buffers", None) not in alone
    other[1].running_mean.add_(0.3)
    found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)
    assert found["change"].value == pytest.approx(literal(net, other, x, y)[0], rel=1e-12)
    assert found["change"].value == pytest.approx(alone["change"].value + found["buffers"].value, rel=1e-9)
    assert [found[part].value for part in PARTS] == pytest.approx([alone[part].value for part in PARTS], rel=1e-9)


@pytest.mark.parametrize("own", [True, False])
def test_the_next_step_of_an_optimiser(own: bool) -> None:
    """Of a task's own training, or of that of another task."""
    net, x, y = task()
    new = normal(6, 4, seed=9), torch.zeros(6, dtype=torch.long)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    trained = (x, y) if own else new
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(trained[0]), trained[1]).backward()
        optimiser.step()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    along = None if own else fl.Problem(net, "cross_entropy", new)
    found = values(fl.forgetting(fl.Lens(problem, optimiser=optimiser, along=along)))
    before = copy.deepcopy(net)
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(trained[0]), trained[1]).backward()
    optimiser.step()
    change, first, second = literal(before, net, x, y)
    assert list(found.values())[:3] == pytest.approx((change, float(first.sum()), float(second.sum())), rel=1e-6)


def test_weights_in_float32_have_the_numbers_of_their_float64_copy() -> None:
    net, x, y = task()
    net = net.float()
    other = moved(net, 1e-5)
    found = values(fl.forgetting(fl.Problem(net, "cross_entropy", (x.float(), y)), other))
    change, first, second = literal(copy.deepcopy(net).double(), copy.deepcopy(other).double(), x.float().double(), y)
    assert list(found.values())[:3] == pytest.approx((change, float(first.sum()), float(second.sum())), rel=1e-6)


def test_intervals_hold_the_truth_where_the_network_rounds_inside() -> None:
    """A norm that computes in float32 even in a float64 network, as those of many language models do."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.first(x).to(net.inside)
        return net.last(torch.tanh(h * h.square().mean(1, keepdim=True).rsqrt()).to(x.dtype))

    held: dict[str, list[bool]] = {part: [] for part in ("change", *PARTS)}
    for seed in range(40):
        torch.manual_seed(seed)
        net = module_of(forward, first=(4, 6), last=(6, 3), inside=torch.float32).double()
        x, y, other = normal(6, 4, seed=seed), torch.arange(6) % 3, moved(net, 0.05, seed)
        found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other)
        assert found["change"].kind == "estimate"
        for one in (net, other):
            one.inside = torch.float64
        truth = values(fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), other))
        for part in held if found["rest"].kind == "estimate" else ["change"]:
            held[part].append(abs(found[part].value - truth[part]) <= found[part].margin)
    for part, rows in held.items():
        assert len(rows) > 35, part
        assert sum(rows) >= 0.94 * len(rows), part


def test_the_answer_the_table_and_the_file(tmp_path) -> None:
    net, x, y = task()
    found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), moved(net))
    lines = str(found).splitlines()
    assert lines[0].startswith(("The loss rises by ", "The loss falls by "))
    assert "first order (gradient) 10" in found.answer[0]
    assert max(map(len, lines[lines.index("") :])) <= 80
    found.save(tmp_path / "found.safetensors")
    again = type(found).load(tmp_path / "found.safetensors")
    assert str(again) == str(found)
    assert torch.equal(again["change"].samples, found["change"].samples)


def test_weights_that_stay_say_so() -> None:
    net, x, y = task()
    found = fl.forgetting(fl.Problem(net, "cross_entropy", (x, y)), copy.deepcopy(net))
    assert found.answer[0] == "The weights are the same: the loss does not change."


def test_wrong_arguments_are_one_line() -> None:
    net, x, y = task()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    for after, said in (
        (chain([4, 6, 3], 2), "has shape"),
        (nn.Sequential(net[0]), "has no"),
        ({"9.weight": torch.zeros(1)}, "9.weight"),
        (3, "got int"),
        (None, "optimiser"),
    ):
        with pytest.raises(BadInput, match=said):
            fl.forgetting(problem, after)
    with pytest.raises(BadInput, match="got Sequential"):
        fl.forgetting(net, net)
    with pytest.raises(BadInput, match="coordinates"):
        fl.forgetting(problem, moved(net), coordinates="factors")


def test_layers_of_peft_have_merged_weights() -> None:
    peft = pytest.importorskip("peft")
    net, x, y = task()
    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], init_lora_weights=False)
    torch.manual_seed(0)
    net = peft.get_peft_model(nn.Sequential(*net), settings).double()
    other = copy.deepcopy(net)
    with torch.no_grad():
        for number, p in enumerate(p for p in other.parameters() if p.requires_grad):
            p.add_(0.1 * normal(*p.shape, seed=number))
    problem = fl.Problem(net, "cross_entropy", (x, y))
    plain = [copy.deepcopy(one).merge_and_unload() for one in (net, other)]
    change, first, second = literal(*plain, x, y)
    found = values(fl.forgetting(problem, other, coordinates="merged"))
    assert list(found.values())[:3] == pytest.approx((change, float(first.sum()), float(second.sum())), rel=1e-9)
    assert values(fl.forgetting(problem, other))["change"] == pytest.approx(change, rel=1e-9)


def test_a_tiny_gpt2_forgets_its_first_text_by_curvature() -> None:
    """docs/forgetting.py: near the minimum of the first text, the second order; far from it, no split."""
    pytest.importorskip("transformers")
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("forgetting", docs / "forgetting.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    found = page.run(steps=150, at=(0, 1, 2, 50))
    for name in ("factors", "merged"):
        near = found[1, name]
        assert near["second_order"].value > abs(near["first_order"].value)
        for step in (1, 2):
            assert found[step, name]["rest"].kind == "exact"
            assert abs(found[step, name]["rest"].value) < 0.1 * found[step, name]["second_order"].value
        assert found[50, name]["change"].value > 0.1
        assert found[50, name]["rest"].kind == "undefined"
    for step in (1, 2, 50):
        one, two = (found[step, name]["change"].value for name in ("factors", "merged"))
        assert one == pytest.approx(two, rel=1e-9)
