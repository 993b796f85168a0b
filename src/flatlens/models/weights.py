"""Load the weights of a file into a network, whatever wrapped the network when it was saved.

Files have their usual forms, and are read without ever running what is in them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flatlens.errors import BadWeights
from flatlens.user_code import users_code

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
    file = Path(path)
    if file.is_dir():
        found = next((file / name for name in IN_A_FOLDER if (file / name).is_file()), None)
        if found is None:
            raise BadWeights(f"the folder {path} holds none of {', '.join(IN_A_FOLDER)}", remedy="name the file itself")
        file = found
    elif not file.is_file():
        raise BadWeights(f"there is no file {str(path)!r}")
    if not file.name.endswith(INDEX_SUFFIX):
        return _read_file(file, key)
    # The shards that an index names
    try:
        places = json.loads(file.read_text())["weight_map"]
        shards = sorted(set(places.values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise TypeError("expected file names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadWeights(f"{file} is not the index of a sharded file (no readable weight_map)") from error
    state: dict[str, Tensor] = {}
    for shard in shards:
        if shard in ("", "..") or Path(shard).name != shard:  # an index must not lead out of its folder
            raise BadWeights(f"{file} names the shard {shard!r}, which is not in its own folder")
        if not (file.parent / shard).is_file():
            raise BadWeights(f"the shard {shard} that {file} names is missing ({len(shards)} shards in all)")
        state |= _read_file(file.parent / shard).tensors
    absent = sorted(set(places) - set(state))
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise BadWeights(f"{file} lists {absent[0]}{more}, but no shard has it", remedy="download the files again")
    return Weights(state)


def _read_file(file: Path, key: str | None = None) -> Weights:
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start:
        raise BadWeights(f"{file} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise BadWeights(f"{file} is a Git LFS pointer, not the weights", remedy="run `git lfs pull`")
    # A safetensors file starts with the length of its JSON header (8 bytes), then the header.
    if start[8:9] == b"{" or (file.suffix == ".safetensors" and start[:1] not in (b"\x80", b"P")):
        try:
            return Weights(load_file(file, device="cpu"))
        except SafetensorError as error:
            raise BadWeights(f"{file} is damaged, cut short, or not a safetensors file ({error})") from error
    _require_sound(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.load warns of ends in an error here, or does not matter
        try:
            payload: object = torch.load(file, map_location="cpu", weights_only=True)
        # Bytes that are not a checkpoint make the reader fail in many ways: KeyError, EOFError, struct.error, ...
        except Exception as error:
            words = _NO_WEIGHTS
            if start[:1] in (b"P", b"\x80"):  # the first bytes of an archive and of a pickle
                words = next((words for sign, words in _REFUSALS.items() if sign in str(error)), _NO_WEIGHTS)
                if blocked := re.search(r"GLOBAL (\S+)", str(error)):
                    words = (
                        f"holds pickled code or objects ({blocked[1]}), which are never loaded: save the state_dict "
                        "alone, best as safetensors (safetensors.torch.save_model)"
                    )
            raise BadWeights(f"{file} {words}") from error
    return _tensors_of(payload, file, key)


_NO_WEIGHTS = "is not a weights file: give a safetensors file, or a state_dict saved by torch.save"


def _require_sound(file: Path) -> None:
    """Refuse an archive in which some checksums fit and others do not; torch itself reads none of them."""
    # With `torch.serialization.set_crc32_options(False)` torch writes none that fits
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
        raise BadWeights(f"{file} is damaged", remedy=f"{broken} in it does not have its checksum: copy it again")


_PICKLE = "is a pickle file, which flatlens never loads: save the tensors again as safetensors"
_CUT = "is damaged or cut short: copy or download it again"
_REFUSALS = {
    "TorchScript": "is a TorchScript archive, not a state_dict: save the network's state_dict as safetensors",
    "data.pkl: file not found": "is an archive of another kind, such as torch.export's, not a state_dict: save the "
    "network's state_dict",
    "WeightsUnpickler": _PICKLE,
    "Weights only": _PICKLE,
    "PytorchStreamReader": _CUT,
    "Ran out of input": _CUT,
}  #: by what torch's message contains, the first that fits


def _tensors_of(payload: object, file: Path, key: str | None) -> Weights:
    seen: list[object] = []
    chosen, others, rest = list[str](), list[str](), key or ""
    while isinstance(payload, Mapping):
        if any(payload is outer for outer in seen):
            raise BadWeights(f"{file} holds a dictionary that contains itself", remedy="save a state_dict instead")
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
        keys = ", ".join(map(str, list(payload)[:5])) if isinstance(payload, Mapping) else ""
        empty = "it is an empty dictionary" if payload == {} else f"it is a {type(payload).__name__}"
        met = f"its keys are {keys}" if keys else empty
        raise BadWeights(f"{file} holds no tensors by name ({met})", remedy="save a state_dict")
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
        raise BadWeights(f"{file} holds several networks ({held})", remedy=f"choose one, such as --prefix {states[0]}")
    return states[0] if states else None


def _is_state(value: object) -> bool:
    """Return whether a value may be a network's state dict, or holds one under a usual key."""
    return _has_tensors(value) or (isinstance(value, Mapping) and any(_has_tensors(value.get(nest)) for nest in NESTS))


def _has_tensors(value: object) -> bool:
    """Return whether a value holds floating tensors by name."""
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) and v.is_floating_point() for v in value.values())


WRAPPERS = ("module.", "model.")
"""Prefixes that DataParallel, DistributedDataParallel and Lightning leave on every name."""

COMPILED = "_orig_mod."  # torch.compile leaves it wherever it wrapped, also inside a name
_SHOWN = 5


@dataclass(frozen=True)
class _Names:
    """The names of a network's weights; those tied to one that is present, and batch counters, may be absent."""

    known: frozenset[str]
    ties: tuple[frozenset[str], ...]  #: groups of names that stand for one and the same tensor

    @classmethod
    def of(cls, own: Mapping[str, Tensor]) -> _Names:
        groups: dict[int, set[str]] = {}
        for name, tensor in own.items():
            groups.setdefault(id(tensor), set()).add(name.replace(COMPILED, ""))
        known = frozenset(name.replace(COMPILED, "") for name in own)
        return cls(known, tuple(frozenset(group) for group in groups.values() if len(group) > 1))

    def missing(self, present: set[str]) -> list[str]:
        given_by_ties = {name for tie in self.ties if tie & present for name in tie}
        absent = self.known - present - given_by_ties
        return sorted(n for n in absent if not n.endswith("num_batches_tracked"))

    def fit(self, state: Mapping[str, Tensor], prefix: str) -> bool:
        present = set(_under(state, prefix))
        return bool(present) and present <= self.known and not self.missing(present)


def load_weights(model: nn.Module, path: str | os.PathLike[str], prefix: str | None = None) -> list[str]:
    """Load the weights in `path` into `model`, all or nothing, and return remarks for the reader, one line each.

    `module.`, `_orig_mod.` and `model.` are taken off the file's names where that makes them fit. `prefix` names
    another one, with or without its final dot, or the key of one of several state dicts in the file, or both, such as
    `ema.net.`. Tensors outside the prefix belong to something else, and are left out (with a line that says so).

    Raises:
        BadWeights: the file cannot be read safely (see `read_weights`), or its names or shapes are not the network's.
    """
    key = None if prefix is None else prefix.removesuffix(".")
    read = read_weights(path, key)
    if key is not None and read.key and not _under(read.tensors, prefix or ""):  # it has chosen the state dict
        prefix = read.rest or None
    state = _uncompiled(read)
    # the network's own tensors, themselves and no copies
    with users_code(lambda line: BadWeights(f"the network's own state_dict raised {line}")):
        present: object = model.state_dict(keep_vars=True)
    if not isinstance(present, Mapping):
        raise BadWeights(f"the network's own state_dict gives a {type(present).__name__}", remedy="it must be a dict")
    own = {k: v for k, v in present.items() if isinstance(k, str) and isinstance(v, Tensor)}
    # those of the file, by the names that fit
    names = _Names.of(own)
    used = _fitting_prefix(state, names, Path(path), prefix, read.others)
    chosen = _under(state, used)
    tensors = {k: chosen[k.replace(COMPILED, "")] for k in own if k.replace(COMPILED, "") in chosen}
    _check_tensors(tensors, own, Path(path))
    for tie in names.ties:
        first, *more = sorted(tie & chosen.keys()) or [""]
        if other := next((other for other in more if not _equal(chosen[first], chosen[other])), None):
            tied = "the network uses one tensor for both (tied weights): build it without tying"
            raise BadWeights(f"{path} has different values for {first} and {other}, but {tied}")
    changed = _put(model, tensors, own, Path(path))
    # remarks on what the file holds beside them, and on what was rounded
    remarks = []
    if read.key and read.others:
        others = _some(list(read.others))
        remarks.append(f"weights read from {read.key!r} of the file, which also holds {others}: --prefix chooses")
    if left := sorted(name for name in state if not name.startswith(used)):
        remarks.append(f"left out of the weights, as their names do not begin with {used!r}: {_some(left)}")
    rounded = [k for k, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize > own[k].dtype.itemsize]
    if rounded:
        kinds = f"{tensors[rounded[0]].dtype} in the file, {own[rounded[0]].dtype} in the network"
        remarks.append(f"weights rounded to fit ({kinds}): {_some(rounded)}".replace("torch.", ""))
    return remarks + changed


def _put(model: nn.Module, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> list[str]:
    """Put tensors, whose names and shapes fit, into the network, all or nothing; return remarks."""
    # code of the network's own may load them: its `load_state_dict`, or a hook of it
    by_itself = any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not type(part)._load_from_state_dict.__module__.startswith("torch.")
        or part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        for part in model.modules()
    )
    before = {k: v.detach().clone() for k, v in own.items()} if by_itself else {}
    refused = f"{path} cannot be put into the network: its own load_state_dict"
    try:
        with users_code(lambda line: BadWeights(f"{refused} raised {line}")):
            model.load_state_dict(dict(tensors), strict=False)
        # the file's values may have been rounded to the network's own precision
        unlike = [k for k in before if k in tensors and not _equal(own[k].detach(), tensors[k].to(own[k]))]
        if left := [k for k in unlike if torch.equal(own[k], before[k])]:
            raise BadWeights(f"{refused} left weights as they were: {_some(left)}")
    except BadWeights:
        with torch.no_grad():
            for k, tensor in before.items():
                own[k].copy_(tensor)
        raise
    return [f"the network's own load_state_dict changed weights of the file: {_some(unlike)}"] if unlike else []


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _uncompiled(read: Weights) -> dict[str, Tensor]:
    return {name.replace(COMPILED, ""): tensor for name, tensor in read.tensors.items()}


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _fitting_prefix(
    state: Mapping[str, Tensor], names: _Names, path: Path, prefix: str | None, others: Sequence[str]
) -> str:
    starts = [""] if prefix is None else [prefix, f"{prefix}."]
    candidates = [start + one for start in starts for one in _wrapper_prefixes(_under(state, start))]
    if prefix is not None and not _under(state, prefix):
        begun = ", ".join(sorted({name.partition(".")[0] + "." for name in state})[:_SHOWN])
        fits = "; without --prefix every name fits" * any(names.fit(state, one) for one in _wrapper_prefixes(state))
        raise BadWeights(f"no name in {path} begins with the prefix {prefix!r} (they begin with {begun}){fits}")
    for candidate in candidates:
        if names.fit(state, candidate):
            return candidate
    # none fits: say what the nearest one lacks, and what would make every name fit
    nearest = max(candidates, key=lambda p: len(names.known & _under(state, p).keys()))
    present = set(_under(state, nearest))
    parts = []
    if missing := names.missing(present):
        parts.append(f"the network needs {_some(missing)}, which the file does not have")
    if unexpected := sorted(present - names.known):
        parts.append(f"the file has {_some(unexpected)}, which the network does not know")
    misfit = "; ".join(parts) or "no name fits"
    raise BadWeights(f"{path} does not fit the network", remedy=misfit + _advice(state, path, others, names))


def _wrapper_prefixes(names: Collection[str]) -> list[str]:
    """Return every chain of wrappers that some name begins with, the empty one first.

    >>> _wrapper_prefixes(["module.model.fc.weight", "step"])
    ['', 'module.', 'module.model.']
    """
    found = [""]
    for prefix in found:  # grows while it is walked
        found += [prefix + w for w in WRAPPERS if any(name.startswith(prefix + w) for name in names)]
    return found


def _advice(state: Mapping[str, Tensor], path: Path, others: Sequence[str], names: _Names) -> str:
    """Return the advice that would make every name fit, if there is one."""
    if prefix := _longer_prefix(state, names):
        return f"; every name fits without {prefix!r}: give --prefix {prefix}"
    # the file may hold a part of the network
    anchor = max(state, key=len)
    for name in names.known:
        prefix = name.removesuffix(anchor)
        if name.endswith(anchor) and prefix and {prefix + n for n in state} == names.known:
            holds = f"the file holds only the network's part {prefix[:-1]!r}"
            fits = f"; every name would fit with {prefix!r} in front"
            return f"{fits}: {holds}: load it into that part in your own function"
    # another state dict of the file may fit
    for other in others:
        state = _uncompiled(read_weights(path, other))
        wrapped = any(names.fit(state, prefix) for prefix in _wrapper_prefixes(state))
        if wrapped or (prefix := _longer_prefix(state, names)):
            return f"; {other!r} in the file fits: give --prefix {other if wrapped else f'{other}.{prefix}'}"
    return ""


def _longer_prefix(state: Mapping[str, Tensor], names: _Names) -> str:
    """Return a prefix of the user's own without which every name fits; empty if there is none."""
    probe = max(names.known, key=len, default="")
    prefixes = (name.removesuffix(probe) for name in state if name.endswith(probe))
    return next((prefix for prefix in prefixes if prefix and names.fit(state, prefix)), "")


def _check_tensors(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    odd = [k for k, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta]
    if odd:
        raise BadWeights(f"{path} holds sparse, nested or empty (meta) tensors: {_some(odd)}: save dense ones")
    wrong = [k for k, tensor in tensors.items() if tensor.shape != own[k].shape]
    if wrong:
        each = [f"{k} is {tuple(tensors[k].shape)} in the file, {tuple(own[k].shape)} in the network" for k in wrong]
        raise BadWeights(f"{path} has other shapes than the network", remedy=_some(each))
    inexact = {k for k in tensors if own[k].is_floating_point() or own[k].is_complex()}
    codes = [k for k in tensors if k in inexact and not (tensors[k].is_floating_point() or tensors[k].is_complex())]
    if codes:
        kind = str(tensors[codes[0]].dtype).removeprefix("torch.")
        mend = f"{_some(codes)}: dequantise the network, then save its weights"
        raise BadWeights(f"{path} holds integers ({kind}) where the network has floating numbers", remedy=mend)
    complex_ones = [k for k, tensor in tensors.items() if tensor.is_complex() and not own[k].is_complex()]
    if complex_ones:
        raise BadWeights(f"{path} holds complex numbers where the network has real ones: {_some(complex_ones)}")


def _some(names: list[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
