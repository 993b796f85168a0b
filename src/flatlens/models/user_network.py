"""A network that a function of the user's own builds, as the architecture of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from flatlens import userfile
from flatlens.errors import BadInput, BadModel
from flatlens.plain import Options
from flatlens.problem.loaders import load_seeded, seeded

_SEED = "seed"


@dataclass(frozen=True)
class UserNetwork:
    """The network that `file.py:NAME` returns: a function, or a class of networks.

    Its arguments are settings of a study, by their names. `seed` seeds the random numbers of torch, NumPy and Python
    while it runs, and is passed to it if it has an argument of that name.
    """

    source: str  #: file.py:NAME, with the file's whole path
    code: str  #: hash of the file, and of those beside it that it imports
    options: Mapping[str, Any] = Options()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", Options(self.options))

    @classmethod
    def of(cls, spec: str, given: Mapping[str, Any] | None = None) -> UserNetwork:
        """Return the network of `file.py:NAME`, with the defaults of its arguments, or the values `given`.

        Raises:
            BadModel: this is no function that builds networks, or it has no argument of a name that is given.
        """
        function = _function(spec)
        known = {name: default for name, default in userfile.arguments(function).items() if name != _SEED}
        unknown = [name for name in given or {} if name not in (*known, _SEED)]
        if unknown:
            raise BadModel(f"model: {spec} has no argument {unknown[0]!r}: it has {', '.join(known) or 'none'}")
        file = userfile.file_of(spec).resolve()
        options = Options({**known, **{name: value for name, value in (given or {}).items() if name != _SEED}})
        return cls(userfile.with_folder(spec), userfile.code_of(file), options, int((given or {}).get(_SEED, 0)))

    def __str__(self) -> str:
        """Return the network as a user writes it: net.py:build(width=8)."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{userfile.short(self.source)}{f'({given})' if given else ''}"

    def with_sizes(self, sizes: Mapping[str, int]) -> UserNetwork:
        """Return the network with sizes of the data, such as `inputs`, for arguments without a default or a value."""
        needed = userfile.needed_arguments(_function(self.source))
        filled = {name: sizes[name] for name in needed if self.options.get(name, 0) is None and name in sizes}
        return replace(self, options=Options({**self.options, **filled}))

    def require_complete(self) -> None:
        """Raise BadModel if an argument without a default has no value."""
        needed = [n for n in userfile.needed_arguments(_function(self.source)) if self.options.get(n, 0) is None]
        if needed:
            raise BadModel(
                f"model: {userfile.short(self.source)} needs the arguments {', '.join(needed)}: give defaults, or "
                f"write --set {needed[0]}=VALUE; inputs, outputs, channels and image are given by the data"
            )

    def build(self) -> nn.Module:
        """Return a new network.

        Raises:
            BadModel: the file is gone or was changed since, or its function returned something else.
            BadInput: the function raised.
        """
        told, function = userfile.short(self.source), _function(self.source)
        if userfile.code_of(userfile.file_of(self.source)) != self.code:
            raise BadModel(
                f"model: the code of {told} has changed since the study began: put it back, or begin another study "
                f"with another --out"
            )
        takes_seed = _SEED in userfile.arguments(function)
        arguments = {**self.options, **({_SEED: self.seed} if takes_seed else {})}
        with seeded(self.seed):
            network = userfile.guarded(lambda: function(**arguments), f"model: {told}")
        if not isinstance(network, nn.Module):
            raise BadModel(f"model: {told} returned a {type(network).__name__}; it must return a torch.nn.Module")
        return network


def _function(spec: str) -> Any:
    if not Path(userfile.file_of(spec)).is_file():
        raise BadInput(f"model: there is no file {str(userfile.file_of(spec))!r}")
    found = load_seeded(spec, "model")
    if not userfile.is_current(userfile.file_of(spec)):
        raise BadModel(
            f"model: the code of {userfile.short(spec)} has changed since this process read it: start it again"
        )
    if isinstance(found, nn.Module) or not callable(found):
        raise BadModel(
            f"model: {spec} is a {type(found).__name__}; a study needs a function that builds a new network each time"
        )
    return found
