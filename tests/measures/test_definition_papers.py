"""The papers that cards cite."""

from __future__ import annotations

import flatlens as fl
from flatlens.measures.definition import PAPERS


def test_the_first_word_of_every_source_names_its_paper() -> None:
    assert {card.source.split()[0] for card in fl.catalogue()} <= {*PAPERS, "flatlens"}
