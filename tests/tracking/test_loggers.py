"""Logs, each with the real package where it is installed; and no package where no log asks for it."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tracked_run import Run, blobs

import flatlens as fl
from flatlens.errors import BadFolder, BadInput
from flatlens.estimate import Estimate, Report, undefined
from flatlens.tracking import CSVLog, Edge, MLflowLog, Moment, TensorBoardLog, WandbLog, scalars

NAMES = ["sharpness(rtol=0.01)", "mls"]
REPORT = Report(
    {
        ("sharpness(rtol=0.01)", None): Estimate(38.1),
        ("sharpness(rtol=0.01)", "fc1"): Estimate(12.0),
        ("hessian_trace", None): Estimate(100.0, stderr=2.0, kind="estimate"),
        ("mls", None): undefined("why"),
    },
    {},
)


def test_the_names_of_a_moment() -> None:
    assert scalars(Moment(5, REPORT, Edge(0.05, 40.0, "2/lr"))) == {
        "flatlens/sharpness(rtol=0.01)": 38.1,
        "flatlens/sharpness(rtol=0.01).edge": 40.0,
        "flatlens/layers/sharpness(rtol=0.01)/fc1": 12.0,
        "flatlens/hessian_trace": 100.0,
        "flatlens/hessian_trace.stderr": 2.0,
    }
    assert "flatlens/sharpness(rtol=0.01).edge" not in scalars(Moment(5, REPORT, Edge()))


def tracked(log: object, steps: int = 4) -> dict[int, float]:
    """A run whose tracker has this log; the sharpness by step."""
    run = Run()
    tracker = fl.Tracker(run.problem, NAMES, every=2, live=False, log=log)
    run.train(steps, tracker)
    rows = tracker.history[(tracker.history["measure"] == NAMES[0]) & (tracker.history["layer"] == "")]
    return dict(zip(rows["step"], rows["value"], strict=True))


def test_a_csv_file_grows_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    truth = tracked(CSVLog(path))
    rows = list(csv.DictReader(path.open()))
    found = {int(row["step"]): float(row["value"]) for row in rows if row["name"] == f"flatlens/{NAMES[0]}"}
    assert found == truth
    assert {"flatlens/mls", f"flatlens/{NAMES[0]}.edge"} <= {row["name"] for row in rows}
    CSVLog(path)(Moment(6, REPORT, Edge()))
    assert path.read_text().count("step,name,value") == 1
    with pytest.raises(BadFolder, match="in a folder that exists"):
        CSVLog(tmp_path / "no" / "run.csv")


def test_a_csv_file_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Killed at step 6 while it wrote, after a checkpoint at 3; an earlier run is in the same file."""
    path, run = tmp_path / "run.csv", Run()

    def tracker() -> fl.Tracker:
        return fl.Tracker(run.problem, "loss", every=1, live=False, log=CSVLog(path))

    tracker().step(5)
    killed, resumed = tracker(), tracker()
    for step in range(4):
        killed.step(step)
    state = killed.state_dict()
    killed.step(4)
    killed.step(5)
    with path.open("a") as file:
        file.write("6,flatle")
    resumed.load_state_dict(state)
    for step in (4, 6):
        resumed.step(step)
    assert [row["step"] for row in csv.DictReader(path.open())] == ["5", "0", "1", "2", "3", "4", "6"]
    later = tracker()
    later.load_state_dict(state | {"latest": 5})  # no row comes after the one at 6, and the earlier run's stay
    later.load_state_dict(tracker().state_dict())  # of a run that was killed before its first step
    assert path.read_text().count("\n") == 7


def test_several_logs_and_what_is_none(tmp_path: Path) -> None:
    seen: list[Moment] = []
    tracked([CSVLog(tmp_path / "a.csv"), seen.append])
    assert [moment.step for moment in seen] == [0, 2, 4]
    run = Run()
    for wrong in ("a.csv", CSVLog, 3):
        with pytest.raises(BadInput, match="functions of a Moment"):
            fl.Tracker(run.problem, "mls", log=wrong)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    truth = tracked(TensorBoardLog(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {event.step: event.value for event in events.Scalars(f"flatlens/{NAMES[0]}")}
    assert found == pytest.approx(truth, rel=1e-6)  # TensorBoard keeps float32
    with pytest.raises(BadInput, match="a folder or a SummaryWriter"):
        TensorBoardLog(3)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(BadInput, match=r"wandb\.init"):
        WandbLog()
    with wandb.init(mode="offline", dir=tmp_path, project="tracked") as run:
        logs = WandbLog(), WandbLog()  # of two trackers
        for step in range(6):
            for log in logs[: 1 + (step % 2 == 0)]:
                log(Moment(step, Report({(f"m{step}", None): Estimate(1.0)}, {}), Edge()))
            run.log({f"own{step}": 1.0}, step=step)
        assert run.step == 5
        logs[1](Moment(6, REPORT, Edge()))  # a row of its own, as that of step 5 is filled
        assert run.step == 6
        run.log({"own": 1.0}, step=100)  # the run's own count is ahead of the tracker's
        truth = tracked(WandbLog())
        run.log({"end": 1.0})
        rows = {"own", "end"} | {f"{name}{step}" for name in ("own", "flatlens/m") for step in range(6)}
        assert rows <= set(run.summary.keys())
        assert run.summary[f"flatlens/{NAMES[0]}"] == pytest.approx(truth[4])
        assert run.summary["flatlens/step"] == 4
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # from MLflow 3.7 on it asks for a data base otherwise
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with pytest.raises(BadInput, match=r"mlflow\.start_run"):
        MLflowLog()
    with mlflow.start_run() as run:
        truth = tracked(MLflowLog())
    name = "flatlens/sharpness_rtol_0.01_"
    found = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    assert {metric.step: metric.value for metric in found} == truth


def test_lightning_s_own_loggers(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.loggers import CSVLogger

    from flatlens.tracking.lightning import TrackerCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(12, 4)

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module, (x, y) = Module(), blobs()
    for log in (True, False):
        tracker = fl.Tracker(fl.Problem(module.net, "cross_entropy", (x, y)), NAMES, every=2, live=False)
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=CSVLogger(tmp_path, version=int(log)), enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[TrackerCallback(tracker, log=log)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=16))
        rows = list(csv.DictReader((Path(trainer.logger.log_dir) / "metrics.csv").open())) if log else []
        found = {int(row["step"]): float(row[f"flatlens/{NAMES[0]}"]) for row in rows if row[f"flatlens/{NAMES[0]}"]}
        truth = tracker.history[tracker.history["measure"] == NAMES[0]].set_index("step")["value"].to_dict()
        assert found == (pytest.approx(truth, rel=1e-6) if log else {})


def test_transformers_own_reports(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_transformers import Rows, classifier, forward

    from flatlens.tracking.transformers import TrackerCallback

    model, (x, y) = classifier(), blobs()
    problem = fl.Problem(model, "cross_entropy", {"x": x, "labels": y}, forward=forward)
    tracker = fl.Tracker(problem, NAMES, every=2, live=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, logging_steps=1000,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
    trainer.add_callback(TrackerCallback(tracker, log=trainer.log))
    trainer.train()
    key = f"flatlens/{NAMES[0]}"
    found = {row["step"]: row[key] for row in trainer.state.log_history if key in row}
    truth = tracker.history[tracker.history["measure"] == NAMES[0]].set_index("step")["value"].to_dict()
    assert found == truth
    assert all(math.isfinite(value) for value in found.values())


def test_no_package_is_imported_that_no_log_asks_for() -> None:
    program = (
        "import sys, torch, flatlens as fl\n"
        "net = torch.nn.Linear(2, 1)\n"
        "problem = fl.Problem(net, 'mse', (torch.ones(4, 2), torch.zeros(4, 1)))\n"
        "fl.Tracker(problem, 'sharpness', live=False).step(0, optimiser=torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "names = ('tensorboard', 'wandb', 'mlflow', 'lightning', 'transformers', 'torch.utils.tensorboard', 'altair')\n"
        "print([name for name in names if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
