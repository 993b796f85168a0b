"""Folder of a study: one folder per network, written completely or not at all, and tables derived from them.

    OUT/study.json                       the study's settings
    OUT/networks/<key>/config.json       the network's settings; key is their hash
                       result.json       how training ended, versions, device, threads, seconds
                       curves.safetensors (with the graph of a network from R to R), weights.safetensors,
                       report.safetensors
                       history.csv, where measures were followed in training
                       checksums.json, of all these files
    OUT/training/<key>.<versions>.pt     checkpoint of a training in progress; removed when the network is finished
                 <key>.progress          its steps done and in total
    OUT/failed/<key>/  config.json, failed.json    a run that ended in an error; removed when the network is finished
    OUT/known.zip                        the tables of networks that an earlier run finished elsewhere
    OUT/table.csv, OUT/relations.csv     derived; no timings, dates, hosts or paths
    OUT/derived.json, OUT/drawn.json     what was derived and drawn, with the digest of what that was made of

There is no lock and no daemon: several processes may work in one folder. If two compute the same network, the result of
the first to finish is kept. Versions, device, instruction set and threads are recorded, for they can change digits.

What was derived is derived again where its inputs have changed, or flatlens's own source, or where it cannot be read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatlens.errors import BadFolder, BadInput, one_line
from flatlens.estimate import Progress, Report
from flatlens.experiments.result import (
    StudyResult,
    opened_archive,
    read_studies_in,
    require_curves,
    require_result,
    write_study,
)
from flatlens.experiments.settings import NetworkSettings, Study, in_words, settings_apart, without_places
from flatlens.files import (
    PARTIAL,
    csv_of,
    flush,
    flush_all,
    host,
    partial_name,
    require_checksums,
    write_checksums,
    write_whole,
)
from flatlens.progress import count_of
from flatlens.settings_json import digest
from flatlens.tracking.history import load_history, save_history
from flatlens.user_code import without_folders
from flatlens.version import __version__


def versions() -> dict[str, str]:
    """Return versions, device, instruction set and threads as text; networks are computed on one thread of the CPU.

    >>> sorted(versions())
    ['device', 'flatlens', 'instructions', 'numpy', 'python', 'threads', 'torch']
    """
    return {
        "flatlens": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": "cpu",
        "instructions": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": "1",
    }


def difference(recorded: dict[str, str], now: dict[str, str]) -> str:
    """Return the differences in words; empty if there are none.

    >>> difference({"torch": "2.6.0", "device": "cpu"}, {"torch": "2.13.0", "device": "cpu"})
    'torch 2.6.0 there, 2.13.0 here'
    """
    names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    return "; ".join(f"{name} {recorded.get(name, 'unknown')} there, {now.get(name, 'unknown')} here" for name in names)


OLD = 24 * 3600.0
"""Seconds after which any temporary file is removed: its process number may belong to another process by now."""


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `target` at the end, unless an error came or another process was quicker."""
    partial = partial_name(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        flush_all([*partial.iterdir(), partial])
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # "directory not empty" has several error numbers
                raise
        flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def clear_errors(out: Path) -> Iterator[None]:
    """Turn errors of the system (a full disk, no permission) into one line about `out`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        where = f" ({error.filename})" if error.filename else ""
        raise BadFolder(
            f"cannot use the folder {str(out)!r}: {reason}{where}; what was finished is kept: "
            "free space or change the permissions, and run the same command again"
        ) from error


def refuse_foreign(out: Path, mark: str, own: Collection[str], what: str) -> None:
    """Refuse a file, or a folder that holds other files than `own`, unless another process has just written `mark`."""
    if out.exists() and not out.is_dir():
        raise BadFolder(f"the output {str(out)!r} is a file: name a folder")
    there = sorted(p.name for p in out.iterdir() if not p.name.startswith(".")) if out.exists() else []
    foreign = [name for name in there if name not in own]
    if foreign and not (out / mark).is_file():  # looked for last: what the other process writes comes after its mark
        raise BadFolder(
            f"the output folder {str(out)!r} holds other files ({', '.join(foreign[:3])}) and no {what}: name an empty "
            "or new folder with --out"
        )


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes; files of running processes stay."""
    for leftover in folder.glob(f".*{PARTIAL}"):
        try:
            abandoned = time.time() - leftover.stat().st_mtime > OLD
            if not abandoned:
                where, process = leftover.name.removesuffix(PARTIAL).rsplit(".", 3)[1:3]
                abandoned = where == host() and not _alive(int(process))
        except (FileNotFoundError, ValueError):
            continue  # just finished, or not a file of flatlens
        if abandoned and leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        elif abandoned:
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    try:  # a zombie, whose parent has not read its exit status: "1234 (name) Z ..."
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True  # no such files on this system


SUFFIX = ".progress"
EVERY = 1.0
"""Seconds between two writes."""


class _Note:
    """A `Progress` that writes to a file, and ignores I/O errors: progress is optional."""

    def __init__(self, path: Path) -> None:
        self.path, self.next = path, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() < self.next:
            return
        partial = partial_name(self.path)
        with suppress(OSError):
            try:
                partial.write_text(f"{done} {total}\n", encoding="ascii")
                partial.replace(self.path)
            finally:
                partial.unlink(missing_ok=True)
        self.next = time.monotonic() + EVERY


_T = TypeVar("_T")

SEEN_WITHIN = 30.0
"""Seconds that a network disk may take to show a new folder to other machines."""


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Record:
    """All stored results of one network."""

    settings: NetworkSettings
    result: dict[str, Any]  #: outcome, steps, loss, accuracy, layers, versions, seconds_training, seconds_measuring
    curves: dict[str, Tensor]
    weights: dict[str, Tensor]
    report: Report
    history: pd.DataFrame | None = None  #: columns of a Tracker's history


@dataclass(frozen=True)
class Store:
    """A study's folder. Picklable: workers write into it themselves.

    Every method raises BadFolder, one line, if the disk is full, or the folder cannot be read or written, is damaged or
    holds something else.
    """

    out: Path

    @classmethod
    def create(cls, out: Path, study: Study) -> Store:
        """Return the folder for this study, new, or begun with it or a part of it; sweep what killed runs left."""
        store = cls(out)
        with clear_errors(out):
            if not (out / "study.json").exists():
                own = {"training"} if any((store.out / "networks").glob("*")) else {"training", "networks"}
                refuse_foreign(out, "study.json", own, "study")
                out.mkdir(parents=True, exist_ok=True)
                write_whole(out / "study.json", _pretty(study.as_json()))
            sweep(out)
            # the study takes the place of the one that is there, if it has all networks of that one
            there = store.study()
            asked = study.spelled_as(there)
            if without_places(there.as_json()) != without_places(asked.as_json()):
                if lost := asked.lost(there):
                    named = "; ".join(in_words(one, there.varied) for one in lost[:3])
                    more = f"; {len(lost) - 3} more" if len(lost) > 3 else ""
                    raise BadFolder(
                        f"the output folder {str(out)!r} holds {count_of(len(lost), 'network')} that this study does "
                        f"not have ({named}{more}): {settings_apart(there, asked)}: include "
                        f"{'it' if len(lost) == 1 else 'them'}, too, or choose another --out"
                    )
                write_whole(out / "study.json", _pretty(asked.as_json()))
            for folder in (store.out / "networks", store.out / "training"):
                folder.mkdir(parents=True, exist_ok=True)
                sweep(folder)
            sweep(store.out / "failed")
            # Running networks write their progress again within a second; finished ones need no checkpoint
            for note in (store.out / "training").glob(f"[!.]*{SUFFIX}"):
                note.unlink(missing_ok=True)
            for checkpoint in (store.out / "training").glob("*.pt"):
                if store.folder(checkpoint.name.partition(".")[0]).is_dir():
                    checkpoint.unlink(missing_ok=True)
        return store

    @classmethod
    def open(cls, out: Path) -> Store:
        """Return the folder of a study that was begun."""
        if not (out / "study.json").is_file():
            raise BadFolder(f"{str(out)!r} holds no study (no study.json in it): name the folder given as --out")
        return cls(out)

    def study(self) -> Study:
        """Return the study that the folder holds."""
        try:
            return Study.from_json(_read_json(self.out / "study.json"))
        except BadInput as error:
            raise BadFolder(f"{str(self.out / 'study.json')!r} cannot be read: {error}") from error

    def begun(self) -> Study | None:
        """Return the study that the folder holds; None if it holds none, or one that cannot be read."""
        with suppress(BadFolder):
            return Store.open(self.out).study()
        return None

    def folder(self, key: str) -> Path:
        """Return the folder of a network, which may not exist yet."""
        return self.out / "networks" / key

    def checkpoint(self, key: str) -> Path:
        """Return the checkpoint file of a network's training; other versions, whose digits may differ, have another."""
        return self.out / "training" / f"{key}.{digest(versions())}.pt"

    def finished(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of finished networks."""
        with clear_errors(self.out):  # list again: a network disk may cache for a minute that a name was missing
            there = set(os.listdir(self.out / "networks")) if (self.out / "networks").is_dir() else set()  # noqa: PTH208
        there |= self._kept_versions().keys()
        return [key for key in keys if key in there]

    def keep(self, known: StudyResult, keys: Iterable[str], now: dict[str, str] | None) -> None:
        """Write the tables of an earlier run, unless none of `keys` is new in them; its networks count as finished.

        Where networks are left, these must have been computed with the versions `now` (None: any will do).
        """
        left = set(keys) - set(self.finished(keys))
        new = left & set(known.networks["key"])
        if not new:
            return
        if now is not None and left > new and (what := difference(known.versions, now)):
            raise BadFolder(
                f"the tables of the earlier run were computed with other versions ({what}); results of different "
                f"versions are not mixed: leave the tables out, or --mixed to continue anyway"
            )
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for number, one in enumerate((*self.kept(), known)):
                write_study(archive, str(number), one)
        with clear_errors(self.out):
            write_whole(self.out / "known.zip", content.getvalue())

    def kept(self) -> tuple[StudyResult, ...]:
        """Return the tables written by `keep`."""
        known = self.out / "known.zip"
        return _read_kept(known, known.stat().st_mtime_ns) if known.is_file() else ()

    def _kept_versions(self) -> dict[str, dict[str, str]]:
        return {key: kept.versions for kept in self.kept() for key in kept.networks["key"]}

    def require_seen(self) -> None:
        """Raise BadFolder if a worker does not see the folder; it must not begin another one."""
        patience = time.monotonic() + SEEN_WITHIN
        while not (self.out / "study.json").is_file():
            if time.monotonic() > patience:
                raise BadFolder(
                    f"the worker on {host()} cannot see the folder {str(self.out)!r}: use a folder on a shared disk, "
                    f"with the same path on all machines"
                )
            time.sleep(0.2)

    @contextmanager
    def progress_file(self, key: str) -> Iterator[Progress]:
        """Yield a `Progress` that writes (done, total) of a network's training into a file, which is removed then."""
        path = self.out / "training" / f"{key}{SUFFIX}"
        try:
            yield _Note(path)
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def in_progress(self, networks: Mapping[str, _T]) -> dict[_T, tuple[int, int]]:
        """Return (steps done, largest number of steps) of the networks in training; `networks` maps keys to them."""
        found = {}
        for note in sorted((self.out / "training").glob(f"[!.]*{SUFFIX}")):
            with suppress(OSError, ValueError):  # the run has just ended
                done, total = map(int, note.read_text(encoding="ascii").split())
                if (key := note.name.removesuffix(SUFFIX)) in networks:
                    found[networks[key]] = (done, total)
        return found

    def write(self, record: Record) -> None:
        """Write a network; remove its failure and its checkpoints."""
        key = record.settings.key
        with clear_errors(self.out):
            with whole_folder(self.folder(key)) as folder:
                (folder / "config.json").write_text(_pretty(record.settings.as_json()), encoding="utf-8")
                (folder / "result.json").write_text(_pretty(record.result), encoding="utf-8")
                try:
                    save_file(record.curves, folder / "curves.safetensors")
                    save_file(record.weights, folder / "weights.safetensors")
                    record.report.save(folder / "report.safetensors")
                    if record.history is not None:
                        save_history(record.history, folder / "history.csv")
                except (SafetensorError, BadFolder) as error:  # a full disk by other names
                    raise OSError(None, str(error)) from error
                write_checksums(folder)
                for file in folder.iterdir():  # safetensors makes them readable for the owner alone
                    shutil.copymode(folder / "config.json", file)
            self.forget_failure(key)
            for over in (self.out / "training").glob(f"{key}.*.pt"):
                over.unlink(missing_ok=True)

    def read(self, key: str) -> Record:
        """Return a finished network, unless one of its files is missing or damaged, or they are another network's."""
        folder = self.folder(key)
        try:
            require_checksums(folder)
            settings = NetworkSettings.from_json(_read_json(folder / "config.json"))
            if settings.key != key:
                raise BadFolder(f"it holds the network {settings.key}, whose folder was copied or renamed")
            curves = load_file(folder / "curves.safetensors")
            require_curves(curves)
            return Record(
                settings=settings,
                result=_read_result(folder / "result.json"),
                curves=curves,
                weights=load_file(folder / "weights.safetensors"),
                report=Report.load(folder / "report.safetensors"),
                history=load_history(history) if (history := folder / "history.csv").exists() else None,
            )
        except Exception as error:  # damaged bytes make a reader fail in any way at all
            damage = f"the network in {str(folder)!r} is damaged ({one_line(error).removesuffix(_MEND)})"
            raise BadFolder(f"{damage}: remove that folder and run the study again") from error

    def refuse_other_versions(self, keys: Iterable[str], now: dict[str, str]) -> None:
        """Raise BadFolder if a finished network was computed by other versions than `now`."""
        known = self._kept_versions()
        for key in keys:
            file = self.folder(key) / "result.json"
            if key not in known and not file.exists():
                self.read(key)  # says that the folder is damaged
            recorded = known[key] if not file.exists() else _read_result(file)["versions"]
            if what := difference(recorded, now):
                raise BadFolder(
                    f"{str(self.out)!r} was computed with other versions ({what}); results of different versions are "
                    f"not mixed: use another --out, or --mixed to continue anyway"
                )

    def write_failure(self, settings: NetworkSettings, trace: str) -> None:
        """Write the record of a run that ended in an error."""
        folder = self.out / "failed" / settings.key
        with clear_errors(self.out):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "config.json", _pretty(settings.as_json()))
            error = trace.strip().splitlines()[-1] if trace.strip() else "unknown error"
            write_whole(folder / "failed.json", _pretty({"error": error, "traceback": trace}))

    def forget_failure(self, key: str) -> None:
        """Remove the record of a failed run, after a success."""
        folder = self.out / "failed" / key
        for name in ("failed.json", "config.json"):
            (folder / name).unlink(missing_ok=True)
        for empty in (folder, self.out / "failed"):
            with suppress(OSError):  # not there, not empty, or another process was quicker
                empty.rmdir()

    def failed(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of networks whose run failed and that are not finished."""
        there = set(self.finished(keys := list(keys)))
        return [key for key in keys if key not in there and (self.out / "failed" / key / "failed.json").is_file()]

    def failures(self, keys: Iterable[str]) -> list[tuple[str, str]]:
        """Return (key, last line of the traceback, without the folders of files) of the recorded failures."""
        noted = [(key, self.out / "failed" / key / "failed.json") for key in keys]
        errors = [(key, str(_read_json(note).get("error", "unknown error"))) for key, note in noted if note.is_file()]
        return [(key, without_folders(error)) for key, error in errors]

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a CSV file with 17 significant digits."""
        with clear_errors(self.out):
            write_whole(self.out / name, csv_of(table))


@lru_cache(maxsize=8)
def _read_kept(path: Path, _written: int) -> tuple[StudyResult, ...]:
    """Return the tables in a file; read once, as long as it is not written again."""
    with opened_archive(path, "the tables of an earlier run") as archive:
        return tuple(read_studies_in(archive).values())


def _pretty(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=1, sort_keys=True, allow_nan=True) + "\n"


_MEND = ": remove it and run the study again"


def _read_result(path: Path) -> dict[str, Any]:
    result = _read_json(path)
    try:
        require_result(result)
    except BadInput as error:
        raise BadFolder(f"{str(path)!r} cannot be read ({error}){_MEND}") from error
    return result


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadFolder(f"{str(path)!r} cannot be read ({error}){_MEND}") from error
    if not isinstance(plain, dict):
        raise BadFolder(f"{str(path)!r} cannot be read (not a JSON object){_MEND}")
    return plain


_OF = "derived_from"
_SOURCE = Path(__file__).parent.parent


def digest_of(*parts: Any) -> str:
    """Return the hash of tables and plain values, and of the source that derives from them.

    >>> digest_of({"a": 1}, pd.DataFrame({"b": [1.0]})) == digest_of({"a": 1}, pd.DataFrame({"b": [1.0 + 1e-15]}))
    False
    """
    digest = hashlib.sha256(_source().encode())
    for part in parts:
        if isinstance(part, pd.DataFrame):
            digest.update(repr([*map(str, part.columns)]).encode())
            digest.update(np.ascontiguousarray(pd.util.hash_pandas_object(part, index=False).to_numpy()).data)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


@cache
def _source() -> str:
    digest = hashlib.sha256()
    for file in sorted(_SOURCE.rglob("*")):
        if file.suffix in (".py", ".j2", ".css", ".js"):
            digest.update(file.relative_to(_SOURCE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def read_derived(file: Path, of: str) -> dict[str, Any] | None:
    """Return what `write_derived` kept, if it was derived from what has the digest `of`; else None."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop(_OF) != of:
            return None
        tables = {name: pd.DataFrame(columns) for name, columns in plain.pop("tables").items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    return {**plain, **tables}


def write_derived(file: Path, of: str, derived: Mapping[str, Any]) -> None:
    """Keep tables and plain values that were derived from what has the digest `of`."""
    tables = {name: one.to_dict("list") for name, one in derived.items() if isinstance(one, pd.DataFrame)}
    plain = {name: one for name, one in derived.items() if name not in tables}
    write_whole(file, json.dumps({_OF: of, **plain, "tables": tables}, default=float) + "\n")
