"""Every network of the zoo against brute force: `python -m benchmarks.zoo [--only NAME ...] [--resume]`.

They run one after another, each in a process of its own with a limit of time and of memory. Each result is saved in
benchmarks/results/zoo.json at once, and docs/zoo.md is made from these. `--resume` leaves out the networks that have a
result; `--only` takes some, "timm:xcit_nano_12_p16_224" or all with "xcit" in their names; `--page` only makes the
page. In the environment of `.ci/timm`. About forty minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

from benchmarks import machine
from benchmarks.zoo import of_timm, of_transformers, page

NAMES = [*(f"timm:{name}" for name in sorted(of_timm.NETWORKS)),
         *(f"transformers:{name}" for name in sorted(of_transformers.NETWORKS))]  # fmt: skip
CODE = "import json, sys\nfrom benchmarks.zoo import case\nprint(json.dumps(case.measured(case.case(sys.argv[1]))))"


def in_a_child(name: str, seconds: int, gib: int) -> dict[str, Any]:
    """Return a network's row, or one that says why the child process died."""
    limit = gib * 2**30
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CODE, name], capture_output=True, text=True, timeout=seconds,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"errors": {}, "troubles": [f"not done in {seconds} s"]}
    if done.returncode == 0:
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return row
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    return {"errors": {}, "troubles": [f"the process ended with status {done.returncode}: {last}"]}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", metavar="NAME", help="networks whose names contain one of these")
    options.add_argument("--resume", action="store_true", help="leave out those whose results lie there")
    options.add_argument("--page", action="store_true", help="measure nothing, only make the page")
    options.add_argument("--seconds", type=int, default=600, help="limit for each network")
    options.add_argument("--gib", type=int, default=8, help="limit of memory for each network")
    chosen = options.parse_args()
    names = [name for name in NAMES if chosen.only is None or any(part in name for part in chosen.only)]
    if not names:
        options.error(f"unknown network {', '.join(chosen.only)}: choose from {', '.join(NAMES)}")
    kept = chosen.resume or chosen.page or chosen.only is not None
    rows: dict[str, Any] = machine.earlier("zoo").get("networks", {}) if kept else {}
    for name in [] if chosen.page else names:
        if chosen.resume and name in rows:
            continue
        rows[name] = in_a_child(name, chosen.seconds, chosen.gib)
        machine.save("zoo", {"networks": rows})
        print(f"{name}: {page.verdict(rows[name])}", file=sys.stderr, flush=True)
    wrong = [name for name in names if name not in rows or page.verdict(rows[name]) != "right"]
    print(f"{page.write(rows)}: {len(names) - len(wrong)} of {len(names)} right", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
