"""Threads that measure one network wait for each other; others do not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flatlens.problem import measuring
from flatlens.problem.eval_context import in_turn


def waits(first: nn.Module, second: nn.Module) -> bool:
    """Whether a thread that measures the second network waits for one that measures the first."""
    inside = threading.Event()

    def enter() -> None:
        with in_turn(second):
            inside.set()

    thread = threading.Thread(target=enter)
    with in_turn(first), in_turn(first):
        thread.start()
        waited = not inside.wait(0.2)
    assert inside.wait(60)
    thread.join()
    return waited


def sharing_a_weight() -> tuple[nn.Module, nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second


def a_part() -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return net, net[0]


def joined() -> tuple[nn.Module, nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for one in (first, second):
        with in_turn(one):
            pass
    return first, nn.Sequential(second, first)


@pytest.mark.parametrize("pair", [sharing_a_weight, a_part, joined, lambda: (nn.Linear(1, 1),) * 2])
def test_networks_with_a_part_in_common_are_measured_in_turn(pair: Callable[[], tuple[nn.Module, nn.Module]]) -> None:
    first, second = pair()
    assert waits(first, second)
    assert waits(second, first)


def test_other_networks_are_measured_meanwhile() -> None:
    assert not waits(nn.Linear(1, 1), nn.Linear(1, 1))


def test_two_threads_in_one_network_leave_its_mode() -> None:
    net, begun = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)), threading.Event()
    modes = []

    def second() -> None:
        begun.wait(60)
        with measuring(net):
            modes.append(net.training)

    thread = threading.Thread(target=second)
    thread.start()
    with measuring(net):
        begun.set()
        modes.append(net.training)
    thread.join()
    assert modes == [False, False]
    assert [module.training for module in net.modules()] == [True] * 3


def test_a_turn_that_is_left_open_is_ended_by_another_thread() -> None:
    net, open_ones = nn.Linear(1, 1), []

    def generator() -> object:
        with in_turn(net):
            yield

    def leave_open() -> None:
        one = generator()
        next(one)
        open_ones.append(one)

    thread = threading.Thread(target=leave_open)
    thread.start()
    thread.join()
    open_ones.pop().close()
    with in_turn(net):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    net, held, ended = nn.Linear(1, 1), threading.Event(), threading.Event()

    def hold() -> None:
        with in_turn(net):
            held.set()
            ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        thread = threading.Thread(target=lambda: os._exit(0 if in_turn(net).__enter__() is None else 1))
        thread.start()
        thread.join(30)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    ended.set()
    thread.join()
    assert status == 0


def test_random_states_of_overlapping_threads_are_put_back() -> None:
    """Each draws inside; the first to begin ends first."""
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    before = torch.get_rng_state()
    begun, ended = threading.Barrier(2, timeout=60), threading.Event()

    def first() -> None:
        with measuring(one):
            torch.rand(3)
            begun.wait()
            begun.wait()
        ended.set()

    def second() -> None:
        begun.wait()
        with measuring(other):
            torch.rand(2)
            begun.wait()
            ended.wait(60)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
