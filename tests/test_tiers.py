"""The default tier reads every file that has one of its tests, doctests too."""

from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent


def test_a_file_is_left_unread_only_if_all_its_tests_are_left_out(pytestconfig: pytest.Config) -> None:
    tiers = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    default = SimpleNamespace(getoption=lambda name: tiers.DEFAULT_TIER)
    unread = []
    for path, file in tiers.recorded().items():
        chosen = [case for name in file["tests"] for _, case in tiers.cases(path, name) if case not in tiers.left_out()]
        if (HERE.parent / path).exists() and tiers.pytest_ignore_collect(HERE.parent / path, default):
            unread.append(path)
            assert not chosen, path
    assert unread, "no file is left unread: this test cannot fail"
