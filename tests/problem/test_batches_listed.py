"""Lists with one item for each sample, and lists of inputs, which look alike in some batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import flatlens as fl
from flatlens.problem.batches import form_shown, is_samples, plain

Net = nn.Module


def bag_of_rows() -> nn.Module:
    """One sample's outputs from its rows, and from what links them."""

    def forward(net: nn.Module, x: Tensor, edges: Tensor | None = None) -> Tensor:
        h = torch.tanh(net.one(x))
        if edges is not None:
            h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return net.two(h).mean(0)

    return module_of(forward, one=(3, 4), two=(4, 2))


def as_tensor(x: Tensor, edges: Tensor) -> Any:
    return x


def as_tuple(x: Tensor, edges: Tensor) -> Any:
    return x, edges


def as_dict(x: Tensor, edges: Tensor) -> Any:
    return {"x": x, "edges": edges}


def of_item(net: Net, item: Any) -> Tensor:
    if isinstance(item, dict):
        return net(**item)
    return net(*item) if isinstance(item, tuple) else net(item)


COLLATES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inputs first": (lambda rows: ([a for a, _ in rows], torch.tensor([b for _, b in rows])), lambda b: b),
    "labels first": (lambda rows: (torch.tensor([b for _, b in rows]), [a for a, _ in rows]), lambda b: b[::-1]),
    "a list of both": (lambda rows: [[a for a, _ in rows], torch.tensor([b for _, b in rows])], lambda b: b),
    "tuples, as zip makes them": (lambda rows: tuple(zip(*rows, strict=True)), lambda b: (b[0], torch.tensor(b[1]))),
    "a list of tuples": (lambda rows: [*zip(*rows, strict=True)], lambda b: (b[0], torch.tensor(b[1]))),
    "labels in a list, too": (
        lambda rows: ([a for a, _ in rows], [torch.tensor([b]) for _, b in rows]), lambda b: (b[0], torch.cat([*b[1]])),
    ),
    "a dict": (
        lambda rows: {"bags": [a for a, _ in rows], "classes": torch.tensor([b for _, b in rows])},
        lambda b: (b["bags"], b["classes"]),
    ),
    "the samples as they are": (lambda rows: rows, lambda b: ([a for a, _ in b], torch.tensor([c for _, c in b]))),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("item", [as_tensor, as_tuple, as_dict])
@pytest.mark.parametrize("collate", COLLATES)
def test_samples_of_their_own_sizes_are_what_a_loop_says(collate: str, item: Any, seed: int) -> None:
    draw = random.Random(f"{collate} {item.__name__} {seed}")
    torch.manual_seed(draw.randrange(10**6))
    n, alike = draw.choice([1, 2, 3, 5, 7]), draw.random() < 0.2
    sizes = [2 if alike else draw.choice([1, 2, 2, 3, 5]) for _ in range(n)]  # as many rows as samples, for some
    graphs = [(torch.randn(k, 3).double(), torch.randint(k, (2, draw.randint(1, 4)))) for k in sizes]
    samples = [(item(*graph), int(torch.randint(2, ()))) for graph in graphs]
    net, (collated, both) = bag_of_rows().double(), COLLATES[collate]

    def forward(model: Net, batch: Any) -> tuple[Tensor, Tensor]:
        items, labels = both(batch)
        assert len(items) == len(labels)
        return torch.stack([of_item(model, one) for one in items]), labels

    loader: Any = DataLoader(samples, batch_size=draw.choice([1, 2, 3, 4]), collate_fn=collated)  # type: ignore[arg-type]
    problem = fl.Problem(net, "cross_entropy", loader, forward=forward, memory=draw.choice(["1GiB", "1"]))
    report = fl.measure(fl.Lens(problem), ["loss", "hessian_trace(exact=True)", "ggn_trace", "mls", "feature_norm"])
    weights = list(net.parameters())
    risk = F.cross_entropy(torch.stack([of_item(net, a) for a, _ in samples]), torch.tensor([b for _, b in samples]))
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(risk, weights, create_graph=True)])
    rows = [torch.autograd.grad(g, weights, retain_graph=True, materialize_grads=True) for g in slope]
    trace = sum(torch.cat([g.flatten() for g in row])[i] for i, row in enumerate(rows))
    assert problem.n == n
    assert report["mls"].kind == "undefined"
    assert "the inputs are lists with one item per sample" in report["mls"].note
    assert "no call of a linear layer" not in report["feature_norm"].note  # each sample has its own
    assert report["loss"].value == pytest.approx(risk.item(), rel=1e-12)
    assert report["hessian_trace(exact=True)"].value == pytest.approx(float(trace), rel=1e-8, abs=1e-12)


def two_inputs(heads: int) -> nn.Module:
    """A network of two inputs, with one output head or two."""

    def forward(net: nn.Module, a: Tensor, b: Tensor) -> Any:
        found = tuple(head(torch.cat([a, b], 1)) for head in net.heads)
        return found if len(found) > 1 else found[0]

    return module_of(forward, heads=nn.ModuleList(nn.Linear(5, 2) for _ in range(heads)))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("n", "size"), [(2, 2), (4, 2), (5, 2), (5, 3), (1, 1), (6, 6)])
def test_lists_of_inputs_stay_inputs(n: int, size: int, heads: int) -> None:
    """Torch's collate makes a list of several inputs, and of several targets."""
    a, b, y = torch.randn(n, 3), torch.randn(n, 2), torch.randint(2, (heads, n))
    samples = [((a[i], b[i]), tuple(y[:, i]) if heads > 1 else y[0, i]) for i in range(n)]
    net, targets = two_inputs(heads), tuple(y) if heads > 1 else y[0]
    truth = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", ((a, b), targets))), ["loss", "mls"])
    for collate in (None, torch.utils.data.default_collate):
        loader: Any = DataLoader(samples, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]
        report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", loader)), ["loss", "mls"])
        assert report["mls"].value == pytest.approx(truth["mls"].value, rel=1e-5)
        assert report["loss"].value == pytest.approx(truth["loss"].value, rel=1e-5)


def test_which_batches_leave_no_doubt() -> None:
    two, three, y = torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 1])
    assert form_shown(([two, three], y)) is True
    assert form_shown(([two, two], y)) is None
    assert form_shown(([three, three], torch.arange(3))) is False
    assert form_shown((y, (two, two.long()))) is False  # inputs of different kinds
    assert form_shown(([two, three], [two, two])) is True
    assert form_shown(([two, two], [two, two])) is None
    assert plain((y, [two, two]))[1] == (two, two)
    assert plain((y, [two, two]), lambda _: True)[1] == [two, two]
    assert is_samples([(two, 1), (three, 0)])
    assert is_samples([{"a": two}, {"a": three}])
    assert not is_samples([{"a": two}, {"b": three}])
    assert not is_samples([two, y])
    assert not is_samples([(two, three), (0, 1)])
    assert not is_samples([(two, three), (two, two)])


def test_a_list_of_tensors_in_a_dict_is_not_padded() -> None:
    """The mean over a bag's rows would count the padding."""
    bags = [torch.randn(k, 3).double() for k in (2, 5, 3)]
    loader: Any = DataLoader(
        range(3),  # type: ignore[arg-type]
        batch_size=3,
        collate_fn=lambda chosen: {"bags": [bags[i] for i in chosen], "labels": torch.tensor([0, 1, 1])},
    )
    net = bag_of_rows().double()

    truth = F.cross_entropy(torch.stack([net(bag) for bag in bags]), torch.tensor([0, 1, 1]))
    network = module_of(lambda net, bags: torch.stack([net.net(bag) for bag in bags]), net=net)
    found = fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", loader)), "loss")["loss"]
    assert found.value == pytest.approx(truth.item(), rel=1e-12)


def test_nan_in_a_list_names_the_sample() -> None:
    bags = [torch.randn(k, 3) for k in (2, 5, 3)]
    bags[1][3, 1] = float("nan")
    loader: Any = DataLoader([(bags, torch.tensor([0, 1, 1]))], batch_size=None, collate_fn=lambda one: one)  # type: ignore[arg-type]
    with pytest.raises(fl.errors.BadData, match="1 of 3 samples contain NaN or inf, the first at index 1"):
        fl.Problem(
            bag_of_rows(), "cross_entropy", loader, forward=lambda m, b: (torch.stack([m(a) for a in b[0]]), b[1])
        )


def every(net: Net, bags: list[Tensor]) -> Tensor:
    return torch.stack([net(bag) for bag in bags])


STRUCTURES: dict[str, tuple[Callable[..., Any], Callable[[Net, Any], tuple[Tensor, Tensor]]]] = {
    "two lists": (lambda a, b, c, y: (a, b, y), lambda m, z: (every(m, z[0]) + 2 * every(m, z[1]), z[2])),
    "list and tensor": (lambda a, b, c, y: ((a, c), y), lambda m, z: (every(m, z[0][0]) * z[0][1], z[1])),
    "tensor first": (lambda a, b, c, y: (c, a, y), lambda m, z: (every(m, z[1]) * z[0], z[2])),
    "nested": (
        lambda a, b, c, y: ((a, (b, c)), y),
        lambda m, z: (every(m, z[0][0]) + every(m, z[0][1][0]) * z[0][1][1], z[1]),
    ),
    "names": (
        lambda a, b, c, y: (a, [f"{i}" for i in y], y),
        lambda m, z: (every(m, z[0]) * len(z[1]) / len(z[2]), z[2]),
    ),
    "targets in dicts": (
        lambda a, b, c, y: (a, [{"y": one, "boxes": box} for one, box in zip(y, b, strict=True)]),
        lambda m, z: (every(m, z[0]), torch.stack([one["y"] for one in z[1]])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_lists_anywhere_in_a_batch(structure: str, seed: int) -> None:
    draw = random.Random(f"{structure} {seed}")
    torch.manual_seed(draw.randrange(10**6))
    n, (made, forward), net = draw.choice([1, 2, 3, 5, 6]), STRUCTURES[structure], bag_of_rows().double()
    a, b = ([torch.randn(draw.choice([1, 2, 2, 3]), 3).double() for _ in range(n)] for _ in range(2))
    c, y = torch.randn(n, 2).double(), torch.randint(2, (n,))

    def collate(chosen: list[int]) -> Any:
        return made([a[i] for i in chosen], [b[i] for i in chosen], c[chosen], y[chosen])

    loader: Any = DataLoader(range(n), batch_size=draw.choice([1, 2, 4]), collate_fn=collate)  # type: ignore[arg-type]
    lens = fl.Lens(fl.Problem(net, "cross_entropy", loader, forward=forward))
    risk = F.cross_entropy(*forward(net, collate(list(range(n)))))
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(risk, list(net.parameters()))])
    assert lens.risk_and_gradient[0] == pytest.approx(risk.item(), rel=1e-12)
    assert torch.allclose(torch.cat([lens.gradient[name].flatten() for name, _ in net.named_parameters()]), slope)
