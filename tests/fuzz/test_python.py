"""Networks x mutations x calls: whatever comes in, a right number, `undefined` with a reason or one line comes out, and
nothing is left changed."""

from __future__ import annotations

import random
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from brute_force import Truth
from calls import CALLS
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutations import HARMLESS, MUTATIONS
from oracle import Verdict, judged
from setups import NETWORKS, Setup, setup

LOSSES = ("cross_entropy", "cross_entropy", "half_squared_error", "mse")


@dataclass(frozen=True)
class Case:
    """A network, what is made odd about it, and what is called."""

    network: str
    loss: str
    double: bool
    seed: int
    mutations: tuple[tuple[str, int], ...]
    call: str
    pick: int


def drawn(number: int) -> Case:
    """The case of a number: its choices are independent, where hypothesis would copy them from case to case."""
    draw = random.Random(number)

    def one_of(table: dict[str, tuple[int, object]], among: Collection[str] = ()) -> str:
        names = [name for name in table if name in among or not among]
        return draw.choices(names, [table[name][0] for name in names])[0]

    among = HARMLESS if draw.random() < 0.4 else ()
    return Case(
        network=draw.choice(sorted(NETWORKS)),
        loss=draw.choice(LOSSES),
        double=draw.random() < 0.7,
        seed=draw.randrange(10**6),
        mutations=tuple((one_of(MUTATIONS, among), draw.randrange(2**30)) for _ in range(draw.choice((1, 1, 1, 2)))),
        call=one_of(CALLS),
        pick=draw.randrange(2**30),
    )


def made(case: Case) -> Setup:
    """The case's network and data, mutated as far as they can be."""
    found = setup(case.network, case.loss, case.seed, torch.float64 if case.double else torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        for name, pick in case.mutations:
            try:
                MUTATIONS[name][1](found, pick)
            except (Exception, SystemExit):
                found.truth = False  # this one does not go with the one before: what it did stays
    return found


def judge(case: Case) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judged(made(case), lambda found: CALLS[case.call][1](found, case.pick))


def campaign(part: int, count: int) -> list[tuple[Case, Verdict, float]]:
    """Verdicts of so many cases; all are judged, and none is shrunk, for shrinking one would hide the others."""
    found: list[tuple[Case, Verdict, float]] = []

    @seed(zlib.crc32(b"fuzz") + 1000 * count + part)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, 2**62))
    def every(number: int) -> None:
        case = drawn(number)
        start = time.perf_counter()
        verdict = judge(case)
        found.append((case, verdict, time.perf_counter() - start))

    every()
    return found


def told(found: list[tuple[Case, Verdict, float]]) -> str:
    """Faults by class, the case with the fewest mutations first."""
    faults: dict[str, list[tuple[Case, str]]] = defaultdict(list)
    for case, verdict, _ in sorted(found, key=lambda one: len(one[0].mutations)):
        for fault in verdict.faults:
            faults[fault.partition(":")[0]].append((case, fault))
    counted = Counter(verdict.outcome for _, verdict, _ in found)
    held = sum((verdict.held for _, verdict, _ in found), Counter())
    lines = [f"{len(found)} cases: {dict(counted)}; {held.total()} numbers held against brute force"]
    for what, those in sorted(faults.items(), key=lambda item: -len(item[1])):
        lines += [f"{len(those)} x {what}", f"    {those[0][1]}", f"    {those[0][0]}"]
    return "\n".join(lines)


def assert_nothing_odd_gets_through(part: int, count: int, record_property) -> None:
    found = campaign(part, count)
    record_property("cases", len(found))
    print(told(found))
    assert len(found) >= count
    assert not any(verdict.faults for _, verdict, _ in found), told(found)
    outcomes = Counter(verdict.outcome for _, verdict, _ in found)
    assert outcomes["refused"] >= count / 5, "hardly anything is odd"
    assert outcomes["answered"] >= count / 5, "hardly anything is measured"
    assert sum(verdict.held.total() for _, verdict, _ in found) >= count / 10, "hardly any number is known"


@pytest.mark.parametrize("part", range(4))
def test_nothing_odd_gets_through(part: int, record_property) -> None:
    assert_nothing_odd_gets_through(part, 75, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_nothing_odd_gets_through_of_many(part: int, record_property) -> None:
    assert_nothing_odd_gets_through(part, 250, record_property)


def test_a_number_that_is_wrong_is_a_fault(monkeypatch) -> None:
    case = Case("relu", "mse", True, 1, (("nothing", 0),), "whole", 0)
    assert judge(case).faults == []
    assert judge(case).held.total() == 6
    monkeypatch.setattr("oracle.Truth", lambda net, x, y, loss: Truth(net, 1.01 * x, y, loss))
    found = {fault.partition(":")[0] for fault in judge(case).faults}
    assert found == {"wrong loss", "wrong ggn_trace", "wrong interpolation_sharpness"}  # slopes at x are as they were


def test_what_is_left_changed_and_what_crashes_are_faults() -> None:
    def changes(found: Setup) -> list[object]:
        found.net.train(not found.net.training)
        found.net[0].weight.data.add_(1)
        torch.rand(())
        raise OSError("two\nlines")

    with torch.random.fork_rng():
        faults = {fault.partition(":")[0] for fault in judged(setup("relu", "mse", 0, torch.float64), changes).faults}
    assert faults == {"crash OSError in outside", "changed mode", "changed values", "changed torch's random state"}
