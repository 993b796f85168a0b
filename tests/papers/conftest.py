"""Every experiment at its smallest scale, run when first asked for; fake_study importable."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatlens.papers.reproduction import reproduce

DOCS = Path(__file__).parents[2] / "docs"

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def docs_script(monkeypatch):
    """(name) -> the module docs/name.py, made anew."""

    def of(name):
        monkeypatch.syspath_prepend(str(DOCS))  # they import one another
        spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
        spec.loader.exec_module(module)
        return module

    return of


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
