"""Each loss's value, mass and output Hessian against torch's own mean and autograd."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import trace_of_hessian
from networks import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import flatlens as fl
from flatlens.errors import BadData, BadInput, BadLoss, UnknownName
from flatlens.problem.loss_checks import require_apart
from flatlens.problem.losses import MODULE_OF, CrossEntropy, as_loss

G = torch.Generator().manual_seed(0)
F6 = torch.randn(6, 4, generator=G, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
PROBABILITIES = torch.rand(6, 4, generator=G, dtype=torch.float64).softmax(1)
IGNORED = torch.tensor([0, 1, -100, 3, 1, -100])

CASES = [
    (nn.CrossEntropyLoss(), LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.3), LABELS),
    (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
    (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), LABELS),
    (nn.CrossEntropyLoss(weight=WEIGHTS), IGNORED),
    (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), PROBABILITIES),
    (nn.MSELoss(), F6 + 1),
    (nn.BCEWithLogitsLoss(), PROBABILITIES),
    (nn.SmoothL1Loss(), F6 + 0.3),
    (nn.NLLLoss(), LABELS),
    (nn.NLLLoss(), IGNORED),
    (nn.NLLLoss(weight=WEIGHTS), IGNORED),
    (nn.NLLLoss(weight=WEIGHTS, ignore_index=1), LABELS),
    (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES),
]


@pytest.mark.parametrize(("module", "y"), CASES, ids=lambda v: type(v).__name__)
def test_a_torch_loss_keeps_its_mean_and_its_hessian(module: nn.Module, y: Tensor) -> None:
    loss = as_loss(module)
    mass = loss.mass(F6, y)
    assert float(loss.values(F6, y).sum() / mass.sum()) == pytest.approx(float(module(F6, y)), rel=1e-12)
    H = torch.autograd.functional.hessian(lambda f: module(f, y), F6)
    ours = torch.zeros(6, 4, 6, 4, dtype=torch.float64)
    for i, C in enumerate(loss.output_hessian(F6, y)):
        ours[i, :, i, :] = C / mass.sum()
    assert torch.allclose(ours, H, rtol=1e-10, atol=1e-14)


def test_a_loss_with_parameters_of_its_own_may_be_linear_in_the_outputs() -> None:
    """Its slope has a graph then, but the graph of its parameters alone."""
    weights = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    loss = as_loss(lambda f, y: (weights * f).sum(1))
    assert torch.equal(loss.output_hessian(F6, LABELS), torch.zeros(6, 4, 4, dtype=torch.float64))


def test_half_squared_error_reads_integer_labels_as_one_hot() -> None:
    loss = as_loss("half_squared_error")
    one_hot = nn.functional.one_hot(LABELS, 4).double()
    assert torch.equal(loss.values(F6, LABELS), loss.values(F6, one_hot))
    assert torch.equal(loss.output_hessian(F6, LABELS)[0], torch.eye(4, dtype=torch.float64))


def test_the_output_hessian_is_right_where_the_softmax_is_sure() -> None:
    """1 - p is 1e-13 here: computed as a difference it would have no digit left."""
    f = torch.tensor([[30.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.exp(torch.tensor(-30.0, dtype=torch.float64))
    C = as_loss("cross_entropy").output_hessian(f, torch.tensor([0]))[0]
    p0 = 1 / (1 + 2 * q)
    assert float(C[0, 0]) == pytest.approx(float(p0 * 2 * q * p0), rel=1e-12)
    assert float(C[1, 1]) == pytest.approx(float(q * p0 * (1 - q * p0)), rel=1e-12)
    assert torch.allclose(C.sum(1), torch.zeros(3, dtype=torch.float64), atol=1e-27)


@pytest.mark.parametrize("y", [torch.tensor([0, 4, 1, 0, 0, 0]), torch.tensor([0, -1, 1, 0, 0, 0])])
@pytest.mark.parametrize("name", ["cross_entropy", "half_squared_error"])
def test_a_label_out_of_range_is_named(name: str, y: Tensor) -> None:
    with pytest.raises(BadData, match=r"at sample 1 .* out of range.*0 to 3"):
        as_loss(name).values(F6, y)


@pytest.mark.parametrize("a", [0.0, 0.3])
def test_logistic_is_torchs_with_smoothed_labels(a: float) -> None:
    """Values, second derivative and smallest value; f = +-30 keeps the digits of p (1 - p)."""
    f, y = torch.tensor([[-30.0], [-1.0], [0.2], [30.0]], dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    loss, t = as_loss(f"logistic(label_smoothing={a})"), (1 - a) * y[:, None].double() + a / 2
    torchs = nn.BCEWithLogitsLoss(reduction="none")
    assert torch.allclose(loss.values(f, y), torchs(f, t)[:, 0], rtol=1e-12)
    p = 1 / (1 + torch.exp(-f.abs()))
    assert torch.allclose(loss.output_hessian(f, y)[:, 0], p * p * torch.exp(-f.abs()), rtol=1e-12, atol=0)
    slope = torch.autograd.functional.hessian(lambda f: torchs(f, t).sum(), f).diagonal(dim1=0, dim2=2)[0, 0]
    assert torch.allclose(loss.output_hessian(f, y).flatten(), slope, rtol=1e-9, atol=1e-13)
    at_best = torchs(t.logit(eps=1e-14), t)[:, 0]
    assert torch.allclose(loss.least(f, y), at_best, atol=1e-12)
    assert loss.correct(f, y).tolist() == [1, 0, 1, 0]
    assert loss.correct(f, t if a else y + 0.5) is None
    assert loss.description == ("logistic(label_smoothing=0.3)" if a else "logistic")


def test_the_options_of_a_named_loss_are_checked() -> None:
    assert as_loss("cross_entropy(label_smoothing=0.1)").settings == {"label_smoothing": 0.1}
    assert (
        as_loss("mse(label_smoothing=0.1)")
        .values(F6, LABELS)
        .allclose((F6 - 0.9 * nn.functional.one_hot(LABELS, 4) - 0.025).square().mean(1))
    )
    with pytest.raises(BadLoss, match="a number from 0 to 1"):
        as_loss("logistic(label_smoothing=2)")
    with pytest.raises(UnknownName, match="unknown option 'smoothing' of logistic"):
        as_loss("logistic(smoothing=0.1)")
    with pytest.raises(BadData, match=r"from -1 to 1.*\(y \+ 1\) / 2"):
        as_loss("logistic").values(F6[:, :1], torch.tensor([1, -1, 1, 1, 1, 1]))


def test_wrong_losses_are_refused() -> None:
    with pytest.raises(BadLoss, match=r"shape \(6,\).* returned \(\)"):
        as_loss(lambda f, y: f.sum()).check(F6, LABELS)
    with pytest.raises(BadLoss, match="other samples"):
        require_apart(as_loss(lambda f, y: f.sum(1) * f.sum()), F6, LABELS)
    with pytest.raises(BadLoss, match="reduction='sum'"):
        as_loss(nn.MSELoss(reduction="sum"))
    with pytest.raises(UnknownName, match="did you mean cross_entropy"):
        as_loss("cross_entrop")
    with pytest.raises(BadData, match="outputs' shape"):
        as_loss("mse").values(F6, torch.zeros(6, 3))


def test_correct_knows_labels_and_one_hot_and_nothing_else() -> None:
    f = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert CrossEntropy().correct(f, torch.tensor([0, 0])).tolist() == [1, 0]
    assert CrossEntropy().correct(f, torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [1, 1]
    assert CrossEntropy().correct(f, torch.tensor([[0.3, 0.0], [0.0, 1.0]])) is None
    assert torch.isnan(CrossEntropy().correct(f, torch.tensor([0, -100]))[1])


def test_targets_that_would_broadcast_are_given_the_outputs_shape() -> None:
    """(n,) against (n, 1) would compare every output with every target."""
    f, y = F6[:, :1], F6[:, 1]
    loss = as_loss(nn.HuberLoss())
    truth = nn.HuberLoss()(f[:, 0], y)
    assert float(loss.values(f, y).mean()) == pytest.approx(float(truth))
    with pytest.raises(BadLoss, match="do not fit"):
        loss.values(F6, y)


def test_any_label_may_be_the_ignored_one() -> None:
    y = torch.tensor([0, 1, 255, 3, 1, 255])
    module = nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=255, label_smoothing=0.1)
    loss = as_loss(module)
    assert float(loss.values(F6, y).sum() / loss.mass(F6, y).sum()) == pytest.approx(float(module(F6, y)))
    assert loss.output_hessian(F6, y)[2].abs().max() == 0

    class Own(nn.NLLLoss):
        def forward(self, f: Tensor, y: Tensor) -> Tensor:
            return super().forward(2 * f, y)

    with pytest.raises(BadLoss, match="ignore_index"):
        as_loss(Own(ignore_index=0))
    with pytest.raises(BadLoss, match="class weights"):
        as_loss(Own(weight=WEIGHTS))


def test_weights_of_one_row_are_taken_by_row() -> None:
    """As torch's mean over the tokens that count does, whatever the number of axes."""
    f, y = F6.reshape(2, 3, 4), PROBABILITIES.reshape(2, 3, 4)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for weight in (WEIGHTS, WEIGHTS[None]):
        module = nn.BCEWithLogitsLoss(pos_weight=weight).double()
        problem = fl.Problem(scaled_tokens(), module, ({"x": f, "attention_mask": mask}, y))
        truth = module(f[mask == 1], y[mask == 1])
        assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(truth), rel=1e-12)


def scaled_tokens() -> nn.Module:
    return module_of(
        lambda net, x, attention_mask: x * net.scale, scale=nn.Parameter(torch.ones(4, dtype=torch.float64))
    )


OF_TORCH: list[tuple[nn.Module, nn.Module, Tensor]] = [
    (nn.NLLLoss(weight=WEIGHTS, ignore_index=3), nn.LogSoftmax(1), LABELS),
    (nn.KLDivLoss(reduction="batchmean"), nn.LogSoftmax(1), PROBABILITIES),
    (
        nn.KLDivLoss(reduction="batchmean"),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LogSoftmax(2)),
        PROBABILITIES.reshape(6, 2, 2),
    ),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[:2, None]), nn.Unflatten(1, (2, 2)), PROBABILITIES.reshape(6, 2, 2)),
]


@pytest.mark.parametrize(("module", "last", "y"), OF_TORCH, ids=["weighted", "batchmean", "tokens", "channels"])
def test_losses_with_options_have_torch_s_risk_and_curvature(module: nn.Module, last: nn.Module, y: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), last).double()
    report = fl.measure(fl.Lens(fl.Problem(net, module, (F6, y))), ["loss", "hessian_trace(exact=True)"])
    risk = module.double()(net(F6), y)
    assert report["loss"].value == pytest.approx(float(risk.detach()), rel=1e-12)
    assert report["hessian_trace(exact=True)"].value == pytest.approx(trace_of_hessian(net, risk), rel=1e-10)


@pytest.mark.parametrize(("module", "y"), CASES[:7], ids=lambda v: type(v).__name__)
def test_the_least_loss_is_that_of_the_best_outputs(module: nn.Module, y: Tensor) -> None:
    """Gradient descent on the outputs alone comes down to it, and no further; hard labels are never quite met."""
    loss = as_loss(module)
    f = F6.clone().requires_grad_()
    best = torch.optim.LBFGS([f], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        best.zero_grad()
        total = loss.values(f, y).sum()
        total.backward()
        return total

    best.step(step)
    found, least = loss.values(f, y).detach(), loss.least(f.detach(), y)
    assert bool((found >= least - 1e-12).all())
    assert torch.allclose(found, least, rtol=0, atol=1e-4)


def test_the_least_loss_of_a_smoothed_label_is_its_entropy() -> None:
    least = as_loss(nn.CrossEntropyLoss(label_smoothing=0.5)).least(F6, LABELS)
    p = torch.tensor([0.625, 0.125, 0.125, 0.125], dtype=torch.float64)
    assert torch.allclose(least, -(p * p.log()).sum().expand(6), rtol=1e-12)
    assert as_loss(nn.BCEWithLogitsLoss()).least(F6, PROBABILITIES) is None


ELEMENTWISE = [
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(),
    nn.PoissonNLLLoss(),
    nn.SoftMarginLoss(),
    nn.HingeEmbeddingLoss(),
    nn.BCEWithLogitsLoss(),
    nn.MSELoss(),
]


@pytest.mark.parametrize("module", ELEMENTWISE, ids=lambda module: type(module).__name__)
def test_integer_targets_of_a_regression_are_numbers(module: nn.Module) -> None:
    """(n,) against (n, 1), and (n, N) where each output has one; labels of (n,) where n = N are refused."""
    y = torch.tensor([1, 0, 1, 1, 0, 1])
    for f, target in ((F6[:, :1], y), (F6[:, :1], y[:, None]), (F6[:, :2], torch.stack([y, 1 - y], 1))):
        truth = [float(module(row, one.double().reshape(row.shape))) for row, one in zip(f, target, strict=True)]
        assert as_loss(module).values(f, target).tolist() == pytest.approx(truth, rel=1e-12)
    if not isinstance(module, nn.MSELoss):  # which reads (n,) as classes
        with pytest.raises(BadLoss, match=r"targets of shape \(6,\) do not fit outputs of shape \(6, 6\)"):
            as_loss(module).values(F6.repeat(1, 2)[:, :6], y)


def test_class_labels_stay_labels() -> None:
    f = F6.log_softmax(1)
    for module in (nn.NLLLoss(), nn.MultiMarginLoss()):
        truth = [float(module(row[None], label[None])) for row, label in zip(f, LABELS, strict=True)]
        assert as_loss(module).values(f, LABELS).tolist() == pytest.approx(truth, rel=1e-12)
    several = torch.tensor([[3, 0, -1, 1]]).repeat(6, 1)
    truth = [float(nn.MultiLabelMarginLoss()(row, one)) for row, one in zip(f, several, strict=True)]
    assert as_loss(nn.MultiLabelMarginLoss()).values(f, several).tolist() == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(
    "y",
    [torch.tensor([1]), torch.tensor([1.0]), torch.tensor(1.0), torch.ones(1, 4), torch.ones(4, 6), torch.ones(12, 2)],
    ids=lambda y: f"{tuple(y.shape)} {y.dtype}",
)
@pytest.mark.parametrize("name", ["mse", "half_squared_error"])
def test_targets_are_one_a_sample(name: str, y: Tensor) -> None:
    """One target for all would be read as each one's, the transposed ones as others'."""
    with pytest.raises(BadData, match=r"needs targets of the outputs' shape \(6, 4\)"):
        as_loss(name).values(F6, y)
    with pytest.raises(BadLoss, match="do not fit"):
        as_loss(nn.L1Loss()).values(F6, y)


def test_a_loader_with_one_target_a_batch_is_refused() -> None:
    x = torch.randn(6, 3)
    for y in (torch.tensor([1]), torch.tensor([1.0, 0.0])):
        batches = [(x, y), (x, y)]
        for loss in ("mse", "half_squared_error", nn.SmoothL1Loss()):
            with pytest.raises(BadInput, match=r"targets of"):
                fl.Problem(nn.Linear(3, 2), loss, DataLoader(batches, batch_size=None))


def test_negative_probabilities_are_refused_and_negative_class_weights() -> None:
    y = PROBABILITIES.clone()
    y[4, 2] = -0.25
    with pytest.raises(BadData, match=r"target of -0.25 for class 2 at sample 4 of its batch.*softmax"):
        as_loss("cross_entropy").values(F6, y)
    with pytest.raises(BadData, match=r"test=.* -0.25 for class 2 at sample 4.*\(samples 0 to 5 of the data\)"):
        fl.Problem(nn.Linear(3, 4), "cross_entropy", (torch.randn(6, 3), y.abs()), test=(torch.randn(6, 3), y))
    tokens = nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (3, 4)))
    with pytest.raises(BadData, match=r"-0.25 for class 1 at token 6"):  # place 2 of sample 1: classes lie in axis 1
        fl.Problem(tokens, "cross_entropy", (torch.randn(2, 3), y.reshape(2, 3, 4)))
    with pytest.raises(BadLoss, match="class weights must be finite and not negative, got -2"):
        as_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, -2.0])))
    with pytest.raises(BadLoss, match="class weights must be finite and not negative, got nan"):
        as_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, torch.nan])))


LABELS_IN_OTHER_FORMS = {
    "a column": (LABELS[:, None], r"got \(6, 1\): y.flatten\(\) makes"),
    "a column of floats": (LABELS[:, None].float(), r"float32: y.flatten\(\).long\(\) makes"),
    "floats": (LABELS.float(), r"float32: y.long\(\) makes"),
    "one-hot whole numbers": (nn.functional.one_hot(LABELS, 4), r"got \(6, 4\): y.argmax\(1\) turns"),
    "numbers": (LABELS + 0.5, r"got \(6,\) torch.float32$"),
    "truth values": (LABELS[:, None] > 0, r"got \(6, 1\): y.flatten\(\) makes"),
    "a number": (torch.tensor(1.0), r"got \(\) torch.float32$"),
}


@pytest.mark.parametrize("form", LABELS_IN_OTHER_FORMS)
def test_labels_in_another_form_are_told_how_to_become_labels(form: str) -> None:
    y, words = LABELS_IN_OTHER_FORMS[form]
    with pytest.raises(BadData, match=words):
        as_loss("cross_entropy").values(F6, y)


def test_one_output_is_told_its_loss() -> None:
    with pytest.raises(BadData, match=r"one output, which cannot tell classes apart.*BCEWithLogitsLoss\(\)$"):
        as_loss("cross_entropy").values(F6[:, :1], LABELS)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weighted"])
def test_probabilities_of_another_sum_weigh_their_sample(weight: Tensor | None, smoothing: float) -> None:
    """C = (sum_k a_k) (diag p - p p^T) holds for every a that is not negative; torch divides by n all the same."""
    y = PROBABILITIES * torch.tensor([0.0, 0.5, 1.0, 2.0, 7.0, 1e-3]).double()[:, None]
    module = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
    loss = as_loss(module)
    assert float(loss.values(F6, y).sum() / loss.mass(F6, y).sum()) == pytest.approx(float(module(F6, y)), rel=1e-12)
    C = loss.output_hessian(F6, y)
    truth = torch.autograd.functional.hessian(lambda f: 6 * module(f, y), F6)
    assert torch.allclose(C, torch.stack([truth[i, :, i] for i in range(6)]), rtol=1e-10, atol=1e-14)
    u = torch.randn(6, 4, generator=G, dtype=torch.float64)
    assert torch.allclose(loss.output_hessian_product(F6, y)(u), (C @ u[..., None])[..., 0], rtol=1e-10, atol=1e-14)
    best = loss.values((loss._shares(F6, y) / loss._shares(F6, y).sum(1, keepdim=True)).nan_to_num(1.0).log(), y)
    assert torch.allclose(loss.least(F6, y), best, rtol=1e-10, atol=1e-12)


def test_a_class_of_losses_is_no_loss() -> None:
    with pytest.raises(BadLoss, match=r"write CrossEntropyLoss\(\)"):
        as_loss(nn.CrossEntropyLoss)


def several_outputs(shapes: tuple[tuple[int, ...], ...], last: Callable[[Tensor], Tensor]) -> nn.Module:
    """Outputs of any shapes: one, or a tuple."""

    def forward(net: nn.Module, x: Tensor) -> Any:
        h = net.hidden(x).tanh()
        each = [last(head(h).reshape(-1, *shape)) for head, shape in zip(net.heads, shapes, strict=True)]
        return each[0] if len(each) == 1 else tuple(each)

    return module_of(
        forward,
        hidden=nn.Linear(3, 4),
        heads=nn.ModuleList(nn.Linear(4, torch.Size(shape).numel()) for shape in shapes),
    )


OF_CLASSES = ("CrossEntropyLoss", "soft CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "MultiLabelMarginLoss")
OF_NUMBERS = ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "KLDivLoss", "BCELoss",
              "BCEWithLogitsLoss", "SoftMarginLoss", "HingeEmbeddingLoss", "MultiLabelSoftMarginLoss")  # fmt: skip
OF_TWO = ("GaussianNLLLoss", "MarginRankingLoss", "CosineEmbeddingLoss")
DRAWS = 25


def plain(f: Tensor) -> Tensor:
    return f


def drawn(name: str, seed: int) -> tuple[nn.Module, nn.Module, Tensor, Tensor, Callable[[Any], Tensor]]:
    """A loss of torch's with drawn options, a network, inputs and targets of drawn shapes, and the risk of its outputs.

    Numbers of samples, classes and places often coincide.
    """
    choose, g = random.Random(f"{name} {seed}"), torch.Generator().manual_seed(seed)
    n = choose.randint(1, 5)
    C = max(2, choose.choice([n, 2, 3, 4]))
    places = [choose.choice([1, 2, 3, C, n]) for _ in range(choose.randint(0, 3))]
    shape: tuple[int, ...] = (C, *places)

    def rand(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=g, dtype=torch.float64)

    def perhaps(value: Tensor) -> Tensor | None:
        return choose.choice([value, None])

    options: dict[str, Any] = {}
    last: Callable[[Tensor], Tensor] = plain
    shapes: tuple[tuple[int, ...], ...] = ()
    if name in ("CrossEntropyLoss", "NLLLoss"):
        y, ignored = torch.randint(0, C, (n, *places), generator=g), choose.choice([-100, 0, C - 1])
        y = torch.where(rand(n, *places) < choose.choice([0, 0.3]), ignored, y)
        y.flatten()[0] = 0 if ignored else 1
        options = {"weight": perhaps(rand(C) + 0.1), "ignore_index": ignored}
        if name == "NLLLoss":
            last = nn.LogSoftmax(1)
        else:
            options["label_smoothing"] = choose.choice([0.0, 0.3])
    elif name == "soft CrossEntropyLoss":
        options = {"weight": perhaps(rand(C) + 0.1), "label_smoothing": choose.choice([0.0, 0.3])}
        y = choose.choice([rand(n, *shape), rand(n, *shape).softmax(1)])
    elif name == "MultiMarginLoss":
        shape, y = (C,), torch.randint(0, C, (n,), generator=g)
        options = {"weight": perhaps(rand(C)), "margin": choose.random(), "p": choose.choice([1, 2])}
    elif name == "MultiLabelMarginLoss":
        shape, y = (C,), torch.stack([torch.randperm(C, generator=g) for _ in range(n)])
        y[:, choose.randint(1, C - 1) :] = -1
    elif name == "MultiLabelSoftMarginLoss":
        shape = (*places, C)
        y, options = (rand(n, *shape) > 0.5).double(), {"weight": perhaps(rand(*choose.choice([shape, (C,)])))}
    elif name == "GaussianNLLLoss":
        shape, last = choose.choice([shape, shape, (1,), ()]), nn.Softplus()
        shapes = (shape, choose.choice([shape, (*shape[:-1], 1)]) if shape else shape)
        y, options = rand(n, *shape), {"full": choose.choice([True, False])}
    elif name in OF_TWO:
        shapes = (choose.choice([(), (C,)]) if name == "MarginRankingLoss" else (C,),) * 2
        y = torch.where(rand(n, *(shapes[0] if name == "MarginRankingLoss" else ())) > 0.5, 1.0, -1.0).double()
        options = {"margin": choose.random()}
    else:
        shape = choose.choice([shape, shape, ()])
        y = rand(n, *shape)
        if name == "KLDivLoss":
            options = {"reduction": choose.choice(["mean", "batchmean"]), "log_target": choose.choice([True, False])}
            y = y.log() if options["log_target"] else y
        elif name == "PoissonNLLLoss":
            options, y = {"full": choose.choice([True, False]), "log_input": choose.choice([True, False])}, 3 * y
            last = plain if options["log_input"] else nn.Softplus()
        elif name in ("HingeEmbeddingLoss", "SoftMarginLoss"):
            y = torch.where(y > 0.5, 1.0, -1.0).double()
        elif name.startswith("BCE"):
            last = nn.Sigmoid() if name == "BCELoss" else plain
            tail = shape[choose.randint(0, len(shape) - 1) :] if shape else (1,)
            options = {"weight": perhaps(rand(*tail) + 0.1)}
            if name == "BCEWithLogitsLoss":
                options["pos_weight"] = perhaps(rand(*tail) + 0.1)
    torch.manual_seed(seed)
    module, net = getattr(nn, name.split()[-1])(**options), several_outputs(shapes or (shape,), last).double()

    def risk(f: Any) -> Tensor:
        given = (f[0], y, f[1]) if name == "GaussianNLLLoss" else (*f, y) if name in OF_TWO else (f, y)
        found: Tensor = module(*given)
        return found

    return module, net, torch.randn(n, 3).double(), y, risk


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", [*OF_CLASSES, *OF_NUMBERS, *OF_TWO])
def test_the_loss_is_torch_s_own_number_in_every_shape_that_torch_takes(name: str) -> None:
    for seed in range(DRAWS):
        module, net, x, y, risk = drawn(name, seed)
        found = fl.Lens(fl.Problem(net, module, (x, y))).outcomes("data").risk
        assert found == pytest.approx(float(risk(net(x)).detach()), rel=1e-12, abs=1e-14), seed


def trace_in(tensors: list[Tensor], risk: Tensor) -> float:
    """The trace of the second derivative of a scalar, by explicit double backward; it may be linear."""
    total = 0.0
    for p in tensors:
        (slope,) = torch.autograd.grad(risk, p, create_graph=True, materialize_grads=True)
        for k in range(p.numel() if slope.requires_grad else 0):
            (row,) = torch.autograd.grad(slope.flatten()[k], p, retain_graph=True, materialize_grads=True)
            total += float(row.flatten()[k])
    return total


def made_linear(net: nn.Module, x: Tensor, weights: dict[str, Tensor], moved: dict[str, Tensor]) -> Any:
    """The outputs at moved weights, to first order."""
    along = {key: moved[key] - weights[key] for key in weights}
    at, by = torch.func.jvp(lambda w: torch.func.functional_call(net, w, (x,)), (weights,), (along,))
    return at + by if isinstance(at, Tensor) else tuple(f + df for f, df in zip(at, by, strict=True))


ONCE = ("MultiMarginLoss", "MultiLabelMarginLoss")
TWICE = [name for name in (*OF_CLASSES, *OF_NUMBERS, *OF_TWO) if name not in ONCE]


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", TWICE)
def test_its_curvature_is_that_of_torch_s_own_number_in_every_shape(name: str) -> None:
    """The Hessian's trace by explicit double backward, and the Gauss-Newton trace as that of outputs made linear."""
    for seed in range(2):
        module, net, x, y, risk = drawn(name, seed)
        problem = fl.Problem(net, module, (x, y))
        report = fl.measure(fl.Lens(problem, outputs="exact"), ["hessian_trace(exact=True)", "ggn_trace"])
        truth = trace_in(list(net.parameters()), risk(net(x)))
        assert report["hessian_trace(exact=True)"].value == pytest.approx(truth, rel=1e-8, abs=1e-10), seed
        weights = {key: p.detach() for key, p in net.named_parameters()}
        moved = {key: p.clone().requires_grad_() for key, p in weights.items()}
        truth = trace_in(list(moved.values()), risk(made_linear(net, x, weights, moved)))
        assert report["ggn_trace"].value == pytest.approx(truth, rel=1e-8, abs=1e-10), seed


def test_torch_losses_that_take_something_else_are_refused_in_one_line() -> None:
    x, y = torch.randn(6, 3), LABELS
    for module, words in (
        (nn.CTCLoss(), r"from \(log_probs, targets, input_lengths, target_lengths\), not from \(outputs, targets\)"),
        (nn.TripletMarginLoss(), r"from \(anchor, positive, negative\)"),
        (F.ctc_loss, r"from \(log_probs, targets, input_lengths, target_lengths\), not from \(outputs, targets\)"),
        (F.triplet_margin_loss, r"from \(anchor, positive, negative\)"),
        (lambda f: f.sum(1), r"from \(f\), not from \(outputs, targets\)"),
        (lambda f, y, weights: f.sum(1), r"from \(f, y, weights\), not from"),
        (partial(lambda f, y, *, by: f.sum(1) * by), r"from \(f, y, by\), not from"),
        (nn.GaussianNLLLoss(), r"needs two outputs, such as \(mean, variance\)"),
        (nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3]), "weights of a layer"),
        (nn.LinearCrossEntropyLoss(4, 4), "weights of a layer"),
        (nn.BCEWithLogitsLoss(weight=torch.rand(6, 1)), r"weight of shape \(6, 1\) has a value for each sample"),
        (nn.BCELoss(weight=torch.rand(6, 4)), r"weight of shape \(6, 4\) has a value for each sample"),
    ):
        targets = y if not isinstance(module, nn.BCELoss | nn.BCEWithLogitsLoss) else torch.rand(6, 4)
        with pytest.raises(BadLoss, match=words) as caught:
            fl.Problem(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()), module, (x, targets))
        assert "\n" not in str(caught.value)
    with pytest.raises(BadLoss, match=r"pos_weight of shape \(6,\) has a value for each sample"):
        fl.Problem(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), nn.BCEWithLogitsLoss(pos_weight=torch.rand(6)),
                   (x, torch.rand(6)))  # fmt: skip


@pytest.mark.parametrize("lengths", [(3, 2), (2, 3), (3, 3, 4), (3, 3)])
def test_batches_of_tokens_may_be_square(lengths: tuple[int, ...]) -> None:
    """Labels (n, 3) of outputs (n, 3, 3) are those of tokens where another batch, or a mask, shows it."""
    torch.manual_seed(0)
    net = nn.Linear(2, 3).double()
    batches = [(torch.randn(2, T, 2).double(), torch.randint(0, 3, (2, T))) for T in lengths]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    rows = [(net(x), y) for x, y in batches]
    tokens = F.cross_entropy(torch.cat([f.flatten(0, 1) for f, _ in rows]), torch.cat([y.flatten() for _, y in rows]))
    square = set(lengths) == {3}
    truth = torch.stack([F.cross_entropy(f, y) for f, y in rows]).mean() if square else tokens
    problem = fl.Problem(net, nn.CrossEntropyLoss(), loader)
    assert fl.Lens(problem).outcomes("data").risk == pytest.approx(float(truth.detach()), rel=1e-12)
    if not square:  # also where one alone is left
        one = problem.with_changes(data=batches[lengths.index(3)])
        f, y = rows[lengths.index(3)]
        own = F.cross_entropy(f.flatten(0, 1), y.flatten())
        assert fl.Lens(one).outcomes("data").risk == pytest.approx(float(own.detach()), rel=1e-12)
    assert ("as torch's cross-entropy reads them" in fl.measure(fl.Lens(problem), "loss")["loss"].note) == square
    masked = fl.Problem(net, "cross_entropy", loader, forward=lambda m, b: (m(b[0]), b[1], torch.ones_like(b[1])))
    assert fl.Lens(masked).outcomes("data").risk == pytest.approx(float(tokens.detach()), rel=1e-12)
    assert not fl.measure(fl.Lens(masked), "loss")["loss"].note


@pytest.mark.parametrize("shape", [(3, 4), (4, 4), (4, 1), (1, 4)])
def test_probabilities_that_add_up_over_tokens_classes_alone_are_told(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(3, shape[0] * shape[1]), nn.Unflatten(1, shape)).double(),
        torch.randn(2, 3).double(),
    )
    for axis in (1, 2):
        problem = fl.Problem(net, nn.CrossEntropyLoss(), (x, torch.rand(2, *shape).double().softmax(axis)))
        note = fl.measure(fl.Lens(problem), "loss")["loss"].note
        assert ("if they are tokens, say so by a mask" in note) == (axis == 2), axis


@pytest.mark.parametrize("kind", dict.fromkeys(MODULE_OF.values()), ids=lambda kind: kind.__name__)
def test_a_loss_of_torch_has_its_own_name_and_short_ones(kind: type[nn.Module]) -> None:
    plain = kind.__name__
    for name in (
        plain,
        f"nn.{plain}",
        f"torch.nn.{plain}()",
        next(f.__name__ for f, one in MODULE_OF.items() if one is kind),
    ):
        assert as_loss(name).description == as_loss(kind()).description
    if kind is not nn.BCELoss:
        assert as_loss(plain.removesuffix("Loss").lower()).description == as_loss(kind()).description


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bce", r"unknown loss 'bce': did you mean BCELoss, BCEWithLogitsLoss \(of torch.nn\)\?"),
        ("BCE_loss", "did you mean BCELoss, BCEWithLogitsLoss"),
        ("bce_logits", "did you mean .*BCEWithLogitsLoss"),
        ("hubber", "did you mean HuberLoss"),
        ("", "choose from"),
    ],
)
def test_a_name_that_is_no_one_loss_s_names_the_nearest(name: str, words: str) -> None:
    with pytest.raises(UnknownName, match=words):
        fl.Problem(nn.Linear(3, 4), name, (torch.randn(6, 3), LABELS))


def best_constant(loss: torch.nn.Module, y: torch.Tensor, outputs: int) -> float:
    """The smallest mean loss over outputs that are the same for all samples, by Newton's steps of L-BFGS."""
    f = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([f], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def risk() -> torch.Tensor:
        search.zero_grad()
        value = loss(f.expand(len(y), -1), y)
        value.backward()
        return value

    search.step(risk)
    return float(risk().detach())


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"weight": torch.tensor([1.0, 2.0, 0.5]).double()}, {"label_smoothing": 0.2},
     {"label_smoothing": 0.2, "weight": torch.tensor([1.0, 2.0, 0.5]).double()}],
)  # fmt: skip
def test_the_constant_fit_is_the_best_one_for_classes(options) -> None:
    loss = torch.nn.CrossEntropyLoss(**options)
    y = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2] * 40)
    net = torch.nn.Linear(2, 3).double()
    found = fl.Problem(net, loss, (torch.zeros(len(y), 2).double(), y)).constant
    assert found is not None
    seen = y[y != options.get("ignore_index", -100)]
    assert found.share == pytest.approx(0.5 if "ignore_index" in options else 0.4)
    assert found.loss == pytest.approx(best_constant(loss, y, 3), abs=3 / len(seen))  # less the bias of the fit
    assert found.loss <= float(loss(torch.zeros(len(y), 3).double(), y)) + 1e-12


def test_the_constant_fit_of_few_samples_is_no_better_than_equal_probabilities() -> None:
    net, y = torch.nn.Linear(2, 100).double(), torch.arange(5)
    found = fl.Problem(net, "cross_entropy", (torch.zeros(5, 2).double(), y)).constant
    assert found is not None
    assert found.loss == pytest.approx(math.log(100))


@pytest.mark.parametrize("name", ["mse", "half_squared_error"])
def test_the_constant_fit_of_numbers_is_their_variance(name: str) -> None:
    y = torch.randn(50, 2, dtype=torch.float64) + 3
    found = fl.Problem(torch.nn.Linear(2, 2).double(), name, (torch.zeros(50, 2).double(), y)).constant
    assert found is not None
    assert found.loss == pytest.approx(float(y.var(0).sum()) / 2)  # of two outputs, both losses take half
    assert found.share == 1
    labels = torch.tensor([0, 1, 1, 1] * 5)
    of_classes = fl.Problem(torch.nn.Linear(2, 2).double(), name, (torch.zeros(20, 2).double(), labels)).constant
    assert of_classes is not None
    assert of_classes.share == pytest.approx(0.75)


def test_the_constant_fit_of_tokens_is_over_those_that_count() -> None:
    x, y = torch.zeros(6, 4, 2).double(), torch.tensor([[0, 1, 1, -100]] * 6)
    found = fl.Problem(torch.nn.Linear(2, 2).double(), "cross_entropy", (x, y)).constant
    assert found is not None
    assert found.share == pytest.approx(2 / 3)
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert found.loss == pytest.approx(entropy + 1 / 36)


def test_equal_targets_and_other_losses_have_no_constant_fit() -> None:
    net, x = torch.nn.Linear(2, 3).double(), torch.zeros(4, 2).double()
    assert fl.Problem(net, "cross_entropy", (x, torch.ones(4, dtype=torch.long))).constant is None
    assert fl.Problem(net, "mse", (x, torch.ones(4, 3).double())).constant is None
    assert fl.Problem(net, torch.nn.HuberLoss(), (x, torch.randn(4, 3).double())).constant is None
