"""Networks whose parameters are spread over two processes: the numbers of one process, and none that would be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

KINDS = ("tanh, float64", "relu, float64", "relu, float32")
PROGRAM = Path(__file__).parent / "sharded_program.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.parametrize(("how", "kind"), [
    *((how, kind) for how in ("fsdp2", "tensor_parallel") for kind in KINDS),
    ("fsdp2, the head in the outermost", "relu, float64"),
    ("fsdp2, all in the outermost", "tanh, float64"),
])  # fmt: skip
def test_two_processes_give_the_numbers_of_one(how: str, kind: str, tmp_path: Path) -> None:
    spec = spec_from_file_location("sharded_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    alone = program.measured(program.network(kind), kind)
    out = tmp_path / "found.json"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM), str(out), how, kind]
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    for name in sorted(alone.keys() - {"mls", "note", "by"}):
        assert found[name] == found[name]
        assert found[name] == pytest.approx(alone[name], rel=1e-6 if kind.endswith("64") else 1e-4), name
    assert found["unchanged"] == 1
    assert found["told"] == [2, 0]
    for words, said in found["refused"].items():
        assert words in said
    if how.startswith("fsdp2"):
        assert found["accumulating"] == pytest.approx(1)
        assert found["gradient moved"] == 0
        for value, margin, true, _ in found["narrowed"].values():
            assert abs(value - true) <= margin
        assert "computes in bfloat16 inside" in found["narrowed"]["directional_sharpness"][3]
    assert found["by"] == "by double backward"
    assert found["mls"] != found["mls"]
    assert "spread over processes" in found["note"]
