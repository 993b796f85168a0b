"""The list of tests that the default run leaves out names tests that exist."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LINES = [line.partition("#")[0].split() for line in (HERE / "thorough.txt").read_text().splitlines()]
LISTED = [line for line in LINES if line]


@pytest.mark.parametrize(("start", "share"), LISTED, ids=[line[0] for line in LISTED])
def test_every_line_names_tests_and_a_share(start: str, share: str) -> None:
    path, _, test = start.partition("::")
    sources = [source.read_text() for source in HERE.parent.glob(f"{path}*") if source.suffix == ".py"]
    sources += [source.read_text() for source in HERE.parent.glob(f"{path}test_*.py")]
    name = test.partition("[")[0]
    assert any(f"\ndef {name}" in source for source in sources)
    top, _, bottom = share.partition("/")
    assert 0 <= int(top) < int(bottom or 1)
