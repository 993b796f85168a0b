"""A measured number with its error, kind and cost; and the table that holds many."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flatlens.errors import BadFolder, BadInput, UnknownName, one_line

Kind: TypeAlias = Literal["exact", "estimate", "lower bound", "upper bound", "undefined"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)` by everything that can take longer than a second."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Estimate:
    """One number, how far to trust it, and what it cost.

    >>> Estimate(2.0, source="compression Def. 3.7")
    2 (exact)
    >>> Estimate(2.0, stderr=0.5, kind="estimate")
    2 +- 0.98 (estimate)
    """

    value: float
    stderr: float = 0.0  #: value +- 1.96 stderr is a 95% interval; 0 when exact
    kind: Kind = "exact"
    note: str = ""  #: why undefined, the share of samples left out, what was assumed
    samples: Tensor | None = None  #: per-sample values, (n,) float64, in the order of the data
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  #: vectors and curves by name
    source: str = ""  #: where the definition stands
    unit: str = ""
    seconds: float = 0.0  #: of the computation it came out of (one pass serves many measures)
    products: int = 0  #: curvature-vector products used

    def __repr__(self) -> str:
        error = f" +- {1.96 * self.stderr:.2g}" if self.stderr else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.value:.6g}{error} ({self.kind}{note})"


Key: TypeAlias = tuple[str, str | None]
"""(measure, layer), or (measure, None) for the network's answer."""


class Report(Mapping[Key, Estimate]):
    """Estimates by measure and layer: `report["mls"]` is the network's answer, `report["mls", "fc3"]` one layer's.

    `about` tells what was measured: loss, samples, outputs, layers in execution order, versions, device.

    >>> report = Report({("mls", None): Estimate(2.0), ("mls", "fc1"): Estimate(3.0)}, {"n": 5})
    >>> report["mls"].value, report["mls", "fc1"].value
    (2.0, 3.0)
    """

    def __init__(self, estimates: Mapping[Key, Estimate], about: Mapping[str, Any]) -> None:
        self._estimates = dict(estimates)
        self.about = dict(about)

    def __getitem__(self, key: str | Key) -> Estimate:
        pair = (key, None) if isinstance(key, str) else key
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UnknownName(
                f"report[{key!r}]: a measure's name, or (measure, layer), is needed: report['mls', 'fc1']"
            )
        measure, layer = pair
        if pair in self:
            return self._estimates[measure, layer]
        if measure not in self.measures():
            raise UnknownName.among("measure in this report", measure, self.measures())
        layers = [at for name, at in self._estimates if name == measure and at is not None]
        raise UnknownName.among(f"layer with a value of {measure}", str(layer), layers)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._estimates)

    def __len__(self) -> int:
        return len(self._estimates)

    def __contains__(self, key: object) -> bool:
        pair = (key, None) if isinstance(key, str) else key
        named = isinstance(pair, tuple) and all(part is None or isinstance(part, str) for part in pair)
        return named and pair in self._estimates

    def __repr__(self) -> str:
        return self.frame().to_string(max_rows=60)

    def _repr_html_(self) -> str:
        return self.frame().to_html(max_rows=60, float_format="{:.6g}".format, border=0)

    def measures(self) -> list[str]:
        """The measures' names, in the order they were asked for."""
        return list(dict.fromkeys(name for name, _ in self._estimates))

    def frame(self) -> pd.DataFrame:
        """Tidy: one row an estimate; `layer` is empty for the network's answer."""
        columns = ["measure", "layer", "value", "stderr", "kind", "source", "unit", "seconds", "products", "note"]
        rows = [
            {"measure": name, "layer": layer or "", **{c: getattr(e, c) for c in columns[2:]}}
            for (name, layer), e in self._estimates.items()
        ]
        return pd.DataFrame(rows, columns=columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all: the arrays as safetensors, the table in its header."""
        tensors: dict[str, Tensor] = {}
        rows = []
        for number, ((name, layer), e) in enumerate(self._estimates.items()):
            arrays = {
                **({"samples": e.samples} if e.samples is not None else {}),
                **{f"arrays.{k}": v for k, v in e.arrays.items()},
            }
            tensors |= {f"{number}/{k}": v.detach().cpu().contiguous().clone() for k, v in arrays.items()}
            scalars = {
                f: getattr(e, f) for f in ("value", "stderr", "kind", "note", "source", "unit", "seconds", "products")
            }
            rows.append({"measure": name, "layer": layer, **scalars})
        table = json.dumps({"rows": rows, "about": self.about})
        header = {"flatlens.report": table, "flatlens.digest": _digest(table, tensors)}
        partial = None
        try:
            target = Path(path)
            partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
            save_file(tensors, partial, metadata=header)
            partial.replace(target)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise BadFolder(f"Report.save({str(path)!r}): the file cannot be written ({one_line(error)})") from error
        finally:
            if partial is not None:
                with contextlib.suppress(OSError, ValueError):
                    partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote; refuse a file that was changed since."""
        try:
            with safe_open(Path(path), framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            table = header["flatlens.report"]
            digest = _digest(table, tensors)
            if header.get("flatlens.digest", digest) != digest:  # earlier versions wrote none
                raise ValueError("its checksum is not that of its contents: it was damaged, or written by other hands")
            return cls(*_read(json.loads(table), tensors))
        except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, OSError) as error:
            raise BadInput(f"Report.load({str(path)!r}): not a saved report ({one_line(error)})") from error


def _digest(table: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a report's table and of its arrays, with their names, types and shapes."""
    digest = hashlib.sha256(table.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[Key, Estimate], dict[str, Any]]:
    """Return estimates, and what they are about."""
    estimates: dict[Key, Estimate] = {}
    for number, row in enumerate(header["rows"]):
        mine = {k.split("/", 1)[1]: v for k, v in tensors.items() if k.startswith(f"{number}/")}
        samples = mine.pop("samples", None)
        arrays = {k.removeprefix("arrays."): v for k, v in mine.items()}
        key = (row.pop("measure"), row.pop("layer"))
        estimates[key] = Estimate(**row, samples=samples, arrays=arrays)
    return estimates, header["about"]


def undefined(note: str) -> Estimate:
    """A number that does not exist here, with the reason: its value is NaN, never a guess."""
    return Estimate(float("nan"), kind="undefined", note=note)
