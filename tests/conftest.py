"""Set one thread and a seed for every test, import builders and literal definitions, choose the default tier.

What is there when the tests have been collected is kept out of Python's garbage collection: flatlens collects garbage
before it weighs memory, which takes a second where twelve thousand tests and all packages are looked through.

`durations.json` has the recorded seconds of tests; the default tier is chosen from this file alone:

    {"tests/grams/test_planner.py": {"fixtures": 1.3, "tests": {"test_a": [12, 0.4, {"case": 0.25}]}}}

Here test_a has 12 cases below CHEAP seconds, 0.4 s together, and one slower case. A function that the file does not
list is new, and in the default tier. `pytest -n 2 -m 'not slow' --record` writes the file, on an idle machine.
"""

import functools
import gc
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"
BUDGET = 180.0  #: seconds of work in the default tier, for two workers together, without collecting
CHEAP = 0.02  #: seconds; cheaper cases are recorded by number
SHARED = 1.0  #: seconds of a file's fixtures above which one process runs all of the file, and makes them once
DEFAULT_TIER = "not slow and not thorough"  #: `-m` in pyproject.toml

sys.path.insert(0, str(HERE / "truths"))
torch.set_num_threads(1)
# The same draws in every run; `--hypothesis-profile=default` looks at new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
# Hypothesis also draws the constants in modules that are imported by then, which are others in each process.
providers._get_local_constants = lambda: providers._local_constants


def parts(nodeid: str) -> tuple[str, str, str]:
    """Split a test's id into its file, its function and its case."""
    path, _, test = nodeid.partition("@")[0].partition("::")
    function, _, case = test.partition("[")
    return path, function, case


@functools.cache
def recorded() -> dict[str, dict]:
    """Return what durations.json says, file by file."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


@functools.cache
def cases(path: str, function: str) -> list[tuple[float, tuple[str, str, str]]]:
    """Return a function's cases with their seconds, cheapest first; the case "" stands for all cheap ones."""
    cheap, seconds, slower = recorded().get(path, {}).get("tests", {}).get(function, (0, 0.0, {}))
    found = sorted((took, (path, function, case)) for case, took in slower.items())
    return [(seconds, (path, function, "")), *found] if cheap else found


@functools.cache
def left_out() -> frozenset[tuple[str, str, str]]:
    """Return the cases that do not fit in the budget.

    First each function's cheapest case is taken, then other cases, both in the order of their seconds and their share
    in the file's fixtures. These are paid with the first of the file's tests.
    """
    functions = [cases(path, function) for path, file in recorded().items() for function in file["tests"]]
    first, more = [one[0] for one in functions], [case for one in functions for case in one[1:]]
    shares = {path: file["fixtures"] / len(file["tests"]) for path, file in recorded().items()}
    left, paid, out = BUDGET, set(), set()
    for several in (first, more):
        for seconds, case in sorted(several, key=lambda one: (one[0] + shares[one[1][0]], one)):
            cost = seconds + (0.0 if case[0] in paid else recorded()[case[0]]["fixtures"])
            if cost <= left:
                left -= cost
                paid.add(case[0])
            else:
                out.add(case)
    return frozenset(out)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the seconds of all tests to tests/durations.json")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Say that the default tier need not read a file with no test in it: some import large packages."""
    path = collection_path.relative_to(HERE.parent).as_posix()
    if config.getoption("markexpr") != DEFAULT_TIER or not collection_path.name.startswith("test_"):
        return None
    functions = [
        cases(path, name) for name in re.findall(r"^def (test_\w+)", collection_path.read_text(), re.MULTILINE)
    ]
    return all(one and left_out().issuperset(case for _, case in one) for one in functions) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave all that is collected out of later searches for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks, and xdist by groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path, function, case = parts(item.nodeid)
        if recorded().get(path, {}).get("fixtures", 0.0) > SHARED and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(path))
        slower = {name for _, (_, _, name) in cases(path, function)}
        if (path, function, case if case in slower else "") in left_out():
            item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own is the same in every run and process."""
    torch.manual_seed(zlib.crc32(item.nodeid.partition("@")[0].encode()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List how long each task of docs/thirty.md took; with --record, write the seconds of all tests."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    took = [str(told) for report in reports for name, told in report.user_properties if name == "thirty"]
    if took:
        terminalreporter.write_sep("=", "thirty things people do")
        terminalreporter.write_line("\n".join(sorted(took, key=lambda line: int(line.split()[2].rstrip(".")))))
    if terminalreporter.config.getoption("--record"):
        everything = [report for kind in terminalreporter.stats.values() for report in kind]
        write([report for report in everything if isinstance(report, pytest.TestReport)])


def write(reports: list[pytest.TestReport]) -> None:
    """Write durations.json from the reports of a run of all tests.

    A setup of more than half a second is the file's: the first test that needs a fixture pays for all. Tests of one
    xdist group, unless it is a file, share what is computed once: each counts as the longest of them.
    """
    took, groups = defaultdict(float), defaultdict(set)
    files = {parts(report.nodeid)[0]: {"fixtures": 0.0, "tests": {}} for report in reports}
    for report in reports:
        case, group = parts(report.nodeid), report.nodeid.partition("@")[2]
        if report.when == "setup" and report.duration > 0.5:
            files[case[0]]["fixtures"] += report.duration
        else:
            took[case] += report.duration
        if group and group != case[0]:
            groups[group].add(case)
    longest = {case: max(took[one] for one in cases) for cases in groups.values() for case in cases}
    for (path, function, case), seconds in sorted((took | longest).items()):
        told = files[path]["tests"].setdefault(function, [0, 0.0, {}])
        if seconds < CHEAP:
            told[:2] = [told[0] + 1, round(told[1] + seconds, 2)]
        else:
            told[2][case] = round(seconds, 2)
    files = dict(sorted(files.items()))
    lines = []  # one for each function
    for path, file in files.items():
        tests = ",\n".join(f"  {json.dumps(name)}: {json.dumps(told)}" for name, told in file["tests"].items())
        lines.append(f'{json.dumps(path)}: {{"fixtures": {file["fixtures"]:.2f}, "tests": {{\n{tests}\n}}}}')
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
