"""What cannot be computed is undefined, with its reason, and takes no other number with it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from networks import applied, elementwise
from torch import Tensor, nn

import flatlens as fl
from flatlens.errors import BadOption, StaleLens, Unexpected
from flatlens.estimate import Report
from flatlens.measures.definition import PassMeasure, on_lens

NAMES = ["mls", "ggn_trace", "relative_flatness", "local_volume", "fisher_rao", "loss", "sharpness", "hessian_trace"]


def problem(seed: int = 0, outputs: int = 3, act: nn.Module | None = None) -> fl.Problem:
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 5), act or nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))
    x = torch.randn(12, 4, generator=draw, dtype=torch.float64)
    return fl.Problem(net.double(), "cross_entropy", (x, torch.arange(12) % 3))


def values(report: Report) -> dict[Any, tuple[float, str]]:
    return {key: (e.value, e.kind) for key, e in report.items() if e.kind != "undefined"}


KNOWN = {"memory of numpy": MemoryError("Unable to allocate 7.28 TiB for an array"),
         "memory of torch": RuntimeError("not enough memory: you tried to allocate 8000000000000 bytes."),
         "memory of CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
         "derivative": RuntimeError("derivative for aten::odd is not implemented"),
         "torch": torch.linalg.LinAlgError("linalg.eigh: failed to converge")}  # fmt: skip
WORDS = {"memory of numpy": "memory ran out (Unable to allocate 7.28 TiB", "memory of torch": "8000000000000 bytes",
         "memory of CUDA": "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB",
         "derivative": "cannot be differentiated", "torch": "torch failed"}  # fmt: skip


def failing(measure: fl.Measure, error: Exception, at: int = 0) -> fl.Measure:
    """The same measure, which fails at the `at`-th of the places where it is evaluated."""
    calls: list[int] = []

    @wraps(measure.compute)
    def compute(*given: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == at + 1:
            raise error
        return measure.compute(*given, **options)

    return replace(measure, compute=compute)


@pytest.mark.parametrize(("name", "kind"), list(zip(NAMES, [*KNOWN, *KNOWN], strict=False)))
def test_a_measure_that_fails_leaves_the_others_as_they_are(name: str, kind: str) -> None:
    alone = fl.measure(fl.Lens(problem()), NAMES)
    known = fl.measures.MEASURES
    some = [failing(known[one], KNOWN[kind]) if one == name else known[one] for one in NAMES]
    report = fl.measure(fl.Lens(problem()), some)
    lost = {key for key in values(alone) if key not in values(report)}
    others = {"hessian_trace"} if name == "ggn_trace" else set()  # what is a sum with it
    assert {key[0].partition(".")[0] for key in lost} <= {name, *others}
    assert any(WORDS[kind] in report[key].note for key in lost if key in report)
    assert values(report) == {key: value for key, value in values(alone).items() if key not in lost}


@pytest.mark.parametrize("name", ["mls", "ggn_trace", "relative_flatness"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_layer_that_fails_leaves_the_other_layers(name: str, at: int) -> None:
    one = fl.measures.MEASURES[name]
    assert isinstance(one, PassMeasure)
    alone = fl.measure(fl.Lens(problem()), name)
    report = fl.measure(fl.Lens(problem()), failing(one, RuntimeError("not enough memory"), at))
    layers = {layer: e for (row, layer), e in report.items() if row == name and layer is not None}
    assert [e.kind for e in layers.values()].count("undefined") == 1
    assert len(layers) == 3
    for layer, found in layers.items():
        assert found.kind == "undefined" or found.value == alone[name, layer].value


def test_what_flatlens_did_not_foresee_is_undefined_and_a_warning() -> None:
    lens = fl.Lens(problem())
    one = fl.measures.MEASURES["mls"]

    def wrong(*given: Any) -> Any:
        return [][1]

    wrong.__code__ = wrong.__code__.replace(co_filename=fl.__file__)  # as if it were flatlens' own
    with pytest.raises(Unexpected, match="mls: an unexpected error, please report it \\(IndexError"):
        fl.measure(lens, [replace(one, compute=wrong), "loss"])  # in tests a warning of this kind is an error
    with pytest.warns(Unexpected, match="IndexError"):
        report = fl.measure(lens, [replace(one, compute=wrong), "loss"])
    assert "IndexError" in report["mls"].note
    assert report["loss"].kind == "exact"


def test_a_measure_of_the_user_s_own_that_fails_is_told_with_its_line() -> None:
    @on_lens(id="own", family="own", symbol="x", source="nowhere", unit="")
    def own(lens: fl.Lens) -> fl.Estimate:
        raise ValueError("as told")

    report = fl.measure(fl.Lens(problem()), [own, "loss"])
    assert "ValueError: as told (test_lens_failing.py, line" in report["own"].note
    assert report["loss"].kind == "exact"


def test_what_spoils_every_number_is_raised() -> None:
    lens = fl.Lens(problem())
    known = fl.measures.MEASURES["mls"]
    for error in (KeyboardInterrupt(), BadOption("as told"), StaleLens("as told")):
        with pytest.raises(type(error)):
            fl.measure(lens, [failing(known, error), "loss"])  # type: ignore[arg-type]


Once = elementwise("Once", torch.sin, torch.cos, once=True)


@pytest.mark.parametrize("outputs", [3, 20, 150])
@pytest.mark.parametrize("function", ["once", "cdist"])
def test_a_function_that_is_differentiable_once_costs_second_derivatives_alone(function: str, outputs: int) -> None:
    def near(x: Tensor) -> Tensor:
        return torch.cdist(x[:, None], torch.eye(5).to(x).expand(len(x), -1, -1))[:, 0]

    def plainly_near(x: Tensor) -> Tensor:
        return (x[:, None] - torch.eye(5).to(x)).norm(dim=2)

    marked, plain = {"once": (Once.apply, torch.sin), "cdist": (near, plainly_near)}[function]
    report = fl.measure(fl.Lens(problem(1, outputs, applied(marked))), "pass")
    truth = fl.measure(fl.Lens(problem(1, outputs, applied(plain))), "pass")
    assert {"loss", "ggn_trace", "jacobian_frobenius", "weight_norm"} <= {key for (key, _) in values(report)}
    for key, (value, _) in values(report).items():
        assert value == pytest.approx(truth[key].value, rel=1e-6), key
    lost = [report[key] for key in values(truth) if key not in values(report)]
    assert all("differentiable" in one.note or "derivative" in one.note for one in lost)


def test_memory_that_runs_out_in_the_pass_leaves_what_needs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.")

    monkeypatch.setattr(sys.modules["flatlens.grams.data_pass"], "output_jacobians", full)
    lens = fl.Lens(problem())
    report = fl.measure(lens, "pass")
    assert report["loss"].kind == report["weight_norm"].kind == "exact"
    assert "4096 bytes" in report["mls"].note
    assert "memory=" in report["mls"].note
    monkeypatch.undo()
    assert math.isfinite(fl.measure(lens, "mls")["mls"].value)  # the same lens, with memory again
