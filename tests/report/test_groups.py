"""The picture of groups of networks: ratios with their intervals."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "comparing"))

from made_up import grouped, report

from flatlens.report.compare import write_group_page
from flatlens.report.figures.compared import groups_figure, groups_frame
from flatlens.report.page import svg_of


def networks(factor, sharpness=1.0):
    """Five networks of slightly different numbers; `mls` is `factor` times as large, `sharpness` has a wide spread."""
    found = [
        report(0.1, 0.5, mls=factor * (1 + 0.01 * i), sharpness=sharpness * 4.0 ** (-1) ** i, weight_norm=3.0 + 0.1 * i)
        for i in range(5)
    ]
    for one in found:
        one.about.update(model="Net", parameters=3, layers=["fc"], device="cpu", versions={"torch": "2"})
    return found


@pytest.fixture(scope="module")
def found():
    return grouped(paired=False, SGD=networks(1.0), SAM=networks(0.5))


def test_each_measure_has_its_ratio_with_its_interval_in_its_section(found):
    rows = groups_frame(found).set_index("measure")
    assert rows.loc["mls", "value"] == pytest.approx(0.5)
    assert rows.loc["mls", "low"] < 0.5 < rows.loc["mls", "high"]
    assert rows["section"].to_dict() == {
        "mls": "Sensitivity and compression",
        "test_loss": "Loss and accuracy",
        "loss": "Loss and accuracy",
        "sharpness": "Not invariant, or without a direction",
        "weight_norm": "Not invariant, or without a direction",
    }
    assert rows["significant"].to_dict() == {name: name == "mls" for name in rows.index}
    assert rows.loc["mls", "told"].startswith("mls, SAM / SGD: 0.5 [")
    assert "generalisation_gap" not in rows.index  # a difference: it has a unit of its own


def test_the_picture_is_whole_for_two_and_for_three_groups_and_fits_a_phone(found, tmp_path):
    three = grouped(paired=False, SGD=networks(1.0), SAM=networks(0.5), Adam=networks(2.0))
    for one, rows in ((found, 5), (three, 10)):
        figure = groups_figure(one)
        for drawing in (figure.whole, figure.narrow):
            drawing.to_dict(validate=True)
        svg = svg_of(figure)
        assert svg.count('aria-roledescription="point"') == rows
        assert (">Adam<" in svg) is (one is three)
    page = write_group_page(found, tmp_path / "page.html").read_text()
    assert page.index('id="groups-ratios"') < page.index('id="groups"')
    phone = page[page.index('class="box drawing phone"') :]
    assert float(phone[phone.index('width="') + 7 :].split('"')[0]) < 345


def test_groups_draw_themselves_from_python(found):
    chart = found.plot().to_dict()
    drawn = [row for rows in chart["datasets"].values() for row in rows if "measure" in row]
    assert {row["measure"] for row in drawn} == set(groups_frame(found)["measure"])
