"""Outputs of all the data without a graph, and the slopes of their losses."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor, nn

import flatlens as fl
from flatlens.problem.forward import forwards, slopes_of_each


def fourth_power(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).pow(4).sum(1)


def made(n: int) -> tuple[fl.Problem, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(n, 3)
    return fl.Problem(net, fourth_power, (x, torch.zeros(n, 2))), x


def test_forwards_give_all_outputs_in_eval_mode_and_leave_the_callers_state() -> None:
    problem, x = made(600)
    problem.model.train()
    with closing(forwards(problem, problem.model)) as found:
        assert not next(found)[0].requires_grad
        assert torch.is_grad_enabled()
    assert problem.model.training
    parts = [f for f, _ in forwards(problem, problem.model)]
    assert problem.model.training
    assert len(parts) > 1
    assert torch.equal(torch.cat(parts), problem.model.eval()(x))


def test_slopes_and_the_output_hessian_in_inference_mode() -> None:
    """The outputs are in float32 and their copy in float64 is made there, and yet it has a derivative."""
    problem, _ = made(5)
    with torch.inference_mode():
        ((f, y),) = forwards(problem, problem.model)
        slope, C = slopes_of_each(problem, f, y), problem.loss.output_hessian(f, y)
    assert torch.allclose(slope, 4 * f.double().pow(3))
    assert torch.allclose(C, torch.diag_embed(12 * f.double().square()))
