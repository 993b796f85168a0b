"""Where a tracker's numbers go: a line on stderr, a CSV file, TensorBoard, Weights & Biases, MLflow.

Each log is called with a `Moment`: `Tracker(problem, measures, log=[CSVLog("run.csv"), TensorBoardLog("runs")])`. Its
package is imported when it is made, and not before. Names are flatlens/MEASURE and flatlens/layers/MEASURE/LAYER; with
.stderr stands the standard error, with .edge the edge of stability of a sharpness. What is undefined is left out. No
name is a folder of another's: MLflow keeps a file for each.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

from flatlens.column import Column
from flatlens.curvature.optimiser_geometry import Edge, has_edge
from flatlens.errors import BadFolder, BadInput, needs
from flatlens.estimate import Report
from flatlens.problem.ranks import claimed, in_first_process

_PAUSE = 15.0  #: seconds between two lines if stderr is not a terminal; the 1st, 2nd, 4th, ... comes in any case


@dataclass(frozen=True, eq=False)
class Moment:
    """A measurement of a training run.

    >>> import pathlib, tempfile, torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> moments = []
    >>> _ = fl.Tracker(problem, "mls", every=1, log=moments.append, live=False).step(0)
    >>> moments[0].step, moments[0].report["mls"].kind
    (0, 'exact')
    """

    step: int
    report: Report
    edge: Edge


class Live:
    """The default `live`: on a terminal one line that is rewritten in place, elsewhere a new line now and then.

    >>> import pathlib, tempfile, torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> tracker = fl.Tracker(problem, "mls", every=1, live=Live())
    """

    def __init__(self) -> None:
        self._spoke, self._moments = -float("inf"), 0

    def __call__(self, moment: Moment) -> None:
        """Show the moment; where processes train together, in the first one alone."""
        if not in_first_process():
            return
        line = as_line(moment)
        self._moments += 1
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            # the cursor returns to the line's start, so that other output overwrites it
            print(f"\x1b[2K{line[: width - 1]}\r", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._spoke >= _PAUSE or self._moments & (self._moments - 1) == 0:
            self._spoke = time.monotonic()
            print(f"flatlens: {line}", file=sys.stderr, flush=True)


def as_line(moment: Moment) -> str:
    """Return the step and each measure's value; beside a sharpness, its share of the edge.

    >>> from flatlens.estimate import Estimate
    >>> report = Report({("sharpness", None): Estimate(38.1), ("loss", None): Estimate(0.25)}, {})
    >>> as_line(Moment(200, report, Edge(0.05, 40.0, "2/lr")))
    'step 200: sharpness 38.1, 2/lr = 40 (95%); loss 0.25'
    """
    said = []
    for (name, layer), estimate in moment.report.items():
        column = Column.parse(name)
        if layer is not None or column.part:
            continue
        if estimate.kind == "undefined":
            said.append(f"{name} undefined")
            continue
        told = f"{name} {estimate.value:.3g}" + (f" +- {estimate.margin:.1g}" if estimate.margin else "")
        edge = moment.edge.beside(column.name)
        if has_edge(name) and edge > 0:
            formula = "2/lr" if column.name == "critical_sharpness" else moment.edge.formula
            label = formula if 0 < len(formula) <= len("2(1+momentum)/lr") else "edge"
            told += f", {label} = {edge:.3g} ({estimate.value / edge:.0%})"
        said.append(told)
    return f"step {moment.step}: {'; '.join(said)}"


PREFIX = "flatlens"


def scalars(moment: Moment) -> dict[str, float]:
    """Return a moment's numbers by name.

    >>> from flatlens.estimate import Estimate, Report
    >>> from flatlens.tracking import Edge
    >>> report = Report({("sharpness", None): Estimate(38.1), ("mls", "fc1"): Estimate(2.0)}, {})
    >>> scalars(Moment(200, report, Edge(0.05, 40.0, "2/lr")))
    {'flatlens/sharpness': 38.1, 'flatlens/sharpness.edge': 40.0, 'flatlens/layers/mls/fc1': 2.0}
    """
    found = {}
    for (measure, layer), estimate in moment.report.items():
        if not math.isfinite(estimate.value):
            continue
        name = f"{PREFIX}/layers/{measure}/{layer}" if layer else f"{PREFIX}/{measure}"
        found[name] = estimate.value
        if estimate.margin:
            found[f"{name}.stderr"] = estimate.stderr
        edge = moment.edge.beside(Column.parse(measure).name)
        if not layer and has_edge(measure) and edge == edge:
            found[f"{name}.edge"] = edge
    return found


@final
class CSVLog:
    """A CSV file that grows with each measurement: step, name, value.

    A tracker that continues from a saved state (`load_state_dict`) first removes the rows after that state's step,
    which it measures again; a new run adds its rows below the rows of an old one. Of several processes that train
    together and name the same file, the first one to write to it is the only one.

    >>> import pathlib, tempfile, torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> file = pathlib.Path(tempfile.mkdtemp(), "log.csv")
    >>> _ = fl.Tracker(problem, "mls", every=1, log=CSVLog(file), live=False).step(0)
    >>> file.read_text().splitlines()[0]
    'step,name,value'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise BadFolder(f"CSVLog({str(path)!r}): expected a file in a folder that exists")

    def __call__(self, moment: Moment) -> None:
        """Write the moment's rows."""
        if not claimed(str(self._path.absolute())):
            return
        try:
            with self._path.open("a", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                if not file.tell():
                    rows.writerow(["step", "name", "value"])
                rows.writerows([moment.step, name, repr(value)] for name, value in scalars(moment).items())
        except OSError as error:
            raise BadFolder(f"CSVLog({str(self._path)!r}): the file cannot be written ({error})") from error

    def forget_after(self, step: int) -> None:
        """Remove the rows after a step: those at the end of the file, back to where an earlier run's begin."""
        if not self._path.is_file():
            return
        try:
            with self._path.open("r+b") as file:
                lines = file.readlines()
                steps = [_step_of(line) for line in lines]
                kept, next_one = len(lines), math.inf
                while kept and step < steps[kept - 1] <= next_one:
                    kept, next_one = kept - 1, steps[kept - 1]
                file.truncate(sum(map(len, lines[:kept])))
        except OSError as error:
            raise BadFolder(f"CSVLog({str(self._path)!r}): the file cannot be written ({error})") from error


def _step_of(line: bytes) -> float:
    r"""Return the step of a line of a CSV file; of one that a kill cut off, a later one than any.

    >>> _step_of(b"12,flatlens/loss,0.5\n"), _step_of(b"step,name,value\n"), _step_of(b"1")
    (12.0, -1.0, inf)
    """
    first = line.split(b",")[0]
    return math.inf if not line.endswith(b"\n") else float(first) if first.isdigit() else -1.0


@final
class TensorBoardLog:
    """Scalars of TensorBoard, in a folder or by a SummaryWriter that the run already has.

    A run that is resumed adds to the folder, which then has some steps twice. To hide the first ones, give
    `SummaryWriter(folder, purge_step=step + 1)`, with the step of the saved state; it hides the later steps of all
    other files in that folder, too.

    >>> import pathlib, tempfile, torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2)
    >>> problem = fl.Problem(net, "half_squared_error", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> folder = tempfile.mkdtemp()
    >>> _ = fl.Tracker(problem, "mls", every=1, log=TensorBoardLog(folder), live=False).step(0)
    >>> len(list(pathlib.Path(folder).iterdir()))
    1
    """

    def __init__(self, where: Any) -> None:
        with needs("tensorboard", "TensorBoardLog"):
            writer = import_module("torch.utils.tensorboard").SummaryWriter
        if not isinstance(where, writer | str | os.PathLike):
            raise BadInput(f"TensorBoardLog({where!r}): expected a folder or a SummaryWriter")
        self._folder = "" if isinstance(where, writer) else str(Path(where).absolute())
        self._writer = where if isinstance(where, writer) else writer(os.fspath(where))

    def __call__(self, moment: Moment) -> None:
        """Write the moment's scalars; where processes that train together name one folder, in one of them alone."""
        if self._folder and not claimed(self._folder):
            return
        for name, value in scalars(moment).items():
            self._writer.add_scalar(name, value, moment.step)
        self._writer.flush()


@final
class WandbLog:
    """The charts of a run of Weights & Biases, over an axis of their own: flatlens/step.

    Their own axis, because the run's own count of steps may differ from the tracker's. The values join the run's
    present row, or begin the next one if another measurement has filled that. The last ones show when another row
    follows, or at the run's end.

    Rows that you log without `step` are all kept. W&B drops a row whose `step` is less than the run's present one, to
    which each measurement adds at most 1: let yours be the tracker's, or grow as fast and call `wandb.log` before
    `Tracker.step`. For a slower count, such as epochs, leave `step` out and log the epoch as a value.
    """

    def __init__(self, run: Any = None) -> None:
        with needs("wandb", "WandbLog"):
            wandb = import_module("wandb")
        self._run = wandb.run if run is None else run
        if self._run is None or not callable(getattr(self._run, "define_metric", None)):
            raise BadInput("WandbLog(run=...): expected a run: call wandb.init(...) first, or pass what it returned")
        self._run.define_metric(f"{PREFIX}/step")
        self._run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def __call__(self, moment: Moment) -> None:
        """Write the moment's values."""
        values = {**scalars(moment), f"{PREFIX}/step": moment.step}
        if getattr(self._run.settings, "mode", "") == "shared":  # the server counts the rows, and drops none
            self._run.log(values)
            return
        row, run = self._run.step, vars(self._run)  # kept there, as other logs of the run may fill the same row
        filled, by = run.get("_flatlens", (-1, -1))
        if filled == row and by != moment.step:
            row += 1
        run["_flatlens"] = row, moment.step
        self._run.log(values, step=row)


@final
class MLflowLog:
    """The metrics of a run of MLflow; characters that it refuses in names become _."""

    def __init__(self, run_id: str | None = None) -> None:
        with needs("mlflow", "MLflowLog"):
            mlflow = import_module("mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise BadInput("MLflowLog(run_id=...): expected a run: call mlflow.start_run() first, or name one")
        self._run_id = active.info.run_id if run_id is None else run_id
        self._client = mlflow.MlflowClient()

    def __call__(self, moment: Moment) -> None:
        """Write the moment's metrics."""
        for name, value in scalars(moment).items():
            self._client.log_metric(self._run_id, re.sub(r"[^\w\-. :/]", "_", name), value, step=moment.step)
