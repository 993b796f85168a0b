"""Tables at any width: no number is cut, names fold, extra columns go and are named."""

import re

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from flatlens.estimate import Estimate, Report
from flatlens.measures import MEASURES, catalogue
from flatlens.report.measure import measure_screen
from flatlens.report.screen import Fitted, Profile

WIDTHS = (40, 60, 80, 120)


def printed(what, width):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(what, highlight=False, markup=False)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    return text


def drawn(seed):
    """A table of drawn names and numbers, and the numbers as they must be read."""
    rng = np.random.default_rng(seed)
    table = Fitted("A title")
    table.column("name", "name")
    values = int(rng.integers(1, 9))
    for at in range(values):
        table.column(f"value{at}" * int(rng.integers(1, 4)))
    extras = int(rng.integers(0, 6))
    for at in range(extras):
        table.column(f"extra{at}", "extra")
    numbers = []
    for row in range(int(rng.integers(1, 9))):
        if rng.random() < 0.3:
            table.section(f"section {row}")
        mine = [f"{rng.normal() * 10.0 ** rng.integers(-300, 300):.4g}" for _ in range(values)]
        numbers += mine
        name = "_".join("abcdefgh"[: rng.integers(1, 9)] for _ in range(rng.integers(1, 9)))
        table.row(name, *(Text(one) if rng.random() < 0.5 else one for one in mine), *["yes"] * extras)
    return table, numbers


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_is_whole_and_every_column_is_there_or_named(width):
    for seed in range(60):
        table, numbers = drawn(seed)
        text = printed(table, width)
        words = text.split()
        for number in set(numbers):
            assert words.count(number) >= numbers.count(number), (seed, number)
        flat = "".join(words)
        for heading, *_ in table._columns:
            assert heading in flat or "value" in heading, (seed, heading)  # long headings are folded


def test_a_report_of_any_size_of_numbers_is_whole_at_any_width():
    rng = np.random.default_rng(0)
    layers = ["encoder.layers.0.self_attn.out_proj", "fc", "a_very_long_name_of_a_layer_without_any_dots_in_it"]
    for width in WIDTHS:
        numbers = {}
        for name in list(MEASURES)[:20]:
            for layer in (None, *layers):
                value, stderr = (abs(rng.normal()) * 10.0 ** rng.integers(-200, 200) for _ in range(2))
                numbers[name, layer] = Estimate(value, stderr, "estimate")
        report = Report(numbers, {"n": 9, "outputs": 3, "layers": layers, "loss": "mse"})
        words = printed(measure_screen(report, catalogue()), width).split()
        for estimate in numbers.values():
            assert f"{estimate.value:.4g}" in words, width
            assert f"{1.96 * estimate.stderr:.2g}" in words, width


def test_columns_are_dropped_from_the_last_and_named():
    table = Fitted()
    table.column("name", "name")
    table.column("value")
    for heading in ("first", "second"):
        table.column(heading, "extra")
    table.row("a" * 20, "1.234e-10", "yes", "no")
    assert "no room" not in printed(table, 60)
    text = printed(table, 42)
    assert "yes" in text
    assert "no room for the columns second" in " ".join(text.split())
    assert "no room for the columns first, second" in " ".join(printed(table, 34).split())


def test_a_profile_takes_the_width_that_is_left():
    table = Fitted()
    table.column("name", "name")
    table.column("", "picture")
    table.row("mls", Profile([float(i) for i in range(90)]))
    for width in WIDTHS:
        bars = re.findall("[▁▂▃▄▅▆▇█]", printed(table, width))
        assert 12 <= len(bars) <= width - 5
