"""The papers that cards cite."""

from __future__ import annotations

import pytest

import flatlens as fl
from flatlens.measures.papers import PAPERS, paper


def test_every_source_is_a_known_paper() -> None:
    for card in fl.catalogue():
        assert paper(card.source)


def test_the_first_word_of_a_source_names_its_paper() -> None:
    assert paper("relative2021 Def. 3") == PAPERS["relative2021"]
    assert "2021" in paper("relative2021 Def. 3")
    with pytest.raises(KeyError):
        paper("nobody2021 Def. 3")
