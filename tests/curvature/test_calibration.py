"""Error bars that hold what they promise, and numbers that must agree with one another or with printed formulas."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from networks import network
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.functional_hessian import PRODUCT_OUTPUTS, curved_parameters
from flatlens.curvature.probes import mean_of_forms, student

torch.set_num_threads(1)

RUNS = 400
NETS = ["mlp-tanh", "mlp-gelu", "cnn-tanh", "attention"]


def draw(name: str, weighted: bool, probes: int, seed: int = 0) -> tuple[float, Tensor]:
    """(the exact trace of the functional Hessian, that many independent estimates of it)."""
    net, x, y = network(name, n=4)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    plan = fl.Lens(problem).plan
    curved = curved_parameters(problem, plan)
    exact, _ = curved.exact_traces(net, weighted=weighted)
    generator = torch.Generator().manual_seed(seed)
    drawn = curved.traces(net, probes=probes, weighted=weighted, generator=generator)
    return sum(exact.values()), torch.stack(list(drawn.values())).sum(0)


def coverage(truth: float, values: Tensor, probes: int) -> float:
    """How often Student's interval of so many probes holds the truth: these probes are near normal."""
    mean, stderr = student(values[: RUNS * probes].reshape(probes, RUNS))
    return float(((mean - truth).abs() <= 1.96 * stderr).double().mean())


@pytest.mark.parametrize(
    ("name", "weighted"), [*((name, False) for name in NETS), ("mlp-tanh", True), ("mlp-gelu", True)]
)
def test_four_probes_are_enough_for_an_honest_error(name: str, weighted: bool) -> None:
    truth, values = draw(name, weighted, 4 * RUNS)
    assert 0.92 <= coverage(truth, values, 4) <= 0.98
    assert abs(float(values.mean()) - truth) <= 4 * float(values.std()) / len(values) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_errors_at_any_number_of_probes(name: str, weighted: bool) -> None:
    truth, values = draw(name, weighted, 32 * RUNS)
    for probes in (2, 4, 8, 32):
        assert 0.92 <= coverage(truth, values, probes) <= 0.98, probes
    assert abs(float(values.mean()) - truth) <= 4 * float(values.std()) / len(values) ** 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_probes_do_not_depend_on_the_chunk(weighted: bool) -> None:
    """Of a dense layer, of one with many positions, and of a norm's parameters, which all samples of a block share."""
    torch.manual_seed(0)
    inside = [nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4), nn.LayerNorm(4), nn.Tanh()]
    net, x = nn.Sequential(*inside, nn.Linear(4, 2)).double(), torch.randn(140, 2, 4, dtype=torch.float64)
    rows, memory = [], 10**9
    for _ in range(2):
        problem = fl.Problem(net, "cross_entropy", (x, torch.arange(140) % 2), memory=memory)
        plan = fl.Lens(problem).plan
        generator = torch.Generator().manual_seed(1)
        drawn = curved_parameters(problem, plan).traces(net, probes=3, weighted=weighted, generator=generator)
        assert "4.weight" in drawn
        rows.append(torch.stack(list(drawn.values())))
        memory = 50 * 4 * plan.bytes_per_sample(PRODUCT_OUTPUTS)
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(("key", "weighted"), [("hessian_trace", False), ("adaptive_sharpness", True)])
def test_a_measure_adds_its_probes_to_the_gauss_newton_part(key: str, weighted: bool) -> None:
    net, x, y = network("mlp-gelu", n=4)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    report = fl.measure(lens, [f"{key}(probes=6)"], generator=torch.Generator().manual_seed(5))
    whole = report[f"{key}(probes=6)"]
    _, values = draw("mlp-gelu", weighted, 6, seed=5)
    mean, stderr = mean_of_forms(values)
    assert whole.value == pytest.approx(report[f"{key}(probes=6).gauss_newton"].value + float(mean), rel=1e-12)
    assert whole.stderr == pytest.approx(float(stderr), rel=1e-10)
    assert (whole.kind, whole.products) == ("estimate", 6)
    rows = [report[f"{key}(probes=6)", layer] for layer in ("0", "2", "4")]
    assert sum(row.value for row in rows) == pytest.approx(whole.value, rel=1e-12)
    assert rows[2].stderr == 0
    assert rows[2].kind == "exact"  # the last layer does not bend


@cache
def traced(name: str, key: str) -> tuple[float, list[fl.Estimate]]:
    """The exact value, and estimates of it from other seeds."""
    net, x, y = network(name, n=4)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    exact = fl.measure(lens, [f"{key}(exact=True)"])[f"{key}(exact=True)"].value
    runs = [fl.measure(lens, [f"{key}(rtol=0.05)"], generator=torch.Generator().manual_seed(s)) for s in range(40)]
    return exact, [run[f"{key}(rtol=0.05)"] for run in runs]


@pytest.mark.parametrize(("name", "key"), [("mlp-gelu", "hessian_trace"), ("mlp-tanh", "adaptive_sharpness")])
def test_as_many_probes_as_the_tolerance_asks_for(name: str, key: str) -> None:
    exact, runs = traced(name, key)
    for run in runs:
        assert run.stderr <= 1.5 * 0.05 * abs(run.value)  # asked for of the value that the first probes gave
        assert abs(run.value - exact) <= 5 * run.stderr + 1e-10 * abs(exact)
        assert run.kind == ("exact" if run.stderr == 0 else "estimate")
    off = torch.tensor([run.value - exact for run in runs])
    assert float(off.square().mean().sqrt()) <= 0.06 * abs(exact)


@pytest.mark.parametrize("name", ["mlp-relu", "cnn-tanh", "twice-tanh", "residual", "attention"])
def test_blocks_and_the_whole(name: str) -> None:
    net, x, y = network(name)
    keys = ["hessian_trace(exact=True)", "sharpness(rtol=1e-09, layers=True)", "ggn_norm(rtol=1e-09, layers=True)"]
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), [*keys, "ggn_trace"])
    trace, top, ggn = ({at: e.value for (key, at), e in report.items() if key == wanted} for wanted in keys)
    assert sum(v for at, v in trace.items() if at is not None) == pytest.approx(trace[None], rel=1e-10)
    assert all(v <= top[None] * (1 + 1e-8) for v in top.values())
    assert all(v <= ggn[None] * (1 + 1e-8) for v in ggn.values())
    assert ggn[None] <= sum(v for at, v in ggn.items() if at is not None) * (1 + 1e-8)
    assert ggn[None] <= report["ggn_trace"].value
    if name in ("mlp-relu", "residual"):
        assert trace[None] == pytest.approx(report["ggn_trace"].value, rel=1e-10)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_printed_values_of_linear_regression(outputs: int) -> None:
    """f = w x under the squared error, not halved: kappa = 2 ||w||^2 lmax(mean x x^T) and 2 ||w||^2 mean ||x||^2,
    whatever w and the targets are; torch's mean over outputs takes their number from the 2."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        net, x = nn.Linear(6, outputs, bias=False).double(), torch.randn(9, 6).double()
        y = torch.randn(9, outputs).double()
    keys = ["layer_sharpness", "maximal_relative_flatness", "sharpness"]
    keys = [f"{key}(rtol=1e-9)" for key in keys] + ["relative_flatness", "hessian_trace", "kappa_trace"]
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, y))), keys)
    second = 2 / outputs * x.T @ x / 9
    norm, top, trace = net.weight.detach().square().sum(), torch.linalg.eigvalsh(second)[-1], second.trace()
    for key, truth in (
        ("layer_sharpness(rtol=1e-09).kappa", norm * top),
        ("relative_flatness", norm * trace),
        ("maximal_relative_flatness(rtol=1e-09)", norm * top),
        ("sharpness(rtol=1e-09)", top),
        ("hessian_trace", outputs * trace),
        ("kappa_trace", norm * outputs * trace),
    ):
        assert report[key].value == pytest.approx(float(truth), rel=1e-9), key
        assert report[key].margin == 0
