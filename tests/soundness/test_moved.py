"""Drawn attention in other bases: every transform of heads, norms and gates keeps the function or is refused in one
line, and flatness of heads is where it was."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
import torch
from drawn_attention import ATTENTION
from drawn_networks import Drawn, build, networks
from hypothesis import HealthCheck, Phase, given, seed, settings

import flatlens as fl
from flatlens.errors import BadModel
from flatlens.transforms import TRANSFORMS
from flatlens.transforms.definition import Moved

MOVES = ("query_key_basis", "value_output_basis", "head_permutation", "norm_folding", "norm_scale", "gate_scale")
MEASURE = "head_flatness_ggn"
PARTS = (MEASURE, f"{MEASURE}.query_key", f"{MEASURE}.value_output", f"{MEASURE}.max")
WITHOUT = ("positions", "lstm", "packed tokens", "mixed positions")  #: stages that have no heads


def heads(problem: fl.Problem) -> fl.Report:
    return fl.measure(fl.Lens(problem), [MEASURE])


def number(report: fl.Report, part: str) -> float | None:
    """None where it is undefined, which needs a reason."""
    if (part, None) not in list(report) or report[part].kind == "undefined":
        assert report[MEASURE].note
        return None
    return report[part].value


def applied(name: str, problem: fl.Problem, seed: int) -> Moved | str:
    """The network in other weights, or why there is none."""
    try:
        return TRANSFORMS[name].apply(problem, torch.Generator().manual_seed(seed))
    except BadModel as refused:
        return str(refused)


def moved(drawn: Drawn) -> Counter[str]:
    """How many places each transform moves; a failure where a function or a number is not what it was."""
    net, x, y = build(drawn)
    net.eval()
    problem = fl.Problem(net, drawn.loss, (x, y))
    before, f = heads(problem), net(x).detach()
    places = Counter[str]()
    for name in MOVES:
        after = applied(name, problem, drawn.seed)
        if isinstance(after, str):
            assert "\n" not in after
            refused = f"transform {name}: cannot be applied to this network: "
            assert after.startswith(refused) or "cannot be copied" in after
            continue
        places[name] = len(after.links)
        assert float((after.model(x).detach() - f).abs().max()) <= 1e-9 * float(f.abs().max()), name
        weights = zip(net.state_dict().values(), after.model.state_dict().values(), strict=True)
        assert max(float((new - old).abs().max()) for old, new in weights) > 1e-3, name
        report = heads(after.problem)
        for part in PARTS:
            was, now = number(before, part), number(report, part)
            assert (now is None) == (was is None), (name, part)
            assert was is None or now == pytest.approx(was, rel=1e-6), (name, part)
    places[MEASURE] = number(before, MEASURE) is not None
    return places


def alone(name: str, variant: int) -> Drawn:
    """A stage without others around it."""
    space, loss = (("tokens", "cross_entropy"), ("ids", "half_squared_error"))[variant]
    own = zlib.crc32(name.encode()) + variant
    return Drawn(space, ((name, variant),), 5, 3, (4, 2)[variant], 2, loss, 1, 0, own)


@pytest.mark.parametrize("variant", range(2))
@pytest.mark.parametrize("name", ATTENTION)
def test_a_stage_alone_keeps_its_function(name: str, variant: int) -> None:
    places = moved(alone(name, variant))
    if name in WITHOUT:
        assert not any(places[move] for move in MOVES[:3])
        assert not places[MEASURE]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_stages_around_it_change_nothing(part: int) -> None:
    found: list[Counter[str]] = []

    @seed(part)
    @settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(networks("attention"))
    def every(network: Drawn) -> None:
        if network.loss != "log_cosh":  # a function, that a Problem is given as such
            found.append(moved(network))

    every()
    assert sum(places[MEASURE] for places in found) > len(found) / 3
    for name in MOVES[:5]:
        assert sum(places[name] > 0 for places in found) > len(found) / 6, name
