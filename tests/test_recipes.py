"""The recipes of docs/recipes.md: each runs as printed, and is what a loop over single samples in float64 says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import flatlens as fl
from flatlens.curvature import Hessian

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"^### (.*?)\n.*?^```py\n(.*?)^```$", PAGE, re.M | re.S))

IDS = torch.tensor([[5, 3, 7, 2, 9], [4, 8, 6, 0, 0], [1, 2, 3, 4, 0]])
MASK = (IDS != 0).long()
LABELS = torch.tensor([0, 2, 1])
TAGS = torch.tensor([[0, 2, -100, 1, 3], [1, 1, -100, -100, -100], [3, -100, 0, 2, -100]])
TINY = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "vocab_size": 10, "max_position_embeddings": 8, "num_labels": 4,
}  # fmt: skip


class Encoding(dict[str, Any]):
    """What a tokenizer returns: a mapping."""


def tokenizer(texts: Any, **options: Any) -> Encoding:
    """Numbers in place of words: one text as lists without padding, several as tensors with padding."""
    if isinstance(texts, str):
        return Encoding(input_ids=[int(word) for word in texts.split()])
    return Encoding(input_ids=IDS.clone(), attention_mask=MASK.clone())


TEXTS = [" ".join(str(i) for i in row[row != 0].tolist()) for row in IDS]


def collate(rows: list[dict[str, Any]]) -> Encoding:
    """As DataCollatorWithPadding: `label` becomes `labels`."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return Encoding(input_ids=ids, attention_mask=(ids != 0).long(), labels=torch.tensor([r["label"] for r in rows]))


def of_transformers(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).double().eval()


def squeezed() -> nn.Module:
    return module_of(
        lambda net, x: net.net(x).squeeze(), net=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    )


def two_heads() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(net.trunk(x))
        return {"size": net.size(h), "kind": net.kind(h)}

    return module_of(forward, trunk=(3, 4), kind=(4, 3), size=(4, 2))


def mean_and_variance() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(net.trunk(x))
        return net.mean(h), F.softplus(net.spread(h))

    return module_of(forward, trunk=(3, 4), mean=(4, 2), spread=(4, 2))


def contrastive_loss(f: Tensor, labels: Tensor) -> Tensor:
    """Pairs of one label shall be near each other, others far apart: (batches, samples, N) to (batches,)."""
    z = F.normalize(f, dim=2)
    apart = (z[:, :, None] - z[:, None]).square().sum(3)
    same, n = labels[:, :, None] == labels[:, None], f.shape[1]
    pairs = torch.where(same, apart, (-apart).exp()) * (1 - torch.eye(n).to(f))
    return pairs.sum((1, 2)) / (n * (n - 1))


def packing() -> nn.Module:
    def forward(net: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return net.head(nn.utils.rnn.pad_packed_sequence(net.rnn(packed)[0], batch_first=True)[0])

    return module_of(forward, rnn=nn.GRU(3, 2, batch_first=True), head=(2, 3))


def bagging() -> nn.Module:
    return module_of(lambda net, bag: net.two(torch.tanh(net.one(bag)).mean(0)), one=(3, 4), two=(4, 2))


def graph() -> nn.Module:
    def forward(net: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.tanh(net.one(x))
        return net.two(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))

    return module_of(forward, one=(3, 4), two=(4, 2))


def variational() -> nn.ModuleDict:
    decode = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    return nn.ModuleDict({"encode": nn.Linear(3, 4), "decode": decode})


def negative_elbo(f: Tensor, x: Tensor) -> Tensor:
    rebuilt, mean, log_var = f.split([3, 2, 2], 1)
    divergence = (mean.square() + log_var.exp() - 1 - log_var).sum(1) / 2
    return (rebuilt - x).square().sum(1) + divergence


def attends() -> nn.Module:
    def forward(net: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
        scores = (net.query(x) @ x.mT).masked_fill(hidden, -torch.inf)
        return net.head(torch.tanh(scores.softmax(-1) @ x))

    return module_of(forward, query=(4, 4), head=(4, 3))


def detector() -> nn.Module:
    def forward(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        h = F.softplus(net.conv(x))
        return {"boxes": net.boxes(h).flatten(2).mT, "scores": net.scores(h).flatten(2).mT}

    return module_of(forward, conv=nn.Conv2d(1, 4, 3, stride=2), boxes=nn.Conv2d(4, 4, 1), scores=nn.Conv2d(4, 1, 1))


def of_one_image(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Each box against the anchor whose turn it is; every other anchor is background."""
    taken = torch.arange(len(boxes))
    background = torch.ones(len(anchors), dtype=torch.bool).index_fill(0, taken, False)
    near = F.smooth_l1_loss(anchors[taken, :4], boxes.to(anchors), reduction="sum")
    return near + F.softplus(-anchors[taken, 4]).sum() + F.softplus(anchors[background, 4]).sum()


def detection_loss(outputs: Tensor, targets: list[Tensor]) -> Tensor:
    return torch.stack([of_one_image(anchors, boxes) for anchors, boxes in zip(outputs, targets, strict=True)])


def of_tokens(f: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum of a sample's cross-entropies, and how many tokens count."""
    return F.cross_entropy(f, labels, reduction="sum"), int((labels != -100).sum())


def case(title: str) -> tuple[dict[str, Any], nn.Module, int, Callable[[int], tuple[Tensor, int]]]:
    """The names that a recipe begins with, its network, the samples, and each one's loss and mass from it alone."""
    torch.manual_seed(1)
    x, kinds, sizes = torch.randn(4, 3).double(), torch.tensor([0, 2, 1, 1]), torch.randn(4, 2).double()
    texts = {"tokenizer": tokenizer, "texts": TEXTS, "labels": LABELS.tolist(), "collate": collate}

    def ids(i: int) -> Tensor:
        return IDS[i : i + 1, MASK[i] == 1]  # no padding at all

    if title in ("A text classifier", "A list of dicts, of different lengths", "A loader of dicts"):
        net = of_transformers("BertForSequenceClassification", **TINY)
        rows = [{"input_ids": ids(i)[0].tolist(), "label": int(LABELS[i])} for i in range(3)]
        names = {**texts, "classifier": net, "rows": rows}
        return names, net, 3, lambda i: (F.cross_entropy(net(input_ids=ids(i)).logits, LABELS[i : i + 1]), 1)
    if title == "A causal language model":
        sizes_of = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 8}
        net = of_transformers("GPT2LMHeadModel", **sizes_of, bos_token_id=1, eos_token_id=1)
        shifted = lambda i: of_tokens(net(input_ids=ids(i)).logits[0, :-1], ids(i)[0, 1:])  # noqa: E731
        return {**texts, "causal": net}, net, 3, shifted
    if title == "A masked language model, or a tagger":
        net = of_transformers("BertForTokenClassification", **TINY)
        names = {**texts, "tagger": net, "tags": TAGS}
        return names, net, 3, lambda i: of_tokens(net(input_ids=ids(i)).logits[0], TAGS[i, MASK[i] == 1])
    if title == "An encoder-decoder":
        small = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 10}
        net = of_transformers("T5ForConditionalGeneration", **small, decoder_start_token_id=0)

        def decoded(i: int) -> tuple[Tensor, int]:
            before = torch.cat([torch.zeros(1).long(), TAGS[i, :-1]]).masked_fill_(torch.tensor(-100) == 0, 0)
            before = before.masked_fill(before == -100, 0)[None]
            return of_tokens(net(input_ids=ids(i), decoder_input_ids=before).logits[0], TAGS[i])

        return {**texts, "translator": net, "translations": TAGS}, net, 3, decoded
    if title.startswith("Segmentation"):
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
        images, classes = torch.randn(4, 2, 3, 5).double(), torch.randint(0, 3, (4, 3, 5))
        classes[0, 0, :4] = classes[2] = -100
        names = {"segmenter": net, "images": images, "classes": classes}
        return (
            names,
            net,
            4,
            lambda i: (
                F.cross_entropy(net(images[i : i + 1]), classes[i : i + 1], reduction="sum"),
                int((classes[i] != -100).sum()),
            ),
        )
    if title == "A list of batches":
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        batches = [(x[:3], kinds[:3]), (x[3:], kinds[3:])]
        return {"net": net, "batches": batches}, net, 4, lambda i: (F.cross_entropy(net(x[i]), kinds[i]), 1)
    if title.startswith("An autoencoder"):
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
        return {"autoencoder": net, "x": x}, net, 4, lambda i: (F.mse_loss(net(x[i]), x[i]), 1)
    if title.startswith("Sequences"):
        net, series, lengths = packing().double(), torch.randn(3, 4, 3).double(), torch.tensor([4, 1, 3])
        tags = torch.randint(0, 3, (3, 4))
        names = {"packed": net, "x": series, "lengths": lengths, "tags": tags}
        cut = lambda i: (series[i : i + 1, : lengths[i]], lengths[i : i + 1])  # noqa: E731
        return names, net, 3, lambda i: of_tokens(net(*cut(i))[0], tags[i, : lengths[i]])
    if title.startswith("Images, bags"):
        net, bags = bagging().double(), [torch.randn(k, 3).double() for k in (2, 5, 2, 1)]
        pairs = [(bag, i % 2) for i, bag in enumerate(bags)]
        return (
            {"bag_net": net, "pairs": pairs},
            net,
            4,
            lambda i: (F.cross_entropy(net(bags[i]), torch.tensor(i % 2)), 1),
        )
    if title.startswith("A graph"):
        net, edges = graph().double(), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 1]])
        classes, train = torch.tensor([0, 1, 1, 0]), torch.tensor([True, False, True, True])
        names = {"gnn": net, "nodes": x, "edges": edges, "classes": classes, "train": train}
        return names, net, 1, lambda _: of_tokens(net(x, edges)[train], classes[train])
    if title.startswith("A variational"):
        net = variational().double()
        noise = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))

        def elbo(i: int) -> tuple[Tensor, int]:
            mean, log_var = net.encode(x[i]).chunk(2)
            rebuilt = net.decode(mean + noise[i].double() * torch.exp(log_var / 2))
            normal = torch.distributions.Normal(torch.zeros(2).double(), torch.ones(2).double())
            divergence = torch.distributions.kl_divergence(
                torch.distributions.Normal(mean, torch.exp(log_var / 2)), normal
            )
            return (rebuilt - x[i]).square().sum() + divergence.sum(), 1

        return {"vae": net, "x": x, "negative_elbo": negative_elbo, "noise": noise}, net, 4, elbo
    if title.startswith("A regression"):
        net, y = squeezed().double(), torch.randn(4).double()
        return {"regression": net, "x": x, "y": y}, net, 4, lambda i: (F.huber_loss(net(x[i]), y[i]), 1)
    if title.startswith("A mean and"):
        net, y = mean_and_variance().double(), torch.randn(4, 2).double()

        def likely(i: int) -> tuple[Tensor, int]:
            mean, variance = net(x[i : i + 1])
            return 0.5 * (variance.log() + (mean - y[i]).square() / variance).mean(), 1

        return {"mean_and_variance": net, "x": x, "y": y}, net, 4, likely
    if title.startswith("Missing targets"):
        net, y = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(4, 2).double()
        y[0] = y[1, 1] = y[3, 0] = torch.nan
        return {"several": net, "x": x, "y": y}, net, 4, lambda i: ((net(x[i]) - y[i])[~y[i].isnan()].square().sum(), 1)
    if title.startswith("A contrastive"):
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        x, labels = torch.randn(12, 3).double(), torch.randint(0, 2, (12,))

        def of_batch(i: int) -> tuple[Tensor, int]:
            z, kinds = F.normalize(net(x[4 * i : 4 * i + 4]), dim=1), labels[4 * i : 4 * i + 4]
            pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
            near = [(z[a] - z[b]).square().sum() for a, b in pairs if kinds[a] == kinds[b]]
            far = [torch.exp(-(z[a] - z[b]).square().sum()) for a, b in pairs if kinds[a] != kinds[b]]
            return torch.stack(near + far).sum() / 12, 1

        return {"encoder": net, "x": x, "labels": labels, "contrastive_loss": contrastive_loss}, net, 3, of_batch
    if title == "Several heads":
        net = two_heads().double()

        def added(i: int) -> tuple[Tensor, int]:
            out = net(x[i : i + 1])
            return F.cross_entropy(out["kind"], kinds[i : i + 1]) + F.mse_loss(out["size"], sizes[i : i + 1]), 1

        return {"two_heads": net, "x": x, "kinds": kinds, "sizes": sizes}, net, 4, added
    if title.startswith("Answers"):
        net = of_transformers("BertForQuestionAnswering", **{**TINY, "num_labels": 2})
        starts, ends = torch.tensor([1, 0, 2]), torch.tensor([3, 2, 3])
        positions = {"start_positions": starts, "end_positions": ends}

        def ended(i: int) -> tuple[Tensor, int]:
            out = net(input_ids=IDS[i : i + 1], attention_mask=MASK[i : i + 1])
            first = F.cross_entropy(out.start_logits, starts[i : i + 1])
            return first + F.cross_entropy(out.end_logits, ends[i : i + 1]), 1

        return {"reader": net, "batch": {"input_ids": IDS, "attention_mask": MASK, **positions}}, net, 3, ended
    if title.startswith("Detection"):
        net, images = detector().double(), torch.randn(5, 1, 7, 7).double()
        boxes = [torch.rand(k, 4).double() for k in (2, 0, 1, 4, 5)]  # 4 boxes, and 5: as many as samples

        def batches(chosen: list[int]) -> tuple[Tensor, list[Tensor]]:
            return images[chosen], [boxes[i] for i in chosen]

        loader: Any = DataLoader(range(5), batch_size=5, collate_fn=batches)  # type: ignore[arg-type]
        names = {"detector": net, "loader": loader, "detection_loss": detection_loss}

        def of_image(i: int) -> tuple[Tensor, int]:
            found = net(images[i : i + 1])
            return of_one_image(torch.cat([found["boxes"], found["scores"]], 2)[0], boxes[i]), 1

        return names, net, 5, of_image
    if title.startswith("Attention"):
        net, tokens = attends().double(), torch.randn(4, 5, 4).double()
        padding = torch.arange(5) >= torch.tensor([5, 3, 1, 4])[:, None]
        labels = torch.randint(0, 3, (4, 5)).masked_fill(padding, -100)
        names = {"attention": net, "tokens": tokens, "padding": padding, "labels": labels}

        def unpadded(i: int) -> tuple[Tensor, int]:
            kept = tokens[i : i + 1, ~padding[i]]  # no padding at all
            nothing = torch.zeros(1, kept.shape[1], kept.shape[1], dtype=torch.bool)
            return of_tokens(net(kept, nothing)[0], labels[i, ~padding[i]])

        return names, net, 4, unpadded
    assert title.startswith("A physics-informed")
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    points = torch.linspace(0, 1, 4).double()[:, None]

    def left(i: int) -> tuple[Tensor, int]:
        h = torch.tanh(net[0](points[i]))  # u' with pen and paper
        slope = net[2].weight @ ((1 - h.square()) * net[0].weight[:, 0])
        return (slope + net[2](h)).square().sum(), 1

    return {"solution": net, "points": points}, net, 4, left


def made(title: str, names: dict[str, Any]) -> fl.Problem:
    space = {"fl": fl, "torch": torch, "F": F, "DataLoader": DataLoader, **names}
    exec(compile(RECIPES[title], title, "exec"), space)
    problem = space["problem"]
    assert isinstance(problem, fl.Problem)
    return problem


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_what_a_loop_over_samples_says(title: str) -> None:
    names, _, n, alone = case(title)
    problem = made(title, names)
    lens = fl.Lens(problem, outputs="exact")
    with sdpa_kernel(SDPBackend.MATH):  # torch differentiates the others once
        each = [alone(i) for i in range(n)]
    mass = sum(m for _, m in each)
    assert (problem.n, problem.mass) == (n, mass)
    truth = torch.stack([value.detach() for value, _ in each]) * n / mass
    assert torch.allclose(lens.outcomes("data").losses, truth, rtol=1e-9, atol=1e-12)

    operator = Hessian(problem)
    own = dict(problem.model.named_parameters())  # the operator's are those of a copy
    parameters = [own[name] for name in operator.space.parameters]
    v = torch.randn(operator.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    risk = sum(value for value, _ in each) / mass
    slope = torch.autograd.grad(risk, parameters, create_graph=True, materialize_grads=True)
    along = (torch.cat([g.flatten() for g in slope]) * v).sum()
    Hv = torch.cat([g.flatten() for g in torch.autograd.grad(along, parameters, materialize_grads=True)])
    assert torch.allclose(operator(v), Hv, rtol=1e-7, atol=1e-9 * float(Hv.abs().max()))


@pytest.mark.parametrize("title", RECIPES)
def test_the_pass_agrees_with_the_products(title: str) -> None:
    """The Gauss-Newton trace from the pass is the sum of the matrix's diagonal, in directions drawn at random."""
    names, *_ = case(title)
    problem = made(title, names)
    report = fl.measure(fl.Lens(problem, outputs="exact"), "pass")
    operator = fl.curvature.GaussNewton(problem)
    signs = torch.randint(0, 2, (64, operator.size), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    forms = (signs * operator(signs)).sum(1)
    assert abs(float(forms.mean()) - report["ggn_trace"].value) < 5 * float(forms.std()) / 8 + 1e-12


def test_a_recipe_has_five_lines() -> None:
    assert max(sum(map(bool, block.splitlines())) for block in RECIPES.values()) <= 5
