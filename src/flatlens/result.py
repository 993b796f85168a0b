"""The base of all tables of results: the same way to show, save and load what a call found."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flatlens.errors import BadFolder, BadInput, one_line
from flatlens.files import write_whole

MOST_ROWS = 80  #: rows of a table that the terminal and a notebook show

_DIGEST = "flatlens.digest"


class Result(ABC):
    """A table of results: `frame()`, what it is `about`, and one file that keeps all of it."""

    _KIND: ClassVar[str]
    """Name of a saved file of this class, in its header and in errors."""

    about: dict[str, Any]  #: what was measured: loss, samples, outputs, layers in execution order, versions, device

    @abstractmethod
    def frame(self) -> pd.DataFrame:
        """Return a tidy table."""

    @abstractmethod
    def _content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all but `about`: what JSON can hold, and arrays by name."""

    @classmethod
    @abstractmethod
    def _restored(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Return the result from what `_content` gave, with `about` among it."""

    def _displayed(self) -> pd.DataFrame:
        """Return the table that is shown."""
        return self.frame()

    def __repr__(self) -> str:
        return self._displayed().to_string(max_rows=MOST_ROWS)

    def _repr_html_(self) -> str:
        return self._displayed().to_html(max_rows=MOST_ROWS, float_format="{:.6g}".format, border=0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all: the arrays as safetensors, the rest in its header.

        Raises:
            BadFolder: the file cannot be written.
        """
        try:
            content, tensors = self._content()
            table = json.dumps({**content, "about": self.about})
            header = {f"flatlens.{self._KIND}": table, _DIGEST: _digest(table, tensors)}
            write_whole(Path(path), save(tensors, metadata=header))
        except (SafetensorError, OSError, TypeError, ValueError, RecursionError) as error:
            where = f"{type(self).__name__}.save({str(path)!r})"
            raise BadFolder(f"{where}: the file cannot be written ({one_line(error)})") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            BadInput: the file holds something else, or was changed since.
        """
        try:
            with safe_open(Path(path), framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if f"flatlens.{cls._KIND}" not in header:
                held = [key.removeprefix("flatlens.") for key in set(header) - {_DIGEST} if key.startswith("flatlens.")]
                raise ValueError(f"it is a saved {held[0]}" if held else "it holds something else")
            table = header[f"flatlens.{cls._KIND}"]
            digest = _digest(table, tensors)
            if header.get(_DIGEST, digest) != digest:  # earlier versions wrote none
                raise ValueError("its checksum is not that of its contents: it was damaged, or written by other hands")
            return cls._restored(json.loads(table), tensors)
        except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, OSError, RecursionError) as error:
            where = f"{cls.__name__}.load({str(path)!r})"
            raise BadInput(f"{where}: not a saved {cls._KIND} ({one_line(error)})") from error


def _digest(table: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a result's table and of its arrays, with their names, types and shapes."""
    digest = hashlib.sha256(table.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
