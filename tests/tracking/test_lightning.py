"""The callback in a real Lightning trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tracked_run import blobs, network

import flatlens as fl
from flatlens.errors import BadInput

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from flatlens.tracking.lightning import TrackerCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(
    folder: Path,
    tracked: bool = True,
    steps: int = 24,
    resume: Path | None = None,
    accumulate: int = 1,
    **options: object,
):
    torch.manual_seed(1)
    module, (x, y) = Module(), blobs()
    tracker = fl.Tracker(
        fl.Problem(module.net, "cross_entropy", (x, y)),
        ["sharpness", "hessian_trace(probes=4)", "loss"],
        **{"every": 4, "live": False, **options},
    )
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, callbacks=[saver, *([TrackerCallback(tracker)] if tracked else [])],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=16), ckpt_path=resume, weights_only=True)
    return module, tracker, torch.get_rng_state()


def test_training_ends_in_the_same_bits(tmp_path) -> None:
    alone, _, state = fit(tmp_path / "a", tracked=False)
    tracked, tracker, after = fit(tmp_path / "b")
    assert torch.equal(state, after)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, tracked.state_dict()[name]), name
    table = tracker.history
    assert sorted(set(table.step)) == list(range(0, 25, 4))
    assert set(table.kind) <= {"exact", "lower bound", "estimate"}
    assert table.lr.tolist() == pytest.approx([0.05] * len(table))
    assert table.edge.tolist() == pytest.approx([2 * 1.9 / 0.05] * len(table))


def test_accumulated_batches_count_once(tmp_path) -> None:
    _, tracker, _ = fit(tmp_path, steps=6, accumulate=3, every=1)
    assert tracker.history[tracker.history.measure == "loss"].step.tolist() == list(range(7))


def test_the_last_step_is_measured_too(tmp_path) -> None:
    _, tracker, _ = fit(tmp_path, steps=6)
    assert sorted(set(tracker.history.step)) == [0, 4, 6]
    assert tracker.history.edge.notna().all()


def test_a_run_resumed_from_a_checkpoint_ends_in_the_same_history(tmp_path, monkeypatch) -> None:
    """Between epochs, and without dropout: Lightning restores neither a loader's place nor the random state."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    _, whole, _ = fit(tmp_path / "a")
    fit(tmp_path / "b", steps=15)
    _, resumed, _ = fit(tmp_path / "b", resume=tmp_path / "b" / "step=12.ckpt")
    assert resumed.history.drop(columns="seconds").equals(whole.history.drop(columns="seconds"))


def test_a_checkpoint_of_another_tracker_is_refused(tmp_path) -> None:
    fit(tmp_path, steps=6)
    with pytest.raises(BadInput, match="the saved tracker has every=4, this one 5"):
        fit(tmp_path, resume=tmp_path / "step=6.ckpt", every=5)
    with pytest.raises(BadInput, match="expected a Tracker, got int"):
        TrackerCallback(3)


def test_two_trackers_in_one_trainer() -> None:
    module, data = Module(), blobs()
    problem = fl.Problem(module.net, "cross_entropy", data)
    trackers = [fl.Tracker(problem, "loss", every=every, live=False) for every in (1, 2)]
    callbacks = [TrackerCallback(one, name=name) for one, name in zip(trackers, ("", "seldom"), strict=True)]
    assert [one.state_key for one in callbacks] == ["TrackerCallback", "TrackerCallback(seldom)"]
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=16))
    assert [list(one.history.step) for one in trackers] == [[0, 1, 2, 3, 4], [0, 2, 4]]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware steps of SGD, with the interface of the implementations that people use."""

    def __init__(self, params: object, rho: float, lr: float) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False, "lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):  # type: ignore[no-untyped-def]
        held = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        norm = torch.cat([p.grad.flatten() for p in held]).norm()
        moves = [self.param_groups[0]["rho"] * p.grad / norm for p in held]
        for p, eps in zip(held, moves, strict=True):
            p.add_(eps)
        with torch.enable_grad():
            closure()
        for p, eps in zip(held, moves, strict=True):
            p.sub_(eps)
        self.base_optimizer.step()
        return loss


@pytest.mark.parametrize("name", ["SAM", "NAdam"])
def test_the_edge_of_the_trainer_s_own_optimiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = {"SAM": lambda p: SAM(p, 0.05, 0.1), "NAdam": torch.optim.NAdam}[name]
    monkeypatch.setattr(Module, "configure_optimizers", lambda module: made(module.parameters()))
    _, tracker, _ = fit(tmp_path, steps=8)
    edges = tracker.history.set_index("measure").edge["loss"]
    plain = 20 if name == "SAM" else 2 * 1.9 / (0.1 * 2.8 * 0.002)  # of SGD, and of NAdam in the end
    assert len(set(edges)) == 3  # SAM's moves with the gradient, NAdam's with the step
    assert edges.between(0, plain, inclusive="neither").all()


EVERYTHING = ["eigenspace(top_k=1)", "batch_sharpness(samples=4, batches=2)", "hessian_diagonal(probes=8)",
              "critical_sharpness", "sharpness"]  # fmt: skip


def test_the_callback_carries_every_measure_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "configure_optimizers", lambda module: torch.optim.SGD(module.parameters(), lr=0.05))
    module = Module()
    problem = fl.Problem(module.net, "cross_entropy", blobs())
    tracker = fl.Tracker(problem, EVERYTHING, every=2, live=False)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[TrackerCallback(tracker)], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*blobs()), batch_size=16))
    last = tracker.history.query("step == 4 and layer == ''").set_index("measure")
    for name in (*EVERYTHING, "eigenspace(top_k=1).overlap", "eigenspace(top_k=1).update"):
        assert last["kind"][name] != "undefined", last["note"][name]
    assert last["edge"]["sharpness"] == last["edge"][EVERYTHING[1]] == 2 / last["lr"]["sharpness"]
    assert tracker.batch_size == 16
