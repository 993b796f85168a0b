"""Set one thread and a seed for every test, import builders and literal definitions, leave out the thorough tests."""

import sys
import zlib
from fractions import Fraction
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE / "truths"))
torch.set_num_threads(1)


def kept_shares() -> dict[str, Fraction]:
    """Return {beginning of a test's id: share of its cases in the default run}, as thorough.txt says."""
    lines = [line.partition("#")[0].split() for line in (HERE / "thorough.txt").read_text().splitlines()]
    return {line[0]: Fraction(line[1]) for line in lines if line}


def is_thorough(item: pytest.Item, shares: dict[str, Fraction]) -> bool:
    """Say whether the default run leaves a test out.

    Which cases are kept is decided by a checksum of the case's id: all tests of one case, which often share an
    expensive fixture, are kept together, and the choice is the same in every process.
    """
    share = next((share for start, share in shares.items() if item.nodeid.startswith(start)), Fraction(1))
    case = item.nodeid.partition("[")[2].partition("@")[0]
    return zlib.crc32(case.encode()) % share.denominator >= share.numerator


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shares = kept_shares()
    for item in items:
        if is_thorough(item, shares):
            item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own is the same in every run and process."""
    torch.manual_seed(zlib.crc32(item.nodeid.partition("@")[0].encode()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List how long each task of docs/thirty.md took."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    took = [str(told) for report in reports for name, told in report.user_properties if name == "thirty"]
    if took:
        terminalreporter.write_sep("=", "thirty things people do")
        terminalreporter.write_line("\n".join(sorted(took, key=lambda line: int(line.split()[2].rstrip(".")))))
