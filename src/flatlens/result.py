"""The base of all tables of results: the same way to show, save and load what a call found."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flatlens.errors import BadFolder, BadInput, one_line
from flatlens.files import write_whole
from flatlens.version import __version__

MOST_ROWS = 80  #: rows of a table that the terminal and a notebook show

SCHEMA = 2  #: number of the form of saved results and of the command line's JSON; it grows when a reader must change

_DIGEST, _SECONDS = "flatlens.digest", "flatlens.seconds"


def of_report(name: str) -> Callable[..., Any]:
    """Return a function of report/, where results are drawn: by its name, as report/ lies above and needs an extra."""
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"flatlens.report.{module}"), function)
    return found


def is_saved(path: Path) -> bool:
    """Return whether a file is a saved result of any kind."""
    try:
        with safe_open(path, framework="pt") as file:
            return any(key.startswith("flatlens.") for key in file.metadata() or {})
    except (SafetensorError, OSError):
        return False


class Result(ABC):
    """A table of results: `frame()`, what it is `about`, and one file that keeps all of it."""

    _KIND: ClassVar[str]
    """Name of a saved file of this class, in its header and in errors."""

    about: dict[str, Any]  #: what was measured: loss, samples, outputs, layers in execution order, versions, device

    @property
    def answer(self) -> list[str]:
        """The answer in at most three sentences: what is the case, how certain it is, what to do next."""
        return []

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
        text: str = of_report("screen.frame_as_text")(self._displayed(), self.answer)
        return text

    def _repr_html_(self) -> str:
        table = self._displayed().to_html(max_rows=MOST_ROWS, float_format="{:.6g}".format, border=0)
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in self.answer) + table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all: the arrays as safetensors, the rest in its header.

        Two runs with the same results write the same bytes, except for the field "flatlens.seconds" of the header.

        Raises:
            BadFolder: the file cannot be written.
        """
        try:
            content, tensors = self._content()
            taken: list[Any] = []
            made_by = {"schema": SCHEMA, "flatlens": __version__}
            table = json.dumps(_without_seconds({**made_by, **content, "about": self.about}, taken))
            # Times with a checksum of their own: that of the results must not depend on them
            times = json.dumps({"values": taken, "sha256": _sha256(taken)})
            header = {f"flatlens.{self._KIND}": table, _DIGEST: _digest(table, tensors), _SECONDS: times}
            # The header in order: safetensors writes metadata in any order
            saved = save(tensors, metadata=header)
            end = 8 + int.from_bytes(saved[:8], "little")
            ordered = json.dumps(json.loads(saved[8:end]), sort_keys=True, separators=(",", ":")).encode()
            ordered += b" " * (-len(ordered) % 8)
            write_whole(Path(path), len(ordered).to_bytes(8, "little") + ordered + saved[end:])
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
            if Path(path).is_dir():
                raise ValueError("it is a folder")
            with safe_open(Path(path), framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if f"flatlens.{cls._KIND}" not in header:
                kinds = set(header) - {_DIGEST, _SECONDS}
                held = [key.removeprefix("flatlens.") for key in kinds if key.startswith("flatlens.")]
                raise ValueError(f"it is a saved {held[0]}" if held else "it holds something else")
            table = header[f"flatlens.{cls._KIND}"]
            digest = _digest(table, tensors)
            if header.get(_DIGEST, digest) != digest:  # earlier versions wrote none
                raise ValueError("its checksum does not match its contents: the file was damaged or edited")
            plain = json.loads(table)
            times = json.loads(header[_SECONDS]) if _SECONDS in header else {"values": []}  # earlier ones wrote none
            if _SECONDS in header and _sha256(times["values"]) != times["sha256"]:
                raise ValueError("the checksum of its times does not match: the file was damaged")
            return cls._restored(_with_seconds(plain, iter(times["values"])), tensors)
        except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, OSError, RecursionError) as error:
            what = f"not a saved {cls._KIND} ({one_line(error)})"
            raise BadInput(what, value=str(path), call=f"{cls.__name__}.load") from error


def _without_seconds(plain: Any, taken: list[Any]) -> Any:
    """Return a table with null in place of everything called "seconds", which is appended to `taken`."""
    if isinstance(plain, Mapping):
        taken += [each for key, each in plain.items() if key == "seconds"]
        return {key: None if key == "seconds" else _without_seconds(each, taken) for key, each in plain.items()}
    return [_without_seconds(each, taken) for each in plain] if isinstance(plain, list | tuple) else plain


def _with_seconds(plain: Any, taken: Iterator[Any]) -> Any:
    """Return the table that `_without_seconds` was given."""
    if isinstance(plain, Mapping):
        own = {key: _next(taken) for key, each in plain.items() if key == "seconds" and each is None}
        return {key: own[key] if key in own else _with_seconds(each, taken) for key, each in plain.items()}
    return [_with_seconds(each, taken) for each in plain] if isinstance(plain, list) else plain


def _next(taken: Iterator[Any]) -> Any:
    for value in taken:
        return value
    raise ValueError("it lacks its times: it was damaged")


def _sha256(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _digest(table: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a result's table and of its arrays, with their names, types and shapes."""
    digest = hashlib.sha256(table.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
