"""A tracker in a Hugging Face trainer: `Trainer(..., callbacks=[TrackerCallback(tracker)])`."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from flatlens.errors import BadInput, BadWeights, needs
from flatlens.files import write_whole
from flatlens.progress import Aside
from flatlens.tracking.tracker import Tracker, numbers_after

with needs("hf", "flatlens.tracking.transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FILE = "flatlens_tracker.pt"  #: the file beside the weights in each checkpoint's folder, of a callback without a name


@final
class TrackerCallback(TrainerCallback):
    """A callback that measures before the first optimiser step, after each and at the end; checkpoints hold its state.

    The tracker's problem uses the model that the trainer trains. On resuming, the state is read from the folder
    `checkpoint-STEP` of the output folder; `resume_from` names another. With several processes the first one measures,
    and all of them where parameters are spread over them.

    The trainer writes the numbers where it reports its own, if the callback has its function `log`: make the trainer,
    then `trainer.add_callback(TrackerCallback(tracker, log=trainer.log))`. Of several callbacks in one trainer each
    needs a `name` of its own.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        log: Callable[[dict[str, float]], object] | None = None,
        name: str = "",
    ) -> None:
        if not isinstance(tracker, Tracker):
            raise BadInput(f"TrackerCallback(tracker=...): expected a Tracker, got {type(tracker).__name__}")
        self.tracker = tracker
        self._kept = Aside("saving the tracker's state", write_whole)
        self._log, self._name = None if log is None else Aside("the trainer's log", log), name
        self._file = f"flatlens_tracker-{name}.pt" if name else FILE
        self._resume_from = None if resume_from is None else Path(resume_from)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure before the first step, or continue from a checkpoint."""
        names = vars(control).setdefault("_flatlens", {})  # the trainer's callbacks share this object
        other, run = names.get(self._name, (self, state))
        names[self._name] = self, state  # each run has a state of its own
        if other is not self and run is state:
            raise BadInput(
                f"TrackerCallback(name={self._name!r}): another tracker of this trainer has this name, and would "
                f"overwrite its file: give each a name of its own"
            )
        if self.tracker.batch_size is None:
            self.tracker.batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        if self._takes_part(state):
            if state.global_step:
                self._restore(self._resume_from or _folder(args, state))
            self._step(state, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure after a step of the optimiser."""
        if self._takes_part(state):
            self._step(state, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure after the last step, unless the trainer has gone back to its best checkpoint."""
        went_back = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if self._takes_part(state) and not went_back:
            self._step(state, kwargs, over=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the tracker's state beside the new checkpoint."""
        if state.is_world_process_zero and _folder(args, state).is_dir():
            held = io.BytesIO()
            torch.save(self.tracker.state_dict(), held)
            self._kept(_folder(args, state) / self._file, held.getvalue())

    def _takes_part(self, state: TrainerState) -> bool:
        return state.is_world_process_zero or self.tracker.problem.peers.size > 1

    def _step(self, state: TrainerState, handed: dict[str, Any], over: bool = False) -> None:
        numbers = numbers_after(self.tracker, state.global_step, handed.get("optimizer"), over)
        if numbers is not None and self._log is not None and state.is_world_process_zero:
            self._log(numbers)

    def _restore(self, folder: Path) -> None:
        path = folder / self._file
        if not path.is_file():
            warnings.warn(f"no tracker's state at {path}: the history begins here", stacklevel=2)
            return
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:  # torch may raise anything on a damaged file
            what = f"not the saved state of a tracker ({type(error).__name__})"
            raise BadWeights(what, argument=str(path)) from error
        self.tracker.load_state_dict(state)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
