"""The card of a measure, and what a measure is made from."""

from __future__ import annotations

import pytest
import torch

import flatlens as fl
from flatlens.errors import BadInput, BadOption, UnknownName
from flatlens.grams import LayerGrams
from flatlens.measures import largest, named
from flatlens.measures.definition import FUNCTION, on_lens, per_sample


def test_the_catalogue_has_a_card_for_every_measure() -> None:
    for card in fl.catalogue():
        assert card.meaning.endswith((".", ":"))
        assert card.source
        assert card.unit
        assert card.name in fl.measures.MEASURES


def test_a_function_becomes_a_measure_with_its_docstring_as_meaning() -> None:
    """A row that is not of the catalogue is measured, and not registered."""

    @per_sample(
        id="own", family="compression", symbol="b", source="nowhere", unit="", reduce=largest, place="input",
        needs={"G"}, answer="input", invariant_under=FUNCTION,
    )  # fmt: skip
    def biggest(g: LayerGrams) -> torch.Tensor:
        """Largest squared Frobenius norm."""
        return g.G.diagonal(dim1=1, dim2=2).sum(1)

    W, x = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double(), torch.ones(2, 2).double()
    net = torch.nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(W)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, x))), [biggest])
    assert report["biggest"].value == pytest.approx(25.0)
    assert biggest.card.meaning == "Largest squared Frobenius norm."
    assert "biggest" not in fl.measures.MEASURES


def test_a_measure_of_the_network_is_a_function_of_the_lens() -> None:
    @on_lens(id="own", family="norm", symbol="n", source="nowhere", unit="", invariant_under=FUNCTION)
    def samples(lens: fl.Lens, *, times: int = 1) -> fl.Estimate:
        """Number of samples."""
        return fl.Estimate(float(times * lens.problem.n), kind="exact")

    net, x = torch.nn.Linear(2, 2), torch.ones(5, 2)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, x))), [samples, samples(times=3)])
    assert (report["samples"].value, report["samples(times=3)"].value) == (5.0, 15.0)
    with pytest.raises(UnknownName, match="times"):
        samples(time=3)


def test_options_are_part_of_the_key_unless_they_are_the_default() -> None:
    assert fl.measures.local_volume(top_k=None).key == "local_volume"
    assert fl.measures.local_volume(top_k=2).key == "local_volume(top_k=2)"
    with pytest.raises(BadInput, match="takes no options"):
        fl.measures.nmls(top_k=3)


@pytest.mark.parametrize(
    "name", ["sharpness(rtol=2)", "hessian_trace(probes=1)", "local_volume(top_k=9)", "average_sharpness(rho=-1)"]
)
def test_a_wrong_option_is_refused_with_its_measure(name: str) -> None:
    x = torch.ones(5, 2)
    lens = fl.Lens(fl.Problem(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), "mse", (x, x)))
    measure, _, option = name.rstrip(")").partition("(")
    with pytest.raises(BadOption, match=f"^measure {measure}: option {option}: "):
        fl.measure(lens, name)


@pytest.mark.parametrize(
    "spelling", ["mls(softmax='no')", "matrix_normalized_sharpness(frobenius=1)", "sharpness(layers=5)",
                 "hessian_trace(exact='no')", "local_volume(top_k=True)"],
)  # fmt: skip
def test_flags_are_flags_and_nothing_else_is(spelling: str) -> None:
    with pytest.raises(BadOption, match=r"True (or|and) False"):
        named([spelling])
