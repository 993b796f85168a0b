"""Outputs of other shapes, and several heads, against torch's own risk and derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import trace_of_hessian
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import flatlens as fl
from flatlens.errors import BadData, BadInput, BadLoss, BadModel
from flatlens.problem.losses import as_loss
from flatlens.problem.row_layout import HeadLosses, in_rows, laid_out

G = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, generator=G).double()
PIXELS = torch.randint(0, 4, (5, 2, 3), generator=G)
PIXELS[0, 0] = PIXELS[3] = -100
IMAGES = torch.randn(5, 4, 2, 3, generator=G).double()
ENDING = torch.randint(0, 2, (5, 6), generator=torch.Generator().manual_seed(1))
ENDING[:, 2:] = -100


def reshaped(*shape: int, squeezed: bool = False) -> nn.Module:
    """A linear map whose outputs have another shape."""
    torch.manual_seed(0)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        f = net.net(x).reshape(len(x), *shape)
        return f.squeeze() if squeezed else f

    return module_of(forward, net=(3, max(1, math.prod(shape)))).double()


CASES: dict[str, tuple[tuple[int, ...], Any, Tensor, Any]] = {
    "classes": ((4, 2, 3), "cross_entropy", PIXELS, F.cross_entropy),
    "smoothed": ((4, 2, 3), nn.CrossEntropyLoss(label_smoothing=0.2), PIXELS, nn.CrossEntropyLoss(label_smoothing=0.2)),
    "weighted": ((4, 2, 3), nn.CrossEntropyLoss(torch.arange(1.0, 5).double()), PIXELS,
                 nn.CrossEntropyLoss(torch.arange(1.0, 5).double())),
    "probabilities": ((4, 2, 3), "cross_entropy", IMAGES.softmax(1), F.cross_entropy),
    "a line of classes": ((4, 6), "cross_entropy", PIXELS.flatten(1), F.cross_entropy),
    "as many places as classes": ((4, 4), "cross_entropy", torch.randint(0, 4, (5, 4), generator=G), F.cross_entropy),
    "a line whose end is ignored": ((2, 6), "cross_entropy", ENDING, F.cross_entropy),
    "a line of probabilities": ((4, 6), "cross_entropy", IMAGES.flatten(2).softmax(1), F.cross_entropy),
    "nll": ((4, 2, 3), nn.NLLLoss(), PIXELS, nn.NLLLoss()),
    "images": ((4, 2, 3), "mse", IMAGES, F.mse_loss),
    "half the square": ((4, 2, 3), "half_squared_error", IMAGES, lambda f, y: 0.5 * (f - y).square().sum() / len(f)),
    "masks": ((1, 2, 3), F.binary_cross_entropy_with_logits, (PIXELS > 1)[:, None].double(),
              F.binary_cross_entropy_with_logits),
    "squeezed": ((), "mse", X[:, 0], F.mse_loss),
    "squeezed, a function": ((), lambda f, y: (f - y).abs().sqrt(), X[:, 0], lambda f, y: (f - y).abs().sqrt().mean()),
    "a function of images": ((4, 2, 3), lambda f, y: (f - y).square().amax((1, 2, 3)), IMAGES,
                             lambda f, y: (f - y).square().amax((1, 2, 3)).mean()),
    "a mean of images": ((4, 2, 3), lambda f, y: F.smooth_l1_loss(f, y), IMAGES, F.smooth_l1_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_risk_and_its_hessian_are_torch_s(name: str) -> None:
    shape, loss, y, risk = CASES[name]
    net = reshaped(*shape)
    problem = fl.Problem(net, loss, (X, y))
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(risk(net(X), y)), rel=1e-10)

    def of(W: Tensor) -> Tensor:
        return risk(F.linear(X, W, net.net.bias).reshape(5, *shape), y)

    H = torch.autograd.functional.hessian(of, net.net.weight.detach()).reshape(net.net.weight.numel(), -1)
    found = fl.curvature.Hessian(problem, ["net.weight"]).matrix()
    assert torch.allclose(found, H, rtol=1e-7, atol=1e-10)
    if "sqrt" not in name and name != "squeezed, a function":
        report = fl.measure(fl.Lens(problem, outputs="exact"), ["ggn_trace", "relative_flatness"])
        assert report["ggn_trace", "net"].value == pytest.approx(
            float(fl.curvature.GaussNewton(problem).matrix().trace()), rel=1e-7
        )


def test_a_squeeze_also_takes_the_axis_of_one_sample() -> None:
    for shape, y in (((1,), X[:, 0]), ((2,), X[:, :2])):
        whole = fl.Problem(reshaped(*shape, squeezed=True), "mse", (X, y))
        alone = fl.Problem(
            reshaped(*shape, squeezed=True), "mse", torch.utils.data.DataLoader([(X[i], y[i]) for i in range(5)])
        )
        assert alone.outputs == whole.outputs == shape[0]
        assert fl.Lens(alone).outcomes("data").risk == pytest.approx(fl.Lens(whole).outcomes("data").risk)


def heads(form: Callable[[Any], Any]) -> nn.Module:
    """Two heads, named "a" and "b", in the form that a function makes of their dict."""
    torch.manual_seed(0)

    def forward(net: nn.Module, x: Tensor) -> Any:
        h = torch.tanh(net.trunk(x))
        return form({"a": net.a(h), "b": net.b(h)})

    return module_of(forward, trunk=(3, 4), a=(4, 3), b=(4, 2)).double()


def as_tuple(outputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(outputs.values())


KINDS, SIZES = torch.tensor([0, 2, 1, 1, 0]), torch.randn(5, 2, generator=G).double()


def of_both(f: Any, y: Any) -> Tensor:
    return F.cross_entropy(f["a"], y["a"], reduction="none") + (f["b"] - y["b"]).square().mean(1)


HEADS = {
    "a dict": (dict, {"b": "mse", "a": "cross_entropy"}, {"a": KINDS, "b": SIZES}),
    "a tuple": (as_tuple, ("cross_entropy", nn.MSELoss()), (KINDS, SIZES)),
    "a function": (dict, of_both, {"b": SIZES, "a": KINDS}),
    "a mean": (dict, lambda f, y: of_both(f, y).mean(), {"a": KINDS, "b": SIZES}),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_add_their_losses(name: str) -> None:
    """The products and every number of the pass are those of one output with the loss written out."""
    form, loss, targets = HEADS[name]

    def written_out(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f[:, :3], y[:, 0].long(), reduction="none") + (f[:, 3:] - y[:, 1:]).square().mean(1)

    both = torch.cat([KINDS[:, None], SIZES], 1)
    wanted = ["loss", "ggn_trace", "mls", "relative_flatness", "hessian_trace(exact=True)", "sharpness(rtol=1e-8)"]
    truth = fl.measure(fl.Lens(fl.Problem(heads(lambda f: torch.cat(as_tuple(f), 1)), written_out, (X, both))), wanted)
    problem = fl.Problem(heads(form), loss, (X, targets))
    found = fl.measure(fl.Lens(problem), wanted)
    for key, e in truth.items():
        assert found[key].value == pytest.approx(e.value, rel=1e-7), key
    few = [fl.measure(fl.Lens(problem, outputs=4), "ggn_trace", generator=torch.Generator().manual_seed(s))
           for s in range(40)]  # fmt: skip
    values = torch.tensor([one["ggn_trace"].value for one in few])
    assert abs(float(values.mean()) - truth["ggn_trace"].value) < 4 * float(values.std()) / 40**0.5


@pytest.mark.parametrize("name", HEADS)
def test_several_heads_have_no_one_softmax(name: str) -> None:
    form, loss, targets = HEADS[name]
    keys = ["mls(softmax=True)", "jacobian_norm(softmax=True)", "batch_jacobian_norm(softmax=True)"]
    report = fl.measure(fl.Lens(fl.Problem(heads(form), loss, (X, targets))), keys)
    assert all(report[key].kind == "undefined" and "no one softmax" in report[key].note for key in keys)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 2)], ids=["classes", "places", "an image of classes"])
def test_the_second_derivatives_of_heads_are_those_of_their_sum(shape: tuple[int, ...]) -> None:
    """With torch's own mean over places in each head."""
    a, b = torch.randn(5, *shape).double(), torch.randn(5, 2).double()
    kinds = KINDS if len(shape) == 1 else torch.randint(0, 2, (5, 1, 2) if len(shape) == 3 else (5, 2))
    heads = HeadLosses([as_loss("cross_entropy"), as_loss("half_squared_error")], ["a", "b"])
    f, y = in_rows({"a": a, "b": b}, {"a": kinds, "b": SIZES}, 5, heads, None, 0)
    loss, N = laid_out(heads, y), f.shape[1]
    risk = F.cross_entropy(a, kinds) + 0.5 * (b - SIZES).square().sum(1).mean()
    assert float(loss.check(f, y).mean()) == pytest.approx(float(risk), rel=1e-12)
    C = loss.output_hessian(f, y)
    H = torch.autograd.functional.hessian(lambda g: loss.values(g, y).sum(), f)
    assert all(torch.allclose(C[i], H[i, :, i]) for i in range(5))
    u = torch.randn(5, N).double()
    assert torch.allclose(loss.output_hessian_product(f, y)(u), (C @ u[..., None])[..., 0])
    assert torch.allclose(loss.fisher(f, y)(u), (C @ u[..., None])[..., 0])
    total = torch.zeros_like(C)
    for signs in torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * N):
        rows, B = loss.combine(f, y, signs.expand(5, N))
        total += rows.mT @ B @ rows / 2**N
    assert torch.allclose(total, C)
    s = loss.draw_slopes(f, y, 4000, torch.Generator().manual_seed(0))
    assert torch.allclose(s.mT @ s / 4000, C, atol=0.08)
    if len(shape) == 1:
        assert torch.allclose(loss.least(f, y), torch.zeros(5).double(), atol=1e-12)


BOXES = torch.randn(5, 4, 2, generator=G).double()


def boxes_and_kind() -> nn.Module:
    torch.manual_seed(0)
    return module_of(lambda net, x: (net.boxes(x).reshape(-1, 4, 2), net.kind(x)), boxes=(3, 8), kind=(3, 3)).double()


@pytest.mark.parametrize("loss", ["mse", nn.L1Loss(), lambda f, y: (f - y).square().mean(1)], ids=["a", "b", "c"])
def test_a_head_s_targets_may_be_flat(loss: Any) -> None:
    net = boxes_and_kind()
    problem = fl.Problem(net, (loss, "cross_entropy"), (X, (BOXES.flatten(1), KINDS)))
    f, kind = net(X)
    of_boxes = F.l1_loss(f, BOXES) if isinstance(loss, nn.L1Loss) else F.mse_loss(f, BOXES)
    truth = of_boxes + F.cross_entropy(kind, KINDS)
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(truth.detach()), rel=1e-12)


def test_one_head_has_its_softmax() -> None:
    one, plain = (
        fl.measure(fl.Lens(fl.Problem(heads(form), "cross_entropy", (X, y))), "mls(softmax=True)")
        for form, y in ((lambda f: {"a": f["a"]}, {"a": KINDS}), (lambda f: f["a"], KINDS))
    )
    assert one["mls(softmax=True)"].value == pytest.approx(plain["mls(softmax=True)"].value, rel=1e-12)


def mask_and_kind() -> nn.Module:
    """An image of classes beside one class of the whole image."""
    torch.manual_seed(0)

    def forward(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(net.trunk(x))
        return {"mask": net.mask(h), "kind": net.kind(h.mean((2, 3)))}

    return module_of(forward, trunk=nn.Conv2d(1, 3, 2), mask=nn.Conv2d(3, 2, 1), kind=(3, 2)).double()


def of_masks(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="none").mean((1, 2))


@pytest.mark.parametrize("of_mask", ["cross_entropy", of_masks], ids=["a name", "a function of one head"])
def test_a_head_may_be_an_image_of_classes(of_mask: Any) -> None:
    net, x = mask_and_kind(), torch.randn(6, 1, 3, 3).double()
    targets = {"mask": torch.randint(0, 2, (6, 2, 2)), "kind": torch.randint(0, 2, (6,))}
    problem = fl.Problem(net, {"kind": "cross_entropy", "mask": of_mask}, (x, targets))
    report = fl.measure(fl.Lens(problem), ["loss", "hessian_trace"])
    f = net(x)
    risk = F.cross_entropy(f["mask"], targets["mask"]) + F.cross_entropy(f["kind"], targets["kind"])
    assert report["loss"].value == pytest.approx(float(risk.detach()), rel=1e-12)
    assert report["hessian_trace"].value == pytest.approx(trace_of_hessian(net, risk), rel=1e-10)


def test_ignored_places_of_a_head_are_refused() -> None:
    masks = torch.tensor([[[0, 1], [1, -100]], [[0, 1], [1, 1]]])
    targets = {"mask": masks, "kind": torch.tensor([0, 1])}
    with pytest.raises(BadLoss, match="every sample must count alike"):
        fl.Problem(mask_and_kind(), "cross_entropy", (torch.randn(2, 1, 3, 3).double(), targets))


REFUSED: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "labels that fit no place": (reshaped(4, 2, 3), "cross_entropy", KINDS, BadData, r"labels of shape \(5, 2, 3\)"),
    "a tuple of outputs": (heads(as_tuple), "cross_entropy", KINDS, BadModel, "returned a tuple of 2 parts"),
    "a dict of outputs": (heads(dict), "mse", SIZES, BadModel, "returned a dict of a, b"),
    "a target without a head": (heads(dict), "mse", {"a": KINDS, "c": SIZES}, BadData, "targets for 'c', but .* a, b"),
    "losses for other heads": (heads(dict), {"a": "mse"}, {"a": KINDS, "b": SIZES}, BadLoss, "match them"),
    "losses without heads": (reshaped(2), ("mse", "mse"), SIZES, BadLoss, "2 losses are given"),
    "ignored in one head": (heads(as_tuple), ("cross_entropy", "mse"), (KINDS.masked_fill(KINDS == 2, -100), SIZES),
                            BadLoss, "every sample must count alike"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_gets_one_line(what: str) -> None:
    net, loss, y, error, words = REFUSED[what]
    with pytest.raises(error, match=words) as caught:
        fl.Problem(net, loss, (X, y))
    assert isinstance(caught.value, BadInput)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", ["mse", nn.BCEWithLogitsLoss(), nn.L1Loss()])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_one_output_a_sample_takes_whole_and_boolean_targets(loss: Any, kind: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1, 0, 1])
    net = reshaped()
    whole, floating = (
        fl.measure(fl.Lens(fl.Problem(net, loss, (X, targets))), ["loss", "ggn_trace"])
        for targets in (y.to(kind), y.double())
    )
    assert whole["loss"].value == floating["loss"].value
    assert whole["ggn_trace"].value == floating["ggn_trace"].value
