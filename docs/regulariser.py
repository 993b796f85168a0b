"""The table of docs/training.md on regularisers: `python docs/regulariser.py` prints it from the benchmark's result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "regulariser.json"
LOSSES = {"cross_entropy": "cross-entropy", "half_squared_error": "half squared error"}
NETWORK = "784-512-512-10"
COLUMNS = {"relative_flatness.sum": "{:.3g}", "generalisation_gap": "{:.3f}", "test_accuracy": "{:.3f}"}


def table() -> str:
    """Return the table: a row a way of training, a column a loss and quantity.

    Bold where the difference to plain SGD is clear: its 95% interval holds no zero.
    """
    result = json.loads(RESULTS.read_text())
    prices = result["prices"][NETWORK]["seconds_of_10_steps"]
    heads = [f"{what}, {loss}" for loss in LOSSES.values() for what in ("rel. flatness, all layers", "gap", "accuracy")]
    lines = [f"| | {' | '.join(heads)} | cost of a step |", f"|---{'|---' * (len(heads) + 1)}|"]
    for way in result["gains"]["cross_entropy"]:
        cells = [_cell(result["gains"][loss][way][name], form) for loss in LOSSES for name, form in COLUMNS.items()]
        price = f"{prices[way]['ratio']:.1f}" if way in prices else ""
        lines.append(f"| {way} | {' | '.join(cells)} | {price} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any], form: str) -> str:
    low, high = found["interval"]
    number = form.format(found["mean"])
    return f"**{number}**" if low > 0 or high < 0 else number


if __name__ == "__main__":
    print(table(), end="")
