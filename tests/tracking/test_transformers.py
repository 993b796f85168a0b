"""The callback in a real transformers trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.utils.data import Dataset
from tracked_run import blobs, network

import flatlens as fl
from flatlens.errors import BadInput, BadWeights

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from flatlens.tracking.transformers import FILE, TrackerCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.x, self.y = blobs()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"x": self.x[at], "labels": self.y[at]}


def classifier() -> nn.Module:
    def forward(net: nn.Module, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = net.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits} if labels is not None else logits

    return module_of(forward, net=network())


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), batch["labels"]


def train(
    folder: Path, tracked: bool = True, steps: int = 12, resume: bool = False, optim: str = "sgd", accumulate: int = 1,
    **options: object,
):  # fmt: skip
    torch.manual_seed(1)
    model, (x, y) = classifier(), blobs()
    tracker = fl.Tracker(
        fl.Problem(model, "cross_entropy", {"x": x, "labels": y}, forward=forward),
        ["sharpness", "hessian_trace(probes=4)", "loss"],
        **{"every": 2, "live": False, **options},
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=0.05, optim=optim,
        report_to="none", save_steps=4, use_cpu=True, disable_tqdm=True, logging_strategy="no", seed=3,
        lr_scheduler_type="constant", gradient_accumulation_steps=accumulate, remove_unused_columns=False,
    )  # fmt: skip
    callbacks = [TrackerCallback(tracker)] if tracked else []
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    return model, tracker


def test_training_ends_in_the_same_bits(tmp_path) -> None:
    alone, _ = train(tmp_path / "a", tracked=False)
    state = torch.get_rng_state()
    tracked, tracker = train(tmp_path / "b")
    assert torch.equal(state, torch.get_rng_state())
    for name, value in alone.state_dict().items():
        assert torch.equal(value, tracked.state_dict()[name]), name
    table = tracker.history
    assert sorted(set(table.step)) == list(range(0, 13, 2))
    assert set(table.kind) <= {"exact", "lower bound", "estimate"}
    assert table.edge.tolist() == pytest.approx([2 / 0.05] * len(table))


def test_accumulated_batches_count_once_and_adam_has_its_own_edge(tmp_path) -> None:
    _, tracker = train(tmp_path, steps=3, accumulate=2, optim="adamw_torch", every=1)
    table = tracker.history[tracker.history.measure == "loss"]
    assert table.step.tolist() == [0, 1, 2, 3]
    assert table.lr.tolist() == [0.05] * 4
    assert table.edge.tolist() == pytest.approx([38 / 0.05] * 4)  # of its preconditioned sharpness


def test_schedule_free_training_has_its_edge(tmp_path) -> None:
    pytest.importorskip("schedulefree")
    _, tracker = train(tmp_path, steps=3, optim="schedule_free_adamw", every=1)
    edges = tracker.history[tracker.history.measure == "loss"].edge
    averaging = (1, 1, 1 / 2, 1 / 3)  # before the first step, and in each
    assert edges.tolist() == pytest.approx([(2 - c) / (0.05 * (1 - c / 2 - 0.9 * (1 - c))) for c in averaging])


@pytest.mark.parametrize("best", [False, True])
def test_the_last_step_is_measured_too_unless_the_trainer_went_back(tmp_path, best) -> None:
    _, tracker = train(tmp_path, steps=5)
    assert sorted(set(tracker.history.step)) == [0, 2, 4, 5]
    callback, state, arguments = TrackerCallback(tracker), transformers.TrainerState(), SimpleNamespace()
    state.global_step, state.best_model_checkpoint = 7, "checkpoint-4" if best else None
    arguments.load_best_model_at_end = True
    callback.on_train_end(arguments, state, transformers.TrainerControl())
    assert (7 in set(tracker.history.step)) is not best


def test_a_run_resumed_from_a_checkpoint_ends_in_the_same_history(tmp_path) -> None:
    """The trainer restores its random state, too."""
    _, whole = train(tmp_path / "a")
    train(tmp_path / "b", steps=7)
    assert (tmp_path / "b" / "checkpoint-4" / FILE).is_file()
    _, resumed = train(tmp_path / "b", resume=True)
    assert resumed.history.drop(columns="seconds").equals(whole.history.drop(columns="seconds"))


def test_what_cannot_be_restored(tmp_path) -> None:
    train(tmp_path, steps=4)
    path = tmp_path / "checkpoint-4" / FILE
    with pytest.raises(BadInput, match="the saved tracker has seed=0, this one 1"):
        train(tmp_path, resume=True, seed=1)
    path.write_bytes(b"nonsense")
    with pytest.raises(BadWeights, match="not the saved state of a tracker"):
        train(tmp_path, resume=True)
    path.unlink()
    with pytest.warns(UserWarning, match="no tracker's state at .*: the history begins here"):
        _, tracker = train(tmp_path, resume=True, steps=6)
    assert sorted(set(tracker.history.step)) == [4, 6]
    with pytest.raises(BadInput, match="expected a Tracker, got int"):
        TrackerCallback(3)


def test_a_trainer_s_next_run_may_have_another_tracker(tmp_path) -> None:
    model, (x, y) = classifier(), blobs()
    problem = fl.Problem(model, "cross_entropy", {"x": x, "labels": y}, forward=forward)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=8, report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    for _ in range(2):
        tracker = fl.Tracker(problem, "loss", every=1, live=False)
        trainer.add_callback(TrackerCallback(tracker))
        trainer.train()
        trainer.remove_callback(TrackerCallback)
        assert tracker.history.step.tolist() == [0, 1]


def test_two_trackers_in_one_trainer(tmp_path) -> None:
    def trained(names: tuple[str, str], resume: bool = False) -> list[fl.Tracker]:
        torch.manual_seed(0)
        model, (x, y) = classifier(), blobs()
        problem = fl.Problem(model, "cross_entropy", {"x": x, "labels": y}, forward=forward)
        trackers = [fl.Tracker(problem, "loss", every=every, live=False) for every in (1, 2)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=8, report_to="none", save_steps=4,
            use_cpu=True, disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        callbacks = [TrackerCallback(one, name=name) for one, name in zip(trackers, names, strict=True)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resume else None)
        return trackers

    with pytest.raises(BadInput, match="another tracker of this trainer has this name"):
        trained(("", ""))
    whole = trained(("", "seldom"))
    assert (tmp_path / "checkpoint-4" / "flatlens_tracker-seldom.pt").is_file()
    again = trained(("", "seldom"), resume=True)
    for one, other in zip(whole, again, strict=True):
        assert one.history.drop(columns="seconds").equals(other.history.drop(columns="seconds"))


@pytest.mark.parametrize("half", [False, True])
def test_the_callback_carries_every_measure_of_training(tmp_path, half: bool) -> None:
    names = ["eigenspace(top_k=1)", "batch_sharpness(samples=4, batches=2)", "hessian_diagonal(probes=8)",
             "critical_sharpness", "sharpness"]  # fmt: skip
    torch.manual_seed(1)
    model, (x, y) = classifier(), blobs()
    model = model.to(torch.bfloat16) if half else model
    problem = fl.Problem(
        model, "cross_entropy", {"x": x.to(next(model.parameters()).dtype), "labels": y}, forward=forward
    )
    tracker = fl.Tracker(problem, names, every=2, live=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, learning_rate=0.05, optim="sgd",
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        lr_scheduler_type="constant", remove_unused_columns=False, gradient_accumulation_steps=2,
    )  # fmt: skip
    rows = Rows()
    rows.x = rows.x.to(next(model.parameters()).dtype)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[TrackerCallback(tracker)]
    )
    trainer.train()
    last = tracker.history.query("step == 4 and layer == ''").set_index("measure")
    for name in (*names, "eigenspace(top_k=1).overlap", "eigenspace(top_k=1).update"):
        assert last["kind"][name] != "undefined", last["note"][name]
    assert last["edge"]["sharpness"] == last["edge"][names[1]] == pytest.approx(40)
    assert tracker.batch_size == 16
