"""The options that say what is measured; they make a `Problem`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from flatlens import userfile
from flatlens.cli.output import note, stdout_to_stderr
from flatlens.errors import BadInput, BadLoss, BadModel

if TYPE_CHECKING:
    from torch import nn

    from flatlens.data.sources import Source
    from flatlens.problem import Loss, Problem


@Parameter(name="*")
@dataclass(frozen=True)
class Inputs:
    """What is measured, on which data."""

    data: str | None = None
    """The name of a data set (`flatlens data list` has them), `cifar10:ROOT` for one whose files are in ROOT, or
    `file.py:NAME`, a function that returns (x, y), a Dataset, a DataLoader, or an object with x, y, test_x and test_y.
    The network of a study has its own."""

    test: str | None = None
    """Held-out data in the same forms: adds the test loss, the test accuracy and the generalisation gap."""

    loss: str | None = None
    """`cross_entropy`, `half_squared_error`, `mse`, or `file.py:NAME`, a function of (outputs, targets) that returns
    one loss per sample. The network of a study has its own."""

    weights: Path | None = None
    """Weights to load: safetensors (sharded too), .pt, .pth, .bin, .ckpt. Nothing is ever unpickled."""

    prefix: str | None = None
    """What stands before the network's own names in the weights file, such as `net.`"""

    parameters: str = "trainable"
    """The parameters that count: `trainable`, `all`, or their names, with commas between."""

    dtype: Literal["float32", "float64"] | None = None
    """Measure in this precision instead of the network's."""

    memory: str = "1GiB"
    """About how much memory the pass over the data may take."""

    def problem(self, model: str, beside: Problem | None = None) -> Problem:
        """The problem that these options and MODEL describe, checked; --data and --test are those of `beside`."""
        import torch

        from flatlens.problem import Problem

        if self.weights is None and self.prefix is not None:
            raise BadInput("--prefix: it says how to read --weights, which is not given")
        with stdout_to_stderr():
            network, data, test, loss = self._parts(model, beside)
            return Problem(
                network,
                loss,
                data,
                test=test,
                parameters=self.parameters if self.parameters in ("trainable", "all") else self.parameters.split(","),
                dtype=None if self.dtype is None else getattr(torch, self.dtype),
                memory=self.memory,
            )

    def _parts(self, model: str, beside: Problem | None) -> tuple[nn.Module, Any, Any, Any]:
        """The network with its weights, the data, the held-out data, the loss."""
        from flatlens.data.sources import load_data
        from flatlens.models.checkpoints import load_weights
        from flatlens.models.sources import load_model

        source: Source | Problem | None
        network, source, loss = _of_a_study(Path(model)) if Path(model).is_dir() else (None, None, None)
        if self.data is not None:
            source = load_data(self.data) if beside is None else beside
        if self.loss is not None:
            loss = _loss(self.loss)
        if source is None or loss is None:
            raise BadInput(f"{'--data' if source is None else '--loss'} is needed: {model} has none of its own")
        test: Any = source.test
        if self.test is not None:
            test = load_data(self.test, "--test").data if beside is None else beside.test
        if network is None:
            network = load_model(model, pretrained=self.weights is None)
        if self.weights is not None:
            for remark in load_weights(network, self.weights, self.prefix):
                note(remark)
        return network, source.data, test, loss


def _loss(spec: str) -> Any:
    """A name as it is; from a file a loss module, a class of them, or a function."""
    if not userfile.is_userfile(spec):
        return spec
    found = userfile.load(spec, "--loss")
    if isinstance(found, type):
        found = userfile.guarded(found, f"--loss: {spec}")
    if not callable(found):
        raise BadLoss(f"--loss: {spec} is a {type(found).__name__}; it must be a function of (outputs, targets)")
    return found


def _of_a_study(folder: Path) -> tuple[nn.Module, Source, Loss]:
    """The network that a study left in OUT/networks/<key>, with the data and the loss it was trained on."""
    from flatlens.data.sources import Source
    from flatlens.experiments.settings import NetworkSettings
    from flatlens.models.checkpoints import load_weights

    try:
        settings = NetworkSettings.from_json(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadModel(f"MODEL: the folder {folder} holds no network of a study{_in_its_stead(folder)}") from error
    network = settings.model.build()
    load_weights(network, folder / "weights.safetensors")
    split = settings.data.load()
    return network, Source(split.train, split.test), settings.training.objective.measured()


def _in_its_stead(folder: Path) -> str:
    keys = sorted(p.parent.name for p in folder.glob("networks/*/config.json"))
    if keys:
        return f": it is a whole study; name one of its {len(keys)} networks, such as {folder / 'networks' / keys[0]}"
    if (folder / "weights.safetensors").is_file() and (folder / "curves.safetensors").is_file():
        return " that can be read: its config.json is damaged; delete the folder, and the study makes it again"
    if (folder / "config.json").is_file():
        return f": for a folder of transformers write hf:{folder}"
    return " (no config.json in it)"
