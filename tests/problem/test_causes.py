"""The cause that a refusal names is the one that was there: each situation with words that must come, and must not."""

from __future__ import annotations

import itertools
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import cross_entropy as each
from networks import applied, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.measures.sensitivity import local_variation
from flatlens.problem.problem import is_quantised


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def linear() -> nn.Linear:
    return nn.Linear(4, 3)


def of(forward: Callable[..., Any], **layers: Any) -> nn.Module:
    return module_of(forward, l=linear(), **layers)


def holding(net: nn.Module, held: object) -> nn.Module:
    net.held = held  # type: ignore[assignment]
    return net


def counting() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.buffer += 1
        return net.l(x) * net.buffer

    return of(forward, buffer=torch.ones(()))


def attending(batch_first: bool) -> nn.Module:
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    return of(lambda net, x: net.l(net.a(x, x, x)[0]).mean(1), a=attention)


def packed(x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return x[order].cumsum(0)


def drawn(seed: int, *tail: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = 5 + seed % 7
    return torch.randn(n, *(tail or (4,)), generator=generator), torch.randint(3, (n,), generator=generator)


def make(network: nn.Module, data: Any, loss: Any = "cross_entropy", **options: Any) -> fl.Problem:
    return fl.Problem(network, loss, data, **options)


def measured(network: nn.Module, data: Any) -> fl.Report:
    return fl.measure(fl.Lens(make(network, data)), "pass")


counter, generator = itertools.count(), torch.Generator()
teacher = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).train()
normal = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
sure = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
pad = torch.tensor([[False, False, True]])
NONE = torch.zeros(6).long()


def seed_of(net: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return net.l(x + torch.randn_like(x))


def half(net: nn.Module) -> nn.Module:
    return net.bfloat16()


def masked(fill: float, label: int) -> Callable[[int], fl.Problem]:
    def problem(seed: int) -> fl.Problem:
        x, _ = drawn(seed, 3, 4)
        y = torch.zeros(len(x), 3).long()
        y[:, 2] = label
        return make(of(lambda net, x: net.l(x).masked_fill(pad[..., None], fill)), (x, y))

    return problem


def quantised(kind: type[nn.Module], net: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net, {kind}, dtype=torch.qint8)


def qat() -> nn.Module:
    net = nn.Sequential(torch.ao.quantization.QuantStub(), linear())
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    net = torch.ao.quantization.prepare_qat(net.train())
    net(torch.randn(9, 4))
    return net


# name: (make the problem from a seed, words that must be there, words that must not)
SITUATIONS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    # the same batch twice
    "functional dropout": (
        lambda s: make(of(lambda net, x: F.dropout(net.l(x), 0.5)), drawn(s)),
        r"forward\(\) of Of \(in bernoulli\) draws random numbers, also in eval mode", "buffer|NumPy",
    ),
    "noise in a layer": (
        lambda s: make(of(lambda net, x: net.l(net.noise(x)), noise=applied(noisy)), drawn(s)),
        r"forward\(\) of 'noise' \(Of\) \(in (randn|normal)\w*\) draws",
        "dropout|buffer|NumPy",
    ),
    "NumPy's numbers": (
        lambda s: make(of(lambda net, x: net.l(x) * float(np.random.rand())), drawn(s)),
        "draws random numbers of NumPy or Python", "dropout|buffer",
    ),
    "Python's numbers": (
        lambda s: make(of(lambda net, x: net.l(x) * random.random()), drawn(s)),
        "draws random numbers of NumPy or Python", "dropout|buffer",
    ),
    "a generator of its own": (
        lambda s: make(of(lambda net, x: net.l(x) + torch.randn(3, generator=generator)), drawn(s)),
        "from a generator of its own", "dropout|buffer",
    ),
    "a buffer that counts": (
        lambda s: make(counting(), drawn(s)), "changes the buffer 'buffer', on which", "random|dropout",
    ),
    "a counter elsewhere": (
        lambda s: make(of(lambda net, x: net.l(x) * next(counter)), drawn(s)),
        r"no buffer and no random numbers of .* first to differ is forward\(\) of Of: a counter.*possible",
        "dropout|draws",
    ),
    "a buffer that counts, and does not matter, beside noise": (
        lambda s: make(of(lambda net, x: (net.buffer.add_(1), net.l(x) + torch.rand(3))[1], buffer=torch.ones(())),
                       drawn(s)),
        "draws random numbers", "changes the buffer",
    ),
    # samples that are coupled
    "BatchNorm without running statistics": (
        lambda s: make(of(lambda net, x: net.l(net.bn(x)), bn=nn.BatchNorm1d(4, track_running_stats=False)), drawn(s)),
        r"'bn' \(BatchNorm1d\) normalises over the batch: batchnorm='train'", "batch_first|mixes",
    ),
    "a mean over the batch": (
        lambda s: make(of(lambda net, x: net.l(x - x.mean(0))), drawn(s)),
        r"forward\(\) of Of mixes them: .*as one sample", "BatchNorm|ghost|batch_first|layer",
    ),
    "a mean over the batch beside an innocent BatchNorm": (
        lambda s: make(of(lambda net, x: net.l(net.bn(x) - x.mean(0)), bn=nn.BatchNorm1d(4)), drawn(s)),
        r"forward\(\) of Of mixes them", "BatchNorm|ghost|batch_first",
    ),
    "attention over samples": (
        lambda s: make(attending(False), drawn(s, 3, 4)),
        r"'a' \(MultiheadAttention\) takes axis 0.*batch_first=True", "BatchNorm|ghost",
    ),
    "recurrence over samples": (
        lambda s: make(of(lambda net, x: net.l(net.r(x)[0][:, -1]), r=nn.GRU(4, 4)), drawn(s, 3, 4)),
        r"'r' \(GRU\) takes axis 0.*batch_first=True", "BatchNorm|ghost",
    ),
    "an encoder over samples": (
        lambda s: make(of(lambda net, x: net.l(net.e(x)[:, 0]), e=nn.TransformerEncoderLayer(4, 2, 8)), drawn(s, 3, 4)),
        r"takes axis 0.*batch_first=True", "BatchNorm|ghost",
    ),
    "similarities in the batch": (
        lambda s: make(of(lambda net, x: net.l(x.softmax(1) @ x.softmax(1).T @ x)), drawn(s)),
        r"forward\(\) of Of mixes them", "BatchNorm|ghost|batch_first",
    ),
    "sorting": (
        lambda s: make(of(lambda net, x: net.l(packed(x))), drawn(s)), r"forward\(\) of Of", "BatchNorm|ghost",
    ),
    "noise from a fixed seed": (
        lambda s: make(of(seed_of), drawn(s)),
        r"draws random numbers for the whole batch: draw them beforehand", "BatchNorm|ghost|batch_first",
    ),
    "forward= over the batch": (
        lambda s: make(linear(), drawn(s), forward=lambda m, b: (m(b[0]) - m(b[0]).mean(0), b[1])),
        "forward=, after the network, mixes the samples", "BatchNorm|ghost|batch_first",
    ),
    "an observer of fake quantisation": (
        lambda s: make(qat(), drawn(s)), "disable_observer", "BatchNorm|mixes",
    ),
    # outputs that are not finite
    "overflow of float32": (
        lambda s: make(of(lambda net, x: net.l(x) * 1e25 * 1e25 / 1e30), drawn(s)),
        "overflow float32: dtype=torch.float64 measures it", "arises",
    ),
    "a softmax of nothing": (
        lambda s: make(of(lambda net, x: net.l((x - torch.inf).softmax(1))), drawn(s)),
        r"softmax of a row that is all -inf", "overflow|dtype=torch.float64|ignore",
    ),
    "a softmax of nothing in float64": (
        lambda s: make(of(lambda net, x: net.l((x - torch.inf).softmax(1))).double(), drawn(s)),
        r"softmax of a row that is all -inf", "overflow|dtype=torch.float64|ignore",
    ),
    "outputs masked by -inf": (
        lambda s: make(of(lambda net, x: net.l(x).index_fill(1, torch.tensor([0]), -torch.inf)), drawn(s)),
        r"in its place, such as -1e\+09", "overflow|dtype=torch.float64|ignore",
    ),
    "outputs masked by -inf in float64": (
        lambda s: make(of(lambda net, x: net.l(x).index_fill(1, torch.tensor([1]), -torch.inf)).double(), drawn(s)),
        r"in its place, such as -1e\+09", "overflow|dtype=torch.float64|ignore",
    ),
    "a logarithm of negative numbers": (
        lambda s: make(of(lambda net, x: net.l((x - 9).log())), drawn(s)),
        r"forward\(\) of Of \(in log\)", "overflow|-inf",
    ),
    "nothing over nothing": (
        lambda s: make(of(lambda net, x: net.l(x / x.sub(x).norm(dim=1, keepdim=True) * 0)), drawn(s)),
        r"forward\(\) of Of", "overflow|-inf",
    ),
    "NaN where labels ignore it": (masked(float("nan"), -100), "the labels or the mask ignore them", "overflow|arises"),
    "-inf where labels ignore it": (masked(-float("inf"), -100), "the labels or the mask ignore them", "overflow"),
    "NaN where labels count": (masked(float("nan"), 1), "arises in|begins", "ignore|overflow"),
    "NaN of a sample that is ignored": (
        lambda s: make(of(lambda net, x: torch.where(torch.arange(len(x))[:, None] == 0, torch.nan, net.l(x))),
                       (drawn(s)[0], torch.cat([torch.tensor([-100]), drawn(s)[1][1:]]))),
        "the labels or the mask ignore them", "overflow|arises",
    ),
    # forward() fails
    "an input is missing": (
        lambda s: make(module_of(lambda net, x, mask: net.l(x * mask), l=linear()), drawn(s)),
        r"does not take the inputs that the data give: .*\(\(x, mask\), y\)", "shapes|dtype",
    ),
    "an input too many": (
        lambda s: make(linear(), ((drawn(s)[0], drawn(s)[0]), drawn(s)[1])),
        "does not take the inputs that the data give", "shapes|dtype",
    ),
    "too few features": (
        lambda s: make(linear(), drawn(s, 5)), r"inputs of shape \(\d+, 5\).*take these shapes", "cast",
    ),
    "an image for a row": (
        lambda s: make(nn.Sequential(nn.Conv2d(1, 2, 3)), drawn(s)), "take these shapes", "cast|dtype",
    ),
    "whole numbers for floating ones": (
        lambda s: make(linear(), (torch.ones(6, 4).long(), NONE)),
        r"needs numbers of another type.*torch.int64", "forward\\(\\) casts|shapes",
    ),
    "floating numbers for ids": (
        lambda s: make(nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), drawn(s)),
        r"needs numbers of another type.*torch.float32", "forward\\(\\) casts|shapes",
    ),
    "ids that are too large": (
        lambda s: make(nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), (torch.full((6, 1), 5 + s), NONE)),
        "an embedding has fewer rows", "shapes|dtype",
    ),
    "a cast of its own to float32": (
        lambda s: make(of(lambda net, x: net.l(x.float())), drawn(s), dtype=torch.float64),
        r"casts to a fixed one.*x\.to\(self", "shapes|attribute",
    ),
    "an attribute of another dtype": (
        lambda s: make(of(lambda net, x: net.l(x @ net.table), table=torch.eye(4).double()), drawn(s)),
        "the attribute 'table' of the network has another dtype", "casts to a fixed",
    ),
    "its own error": (
        lambda s: make(of(lambda net, x: {}["key"]), drawn(s)), "its own code raised this", "shapes|dtype|fit",
    ),
    "NumPy in forward()": (
        lambda s: make(of(lambda net, x: net.l(x.requires_grad_().numpy())), drawn(s)), "its own code raised", "shapes",
    ),
    # a loss fails
    "class 7 of 3": (
        lambda s: make(linear(), (drawn(s)[0], drawn(s)[1] % 2 + 7), each),
        "the targets run from [78] to 8, and 3 outputs are classes 0 to 2", "shapes|differentiable|float64",
    ),
    "floating classes": (
        lambda s: make(linear(), (drawn(s)[0], drawn(s)[1].float()), each),
        r"class numbers are needed: give y.long\(\)", "shapes|cast its own",
    ),
    "whole numbers for a loss of floating ones": (
        lambda s: make(linear(), (drawn(s)[0], F.one_hot(drawn(s)[1], 3)),
                       lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="none").mean(1)),
        r"floating ones are needed: give y.float\(\)", "shapes|cast its own",
    ),
    "weights in float32": (
        lambda s: make(linear(), drawn(s),
                       lambda f, y: F.cross_entropy(f, y, weight=torch.ones(3), reduction="none")),
        r"cast its own tensors with .to\(outputs.dtype\)", "shapes",
    ),
    "another number of targets": (
        lambda s: make(linear(), (drawn(s)[0], torch.ones(len(drawn(s)[0]), 2)), lambda f, y: (f - y).square().sum(1)),
        "take these shapes", "dtype|cast",
    ),
    "its own error in the loss": (
        lambda s: make(linear(), drawn(s), lambda f, y: {}["key"]), "its own code raised", "shape[^ ]|differentiable",
    ),
    "a loss of dropout": (
        lambda s: make(linear(), drawn(s), lambda f, y: F.dropout(F.cross_entropy(f, y, reduction="none"), 0.5)),
        "it draws random numbers", "running mean|counter",
    ),
    "a loss that counts": (
        lambda s: make(linear(), drawn(s), lambda f, y: F.cross_entropy(f, y, reduction="none") * next(counter)),
        "keeps a state", "draws",
    ),
    # targets of forward=
    "a teacher in train mode": (
        lambda s: make(linear(), drawn(s), "mse", forward=lambda m, b: (m(b[0]), teacher(b[0]).detach())),
        r"network teacher that it uses is in train mode.*eval\(\)", "draw beforehand",
    ),
    "random targets beside a teacher in eval mode": (
        lambda s: make(linear(), drawn(s), "mse",
                       forward=lambda m, b: (m(b[0]), sure(b[0]).detach() + torch.rand(3))),
        "draws random numbers: draw beforehand", "train mode",
    ),
    "targets that count": (
        lambda s: make(linear(), drawn(s), "mse", forward=lambda m, b: (m(b[0]), b[0][:, :3] * next(counter))),
        "not because of random numbers", "train mode",
    ),
    "a teacher that normalises in train mode": (
        lambda s: make(linear(), drawn(s), "mse", forward=lambda m, b: (m(b[0]), normal(b[0]).detach())),
        r"call eval\(\) on normal, which forward= uses in train mode", "random",
    ),
    "targets that are centred in the batch": (
        lambda s: make(linear(), drawn(s), "mse",
                       forward=lambda m, b: (m(b[0]), b[0][:, :3] - b[0][:, :3].mean(0))),
        "compute them on all the data beforehand", "random|train mode",
    ),
    # weights
    "NaN in a weight": (
        lambda s: make(of(lambda net, x: net.l(x), w=nn.Parameter(torch.tensor([torch.nan]))), drawn(s)),
        "'w' are NaN or inf", "did training",
    ),
    "a dynamically quantised layer": (
        lambda s: make(quantised(nn.Linear, nn.Sequential(linear())), drawn(s)),
        "'0' .Linear. is quantised", "BatchNorm",
    ),
    "a quantised recurrence": (
        lambda s: make(quantised(nn.LSTM, of(lambda net, x: net.l(net.r(x)[0][:, -1]), r=nn.LSTM(4, 4))), drawn(s, 3, 4)
        ),
        "'r' .LSTM. is quantised", "BatchNorm|axis",
    ),
    "a quantised tensor": (
        lambda s: make(of(lambda net, x: net.l(x @ net.w.dequantize()),
                          w=torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)), drawn(s)),
        "the network .Of. is quantised", "BatchNorm",
    ),
    "a weight that forward() writes to": (
        lambda s: make(of(lambda net, x: (net.l.weight.data.mul_(0.9), net.l(x))[1]), drawn(s)),
        "changes the parameter 'l.weight' in place.*self.training", "clip|normalise",
    ),
    # derivatives
    "no graph": (
        lambda s: measured(of(lambda net, x: torch.no_grad()(net.l)(x)), drawn(s)),
        r"torch.no_grad\(\) or .* is on in the layer 'l' \(Linear\) \(in t, addmm\)", "cuts|buffer",
    ),
    "a graph that is cut": (
        lambda s: measured(of(lambda net, x: net.l(x).detach()), drawn(s)),
        r"forward\(\) of Of cuts them off: detach", "no_grad",
    ),
    "a graph that a layer cuts": (
        lambda s: measured(of(lambda net, x: net.r(net.l(x)), r=applied(lambda x: x.data)), drawn(s)),
        r"forward\(\) of 'r' \(Of\) cuts them off", "no_grad",
    ),
    # axes and labels
    "samples on axis 1": (
        lambda s: make(of(lambda net, x: net.l(x).transpose(0, 1)), drawn(s, 3, 4)), "put them first", "mean|reshape",
    ),
    "two rows for each sample": (
        lambda s: make(of(lambda net, x: net.l(x).flatten(0, 1)), drawn(s, 2, 4)),
        r"2 rows for each sample: .*reshape\(\d+, 2", "mean|transpose",
    ),
    "a mean of the outputs": (
        lambda s: make(of(lambda net, x: net.l(x).mean()), drawn(s)), "one number for the whole batch", "reshape|axis",
    ),
    "labels from 1": (
        lambda s: make(linear(), (drawn(s)[0], torch.arange(len(drawn(s)[0])) % 3 + 1)), "subtract 1", "last layer",
    ),
    "labels of a fourth class": (
        lambda s: make(linear(), (drawn(s)[0], torch.arange(len(drawn(s)[0])) % 4)),
        "the last layer needs at least 4 outputs", "subtract",
    ),
    "labels below 0": (
        lambda s: make(linear(), (drawn(s)[0], torch.arange(len(drawn(s)[0])) % 3 - 1)),
        r"ignore_index=-1", "subtract|last layer",
    ),
    # copies
    "a lock in bfloat16": (
        lambda s: make(holding(half(of(lambda net, x: net.l(x), part=nn.Sequential())), threading.Lock()), drawn(s)),
        r"the attribute 'held' of the network \(lock\) cannot be copied.*model.float\(\)", "weight_norm",
    ),
    "a graph in bfloat16": (
        lambda s: make(holding(half(of(lambda net, x: net.l(x))), torch.ones(1, requires_grad=True) * 2), drawn(s)),
        r"the attribute 'held' of the network \(Tensor\).*model.float\(\).*detach", "weight_norm",
    ),
    "old weight_norm in bfloat16": (
        lambda s: make(half(nn.Sequential(nn.utils.weight_norm(linear()))), drawn(s)),
        r"the attribute 'weight' of '0'.*parametrizations.weight_norm", "detach",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", SITUATIONS)
def test_the_cause_that_is_named_is_the_one_that_is_there(what: str) -> None:
    construct, words, false = SITUATIONS[what]
    for seed in (0, 4):
        torch.manual_seed(seed)
        with pytest.raises(BadInput, match=words) as caught:
            construct(seed)
        told = str(caught.value)
        assert "\n" not in told
        assert re.search(false, told) is None, told


@pytest.mark.parametrize("shape", [(6, 4), (5, 3, 4)])
def test_masks_of_minus_infinity_are_no_broken_weights(shape: tuple[int, ...]) -> None:
    """A buffer may hold -inf: it is what a mask adds."""
    net = of(lambda net, x: net.l((x + net.buffer_mask).softmax(-1)), buffer_mask=torch.tensor([0.0, 0, 0, -torch.inf]))
    x = torch.randn(shape)
    report = fl.measure(fl.Lens(make(net, (x, torch.zeros(shape[:-1]).long()))), ["loss", "ggn_trace"])
    out = net(x)
    assert report["loss"].value == pytest.approx(float(F.cross_entropy(out, torch.zeros(shape[:-1]).long())), rel=1e-6)


HELD = [threading.Lock, torch.Generator, lambda: sys.stdin, lambda: linear().weight * 2]


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("held", HELD)
def test_what_cannot_be_copied_is_measured_as_it_is(held: Callable[[], object]) -> None:
    net = holding(of(lambda net, x: net.l(x).relu()), held())
    plain = of(lambda net, x: net.l(x).relu())
    plain.load_state_dict(net.state_dict())
    x, y = drawn(1)
    ours, theirs = (fl.measure(fl.Lens(make(one, (x, y))), "pass") for one in (net, plain))
    assert all(ours[name].value == theirs[name].value or ours[name].kind == "undefined" for name in ("loss", "mls"))


def test_fake_quantised_networks_are_no_quantised_ones() -> None:
    net = qat().apply(torch.ao.quantization.disable_observer)
    assert not any(map(is_quantised, net.modules()))
    found = fl.measure(fl.Lens(make(net, drawn(2))), ["ggn_trace", "mls"])
    assert "not the function's, with respect to the weights (fake quantisation" in found["ggn_trace"].note
    assert "not the function's, with respect to the inputs (fake quantisation" in found["mls"].note


@pytest.mark.parametrize("scale", [0.3, 1e-4])
def test_fake_quantised_weights_leave_the_derivative_in_the_inputs_alone(scale: float) -> None:
    """Of whatever size the steps are: differences do not show small ones."""

    def forward(net: Any, x: Tensor) -> Tensor:
        rounded = torch.fake_quantize_per_tensor_affine(net.l.weight, scale, 0, -128, 127)
        return F.linear(x, rounded, net.l.bias)

    found = fl.measure(fl.Lens(make(of(forward), drawn(3))), ["ggn_trace", "mls"])
    assert "not the function's, with respect to the weights (fake quantisation" in found["ggn_trace"].note
    assert "fake quantisation" not in found["mls"].note


@pytest.mark.parametrize(("ids", "words"), [(True, "they are whole numbers"), (False, "forward.* cuts them off")])
def test_why_nothing_depends_on_the_inputs(ids: bool, words: str) -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten()) if ids else of(lambda net, x: net.l(x.sign().detach()))
    problem = make(net, (torch.randint(5, (6, 1)) if ids else torch.randn(6, 4), NONE))
    for estimate in fl.measure(fl.Lens(problem), [local_variation]).values():
        assert re.search(f"on a floating input: {words}", estimate.note)
