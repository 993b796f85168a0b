"""The options that say what is measured; they make a `Problem`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens import userfile
from flatlens.cli.output import Flag, note, stdout_to_stderr
from flatlens.cli.sharing import local, ranks
from flatlens.errors import BadFolder, BadInput, BadLoss, BadModel

if TYPE_CHECKING:
    import torch

    from flatlens.data.sources import Source
    from flatlens.models.sources import Named
    from flatlens.problem import Loss, Problem


@Parameter(name="*")
@dataclass(frozen=True)
class Inputs:
    """What is measured, on which data."""

    data: str | None = None
    """The name of a data set (`flatlens data list` has them), `cifar10:ROOT` for one whose files are in ROOT, a folder
    of images or of .txt files as FOLDER/CLASS/FILE (or with train/ and test/ above the classes), or `file.py:NAME`, a
    function that returns (x, y), a Dataset, a DataLoader, or an object with x, y, test_x and test_y. Networks of timm
    and transformers see images and texts as their makers prepare them. The network of a study has its own data."""

    test: str | None = None
    """Held-out data in the same forms: adds the test loss, the test accuracy and the generalisation gap."""

    loss: str | None = None
    """`cross_entropy`, `half_squared_error`, `mse`, or `file.py:NAME`, a function of (outputs, targets) that returns
    one loss per sample. The network of a study has its own."""

    weights: Path | None = None
    """Weights to load: safetensors (sharded too), .pt, .pth, .bin, .ckpt. Nothing is ever unpickled. `random`: a
    network of timm or transformers untrained."""

    prefix: str | None = None
    """What stands before the network's own names in the weights file, such as `net.`"""

    parameters: str = "trainable"
    """The parameters that count: `trainable`, `all`, or their names, with commas between."""

    dtype: Literal["float32", "float64"] | None = None
    """Measure in this precision instead of the network's."""

    arithmetic: Literal["full", "tf32", "bfloat16"] = "full"
    """In what the network is multiplied: full precision, or, faster and coarser on a GPU, TF32 or bfloat16."""

    device: str | None = None
    """Where to measure: `cpu`, `cuda`, `cuda:1`. Without it: where the network is."""

    memory: str = "1GiB"
    """About how much memory the pass over the data may take; of several processes, each."""

    samples: int | None = None
    """Measure on so many of the samples, drawn with seed 0. Without it: on all."""

    anyway: Annotated[bool, Flag] = False
    """Start also what is not expected to fit in memory."""

    def problem(self, model: str, beside: Problem | None = None) -> Problem:
        """The problem that these options and MODEL describe, checked; --data and --test are those of `beside`."""
        import torch

        from flatlens.problem import Problem

        if self.weights is None and self.prefix is not None:
            raise BadInput("--prefix: it says how to read --weights, which is not given")
        with stdout_to_stderr():
            named, source, loss = self._parts(model, beside)
            if self.device is not None:
                named.network.to(local(self.device))
            found = Problem(
                named.network,
                loss,
                source.data,
                test=source.test,
                parameters=self.parameters if self.parameters in ("trainable", "all") else self.parameters.split(","),
                dtype=None if self.dtype is None else getattr(torch, self.dtype),
                arithmetic=self.arithmetic,
                memory=self.memory,
                ranks=ranks(),
            )
        if named.remark:
            note(named.remark)
        told = {"weights": named.weights, "data": source.description, "preparation": source.preparation}
        found.origin = {what: words for what, words in told.items() if words}
        return found

    def _parts(self, model: str, beside: Problem | None) -> tuple[Named, Source, Any]:
        """The network with its weights, the data with the held-out ones, the loss."""
        named, source, loss = _of_a_study(Path(model)) if Path(model).is_dir() else (None, None, None)
        for option, given, own in (("--data", self.data, source), ("--loss", self.loss, loss)):
            if given is None and own is None:
                raise BadInput(f"{option} is needed: {model} has none of its own")
        named = self._weighted(model, named)
        source = self._data(source, named, beside)
        return named, source, loss if self.loss is None else _loss(self.loss)

    def _weighted(self, model: str, named: Named | None) -> Named:
        """The network, with the weights that were asked for."""
        from flatlens.models.checkpoints import load_weights
        from flatlens.models.sources import load_model

        untrained = str(self.weights) == "random" and not Path("random").exists()
        if named is None:
            named = load_model(model, "random" if untrained else "trained" if self.weights is None else "none")
        if self.weights is None or (untrained and model.startswith(("timm:", "hf:"))):
            return named
        if untrained:
            raise BadInput(f"--weights random: it is for networks of timm and transformers; {model} makes its own")
        for remark in load_weights(named.network, self.weights, self.prefix):
            note(remark)
        return replace(named, weights=str(self.weights))

    def _data(self, own: Source | None, named: Named, beside: Problem | None) -> Source:
        """The data and the held-out data; those of `beside` where no network prepares them in its own way."""
        from flatlens.data.raw import PLAIN
        from flatlens.data.sources import Source, load_data

        shared = named.preparation is None and beside and beside.origin.get("preparation", "") in ("", PLAIN)
        if self.data is None:
            assert own is not None
            source = own
        elif beside and shared:
            return Source(beside.data, beside.test, beside.origin.get("data", ""), beside.origin.get("preparation", ""))
        else:
            source = load_data(self.data, preparation=named.preparation)
        if self.test is not None:
            test = beside.test if beside and shared else load_data(self.test, "--test", named.preparation).data
            source = replace(source, test=test)
        return source if self.samples is None else source.drawn(self.samples)


def generator_of(seed: int) -> torch.Generator:
    """Return the random numbers of a seed; raise BadInput where torch takes no such seed."""
    import torch

    if not -(2**63) <= seed < 2**64:
        raise BadInput(f"--seed {seed}: a number of at most 64 bits is needed")
    return torch.Generator().manual_seed(seed)


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


def _of_a_study(folder: Path) -> tuple[Named, Source, Loss]:
    """The network that a study left in OUT/networks/<key>, with the data and the loss it was trained on."""
    from flatlens.data.sources import Source
    from flatlens.experiments.settings import NetworkSettings
    from flatlens.files import require_checksums
    from flatlens.models.checkpoints import load_weights
    from flatlens.models.sources import Named

    try:
        settings = NetworkSettings.from_json(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadModel(f"MODEL: the folder {folder} holds no network of a study{_in_its_stead(folder)}") from error
    try:
        require_checksums(folder)
    except BadFolder as error:
        raise BadFolder(f"MODEL: {folder} is damaged ({error}): remove it, and run its study again") from error
    network = settings.model.build()
    load_weights(network, folder / "weights.safetensors")
    split = settings.data.load()
    named = Named(network, f"of the study's network {folder.name}")
    return named, Source(split.train, split.test, split.description), settings.training.objective.measured()


def _in_its_stead(folder: Path) -> str:
    keys = sorted(p.parent.name for p in folder.glob("networks/*/config.json"))
    if keys:
        return f": it is a whole study; name one of its {len(keys)} networks, such as {folder / 'networks' / keys[0]}"
    if (folder / "weights.safetensors").is_file() and (folder / "curves.safetensors").is_file():
        return " that can be read: its config.json is damaged; delete the folder, and the study makes it again"
    if (folder / "config.json").is_file():
        return f": for a folder of transformers write hf:{folder}"
    return " (no config.json in it)"
