"""Each loss's value, mass and output Hessian against torch's own mean and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatlens.errors import BadData, BadLoss, UnknownName
from flatlens.problem.loss import correct
from flatlens.problem.losses import as_loss

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


def test_wrong_losses_are_refused() -> None:
    with pytest.raises(BadLoss, match=r"shape \(6,\).* gave \(\)"):
        as_loss(lambda f, y: f.sum()).check(F6, LABELS)
    with pytest.raises(BadLoss, match="other samples"):
        as_loss(lambda f, y: f.sum(1) * f.sum()).check(F6, LABELS)
    with pytest.raises(BadLoss, match="reduction='sum'"):
        as_loss(nn.MSELoss(reduction="sum"))
    with pytest.raises(UnknownName, match="did you mean cross_entropy"):
        as_loss("cross_entrop")
    with pytest.raises(BadData, match="outputs' shape"):
        as_loss("mse").values(F6, torch.zeros(6, 3))


def test_correct_knows_labels_and_one_hot_and_nothing_else() -> None:
    f = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert correct(f, torch.tensor([0, 0])).tolist() == [1, 0]
    assert correct(f, torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [1, 1]
    assert correct(f, torch.tensor([[0.3, 0.0], [0.0, 1.0]])) is None
    assert torch.isnan(correct(f, torch.tensor([0, -100]))[1])


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
    with pytest.raises(BadLoss, match="ignore_index"):
        as_loss(nn.NLLLoss(ignore_index=0))


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
