"""What a walk keeps: in the data's order, in few buffers, whatever the chunks."""

from __future__ import annotations

import pytest
import torch

import flatlens as fl
from flatlens.problem.ranks import ALONE, ChunkBuffer


def test_rows_come_back_in_the_order_of_the_data() -> None:
    kept: ChunkBuffer[str] = ChunkBuffer()
    parts = {3: torch.tensor([7.0, 8.0]), 0: torch.tensor([1.0]), 1: torch.tensor([2.0, 3.0, 4.0])}
    for number, part in parts.items():
        kept.add(number, {"a": part})
        kept.add(number, {"b": part[:, None] * torch.tensor([1.0, 10.0])} if number else {})
    found = kept.joined(ALONE)
    assert found["a"].tolist() == [1.0, 2.0, 3.0, 4.0, 7.0, 8.0]
    assert found["b"].tolist() == [[2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [7.0, 70.0], [8.0, 80.0]]


def test_many_chunks_lie_in_one_buffer() -> None:
    """The numbers of a chunk, kept by themselves, would lie among the next chunk's large buffers."""
    kept: ChunkBuffer[str] = ChunkBuffer()
    for number in range(1000):
        kept.add(number, {"a": torch.full((3,), float(number))})
    assert len(kept._buffers) == 1
    assert kept._buffers["a"].numel() < 4 * 3000
    assert torch.equal(kept.joined(ALONE)["a"], torch.arange(1000.0).repeat_interleave(3))


def test_rows_of_another_shape_are_refused() -> None:
    kept: ChunkBuffer[str] = ChunkBuffer()
    kept.add(0, {"a": torch.zeros(2, 3)})
    with pytest.raises(AssertionError):
        kept.add(1, {"a": torch.zeros(2, 1)})


def test_a_walk_tells_how_far_it_is() -> None:
    x = torch.randn(10, 2)
    problem = fl.Problem(torch.nn.Linear(2, 2), "half_squared_error", (x, x))
    told: list[tuple[str, int, int]] = []
    numbers = [n for n, _ in problem.shared(4, None, "walking", lambda *step: told.append(step))]
    assert len(numbers) == 3
    assert numbers == sorted(numbers)
    assert [what for what, _, _ in told] == ["walking"] * 3
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1] == ("walking", 10, 10)
