"""The cache, its freshness, and what a report keeps."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from networks import lens, module_of, network
from torch import nn

import flatlens as fl
from flatlens.errors import BadFolder, BadInput, StaleLens


def test_a_call_has_one_pass_and_nothing_is_computed_twice() -> None:
    one = lens()
    fl.measure(one, ["mls", "nmls", "relative_flatness_ggn"])
    assert one.passes == 1
    assert {key for key, _ in one.per_sample([])} == {"mls", "nmls", "relative_flatness_ggn"}
    fl.measure(one, ["nmls"])
    assert one.passes == 1
    fl.measure(one, "pass")
    assert one.passes == 2
    fl.measure(one, ["kappa_trace"])
    report = fl.measure(one, ["local_volume(top_k=1)"])  # in no preset
    assert one.passes == 3
    assert report.about["passes"] == 3
    assert report["local_volume(top_k=1)"].value == pytest.approx(fl.measure(one, "pass")["mls"].value)


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-tanh", "residual", "twice-relu", "attention", "bare"])
def test_a_pass_for_inputs_alone_has_the_same_numbers_and_reads_no_loss(name: str) -> None:
    net, x, y = network(name)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    whole = fl.measure(fl.Lens(problem), "pass")
    with patch.object(type(problem.loss), "values", side_effect=RuntimeError("the loss is read")):
        alone = fl.measure(fl.Lens(problem), ["mls", "jacobian_frobenius", "log_volume"])
    assert alone.about["passes"] == 1
    for key, estimate in alone.items():
        assert estimate.value == pytest.approx(whole[key].value, rel=1e-12, nan_ok=True), key


def test_a_loss_that_is_asked_for_comes_from_the_pass() -> None:
    net, x, y = network("mlp-tanh")
    problem = fl.Problem(net, "cross_entropy", (x, y))
    with patch("flatlens.measures.lens.outcomes", side_effect=RuntimeError("another forward pass")):
        report = fl.measure(fl.Lens(problem), ["mls", "loss"])
    assert report["loss"].value == pytest.approx(nn.functional.cross_entropy(net(x), y).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-tanh", "residual", "twice-relu", "attention", "bare"])
def test_numbers_that_a_pass_has_are_those_of_products(name: str) -> None:
    net, x, y = network(name)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    alone, whole = fl.measure(fl.Lens(problem), ["fisher_rao", "output_norm"]), fl.measure(fl.Lens(problem), "pass")
    for key in ("fisher_rao", "fisher_rao.parameters", "output_norm"):
        assert whole[key].value == pytest.approx(alone[key].value, rel=1e-12)
    assert [report["fisher_rao.parameters"].products for report in (alone, whole)] == [1, 0]


@pytest.mark.parametrize("change", ["in place", "replaced", "data", "in data", "buffer"])
def test_a_changed_model_is_stale(change: str) -> None:
    net, x, y = network("residual")
    one = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    fl.measure(one, "pass")
    with torch.no_grad():
        if change == "in place":
            net.head.weight.mul_(2)
        elif change == "replaced":
            net.head.weight = nn.Parameter(net.head.weight * 2)
        elif change == "in data":
            net.head.weight.data.copy_(net.head.weight.data.flip(0))  # bumps no version, keeps the norm
        elif change == "data":
            net.head.weight.data = net.head.weight.data * 2
        else:
            net.norm.running_mean.add_(1)
    name = "norm.running_mean" if change == "buffer" else "head.weight"
    with pytest.raises(StaleLens, match=f"'{name}' changed.*new Lens"):
        fl.measure(one, "pass")


def test_a_report_survives_its_file(tmp_path) -> None:
    report = fl.measure(lens("mlp-tanh"), "pass")
    report.save(tmp_path / "r.safetensors")
    back = fl.Report.load(tmp_path / "r.safetensors")
    assert back.about == report.about
    assert list(back) == list(report)
    for key in report:
        assert repr(back[key]) == repr(report[key])
        if report[key].samples is not None:
            assert torch.equal(back[key].samples, report[key].samples)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    with pytest.raises(BadFolder, match="cannot be written"):
        report.save(tmp_path / "no such folder" / "r.safetensors")
    (tmp_path / "r.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="not a saved report"):
        fl.Report.load(tmp_path / "r.safetensors")


def test_parameters_count_as_they_are_when_the_lens_is_made() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    net[0].requires_grad_(False)
    data = torch.randn(6, 3).double(), torch.arange(6) % 2
    problem = fl.Problem(net, "cross_entropy", data)
    frozen = fl.measure(fl.Lens(problem), ["ggn_trace"])["ggn_trace"].value
    part = problem.subset(6, torch.Generator())
    net.requires_grad_(True)
    whole = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), ["ggn_trace"])["ggn_trace"].value
    assert frozen < whole
    for earlier in (problem, part):
        assert fl.measure(fl.Lens(earlier), ["ggn_trace"])["ggn_trace"].value == pytest.approx(whole, rel=1e-12)


ZERO = ["sharpness", "ggn_norm", "gradient_noise_scale", "directional_sharpness", "critical_sharpness"]


def test_slopes_that_underflow_are_no_zero() -> None:
    """Of 1e-52, as float64 has it; float32 ends at 1e-45, and every product is 0 in it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        network[2].bias[0] += 120.0
    x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
    found = fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", (x, y))), ZERO)
    for name in ZERO:
        assert found[name].kind == "undefined", name
        assert "the loss's slopes underflow torch.float32: use Problem(dtype=torch.float64)" in found[name].note
    mended = fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", (x, y), dtype=torch.float64)), ZERO[:1])
    assert 0 < mended["sharpness"].value < 1e-45


@pytest.mark.parametrize(("loss", "mend"), [(nn.NLLLoss(), True), (nn.L1Loss(), False), ("cross_entropy", None)])
def test_zeros_of_a_linear_loss_say_so(loss: nn.Module | str, mend: bool | None) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.LogSoftmax(-1))
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    y = torch.randn(6, 2) if isinstance(loss, nn.L1Loss) else y
    found = fl.measure(fl.Lens(fl.Problem(network, loss, (x, y))), ["ggn_trace", "ggn_norm", "sharpness", "mls"])
    for name in ("ggn_trace", "ggn_norm"):
        assert (
            (found[name].value == 0) == ("the loss is linear in the outputs" in found[name].note) == (mend is not None)
        )
        assert (
            "loss='cross_entropy', before the network's log_softmax, has the same values" in found[name].note
        ) == bool(mend)
    assert not any("linear" in found[name].note for name in ("sharpness", "mls"))


def test_a_zero_that_is_one_stays() -> None:
    network = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        network[0].weight.abs_().neg_()  # no unit is alive
    x, y = torch.rand(6, 3), torch.zeros(6, dtype=torch.long)
    found = fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", (x, y))), ZERO)
    assert (found["sharpness"].value, found["sharpness"].kind) == (0, "exact")
    assert "underflow" not in "".join(found[name].note for name in ZERO)


def deep(depth: int, kind: str) -> nn.Module:
    """Many layers, plain or with norms, skips, or one parameter that every layer's input reads."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(net.layers, net.norms, strict=True):
            z = torch.tanh(layer(norm(x + net.shift if kind == "shifted" else x)))
            x = z if kind == "chain" else x + z
        return x

    net = module_of(
        forward,
        layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(depth)),
        norms=nn.ModuleList(nn.LayerNorm(2) if kind == "normed" else nn.Identity() for _ in range(depth)),
        shift=nn.Parameter(torch.ones(2)),
    )
    for layer in net.layers:
        nn.init.orthogonal_(layer.weight)  # so that no depth makes slopes vanish
    return net


def lines_run(depth: int, kind: str) -> Counter[tuple[str, int]]:
    """How often each line of flatlens runs: a loop's line once for each of its turns."""
    torch.manual_seed(0)
    net, x = deep(depth, kind).double(), torch.randn(3, 2, dtype=torch.float64)
    counts: Counter[tuple[str, int]] = Counter()
    inside = str(Path(fl.__file__).parent)

    def local(frame: FrameType, event: str, given: object) -> Any:
        if event == "line":
            counts[frame.f_code.co_filename, frame.f_lineno] += 1
        return local

    def entered(frame: FrameType, event: str, given: object) -> Any:
        return local(frame, "line", None) if frame.f_code.co_filename.startswith(inside) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        one = fl.Lens(fl.Problem(net, "half_squared_error", (x, torch.zeros_like(x))))
        fl.measure(one, ["mls", "ggn_trace"])
        if kind in ("skips", "shifted"):
            fl.check_bounds(one)
    finally:
        sys.settrace(before)
    return counts


@pytest.mark.parametrize("kind", ["chain", "skips", "normed", "shifted"])
def test_work_grows_linearly_with_the_number_of_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 20 to 40 layers a line runs twice as often more as from 10 to 20; where work is quadratic, four times.

    The checks of derivatives take the same of their ways at every depth: which one is left to the numbers.
    """
    monkeypatch.setattr("flatlens.perturbation.autograd_check._ROUGH", math.inf)
    for tolerance in ("_APART", "_AGREE"):  # no difference agrees with a slope, or with another difference
        monkeypatch.setattr(f"flatlens.perturbation.autograd_check.{tolerance}", -1.0)
    lines_run(2, kind)  # what is made once a process
    few, some, many = (lines_run(depth, kind) for depth in (10, 20, 40))
    assert max(many.values()) > 1000
    for line, times in many.items():
        assert times - some[line] <= 2.7 * (some[line] - few[line]) + 200, line  # 200: one more chunk
    assert sum(many.values()) - sum(some.values()) <= 2.3 * (sum(some.values()) - sum(few.values()))
