"""Every experiment at its smallest scale, run when first asked for; fake_study importable."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatlens.papers.reproduce import reproduce

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smoke_of(tmp_path_factory):
    """(folder, what came of it) of an experiment; tests of one are in one xdist group, so that it runs once."""
    done = {}

    def of(name):
        if name not in done:
            out = tmp_path_factory.mktemp(name) / "out"
            with ThreadPoolExecutor(1) as executor:
                done[name] = out, reproduce(name, out, scale="smoke", executor=executor)
        return done[name]

    return of
