"""The zoo's brute force, and its verdicts: against closed forms, on networks that are wrong, on networks that cache."""

import pytest
import torch
from benchmarks.zoo import page, truth
from benchmarks.zoo.case import Case, lively, measured, share_of
from networks import module_of
from torch import nn

X = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2])


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3)).double()


def test_of_a_linear_network_all_is_known(linear):
    found, shares = truth.first_order(linear, X)
    W = linear[0].weight.detach()
    assert shares == {"0.weight": pytest.approx(3 * float(X.square().sum()) / 2), "0.bias": pytest.approx(3)}
    assert found["interpolation_sharpness"] == pytest.approx(sum(shares.values()))
    assert found["mls"] == pytest.approx(float(torch.linalg.matrix_norm(W, 2)))
    p = linear(X).detach().softmax(1)
    impure = 1 - p.square().sum(1)
    assert found["ggn_trace"] == pytest.approx(float((impure * (1 + X.square().sum(1))).mean()))


def test_the_hessian_product_is_the_hessian_times_the_vector(linear):
    v = truth.direction(linear)

    def risk(flat):
        W, b = flat[:12].view(3, 4), flat[12:]
        return nn.functional.cross_entropy(X @ W.T + b, Y)

    at = torch.cat([p.detach().flatten() for p in linear.parameters()])
    H = torch.autograd.functional.hessian(risk, at)
    torch.testing.assert_close(truth.hessian_product(linear, X, Y, v), H @ v)
    apart = truth.by_differences(linear, X, Y, v, H @ v)
    assert max(apart.values()) < 1e-8
    assert truth.by_differences(linear, X, Y, v, 1.01 * (H @ v))["hessian_product"] > 5e-3


def test_texts_are_differentiated_at_the_first_embedding():
    torch.manual_seed(0)
    net = module_of(
        lambda net, input_ids: net.head(net.words(input_ids).square().sum(1)),
        words=nn.Embedding(6, 4, padding_idx=0),
        head=(4, 3),
    ).double()
    ids = torch.tensor([[1, 2, 2], [3, 4, 5]])
    found, shares = truth.first_order(net, {"input_ids": ids})
    looked_up = net.words(ids).detach()
    J = net.head.weight.detach()[None, :, None, :] * 2 * looked_up[:, None]  # (n, N, T, D)
    assert found["mls"] == pytest.approx(float(torch.linalg.matrix_norm(J.flatten(2), 2).mean()))
    repeated = (J[0, :, 0].square() + (J[0, :, 1] + J[0, :, 2]).square()).sum()
    assert shares["words.weight"] == pytest.approx(float(repeated + J[1].square().sum()) / 2)
    assert truth.direction(net)[:8].tolist()[:4] == [0, 0, 0, 0]  # the row of padding


class Keeps(nn.Module):
    """Keeps its scale, as it once made it, until it is trained: so timm's levit keeps its attention biases."""

    def __init__(self):
        super().__init__()
        self.body, self.scale, self.kept = nn.Linear(4, 3), nn.Parameter(torch.tensor([0.3])), None

    def train(self, mode=True):
        if mode:
            self.kept = None
        return super().train(mode)

    def forward(self, x):
        self.kept = self.kept if self.kept is not None else self.scale.exp()
        return self.body(x) * self.kept


def test_a_network_that_keeps_what_it_made_is_run_anew():
    torch.manual_seed(0)
    net = Keeps().double().eval()
    with torch.no_grad():
        net(X)  # keeps a scale that has no derivative
    _, shares = truth.first_order(net, X)
    assert shares["scale"] == pytest.approx(float(net(X).detach().square().sum(1).mean()))


def patches() -> nn.Module:
    """A convolution and its norm, whose gradient comes tokens first."""
    return module_of(
        lambda net, x: net.head(torch.tanh(net.norm(net.conv(x)).flatten(2).transpose(1, 2))).mean(1),
        conv=nn.Conv2d(3, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        head=(4, 3),
    )


def test_a_norm_whose_gradient_is_transposed_is_differentiated_rightly():
    torch.manual_seed(0)
    net, x = patches().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    lively(net, torch.randn(16, 3, 4, 4, dtype=torch.float64))
    with truth.evaluated(net):
        v = truth.direction(net)
        apart = truth.by_differences(net, x, Y, v, truth.hessian_product(net, x, Y, v))
    assert max(apart.values()) < 1e-6


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_without_second_derivative_is_made_of_those_with(linear, inplace):
    net = nn.Sequential(linear, nn.Hardsigmoid(inplace=inplace), nn.Linear(3, 3)).double()
    with truth.evaluated(net):
        v = truth.direction(net)
        apart = truth.by_differences(net, X, Y, v, truth.hessian_product(net, X, Y, v))
        outputs = net(X)
    assert max(apart.values()) < 1e-8
    torch.testing.assert_close(outputs, net(X))


def test_a_verdict_can_be_wrong(linear, monkeypatch):
    one = Case(linear, X, Y)
    row = measured(one)
    assert page.verdict(row) == "right"
    assert set(row["errors"]) == set(page.COLUMNS)
    honest = truth.first_order

    def false(model, x):
        totals, shares = honest(model, x)
        return totals | {"mls": totals["mls"] * (1 + 1e-7)}, shares | {"0.bias": 3.001}

    monkeypatch.setattr(truth, "first_order", false)
    assert page.verdict(measured(one, differences=False)) == "wrong: S of a layer (0), MLS"


def test_what_is_undefined_or_refused_is_not_right():
    row = measured(Case(nn.Sequential(nn.Linear(4, 3)).double(), X, Y), differences=False)
    assert page.verdict(row | {"troubles": ["refused: no"]}) == "refused: no"
    assert page.verdict({"errors": {"mls": float("nan")}, "troubles": []}) == "wrong: MLS"


def test_a_layer_s_share_is_what_is_not_listed_by_itself():
    shares = {"a.weight": 1.0, "a.bias": 2.0, "a.b.weight": 4.0}
    assert share_of("a", shares, ["a"]) == 3
    assert share_of("a", shares, ["a", "a.bias"]) == 1
    assert share_of("a.b.weight", shares, ["a"]) == 4


def test_the_page_says_how_many_are_right(linear):
    good = measured(Case(linear, X, Y))
    text = page.text({"timm:a": good, "timm:b": {"errors": {}, "troubles": ["not done in 1 s"]}})
    assert "1 of 2 right" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| `a`")]
    heads = next(line for line in text.splitlines() if line.startswith("| network"))
    assert line.count("|") == heads.count("|")
    assert line.endswith("| right |")
    assert "| 15 |" in line
    assert "not done in 1 s" in text
