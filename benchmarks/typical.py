"""How long `fl.measure` takes on networks that people know: `python -m benchmarks.typical [CASE ...]`.

Each case in a process of its own, on one thread, with random weights: what `fl.cost` expects, and for those marked
as quick what it then takes. Times are processor seconds: other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks import machine
from benchmarks.announced import Tokens, noise
from benchmarks.resnet import resnet18
from benchmarks.timed import mlp
from flatlens.models import LeNet5, ResNet18

SAMPLES = 1000


@dataclass(frozen=True)
class Case:
    """A network and its data; `quick` ones are measured, too."""

    what: str
    build: Callable[[], nn.Module]
    samples: Callable[[], Any]
    quick: bool = False


def images(rows: int, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """Return noise of so many rows and columns."""
    return noise(SAMPLES, 3, rows, rows, classes=classes)


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1 with a skip connection, as in ResNet-50."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        same = stride == 1 and into == 4 * width
        skip = nn.Sequential(nn.Conv2d(into, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.skip = nn.Identity() if same else skip
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches."""
        return self.act(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    """Return ResNet-50 with initial weights."""
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    into = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(into, width, stride if number == 0 else 1))
            into = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000)).eval()


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    """Return a network of transformers by the name of its class, with random weights."""
    import transformers

    kind = getattr(transformers, name)
    network: nn.Module = kind(kind.config_class(**sizes))
    return network.eval()


def tokens(words: int, length: int, language_model: bool = False) -> dict[str, Tensor]:
    """Return noise of so many words, with labels."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (SAMPLES, length), generator=drawn)
    labels = ids if language_model else torch.randint(2, (SAMPLES,), generator=drawn)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


CASES = {
    "mlp": Case(
        "MLP 784-256-256-10", lambda: mlp(784, 256, 256, 10, seed=0), lambda: noise(SAMPLES, 784, classes=10), True
    ),
    "lenet": Case("LeNet-5, 3 x 32 x 32", lambda: LeNet5().build(), lambda: images(32, 10), True),
    "tokens": Case("transformer of two blocks, 32 tokens", Tokens, lambda: noise(SAMPLES, 32, 16, classes=10), True),
    "resnet18_small": Case("ResNet-18, 3 x 32 x 32", lambda: ResNet18().build(), lambda: images(32, 10), True),
    "resnet18": Case("ResNet-18, 3 x 224 x 224", resnet18, lambda: images(224)),
    "resnet50": Case("ResNet-50, 3 x 224 x 224", resnet50, lambda: images(224)),
    "vit": Case(
        "ViT-B/16, 3 x 224 x 224",
        lambda: of_transformers("ViTForImageClassification", num_labels=1000),
        lambda: images(224),
    ),
    "bert": Case(
        "BERT (base), 2 classes, 128 tokens",
        lambda: of_transformers("BertForSequenceClassification", num_labels=2),
        lambda: tokens(30_522, 128),
    ),
    "gpt2": Case(
        "GPT-2 (124 million), next of 128 tokens",
        lambda: of_transformers("GPT2LMHeadModel"),
        lambda: tokens(50_257, 128, language_model=True),
    ),
}


def measured(name: str) -> dict[str, Any]:
    """Return the expected time, memory and products of one case, and if it is quick the time that it takes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[name]
    network, samples = case.build(), case.samples()
    wall, own = time.monotonic(), time.process_time()
    expected = fl.cost(network, "cross_entropy", samples)
    wall, own = time.monotonic() - wall, time.process_time() - own
    share = own / wall  # of a processor
    row = {
        "case": case.what,
        "answer": expected.answer,
        "parameters": sum(p.numel() for p in network.parameters()),
        "expected_seconds": round(expected.seconds * share, 1),
        "trial_seconds": round(own, 1),
        "memory_mib": round(expected.memory / 2**20),
        "products": expected.products,
        "share_of_a_processor": round(share, 2),
        "largest": expected.frame().head(3).to_dict("records"),
    }
    if case.quick:
        start = time.process_time()
        lens = fl.Lens(fl.Problem(network, "cross_entropy", samples))
        fl.measure(lens, anyway=True, progress=False)
        took = time.process_time() - start
        row |= {"taken_seconds": round(took, 1), "ratio": round(expected.seconds * share / took, 2)}
        row |= {"taken_products": lens.products}
    return row


if __name__ == "__main__":
    machine.measure_cases("typical", CASES, __doc__)
