"""All results side by side: `python -m benchmarks [one_pass growth ...] [--no-run]`.

Runs the benchmarks of the page, or those named, one after another, each as `python -m benchmarks.NAME` does. Prints
their results as a table and makes benchmarks/results/page.html. About an hour and a half on two cores for all. The
other libraries (`benchmarks/peers`) are run where they are installed; where they are not, their last results are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks import page
from benchmarks.page import NAMES, short
from benchmarks.rows import promises, rows

PEERS = ("backpack", "curvlinops", "hessian_eigenthings", "pyhessian")


def run(name: str) -> bool:
    """Run one benchmark, as from the command line; return whether it succeeded."""
    missing = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    if name == "curvature" and missing:
        print(f"curvature: {', '.join(missing)} not installed (benchmarks/peers): the last results stay")
        return True
    return subprocess.run([sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}"]).returncode == 0


def show(console: Console) -> None:
    """Print all results as tables."""
    table = Table(title="flatlens side by side")
    for head in ("task", "network", "who"):
        table.add_column(head, overflow="fold")
    for head in ("value", "error", "products", "seconds (quartiles)", "MiB", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows():
        s = row.seconds
        spread = f" ({s['quartile_low']:.3g}..{s['quartile_high']:.3g})" if "quartile_low" in s else ""
        seconds = row.failed[:30] if row.failed else short(s["median"]) + spread
        cells = (
            short(row.value, 6),
            short(row.error, 2),
            short(row.products, 4),
            seconds,
            short(row.memory),
            short(row.ratio),
        )
        table.add_row(row.task, row.network, row.who, *cells, style="bold" if row.ours else "")
    console.print(table)
    held = Table(title="What must hold")
    for head in ("promise", "on", "measured", ""):
        held.add_column(head)
    for promise in promises():
        held.add_row(promise.says, promise.where, promise.measured, "kept" if promise.kept else "[red]broken")
    console.print(held)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of the benchmarks to run, {', '.join(NAMES)}; else all"
    )
    options.add_argument("--no-run", action="store_true", help="only show, and make the page of, what was measured")
    chosen = options.parse_args()
    if unknown := set(chosen.names) - set(NAMES):
        options.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    failed = [] if chosen.no_run else [name for name in chosen.names or NAMES if not run(name)]
    show(Console())
    print(f"{page.write()}{''.join(f'; {name} failed' for name in failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
