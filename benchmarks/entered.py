"""What `fl.measure(lens, ["mls"])` enters: `python -m benchmarks.entered [--names]`.

Files and functions of flatlens that run, in a lens's first call on a small network, as `sys.setprofile` sees them: what
a reader has to follow. Comprehensions and generator expressions are not counted, as they stand inside a function.
`--names` lists the functions of each file.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import flatlens as fl

SOURCES = Path(fl.__file__).parent
INSIDE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def entered(measures: list[str]) -> dict[str, list[str]]:
    """Return by file the functions that run when a lens first measures, in the order in which they do."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (torch.randn(16, 4), torch.randint(3, (16,)))))
    found: dict[str, dict[str, None]] = defaultdict(dict)

    def look(frame: FrameType, event: str, given: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCES)) and code.co_name not in INSIDE:
            found[str(Path(code.co_filename).relative_to(SOURCES))][f"{code.co_name}:{code.co_firstlineno}"] = None

    sys.setprofile(look)
    try:
        fl.measure(lens, measures)
    finally:
        sys.setprofile(None)
    return {file: list(functions) for file, functions in found.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--names", action="store_true", help="list the functions of each file")
    chosen = options.parse_args()
    files = entered(["mls"])
    for file, functions in sorted(files.items(), key=lambda item: -len(item[1])):
        print(
            f"{len(functions):4} {file}", *([f"       {name}" for name in functions] if chosen.names else []), sep="\n"
        )
    print(f"{len(files)} files, {sum(map(len, files.values()))} functions")


if __name__ == "__main__":
    main()
