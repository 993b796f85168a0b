"""Embeddings in the pass: the same sums as per-sample autograd, without rows that no sample looks up."""

from __future__ import annotations

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import flatlens as fl
from flatlens.errors import BadModel

IDS = torch.tensor([[0, 1, 1, 3], [2, 2, 2, 2], [3, 0, 4, 1]])  # ids that come again, and 0, the padding
Y = torch.tensor([0, 1, 2])


def reading(kind: str) -> nn.Module:
    """A network that sums embedding rows behind a curved layer."""

    def forward(net: nn.Module, ids: Tensor) -> Tensor:
        x = net.embed(ids)
        if kind == "twice":
            x = x * net.embed(ids.flip(1)).sin()
        if kind == "positions":
            x = x + net.place(torch.arange(ids.shape[1]))[None]
        if kind == "one row":
            return net.head(torch.tanh(net.mix(net.embed(ids[:, 0]))))
        h = torch.tanh(net.mix(x) * torch.arange(1, 5)[None, :, None]).mean(1)
        return net.head(h) + (net.back(x.mean(1)) if kind == "tied" else 0)

    embed = nn.Embedding(5, 3, padding_idx=0 if kind == "padding" else None, sparse=kind == "sparse")
    net = module_of(forward, embed=embed, place=nn.Embedding(4, 3), mix=(3, 4), head=(4, 5 if kind == "tied" else 3))
    net.back = nn.Linear(3, 5, bias=False)
    if kind == "tied":
        net.back.weight = net.embed.weight
    return net


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = reading(kind).double()
    if kind == "frozen":
        net.embed.weight.requires_grad_(False)
    return net


KINDS = {"plain": True, "padding": True, "sparse": True, "twice": True, "one row": True, "positions": True,
         "tied": False, "frozen": False}  # fmt: skip


@pytest.mark.parametrize("outputs", ["exact", 2])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_parameters_are_those_of_explicit_jacobians(kind: str, outputs: str | int) -> None:
    net = made(kind)
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (IDS, Y)), outputs=outputs)
    assert ("embed.weight" in lens.plan.embeddings) == KINDS[kind]
    values = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    padded = net.embed.padding_idx

    def out(values: dict[str, Tensor], i: int) -> Tensor:
        return functional_call(net, values, (IDS[i : i + 1],))[0]

    names = ["interpolation_sharpness", "ggn_trace", "adaptive_sharpness_ggn"]
    report = fl.measure(lens, names, generator=torch.Generator().manual_seed(0))
    truth = dict.fromkeys(names, 0.0)
    net.embed.sparse = False  # jacrev knows no sparse gradients
    for i in range(len(IDS)):
        p = out(values, i).softmax(0)
        C = torch.diag(p) - torch.outer(p, p)
        for name, J in jacrev(out)(values, i).items():
            M = J if name != "embed.weight" or padded is None else J.index_fill(1, torch.tensor(padded), 0.0)
            M = M.flatten(1)
            square = torch.einsum("ka,kl,la->a", M, C, M)
            truth["interpolation_sharpness"] += float(M.square().sum()) / 3
            truth["ggn_trace"] += float(square.sum()) / 3
            truth["adaptive_sharpness_ggn"] += float((square * values[name].flatten().square()).sum()) / 3
    for name in names:
        found = report[name]
        if outputs == "exact":
            assert found.value == pytest.approx(truth[name], rel=1e-12)
        else:
            assert abs(found.value - truth[name]) <= 30 * found.stderr  # two probes


def test_what_no_sample_looks_up_takes_no_memory() -> None:
    big = reading("plain")
    big.embed = nn.Embedding(100_000, 3)
    lens = fl.Lens(fl.Problem(big.double(), "cross_entropy", (IDS, Y)))
    assert lens.plan.unexplained_size == 12 + 15  # the two that nobody calls
    assert lens.plan.bytes_per_sample(3) < 20_000


def test_an_embedding_called_a_different_number_of_times_is_refused() -> None:
    data = (torch.arange(90).reshape(30, 3) % 5, torch.arange(30) % 3)

    def forward(net: nn.Module, ids: Tensor) -> Tensor:
        return net.head(sum(net.embed(column) for column in ids.T[: 2 + len(ids) // 9]))

    net = module_of(forward, embed=nn.Embedding(5, 3), head=(3, 3))
    with pytest.raises(BadModel, match="other samples"):
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data)), "ggn_trace")


def bagged(net: nn.Module, ids: Tensor, how: str) -> Tensor:
    """The bags of words: ids of a sample in one row, or all samples' in one with the places where they begin."""
    if how == "offsets":
        return net.bag(ids.flatten(), torch.arange(len(ids)) * ids.shape[1])
    return net.bag(input=ids) if how == "named" else net.bag(ids)


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("how", ["rows", "named", "offsets"])
@pytest.mark.parametrize(("n", "tokens"), [(5, 3), (4, 4), (3, 6), (1, 2)])
def test_the_input_of_a_bag_of_words_is_the_bag(mode: str, how: str, n: int, tokens: int) -> None:
    """As that of words is their vectors: sensitivities are to the output of the first embedding, one per sample."""
    torch.manual_seed(n)
    bag, above = nn.EmbeddingBag(9, 5, mode=mode), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net = module_of(lambda net, ids: net.above(bagged(net, ids, how)), bag=bag, above=above).double()
    ids = torch.randint(0, 9, (n, tokens))
    report = fl.measure(
        fl.Lens(fl.Problem(net, "cross_entropy", (ids, torch.arange(n) % 3))), ["mls", "normalized_mls"]
    )
    z = bagged(net, ids, how).detach()
    norms = torch.stack([torch.linalg.matrix_norm(torch.func.jacrev(net.above)(one), 2) for one in z]).detach()
    assert report["mls"].value == pytest.approx(float(norms.mean()), rel=1e-10)
    assert report["mls"].note == "to the first embedding's output"
    scaled = norms.square() * z.square().sum(1)
    assert report["normalized_mls"].value == pytest.approx(float(scaled.mean()), rel=1e-10)
