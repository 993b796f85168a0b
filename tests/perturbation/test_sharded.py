"""Networks whose parameters are spread over two processes: the numbers of one process, and none that would be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "sharded_program.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
CASES = [
    *(
        (how, kind)
        for how in ("fsdp2", "tensor_parallel")
        for kind in ("tanh, float64", "relu, float64", "relu, float32")
    ),
    ("fsdp2, the head in the outermost", "relu, float64"),
    ("fsdp2, all in the outermost", "tanh, float64"),
]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = spec_from_file_location("sharded_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes find of all cases, one after the other."""
    out = tmp_path_factory.mktemp("sharded") / "found.json"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *run, str(PROGRAM), str(out), json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("how", "kind"), CASES)
def test_two_processes_give_the_numbers_of_one(
    how: str, kind: str, program: ModuleType, spread: dict[str, Any]
) -> None:
    alone, found = program.measured(program.network(kind), kind), spread[f"{how}, {kind}"]
    for name in sorted(alone.keys() - {"mls", "note", "by"}):
        assert found[name] == found[name]
        assert found[name] == pytest.approx(alone[name], rel=1e-6 if kind.endswith("64") else 1e-4), name
    assert found["unchanged"] == 1
    assert found["told"] == [2, 0]
    if how.startswith("fsdp2"):
        assert found["accumulating"] == pytest.approx(1)
        assert found["gradient moved"] == 0
    assert found["by"] == "by double backward"
    assert found["mls"] != found["mls"]
    assert "spread over processes" in found["note"]


def test_what_would_be_wrong_is_refused(spread: dict[str, Any]) -> None:
    assert len(spread["refused"]) == 6
    for words, said in spread["refused"].items():
        assert words in said


def test_what_is_gathered_in_bfloat16_has_its_error(spread: dict[str, Any]) -> None:
    for value, margin, true, _ in spread["narrowed"].values():
        assert abs(value - true) <= margin
    assert "computes in bfloat16 inside" in spread["narrowed"]["directional_sharpness"][3]
