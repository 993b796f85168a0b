"""The picture of the edge of stability shows what its page says."""

import importlib.util
from pathlib import Path

import pytest

from flatlens.training import SGD, Adam, RMSProp

DOCS = Path(__file__).parent.parent / "docs"


def load():
    spec = importlib.util.spec_from_file_location("edge", DOCS / "edge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_full_batch_descent_reaches_two_over_the_learning_rate_and_hovers_there():
    edge = load()
    history = edge.history(SGD(0.25), steps=1000)
    sharpness = history[history["measure"] == edge.SHARPNESS].set_index("step")["value"]
    loss = history[history["measure"] == "loss"].set_index("step")["value"]
    assert (history["edge"] == 8.0).all()
    assert sharpness[0] < 4
    first = sharpness.index[sharpness > 8.0][0]
    assert 100 < first < 500
    settled = sharpness[sharpness.index >= first + 150]
    assert len(settled) > 20
    assert settled.between(0.93 * 8, 1.1 * 8).all()
    assert loss[1000] < 0.7 * loss[settled.index[0]]  # and learning goes on
    assert (DOCS / "images" / "edge_of_stability.png").stat().st_size > 10_000


RUNS = [
    *((Adam(lr), 38 / lr, steps) for lr, steps in ((2e-3, 700), (1.5e-3, 900), (1e-3, 1400))),
    *((RMSProp(lr), 2 / lr, steps) for lr, steps in ((1.5e-4, 800), (1e-4, 1000), (7e-5, 1300))),
]


@pytest.mark.parametrize(("optimiser", "edge", "steps"), RUNS, ids=str)
def test_adaptive_optimisers_come_to_their_edge_and_stay(optimiser, edge, steps):
    """From the first crossing on, the median is within a tenth of the edge; before it, the sharpness rises."""
    page = load()
    history = page.history(optimiser, steps)
    rows = history[history["measure"] == page.SHARPNESS].set_index("step")
    assert rows["edge"].to_list() == pytest.approx([edge] * len(rows))
    assert rows["kind"][0] == "undefined"  # there is no state before the first step
    ratio = rows["value"] / edge
    first = ratio.index[ratio > 1][0]
    assert ratio[100] < 0.6
    assert 200 < first <= steps - 200
    assert 0.9 < ratio[ratio.index >= first].median() < 1.1
