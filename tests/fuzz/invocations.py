"""Command lines as they are typed: mostly sensible, often with a slip, in a folder of sound and of odd files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import nn

NET = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3
class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.fc = how, nn.Linear(4, 3)
        self.add_module("fc\\x1b[31m", nn.Linear(3, 3))
    def forward(self, x):
        if self.how == "raise" and len(x) < 40: raise ValueError("a sample\\n\\x1b[31mis odd")
        if self.how == "exit" and len(x) < 40: sys.exit(3)
        if self.how == "whole": return self.fc(x).long()
        if self.how == "random": return self.fc(x) + torch.randn(len(x), 3)
        if self.how == "nan": return self.fc(x) / 0
        if self.how == "tuple": return self.fc(x), x
        return getattr(self, "fc\\x1b[31m")(self.fc(x))
class Late(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        if i == 30: raise KeyError("lost")
        return x[i], y[i]
def build(): return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
def norm(): return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
def frozen(): return build().requires_grad_(False)
def empty(): return nn.Sequential()
def zero(): return nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3))
def meta(): return build().to("meta")
def half(): return build().half()
def raising(): return Odd("raise")
def exiting(): return Odd("exit")
def whole(): return Odd("whole")
def noisy(): return Odd("random")
def nans(): return Odd("nan")
def pair(): return Odd("tuple")
def escapes(): return Odd("")
def none(): return None
def needs(a): return a
def stops(): sys.exit("bye")
def samples(): return x, y
def few(): return x[:1], y[:1]
def no_samples(): return x[:0], y[:0]
def wide(): return torch.ones(10, 7), y[:10]
def strange(): return x * float("nan"), y
def far(): return x, y + 70
def late(): return Late()
def loader(): return DataLoader(TensorDataset(x, y), 16)
def torn(): return DataLoader(TensorDataset(x, y), 16, collate_fn=lambda items: 1 / 0)
def loss(f, y): return nn.functional.cross_entropy(f, y, reduction="none")
def mean_loss(f, y): return nn.functional.cross_entropy(f, y)
def no_loss(f, y): raise RuntimeError("never")
number = 5
"""

NETWORKS = """norm frozen empty zero meta half raising exiting whole noisy nans pair escapes none needs stops number
absent samples Odd"""
SAMPLES = "few no_samples wide strange far late loader torn build number absent stops"
MODELS = ["net.py:build"] * 12 + [f"net.py:{name}" for name in NETWORKS.split()] + [
    "net.py", "net.py:", "gone.py:build", "broken.py:build", "key", "torn", ".", "/", "", "timm:resnet18", "timm:",
    "hf:", "hf:./nowhere", "hf:key", "nonsense", "net.py:build:again", "\x1b[31mnet.py:build", "é" * 300, "x" * 5000,
]  # fmt: skip
DATA = ["net.py:samples"] * 12 + [f"net.py:{name}" for name in SAMPLES.split()] + [
    "digits", "clusters", "digits:nowhere", "mnist:.", "images", "texts", "bombs", "digit", "", "net.py", "study.yaml",
]  # fmt: skip
LOSSES = ["cross_entropy"] * 12 + [
    "mse", "half_squared_error", "cross", "", "net.py:loss", "net.py:mean_loss", "net.py:no_loss", "net.py:number",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "-1", "16", "1.5", "9" * 24, "-" + "9" * 24, "nan", "inf", "1e3", "", "x", "²", "9" * 5000]
WEIGHTS = [
    "good.pt", "good.safetensors", "int8.pt", "itself.pt", "cut.pt", "text.pt", "index", "shards", "gone.pt", "random",
    "key", "",
]  # fmt: skip
MEASURES = [
    "mls", "mls,nmls", "local_volume(top_k=3)", "local_volume(top_k=-1)", "local_volume(top_k='x')", "sharpness",
    "mls(", "relative_flatness", "nonsense", "", ",", "mls(top_k=3)", "()", "mls" * 2000, "(" * 500, "loss",
    "hessian_trace(probes=2)", "local_volume(top_k=9999999999999999999999999)", "\x1b[31m", "average_sharpness",
    "feature_robustness",
]  # fmt: skip
SETS = [
    "lr=abc", "lr=nan", "lr=-1", "seed=" + "9" * 24, "seed=0:0", "widths=5", "batch_size=0", "nonsense=1", "lr", "=",
    "optimiser=SGD", "data=5", "lr=" + "(" * 300, "train=5000", "activation=rely", "seed=1.5", "lr=\x1b[31m",
    "loss=mse(",
]  # fmt: skip
OPTIONS: dict[str, list[str]] = {
    "--test": DATA,
    "--weights": WEIGHTS,
    "--prefix": ["net.", "module.", "", "x" * 500],
    "--parameters": ["all", "trainable", "0.weight", "0.weight,2.bias", "nothing", "", ",", "5"],
    "--dtype": ["float32", "float64", "float16", ""],
    "--arithmetic": ["full", "tf32", "bfloat16", "half"],
    "--device": ["cpu", "meta", "cuda", "cuda:99", "cpu:3", "", "x", "mps", "cpu:" + "9" * 30],
    "--memory": ["1GiB", "100KiB", "4000", "0", "-1", "9" * 400, "1e400", "much", "", "nan", "1 GiB", "5XB"],
    "--samples": [*NUMBERS, "40", "41"],
    "--seed": NUMBERS,
    "--page": ["page.html", "nowhere/page.html", ".", "/proc/page.html", "", "net.py/page.html", "x" * 300],
}
OF: dict[str, dict[str, list[str]]] = {
    "measure": {
        "--measures": MEASURES,
        "--outputs": [*NUMBERS, "exact"],
        "--layers": ["0", "nowhere", "", "\x1b"],
        "--save": ["saved", "nowhere/saved", ".", "", "/dev/full", "x" * 300],
    },
    "bounds": {
        "--bounds": ["mls_chain", "nonsense", ""],
        "--assume": ["convex_support", "nonsense", ""],
        "--delta": ["0.1", *NUMBERS],
        "--distribution": ["cube", "sphere", "ball"],
    },
    "invariance": {"--measures": MEASURES[:8], "--transforms": ["layerwise", "permutation", "nonsense", ""]},
    "compare": {"--measures": MEASURES[:8], "--name": ["a,b", "a,a", "a", "", "\x1b,b"]},
}
FLAGS = ["--json", "--anyway", "--strict", "--help", "--traceback", "--jason"]
JUNK = [
    "--", "-", "--data", "--nothing", "x", "", "\x1b[31mred", "-9", "--seed=", "é漢\u202e", "'", "$(ls)", "--data=",
    "-h",
]  # fmt: skip


def folder(at: Path) -> None:
    """Fill a folder with what the command lines name."""
    from PIL import Image

    from flatlens.experiments.settings import Study

    (at / "net.py").write_text(NET, encoding="utf-8")
    (at / "broken.py").write_text("def build(:\n", encoding="utf-8")
    state = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).state_dict()
    torch.save(state, at / "good.pt")
    save_file(state, at / "good.safetensors")
    torch.save({name: (100 * t).to(torch.int8) for name, t in state.items()}, at / "int8.pt")
    itself: dict[str, object] = dict(state)
    itself["state_dict"] = itself
    torch.save(itself, at / "itself.pt")
    (at / "cut.pt").write_bytes((at / "good.pt").read_bytes()[:300])
    (at / "text.pt").write_text("words")
    for name, index in {"index": {"0.weight": 5}, "shards": {}}.items():
        (at / name).mkdir()
        (at / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    settings = Study.digits("smoke").networks()[0]
    for name in ("key", "torn"):
        (at / name).mkdir()
        (at / name / "config.json").write_text(json.dumps(settings.as_json()))
        save_file(settings.model.build().state_dict(), at / name / "weights.safetensors")
    (at / "torn" / "weights.safetensors").write_bytes(b"torn")
    for kind in ("images", "bombs", "texts"):
        for label in ("a", "b"):
            (at / kind / label).mkdir(parents=True)
            file = at / kind / label / ("0.txt" if kind == "texts" else "0.png")
            file.write_text("words") if kind == "texts" else Image.new("RGB", (3, 4)).save(file)
    (at / "bombs" / "b" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\x00" * 40)
    (at / "study.yaml").write_text("data: digits\nset: {lr: []}\n")
    (at / "other.yaml").write_text("[" * 3000)
    (at / "taken").mkdir()
    (at / "taken" / "thesis.tex").write_text("precious")


def invocations(seed: int) -> Iterator[list[str]]:
    """Yield command lines without end; the same seed gives the same ones."""
    chance = Random(seed)
    while True:
        yield _slipped(chance, _sensible(chance))


def _sensible(chance: Random) -> list[str]:
    kind = chance.choices(["one", "study", "rest"], [8, 2, 1])[0]
    if kind == "one":
        return _on_networks(chance)
    flags = [flag for flag in FLAGS if chance.random() < 0.1]
    if kind == "study":
        name = chance.choice(["digits", "digit", "study.yaml", "other.yaml", "gone.yaml", "clusters", ""])
        sets = [word for one in chance.choices(SETS, k=chance.randint(0, 2)) for word in ("--set", one)]
        running = chance.choice([[], ["--workers", chance.choice(NUMBERS)], ["--slurm", "jobs=x"], ["--pack", "0"]])
        measures = [] if chance.random() < 0.8 else ["--measures", chance.choice(MEASURES)]
        # into what is no folder for a study: what is sound in all else trains nothing
        out = chance.choice(["taken", "net.py", "/proc/nowhere", "net.py/inside"])
        return ["study", name, "--out", out, "--scale", "smoke", *sets, *running, *measures, *flags]
    rest = [
        ["list", chance.choice(["measures", "bounds", "transforms", "experiments", "colours", ""])],
        ["report", chance.choice(["taken", "key", "gone", "net.py", ""])],
        ["data", "list"],
        ["data", "fetch", chance.choice(["mnits", "", "\x1b"])],
        ["reproduce", chance.choice(["X99", "", "X4"]), "--out", chance.choice(["net.py", "net.py/in"])],
        [],
        ["--version"],
        [chance.choice(["measur", "studies", "\x1b[31m", "help"])],
    ]
    return chance.choice(rest) + flags


def _on_networks(chance: Random) -> list[str]:
    command = chance.choices(list(OF), [6, 2, 1, 2])[0]
    models = [chance.choice(MODELS) for _ in range(2 if command == "compare" else 1)]
    words = [command, *models, "--data", chance.choice(DATA), "--loss", chance.choice(LOSSES)]
    known = OPTIONS | OF[command]
    if command == "invariance" or chance.random() < 0.5:
        words += ["--measures", "mls"] if "--measures" in known else []
    for option in chance.sample(sorted(known), k=chance.randint(0, 3)):
        words += [option, chance.choice(known[option])]
    return words + [flag for flag in FLAGS if chance.random() < 0.12]


def _slipped(chance: Random, words: list[str]) -> list[str]:
    """Now and then a word lost, twice, in another place, or junk."""
    words = list(words)
    while chance.random() < 0.25:
        at = chance.randrange(len(words) + 1)
        slip = chance.choice(["lose", "twice", "junk", "letter"])
        if slip == "junk":
            words.insert(at, chance.choice(JUNK))
        elif at < len(words):
            word = words[at]
            cut = chance.randrange(len(word) + 1)
            words[at : at + 1] = {"lose": [], "twice": [word, word], "letter": [word[:cut] + word[cut + 1 :]]}[slip]
    return words
