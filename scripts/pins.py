"""Compare the results of two trees, value by value: a commit's and the present one's.

    python scripts/pins.py                           all parts, this tree against 67187b7, bitwise
    python scripts/pins.py measures cli --rtol 1e-12 some parts, with a tolerance for numbers
    python scripts/pins.py --tree ../other           another tree; its package is imported from there
    python scripts/pins.py measures --only vit       the cases of `measures` whose name contains "vit"

Parts:

    names      `__all__` of every package, and the signatures of what it names
    cli        `--help` of every command, lists and commands as JSON, what wrong options print
    measures   every measure with its options, on networks of tests/truths and on some made here, all values per sample
    errors     what wrong arguments raise in Python
    curvature  products, eigenvalues, densities; moved features and labels; distributions
    reports    check_bounds, check_invariance, compare, a tracker's history, and how they look as text
    studies    keys of studies' networks, tiny studies' files, tables and pages
    pages      docs/measures.md and docs/conventions.md as their scripts write them; HTML pages of reports
    papers     experiments at smoke scale, only where it is asked for (`papers --only X11`: one of them)

Each part runs in a process of its own, with PYTHONPATH=TREE/src and one thread, and only through the public interface:
both trees run the same code. Seconds are left out. The reference's results are kept under the temporary folder, by
commit and by the text of this file. The exit status is 1 if anything differs.
"""

# ruff: noqa: D102, D103, E501

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REFERENCE = "67187b7"
HERE = Path(__file__).resolve()
PARTS: dict[str, Callable[[Found], None]] = {}
MOST = 12  #: differences printed of each group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--reference", default=REFERENCE, help="the commit to compare with")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the tree to compare")
    parser.add_argument("--rtol", type=float, default=0.0, help="allowed relative difference of numbers")
    parser.add_argument("--bitwise", action="store_true", help="no tolerance, the default")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--all", action="store_true", help="print every difference")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        import flatlens

        assert Path(os.environ["PINS_TREE"]) in Path(flatlens.__file__).parents, flatlens.__file__
        found = Found(given.only)
        PARTS[given.worker](found)
        given.out.write_text(json.dumps(found.values))
        return 0
    if unknown := set(given.parts) - {*PARTS}:
        parser.error(f"no part {', '.join(unknown)}: {', '.join(PARTS)}")
    if not (given.tree / "src" / "flatlens").is_dir():
        parser.error(f"no src/flatlens in {given.tree}")
    reference = worktree(given.reference)
    differing = 0
    for part in given.parts or [one for one in PARTS if one not in ON_REQUEST]:
        start = time.time()
        before = kept(reference, part, given.only)
        middle = time.time()
        after = run(given.tree.resolve(), reference, part, given.only)
        lines = list(differences(before, after, 0.0 if given.bitwise else given.rtol))
        differing += len(lines)
        spent = f"{middle - start:.0f} s + {time.time() - middle:.0f} s"
        print(f"{part}: {len(before)} values, {len(lines)} differ ({spent})")
        for line in lines if given.all else lines[:MOST]:
            print(f"  {line}")
        if len(lines) > MOST and not given.all:
            print(f"  ... and {len(lines) - MOST} more (--all prints them)")
        sys.stdout.flush()
    return int(differing > 0)


# How the two trees run


def worktree(commit: str) -> Path:
    """A checkout of the commit under the temporary folder, made once."""
    whole = subprocess.check_output(["git", "rev-parse", commit], cwd=HERE.parent, text=True).strip()
    folder = Path(tempfile.gettempdir()) / "flatlens-pins" / whole[:12]
    tree = folder / "tree"
    if not (tree / "src").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "prune"], cwd=HERE.parent, check=True)
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--force", str(tree), whole],
            cwd=HERE.parent,
            check=True,
            capture_output=True,
        )
    return tree


def kept(reference: Path, part: str, only: str) -> dict[str, Any]:
    """The reference's results, computed once for this file's text."""
    digest = hashlib.sha256(HERE.read_bytes() + only.encode()).hexdigest()[:12]
    file = reference.parent / f"{part}-{digest}.json"
    whole = reference.parent / f"{part}-{hashlib.sha256(HERE.read_bytes()).hexdigest()[:12]}.json"
    if whole.exists():
        names = ((key, key.partition("/")[0], value) for key, value in json.loads(whole.read_text()).items())
        return {key: value for key, name, value in names if only in name or name in only}
    if not file.exists():
        own = run(reference, reference, part, only)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(own))
        partial.rename(file)
    return dict(json.loads(file.read_text()))


def run(tree: Path, reference: Path, part: str, only: str) -> dict[str, Any]:
    """One part's results in one tree."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        fixed = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
        own = {"PYTHONPATH": str(tree / "src"), "PINS_TREE": str(tree), "PINS_REFERENCE": str(reference)}
        done = subprocess.run(
            [sys.executable, str(HERE), "--worker", part, "--out", str(out), "--only", only],
            cwd=folder,
            env={**os.environ, **threads, **fixed, **own},
            capture_output=True,
            text=True,
        )
        if done.returncode or not out.exists():
            return {f"{part} failed": done.stderr[-3000:]}
        plain = out.read_text().replace(str(tree), "<tree>").replace(os.path.realpath(folder), "<folder>")
        return dict(json.loads(plain.replace(folder, "<folder>")))


NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


def differences(before: dict[str, Any], after: dict[str, Any], rtol: float) -> Iterator[str]:
    """A line for each value that differs by more than rtol; numbers inside a text may differ in their last digit."""
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in after:
            yield f"{key}: missing (was {short(before[key])})"
        elif key not in before:
            yield f"{key}: new ({short(after[key])})"
        elif said := unlike(before[key], after[key], rtol):
            yield f"{key}: {said}"


def unlike(a: Any, b: Any, rtol: float) -> str:
    """How two values differ; empty if they do not."""
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} entries, now {len(b)}"
        off = [relative(x, y) for x, y in zip(a, b, strict=True)]
        wrong = [one for one in off if one > rtol]
        return f"{len(wrong)} of {len(a)} entries differ, by up to {max(wrong):.3g}" if wrong else ""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return f"{a!r}, now {b!r} (relative difference {off:.3g})" if (off := relative(a, b)) > rtol else ""
    if a == b:
        return ""
    if isinstance(a, str) and isinstance(b, str):
        if rtol and NUMBER.sub("#", a) == NUMBER.sub("#", b) and all(map(near, NUMBER.findall(a), NUMBER.findall(b))):
            return ""
        rows = a.splitlines(), b.splitlines()
        if max(map(len, rows)) > 1:
            here = [(x, y) for x, y in zip(*rows, strict=False) if x != y]
            more = f" (lines: {len(rows[0])}, now {len(rows[1])})" if len(rows[0]) != len(rows[1]) else ""
            if here:
                return f"{len(here)} lines differ{more}; first:\n      - {here[0][0][:300]}\n      + {here[0][1][:300]}"
            return f"lines were added or removed{more}"
    return f"\n      - {short(a)}\n      + {short(b)}"


def relative(a: Any, b: Any) -> float:
    if a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (isinstance(a, float | int) and isinstance(b, float | int)) or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def near(a: str, b: str) -> bool:
    """Whether two numbers in a text differ by at most one in the last digit printed."""
    mantissa = a.partition("e")[0]
    unit = 10.0 ** -len(mantissa.partition(".")[2]) * 10.0 ** int(a.partition("e")[2] or 0)
    return abs(float(a) - float(b)) <= 1.5 * unit


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."


# What a part computes


class Found:
    """The results of a part, by name: numbers, texts and lists of numbers."""

    def __init__(self, only: str = "") -> None:
        self.values: dict[str, Any] = {}
        self.only = only

    def wants(self, name: str) -> bool:
        return self.only in name or name in self.only

    def add(self, name: str, value: Any) -> None:
        """Take dicts, lists, tensors and tables apart; leave out what is called seconds."""
        import pandas as pd
        import torch

        if name.rpartition("/")[2] in ("seconds", "pass_seconds", "flatlens.seconds", "flatlens.digest", "elapsed"):
            return
        if isinstance(value, torch.Tensor):
            plain = torch.view_as_real(value) if value.is_complex() else value
            flat = plain.detach().to_dense().cpu().flatten()
            self.values[name] = flat.to(torch.float64).tolist() if flat.is_floating_point() else flat.tolist()
            self.values[f"{name}/shape"] = f"{tuple(value.shape)} {value.dtype}"
        elif isinstance(value, pd.DataFrame):
            for column in value.columns:
                self.add(f"{name}/{column}", list(value[column]))
        elif isinstance(value, dict):
            for key, part in value.items():
                self.add(f"{name}/{key}", part)
            if not value:
                self.values[name] = "{}"
        elif isinstance(value, list | tuple):
            if all(isinstance(part, float | int) for part in value):
                self.values[name] = [part if isinstance(part, int) else float(part) for part in value]
            else:
                for number, part in enumerate(value):
                    self.add(f"{name}/{number}", part)
        elif value is None or isinstance(value, str | int | float):
            self.values[name] = value if value is None or isinstance(value, str | int) else float(value)
        else:
            self.values[name] = str(value)

    def result(self, name: str, result: Any) -> None:
        """Take a report apart as it is saved: the table in its header, and its arrays."""
        from safetensors import safe_open

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result"
            result.save(file)
            with safe_open(file, framework="pt") as opened:
                for key, text in (opened.metadata() or {}).items():
                    plain = json.loads(text) if text[:1] in "[{" else text
                    if isinstance(plain, dict) and isinstance(plain.get("rows"), list):
                        rows = plain.pop("rows")
                        for number, row in enumerate(rows):
                            self.add(f"{name}/{number}-{row.get('measure', '')}-{row.get('layer') or ''}", row)
                    self.add(f"{name}/{key}", plain)
                for key in sorted(opened.keys()):
                    self.add(f"{name}/{key}", opened.get_tensor(key))

    def attempt(self, name: str, call: Callable[[], Any]) -> None:
        """Add what a call returns, or its error."""
        try:
            found = call()
        except Exception as error:
            self.values[name] = f"{type(error).__name__}: {error}"
            return
        if hasattr(found, "save") and hasattr(found, "about"):
            self.result(name, found)
        else:
            self.add(name, found)


def part(function: Callable[[Found], None]) -> Callable[[Found], None]:
    PARTS[function.__name__.removeprefix("of_")] = function
    return function


@part
def of_names(found: Found) -> None:
    import inspect
    import pkgutil
    from importlib import import_module

    import flatlens

    inside = pkgutil.walk_packages(flatlens.__path__, "flatlens.")
    for name in ["flatlens", *(info.name for info in inside if info.ispkg and info.name != "flatlens.cli")]:
        package = import_module(name)
        public = sorted(getattr(package, "__all__", []))
        found.add(f"{name}/__all__", " ".join(public))
        found.add(f"{name}/dir", " ".join(one for one in dir(package) if not one.startswith("_") and one in public))
        for one in public:
            thing = getattr(package, one)
            if callable(thing):
                try:
                    given = inspect.signature(thing).parameters.values()
                except (TypeError, ValueError):
                    continue
                defaults = [
                    "" if p.default is p.empty else "=" + re.sub(" at 0x.*", "", repr(p.default)) for p in given
                ]
                plain = [f"{p.kind.name} {p.name}{default}" for p, default in zip(given, defaults, strict=True)]
                found.add(f"{name}/{one}", ", ".join(plain))
            if isinstance(thing, type):
                found.add(f"{name}/{one}/members", " ".join(sorted(m for m in vars(thing) if not m.startswith("_"))))


USERS = """
import torch
from torch import nn

def build(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()

def relu():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin().double()
def samples(): return x, torch.arange(20) % 3
def held_out(): return x[:8] + 0.1, torch.arange(8) % 3
def broken(): raise RuntimeError("no data here")
"""
"""A user's file, for the command line."""

COMMANDS = ("study", "measure", "bounds", "invariance", "compare", "reproduce", "list", "report", "data", "data fetch",
            "data list")  # fmt: skip
NET = "measure net.py:build --data net.py:samples --loss cross_entropy"
RUNS = {
    "measure": f"{NET} --test net.py:held_out --json",
    "measure, named": f"{NET} --measures sharpness,hessian_trace,local_volume(top_k=2),mls_by_search --seed 3 --json",
    "measure, text": f"{NET} --layers 0",
    "measure, probes": f"{NET} --outputs 2 --dtype float32 --samples 12 --json",
    "bounds": "bounds net.py:relu --data net.py:samples --loss half_squared_error --json",
    "bounds, entropy": "bounds net.py:build --data net.py:samples --loss cross_entropy --json",
    "bounds, text": "bounds net.py:build --data net.py:samples --loss cross_entropy",
    "invariance": "invariance net.py:relu --data net.py:samples --loss cross_entropy --json",
    "invariance, text": "invariance net.py:relu --data net.py:samples --loss cross_entropy --measures mls,weight_norm",
    "compare": "compare net.py:build net.py:relu --data net.py:samples --loss cross_entropy --json",
    "compare, text": "compare net.py:build net.py:relu --data net.py:samples --loss cross_entropy",
    "measures": "list measures --json",
    "transforms": "list transforms --json",
    "bounds listed": "list bounds --json",
    "experiments": "list experiments --json",
    "data": "data list --json",
    "measures, text": "list measures",
    "transforms, text": "list transforms",
    "bounds listed, text": "list bounds",
    "experiments, text": "list experiments",
    "version": "--version",
    # mistakes
    "no such command": "mesure net.py:build",
    "no such measure": f"{NET} --measures ML",
    "no such option of a measure": f"{NET} --measures mls(tol=3)",
    "option out of range": f"{NET} --measures local_volume(top_k=0)",
    "no such loss": "measure net.py:build --data net.py:samples --loss crossentropy",
    "no such file": "measure nett.py:build --data net.py:samples --loss mse",
    "no such function": "measure net.py:bild --data net.py:samples --loss mse",
    "no data": "measure net.py:build --loss mse",
    "broken data": "measure net.py:build --data net.py:broken --loss mse",
    "no such option": f"{NET} --mesures mls",
    "left over": f"{NET} and more",
    "wrong choice": f"{NET} --dtype float16",
    "wrong number": f"{NET} --samples none",
    "negative number": f"{NET} --samples -3",
    "too many samples": f"{NET} --samples 300",
    "wrong memory": f"{NET} --memory lots",
    "wrong outputs": f"{NET} --outputs some",
    "no such parameter": f"{NET} --parameters 7.weight",
    "no such weights": f"{NET} --weights none.pt",
    "no such device": f"{NET} --device tpu",
    "ghost batch alone": f"{NET} --ghost-batch 4",
    "no such layer": f"{NET} --layers fc9",
    "no such list": "list kinds",
    "one to compare": "compare net.py:build --data net.py:samples --loss cross_entropy",
    "no such experiment": "reproduce X99 --out x",
    "no such data": "study digit --out y",
    "no such setting": "study digits --out y --set learning_rate=3",
    "no such study": "report nowhere",
    "no such hub data": "data fetch cifar11",
    "no such bound": "bounds net.py:build --data net.py:samples --loss mse --bounds mls_chains",
    "no such transform": "invariance net.py:relu --data net.py:samples --loss cross_entropy --transforms layer",
}  # fmt: skip


@part
def of_cli(found: Found) -> None:
    Path("net.py").write_text(USERS)
    for command in ("", *COMMANDS):
        name = f"{command} --help".strip()
        if found.wants(name):
            found.add(name, printed([*command.split(), "--help"]))
    for name, words in RUNS.items():
        if not found.wants(name):
            continue
        status, out, errors = printed(words.split())
        found.add(f"{name}/status", status)
        found.add(f"{name}/errors", errors)
        found.add(f"{name}/printed", json.loads(out) if out.startswith("{") else out)


SECONDS = re.compile(r"\d[\d.]* (?:s|ms|seconds|min)\b")


def printed(words: list[str]) -> tuple[str, str, str]:
    """The exit status of a command, and what it writes to stdout and stderr."""
    from flatlens.cli import main as command

    out, errors, status = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = ["flatlens", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            command()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    finally:
        sys.argv = before
    told = [line for line in errors.getvalue().splitlines() if not line.endswith("so far")]  # only after some seconds
    return str(status), SECONDS.sub("# s", out.getvalue()), SECONDS.sub("# s", "\n".join(told))


# Networks


def networks() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """By name a function that returns (model, loss, data, options of Problem)."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    class Tied(nn.Module):
        """Tokens by an embedding whose table also makes the outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.mid, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.norm(self.table(ids)).mean(1)
            return F.linear(h + F.gelu(self.mid(h)), self.table.weight)

    class Shared(nn.Module):
        """One layer that two calls use."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.mid, self.b = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.mid(torch.tanh(self.mid(torch.tanh(self.a(x)))))))

    class Encoder(nn.Module):
        """A transformer's encoder layer over tokens, and its mean."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, activation="gelu", batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(1))

    class Heads(nn.Module):
        """Queries, keys and values of one linear layer, around torch's fused attention."""

        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Linear(3, 4)
            self.qkv, self.proj, self.norm, self.head = (
                nn.Linear(4, 12),
                nn.Linear(4, 4),
                nn.LayerNorm(4),
                nn.Linear(4, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.patch(x)
            q, k, v = self.qkv(self.norm(h)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            return self.head(
                (h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).mean(1)
            )

    class Language(nn.Module):
        """A causal model whose every token has a row of outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.embed(input_ids)
            return self.head(h + torch.tanh(self.mix(h.cumsum(1))))

    def seeded(net: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator))
                    module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
            for p in net.parameters():
                p.copy_(
                    torch.randn(p.shape, generator=generator) / max(1.0, p[0].numel() ** 0.5 if p.ndim > 1 else 2.0)
                )
        return net.to(dtype).eval()

    def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    def classes(n: int, of: int = 3) -> Tensor:
        return torch.arange(n) * 7 % of

    def mlp(act: type[nn.Module] = nn.Tanh, outputs: int = 3) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), act(), nn.Linear(6, 4), act(), nn.Linear(4, outputs))

    def images() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 2, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    three, two = torch.float32, torch.float64
    tests = {"test": (normal(5, 5, seed=9), classes(5))}
    ids = torch.arange(24).reshape(6, 4) * 5 % 7
    found: dict[str, Callable[[], tuple[Any, ...]]] = {
        "relu": lambda: (seeded(mlp(nn.ReLU)), "cross_entropy", (normal(9, 5), classes(9)), tests),
        "tanh": lambda: (seeded(mlp()), "cross_entropy", (normal(9, 5), classes(9)), tests),
        "relu32": lambda: (seeded(mlp(nn.ReLU), three), "cross_entropy", (normal(9, 5, dtype=three), classes(9)), {}),
        "gelu-squares": lambda: (seeded(mlp(nn.GELU)), "half_squared_error", (normal(9, 5), normal(9, 3, seed=1)), {}),
        "regression32": lambda: (seeded(mlp(nn.ReLU, 1), three), "mse",
                                 (normal(9, 5, dtype=three), normal(9, 1, seed=1, dtype=three)), {}),
        "huber": lambda: (seeded(mlp(nn.Softplus)), "HuberLoss", (normal(9, 5), normal(9, 3, seed=1)), {}),
        "images": lambda: (seeded(images()), "cross_entropy", (normal(6, 1, 4, 4), classes(6)), {}),
        "images32": lambda: (seeded(images(), three), "cross_entropy", (normal(6, 1, 4, 4, dtype=three), classes(6)), {}),
        "ghosts": lambda: (seeded(images()), "cross_entropy", (normal(6, 1, 4, 4), classes(6)),
                           {"batchnorm": "train", "ghost_batch": 3}),
        "encoder": lambda: (seeded(Encoder()), "cross_entropy", (normal(5, 3, 4), classes(5)), {}),
        "heads": lambda: (seeded(Heads()), "cross_entropy", (normal(5, 3, 3), classes(5)), {}),
        "tied": lambda: (seeded(Tied()), "cross_entropy", (ids, classes(6, 7)), {}),
        "shared": lambda: (seeded(Shared()), "cross_entropy", (normal(7, 5), classes(7)), {}),
        "language": lambda: (seeded(Language()), "cross_entropy",
                             [{"input_ids": ids[:4] % 6, "labels": (ids[:4] + 1) % 6}], {}),
        "many": lambda: (seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 140))), "cross_entropy",
                         (normal(5, 4), classes(5, 140)), {}),
        "frozen": lambda: (half_frozen(seeded(mlp())), "cross_entropy", (normal(9, 5), classes(9)), {}),
        "callable": lambda: (seeded(mlp()), lambda f, y: (f - y).pow(4).mean(1),
                             (normal(7, 5, dtype=two), normal(7, 3, seed=2)), {}),
    }  # fmt: skip

    def half_frozen(net: nn.Module) -> nn.Module:
        next(net.parameters()).requires_grad_(False)
        return net

    truths = Path(os.environ["PINS_REFERENCE"]) / "tests" / "truths" / "networks.py"
    own: dict[str, Any] = {"__name__": "truths"}
    exec(compile(truths.read_text(), str(truths), "exec"), own)

    def of_truths(name: str) -> Callable[[], tuple[Any, ...]]:
        def make() -> tuple[Any, ...]:
            net, x, y = own["network"](name)
            return net, "cross_entropy", (x, y), {}

        return make

    return {**found, **{f"truths-{name}": of_truths(name) for name in own["NETWORKS"]}}


OPTIONS = (
    "jacobian_norm(softmax=True)", "mls(softmax=True)", "batch_jacobian_norm(rtol=0.01)", "local_volume(top_k=2)",
    "log_volume(top_k=1)", "network_volume(top_k=2)", "hessian_trace(probes=3)", "hessian_trace(exact=True)",
    "adaptive_sharpness(probes=4)", "adaptive_sharpness(exact=True)", "matrix_normalized_sharpness(frobenius=True)",
    "normalized_sharpness(lam=0.5)", "layer_factors(blocks=False)", "sharpness(top_k=3,bottom_k=2,rtol=0.0001)",
    "sharpness(layers=True)", "ggn_norm(top_k=2,layers=True)", "spectral_density(probes=3,steps=6,layers=True)",
    "spectral_density(ggn=True,probes=2,steps=5)", "interpolation_gap(adaptive=True)", "interpolation_gap(bound=True)",
    "directional_sharpness(along='gradient')", "gradient_noise_scale(batches=4)", "minibatch_sharpness(samples=3,batches=2)",
    "average_sharpness(adaptive=False,probes=4)", "average_sharpness(scale='exact',probes=4)", "worst_sharpness(adaptive=True,steps=3)",
    "worst_sharpness(m=3,steps=3)", "pac_bayes_flatness(of='loss',probes=4)", "pac_bayes_flatness(adaptive=True,probes=4)",
    "feature_robustness(over='ball',probes=4)", "feature_robustness(over='worst',restarts=2,steps=5)",
    "feature_robustness(over='noise',probes=4)", "feature_robustness(layers=True,levels=3,probes=4)",
    "feature_robustness(over='truncated_normal',sigma=0.5,probes=4)", "local_variation(delta=0.2,restarts=2,steps=5)",
    "mls_by_search(normalized=True,steps=5)", "representativeness(splits=3,bandwidth='relative')",
    "representativeness(over='ball',probes=4,splits=2)", "locally_constant_labels(probes=4)", "loss(excess=True)",
    "generalisation_gap(convention='absolute')",
    "maximal_relative_flatness(rtol=0.01)", "layer_sharpness(rtol=0.01)",
    "critical_sharpness(rtol=0.01)", "preconditioned_sharpness(rtol=0.01)",
)  # fmt: skip
QUICK = ("representativeness(splits=2,probes=2)", "spectral_density(probes=2,steps=4)", "worst_sharpness(restarts=1,steps=3)",
         "pac_bayes_flatness(probes=3)", "local_variation(restarts=1,steps=2)", "mls_by_search(restarts=1,steps=3)",
         "feature_robustness(probes=3)", "average_sharpness(probes=3)", "gradient_noise_scale(batches=3)",
         "minibatch_sharpness(samples=3,batches=2)", "locally_constant_labels(probes=2)")  # fmt: skip
"""Measures that take long with their defaults: by other values on all networks."""
WITH_OPTIONS = ("tanh", "relu32", "encoder")


@part
def of_measures(found: Found) -> None:
    import torch

    import flatlens as fl

    quick = {name.partition("(")[0]: name for name in QUICK}
    for name, make in networks().items():
        if not found.wants(name):
            continue
        model, loss, data, options = make()
        problem = fl.Problem(model, loss, data, **options)
        cards = [card.name for card in fl.catalogue() if not (name.startswith("truths") and card.name in quick)]
        chosen = [quick.get(one, one) for one in cards]
        found.attempt(f"{name}/plain", lambda problem=problem: fl.measure(fl.Lens(problem), "pass"))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        lens = fl.Lens(problem, attention_heads=name in ("heads", "encoder"))
        for one in chosen:
            found.attempt(f"{name}/{one}", lambda one=one, lens=lens: fl.measure(lens, [one]))
        if name in WITH_OPTIONS:
            stepped(model, optimiser, problem)
            lens = fl.Lens(problem, optimiser=optimiser)
            for one in OPTIONS:
                found.attempt(f"{name}/{one}", lambda one=one, lens=lens: fl.measure(lens, [one]))
            sketched = fl.Lens(problem, outputs=2, after=lens)
            found.attempt(f"{name}/sketched", lambda sketched=sketched: fl.measure(sketched, "pass"))
            found.attempt(f"{name}/after", lambda sketched=sketched: fl.measure(sketched, ["sharpness", "ggn_norm"]))
            momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sgd = fl.Lens(problem, optimiser=momentum)
            for one in ("critical_sharpness", "preconditioned_sharpness", "directional_sharpness"):
                found.attempt(f"{name}/sgd/{one}", lambda one=one, sgd=sgd: fl.measure(sgd, [one]))
            small = fl.Problem(model, loss, data, memory=3000, **options)
            found.attempt(f"{name}/small chunks", lambda small=small: fl.measure(fl.Lens(small), "pass"))
            doubled = fl.Problem(model, loss, data, dtype=torch.float64, parameters="all", **options)
            found.attempt(f"{name}/in float64", lambda doubled=doubled: fl.measure(fl.Lens(doubled), "pass"))


def stepped(model: Any, optimiser: Any, problem: Any) -> None:
    """Give the optimiser a state, by a step of length 0 on gradients of the parameters' own."""
    for p in model.parameters():
        p.grad = p.detach() * 0.1 + 0.01
    rates = [group["lr"] for group in optimiser.param_groups]
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    optimiser.step()
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in model.parameters():
        p.grad = None


@part
def of_errors(found: Found) -> None:
    import torch
    from torch import nn

    import flatlens as fl
    from flatlens.experiments import Study

    net, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, 2)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.constant_(net.bias, 0.1)
    labels = torch.zeros(4, dtype=torch.long)
    problem = fl.Problem(net, "mse", (x, y))
    lens = fl.Lens(problem)

    def made(**options: Any) -> Callable[[], Any]:
        given = {"model": net, "loss": "mse", "data": (x, y), **options}
        return lambda: fl.Problem(given.pop("model"), given.pop("loss"), given.pop("data"), **given)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            self.p.data += 1
            return x * self.p

    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x - x.mean(0))

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x) + torch.rand(1)

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            raise ValueError("a bad day")

    cases: dict[str, Callable[[], Any]] = {
        "model": made(model=3),
        "class": made(model=nn.Linear),
        "loss": made(loss="msee"),
        "loss class": made(loss=nn.MSELoss),
        "loss kind": made(loss=nn.NLLLoss(), data=(x, labels)),
        "loss sum": made(loss=lambda f, y: ((f - y) ** 2).sum()),
        "data": made(data=3),
        "one tensor": made(data=x),
        "lengths": made(data=(x, y[:3])),
        "shape": made(data=(torch.ones(4, 5), y)),
        "targets": made(data=(x, torch.zeros(4, 3))),
        "labels": made(loss="cross_entropy", data=(x, labels + 7)),
        "float labels": made(loss="cross_entropy", data=(x, torch.zeros(4))),
        "empty": made(data=(x[:0], y[:0])),
        "infinite": made(data=(x * torch.inf, y)),
        "double": made(data=(x.double(), y.double())),
        "memory": made(memory="lots"),
        "small memory": made(memory=-3),
        "parameters": made(parameters="weights"),
        "no parameters": made(parameters=[]),
        "dtype": made(dtype=torch.int64),
        "arithmetic": made(arithmetic="tf64"),
        "batchnorm": made(batchnorm="test"),
        "ghost batch": made(ghost_batch=3),
        "batchnorm without": made(batchnorm="train"),
        "writes": made(model=Writes(), data=(x, torch.zeros(4, 3))),
        "coupled": made(model=Coupled()),
        "random": made(model=Random()),
        "fails": made(model=Fails()),
        "forward": made(forward=lambda m, b: m(b[0])),
        "forward kind": made(forward=3),
        "test": made(test=3),
        "nan weights": lambda: fl.Lens(fl.Problem(nan(nn.Linear(3, 2)), "mse", (x, y))),
        "lens": lambda: fl.Lens(net),
        "outputs": lambda: fl.Lens(problem, outputs="all"),
        "outputs 0": lambda: fl.Lens(problem, outputs=0),
        "heads": lambda: fl.Lens(problem, attention_heads="yes"),
        "after": lambda: fl.Lens(problem, after=3),
        "optimiser": lambda: fl.Lens(problem, optimiser=3),
        "along": lambda: fl.Lens(problem, along={"w": x}),
        "measure": lambda: fl.measure(problem, "pass"),
        "unknown": lambda: fl.measure(lens, ["ML"]),
        "unknown option": lambda: fl.measure(lens, ["mls(k=3)"]),
        "not a measure": lambda: fl.measure(lens, [3]),
        "option": lambda: fl.measure(lens, ["local_volume(top_k=0)"]),
        "option kind": lambda: fl.measure(lens, ["average_sharpness(rho=-1)"]),
        "layers": lambda: fl.measure(lens, ["sharpness(layers=True)"], layers="fc"),
        "generator": lambda: fl.measure(lens, "pass", generator=3),
        "progress": lambda: fl.measure(lens, "pass", progress=3),
        "stale": lambda: stale(fl.Problem(copy.deepcopy(net), "mse", (x, y))),
        "row": lambda: fl.measure(lens, "pass")["ML"],
        "layer": lambda: fl.measure(lens, "pass")["mls", "fc"],
        "bounds": lambda: fl.check_bounds(lens, "chain"),
        "bounds lens": lambda: fl.check_bounds(problem),
        "bounds assume": lambda: fl.check_bounds(lens, assume={"niceness"}),
        "bounds delta": lambda: fl.check_bounds(lens, delta=-1),
        "bounds rule": lambda: fl.check_bounds(lens, rule="best"),
        "invariance": lambda: fl.check_invariance(lens, ["mls"], "layer"),
        "compare": lambda: fl.compare({"a": lens}),
        "compare twice": lambda: fl.compare({"a": lens, "b": lens}),
        "relate": lambda: fl.relate([3]),
        "tracker": lambda: fl.Tracker(problem, ["ML"]),
        "tracker every": lambda: fl.Tracker(problem, ["mls"], every=0),
        "tracker budget": lambda: fl.Tracker(problem, ["mls"], budget=3),
        "load": lambda: fl.Report.load("nothing.safetensors"),
        "hessian": lambda: fl.curvature.Hessian(problem)(torch.ones(3)),
        "hessian kind": lambda: fl.curvature.Hessian(problem)(3),
        "hessian names": lambda: fl.curvature.Hessian(problem, ["layer"]),
        "fisher": lambda: fl.curvature.Fisher(problem, kind="own"),
        "eigenpairs": lambda: fl.curvature.eigenpairs(fl.curvature.Hessian(problem), top_k=0),
        "eigenpairs start": lambda: fl.curvature.eigenpairs(fl.curvature.Hessian(problem), start=x),
        "eigenpairs rtol": lambda: fl.curvature.eigenpairs(fl.curvature.Hessian(problem), rtol=2),
        "density": lambda: fl.curvature.spectral_density(fl.curvature.Hessian(problem), probes=1),
        "jacobian": lambda: fl.curvature.ParameterJacobian(problem).times(torch.ones(2)),
        "input jacobian": lambda: fl.curvature.InputJacobian(problem).times(torch.ones(2, 3)),
        "feature change": lambda: fl.perturbation.feature_change(problem, torch.eye(2)),
        "feature layer": lambda: fl.perturbation.feature_change(problem, torch.eye(3), "fc"),
        "feature matrix": lambda: fl.perturbation.smallest_feature_matrix(torch.ones(2, 3), torch.ones(3)),
        "feature moves": lambda: fl.perturbation.smallest_feature_matrix(torch.ones(2, 3), torch.eye(2, 3)),
        "elsewhere": lambda: fl.perturbation.Elsewhere(problem).outcomes(torch.ones(3)),
        "cube": lambda: fl.distributions.Cube(0),
        "study scale": lambda: Study.digits("desk"),
        "study setting": lambda: Study.digits("smoke").setting("rate", 3),
        "study axis": lambda: Study.digits("smoke").over("lr"),
        "study value": lambda: Study.digits("smoke").setting("lr", -1.0),
    }  # fmt: skip
    torch.manual_seed(0)
    for name, call in cases.items():
        if found.wants(name):
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always")
                found.attempt(name, lambda call=call: re.sub(r" at 0x\w+", "", repr(call()))[:2000])
            mine = [str(one.message) for one in noted if one.category.__module__.startswith("flatlens")]
            found.add(f"{name}/warnings", " | ".join(mine))


def nan(net: Any) -> Any:
    import torch

    with torch.no_grad():
        net.weight.fill_(torch.nan)
    return net


def stale(problem: Any) -> Any:
    import torch

    import flatlens as fl

    lens = fl.Lens(problem)
    with torch.no_grad():
        problem.model.weight.add_(1)
    return fl.measure(lens, "pass")


@part
def of_curvature(found: Found) -> None:
    import torch

    import flatlens as fl
    from flatlens import curvature as c
    from flatlens import distributions as d
    from flatlens import perturbation as p

    made = networks()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    for name in ("tanh", "relu32", "gelu-squares", "huber", "images", "ghosts", "encoder", "tied", "shared", "language",
                 "callable"):  # fmt: skip
        if not found.wants(name):
            continue
        model, loss, data, options = made[name]()
        problem = fl.Problem(model, loss, data, **options)
        kinds: dict[str, Callable[[], Any]] = {
            "hessian": lambda problem=problem: c.Hessian(problem),
            "ggn": lambda problem=problem: c.GaussNewton(problem),
            "residual": lambda problem=problem: c.Residual(problem),
            "fisher": lambda problem=problem: c.Fisher(problem),
            "sampled": lambda problem=problem: c.Fisher(problem, kind="sampled", draws=3),
            "empirical": lambda problem=problem: c.Fisher(problem, kind="empirical"),
        }
        for kind, make in kinds.items():
            found.attempt(f"{name}/{kind}", lambda make=make: (op := make())(drawn(2, op.size).to(op.dtype)))
        H = c.Hessian(problem)
        found.attempt(f"{name}/gradient", H.risk_and_gradient)
        found.attempt(f"{name}/quadratic", lambda H=H: H.quadratic(H.space.named(drawn(H.size).to(H.dtype))))
        found.attempt(f"{name}/eigenpairs", lambda H=H: pairs(c.eigenpairs(H, top_k=3, bottom_k=1, keep=5)))
        found.attempt(f"{name}/warm", lambda H=H: pairs(c.eigenpairs(H, start=c.eigenpairs(H, keep=5).remembered)))
        found.attempt(f"{name}/density", lambda H=H: vars(c.spectral_density(H, probes=3, steps=6)))
        J = c.ParameterJacobian(problem)
        found.attempt(f"{name}/J", lambda J=J: J.times(drawn(J.space.size)))
        found.attempt(f"{name}/JT", lambda J=J, problem=problem: J.transposed_times(drawn(problem.n, problem.outputs)))
        found.attempt(
            f"{name}/input JT",
            lambda problem=problem: c.InputJacobian(problem).transposed_times(drawn(problem.n, problem.outputs)),
        )
        m = {"tanh": 4, "relu32": 4, "gelu-squares": 4, "huber": 4, "callable": 4, "shared": 4, "encoder": 4}.get(
            name, 3
        )
        A = drawn(m, m) / 3
        found.attempt(f"{name}/feature change", lambda problem=problem, A=A: p.feature_change(problem, A))
        for law in ("rotations", "ball", "truncated_normal"):
            move = p.noise(0.1, 1.0, torch.Generator().manual_seed(0), law, 0.5)
            found.attempt(f"{name}/moved/{law}", lambda problem=problem, move=move: p.moved_risk(problem, move))
        there = p.Elsewhere(problem)
        found.attempt(f"{name}/elsewhere", lambda there=there: vars(there.outcomes(1.1 * there.here)))
    model, loss, data, options = made["gelu-squares"]()
    problem = fl.Problem(model, loss, data, **options)
    if found.wants("labels"):
        labels: Callable[[Any], Any] = lambda phi: torch.sin(phi[:, :3])  # noqa: E731
        move = p.noise(0.1, 1.0, torch.Generator().manual_seed(0))
        found.attempt("labels/change", lambda: p.label_change(problem, labels, move))
        found.attempt("labels/feature", lambda: p.feature_change(problem, drawn(4, 4) / 3, labels=labels))
        found.attempt("labels/terms", lambda: vars(p.label_change_terms(problem, labels, drawn(4, 4))))
        found.attempt("labels/matrix", lambda: p.smallest_feature_matrix(drawn(2, 4), drawn(2, 4) + 1))
        found.attempt(
            "labels/lanczos", lambda: pairs(c.lanczos(lambda v: v * torch.arange(1.0, 9), drawn(8).float(), top_k=2))
        )
    shapes = {"cube": lambda: d.Cube(3), "sphere": lambda: d.Sphere(3)}
    for name, make in shapes.items():
        if found.wants(name):
            found.attempt(f"{name}/sample", lambda make=make: make().sample(5, torch.Generator().manual_seed(0)))
            for rule in ("exact", "published", "tight"):
                found.attempt(f"{name}/{rule}", lambda make=make, rule=rule: make().covering_radius(50, 0.1, rule=rule))


def pairs(found: Any) -> dict[str, Any]:
    plain = dict(vars(found))
    plain.pop("remembered", None)
    return plain


@part
def of_reports(found: Found) -> None:
    import torch
    from torch import nn

    import flatlens as fl

    made = networks()
    for name in (
        "relu",
        "tanh",
        "gelu-squares",
        "images",
        "encoder",
        "heads",
        "shared",
        "regression32",
        "truths-residual",
    ):
        if not found.wants(name):
            continue
        model, loss, data, options = made[name]()
        lens = fl.Lens(fl.Problem(model, loss, data, **options))
        found.attempt(f"{name}/bounds", lambda lens=lens: fl.check_bounds(lens))
        found.attempt(
            f"{name}/invariance",
            lambda lens=lens: fl.check_invariance(lens, ["mls", "relative_flatness", "weight_norm", "hessian_trace"]),
        )
    model, loss, data, options = made["relu"]()
    lens = fl.Lens(fl.Problem(model, loss, data, **options))
    if found.wants("every bound"):
        for bound in fl.bounds.BOUNDS:
            found.attempt(f"every bound/{bound}", lambda bound=bound: fl.check_bounds(lens, bound))
        cube = fl.distributions.Cube(5)
        found.attempt("every bound/cube", lambda: fl.check_bounds(lens, distribution=cube))
        found.attempt("every bound/text", lambda: str(fl.check_bounds(lens)))
    if found.wants("compare"):
        lenses = {}
        for number in range(4):
            torch.manual_seed(number)
            net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            lenses[f"net{number}"] = fl.Lens(fl.Problem(net, loss, data, **options))
        found.attempt("compare/plain", lambda: fl.compare(lenses))
        found.attempt("compare/text", lambda: str(fl.compare(lenses, ["mls", "sharpness", "hessian_trace"])))
        found.attempt("compare/measures", lambda: fl.compare(lenses, ["mls", "sharpness", "average_sharpness"]))
    if found.wants("texts"):
        for name in ("tanh", "encoder"):
            other = fl.Lens(fl.Problem(*made[name]()[:3]))
            found.attempt(f"texts/{name}", lambda other=other: SECONDS.sub("# s", fl.measure(other, "pass").frame()
                          .drop(columns="seconds").to_string()))  # fmt: skip
            found.attempt(f"texts/{name}/shown", lambda other=other: repr(fl.measure(other, "pass")["mls"]))
    if found.wants("tracker"):
        for optimiser in ("SGD", "Adam"):
            model = made["tanh"]()[0]
            problem = fl.Problem(model, loss, data)
            steps = getattr(torch.optim, optimiser)(model.parameters(), lr=0.05)
            tracker = fl.Tracker(problem, ["sharpness", "mls", "preconditioned_sharpness", "critical_sharpness"], every=3,
                                 samples=6, live=False)  # fmt: skip
            for step in range(7):
                tracker.step(step, optimiser=steps)
                steps.zero_grad()
                nn.functional.cross_entropy(model(data[0]), data[1]).backward()
                steps.step()
            history = tracker.history
            found.add(f"tracker/{optimiser}", history[[one for one in history.columns if "seconds" not in one]])


STUDIES = {
    "smoothing": """
name: smoothing
data: {name: digits, train: 60}
model: MLP(widths=(8, 8))
training: {optimiser: SGD(lr=0.1, momentum=0.9), batch_size: 16, loss: cross_entropy, max_steps: 12}
set: {label_smoothing: [0, 0.1], seed: 0:2}
measures: [mls, relative_flatness, sharpness, hessian_trace(probes=2), generalisation_gap]
""",
    "images": """
name: images
data: {name: patches, train: 40}
model: LeNet5
training: {optimiser: Adam(lr=0.01), batch_size: 10, loss: cross_entropy, max_steps: 3}
set: {seed: 0:2, lr: [0.01, 0.02]}
measures: [mls, weight_norm, local_volume(top_k=2), generalisation_gap]
""",
}


@part
def of_studies(found: Found) -> None:
    from flatlens.experiments import Study

    if found.wants("keys"):
        for scale in ("laptop", "smoke"):
            study = Study.digits(scale)
            found.add(f"keys/{scale}", " ".join(one.key for one in study.networks()))
            found.add(f"keys/{scale}/as_json", study.as_json())
            changed = {
                "max_steps": 7, "batch_size": 5, "model.widths": (3, 3), "model.activation": "tanh", "loss": "cross_entropy",
                "label_smoothing": 0.1, "samples": 20, "dtype": "float32", "measures": ("mls", "local_volume(top_k=3)"),
                "bounds": ("mls_chain",), "moved": ("layerwise",), "momentum": 0.9, "weight_decay": 0.1, "train": 50,
            }  # fmt: skip
            for name, value in changed.items():
                found.attempt(
                    f"keys/{scale}/{name}",
                    lambda name=name, value=value, study=study: " ".join(
                        one.key for one in study.setting(name, value).networks()
                    ),
                )
    for name, text in STUDIES.items():
        if found.wants(name):
            Path(f"{name}.yaml").write_text(text)
            found.add(
                f"{name}/printed", printed(["study", f"{name}.yaml", "--out", name, "--workers", "1", "--json"])[0]
            )
            files(found, name)
            found.add(f"{name}/again", printed(["report", name]))
    if found.wants("digits"):
        from flatlens.experiments import run_study

        study = Study.digits("smoke").setting("max_steps", 6).over("seed", 0)
        result = run_study(study, "digits", workers=1)
        found.add("digits/networks", result.networks[[one for one in result.networks if "seconds" not in one]])
        files(found, "digits")


ON_REQUEST = ("papers",)  #: parts that take long


@part
def of_papers(found: Found) -> None:
    for number in range(1, 20):
        experiment = f"X{number}"
        if found.only in ("", experiment):
            words = ["reproduce", experiment, "--scale", "smoke", "--out", experiment, "--workers", "1"]
            found.add(f"{experiment}/printed", printed(words))
            files(found, experiment)


TIMED = re.compile(r'"(?:seconds|host|date|started|machine|when)[^"]*": [^,}\n]*')


def files(found: Found, folder: str) -> None:
    """The files of a study's folder: tables as tables, JSON as JSON, pages as text; of others their names."""
    import pandas as pd

    for file in sorted(Path(folder).rglob("*")):
        name = str(file)
        if file.is_dir() or file.name.startswith("checksums"):
            continue
        if file.suffix == ".csv":
            table = pd.read_csv(file)
            found.add(name, table[[one for one in table.columns if "seconds" not in str(one)]])
        elif file.suffix == ".json":
            found.add(name, untimed(json.loads(file.read_text())))
        elif file.suffix in (".md", ".txt", ".yaml", ".html"):
            found.add(name, SECONDS.sub("# s", TIMED.sub("", file.read_text())))
        else:
            found.add(name, "a file")


def untimed(plain: Any) -> Any:
    """JSON without what depends on the machine or the moment."""
    if isinstance(plain, dict):
        left_out = ("seconds", "host", "date", "started", "when", "machine", "digest", "sha256")
        return {key: untimed(value) for key, value in plain.items() if not any(one in str(key) for one in left_out)}
    return [untimed(one) for one in plain] if isinstance(plain, list) else plain


@part
def of_pages(found: Found) -> None:
    Path("net.py").write_text(USERS)
    if found.wants("measures.md"):
        found.add("measures.md", printed(["list", "measures", "--markdown"])[1])
    commands = {
        "measure": f"{NET} --page measure.html",
        "bounds": "bounds net.py:build --data net.py:samples --loss cross_entropy --page bounds.html",
        "compare": "compare net.py:build net.py:relu --data net.py:samples --loss cross_entropy --page compare.html",
        "invariance": "invariance net.py:relu --data net.py:samples --loss cross_entropy --page invariance.html",
    }
    for name, words in commands.items():
        if found.wants(name):
            found.add(f"{name}/status", printed(words.split())[0])
            page = Path(f"{name}.html")
            found.add(f"{name}/page", SECONDS.sub("# s", page.read_text()) if page.exists() else "no page")
    if found.wants("conventions"):
        tree = os.environ["PINS_TREE"]
        done = subprocess.run([sys.executable, "docs/conventions"], cwd=tree, capture_output=True, text=True)
        found.add("conventions.md", done.stdout)
        found.add("conventions/status", done.stderr[-1000:] if done.returncode else "done")


if __name__ == "__main__":
    sys.exit(main())
