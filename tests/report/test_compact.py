"""Small pictures look like those they were made from."""

import io
import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from compact import compact, small_png


@pytest.fixture(scope="module")
def svg():
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"x": rng.normal(size=200), "y": -rng.random(size=200), "of": ["a", "b"] * 100})
    marks = alt.Chart(data).mark_point(filled=True, opacity=0.7).encode(x="x", y="y", color="of", shape="of")
    lines = alt.Chart(data).mark_line(strokeOpacity=0.5).encode(x="x", y="y")
    nothing = alt.Chart(data[:0]).mark_area().encode(x="x", y="y")
    return vl_convert.vegalite_to_svg((nothing + marks + lines | marks).to_json())


def pixels(svg):
    picture = Image.open(io.BytesIO(vl_convert.svg_to_png(svg, scale=2))).convert("RGB")
    return np.asarray(picture, dtype=float)


def test_it_looks_the_same_and_is_much_smaller(svg, monkeypatch):
    small, before = compact(svg), pixels(svg)
    assert len(small) < 0.4 * len(svg)
    assert before.std() > 10  # there is something to see
    change = np.abs(before - pixels(small))
    assert change.mean() < 0.05  # of 255: coordinates are rounded to a hundredth of a pixel
    assert (change > 12).mean() < 1e-3
    monkeypatch.setattr("compact._rounded", lambda number: number[0])
    assert (pixels(compact(svg)) == before).all()


def test_marks_alike_are_one_pattern(svg):
    small = compact(svg)
    assert small.count("<use ") == 400
    assert "aria-" not in small
    assert compact(small) == small


def test_a_png_is_as_large_as_it_may_be(svg):
    large, small = small_png(svg, 10**6), small_png(svg, 15_000)
    assert len(small) <= 15_000 < len(large)
    sizes = [Image.open(io.BytesIO(one)).size[0] for one in (large, small)]
    assert sizes[0] > sizes[1]
