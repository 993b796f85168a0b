"""Networks that others wrote, as architectures of a study: of timm or Hugging Face by name, or from `file.py:NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatlens import user_code
from flatlens.errors import BadInput, BadModel
from flatlens.models.sources import load_model
from flatlens.problem.data import load_seeded, seeded
from flatlens.settings_json import Options, check


@dataclass(frozen=True)
class Published:
    """The network of `timm:NAME` or `hf:NAME`, after a preparation that makes any image in [0, 1] fit it.

    Images are resized (bilinear) to the size that the network was trained on and brought to its mean and standard
    deviation, so that many networks are measured on the same images; `sigmoid` puts the outputs between 0 and 1.

    >>> Published("timm:resnet18", weights="random").weights
    'random'
    """

    name: str  #: "timm:vit_tiny_patch16_224"
    weights: Literal["trained", "random"] = "trained"
    sigmoid: bool = False
    seed: int = 0  #: seed of random weights

    def __post_init__(self) -> None:
        check(self, weights=("trained", "random"))
        if not self.name.startswith(("timm:", "hf:")):
            raise BadModel(
                "expected timm:NAME, hf:NAME or hf:FOLDER", argument="name", value=self.name, call="Published"
            )

    def build(self) -> nn.Module:
        """Return the network on the CPU; its weights come from the hub or from the local cache.

        Raises:
            BadModel: there is no such network, or its weights are not available.
        """
        network = load_model(self.name, self.weights).network.float()
        known = getattr(network, "pretrained_cfg", None) or {}
        return AsTrained(network, known.get("input_size"), known.get("mean"), known.get("std"), self.sigmoid)


class AsTrained(nn.Module):
    """A network after a resizing and a normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        size: tuple[int, int, int] | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        sigmoid: bool,
    ) -> None:
        super().__init__()
        self.network = network
        self.size = None if size is None else tuple(size[1:])
        self.register_buffer("mean", torch.tensor(mean or (0.0,))[:, None, None])
        self.register_buffer("std", torch.tensor(std or (1.0,))[:, None, None])
        self.output = nn.Sigmoid() if sigmoid else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, rows, columns) between 0 and 1 to outputs (n, classes)."""
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bilinear", align_corners=False)
        found = self.network((images - self.mean) / self.std)
        outputs: Tensor = self.output(getattr(found, "logits", found))
        return outputs


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
            BadModel: this is not a function that builds networks, or it has no argument of a name that is given.
        """
        function = _function(spec)
        known = {name: default for name, default in user_code.arguments(function).items() if name != _SEED}
        unknown = [name for name in given or {} if name not in (*known, _SEED)]
        if unknown:
            raise BadModel(f"{spec} has no argument {unknown[0]!r}: it has {', '.join(known) or 'none'}", call="")
        file = user_code.file_of(spec).resolve()
        options = Options({**known, **{name: value for name, value in (given or {}).items() if name != _SEED}})
        return cls(user_code.with_folder(spec), user_code.code_of(file), options, int((given or {}).get(_SEED, 0)))

    def __str__(self) -> str:
        """Return the network as a user writes it: net.py:build(width=8)."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{user_code.short(self.source)}{f'({given})' if given else ''}"

    def with_sizes(self, sizes: Mapping[str, int]) -> UserNetwork:
        """Return the network with sizes of the data, such as `inputs`, for arguments without a default or a value."""
        needed = user_code.needed_arguments(_function(self.source))
        filled = {name: sizes[name] for name in needed if self.options.get(name, 0) is None and name in sizes}
        return replace(self, options=Options({**self.options, **filled}))

    def require_complete(self) -> None:
        """Raise BadModel if an argument without a default has no value."""
        needed = [n for n in user_code.needed_arguments(_function(self.source)) if self.options.get(n, 0) is None]
        if needed:
            sizes = "inputs, outputs, channels and image are given by the data"
            mend = f"give defaults, or write --set {needed[0]}=VALUE; {sizes}"
            lacking = f"{user_code.short(self.source)} needs the arguments {', '.join(needed)}"
            raise BadModel(lacking, remedy=mend, call="")

    def build(self) -> nn.Module:
        """Return a new network.

        Raises:
            BadModel: the file is gone or was changed since, or its function returned something else.
            BadInput: the function raised.
        """
        told, function = user_code.short(self.source), _function(self.source)
        if user_code.code_of(user_code.file_of(self.source)) != self.code:
            mend = "put it back, or begin another study with another --out"
            raise BadModel(f"the code of {told} has changed since the study began", remedy=mend, call="")
        takes_seed = _SEED in user_code.arguments(function)
        arguments = {**self.options, **({_SEED: self.seed} if takes_seed else {})}
        with seeded(self.seed):
            network = user_code.guarded(lambda: function(**arguments), f"model: {told}")
        if not isinstance(network, nn.Module):
            raise BadModel(f"{told} returned a {type(network).__name__}; it must return a torch.nn.Module", call="")
        return network


def _function(spec: str) -> Any:
    if not Path(user_code.file_of(spec)).is_file():
        raise BadInput(f"model: there is no file {str(user_code.file_of(spec))!r}")
    found = load_seeded(spec, "model")
    if not user_code.is_current(user_code.file_of(spec)):
        changed = f"the code of {user_code.short(spec)} has changed since this process read it"
        raise BadModel(changed, remedy="start it again", call="")
    if isinstance(found, nn.Module) or not callable(found):
        raise BadModel(
            f"{spec} is a {type(found).__name__}; a study needs a function that builds a new network each time", call=""
        )
    return found
