"""What is measured when, what training notices of it, and what is kept."""

from __future__ import annotations

import copy
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import module_of
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from tracked_run import Run, blobs, network

import flatlens as fl
from flatlens.errors import BadFolder, BadInput, UnknownName
from flatlens.progress import SideOutputFailed
from flatlens.tracking import tracker as module

MEASURES = ["sharpness", "hessian_trace(probes=4)", "relative_flatness", "loss"]


def same(a: object, b: object) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)  # the standard error of a bound is NaN


def values(tracker: fl.Tracker):
    return tracker.history.drop(columns="seconds")


def test_training_goes_on_to_the_same_bits() -> None:
    alone, tracked = Run(), Run()
    random.seed(3), np.random.seed(3)
    alone.train(30)
    expected, draws = alone.state(), (random.getstate(), str(np.random.get_state()))
    random.seed(3), np.random.seed(3)
    tracked = Run()
    tracker = fl.Tracker(tracked.problem, MEASURES, every=7, live=False)
    tracked.train(30, tracker)
    assert sorted(set(tracker.history.step)) == [0, 7, 14, 21, 28]
    assert same(tracked.state(), expected)
    assert (random.getstate(), str(np.random.get_state())) == draws


def test_a_measurement_that_draws_from_global_generators_is_undone() -> None:
    """The data set draws when it is read, the loss when it is asked: what training draws next is the same."""

    class Drawing(TensorDataset):
        def __getitem__(self, at):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(at)

    run = Run()
    problem = fl.Problem(run.net, "cross_entropy", DataLoader(Drawing(run.x, run.y), batch_size=32))
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    tracker = fl.Tracker(problem, "loss", samples=40, live=False)
    tracker.step()
    assert same(before, (random.getstate(), str(np.random.get_state()), torch.get_rng_state()))


def test_each_number_is_that_of_a_fresh_lens() -> None:
    run, seen = Run(), {}

    def note(step: int) -> None:
        if step % 10 == 0:
            seen[step] = fl.measure(fl.Lens(run.problem), MEASURES)

    tracker = fl.Tracker(run.problem, MEASURES, every=10, live=False)
    run.train(20, tracker, note)
    table = tracker.history
    assert list(table.columns) == [
        "step", "lr", "edge", "measure", "layer", "value", "stderr", "kind", "seconds", "products", "note",
    ]  # fmt: skip
    for step, report in seen.items():
        rows = table[table.step == step].set_index(["measure", "layer"])
        assert len(rows) == len(report)
        for (name, layer), estimate in report.items():
            row = rows.loc[(name, layer or "")]
            tolerance = 1e-3 if name == "sharpness" else 1e-9 if not estimate.margin else 1
            assert row.value == pytest.approx(estimate.value, rel=tolerance)
            assert row.kind == estimate.kind


def test_when_a_measurement_is_due() -> None:
    run = Run()
    for every, expected in ((3, [0, 3, 6]), ([1, 2, 6], [1, 2, 6]), (lambda step: step in (4, 5), [4, 5])):
        tracker = fl.Tracker(run.problem, "loss", every=every, live=False)
        assert [step for step in range(8) if tracker.step(step) is not None] == expected
        assert tracker.history.step.tolist() == expected
    tracker = fl.Tracker(run.problem, "loss", every=2, live=False)
    assert [tracker.step(step) is not None for step in (0, 0, 2, 2, 2, 4)] == [1, 0, 1, 0, 0, 1]
    with pytest.raises(BadInput, match="the last step was 4, and steps must increase"):
        tracker.step(0)
    tracker = fl.Tracker(run.problem, "loss", every=2, live=False)
    assert [tracker.step() is not None for _ in range(5)] == [1, 0, 1, 0, 1]
    tracker.step(7)
    assert tracker.step() is not None  # 8: the counter goes on from what it was told


class Watched(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("every", "last", "expected"),
    [(3, True, [0, 3, 6, 7]), (7, True, [0, 7]), (3, False, [0, 3, 6]), ([1, 2], True, [1, 2])],
)
def test_the_last_step_is_measured_once_at_the_end(every: object, last: bool, expected: list[int]) -> None:
    run = Run()
    with fl.Tracker(run.problem, ["loss", "sharpness"], every=every, live=False, last=last) as tracker:
        run.train(7, tracker)
    tracker.close()
    loss = tracker.history[tracker.history["measure"] == "loss"]
    assert loss["step"].tolist() == expected
    if expected[-1] == 7:
        assert loss["value"].iloc[-1] == fl.measure(fl.Lens(run.problem), "loss")["loss"].value
        assert tracker.history["edge"].iloc[-1] == pytest.approx(2 * 1.9 / 0.05)


def test_an_error_in_the_loop_measures_nothing_and_the_run_may_go_on() -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, "loss", every=4, live=False)
    assert tracker.close() is None  # there is no step yet
    tracker.step(1)
    with pytest.raises(ZeroDivisionError), tracker:
        _ = 1 / 0
    assert len(tracker.history) == 0
    assert tracker.close() is not None
    tracker.step(4)
    assert tracker.history["step"].tolist() == [1, 4]
    with pytest.raises(BadInput, match=r"Tracker\.close\(3\): the last step was 4"):
        tracker.close(3)


def test_a_step_that_is_not_due_runs_no_operation_of_torch() -> None:
    run = Run()
    optimiser = torch.optim.Adam(run.problem.model.parameters())
    tracker = fl.Tracker(run.problem, ["loss", "critical_sharpness"], every=100, live=False)
    with Watched() as watched:
        for step in range(1, 100):
            tracker.step(step, optimiser=optimiser)
        assert watched.count == 0
        tracker.step(100, optimiser=optimiser)
        assert watched.count > 100


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_it_measures_whatever_the_trainer_has_switched_off(context) -> None:
    run = Run()
    expected = fl.measure(fl.Lens(run.problem), ["sharpness", "loss"])
    tracker = fl.Tracker(run.problem, ["sharpness", "loss"], live=False)
    with context():
        report = tracker.step()
    assert report["loss"].value == expected["loss"].value
    assert report["sharpness"].value == pytest.approx(expected["sharpness"].value, rel=1e-4)


def test_a_killed_run_ends_in_the_same_history() -> None:
    options = {"every": 6, "samples": 50, "seed": 5, "live": False}
    whole = Run()
    undisturbed = fl.Tracker(whole.problem, MEASURES, **options)
    whole.train(40, undisturbed)

    first, saved = Run(), {}
    tracker = fl.Tracker(first.problem, MEASURES, **options)

    def save(step: int) -> None:
        if step == 20:
            held = io.BytesIO()
            torch.save(
                {**first.state(), "schedule": first.schedule.state_dict(), "tracker": tracker.state_dict()}, held
            )
            saved["bytes"] = held.getvalue()

    first.train(25, tracker, save)
    back = torch.load(io.BytesIO(saved["bytes"]), weights_only=True)
    second = Run()
    again = fl.Tracker(second.problem, MEASURES, **options)
    again.load_state_dict(back["tracker"])
    second.net.load_state_dict(back["net"])
    second.optimiser.load_state_dict(back["optimiser"])
    second.schedule.load_state_dict(back["schedule"])
    torch.set_rng_state(back["rng"])
    for _ in second.steps(20):
        again.step(optimiser=second.optimiser)
    assert len(values(undisturbed)) > 40
    assert values(again).equals(values(undisturbed))
    assert not values(tracker).equals(values(undisturbed))
    assert again.history.attrs == {"reproducible": True, "note": ""}


def test_a_step_that_a_resumed_run_takes_again_is_measured_once() -> None:
    run = Run()
    options = {"measures": "loss", "every": 2, "live": False}
    tracker = fl.Tracker(run.problem, **options)
    run.train(4, tracker)
    again = fl.Tracker(run.problem, **options)
    again.load_state_dict(tracker.state_dict())
    assert again.step(4) is None
    assert values(again).equals(values(tracker))
    with pytest.raises(BadInput, match="the last step was 4, and steps must increase"):
        again.step(2)
    assert again.step(6) is not None


def test_a_state_is_not_changed_by_going_on() -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, "sharpness", every=2, live=False)
    run.train(4, tracker)
    state = tracker.state_dict()
    before = copy.deepcopy(state)
    run.train(4, tracker)
    assert same(state, before)


@pytest.mark.parametrize(
    "other", [{"measures": "loss"}, {"every": 3}, {"samples": 20}, {"seed": 1}, {"outputs": 2}, {"n": 80}]
)
def test_the_state_of_another_tracker_is_refused(other: dict[str, object]) -> None:
    run, theirs = Run(), Run(other.pop("n", 96))
    own = {"measures": "sharpness", "every": 2, "live": False}
    tracker = fl.Tracker(run.problem, **own)
    with pytest.raises(BadInput, match=r"load_state_dict\(...\): the saved tracker has \w+=") as refused:
        tracker.load_state_dict(fl.Tracker(theirs.problem, **{**own, **other}).state_dict())
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="not the result of Tracker"):
        tracker.load_state_dict({"something": 1})


def test_a_budget_of_time(monkeypatch) -> None:
    """A clock that a measurement moves by 1 and a step of training by 3: a share of 10% lets one in 3 through."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    measure_with = module.measure_with

    def slow(*arguments: object, **options: object) -> fl.Report:
        now[0] += 1
        return measure_with(*arguments, **options)

    monkeypatch.setattr(module, "measure_with", slow)
    run = Run()
    tracker = fl.Tracker(run.problem, ["loss", "accuracy"], every=1, budget=0.1, live=False)
    taken = []
    for step in range(60):
        if tracker.step(step) is not None:
            taken.append(step)
        now[0] += 3
    assert 15 <= len(taken) <= 20
    assert len(taken) <= 0.1 * now[0]
    table = tracker.history
    assert table.attrs["reproducible"] is False
    assert (
        table.attrs["note"]
        == f"{60 - len(taken)} of 60 due measurements were skipped to keep within the budget of wall time"
    )
    skipped = table[table.step == 1]
    assert skipped.measure.tolist() == ["loss", "accuracy"]
    assert skipped.kind.tolist() == ["undefined"] * 2
    assert skipped.note.str.contains("skipped: measuring had taken .*% of the time, the budget is 10%").all()
    assert skipped.value.isna().all()
    again = fl.Tracker(run.problem, ["loss", "accuracy"], every=1, budget=0.1, live=False)
    again.load_state_dict(tracker.state_dict())
    assert again.history.attrs == table.attrs


def test_within_its_budget_nothing_is_skipped() -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, "loss", every=50, budget=0.99, live=False)
    run.train(100, tracker)
    assert tracker.history.attrs == {"reproducible": True, "note": ""}
    assert len(tracker.history) == 3


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_diverged_weights_are_noted_and_training_goes_on(poison: float) -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, ["sharpness", "loss"], every=1, live=False)
    healthy = copy.deepcopy(run.net.state_dict())
    tracker.step()
    with torch.no_grad():
        run.net[0].weight[0, 0] = poison
    report = tracker.step()
    assert report["sharpness"].kind == "undefined"
    run.net.load_state_dict(healthy)
    tracker.step()
    table = tracker.history.set_index(["step", "measure"])
    assert table.loc[1].kind.tolist() == ["undefined", "undefined"]
    assert "NaN or inf, as training that diverged" in table.loc[(1, "loss")].note
    assert table.loc[(2, "loss")].value == table.loc[(0, "loss")].value
    assert table.loc[(2, "sharpness")].value == pytest.approx(table.loc[(0, "sharpness")].value, rel=1e-5)


def test_weights_that_overflow_are_noted() -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, ["sharpness", "loss", "relative_flatness"], every=1, live=False)
    with torch.no_grad():
        run.net[4].weight.mul_(1e38)  # finite, the outputs are not
        run.net[4].weight.mul_(10)
    assert bool(torch.isfinite(run.net[4].weight).all())
    tracker.step()
    table = tracker.history[tracker.history.layer == ""]
    assert table.value.isna().sum() >= 2
    assert set(table[table.value.isna()].kind) == {"undefined"}
    assert (table[table.value.isna()].note != "").all()


def test_what_the_measure_cannot_give_is_noted() -> None:
    net, (x, y) = network(), blobs()
    problem = fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=32)
    tracker = fl.Tracker(problem, ["sharpness", "mls"], live=False)
    tracker.step()
    table = tracker.history.set_index("measure")
    assert table.loc["mls"].kind == "undefined"
    assert "couples" in table.loc["mls"].note
    assert table.loc["sharpness"].value > 0


BAD = {
    "expected a Problem, got Sequential": {"problem": nn.Sequential()},
    "did you mean sharpness": {"measures": "sharpnes"},
    "give names of measures, such as": {"measures": 3},
    "name at least one": {"measures": []},
    "test_loss needs held-out data": {"measures": ["loss", "test_loss"]},
    r"every=0\): expected a whole number of at least 1": {"every": 0},
    r"every='often'\): expected a whole number": {"every": "often"},
    r"every=True\): expected a whole number": {"every": True},
    r"every=\[3, 2\]\): the steps must increase": {"every": [3, 2]},
    r"every=\[\.\.\.\]=-1\): expected a whole number of at least 0": {"every": [-1, 2]},
    r"budget=1\): expected a share of wall time": {"budget": 1},
    r"budget=0.0\): expected a share of wall time": {"budget": 0.0},
    r"samples=0\): expected a whole number of at least 1": {"samples": 0},
    r"subset\(97\): the data has 96 samples": {"samples": 97},
    r"seed=-1\): expected a whole number of at least 0": {"seed": -1},
    r"live=3\): expected True, False or a function": {"live": 3},
    r"outputs='all'\): expected 'exact', or a number": {"outputs": "all"},
}


@pytest.mark.parametrize("says", BAD)
def test_what_cannot_be_used_is_refused_at_once_in_one_line(says: str) -> None:
    options = {"problem": Run().problem, "measures": "loss", **BAD[says]}
    with pytest.raises(BadInput, match=says) as refused:
        fl.Tracker(**options)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, UnknownName) == ("did you mean" in says)


def test_a_step_must_be_a_number() -> None:
    tracker = fl.Tracker(Run().problem, "loss", live=False)
    for step in (-1, 1.5, "3", True):
        with pytest.raises(BadInput, match=r"Tracker\(step=.*whole number"):
            tracker.step(step)
    with pytest.raises(BadInput, match=r"Tracker.step\(optimiser=...\): expected a torch.optim.Optimizer, got int"):
        tracker.step(0, optimiser=3)  # type: ignore[arg-type]
    assert tracker.step(np.int64(100)) is not None


def test_the_file_is_whole_and_the_same_each_time(tmp_path) -> None:
    written = []
    for name in ("a.csv", "b.csv"):
        run = Run()
        tracker = fl.Tracker(run.problem, MEASURES, every=5, live=False)
        run.train(10, tracker)
        tracker.save(tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert written[0].splitlines()[0] == b"step,lr,edge,measure,layer,value,stderr,kind,products,note"
    assert len(written[0].splitlines()) == len(tracker.history) + 1
    with pytest.raises(BadFolder, match="cannot be written"):
        tracker.save(tmp_path / "missing" / "a.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_nothing_measured_yet() -> None:
    table = fl.Tracker(Run().problem, "loss", live=False).history
    assert len(table) == 0
    assert table.attrs["reproducible"] is True
    assert table.dtypes["step"] == "int64"


def test_an_interrupted_measurement_may_be_made_again(monkeypatch) -> None:
    run = Run()
    tracker = fl.Tracker(run.problem, "loss", every=1, live=False)

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "measure_with", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tracker.step(0)
    assert tracker.step(0) is not None
    assert tracker.step(0) is None
    assert len(tracker.history) == 1


@pytest.mark.parametrize("error", [OSError(28, "no space left"), ValueError("closed file"), KeyError("own")], ids=repr)
@pytest.mark.parametrize("of", ["log", "live", "file"])
def test_a_log_that_fails_is_a_warning_and_training_goes_on(
    of: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **more: object) -> None:
        raise error

    told: list[int] = []
    given = {"log": [full], "live": [], "file": [fl.tracking.CSVLog(tmp_path / "run.csv")]}[of]
    quiet, run = Run(), Run()
    alone = fl.Tracker(quiet.problem, "loss", every=1, live=False)
    live = full if of == "live" else False
    tracker = fl.Tracker(run.problem, "loss", every=1, live=live, log=[*given, lambda moment: told.append(moment.step)])
    torch.manual_seed(0)  # of dropout
    quiet.train(4, alone)
    if of == "file":
        monkeypatch.setattr(Path, "open", full)
    torch.manual_seed(0)
    with pytest.warns(SideOutputFailed, match=type(error).__name__ if of != "file" else "CSVLog") as warned:
        run.train(4, tracker)
    assert len(warned) == 1
    assert told == tracker.history["step"].tolist() == alone.history["step"].tolist()  # the other log has all
    assert tracker.history["value"].tolist() == alone.history["value"].tolist()
    assert all(torch.equal(p, q) for p, q in zip(run.net.parameters(), quiet.net.parameters(), strict=True))


def test_a_loss_without_a_second_derivative_keeps_the_numbers_that_need_none() -> None:
    """Of torch's CTC loss torch has no second derivative: what needs it is undefined."""
    torch.manual_seed(0)
    net = nn.Linear(6, 5).double()
    x, y = torch.randn(10, 7, 6, dtype=torch.float64), torch.randint(1, 5, (10, 3))

    def ctc(f: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shares = f.reshape(len(f), 7, 5).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(f),), 7), torch.full((len(f),), 3)
        return nn.functional.ctc_loss(shares, labels, *lengths, reduction="none")

    problem = fl.Problem(net, ctc, (x, y), forward=lambda model, batch: (model(batch[0]).flatten(1), batch[1]))
    tracker = fl.Tracker(problem, ["loss", "ggn_trace", "weight_norm"], every=1, live=False)
    report = tracker.step(0)
    assert report["loss"].value == pytest.approx(float(ctc(net(x).flatten(1), y).detach().mean()), rel=1e-12)
    assert report["ggn_trace"].note.startswith("Problem(loss=...): the loss cannot be differentiated")
    assert report["weight_norm"].kind == "exact"


def test_divergence_is_named_where_outputs_are_not_finite() -> None:
    class Strict(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and not bool(super().forward(x).isfinite().all()):
                raise ValueError("odd outputs")
            return super().forward(x)

    (x, y), net = blobs(), Strict(12, 4)
    tracker = fl.Tracker(fl.Problem(net, "cross_entropy", (x, y)), ["loss", "mls"], every=1, live=False)
    with torch.no_grad():
        net.weight.fill_(3e38)
    note = tracker.step(0)["mls"].note
    assert note.startswith("training diverged? ")
    assert "odd outputs" in note


def test_a_parameter_that_is_measured_by_name_and_gets_another() -> None:
    run = Run()
    problem = fl.Problem(run.net, "cross_entropy", (run.x, run.y), parameters=["0.weight", "4.weight"])
    tracker = fl.Tracker(problem, ["loss", "sharpness"], every=1, live=False)
    prune.l1_unstructured(run.net[0], "weight", 0.5)
    report = tracker.step(0, optimiser=run.optimiser)
    assert {one.kind for one in report.values()} == {"undefined"}
    assert "unknown parameter '0.weight': did you mean" in report["sharpness"].note
    assert "0.weight_orig" in report["sharpness"].note


@pytest.mark.parametrize(
    "raised", [OSError("stale file handle"), RuntimeError("CUDA out of memory"), RuntimeError("singular matrix")]
)
def test_what_is_no_divergence_is_not_called_one(raised: Exception) -> None:
    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if net.fails and not isinstance(raised, OSError):
            raise raised
        return net.net(x)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if net.fails and isinstance(raised, OSError):
                raise raised
            return x[index], y[index]

    (x, y), net = blobs(), module_of(forward, net=(12, 4), fails=False)
    tracker = fl.Tracker(fl.Problem(net, "cross_entropy", Rows()), "loss", every=1, live=False)
    net.fails = True
    note = tracker.step(0)["loss"].note
    assert str(raised) in note
    assert "diverge" not in note


def test_an_optimiser_that_accelerate_has_wrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    run = Run()
    prepared = accelerate.Accelerator(cpu=True).prepare(run.optimiser)
    tracker = fl.Tracker(run.problem, ["sharpness", "preconditioned_sharpness"], every=1, live=False)
    tracker.step(0, optimiser=prepared)
    assert tracker.history.edge.tolist() == pytest.approx([2 * 1.9 / 0.05] * 2)
    assert set(tracker.history.kind) == {"lower bound"}


@pytest.mark.parametrize("every", [np.array(4), torch.tensor(4)])
def test_a_number_of_steps_in_an_array(every: object) -> None:
    tracker = fl.Tracker(Run().problem, "loss", every=every, live=False)
    assert [step for step in range(10) if tracker.due(step)] == [0, 4, 8]


def test_messages_of_what_is_no_whole_state_or_no_function() -> None:
    tracker = fl.Tracker(Run().problem, "loss", live=False)
    with pytest.raises(BadInput, match="the state has no 'tracker'"):
        tracker.load_state_dict({"version": 1})
    with pytest.raises(BadInput, match=r"Tracker\(log='run.csv'\): expected functions of a Moment"):
        fl.Tracker(Run().problem, "loss", log="run.csv")


def test_rounding_is_looked_at_for_one_moment_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run is resumed: the notes of its history are those of a run that went on."""
    looks: list[int] = []
    monkeypatch.setattr("flatlens.measures.lens.moved_by_rounding", lambda *_: looks.append(1) or ("told", "told"))
    run = Run()
    tracker, resumed = (fl.Tracker(run.problem, ["loss", "mls"], every=1) for _ in range(2))
    for step in range(4):
        tracker.step(step)
    resumed.load_state_dict(tracker.state_dict())
    for step in range(4, 9):
        report = resumed.step(step)
        assert "told" in report["mls"].note
    assert len(looks) == 2
