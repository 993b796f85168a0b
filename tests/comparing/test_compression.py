"""Compression: schemes against their definitions, terms against dense derivatives, rises against other copies."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from benchmarks import compress as benchmark
from builders import chain, normal
from literal_curvature import LOSSES, flat_parameters, hessian_of, slices, with_parameters
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.comparing.allocation import LayerOption, allocated, exchanged
from flatlens.comparing.compressing import EXPECTED_WITHIN, _rest
from flatlens.comparing.schemes import scheme
from flatlens.errors import BadInput, BadModel, UnknownName

SCHEMES = ("int8", "int4", "int4(by='tensor')", "float8", "int4(group=3)", "prune(share=0.5)",
           "low_rank(share=0.5)")  # fmt: skip


def task() -> tuple[nn.Module, Tensor, Tensor]:
    return chain([4, 6, 5, 3], 2), normal(9, 4, seed=1), torch.arange(9) % 3


def problem_of(net: nn.Module, x: Tensor, y: Tensor, **more: object) -> fl.Problem:
    return fl.Problem(net, "cross_entropy", (x, y), **more)  # type: ignore[arg-type]


def by_hand(W: Tensor, name: str) -> Tensor:
    """What a scheme makes of a matrix, entry by entry."""
    if name.startswith("prune"):
        least = W.abs().flatten().sort().values[round(0.5 * W.numel()) - 1]
        return torch.where(W.abs() <= least, 0.0, W)
    if name.startswith("low_rank"):
        U, S, V = torch.linalg.svd(W, full_matrices=False)
        S[int(0.5 * W.numel() / sum(W.shape)) :] = 0
        return U @ torch.diag(S) @ V
    made = torch.zeros_like(W)
    for i, j in itertools.product(*map(range, W.shape)):
        group = W[i, j - j % 3 : j - j % 3 + 3]
        size = float((W if "tensor" in name else group if "group" in name else W[i]).abs().max())
        if name == "float8":
            grid = [m / 8 * 2.0**e for e in range(-6, 9) for m in range(8, 16)] + [m / 8 * 2.0**-6 for m in range(8)]
            near = min((g for g in grid if g <= 448), key=lambda g: abs(abs(float(W[i, j])) / size * 448 - g))
            made[i, j] = near * size / 448 * W[i, j].sign()
        else:
            most = {"int8": 127, "int4": 7}[name[:4]]
            made[i, j] = round(float(W[i, j]) / size * most) * size / most
    return made


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_its_definition(name: str) -> None:
    W = normal(5, 7, seed=3)
    made = scheme(name)(W)
    assert made is not None
    assert torch.allclose(made, by_hand(W, name), rtol=0, atol=2e-7 if name == "float8" else 1e-12)


def test_zeros_stay_and_a_matrix_without_room_for_a_rank_is_left_out() -> None:
    for name in SCHEMES[:-1]:
        made = scheme(name)(torch.zeros(3, 4, dtype=torch.float64))
        assert made is not None
        assert not made.any()
    assert scheme("low_rank(share=0.1)")(normal(3, 4)) is None
    assert scheme("int8").size(4, 10, 32) == 8 * 40 + 32 * 4
    assert scheme("int4(group=3)").size(4, 10, 32) == 4 * 40 + 32 * 4 * 4
    assert scheme("prune(share=0.5)").size(4, 10, 16) == 16 * 20 + 40
    assert scheme("low_rank(share=0.5)").size(10, 10, 32) == 32 * 2 * 20


@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU])
def test_both_terms_are_those_of_dense_derivatives(act: type[nn.Module]) -> None:
    net, (_, x, y) = chain([4, 6, 5, 3], 2, act), task()
    found = fl.compression(fl.Lens(problem_of(net, x, y)), SCHEMES)
    theta = flat_parameters(net).clone().requires_grad_()

    def risk(f: Tensor) -> Tensor:
        return LOSSES["cross_entropy"](f, y).mean()

    (g,) = torch.autograd.grad(risk(with_parameters(net, theta, x)), theta)
    H, places = hessian_of(net, risk, x), slices(net)
    for name in SCHEMES:
        joint = torch.zeros_like(g)
        for layer in ("0", "2", "4"):
            d, at = torch.zeros_like(g), places[f"{layer}.weight"]
            W = net.get_parameter(f"{layer}.weight").detach()
            if scheme(name)(W) is None:  # no room for a rank
                continue
            d[at] = (by_hand(W, name) - W).flatten() if name != "float8" else (scheme(name)(W) - W).flatten()
            joint += d
            _agrees(found[layer, name], g, H, d, risk(with_parameters(net, theta.detach() + d, x)) - risk(net(x)))
        _agrees(found["", name], g, H, joint, risk(with_parameters(net, theta.detach() + joint, x)) - risk(net(x)))


def _agrees(row: object, g: Tensor, H: Tensor, d: Tensor, rise: Tensor) -> None:
    truth = float(g @ d), float(d @ H @ d) / 2, float(rise), float(d @ d)
    own = [getattr(row, name) for name in ("first_order", "second_order", "rise", "squared_change")]
    assert own == pytest.approx(truth, rel=1e-6, abs=1e-13)


def test_the_rest_is_that_of_third_and_fourth_order() -> None:
    net, x, y = task()
    small = copy.deepcopy(net)
    row = fl.compression(fl.Lens(problem_of(small, x, y)), "int8")["2", "int8"]
    assert abs(row.rise - row.forecast) == pytest.approx(row.rest, rel=0.5)  # the third order decides
    assert row.valid
    assert abs(row.rise - row.extrapolated) < abs(row.rise - row.forecast) / 50
    # a change as large as the weights themselves
    coarse = fl.compression(fl.Lens(problem_of(net, x, y)), "prune(share=0.9)")
    for layer in ("0", "2", "4"):
        flagged = coarse[layer, "prune(share=0.9)"]
        assert flagged.valid or "higher orders" in flagged.note
    assert any(not one.valid for one in coarse.rows)


def test_four_orders_are_extrapolated_exactly() -> None:
    shared, x = nn.Linear(3, 3, bias=False, dtype=torch.float64), normal(5, 3)  # twice: its squared error is quartic
    problem = fl.Problem(module_of(lambda net, x: net.one(net.one(x)), one=shared), "mse", (x, normal(5, 3, seed=2)))
    for name in ("int4", "prune(share=0.5)", "prune(share=0.8)"):
        row = fl.compression(problem, name)["one", name]
        assert row.extrapolated == pytest.approx(row.rise, rel=1e-9)
        assert row.rest >= abs(row.rise - row.forecast) * (1 - 1e-9)
        assert abs(row.rise - row.forecast) > 1e-6


def test_the_rest_is_never_below_that_of_any_second_third_and_fourth_order() -> None:
    for orders in normal(200, 3).tolist():
        of = [sum(c * t**k for c, k in zip(orders, (2, 3, 4), strict=True)) for t in (0.25, 0.5, 0.75)]
        rest, higher = _rest(*of)
        assert higher == pytest.approx(sum(orders), abs=1e-9)
        assert rest >= abs(sum(orders)) - 1e-9


def test_an_earlier_result_is_planned_anew(of_digits: fl.Compression) -> None:
    net, problem, (x, y) = trained()
    for more in ({"budget": 0.2}, {"level": 0.01, "schemes": "int4"}):
        found = fl.compression(problem, earlier=of_digits, **more)  # type: ignore[arg-type]
        alone = fl.compression(problem, **{"schemes": ["int8", "int4"], **more})  # type: ignore[arg-type]
        assert found.rows == alone.rows
        assert found.plan == alone.plan
    with pytest.raises(BadInput, match="other layers, weights or samples"):
        fl.compression(problem_of(net, x[:100], y[:100]), earlier=of_digits)
    with pytest.raises(BadInput, match="has no float8"):
        fl.compression(problem, "float8", earlier=of_digits)


def test_the_errors_are_those_over_samples() -> None:
    net, x, y = task()
    row = fl.compression(fl.Lens(problem_of(net, x, y)), "int8")["2", "int8"]
    moved = copy.deepcopy(net)
    made = scheme("int8")(net[2].weight.detach())  # type: ignore[index]
    moved[2].weight.data.copy_(made)  # type: ignore[index]
    with torch.no_grad():
        changes = LOSSES["cross_entropy"](moved(x), y) - LOSSES["cross_entropy"](net(x), y)
    assert row.rise_stderr == pytest.approx(float(changes.std()) / 3, rel=1e-9)
    assert row.forecast_stderr == pytest.approx(row.rise_stderr, rel=0.05)  # valid: nearly the same changes
    alone = fl.compression(fl.Lens(problem_of(net, x[:1], y[:1])), ["int8"])
    assert alone["2", "int8"].rise_stderr != alone["2", "int8"].rise_stderr
    assert alone.plan["rise_stderr"] != alone.plan["rise_stderr"]


def test_the_network_is_never_changed() -> None:
    net, x, y = task()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    memory = {name: (p.data_ptr(), p._version, p.grad) for name, p in net.named_parameters()}
    net.train()
    lens = fl.Lens(problem_of(net, x, y))
    fl.compression(lens, ["int8", "int4"], budget=0.6)
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert memory == {name: (p.data_ptr(), p._version, p.grad) for name, p in net.named_parameters()}
    fl.measure(lens, ["mls"])  # the lens is not stale


def same_rises(net: nn.Module, twin: nn.Module, x: Tensor, y: Tensor, names: dict[str, str]) -> None:
    found, other = (fl.compression(problem_of(one, x, y), ["int4"]) for one in (net, twin))
    for layer, same in names.items():
        a, b = found[layer, "int4"], other[same, "int4"]
        assert (a.first_order, a.second_order, a.rise) == pytest.approx(
            (b.first_order, b.second_order, b.rise), rel=1e-6
        )


def test_parametrised_weights_are_compressed_as_the_network_uses_them() -> None:
    net, x, y = task()
    twin = copy.deepcopy(net)
    nn.utils.parametrizations.weight_norm(net[2], "weight")  # type: ignore[index]
    same_rises(net, twin, x, y, {"0": "0", "2": "2", "4": "4"})
    assert fl.compression(problem_of(net, x, y), ["int4"]).plan["layers"]["2"]["parameter"] == "2.weight"
    nn.utils.weight_norm(twin[2])  # type: ignore[index]
    problem = problem_of(twin, x, y)
    with pytest.raises(BadModel, match=r"not torch\.nn\.utils\.weight_norm"):
        fl.compression(problem)


def test_groups_run_along_the_inputs_of_an_output_and_the_plan_has_their_size() -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(3, 2, 2, dtype=torch.float64)  # its output channels are the second axis
    net, x = nn.Sequential(up, nn.Flatten(), nn.Linear(18, 3).double()), normal(4, 3, 2, 2)
    y = torch.arange(4) % 3
    problem = problem_of(net, x, y)
    found = fl.compression(problem, ["int4", "int4(group=5)"])
    moved = copy.deepcopy(net)
    rows = up.weight.detach().transpose(0, 1).reshape(2, 12)
    for row in rows:
        for few in row.split(5):  # 5, 5 and 2 entries
            scale = few.abs().max() / 7
            few.copy_((few / scale).round() * scale)
    moved[0].weight.data.copy_(rows.view(2, 3, 2, 2).transpose(0, 1))  # type: ignore[union-attr, operator]
    with torch.no_grad():
        truth = (LOSSES["cross_entropy"](moved(x), y) - LOSSES["cross_entropy"](net(x), y)).mean()
    assert found["0", "int4(group=5)"].rise == pytest.approx(float(truth), rel=1e-9)
    grouped = fl.compression(problem, "int4(group=5)", level=10.0).plan["layers"]["0"]
    assert (grouped["scheme"], grouped["bits"], grouped["by"], grouped["group"]) == ("int4(group=5)", 4, "group", 5)
    assert fl.compression(problem, "int4", level=10.0).plan["layers"]["0"]["group"] is None


def test_tied_weights_change_together_and_once() -> None:
    _, x, y = task()
    shared = nn.Linear(4, 4, dtype=torch.float64)
    head = nn.Linear(4, 3, dtype=torch.float64)
    net = module_of(
        lambda net, x: net.head(torch.tanh(net.b(torch.tanh(net.a(x))))),
        a=shared,
        b=nn.Linear(4, 4).double(),
        head=head,
    )
    net.b.weight = net.a.weight
    found = fl.compression(problem_of(net, x, y), ["int4"])
    assert [row.layer for row in found.rows] == ["a", "head", ""]
    assert found.plan["layers"]["a"]["tied"] == ["b.weight"]
    moved = copy.deepcopy(net)
    moved.a.weight.data.copy_(scheme("int4")(net.a.weight.detach()))
    with torch.no_grad():
        truth = LOSSES["cross_entropy"](moved(x), y).mean() - LOSSES["cross_entropy"](net(x), y).mean()
    assert found["a", "int4"].rise == pytest.approx(float(truth), rel=1e-9)


def test_conv1d_has_its_channels_in_the_other_axis() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    net, x, y = task()
    twin, conv1d = copy.deepcopy(net), pytorch_utils.Conv1D(5, 6).double()
    conv1d.load_state_dict({"weight": net[2].weight.T, "bias": net[2].bias})  # type: ignore[index, union-attr]
    twin[2] = conv1d  # type: ignore[index]
    same_rises(net, twin, x, y, {"2": "2"})
    assert fl.compression(problem_of(twin, x, y), ["int4"]).plan["layers"]["2"]["axis"] == 1


class Odd(nn.Module):
    """A frozen layer, one that is not used, one of zeros, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(3, 3)
        self.zeros = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        nn.init.zeros_(self.zeros.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.frozen(x)))
        return self.last(h + self.zeros(h))


def test_odd_layers_have_the_right_number() -> None:
    torch.manual_seed(0)
    net, (_, x, y) = Odd().double(), task()
    net(x)  # running statistics that are not 0 and 1
    found = fl.compression(problem_of(net, x, y), ["int4", "prune(share=0.5)"])
    assert found.about["layers"] == ["frozen", "unused", "zeros", "last"]
    for name in ("unused", "zeros"):
        row = found[name, "int4"]
        assert (row.forecast, row.rise, row.valid) == (0.0, 0.0, True)
    assert found["zeros", "int4"].distance == 0
    moved = copy.deepcopy(net).eval()
    moved.frozen.weight.data.copy_(scheme("int4")(net.frozen.weight.detach()))
    with torch.no_grad():
        truth = LOSSES["cross_entropy"](moved(x), y).mean() - LOSSES["cross_entropy"](net.eval()(x), y).mean()
    assert found["frozen", "int4"].rise == pytest.approx(float(truth), rel=1e-9)
    named = fl.compression(problem_of(net, x, y, parameters=["last.weight"]), ["int4"])
    assert named.about["layers"] == ["last"]


def test_half_weights_count_their_own_bits() -> None:
    net, x, y = task()
    half, wide = net.bfloat16(), copy.deepcopy(net).bfloat16().double()
    found = fl.compression(problem_of(half, x, y), ["int8"])
    truth = fl.compression(problem_of(wide, x, y), ["int8"])
    assert found["0", "int8"].rise == pytest.approx(truth["0", "int8"].rise, rel=1e-6)
    assert found["0", "int8"].size == pytest.approx(8 / 16 + 32 / (16 * 4))
    assert found.plan["layers"]["4"]["bits"] in (8, 16)


def test_coupled_samples_and_no_weights_are_refused() -> None:
    net, x, y = task()
    normed = nn.Sequential(net, nn.BatchNorm1d(3).double())
    coupled = problem_of(normed, x, y, batchnorm="train", ghost_batch=3)
    with pytest.raises(BadInput, match="batchnorm='eval'"):
        fl.compression(coupled)
    with pytest.raises(BadInput, match="no weight of two or more axes"):
        fl.compression(problem_of(net, x, y, parameters=["0.bias"]))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schemes": "int5"}, "unknown scheme 'int5'"),
        ({"schemes": "int4(share=0.5)"}, "its option is 'by' or 'group'"),
        ({"schemes": "int4(group=0)"}, "a whole number of at least 1"),
        ({"schemes": "int4(by='tensor', group=32)"}, "give by= or group=, not both"),
        ({"schemes": "prune(share=2)"}, "between 0 and 1"),
        ({"schemes": "int4(by='row')"}, "'channel' or 'tensor'"),
        ({"schemes": []}, "at least one scheme"),
        ({"schemes": 3}, "names of schemes"),
        ({"budget": 0}, "a share between 0 and 1"),
        ({"budget": 0.01}, "not even the smallest schemes fit"),
        ({"budget": 0.5, "schemes": "prune"}, "schemes with fewer bits"),
        ({"level": -1.0}, "a number above 0"),
        ({"budget": 0.5, "trials": 0}, "a whole number of at least 1"),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, object], told: str) -> None:
    net, x, y = task()
    problem = problem_of(net, x, y)
    with pytest.raises((BadInput, UnknownName)) as error:
        fl.compression(problem, **given)  # type: ignore[arg-type]
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_the_knapsack_is_exact() -> None:
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        numbers = torch.rand(5, 3, 2, generator=draws, dtype=torch.float64)
        options = [[LayerOption(int(100 * size), float(rise) - 0.2) for size, rise in of] for of in numbers]
        room = int(1.3 * sum(min(one.size for one in of) for of in options))
        choices = [c for c in itertools.product(range(3), repeat=5)
                   if sum(of[at].size for of, at in zip(options, c, strict=True)) <= room]  # fmt: skip
        costs = {c: sum(of[at].rise for of, at in zip(options, c, strict=True)) for c in choices}
        found = allocated(options, room)
        assert costs[found] == pytest.approx(min(costs.values()), abs=1e-9)


def test_exchanges_find_what_sums_miss() -> None:
    options = [[LayerOption(32, 0.0), LayerOption(8, 1.0)] for _ in range(4)]

    def rise(choice: tuple[int, ...]) -> float:  # the first two layers cancel each other's change
        return sum(choice) - 1.9 * choice[0] * choice[1] + 0.01 * choice[2]

    start = allocated(options, 80)
    assert sum(start) == 2
    found = exchanged(options, 80, (0, 0, 1, 1), rise, lambda *told: None)
    assert found.ended
    assert rise(found.choice) < rise((0, 0, 1, 1))
    assert rise(found.choice) <= rise(start)


def test_no_more_losses_are_measured_than_trials() -> None:
    draws = torch.Generator().manual_seed(0)
    joint = torch.rand(6, 3, 6, 3, generator=draws, dtype=torch.float64) - 0.5
    options = [[LayerOption(8 * (2 - at) + 8, 0.1 * at) for at in range(3)] for _ in range(6)]
    start, asked = allocated(options, 96), list[tuple[int, ...]]()

    def rise(choice: tuple[int, ...]) -> float:
        asked.append(choice)
        return float(sum(joint[i, a, j, b] for i, a in enumerate(choice) for j, b in enumerate(choice)))

    rises = []
    for trials in (1, 5, 9, 20, 40, None):
        asked.clear()
        found = exchanged(options, 96, start, rise, lambda *told: None, trials)
        assert found.trials == len(asked) == len(set(asked))
        assert len(asked) <= (trials or 1000)
        assert sum(options[layer][at].size for layer, at in enumerate(found.choice)) <= 96
        around = {(*found.choice[:i], at, *found.choice[i + 1 :]) for i in range(6) for at in range(3)}
        assert found.ended == (trials is None)
        assert not found.ended or around <= set(asked)
        rises.append(rise(found.choice))
    assert rises[0] == rise(start)
    assert rises[-1] < rises[0]


def trained() -> tuple[nn.Module, fl.Problem, tuple[Tensor, Tensor]]:
    from flatlens.data import digits
    from flatlens.models import MLP
    from flatlens.training import Adam, Training, train

    split, net = digits(train=300), MLP(64, (24,) * 7, 10).build()
    train(net, split.train, Training(Adam(lr=2e-3), batch_size=30, max_steps=300))
    return net, fl.Problem(net, "cross_entropy", split.train, test=split.test), split.train


@pytest.fixture(scope="module")
def of_digits() -> fl.Compression:
    return fl.compression(trained()[1], ["int8", "int4"], budget=0.2)


def test_the_forecast_ranks_the_layers_of_a_trained_network(of_digits: fl.Compression) -> None:
    ranks = of_digits.correlations().set_index("scheme")
    assert (ranks["layers"] == 8).all()
    assert (ranks["forecast"] >= 0.9).all()
    valid = [row for row in of_digits.rows if row.valid and row.layer]
    assert len(valid) >= 5
    assert all(1 / EXPECTED_WITHIN <= row.forecast / row.rise <= EXPECTED_WITHIN for row in valid)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "valid"), [("relu", 93), ("tanh", 140), ("gelu", 127)])
def test_forecasts_that_are_not_flagged_are_within_their_factor(activation: str, valid: int) -> None:
    """Four networks of eight layers by each activation, six schemes: docs/compress.md has the counts."""
    from flatlens.data import digits
    from flatlens.models import MLP
    from flatlens.training import Adam, Training, train

    split, rows = digits(train=600), []
    for seed in range(4):
        net = MLP(64, (32,) * 7, 10, activation=activation, seed=seed).build()
        train(net, split.train, Training(Adam(lr=2e-3), batch_size=30, max_steps=400, seed=seed))
        found = fl.compression(fl.Problem(net, "cross_entropy", split.train), benchmark.SCHEMES, progress=False)
        rows += [row for row in found.rows if row.layer and row.valid]
    assert all(1 / EXPECTED_WITHIN <= row.forecast / row.rise <= EXPECTED_WITHIN for row in rows)
    assert len(rows) == pytest.approx(valid, rel=0.1)  # other machines round and train otherwise


def test_a_plan_within_a_budget_costs_what_it_says(of_digits: fl.Compression) -> None:
    net, _, (x, y) = trained()
    plan, copied = of_digits.plan, copy.deepcopy(net).double()
    kept = 0
    for layer in plan["layers"].values():
        weight = copied.get_parameter(layer["parameter"])
        if layer["scheme"] != "kept":
            weight.data.copy_(scheme(layer["scheme"])(weight.detach()))
        kept += weight.numel() * layer["bits"] + (layer["scheme"] != "kept") * 32 * len(weight)
    kept += sum(32 * p.numel() for name, p in net.named_parameters() if name.endswith("bias"))
    assert kept / sum(32 * p.numel() for p in net.parameters()) == pytest.approx(plan["size"])
    assert plan["size"] <= 0.2
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(one(x.double()), y, reduction="none") for one in (copied, net.double())]
    assert plan["rise"] == pytest.approx(float((losses[0] - losses[1]).mean()), rel=1e-6)
    assert plan["rise"] <= plan["before_exchange"]
    assert plan["ended"] == (plan["trials"] < 12 * (8 * 2 + 6))
    assert plan["rise"] <= plan["uniform"]["rise"]
    assert plan["held_out"]["rise_stderr"] > 0
    assert json.loads(json.dumps(plan)) == plan
    assert of_digits.answer[0].startswith("81% smaller raises the loss of")
    assert "not forecast" in of_digits.answer[2]


def test_without_a_budget_the_largest_group_stays_below_the_level() -> None:
    _, problem, _ = trained()
    found = fl.compression(problem, ["int4"], level=0.01)
    plan = found.plan
    used = [name for name, layer in plan["layers"].items() if layer["scheme"] == "int4"]
    assert 0 < len(used) < 8
    assert plan["rise"] + 1.96 * plan["rise_stderr"] <= 0.01
    assert found.answer[0].startswith(f"{len(used)} of 8 layers can go to int4 together")
    none = fl.compression(problem, ["int4"], level=1e-9)
    assert none.answer[0].startswith("No layer of 8 can certainly go to int4")


def test_rows_of_a_network_replace_its_earlier_ones(
    of_digits: fl.Compression, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(benchmark, "NETWORKS", {"a": lambda: trained()[1], "b": lambda: trained()[1]})
    monkeypatch.setattr(benchmark, "SCHEMES", ("int8", "int4"))
    monkeypatch.setattr(benchmark, "TRIALS", 20)
    for name in ("a", "b", "a"):
        first, both = benchmark.rows(name)
        benchmark.written(first, path)
        table = pd.read_csv(path)
        assert list(table[table["network"] == name]["scheme"]) == ["int8", "int4"]  # before the exchanges
        benchmark.written(both, path)
    table = pd.read_csv(path)
    assert list(table["network"]) == ["a"] * 3 + ["b"] * 3
    ranks = of_digits.correlations().set_index("scheme")["forecast"]
    assert list(table["forecast"][:2]) == pytest.approx(list(ranks), abs=1e-5)
    assert table["trials"][2] <= 20
    assert table["joint"][2] <= table["before_exchange"][2]


def test_a_saved_result_is_the_same(of_digits: fl.Compression, tmp_path) -> None:
    of_digits.save(tmp_path / "found")
    read = fl.Compression.load(tmp_path / "found")
    assert read.rows == of_digits.rows
    assert (read.plan, read.answer) == (of_digits.plan, of_digits.answer)
    assert "all" in repr(read)
