"""The user's own code fails: one line names what failed, on which sample, and the place in the user's file."""

from __future__ import annotations

import inspect
import math
import random
import re
import signal
import sys
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flatlens as fl
from flatlens.curvature import Hessian
from flatlens.errors import BadData, BadInput, BadLoss, BadModel, ForwardFailed, LossFailed
from flatlens.progress import SideOutputFailed
from flatlens.user_code import users_code

N = 1100
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
Y = torch.arange(N) % 2


def line_of(code: Callable[..., object], holds: str) -> str:
    """The place in this file of the line of `code` that holds some text."""
    lines, first = inspect.getsourcelines(code)
    return f"test_users_code.py, line {first + next(k for k, line in enumerate(lines) if holds in line)}"


class Failure:
    """An error from some call on, of a network and its copies together."""

    def __init__(self, error: BaseException, call: float) -> None:
        self.error, self.call, self.calls = error, call, count(1)

    def __deepcopy__(self, known: object) -> Failure:
        return self


class FailsAt(nn.Linear):
    """Fails from some call on, or on a large input."""

    def __init__(self, error: BaseException, call: float = math.inf) -> None:
        super().__init__(3, 2)
        self.failure = Failure(error, call)

    def forward(self, x: Tensor) -> Tensor:
        if next(self.failure.calls) >= self.failure.call or bool((x > 9).any()):
            raise self.failure.error
        return super().forward(x)


ERRORS = [
    ValueError("one\ntwo"),
    SystemExit(3),
    KeyError("key"),
    AssertionError(),
    StopIteration("stop"),
    RuntimeError("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6])
def test_forward_fails_at_any_call(error: BaseException, call: int) -> None:
    model = FailsAt(error, call)
    with pytest.raises(ForwardFailed) as caught:
        fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X[:9], Y[:9]))), "pass")
    told = str(caught.value)
    assert next(model.failure.calls) > call
    assert caught.value.__cause__ is error
    assert line_of(FailsAt.forward, "raise self.failure.error") in told
    assert type(error).__name__ in told
    assert "\n" not in told


@pytest.mark.parametrize("sample", [0, 700, 1030, 1099])
def test_the_sample_that_forward_fails_on_is_named(sample: int) -> None:
    x = X.clone()
    x[sample, 1] = 10.0
    with pytest.raises(ForwardFailed, match="first batch" if sample < 256 else f"on sample {sample} of the data"):
        fl.Problem(FailsAt(ValueError("large")), "cross_entropy", (x, Y))


def test_a_held_out_sample_is_named() -> None:
    x = X.clone()
    x[5] = 10.0
    with pytest.raises(ForwardFailed, match="on sample 5 of the held-out data"):
        fl.Problem(FailsAt(ValueError("large")), "cross_entropy", (X, Y), test=(x, Y))


class Samples(Dataset):
    """Two features from `ragged` on, an error at `broken`."""

    def __init__(self, broken: int = -1, ragged: int = N, error: BaseException | None = None) -> None:
        self.broken, self.ragged, self.error = broken, ragged, error or OSError("no such picture")

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == self.broken:
            raise self.error
        return X[i] if i < self.ragged else X[i, :2], int(Y[i])


def read(data: object) -> fl.Problem:
    return fl.Problem(nn.Linear(3, 2), "cross_entropy", data)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sample", [3, 700])
def test_the_sample_that_cannot_be_read_is_named(sample: int, workers: int) -> None:
    place = line_of(Samples.__getitem__, "raise self.error")
    with pytest.raises(
        BadData, match=rf"sample {sample} cannot be read \(OSError: no such picture \({place}\)\)"
    ) as caught:
        read(DataLoader(Samples(sample), batch_size=64, num_workers=workers))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_data_set_that_exits_is_named() -> None:
    with pytest.raises(BadData, match=r"sample 300 cannot be read \(SystemExit: 5"):
        read(Samples(300, error=SystemExit(5)))


@pytest.mark.parametrize("sample", [3, 700])
def test_samples_that_do_not_go_together_are_named(sample: int) -> None:
    with pytest.raises(
        BadData, match=rf"samples \d+ and {sample} do not go into one batch.*\(3,\), int and \(2,\), int"
    ):
        read(Samples(ragged=sample))


def test_a_collate_that_fails_on_the_last_batch_is_named() -> None:
    def together(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        if len(rows) < 256:
            raise TypeError("too few")
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])

    place = line_of(together, "raise TypeError")
    with pytest.raises(
        BadData, match=rf"collate of batch 4, of samples 1024 to 1099, failed \(TypeError: too few \({place}"
    ):
        read(DataLoader(Samples(), batch_size=256, collate_fn=together))


def test_a_stream_that_fails_names_the_batch() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from (Samples()[i] for i in range(100))
            raise ConnectionError("gone")

    with pytest.raises(BadData, match=r"batch 3 cannot be read \(ConnectionError: gone"):
        read(DataLoader(Stream(), batch_size=32))


def test_a_sampler_that_fails_is_named() -> None:
    class Order(torch.utils.data.Sampler[int]):
        def __iter__(self):
            raise LookupError("no order")

    with pytest.raises(BadData, match=r"its sampler failed \(LookupError: no order"):
        read(DataLoader(Samples(), sampler=Order()))


@pytest.mark.parametrize("call", [1, 2, 3, 5, 9, 14, 20])
def test_a_loss_fails_at_any_call(call: int) -> None:
    calls = []

    def loss(f: Tensor, y: Tensor) -> Tensor:
        calls.append(len(f))
        if len(calls) == call:
            raise ZeroDivisionError("as told")
        return (f[:, 0] - y).square()

    with pytest.raises(BadLoss, match="ZeroDivisionError: as told") as caught:
        fl.measure(fl.Lens(fl.Problem(nn.Linear(3, 2), loss, (X[:9], Y[:9]))), ["ggn_trace", "sharpness"])
    assert line_of(loss, "raise Zero") in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(caught.value, LossFailed) or "parts of it" in str(caught.value)


def hooking(call: Callable[..., object]) -> Callable[..., None]:
    """A forward hook that hooks the gradient of what the module gives."""

    def hooked(module: nn.Module, given: object, z: Tensor) -> None:
        if z.requires_grad:
            z.register_hook(call)

    return hooked


@pytest.mark.parametrize("error", [ValueError("in a hook"), SystemExit(4), StopIteration("x")], ids=repr)
def test_a_hook_of_forward_that_fails_is_one_line(error: BaseException) -> None:
    def fails(*given: object) -> None:
        raise error

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[1].register_forward_hook(hooking(fails))
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", (X[:9], Y[:9]))), ["mls", "loss"])
    assert report["loss"].kind == "exact"  # takes no derivative
    assert re.search(r"such as a hook, failed .*test_users_code\.py, line", report["mls"].note)
    assert type(error).__name__ in report["mls"].note


def test_a_progress_callback_that_fails_is_a_warning_and_may_stop_the_work_by_an_interrupt() -> None:
    class Enough(KeyboardInterrupt):
        pass

    def fails(what: str, done: int, total: int) -> None:
        raise ValueError("as told")

    def stop(what: str, done: int, total: int) -> None:
        raise Enough

    lens = fl.Lens(fl.Problem(nn.Linear(3, 2), "cross_entropy", (X[:9], Y[:9])))
    with pytest.raises(Enough):
        fl.measure(lens, ["average_sharpness"], progress=stop)
    with pytest.warns(SideOutputFailed, match=r"the report of progress failed \(ValueError: as told\)") as told:
        assert fl.measure(lens, ["average_sharpness", "mls"], progress=fails)["mls"].kind == "exact"
    assert len(told) == 1


def test_an_exit_that_a_signals_handler_of_ours_asks_for_is_no_failure_of_the_users_code(monkeypatch) -> None:
    def forward() -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("flatlens.user_code.OURS", __file__)  # as if this handler were flatlens' own
    before = signal.signal(signal.SIGTERM, lambda *given: sys.exit(143))
    try:
        with pytest.raises(SystemExit), users_code(BadInput):
            forward()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_that_cannot_be_shown() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    with pytest.raises(ForwardFailed, match="Silent: no message"):
        fl.Problem(FailsAt(Silent(), 1), "cross_entropy", (X, Y))


def test_random_numbers_that_the_users_code_draws_are_put_back() -> None:
    class Drawn(Samples):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            random.random(), np.random.rand(), torch.rand(())
            return super().__getitem__(i)

    data = Drawn()
    model = nn.Linear(3, 2)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", data)), "mls")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_hook_that_fails_and_a_change_in_place_are_one_line_of_an_operator_too() -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).exp()
            f = h.clone()
            h.mul_(2)  # exp's derivative needs what it gave
            return f

    model, told = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), []
    hessian = Hessian(fl.Problem(model, "cross_entropy", (X[:9], Y[:9])))
    v = torch.ones(hessian.size)
    before = hessian(v)

    def late(slope: Tensor) -> None:
        told.append(slope)
        raise ValueError("late")

    handle = model[0].register_forward_hook(hooking(late))
    with pytest.raises(ForwardFailed, match=r"such as a hook, failed \(ValueError: late \(test_users_code"):
        Hessian(fl.Problem(model, "cross_entropy", (X[:9], Y[:9])))(v)
    handle.remove()
    assert told
    assert torch.equal(hessian(v), before)
    with pytest.raises(BadModel, match="do not change tensors or frozen parameters in place"):
        Hessian(fl.Problem(Overwrites(3, 2), "cross_entropy", (X[:9], Y[:9])))(torch.ones(8))


def mixture(of: torch.dtype, fixed: torch.dtype | None = None) -> nn.Module:
    """An expert of another dtype, whose inputs are cast to its weight's dtype, or to a fixed one."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.expert(net.first(x).tanh().to(fixed or net.expert.weight.dtype))
        return net.last(h.to(net.last.weight.dtype).tanh())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return module_of(forward, first=nn.Linear(3, 4), expert=nn.Linear(4, 4, dtype=of), last=(4, 2))


def test_a_cast_to_a_fixed_dtype_says_to_cast_to_the_weight_s() -> None:
    for fixed, at in (("bfloat16", torch.float64), ("float64", torch.float32), ("float16", torch.float32)):
        expert = getattr(torch, fixed)
        problem = fl.Problem(mixture(expert), "cross_entropy", (X[:9], Y[:9]), dtype=at)
        whole = fl.Problem(mixture(expert).to(at), "cross_entropy", (X[:9], Y[:9]), dtype=at)
        found, truth = (fl.measure(fl.Lens(one), ["mls", "ggn_trace", "sharpness"]) for one in (problem, whole))
        assert {key: e.value for key, e in found.items()} == {key: e.value for key, e in truth.items()}
        if expert == torch.float64:
            with pytest.raises(ForwardFailed, match=r"forward\(\) casts to a fixed one: cast to the weight's"):
                fl.Problem(mixture(expert, expert), "cross_entropy", (X[:9], Y[:9]), dtype=at)
    with pytest.raises(ForwardFailed, match=r"needs numbers of another type.*torch.int64: cast"):
        fl.Problem(nn.Linear(3, 2), "cross_entropy", (X.long(), Y))


def test_a_loss_of_a_distribution_is_told_that_it_gets_the_logits() -> None:
    class Policy(nn.Linear):
        def forward(self, x: Tensor) -> torch.distributions.Categorical:  # type: ignore[override]
            return torch.distributions.Categorical(logits=super().forward(x))

    with pytest.raises(LossFailed, match=r"the loss gets the \.logits of the network's result"):
        fl.Problem(Policy(3, 2), lambda d, y: -d.log_prob(y), (X, Y))
