"""Gates on a whole batch: refused, or the same numbers whatever the size of the chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadModel

GATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mean": lambda h, level: h * (h.mean() > level),
    "mean of a feature": lambda h, level: h * (h.mean(0) > level),
    "largest": lambda h, level: h + (h.max() > level),
    "size": lambda h, level: h * (2 if len(h) > 20 * level else 1),
    "even": lambda h, level: h * (2 if len(h) % 2 else 1),
    "rank": lambda h, level: h * (1 + h[:, 0].argsort().argsort()[:, None] / 100),
    "top": lambda h, level: h * (h[:, :1] >= h[:, 0].topk(min(3, len(h))).values[-1]),
    "none": lambda h, level: h,
}
NAMES = ["mls", "hessian_trace", "sharpness", "ggn_norm"]


def gated(gate: Callable[[Tensor, float], Tensor], level: float) -> nn.Module:
    return module_of(
        lambda net, x: net.last(net.gate(net.first(x).tanh(), net.level)),
        first=(3, 4),
        last=(4, 2),
        gate=gate,
        level=level,
    )


def drawn(name: str, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    n = (9, 40, 130)[seed % 3]
    x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = gated(GATES[name], (-0.3, 0.0, 0.1, 0.3, 0.6)[seed % 5]).double()
    return net, (x, torch.arange(n) % 2)


def numbers(net: nn.Module, data: tuple[Tensor, Tensor], memory: str) -> list[float] | None:
    """The numbers, or None where the network is refused."""
    try:
        report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data, memory=memory)), NAMES)
    except BadModel:
        return None
    return [report[name].value for name in NAMES]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", GATES)
def test_numbers_do_not_depend_on_the_size_of_chunks(name: str, seed: int) -> None:
    net, data = drawn(name, seed)
    found = [numbers(net, data, memory) for memory in ("1GiB", "30KB", "8KB")]
    known = [one for one in found if one is not None]
    for one in known[1:]:
        assert one == pytest.approx(known[0], rel=2e-3, abs=1e-9)
    if name == "none":
        assert len(known) == len(found)
    if name in ("rank", "top"):
        assert not known


def test_a_network_that_was_trained_since_is_compared_anew() -> None:
    net, data = drawn("none", 1)
    problem = fl.Problem(net, "cross_entropy", data, memory="8KB")
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1)
    assert fl.measure(fl.Lens(problem), ["mls", "sharpness"])["sharpness"].kind == "lower bound"
    net.gate = GATES["mean"]
    net.level = float(net.first(data[0]).detach().tanh().mean()) + 1e-3
    with pytest.raises(BadModel, match="differ from those in larger chunks"):
        fl.measure(fl.Lens(problem), ["mls"])


def test_outputs_of_loaders_and_tokens_are_compared_by_their_place() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*drawn("none", 2)[1]), batch_size=50)
    net, (x, y) = drawn("none", 2)
    for data in (loader, (x, y)):
        problem = fl.Problem(net, "cross_entropy", data, memory="20KB")
        assert problem.seen is not None
        for number, raw in problem.shared(7):
            off = problem.seen.off(number, net(problem.place(raw)[0]))
            assert float(off) < 1e-12
            assert float(problem.seen.off(number, net(problem.place(raw)[0] + 1))) > 1e-3
