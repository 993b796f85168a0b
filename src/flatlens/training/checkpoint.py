"""A training run on disk, so that a killed one goes on where it was: one file, replaced whole, never unpickled."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatlens.errors import BadFolder
from flatlens.files import write_whole
from flatlens.plain import as_plain, canonical
from flatlens.problem.data import checksum
from flatlens.training.settings import Training

FORMAT = 1
INTERVAL = 10.0
"""Seconds between two checkpoints: what a kill can cost."""


def identity(model: nn.Module, data: tuple[Tensor, Tensor], settings: Training) -> str:
    """What a checkpoint belongs to: the settings, the data, and the weights that training began from."""
    total = zlib.crc32(canonical(as_plain(settings)).encode())
    for tensor in [*data, *model.state_dict().values()]:
        total = checksum(tensor, total)
    return f"{total:08x}"


def save(path: Path, whose: str, state: dict[str, Any]) -> None:
    """Write the state of a run.

    Raises:
        BadFolder: the file cannot be written.
    """
    content = io.BytesIO()
    torch.save({"format": FORMAT, "of": whose, **state}, content)
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise BadFolder(
            f"the checkpoint {str(path)!r} cannot be written: {error.strerror or error}; make room or name another "
            "folder, and the run goes on from its last checkpoint"
        ) from error


def load(path: Path, whose: str) -> dict[str, Any] | None:
    """The state of a run; None if there is no file.

    Raises:
        BadFolder: the file is damaged, or belongs to another run.
    """
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"], state["of"]
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise BadFolder(
            f"the checkpoint {str(path)!r} cannot be read ({type(error).__name__}): delete it to begin the run anew"
        ) from error
    if found != (FORMAT, whose):
        raise BadFolder(
            f"the checkpoint {str(path)!r} belongs to another run (other settings, data or initial weights): name "
            "another file, or delete it to begin anew"
        )
    whole: dict[str, Any] = state
    return whole
