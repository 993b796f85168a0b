"""The picture of the edge of stability shows what its page says."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def load():
    spec = importlib.util.spec_from_file_location("edge", DOCS / "edge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_full_batch_descent_reaches_two_over_the_learning_rate_and_hovers_there():
    edge = load()
    history = edge.history(0.25, steps=1000)
    sharpness = history[history["measure"] == "sharpness"].set_index("step")["value"]
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
