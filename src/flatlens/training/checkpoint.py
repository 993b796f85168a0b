"""The state of a training run on disk, for runs that are killed: one file, replaced whole, never unpickled."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.errors import BadFolder
from flatlens.files import require_writable, write_whole
from flatlens.problem.batches import checksum
from flatlens.settings_json import as_plain, canonical
from flatlens.training.settings import Training

FORMAT = 1
INTERVAL = 10.0
"""Seconds between two checkpoints: the most training time that a kill loses."""


def identity(
    model: nn.Module, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor] | None, settings: Training
) -> str:
    """Return a digest of what a checkpoint belongs to: settings, data, network and initial weights."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    said = f"{canonical(as_plain(settings))}{model!r}{frozen}{list(model.state_dict())}"
    total = zlib.crc32(said.encode())
    for tensor in [*data, *(test or ()), *model.state_dict().values()]:
        total = checksum(tensor, zlib.crc32(str(tuple(tensor.shape)).encode(), total))
    return f"{total:08x}"


def require_place(path: Path) -> None:
    """Check before the training that its checkpoints can be written."""
    require_writable(path, f"train(save={str(path)!r})")


def save(path: Path, whose: str, state: dict[str, Any]) -> None:
    """Write the state of a run.

    Raises:
        BadFolder: the file cannot be written.
    """
    inside = io.BytesIO()
    torch.save(state, inside)
    whole = torch.frombuffer(bytearray(inside.getvalue()), dtype=torch.uint8)
    content = io.BytesIO()
    torch.save({"format": FORMAT, "of": whose, "checksum": checksum(whole), "state": whole}, content)
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise BadFolder(
            f"the checkpoint {str(path)!r} cannot be written: {error.strerror or error}; make room, or name another "
            "folder; the run continues from its last checkpoint"
        ) from error


def load(path: Path, whose: str) -> dict[str, Any] | None:
    """Read the state of a run; return None if there is no file.

    Raises:
        BadFolder: the file is damaged, or belongs to another run.
    """
    if not path.exists():
        return None
    try:
        outside = torch.load(path, map_location="cpu", weights_only=True)
        found = outside["format"], outside["of"]
        if checksum(outside["state"]) != outside["checksum"]:
            raise ValueError("its checksum does not fit")
        inside = io.BytesIO(outside["state"].numpy().tobytes())
        state: dict[str, Any] = torch.load(inside, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        raise BadFolder(
            f"the checkpoint {str(path)!r} cannot be read ({type(error).__name__}): delete it to start the run again"
        ) from error
    if found != (FORMAT, whose):
        raise BadFolder(
            f"the checkpoint {str(path)!r} belongs to another run. To continue that run, build the network again with "
            f"its initial weights, and use the same data, test data and settings; to start another run, name another "
            f"file"
        )
    return state
