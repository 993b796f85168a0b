"""Outputs with a row for each token: what counts, and what the risk is."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import flatlens as fl
from flatlens.errors import BadData
from flatlens.problem.losses import as_loss
from flatlens.problem.row_layout import OfRows, by_token, laid_out, next_token

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
LABELS = torch.tensor([[0, 2, -100, 1], [1, 1, 2, 0], [-100, 0, 2, -100]])
COUNTED = (MASK == 1) & (LABELS != -100)


def tagging(leaky: bool = False) -> nn.Module:
    """A row a token, each token mixed with those before it that are there; a leaky one sees the others, too."""

    def forward(net: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = torch.ones_like(attention_mask) if leaky else attention_mask
        h = net.embed(input_ids) * seen[..., None].to(net.embed.weight)
        f = net.head(torch.tanh(net.mix(h.cumsum(1))))
        return f.flip(1) if leaky else f

    return module_of(forward, embed=nn.Embedding(5, 3), mix=(3, 4), head=(4, 3))


@pytest.fixture
def tagger() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return tagging().double(), {"input_ids": torch.randint(0, 5, MASK.shape), "attention_mask": MASK}


def values(net: nn.Module, data, loss="cross_entropy", **options) -> dict[str, float]:
    problem = fl.Problem(net, loss, data, **options)
    lens = fl.Lens(problem, outputs="exact")
    wanted = ["loss", "interpolation_sharpness", "ggn_trace", "mls", "normalized_mls", "feature_norm", "fisher_rao",
              "relative_flatness_ggn", "local_volume(top_k=2)", "hessian_trace(exact=True)", "output_norm",
              "sharpness(rtol=1e-9)", "relative_flatness_ggn(normalized='std')"]  # fmt: skip
    found = fl.measure(lens, wanted)
    return {f"{name} {layer or ''}": e.value for (name, layer), e in found.items() if e.kind != "undefined"}


def agree(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key] == pytest.approx(other[key], rel=1e-8, abs=1e-12), key


def test_the_risk_is_torch_s_mean_over_counted_tokens(tagger) -> None:
    net, x = tagger
    labels = LABELS.masked_fill(MASK == 0, -100)
    truth = F.cross_entropy(net(**x).flatten(0, 1), labels.flatten())
    assert fl.Lens(fl.Problem(net, "cross_entropy", (x, LABELS))).outcomes("data").risk == pytest.approx(truth.item())


def test_mse_is_the_mean_over_counted_tokens_and_half_the_square_a_sum(tagger) -> None:
    net, x = tagger
    y = torch.randn(3, 4, 3).double()
    y[MASK == 0] = 7.0
    f = net(**x)[MASK == 1]
    risk = {
        loss: fl.Lens(fl.Problem(net, loss, (x, y))).outcomes("data").risk for loss in ("mse", "half_squared_error")
    }
    assert risk["mse"] == pytest.approx(F.mse_loss(f, y[MASK == 1]).item())
    assert risk["half_squared_error"] == pytest.approx(0.5 * (f - y[MASK == 1]).square().sum().item() / 3)


def test_what_masked_tokens_hold_changes_nothing(tagger) -> None:
    net, x = tagger
    labels = LABELS.masked_fill(MASK == 0, 1)
    other = {**x, "input_ids": x["input_ids"].masked_fill(MASK == 0, 4)}
    agree(values(net, (x, LABELS)), values(net, (other, labels)))


def test_padding_further_changes_nothing(tagger) -> None:
    net, x = tagger
    longer = {key: F.pad(value, (0, 3)) for key, value in x.items()}
    agree(values(net, (x, LABELS)), values(net, (longer, F.pad(LABELS, (0, 3)))))


def test_batches_of_their_own_lengths_are_the_data_padded_to_one(tagger) -> None:
    net, x = tagger
    lengths = [4, 2, 3]
    batches = [
        ({key: value[i : i + 1, :T] for key, value in x.items()}, LABELS[i : i + 1, :T]) for i, T in enumerate(lengths)
    ]
    apart = DataLoader(batches, batch_size=None)
    agree(values(net, apart), values(net, (x, LABELS)))


def test_a_float_mask_is_no_input(tagger) -> None:
    net, x = tagger
    agree(values(net, ({**x, "attention_mask": MASK.double()}, LABELS)), values(net, (x, LABELS)))


def test_a_padding_that_acts_is_not_left_out(tagger) -> None:
    torch.manual_seed(0)
    net, x = tagging(leaky=True).double(), tagger[1]
    found = fl.Lens(fl.Problem(net, "cross_entropy", (x, LABELS)))
    assert not found.layout.ignores_padding
    full = fl.measure(found, "normalized_mls")["normalized_mls"].samples
    norms = fl.measure(found, "mls")["mls"].samples
    assert torch.allclose(full, norms.square() * net.embed(x["input_ids"]).detach().square().sum((1, 2)))


def test_forward_says_itself_which_tokens_count(tagger) -> None:
    net, x = tagger
    batch = (x, LABELS)
    hidden = fl.Problem(net, "cross_entropy", batch, forward=lambda m, b: (m(**b[0]), b[1], b[0]["attention_mask"]))
    plain = fl.Problem(net, "cross_entropy", batch)
    assert hidden.mass == plain.mass == COUNTED.sum()
    bare = fl.Problem(net, "cross_entropy", batch, forward=lambda m, b: (m(**b[0]), b[1]))
    assert bare.mass == (LABELS != -100).sum()


def test_next_token_shifts_labels_and_leaves_padding_out(tagger) -> None:
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double(), tagger[1]

    network = module_of(lambda net, input_ids, attention_mask: net.inside(input_ids), inside=net).double()
    problem = fl.Problem(network, "cross_entropy", x, forward=next_token)
    ids, mask = x["input_ids"], x["attention_mask"]
    target = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    truth = F.cross_entropy(net(ids)[:, :-1].flatten(0, 1), target.flatten())
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(truth.item())
    assert (problem.outputs, problem.mass) == (15, 3 + 1 + 2)


def test_accuracy_is_of_a_sample_s_own_tokens(tagger) -> None:
    net, x = tagger
    hits = (net(**x).argmax(2) == LABELS) & COUNTED
    share = hits.sum(1) / COUNTED.sum(1)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, LABELS))), "accuracy")["accuracy"]
    assert found.value == pytest.approx(share.double().mean().item())


def test_a_callable_sees_whole_sentences(tagger) -> None:
    net, x = tagger

    def worst(f: Tensor, y: Tensor) -> Tensor:
        assert f.shape == (len(y), 4, 3)
        return (f - 1).square().sum(2).logsumexp(1)

    values(net, (x, LABELS), worst)
    f = net(**x) * COUNTED[..., None]
    assert fl.Lens(fl.Problem(net, worst, (x, LABELS))).outcomes("data").risk == pytest.approx(
        worst(f, LABELS).mean().item()
    )


LOSSES = {
    "cross_entropy": as_loss("cross_entropy"),
    "weighted": as_loss(nn.CrossEntropyLoss(torch.tensor([0.5, 2.0]).double(), label_smoothing=0.1)),
    "mse": as_loss("mse"),
    "half_squared_error": as_loss("half_squared_error"),
    "module": as_loss(nn.PoissonNLLLoss()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_are_those_of_the_values(name) -> None:
    """C by autodiff, its products, and E[rows^T B rows] over all 16 signs of two tokens with two outputs."""
    outputs = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    targets = torch.tensor([[0, 1], [1, -100], [0, 0]])
    if name == "module":
        targets = torch.rand(3, 2, 2).double() + 2
    f, y = by_token(outputs, targets, torch.tensor([[1, 1], [1, 1], [0, 1]]), -100)
    loss = laid_out(LOSSES[name], y)
    assert isinstance(loss, OfRows)
    C = loss.output_hessian(f, y)
    for i in range(3):
        whole = torch.autograd.functional.hessian(lambda g: loss.values(g, y).sum(), f)
        assert torch.allclose(C[i], whole[i, :, i], atol=1e-12)
    u = torch.randn(3, 4).double()
    assert torch.allclose(loss.output_hessian_product(f, y)(u), (C @ u[..., None])[..., 0])
    total = torch.zeros_like(C)
    for signs in product((-1.0, 1.0), repeat=4):
        rows, B = loss.combine(f, y, torch.tensor(signs).double().expand(3, 4))
        total += rows.mT @ B @ rows
    assert torch.allclose(total / 16, C, atol=1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "mse", "half_squared_error"])
def test_drawn_targets_have_the_fisher_s_covariance(name) -> None:
    f, y = by_token(torch.randn(2, 2, 2).double(), torch.tensor([[0, 1], [1, -100]]), None, -100)
    loss = laid_out(LOSSES[name], y)
    s = loss.draw_slopes(f, y, 20_000, torch.Generator().manual_seed(0))
    empirical = s.mT @ s / s.shape[1]
    exact = torch.stack([loss.fisher(f, y)(e.expand(2, 4)) for e in torch.eye(4).double()], 1)
    assert torch.allclose(empirical, exact, atol=0.05)


def test_targets_that_fit_no_token_are_refused(tagger) -> None:
    net, x = tagger
    with pytest.raises(BadData, match="one row per token"):
        fl.Problem(net, "cross_entropy", (x, torch.tensor([0, 1, 2])))
    with pytest.raises(BadData, match="label 5 at token 1"):
        fl.Problem(net, "cross_entropy", (x, LABELS.masked_fill(LABELS == 2, 5)))
    with pytest.raises(BadData, match=r"labels of shape \(3, 2, 2\), one for each place"):
        fl.Problem(nn.Conv2d(1, 2, 1), "cross_entropy", (torch.randn(3, 1, 2, 2), torch.zeros(3).long()))


def test_sketches_of_tokens_are_unbiased(tagger) -> None:
    net, x = tagger
    problem = fl.Problem(net, "cross_entropy", (x, LABELS))
    wanted = ["ggn_trace", "interpolation_sharpness", "relative_flatness_ggn"]
    exact = fl.measure(fl.Lens(problem, outputs="exact"), wanted)
    few = fl.measure(fl.Lens(problem, outputs=8), wanted, generator=torch.Generator().manual_seed(3))
    for name in wanted:
        assert few[name].kind == "estimate"
        assert abs(few[name].value - exact[name].value) < 4 * few[name].stderr, name


def test_spectral_norms_by_search_know_tokens(tagger) -> None:
    net, x = tagger
    problem = fl.Problem(net, "cross_entropy", (x, LABELS))
    wanted = ["mls", "mls(softmax=True)", "normalized_mls"]
    exact, found = (fl.measure(fl.Lens(problem, outputs=k), wanted) for k in ("exact", 4))
    for name in wanted:
        assert found[name].value == pytest.approx(exact[name].value, rel=0.02), name


def test_spectral_norms_by_search_from_an_input_smaller_than_the_outputs(tagger) -> None:
    net, x = tagger
    net.head = nn.Linear(4, 11).double()
    problem = fl.Problem(net, "cross_entropy", (x, LABELS))
    assert problem.outputs == 44 > 4 * 3
    wanted = ["mls", "nmls", "mls(softmax=True)", "normalized_mls"]
    exact, found = (fl.measure(fl.Lens(problem, outputs=k), wanted) for k in ("exact", 4))
    for name in wanted:
        assert found[name].value == pytest.approx(exact[name].value, rel=0.02), name
        assert found[name].value <= exact[name].value * (1 + 1e-9)


def test_what_tokenizers_and_collates_make_is_read_as_dicts(tagger) -> None:
    transformers = pytest.importorskip("transformers")
    net, x = tagger
    encoded = transformers.BatchEncoding(x)
    agree(values(net, (encoded, LABELS)), values(net, (x, LABELS)))

    def collate(rows):
        ids, mask, labels = (torch.stack(part) for part in zip(*rows, strict=True))
        return [transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask}), labels]

    rows = list(zip(x["input_ids"], x["attention_mask"], LABELS, strict=True))
    agree(values(net, DataLoader(rows, batch_size=2, collate_fn=collate)), values(net, (x, LABELS)))
    whole = transformers.BatchEncoding({**x, "labels": LABELS})

    def forward(model, batch):
        return model(batch["input_ids"], batch["attention_mask"]), batch["labels"], batch["attention_mask"]

    agree(values(net, whole, forward=forward), values(net, (x, LABELS)))


def packing(kind: type[nn.RNNBase], both: bool, total: bool) -> nn.Module:
    """A tagger that packs its sequences: its outputs are as long as the longest of the batch, or as x."""

    def forward(net: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        length = x.shape[1] if total else None
        h, _ = nn.utils.rnn.pad_packed_sequence(net.rnn(packed)[0], batch_first=True, total_length=length)
        return net.head(h)

    return module_of(forward, rnn=kind(3, 2, batch_first=True, bidirectional=both), head=(4 if both else 2, 3))


@pytest.mark.parametrize("seed", range(6))
def test_packed_sequences_are_as_long_as_the_longest_of_a_batch(seed: int) -> None:
    torch.manual_seed(seed)
    kind = (nn.RNN, nn.GRU, nn.LSTM)[seed % 3]
    net = packing(kind, both=seed % 2 == 0, total=False).double()
    n, T = int(torch.randint(1, 7, ())), int(torch.randint(4, 7, ()))  # not 3: with 3 classes, torch's rule
    lengths = torch.randint(1, T + 1, (n,))
    x, here = torch.randn(n, T, 3).double(), torch.arange(T) < lengths[:, None]
    y = torch.randint(3, (n, T)).masked_fill(~here, -100)
    rows = torch.cat([net(x[i : i + 1], lengths[i : i + 1])[0, : lengths[i]] for i in range(n)])
    risk = F.cross_entropy(rows, y[here])
    weights = list(net.parameters())
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(risk, weights, create_graph=True)])
    second = [torch.cat([g.flatten() for g in torch.autograd.grad(g, weights, retain_graph=True)]) for g in slope]
    loader = DataLoader([((x[i], lengths[i]), y[i]) for i in range(n)], batch_size=int(torch.randint(1, 4, ())))
    for data in (((x, lengths), y), loader):
        problem = fl.Problem(net, "cross_entropy", data, memory=("1GiB", "1")[seed % 2])
        report = fl.measure(fl.Lens(problem), ["loss", "hessian_trace(exact=True)"])
        assert report["loss"].value == pytest.approx(risk.item(), rel=1e-10)
        truth = float(torch.stack(second).trace())
        assert report["hessian_trace(exact=True)"].value == pytest.approx(truth, rel=1e-8, abs=1e-12)


def test_packed_sequences_whose_places_all_count_are_told_to_be_padded() -> None:
    x, lengths, y = torch.randn(4, 5, 3), torch.tensor([5, 2, 3, 1]), torch.randn(4, 5, 3)
    with pytest.raises(fl.errors.BadInput, match=r"15 outputs among all 4 samples.*total_length=") as caught:
        fl.Problem(packing(nn.GRU, True, False), lambda f, y: (f - y[:, : f.shape[1]]).square().mean((1, 2)),
                   ((x, lengths), y))  # fmt: skip
    assert "\n" not in str(caught.value)
    assert fl.Problem(packing(nn.GRU, True, True), "mse", ((x, lengths), y)).outputs == 15


@pytest.mark.parametrize("seed", range(6))
def test_labels_at_padding_are_told(seed: int, tagger: tuple[nn.Module, dict[str, Tensor]]) -> None:
    """The loss of labels that attention_mask hides is not the mean over all labels: a note counts them."""
    net, fed = tagger
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, MASK.shape, generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.4] = -100
    labels[0, 0] = 1
    hidden, labelled = int(((MASK == 0) & (labels != -100)).sum()), int((labels != -100).sum())
    for data in ((fed, labels), {**fed, "labels": labels}):
        report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", data, test=data)), ["loss", "test_loss"])
        words = f"{hidden} of {labelled} tokens with a label do not count, because attention_mask hides them"
        for name in ("loss", "test_loss"):
            assert (words in report[name].note) == (hidden > 0)
        assert (words in str(report.about)) == (hidden > 0)
