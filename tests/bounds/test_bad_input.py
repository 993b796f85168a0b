"""check_bounds with what makes no sense: one clear line each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.bounds import Target, check_bounds
from flatlens.distributions import Cube
from flatlens.errors import BadInput


def lens(outputs: int = 2) -> fl.Lens:
    torch.manual_seed(0)
    x = torch.rand(12, 2).double()
    return fl.Lens(
        fl.Problem(nn.Linear(2, outputs).double(), "half_squared_error", (x, torch.zeros(12, outputs).double()))
    )


@pytest.mark.parametrize(("given", "told"), [
    ({"target": lambda x: x}, "target=...): expected a Target"),
    ({"distribution": "cube"}, "distribution=...): expected a Distribution"),
    ({"delta": "a"}, "delta='a'"),
    ({"delta": -1.0}, "delta=-1.0"),
    ({"assume": None}, "assume=None"),
    ({"assume": "flat"}, "unknown assumption 'flat'"),
    ({"bounds": [3]}, "or Bound objects, got 3"),
    ({"bounds": 3}, "or Bound objects, got 3"),
    ({"bounds": []}, "at least one bound"),
])  # fmt: skip
def test_one_line_each(given: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput) as error:
        check_bounds(lens(), **given)  # type: ignore[arg-type]
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [lambda x: x.sum(1, keepdim=True), lambda x: x * math.nan])
def test_a_target_of_another_width_or_without_numbers_is_refused(function: object) -> None:
    with pytest.raises(BadInput, match="must return 2 finite values"):
        check_bounds(lens(), "jacobian_generalisation", distribution=Cube(2), target=Target(function, 2.0))


def test_rows_are_found_by_name_and_layer() -> None:
    table = check_bounds(lens(), "mls_chain")
    assert table["mls_chain", ""] is table.of("mls_chain", "") is next(v for v in table if v.bound == "mls_chain")


def test_a_false_word_is_not_reported_as_an_error_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh()).double()
    with torch.no_grad():
        net[0].weight.fill_(50.0)
        net[0].bias.fill_(-25.0)
    x = torch.tensor([[0.0], [1.0]]).double()
    problem = fl.Problem(net, "half_squared_error", (x, net(x).detach()))
    found = check_bounds(fl.Lens(problem), "lipschitz_bound", delta=1e-6, assume={"convex_support"})
    assert found.violated
    assert "an assumption that you declared is false" in found.answer[0]


@pytest.mark.parametrize("seed", [22, 113])
def test_an_expansion_that_has_not_settled_is_not_believed(seed: int) -> None:
    """Inputs of size 100, float32: leading terms that one series alone takes for settled."""
    torch.manual_seed(seed)
    for scale in (20.0, 170.0):
        for dtype in (torch.float64, torch.float32):
            net = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)).to(dtype)
            with torch.no_grad():
                net[0].weight.mul_(0.4)
            x = (scale * torch.randn(5, 3)).to(dtype)
            problem = fl.Problem(net, "half_squared_error", (x, torch.randn(5, 2).to(dtype)))
            assert not check_bounds(fl.Lens(problem), "feature_robustness_bound").violated
