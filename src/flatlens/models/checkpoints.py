"""Load the weights of a file into a network, whatever wrapped the network when it was saved."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flatlens.errors import BadWeights
from flatlens.models.weightfiles import Weights, read_weights
from flatlens.userfile import users_code

WRAPPERS = ("module.", "model.")
"""Prefixes that DataParallel, DistributedDataParallel and Lightning leave on every name."""

COMPILED = "_orig_mod."  # torch.compile leaves it wherever it wrapped, also inside a name
_SHOWN = 5


@dataclass(frozen=True)
class _Names:
    """The names of a network's weights; those tied to one that is present, and batch counters, may be absent."""

    known: frozenset[str]
    ties: tuple[frozenset[str], ...]

    def missing(self, present: set[str]) -> list[str]:
        given_by_ties = {name for tie in self.ties if tie & present for name in tie}
        absent = self.known - present - given_by_ties
        return sorted(n for n in absent if not n.endswith("num_batches_tracked"))


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
    own = _own_tensors(model)
    names = _Names(frozenset(k.replace(COMPILED, "") for k in own), _ties(own))
    used = _fitting_prefix(state, names, Path(path), prefix, read.others)
    chosen = _under(state, used)
    tensors = {k: chosen[k.replace(COMPILED, "")] for k in own if k.replace(COMPILED, "") in chosen}
    _check_tensors(tensors, own, Path(path))
    _check_ties(chosen, names.ties, Path(path))
    changed = _put(model, tensors, own, Path(path))
    return _remarks(read, state, used, tensors, own) + changed


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the network's weights and buffers, themselves and no copies, by their names in its state dict."""
    with users_code(lambda line: BadWeights(f"weights: the network's own state_dict raised {line}")):
        state: object = model.state_dict(keep_vars=True)
    if not isinstance(state, Mapping):
        raise BadWeights(f"weights: the network's own state_dict gives a {type(state).__name__}: it must be a dict")
    return {k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}


def _put(model: nn.Module, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> list[str]:
    """Put tensors, whose names and shapes fit, into the network, all or nothing; return remarks.

    Code of the network's own may load them: a `load_state_dict`, or a hook of it.
    """
    before = {k: v.detach().clone() for k, v in own.items()} if _loads_by_itself(model) else {}
    refused = f"weights: {path} cannot be put into the network: its own load_state_dict"
    try:
        with users_code(lambda line: BadWeights(f"{refused} raised {line}")):
            model.load_state_dict(dict(tensors), strict=False)
        unlike = [k for k in before if k in tensors and not _holds(own[k], tensors[k])]
        if left := [k for k in unlike if torch.equal(own[k], before[k])]:
            raise BadWeights(f"{refused} left weights as they were: {_some(left)}")
    except BadWeights:
        with torch.no_grad():
            for k, tensor in before.items():
                own[k].copy_(tensor)
        raise
    return [f"the network's own load_state_dict changed weights of the file: {_some(unlike)}"] if unlike else []


def _loads_by_itself(model: nn.Module) -> bool:
    """Return whether code of the network's own takes part when a state dict is loaded into it."""
    return any(
        type(part).load_state_dict is not nn.Module.load_state_dict
        or not type(part)._load_from_state_dict.__module__.startswith("torch.")
        or part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        for part in model.modules()
    )


def _holds(own: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor of the network has the values of one of the file, rounded to its own precision."""
    return torch.allclose(own.detach(), tensor.to(own), rtol=0, atol=0, equal_nan=True)


def _uncompiled(read: Weights) -> dict[str, Tensor]:
    return {name.replace(COMPILED, ""): tensor for name, tensor in read.tensors.items()}


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _ties(own: Mapping[str, Tensor]) -> tuple[frozenset[str], ...]:
    """Return the groups of names that stand for one and the same tensor."""
    groups: dict[int, set[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), set()).add(name.replace(COMPILED, ""))
    return tuple(frozenset(group) for group in groups.values() if len(group) > 1)


def _fitting_prefix(
    state: Mapping[str, Tensor], names: _Names, path: Path, prefix: str | None, others: Sequence[str]
) -> str:
    starts = [""] if prefix is None else [prefix, f"{prefix}."]
    candidates = [start + one for start in starts for one in _wrapper_prefixes(_under(state, start))]
    if prefix is not None and not _under(state, prefix):
        begun = ", ".join(sorted({name.partition(".")[0] + "." for name in state})[:_SHOWN])
        fits = "; without --prefix every name fits" * any(_fits(state, names, one) for one in _wrapper_prefixes(state))
        raise BadWeights(
            f"weights: no name in {path} begins with the prefix {prefix!r} (they begin with {begun}){fits}"
        )
    for candidate in candidates:
        if _fits(state, names, candidate):
            return candidate
    nearest = max(candidates, key=lambda p: len(names.known & _under(state, p).keys()))
    present = set(_under(state, nearest))
    raise BadWeights(
        f"weights: {path} does not fit the network: {_misfit(names.missing(present), sorted(present - names.known))}"
        f"{_mending(state, names) or _elsewhere(path, others, names)}"
    )


def _fits(state: Mapping[str, Tensor], names: _Names, prefix: str) -> bool:
    present = set(_under(state, prefix))
    return bool(present) and present <= names.known and not names.missing(present)


def _wrapper_prefixes(names: Collection[str]) -> list[str]:
    """Return every chain of wrappers that some name begins with, the empty one first.

    >>> _wrapper_prefixes(["module.model.fc.weight", "step"])
    ['', 'module.', 'module.model.']
    """
    found = [""]
    for prefix in found:  # grows while it is walked
        found += [prefix + w for w in WRAPPERS if any(name.startswith(prefix + w) for name in names)]
    return found


def _mending(state: Mapping[str, Tensor], names: _Names) -> str:
    """Return the advice that would make every name fit, if there is one."""
    if prefix := _longer_prefix(state, names):
        return f"; every name fits without {prefix!r}: give --prefix {prefix}"
    anchor = max(state, key=len)
    for name in names.known:
        prefix = name.removesuffix(anchor)
        if name.endswith(anchor) and prefix and {prefix + n for n in state} == names.known:
            return (
                f"; every name would fit with {prefix!r} in front: the file holds only the network's part "
                f"{prefix[:-1]!r}: load it into that part in your own function"
            )
    return ""


def _longer_prefix(state: Mapping[str, Tensor], names: _Names) -> str:
    """Return a prefix of the user's own without which every name fits; empty if there is none."""
    probe = max(names.known, key=len, default="")
    prefixes = (name.removesuffix(probe) for name in state if name.endswith(probe))
    return next((prefix for prefix in prefixes if prefix and _fits(state, names, prefix)), "")


def _elsewhere(path: Path, others: Sequence[str], names: _Names) -> str:
    """Return the advice to choose another state dict of the file, if one fits."""
    for other in others:
        state = _uncompiled(read_weights(path, other))
        wrapped = any(_fits(state, names, prefix) for prefix in _wrapper_prefixes(state))
        if wrapped or (prefix := _longer_prefix(state, names)):
            return f"; {other!r} in the file fits: give --prefix {other if wrapped else f'{other}.{prefix}'}"
    return ""


def _check_tensors(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    odd = [k for k, tensor in tensors.items() if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta]
    if odd:
        raise BadWeights(f"weights: {path} holds sparse, nested or empty (meta) tensors: {_some(odd)}: save dense ones")
    wrong = [k for k, tensor in tensors.items() if tensor.shape != own[k].shape]
    if wrong:
        each = [f"{k} is {tuple(tensors[k].shape)} in the file, {tuple(own[k].shape)} in the network" for k in wrong]
        raise BadWeights(f"weights: {path} has other shapes than the network: {_some(each)}")
    codes = [k for k, tensor in tensors.items() if _is_code(tensor) and not _is_code(own[k])]
    if codes:
        kind = str(tensors[codes[0]].dtype).removeprefix("torch.")
        raise BadWeights(
            f"weights: {path} holds integers ({kind}) where the network has floating numbers: {_some(codes)}: "
            f"dequantise the network, then save its weights"
        )
    complex_ones = [k for k, tensor in tensors.items() if tensor.is_complex() and not own[k].is_complex()]
    if complex_ones:
        raise BadWeights(
            f"weights: {path} holds complex numbers where the network has real ones: {_some(complex_ones)}"
        )


def _is_code(tensor: Tensor) -> bool:
    """Return whether a tensor holds whole numbers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _check_ties(chosen: Mapping[str, Tensor], ties: tuple[frozenset[str], ...], path: Path) -> None:
    for tie in ties:
        first, *others = sorted(tie & chosen.keys()) or [""]
        for other in others:
            if not torch.allclose(chosen[first], chosen[other], rtol=0, atol=0, equal_nan=True):
                raise BadWeights(
                    f"weights: {path} has different values for {first} and {other}, but the network uses one tensor "
                    f"for both (tied weights): build it without tying"
                )


def _remarks(
    read: Weights, state: Mapping[str, Tensor], used: str, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> list[str]:
    remarks = []
    if read.key and read.others:
        remarks.append(
            f"weights read from {read.key!r} of the file, which also holds {_some(list(read.others))}: --prefix chooses"
        )
    left = sorted(name for name in state if not name.startswith(used))
    if left:
        remarks.append(f"left out of the weights, as their names do not begin with {used!r}: {_some(left)}")
    rounded = [k for k, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize > own[k].dtype.itemsize]
    if rounded:
        kinds = f"{tensors[rounded[0]].dtype} in the file, {own[rounded[0]].dtype} in the network"
        remarks.append(f"weights rounded to fit ({kinds}): {_some(rounded)}".replace("torch.", ""))
    return remarks


def _misfit(missing: list[str], unexpected: list[str]) -> str:
    """Return the names that only one of network and file has, in words."""
    parts = []
    if missing:
        parts.append(f"the network needs {_some(missing)}, which the file does not have")
    if unexpected:
        parts.append(f"the file has {_some(unexpected)}, which the network does not know")
    return "; ".join(parts) or "no name fits"


def _some(names: list[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
