"""Every table of results is shown, saved and loaded in the same way, and a damaged file is one line."""

import dataclasses
import json
import os

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.bounds import Verdict
from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.files import write_whole
from flatlens.grams import LayerGrams
from flatlens.measures.definition import Measure, per_sample
from flatlens.result import SCHEMA, Result
from flatlens.transforms import Cell

MEASURES = ["mls", "weight_norm", "local_volume(top_k=1)", "loss", "hessian_trace"]


def lens(seed: int = 0) -> fl.Lens:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])
    return fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))


@per_sample(
    id="own", family="sensitivity", symbol="own", source="nowhere", unit="", place="input", needs={"G"},
    answer="input", invariant_under={"layerwise", "neuronwise"},
)  # fmt: skip
def own(g: LayerGrams, *, power: int = 1) -> Tensor:
    """A measure that flatlens does not know."""
    return g.G.diagonal(dim1=1, dim2=2).sum(1) ** power


def comparison(measures: list[str | Measure]) -> fl.Comparison:
    torch.manual_seed(3)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])
    nets = {
        name: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
        for name in ("first", "second")
    }
    return fl.compare({name: fl.Lens(fl.Problem(net, "cross_entropy", (x, y))) for name, net in nets.items()}, measures)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {
        "report": fl.measure(lens(), MEASURES),
        "bounds report": fl.check_bounds(lens(), assume=["convex_support"]),
        "invariance report": fl.check_invariance(lens(), ["mls", "weight_norm"]),
        "comparison": comparison(["mls", "weight_norm", own(power=2)]),
    }


def test_identical_runs_write_the_same_bytes_but_for_the_times(results: dict[str, Result], tmp_path) -> None:
    files = []
    for _ in range(2):
        fl.measure(lens(), MEASURES).save(tmp_path / "r")
        raw = (tmp_path / "r").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert list(header) == sorted(header)
        times = json.loads(header["__metadata__"].pop("flatlens.seconds"))["values"]
        assert sum(time for time in times if isinstance(time, float)) > 0
        assert next(time for time in times if isinstance(time, dict))["pass"] > 0
        table = json.loads(header["__metadata__"]["flatlens.report"])
        assert (table["schema"], table["flatlens"]) == (SCHEMA, fl.__version__)
        files.append((json.dumps(header), raw[8 + length :]))
    assert files[0] == files[1]


def test_a_file_has_the_permissions_that_the_umask_leaves(results: dict[str, Result], tmp_path) -> None:
    before = os.umask(0o027)
    try:
        results["report"].save(tmp_path / "r")
        assert (tmp_path / "r").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_times_are_counted_once() -> None:
    seen = lens()
    report = fl.measure(seen, ["mls", "nmls", "relative_flatness", "weight_norm"])
    rows = report.frame()
    assert report.about["seconds"] == {"pass": seen.pass_seconds}
    assert seen.pass_seconds > 0
    assert rows.groupby("measure")["seconds"].apply(lambda each: (each > 0).sum()).max() == 1
    again = fl.measure(seen, ["mls", "nmls", "relative_flatness", "weight_norm"])
    assert again.about["seconds"] == report.about["seconds"]  # no further pass


def test_a_problem_made_in_python_says_where_it_is_from(results: dict[str, Result]) -> None:
    origin = results["report"].about["origin"]
    assert origin["model"] == "torch.nn.modules.container.Sequential"
    assert origin["data"].startswith("tensors of shape (5, 3) and (5,), checksum ")
    assert fl.measure(lens(), "loss").about["origin"] == origin
    assert fl.measure(lens(1), "loss").about["origin"] != origin
    assert results["report"].about["versions"]["flatlens"] == fl.__version__


KINDS = ["report", "bounds report", "invariance report", "comparison"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_survives_its_file(kind: str, results: dict[str, Result], tmp_path) -> None:
    result = results[kind]
    result.save(tmp_path / "r")
    back = type(result).load(tmp_path / "r")
    assert type(back) is type(result)
    assert len(result.frame()) > 1
    pd.testing.assert_frame_equal(back.frame(), result.frame(), check_exact=True)
    assert back.about == result.about == json.loads(json.dumps(result.about))
    assert repr(back) == repr(result)
    assert back._repr_html_() == result._repr_html_()
    assert "<table" in result._repr_html_()
    assert [file.name for file in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_one_line_and_no_other_numbers(kind: str, results: dict[str, Result], tmp_path) -> None:
    result, path = results[kind], tmp_path / "r"
    result.save(path)
    content = path.read_bytes()
    step = len(content) // 40
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(step, len(content), step)]
    damaged = [content[: len(content) // 2], b"", b"nonsense", *flipped]
    refused = 0
    for one in damaged:
        path.write_bytes(one)
        try:
            found = type(result).load(path)
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017 (both ways are right, and looked at)
            assert str(error).startswith(f"{type(result).__name__}.load(")  # noqa: PT017
        else:
            pd.testing.assert_frame_equal(found.frame(), result.frame(), check_exact=True)
    assert refused >= len(damaged) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_another_kind_is_named(kind: str, results: dict[str, Result], tmp_path) -> None:
    results[kind].save(tmp_path / "r")
    for other in KINDS:
        if other != kind:
            with pytest.raises(BadInput, match=rf"not a saved {other} \(it is a saved {kind}\)$"):
                type(results[other]).load(tmp_path / "r")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "path", ["no/such/folder/r", ".", None, 5, "a\0b", "x" * 300], ids=lambda path: repr(path)[:20]
)
def test_a_path_that_cannot_be_written(kind: str, path: object, results: dict[str, Result]) -> None:
    with pytest.raises(BadFolder, match=rf"^{type(results[kind]).__name__}\.save\(.*cannot be written") as caught:
        results[kind].save(path)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_file_that_could_not_be_written_whole_leaves_the_old_one(results: dict[str, Result], tmp_path) -> None:
    report = results["bounds report"]
    report.save(tmp_path / "r")
    before = (tmp_path / "r").read_bytes()
    unwritable = type(report)(report, {"model": object()})  # type: ignore[call-arg]
    with pytest.raises(BadFolder, match="not JSON serializable"):
        unwritable.save(tmp_path / "r")
    assert (tmp_path / "r").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["r"]


def test_a_missing_folder_and_a_folder_are_named(results: dict[str, Result], tmp_path) -> None:
    with pytest.raises(BadFolder, match=r"there is no folder '.*none': make it first"):
        results["report"].save(tmp_path / "none" / "r")
    with pytest.raises(BadInput, match="it is a folder"):
        fl.Report.load(tmp_path)


def test_a_row_is_found_by_the_name_that_was_asked_for(tmp_path) -> None:
    problem = fl.Problem(nn.Linear(3, 2), "mse", (torch.ones(5, 3), torch.zeros(5, 2)))
    asked = "sharpness(layers=True, bottom_k=0, top_k=2)"
    report = fl.measure(fl.Lens(problem), [asked])
    report.save(tmp_path / "r")
    for found in (report, fl.Report.load(tmp_path / "r")):
        assert asked in found
        assert found[asked] is found["sharpness(top_k=2, layers=True)"]
        assert "sharpness(layers=True, top_k=3)" not in found
        assert (None, "0") not in found


def test_arrays_of_a_report_come_back_under_their_names(tmp_path) -> None:
    arrays = {"samples": torch.arange(3.0), "a/b": torch.ones(2, 2), "arrays.x": torch.zeros(1)}
    one = fl.Estimate(1.0, samples=torch.tensor([0.5]), arrays=arrays)
    fl.Report({("mls", "fc1"): fl.Estimate(0.0), ("mls", None): one}, {}).save(tmp_path / "r")
    back = fl.Report.load(tmp_path / "r")["mls"]
    assert back.samples is not None
    assert torch.equal(back.samples, torch.tensor([0.5]))
    assert {name: tensor.tolist() for name, tensor in back.arrays.items()} == {
        name: tensor.tolist() for name, tensor in arrays.items()
    }


def test_bounds_tell_what_was_measured_and_assumed(results: dict[str, Result]) -> None:
    about = results["bounds report"].about
    assert about["assume"] == ["convex_support"]
    assert about["rule"] == "exact"
    assert {name: about[name] for name in ("n", "outputs", "loss", "layers")} == {
        "n": 5, "outputs": 2, "loss": "cross_entropy", "layers": ["0", "2"],
    }  # fmt: skip


def test_rows_by_position_and_by_name(results: dict[str, Result]) -> None:
    bounds, cells = results["bounds report"], results["invariance report"]
    assert isinstance(bounds, fl.BoundsReport)
    assert isinstance(cells, fl.InvarianceReport)
    first: Verdict = bounds[0]
    assert bounds[first.bound, first.layer] is first
    assert bounds[:2] == [bounds[0], bounds[1]]
    last: Cell = cells[-1]
    assert cells[last.measure, last.transform] is last
    assert cells[-1:] == [last]


def test_a_comparison_by_measure_and_network(results: dict[str, Result]) -> None:
    found = results["comparison"]
    assert isinstance(found, fl.Comparison)
    assert list(found) == list(found.measures) == ["mls", "weight_norm", "own(power=2)"]
    assert found["mls", "second"] is found.reports["second"]["mls"] is found["mls"]["second"]
    with pytest.raises(UnknownName, match=r"unknown measure .* in this comparison"):
        found["ml"]
    with pytest.raises(UnknownName, match=r"unknown network .* in this comparison"):
        found["mls", "secnd"]
    with pytest.raises(UnknownName, match=r"unknown measure .* in this comparison"):
        found[0]  # type: ignore[call-overload]


def test_a_loaded_comparison_ranks_as_before(results: dict[str, Result], tmp_path) -> None:
    found = results["comparison"]
    assert isinstance(found, fl.Comparison)
    found.save(tmp_path / "r")
    back = fl.Comparison.load(tmp_path / "r")
    assert back.measures["mls"].compute is found.measures["mls"].compute  # flatlens's own: it can be run again
    lost = back.measures["own(power=2)"]
    assert lost.key == "own(power=2)"
    assert lost.invariant_under == found.measures["own(power=2)"].invariant_under
    with pytest.raises(BadInput, match="values and not its function"):
        lost.evaluate(None)
    assert back.places == found.places
    pd.testing.assert_frame_equal(back.networks(), found.networks(), check_exact=True)
    assert repr(back.agreement().overall) == repr(found.agreement().overall)
    for name in found.models:
        for key, estimate in found.reports[name].items():
            ours = back.reports[name][key]
            assert repr(ours) == repr(estimate)
            assert (ours.samples is None) == (estimate.samples is None)
            if estimate.samples is not None:
                assert torch.equal(ours.samples, estimate.samples)


def test_what_a_transform_did_comes_back(results: dict[str, Result], tmp_path) -> None:
    report = results["invariance report"]
    assert isinstance(report, fl.InvarianceReport)
    report.save(tmp_path / "r")
    back = fl.InvarianceReport.load(tmp_path / "r")
    assert [dataclasses.astuple(cell) for cell in back] == [dataclasses.astuple(cell) for cell in report]
    assert back.moved == report.moved
    assert back.moved
    assert back.left_out == report.left_out


def test_a_file_may_name_a_file_whose_name_is_no_utf8(tmp_path):
    written = write_whole(tmp_path / "page.html", f"weights: {os.fsdecode(b'caf' + bytes([233]))}.pt")
    assert written.read_text(encoding="utf-8") == r"weights: caf\udce9.pt"
