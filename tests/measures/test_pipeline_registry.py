"""Names of measures: read, ordered and refused."""

from __future__ import annotations

import pytest
from networks import lens

import flatlens as fl
from flatlens.errors import BadInput, UnknownName


def test_names_and_options() -> None:
    one = lens()
    assert fl.measures.local_volume(top_k=3).key == "local_volume(top_k=3)"
    assert fl.measures.local_volume(top_k=None).key == "local_volume"
    assert fl.measure(one, ["local_volume(top_k=2)"]).measures() == ["local_volume(top_k=2)"]
    with pytest.raises(UnknownName, match="did you mean mls"):
        fl.measure(one, ["mlss"])
    with pytest.raises(UnknownName, match="did you mean top_k"):
        fl.measures.local_volume(topk=3)
    with pytest.raises(BadInput, match="takes no options"):
        fl.measures.nmls(top_k=3)
    with pytest.raises(BadInput, match="between 1 and the number of outputs, 3"):
        fl.measure(one, ["log_volume(top_k=4)"])
    with pytest.raises(BadInput, match="write a name"):
        fl.measure(one, ["local_volume(3)"])
    with pytest.raises(UnknownName, match="fc9"):
        fl.measure(one, "pass")["mls", "fc9"]


@pytest.mark.parametrize(
    ("spelling", "meant"), [("hessian-trace", "hessian_trace"), ("mls sharpness", "mls, sharpness")]
)
def test_a_name_in_another_spelling_is_recognised(spelling: str, meant: str) -> None:
    with pytest.raises(BadInput, match=rf"write a name.*; did you mean {meant}\?$"):
        fl.measures.named(spelling)


def test_names_follow_the_catalogue_and_may_carry_options() -> None:
    """Rows M, then H, P and D, each by its number; an option is part of the name."""
    rows = [card.id for card in fl.catalogue()]
    assert rows == sorted(rows, key=lambda row: ("MHPD".index(row[0]), int(row[1:])))
    one, two = fl.measures.named(["local_volume(top_k=2)", fl.measures.mls])
    assert (one.key, two.key) == ("local_volume(top_k=2)", "mls")
    assert [one.key for one in fl.measures.named("mls")] == ["mls"]
