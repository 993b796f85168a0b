"""Weights files in their usual forms, read without ever running what is in them."""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flatlens.errors import BadWeights

INDEX_SUFFIX = ".index.json"
IN_A_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "weights.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""The files looked for in a folder, in this order."""

NESTS = ("state_dict", "model_state_dict", "model_state", "model", "module", "network", "net", "weights", "params")
"""The keys under which training scripts save the network's tensors."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a weights file by name, and which of its state dicts they are."""

    tensors: dict[str, Tensor]
    key: str = ""  #: the keys to the state dict in the file, as in "ema.module"; "" if it is the file itself
    rest: str = ""  #: what is left of the wanted key below it
    others: tuple[str, ...] = ()  #: keys of state dicts beside it, such as those of averaged weights


def read_weights(path: str | os.PathLike[str], key: str | None = None) -> Weights:
    """Return the tensors of a weights file by name, on the CPU, unchanged.

    `path` is a safetensors file, a file of `torch.save` (.pt, .pth, .bin, .ckpt), the index of a sharded one, or a
    folder that holds any of them. What kind of file it is shows in its first bytes; its name is not trusted. If a file
    of `torch.save` holds several state dicts, the beginning of `key` chooses one; without it, a usual key does.

    Raises:
        BadWeights: missing, empty, cut short, foreign, or only to be read by unpickling objects, which is never done.
    """
    file = _resolved(Path(path))
    if file.name.endswith(INDEX_SUFFIX):
        return Weights(_read_shards(file))
    return _read_file(file, key)


def _resolved(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
        if found is None:
            raise BadWeights(f"weights: the folder {path} holds none of {', '.join(IN_A_FOLDER)}: name the file itself")
        return found
    if not path.is_file():
        raise BadWeights(f"weights: there is no file {str(path)!r}")
    return path


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(places.values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise TypeError("file names are needed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadWeights(f"weights: {index} is not the index of a sharded file (no readable weight_map)") from error
    state: dict[str, Tensor] = {}
    for shard in shards:
        if shard in ("", "..") or Path(shard).name != shard:  # an index must not lead out of its folder
            raise BadWeights(f"weights: {index} names the shard {shard!r}, which is not in its own folder")
        if not (index.parent / shard).is_file():
            raise BadWeights(f"weights: the shard {shard} that {index} names is missing ({len(shards)} shards in all)")
        state |= _read_file(index.parent / shard).tensors
    absent = sorted(set(places) - set(state))
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise BadWeights(f"weights: {index} lists {absent[0]}{more}, but no shard has it: download the files again")
    return state


def _read_file(file: Path, key: str | None = None) -> Weights:
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start:
        raise BadWeights(f"weights: {file} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise BadWeights(f"weights: {file} is a Git LFS pointer, not the weights: run `git lfs pull`")
    # A safetensors file starts with the length of its JSON header (8 bytes), then the header.
    if start[8:9] == b"{" or (file.suffix == ".safetensors" and start[:1] not in (b"\x80", b"P")):
        return Weights(_read_safetensors(file))
    return _tensors_of(_read_torch(file, start), file, key)


_NO_WEIGHTS = "is not a weights file: give a safetensors file, or a state_dict saved by torch.save"


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file, device="cpu")
    except SafetensorError as error:
        raise BadWeights(f"weights: {file} is damaged, cut short, or not a safetensors file ({error})") from error


def _read_torch(file: Path, start: bytes) -> object:
    _require_sound(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.load warns of ends in an error here, or does not matter
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        # Bytes that are not a checkpoint make the reader fail in many ways: KeyError, EOFError, struct.error, ...
        except Exception as error:
            if start[:1] not in (b"P", b"\x80"):  # the first bytes of an archive and of a pickle
                raise BadWeights(f"weights: {file} {_NO_WEIGHTS}") from error
            raise BadWeights(f"weights: {file} {_refusal(str(error))}") from error


def _require_sound(file: Path) -> None:
    """Refuse an archive in which some checksums fit and others do not; torch itself reads none of them.

    With `torch.serialization.set_crc32_options(False)` it writes none that fits.
    """
    broken, sound = "", False
    try:
        with zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                try:
                    with archive.open(part) as stream:
                        while stream.read(2**20):
                            pass
                    sound = sound or part.file_size > 0
                except (zipfile.BadZipFile, zlib.error):
                    broken = part.filename
    except Exception:  # no archive, or one that torch refuses in its own words
        return
    if broken and sound:
        raise BadWeights(f"weights: {file} is damaged: {broken} in it does not have its checksum: copy it again")


def _refusal(message: str) -> str:
    blocked = re.search(r"GLOBAL (\S+)", message)
    if blocked:
        return (
            f"holds pickled code or objects ({blocked[1]}), which are never loaded: save the state_dict alone, "
            "best as safetensors (safetensors.torch.save_model)"
        )
    if "TorchScript" in message:
        return "is a TorchScript archive, not a state_dict: save the network's state_dict as safetensors"
    if "data.pkl: file not found" in message:
        return "is an archive of another kind, such as torch.export's, not a state_dict: save the network's state_dict"
    if "WeightsUnpickler" in message or "Weights only" in message:
        return "is a pickle file, which flatlens never loads: save the tensors again as safetensors"
    if "PytorchStreamReader" in message or "Ran out of input" in message:
        return "is damaged or cut short: copy or download it again"
    return _NO_WEIGHTS


def _tensors_of(payload: object, file: Path, key: str | None) -> Weights:
    seen: list[object] = []
    chosen, others, rest = list[str](), list[str](), key or ""
    while isinstance(payload, Mapping):
        if any(payload is outer for outer in seen):
            raise BadWeights(f"weights: {file} holds a dictionary that contains itself: save a state_dict instead")
        seen.append(payload)
        inner = _inner(payload, file, rest)
        others += [str(name) for name, value in payload.items() if name != inner and _is_state(value)]
        if inner is None:
            break
        if f"{rest}.".startswith(f"{inner}."):
            rest = rest.removeprefix(str(inner)).removeprefix(".")
        chosen.append(str(inner))
        payload = payload[inner]
    tensors = {str(k): v for k, v in payload.items() if isinstance(v, Tensor)} if isinstance(payload, Mapping) else {}
    if not tensors:
        raise BadWeights(f"weights: {file} holds no tensors by name ({_describe(payload)}): save a state_dict")
    return Weights(tensors, ".".join(chosen), rest, tuple(others))


def _inner(payload: Mapping[Any, Any], file: Path, key: str) -> Any:
    """Return the key of the dictionary inside that holds the network's tensors; None if it is `payload` itself."""
    states = [name for name, value in payload.items() if _is_state(value)]
    for name in states:
        if f"{key}.".startswith(f"{name}."):
            return name
    usual = [name for name in NESTS if isinstance(payload.get(name), Mapping)]
    if usual or _has_tensors(payload):
        return usual[0] if usual else None
    if len(states) > 1:
        held = ", ".join(map(str, states))
        raise BadWeights(f"weights: {file} holds several networks ({held}): choose one, such as --prefix {states[0]}")
    return states[0] if states else None


def _is_state(value: object) -> bool:
    """Return whether a value may be a network's state dict, or holds one under a usual key."""
    return _has_tensors(value) or (isinstance(value, Mapping) and any(_has_tensors(value.get(nest)) for nest in NESTS))


def _has_tensors(value: object) -> bool:
    """Return whether a value holds floating tensors by name."""
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) and v.is_floating_point() for v in value.values())


def _describe(payload: Any) -> str:
    if isinstance(payload, Mapping):
        return f"its keys are {', '.join(map(str, list(payload)[:5]))}" if payload else "it is an empty dictionary"
    return f"it is a {type(payload).__name__}"
