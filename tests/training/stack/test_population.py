"""A lane's bits are those of the network trained alone, whatever the other lanes, their number, or a kill."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import flatlens as fl
from flatlens.errors import BadFolder
from flatlens.training import SGD, Adam, Cosine, RMSProp, Steps, Training, Until, train
from flatlens.training.stack import Member, population, train_together, why_alone
from flatlens.training.stack.chain import LayerChain
from flatlens.training.stack.lanes import Lanes

N, CLASSES = 45, 3
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
OPTIMISERS = {
    "sgd": lambda k: SGD(0.02 * (1 + k)),
    "momentum": lambda k: SGD(0.01, momentum=0.1 + 0.15 * (k % 5), weight_decay=1e-3 * (1 + k)),
    "nesterov": lambda k: SGD(0.02, momentum=0.5 + 0.05 * (k % 5), nesterov=True),
    "adam": lambda k: Adam(1e-3 * (1 + k), beta1=0.8 + 0.02 * (k % 5)),
    "adam, decay": lambda k: Adam(3e-3, weight_decay=0.01 * (1 + k)),
    "adamw": lambda k: Adam(3e-3, weight_decay=0.01 * (1 + k), decoupled=True),
    "rmsprop": lambda k: RMSProp(1e-3 * (1 + k)),
    "rmsprop, momentum": lambda k: RMSProp(2e-3, momentum=0.2 + 0.1 * (k % 5), weight_decay=1e-3),
}
RULES = (
    Until(),
    Until(loss_below=0.9, loss_over="epoch"),
    Until(loss_below=0.8, loss_window=2),
    Until(gradient_norm=0.3),
    Until(accuracy=0.8),
)
SCHEDULES = ({}, {"schedule": Cosine(20, "steps")}, {"schedule": Steps((2,))}, {"warmup": 5})


def samples(seed=1, n=N, wrong=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    y = (x[:, :CLASSES] + 0.3 * torch.randn(n, CLASSES, generator=generator)).argmax(1)
    y[:wrong] = (y[:wrong] + 1) % CLASSES
    return x, y


DATA, TEST = samples(), samples(2, 31)


def network(seed, activation="relu", dtype=torch.float32):
    torch.manual_seed(seed)
    act = ACTIVATIONS[activation]
    return nn.Sequential(nn.Linear(8, 16), act(), nn.Linear(16, 16), act(), nn.Linear(16, CLASSES)).to(dtype)


def how(k, optimiser="sgd", batch=8, loss="half_squared_error"):
    """Settings of the k-th network: of one kind, with all else its own."""
    return Training(
        OPTIMISERS[optimiser](k), batch_size=batch, loss=loss, max_steps=20 + 7 * (k % 4), seed=k, until=RULES[k % 5],
        check_every=3 + k % 3, label_smoothing=0.05 * (k % 3), **SCHEDULES[k % 4],
    )  # fmt: skip


def member(k, activation="relu", save=None, progress=None, **kind):
    x, y = DATA
    if k % 4 == 3:  # noisy labels of its own, on the same inputs
        y = samples(wrong=5)[1]
    return Member(network(k, activation), (x, y), how(k, **kind), TEST, save=save, progress=progress)


def alone(one):
    return train(one.model, one.data, one.settings, test=one.test)


def require_same(one, result, other, wanted):
    """Bits of the weights, and all of the result."""
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for name in ("outcome", "steps", "epochs", "loss", "accuracy"):
        assert getattr(result, name) == getattr(wanted, name), name
    for name, curve in wanted.curves.items():
        assert torch.equal(result.curves[name], curve), name


@pytest.fixture(autouse=True)
def _one_thread_and_always_fast(monkeypatch):
    """Times that say a stack is faster: what these tests are about is its digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(population, "_timed", lambda step: step() or 1.0)
    monkeypatch.setattr(population, "_KNOWN", {})
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("batch", [1, 8, 15, None])
def test_every_optimiser_and_batch(optimiser, batch):
    members = [member(k, optimiser=optimiser, batch=batch) for k in range(7)]
    ended = {one.number: one for one in train_together(members, lanes=4)}
    assert sorted(ended) == list(range(7))
    assert {one.why_alone for one in ended.values()} == {""}
    for k, one in enumerate(members):
        other = member(k, optimiser=optimiser, batch=batch)
        require_same(one, ended[k].result, other, alone(other))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("loss", ["cross_entropy", "half_squared_error", "mse"])
def test_every_loss_and_activation(activation, loss):
    members = [member(k, activation, loss=loss) for k in range(5)]
    for ended in train_together(members, lanes=3):
        assert ended.why_alone == ""
        other = member(ended.number, activation, loss=loss)
        require_same(members[ended.number], ended.result, other, alone(other))


class Killed(BaseException):
    pass


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    which=st.lists(st.integers(0, 11), min_size=1, max_size=7, unique=True),
    lanes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    kills=st.lists(st.integers(1, 60), max_size=3),
    optimiser=st.sampled_from(list(OPTIMISERS)),
    loss=st.sampled_from(["cross_entropy", "mse"]),
)
def test_no_bit_depends_on_the_other_lanes_their_number_or_a_kill(
    tmp_path_factory, which, lanes, kills, optimiser, loss
):
    folder = tmp_path_factory.mktemp("runs")
    kind = {"optimiser": optimiser, "loss": loss}
    told = []

    def progress(what, done, total):
        told.append(done)
        if kills and len(told) == kills[0]:
            raise Killed

    def go(count):
        fresh = [member(k, save=folder / f"{k}.pt", progress=progress, **kind) for k in which]
        return fresh, {one.number: one.result for one in train_together(fresh, count)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatlens.training.run.INTERVAL", 0.0)
        patch.setattr(population, "_VISITS", 0.0)
        for attempt in range(len(kills) + 1):
            told.clear()
            try:
                members, ended = go(lanes[attempt % len(lanes)])
                break
            except Killed:
                kills = kills[1:]
    for number, (k, one) in enumerate(zip(which, members, strict=True)):
        other = member(k, **kind)
        require_same(one, ended[number], other, alone(other))


def test_a_run_begun_in_a_stack_is_finished_alone_and_the_other_way_round(tmp_path, monkeypatch):
    monkeypatch.setattr(population, "_VISITS", 0.0)
    monkeypatch.setattr("flatlens.training.run.INTERVAL", 0.0)

    def stop(what, done, total):
        if done >= 9:
            raise Killed

    for k in (0, 5, 10):
        save, wanted = tmp_path / f"{k}.pt", member(k, optimiser="adam")
        result = alone(wanted)
        with pytest.raises(Killed):
            list(train_together([member(k, optimiser="adam", save=save, progress=stop)]))
        one = member(k, optimiser="adam")
        require_same(one, train(one.model, one.data, one.settings, test=TEST, save=save), wanted, result)
        save.unlink()
        one = member(k, optimiser="adam")
        with pytest.raises(Killed):
            train(one.model, one.data, one.settings, test=TEST, save=save, progress=stop)
        one = member(k, optimiser="adam", save=save)
        (ended,) = train_together([one])
        assert ended.why_alone == ""
        require_same(one, ended.result, wanted, result)


@pytest.mark.parametrize("loss", ["half_squared_error", "cross_entropy"])
@pytest.mark.parametrize(
    "rule", [Until(loss_below=0.05), Until(accuracy=1.0), Until(loss_below=0.1, accuracy=1.0), Until(loss_below=10.0)]
)
def test_a_few_samples_only_spare_looks_that_decide_nothing(loss, rule, monkeypatch):
    spared, judge = [], Lanes.certain_to_go_on

    def judged(lanes, which):
        go_on = judge(lanes, which)
        for row in go_on:
            run = lanes.runs[row]
            lanes.put_weights(row)
            (value, right), until = run.data.look(), run.settings.until
            assert not until.met([value], right, math.nan)
            spared.append(run.step)
        return go_on

    monkeypatch.setattr(Lanes, "certain_to_go_on", judged)

    def one(k):
        training = Training(SGD(0.05 * (1 + k)), 5, loss=loss, max_steps=400, seed=k, until=rule, check_every=2)
        return Member(network(k), DATA, training, TEST)

    ended = {end.number: end.result for end in train_together([one(k) for k in range(4)])}
    wanted = {k: alone(one(k)) for k in range(4)}
    for k, result in wanted.items():
        assert (ended[k].outcome, ended[k].steps, ended[k].loss) == (result.outcome, result.steps, result.loss)
        assert all(torch.equal(ended[k].curves[name], curve) for name, curve in result.curves.items())
    assert bool(spared) == (rule.loss_below != 10.0)


def test_several_kinds_at_once_and_what_no_stack_takes():
    odd = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    members = [member(0), member(1, optimiser="adam"), Member(odd, DATA, how(0)), member(2), member(3, batch=4)]
    ended = {one.number: one for one in train_together(members, lanes=3)}
    assert [number for number, one in sorted(ended.items()) if one.why_alone] == [2]
    assert "BatchNorm1d" in ended[2].why_alone
    for k, kind in ((0, {}), (1, {"optimiser": "adam"}), (4, {"batch": 4})):
        other = member(min(k, 3), **kind)
        require_same(members[k], ended[k].result, other, alone(other))


def test_an_error_ends_its_own_run_alone(tmp_path):
    class Fails:
        def step(self, step=None, *, optimiser=None):
            if step == 5:
                raise ValueError("no")

    one = member(1)
    members = [member(0), replace(one, watch=Fails()), replace(member(2), data=(DATA[0], DATA[1] + 7)), member(4)]
    ended = {each.number: each for each in train_together(members)}
    assert str(ended[1].error) == "no"
    assert ended[2].error is not None
    for k, number in ((0, 0), (4, 3)):
        other = member(k)
        require_same(members[number], ended[number].result, other, alone(other))
    (tmp_path / "0.pt").write_bytes(b"hello")
    with pytest.raises(BadFolder, match="cannot be read"):
        list(train_together([member(0, save=tmp_path / "0.pt")]))


def test_a_tracker_in_a_stack_measures_the_last_step_as_alone():
    def tracked(k):
        one = member(k)
        problem = fl.Problem(one.model, "cross_entropy", one.data)
        return replace(one, watch=fl.Tracker(problem, "loss", every=11, live=False))

    members = [tracked(k) for k in range(3)]
    assert all(each.error is None for each in train_together(members))
    for k, one in enumerate(members):
        other = tracked(k)
        steps = train(other.model, other.data, other.settings, test=other.test, watch=other.watch).steps
        history = one.watch.history.drop(columns="seconds")
        assert history.equals(other.watch.history.drop(columns="seconds"))
        assert history["step"].iloc[-1] == steps
        assert steps % 11


def test_what_diverges_takes_no_other_along():
    settings = replace(how(0), optimiser=SGD(1e6))
    members = [member(0), Member(network(1), DATA, settings, TEST), member(2)]
    ended = {each.number: each.result for each in train_together(members)}
    assert ended[1].outcome == "diverged"
    other = member(2)
    require_same(members[2], ended[2], other, alone(other))


def test_a_shape_whose_kernels_differ_is_trained_alone(monkeypatch):
    outputs = LayerChain.outputs
    off = 1e-3
    monkeypatch.setattr(
        LayerChain, "outputs", lambda self, views, x: outputs(self, views, x) * (1 + off * (len(x) == 3))
    )
    members = [member(k) for k in (0, 5, 10)]
    ended = list(train_together(members))
    assert all("would not be bitwise identical" in one.why_alone for one in ended)
    for one in ended:
        other = member((0, 5, 10)[one.number])
        require_same(members[one.number], one.result, other, alone(other))


def test_a_slower_stack_is_not_taken(monkeypatch):
    alone = iter([1.0] * 2 * population._MANY_STEPS)
    monkeypatch.setattr(population, "_timed", lambda step: step() or next(alone, 9.0))
    assert all("times as slow" in one.why_alone for one in train_together([member(0), member(5)]))


def test_why_alone_names_the_reason():
    frozen = network(0)
    frozen[0].weight.requires_grad_(False)
    shared = nn.Linear(8, 8)
    hooked = network(0)
    hooked[0].register_forward_hook(lambda *_: None)
    for model, word in (
        (frozen, "frozen"),
        (nn.Sequential(shared, nn.ReLU(), shared), "shared"),
        (hooked, "hooks"),
        (nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5)), "Dropout"),
        (nn.Sequential(nn.ReLU(), nn.Linear(8, 3)), "ReLU"),
    ):
        assert word in why_alone(model, how(0))
    assert "ghost" in why_alone(network(0), replace(how(0), ghost_batch=4))
    assert why_alone(network(0, dtype=torch.float64), how(0)) == ""


@pytest.mark.parametrize(
    ("dtype", "sizes", "samples", "held_out", "batch"),
    [
        (torch.float32, (2, 16, 2), 20, 5, 16),
        (torch.float64, (4, 4, 1), 33, None, 4),
        (torch.float32, (3, 2, 1), 30, 7, 1),
    ],
)
def test_small_networks_have_the_bits_of_each_alone(
    dtype: torch.dtype, sizes: tuple[int, int, int], samples: int, held_out: int | None, batch: int
) -> None:
    """Also in their curves on held-out data; or each is trained alone: two kernels agree in most values by chance."""
    torch.manual_seed(1)
    ins, width, outs = sizes
    x, y = torch.randn(samples, ins, dtype=dtype), torch.randn(samples, outs, dtype=dtype)
    test = (
        None
        if held_out is None
        else (torch.randn(held_out, ins, dtype=dtype), torch.randn(held_out, outs, dtype=dtype))
    )

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(ins, width), nn.GELU(), nn.Linear(width, outs)).to(dtype)

    how = [Training(SGD(0.02 + 0.01 * s), batch_size=batch, loss="mse", max_steps=300, seed=s) for s in range(5)]
    for ended in train_together([Member(net(s), (x, y), one, test=test) for s, one in enumerate(how)]):
        alone = train(net(ended.number), (x, y), how[ended.number], test=test)
        assert ended.result is not None
        together = ended.result.curves
        assert together.keys() == alone.curves.keys()
        assert all(np.array_equal(together[name], alone.curves[name], equal_nan=True) for name in together)
