"""A tracker in a Lightning trainer: `Trainer(callbacks=[TrackerCallback(tracker)])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from flatlens.errors import BadInput, needs
from flatlens.progress import Aside
from flatlens.tracking.tracker import Tracker, numbers_after

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        with needs("lightning", "flatlens.tracking.lightning"):
            from pytorch_lightning import Callback


@final
class TrackerCallback(Callback):
    """A callback that measures before the first optimiser step, after each and at the end; checkpoints hold its state.

    The tracker's problem uses the plain network inside the LightningModule. Steps are the trainer's `global_step`, so
    that accumulated batches count once; with several processes the first one measures, and all of them where parameters
    are spread over them. The numbers also go to the trainer's own loggers, unless `log` is False. Of several callbacks
    in one trainer each needs a `name` of its own.
    """

    def __init__(self, tracker: Tracker, *, log: bool = True, name: str = "") -> None:
        if not isinstance(tracker, Tracker):
            raise BadInput(f"TrackerCallback(tracker=...): expected a Tracker, got {type(tracker).__name__}")
        self.tracker = tracker
        self._log, self._name = log, name
        self._loggers: dict[int, Aside] = {}

    @property
    def state_key(self) -> str:
        """Return the name of the tracker's state in a checkpoint."""
        return f"{type(self).__qualname__}{self._name and f'({self._name})'}"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure before the first step, or continue from a checkpoint."""
        each = getattr(trainer.train_dataloader, "batch_size", None)
        if self.tracker.batch_size is None and isinstance(each, int):
            self.tracker.batch_size = each * trainer.accumulate_grad_batches * trainer.world_size
        self._step(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after a batch, whether or not the optimiser made a step."""
        self._step(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after the last step."""
        self._step(trainer, over=True)

    def _step(self, trainer: Trainer, over: bool = False) -> None:
        if trainer.is_global_zero or self.tracker.problem.peers.size > 1:
            optimiser = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
            numbers = numbers_after(self.tracker, trainer.global_step, optimiser, over)
            for logger in trainer.loggers if numbers is not None and self._log and trainer.is_global_zero else []:
                self._told(logger)(numbers, trainer.global_step)

    def _told(self, logger: Any) -> Aside:
        """Return the logger as a side output: a failure is a warning, once, and training goes on."""
        if id(logger) not in self._loggers:
            name = f"the trainer's logger {type(logger).__name__}"
            self._loggers[id(logger)] = Aside(name, lambda values, step: logger.log_metrics(values, step=step))
        return self._loggers[id(logger)]

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state for Lightning's checkpoint."""
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the tracker from Lightning's checkpoint."""
        self.tracker.load_state_dict(state_dict)
