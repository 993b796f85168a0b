"""Every sentence of a report's answer is said where it is true, and not where it is not."""

import math

import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens.estimate import Estimate, undefined
from flatlens.measures.answer import accuracy_by_chance, answer, state_of

ABOUT = {"n": 200, "constant": {"loss": 2.3, "share": 0.1}}


def rows(**values: float | Estimate) -> dict[tuple[str, None], Estimate]:
    return {(name, None): v if isinstance(v, Estimate) else Estimate(v) for name, v in values.items()}


def said(about: dict = ABOUT, **values: float | Estimate) -> str:
    found = answer(rows(**values), about)
    assert len(found) <= 3
    return " ".join(found)


def test_random_weights_are_said_first_and_no_others_are_called_untrained() -> None:
    untrained = {**ABOUT, "origin": {"weights": "random (seed 0)"}}
    assert answer(rows(loss=0.01), untrained)[0] == "The network is untrained: its weights are random."
    assert "untrained" not in said({**ABOUT, "origin": {"weights": "net.pt"}}, loss=0.01)


@pytest.mark.parametrize(
    ("loss", "accuracy", "wanted"),
    [
        (0.01, 1.0, "The network fits the data: its loss is 0.01, its accuracy 100%, and the best constant prediction "
         "has a loss of 2.3."),
        (1.5, 0.4, "The loss of the network is 1.5, its accuracy 40%, and the best constant prediction has a loss of "
         "2.3."),
        (2.29, 0.1, "The network hardly fits these data: its loss is 2.29, its accuracy 10%, and the best "
         "constant prediction has a loss of 2.3. Is it trained?"),
        (2.5, 0.6, "The loss of the network is 2.5, its accuracy 60%, and the best constant prediction has a loss of "
         "2.3: the network's wrong predictions are very confident."),
        (7.0, 0.3, "The network does not fit these data: its loss is 7, its accuracy 30%, and the best "
         "constant prediction has a loss of 2.3. Is it trained, and with this preparation of the data?"),
    ],
)  # fmt: skip
def test_the_fit_is_judged_against_constant_outputs(loss: float, accuracy: float, wanted: str) -> None:
    assert answer(rows(loss=loss, accuracy=accuracy), ABOUT)[0] == wanted


def test_without_a_loss_or_a_constant_fit_nothing_is_said_about_the_fit() -> None:
    assert "fit" not in said(mls=1.0)
    assert answer(rows(loss=7.0), {"n": 200, "constant": None})[0] == "The loss of the network is 7."
    assert answer(rows(loss=undefined("no")), ABOUT) == ["loss is undefined: no."]


def test_the_gap_has_its_interval() -> None:
    gap = Estimate(0.3, 0.05, "estimate")
    assert "; the gap to held-out data is 0.3 ± 0.098." in answer(rows(loss=0.01, generalisation_gap=gap), ABOUT)[0]
    assert "gap" not in answer(rows(loss=0.01, generalisation_gap=undefined("one sample")), ABOUT)[0]


def test_an_accuracy_by_chance_is_within_the_error_of_the_most_frequent_class() -> None:
    assert accuracy_by_chance(0.1, 100) == pytest.approx(0.1 + 1.96 * 0.03)
    assert "Is it trained?" in said(loss=2.3, accuracy=0.14)
    assert "Is it trained?" not in said(loss=2.3, accuracy=0.15)


def test_a_gradient_that_lowers_the_loss_by_a_tenth_is_no_minimum() -> None:
    steep, flat = {**ABOUT, "gradient_norm": 1.0}, {**ABOUT, "gradient_norm": 0.1}
    numbers = {"loss": 1.0, "sharpness": Estimate(1.0, kind="lower bound")}
    assert "this is not a minimum, as a step along the gradient (norm 1) lowers the loss by about 50%" in said(
        steep, **numbers
    )
    assert "minimum" not in said(flat, **numbers)
    assert "minimum" not in said(steep, **{**numbers, "loss": 2.3})  # it hardly fits
    assert "minimum" not in said({**steep, "origin": {"weights": "random (seed 0)"}}, **numbers)
    assert "minimum" not in said(steep, **{**numbers, "sharpness": -1.0})


def test_constant_features_are_unusual_from_a_tenth_on() -> None:
    few, many = ({"layer": "2", "constant": number, "features": 30} for number in (2, 3))
    assert "3 of 30 features that 2 reads are constant" in said({**ABOUT, "constant_features": many}, mls=1.0)
    assert "Unusual" not in said({**ABOUT, "constant_features": few}, mls=1.0)


def test_lost_directions_are_unusual_from_half_of_the_samples_on() -> None:
    def volume(lost: int, note: str = "") -> Estimate:
        return Estimate(-1.0, samples=torch.tensor([-math.inf] * lost + [-1.0] * (4 - lost)), note=note)

    assert "at 2 of 4 samples the outputs do not respond in every direction" in said(log_volume=volume(2))
    assert "Unusual" not in said(log_volume=volume(1))
    assert "Unusual" not in said(log_volume=volume(2, "the network ends in a softmax"))  # there it is known


def test_few_numbers_are_described_each_with_its_error() -> None:
    assert said(mls=2.0).startswith("mls is 2, exact for these 200 samples, up to rounding.")
    sharpness = Estimate(4.0, kind="lower bound", note="an eigenvalue lies within 0.1; a larger eigenvalue may exist")
    told = answer(rows(sharpness=sharpness, hessian_trace=Estimate(9.0, 1.0, "estimate")), ABOUT)[0]
    assert told == (
        "sharpness is at least 4: an eigenvalue lies within 0.1; a larger eigenvalue may exist; "
        "hessian_trace is 9 ± 2 (95% interval)."
    )
    assert answer(rows(log_volume=undefined("no rank")), ABOUT) == ["log_volume is undefined: no rank."]


def test_of_many_numbers_those_that_are_not_exact_are_named() -> None:
    many = {
        "mls": 1.0,
        "weight_norm": 2.0,
        "sharpness": Estimate(4.0, kind="lower bound"),
        "log_volume": undefined("no"),
    }
    told = said(**many, hessian_trace=Estimate(9.0, 1.0, "estimate"))
    assert "2 of 5 numbers are exact for these 200 samples" in told
    assert "sharpness is a lower bound; log_volume is undefined; hessian_trace (± 2) is an estimate." in told
    assert "The 2 numbers are exact for these 200 samples, up to rounding." in said(mls=1.0, weight_norm=2.0)


def test_an_accuracy_without_classes_is_not_among_many_numbers() -> None:
    many = {"mls": 1.0, "weight_norm": 2.0, "loss": 1.0, "sharpness": 3.0}
    assert "The 4 numbers are exact" in said(**many, accuracy=undefined("no classes"))
    assert "accuracy is undefined: no classes" in said(accuracy=undefined("no classes"))


def test_networks_are_compared_by_what_no_rescaling_changes() -> None:
    assert said(mls=1.0).endswith(
        "Compare networks by mls, which is invariant under layer-wise and neuron-wise rescaling."
    )
    assert said(mls=1.0, weight_norm=1.0).endswith(
        "which is invariant under layer-wise and neuron-wise rescaling; weight_norm is not."
    )
    moved = "Rescaling the weights can change weight_norm without changing the function"
    assert said(weight_norm=1.0).endswith(
        f"{moved}: compare networks by an invariant measure, such as adaptive_sharpness."
    )
    assert "Rescaling" not in said(loss=0.1)
    assert "compare" not in said(mls=undefined("no"))


def test_a_part_is_counted_only_where_its_measure_is_not() -> None:
    assert "The 2 numbers" in said(**{"relative_flatness.sum": 1.0, "mls": 1.0})
    assert "The 2 numbers" in said(**{"relative_flatness.sum": 1.0, "relative_flatness": 1.0, "mls": 1.0})


def lens(loss: str, x: torch.Tensor, y: torch.Tensor, net: nn.Module) -> fl.Lens:
    return fl.Lens(fl.Problem(net.double(), loss, (x.double(), y)))


def test_the_state_of_a_network_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].bias[:3] = -100.0  # three of four units are dead
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    one = lens("cross_entropy", x, y, net)
    state = state_of(one, fl.measure(one, "sharpness"))
    nn.functional.cross_entropy(net(x.double()), y).backward()
    assert state["gradient_norm"] == pytest.approx(
        math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
    )
    assert state["constant_features"] == {"layer": "2", "constant": 3, "features": 4}
    assert "gradient_norm" not in state_of(one, fl.measure(one, "mls"))


def test_a_measured_report_has_the_answer_and_keeps_it(tmp_path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.randint(3, (60,))
    net = nn.Linear(3, 3)
    report = fl.measure(lens("cross_entropy", x, y, net), ["loss", "mls"])
    assert report.answer == answer(report, report.about)
    report.save(tmp_path / "r")
    assert fl.Report.load(tmp_path / "r").answer == report.answer
    assert " ".join(repr(report).split()).startswith(report.answer[0])
