"""The options that name the network, the data, the loss and measures; they make a `Problem`.

Python files that a study's network names run only if the user says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from flatlens import user_code
from flatlens.cli.processes import local, ranks
from flatlens.cli.terminal import DryRun, Flag, Whole, announce, note, show_cost, stdout_to_stderr
from flatlens.column import split_at_commas
from flatlens.errors import BadFolder, BadInput, BadLoss, BadModel
from flatlens.progress import Bar, no_progress, visible

if TYPE_CHECKING:
    import torch

    from flatlens.data.sources import Source
    from flatlens.measures import Lens
    from flatlens.models.external import Named
    from flatlens.problem import Loss, Problem


Names = Annotated[Sequence[str], Parameter(negative="", show_default=False)]


def all_names(parts: Sequence[str], option: str) -> list[str]:
    """Return the names in an option that is given once or several times.

    >>> all_names([""], "--measures")
    Traceback (most recent call last):
    ...
    flatlens.errors.BadInput: --measures: expected at least one name: give one, or leave the option out
    """
    names = [name for part in parts for name in split_names(part)]
    if parts and not names:
        raise BadInput(f"{option}: expected at least one name: give one, or leave the option out")
    return names


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list; a comma between brackets belongs to a measure's options.

    >>> split_names("mls, local_volume(top_k=3, log=True),nmls")
    ['mls', 'local_volume(top_k=3, log=True)', 'nmls']
    """
    return [name for name in split_at_commas(text) if name]


def require_trust(models: Sequence[str], trusted: bool) -> None:
    """Ask before running Python files that the config.json of a study's network names: it may be from anybody."""
    for folder in dict.fromkeys(models):
        named = code_in(Path(folder) / "config.json")
        if not named or trusted:
            continue
        more = f", ... ({len(named)} in all)" if len(named) > 5 else ""
        told = f"{folder}/config.json names Python code that has to run: {', '.join(named[:5])}{more}"
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            raise BadInput(told, argument="model", remedy="read it, then add --trust to run it")
        print(f"flatlens: {visible(told)}\nRun it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise BadInput(f"{folder}: nothing was run", argument="model")


def code_in(config: Path) -> list[str]:
    """Return the Python code that a network's settings name, without reading it: none if they cannot be read."""
    try:
        parts = [json.loads(config.read_text())]
    except (OSError, ValueError, RecursionError):  # whoever reads the settings says so
        return []
    named = []
    for part in parts:  # grows while it is walked
        if isinstance(part, dict):
            kind = part.get("type")
            sources = [part.get("source"), part.get("held_out")] if kind in ("UserNetwork", "UserData") else []
            for one in sources:
                folder = isinstance(one, str) and not one.endswith(".py") and ":" not in one and Path(one).is_dir()
                named += [] if one is None or (kind == "UserData" and folder) else [str(one)]
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return list(dict.fromkeys(named))


@Parameter(name="*")
@dataclass(frozen=True)
class How:
    """Options that say how the weights are read, what is measured, and where."""

    prefix: str | None = None
    """The prefix of the network's own names in the weights file, such as `net.`, or the key of one of several networks
    in it."""

    parameters: str = "trainable"
    """The parameters to measure: `trainable`, `all`, or their names, separated by commas."""

    dtype: Literal["float32", "float64"] | None = None
    """Measure in this precision instead of the network's own."""

    arithmetic: Literal["full", "tf32", "bfloat16"] = "full"
    """The precision of matrix products: full, or reduced (TF32 or bfloat16), which is faster on a GPU."""

    device: str | None = None
    """The device to measure on: `cpu`, `cuda`, `cuda:1`. Without it: the device of the network."""

    batchnorm: Literal["eval", "train"] = "eval"
    """`train`: every BatchNorm normalises over --ghost-batch samples at a time, as in training. Samples are then
    coupled: curvature works, measures of single samples are undefined."""

    ghost_batch: Whole | None = None
    """The number of samples that a BatchNorm normalises together, with --batchnorm train."""

    memory: str = "1GiB"
    """The memory that the pass over the data may take, approximately; with several processes, that of each."""

    samples: Whole | None = None
    """Measure on this number of samples, drawn with seed 0. Without it: on all samples."""

    trust: Annotated[bool, Flag] = False
    """Run the Python files that the config.json of a study's network names. Without it: flatlens asks first, and
    refuses where there is no terminal."""

    dry_run: Annotated[bool, Flag] = False
    """Say how long it takes and how much memory, from trials on a few samples, and end."""

    anyway: Annotated[bool, Flag] = False
    """Start even if the work is not expected to fit in memory, or takes longer than 10 minutes for one measure."""

    def announced(self, bar: Bar, lens: Lens, work: Callable[..., object], times: int = 1) -> None:
        """Announce what `times` such measurements take, from trials on a few samples; with --dry-run, end there."""
        bar.stage("trying a few samples")
        quiet = partial(work, progress=no_progress)
        if self.dry_run:
            from flatlens.forecast import forecast

            found = forecast(lens, quiet, whole=True).cost(lens, times)
            more = "; memory of each process" if lens.problem.ranks.size > 1 else ""
            raise DryRun(partial(show_cost, replace(found, work=f"{found.work}{more}")))
        announce(lens, quiet, times=times, anyway=self.anyway)
        bar.stage("measuring")


@Parameter(name="*")
@dataclass(frozen=True)
class Inputs:
    """The network's data, loss and weights, and how to measure."""

    data: str | None = None
    """The name of a data set (`flatlens data list` has them), `cifar10:ROOT` for one whose files are in ROOT, a folder
    of images or of .txt files as FOLDER/CLASS/FILE (or with train/ and test/ above the classes), or `file.py:NAME`, a
    function that returns (x, y), a Dataset, a DataLoader, a dict with labels, a list of dicts, or an object with x, y,
    test_x and test_y. Images and texts for networks of timm and transformers are prepared as their makers do. The
    network of a study has its own data."""

    test: str | None = None
    """Held-out data in the same forms: adds the test loss, the test accuracy and the generalisation gap."""

    loss: str | None = None
    """`cross_entropy`, `half_squared_error`, `mse`, `logistic`, with smoothed labels
    `'cross_entropy(label_smoothing=0.1)'`, a loss of torch.nn such as `BCEWithLogitsLoss`, or
    `file.py:NAME`, a function of (outputs, targets) that returns one loss per sample, or one without arguments that
    returns such a function. Without it: that of a study's network, or `cross_entropy` for class labels and
    `half_squared_error` for floating targets."""

    weights: Path | None = None
    """Weights to load: safetensors (also sharded), .pt, .pth, .bin, .ckpt. No code in a file is ever run.
    `random`: an untrained network of timm or transformers."""

    how: How = How()

    def problem(self, model: str, beside: Problem | None = None) -> Problem:
        """Return the problem of these options and MODEL, checked; with `beside`, its --data and --test are used."""
        import torch

        from flatlens.problem import Problem

        how = self.how
        if self.weights is None and how.prefix is not None:
            raise BadInput("--prefix: needs --weights FILE, whose names it changes")
        kind = how.parameters in ("trainable", "all")
        parameters = how.parameters if kind else all_names([how.parameters], "--parameters")
        # the user's code may print: stdout is for results
        with stdout_to_stderr():
            named, source, loss = self._parts(model, beside)
            if how.device is not None:
                named.network.to(local(how.device))
            make = partial(
                Problem,
                named.network,
                loss,
                parameters=parameters,
                dtype=None if how.dtype is None else getattr(torch, how.dtype),
                arithmetic=how.arithmetic,
                batchnorm=how.batchnorm,
                ghost_batch=how.ghost_batch,
                memory=how.memory,
                ranks=ranks(),
            )
            if how.dry_run:  # a forecast takes a few of the samples
                from flatlens.forecast import on_few
                from flatlens.problem.data import Data

                def opened(given: Any, where: str) -> Data:
                    # the data of the problem beside is its first samples
                    return (given.whole or given) if isinstance(given, Data) else Data(given, where)

                test = None if source.test is None else opened(source.test, "test")
                found = on_few(lambda data, test: make(data, test=test), opened(source.data, "data"), test)
            else:
                found = make(source.data, test=source.test)
        # what the reader may not expect of the weights and the data, once for each
        if named.remark:
            note(named.remark)
        remarks = [] if source.data is found.data else found.data.remarks  # else the problem beside has told them
        for remark in remarks:
            note(remark)
        described = "; ".join(filter(None, [source.description, *remarks]))
        told = {"weights": named.weights, "data": described, "preparation": source.preparation}
        found.origin = {what: words for what, words in told.items() if words}
        return found

    def _parts(self, model: str, beside: Problem | None) -> tuple[Named, Source, Any]:
        named, source, loss = _of_a_study(Path(model)) if Path(model).is_dir() else (None, None, None)
        if self.data is None and source is None:
            raise BadInput(
                f"--data is missing: {model} has no data of its own (only the folder of a study's network has)"
            )
        named = self._weighted(model, named)
        source = self._data(source, named, beside)
        if self.loss is not None:
            # a loss's name; from a file a loss module, a function, or what a class or a factory makes: a factory takes
            # no (outputs, targets), and needs no argument
            if not user_code.is_userfile(self.loss):
                return named, source, self.loss
            own = user_code.load(self.loss, "--loss")
            factory = callable(own) and not user_code.takes(own, 2) and not user_code.needed_arguments(own)
            if isinstance(own, type) or factory:
                own = user_code.guarded(cast(Callable[[], object], own), f"--loss: {self.loss}")
            if not callable(own):
                raise BadLoss(f"{self.loss} is a {type(own).__name__}; it must be a function of (outputs, targets)")
            return named, source, own
        if loss is not None:
            return named, source, loss
        # cross-entropy for class labels, half the squared error for targets that are floating numbers
        from torch import Tensor
        from torch import bool as boolean

        from flatlens.problem.data import Data

        batch = next((source.data if isinstance(source.data, Data) else Data(source.data, "--data")).chunks(1), None)
        targets = batch[1] if isinstance(batch, tuple) and len(batch) == 2 else None
        if not isinstance(targets, Tensor) or targets.dtype == boolean:
            raise BadInput("--loss is missing, and the targets are neither class labels nor floating-point numbers")
        chosen = "half_squared_error" if targets.is_floating_point() else "cross_entropy"
        if beside is None:  # else it was said of the first network
            note(f"--loss: {chosen}, chosen from the targets; give --loss if you trained with another one")
        return named, source, chosen

    def _weighted(self, model: str, named: Named | None) -> Named:
        from flatlens.models.external import load_model
        from flatlens.models.weights import load_weights

        untrained = str(self.weights) == "random" and not Path("random").exists()
        if named is None:
            named = load_model(model, "random" if untrained else "trained" if self.weights is None else "none")
        if self.weights is None or (untrained and model.startswith(("timm:", "hf:"))):
            return named
        if untrained:
            raise BadInput(
                f"--weights random: only for timm: and hf: networks; {model} sets its own weights: leave --weights out"
            )
        for remark in load_weights(named.network, self.weights, self.how.prefix):
            note(remark)
        return replace(named, weights=self.weights.name or str(self.weights))

    def _data(self, own: Source | None, named: Named, beside: Problem | None) -> Source:
        """Return the data and the test data; those of `beside` unless a network has its own preparation."""
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
        if self.test is not None and beside and shared:
            source = replace(source, test=beside.test)
        elif self.test is not None:
            source = replace(source, test=load_data(self.test, "--test", named.preparation, source.classes).data)
        return source if self.how.samples is None else source.drawn(self.how.samples)


def generator_of(seed: int) -> torch.Generator:
    """Return a random generator with this seed; raise BadInput if torch does not accept the seed."""
    import torch

    if not -(2**63) <= seed < 2**64:
        raise BadInput(f"--seed {seed}: expected a number of at most 64 bits")
    return torch.Generator().manual_seed(seed)


def _of_a_study(folder: Path) -> tuple[Named, Source, Loss]:
    """Return the network that a study saved in OUT/networks/<key>, with the data and the loss of its training."""
    from flatlens.data.sources import Source
    from flatlens.experiments.settings import NetworkSettings
    from flatlens.files import require_checksums
    from flatlens.models.external import Named
    from flatlens.models.weights import load_weights

    try:
        settings = NetworkSettings.from_json(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # what is in its stead: a whole study, a damaged network of one, a folder of transformers
        holds = " (no config.json in it)"
        if keys := sorted(p.parent.name for p in folder.glob("networks/*/config.json")):
            such = folder / "networks" / keys[0]
            holds = f": it is a whole study; name one of its {len(keys)} networks, such as {such}"
        elif (folder / "weights.safetensors").is_file() and (folder / "curves.safetensors").is_file():
            holds = " that can be read: its config.json is damaged; delete the folder, and the study makes it again"
        elif (folder / "config.json").is_file():
            holds = f": for a folder of transformers write hf:{folder}"
        raise BadModel(f"the folder {folder} holds no network of a study{holds}") from error
    try:
        require_checksums(folder)
    except BadFolder as error:
        mend = "remove it, and run its study again"
        raise BadFolder(f"{folder} is damaged ({error})", argument="model", remedy=mend) from error
    network = settings.model.build()
    load_weights(network, folder / "weights.safetensors")
    split = settings.data.load()
    named = Named(network, f"of the study's network {folder.name}")
    return named, Source(split.train, split.held_out, split.description), settings.training.objective.measured()
