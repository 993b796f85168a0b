"""An archive gives back every table, claim and figure of a reproduction; equal ones have equal bytes."""

from dataclasses import fields, replace

import pandas as pd
import pytest

from flatlens.errors import BadFolder
from flatlens.experiments.result import StudyResult
from flatlens.papers.archive import load_archive, save_archive

pytestmark = pytest.mark.xdist_group("X3")


@pytest.fixture(scope="module")
def found(smoke_of):
    """A reproduction; its own studies stand for those of a re-run."""
    one = smoke_of("X3")[1]
    return replace(one, second=one.results, again=one.outcomes)


def test_everything_comes_back(found, tmp_path):
    back = load_archive(save_archive(found, tmp_path / "X3.zip"))
    assert (back.experiment, back.scale) == (found.experiment, found.scale)
    assert back.claims() == found.claims()
    for one, other in ((found.results, back.results), (found.second, back.second)):
        assert list(one) == list(other)
        for name, result in one.items():
            for field in fields(StudyResult):
                here, there = getattr(result, field.name), getattr(other[name], field.name)
                if isinstance(here, pd.DataFrame):
                    pd.testing.assert_frame_equal(here, there, check_exact=True)
                else:
                    assert here == there, field.name
    for first, second in zip(found.plots, back.plots, strict=True):
        pd.testing.assert_frame_equal(first.data, second.data, check_exact=True)


def test_equal_reproductions_make_equal_bytes(found, tmp_path):
    one, other = (save_archive(found, tmp_path / name).read_bytes() for name in ("a.zip", "b.zip"))
    assert one == other


@pytest.mark.parametrize("content", [b"", b"PK", b"{}"])
def test_another_file_is_one_line(content, tmp_path):
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(BadFolder, match="does not hold the archive of a reproduction"):
        load_archive(tmp_path / "a.zip")
