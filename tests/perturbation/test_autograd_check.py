"""A network that changes its derivative is told from one that has kinks, ties and jumps."""

import warnings

import pytest
import torch
from networks import module_of, tied_words
from torch import nn

import flatlens as fl
from flatlens.perturbation.autograd_check import moved_by_rounding, other_derivative


class Reversed(torch.autograd.Function):
    """The identity, whose derivative is said to be -1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        return -slope


def rounded(h):
    return h + (torch.round(h) - h).detach()


CHANGED = {
    "gradient reversal": Reversed.apply,
    "gate without a derivative": lambda h: h * torch.sigmoid(h).detach(),
    "straight-through rounding": rounded,
    "norm without a derivative": lambda h: h / (h.square().mean(1, keepdim=True) + 1e-6).sqrt().detach(),
}
HONEST = {
    "nothing": lambda h: h,
    "mask of signs": lambda h: h * (h.detach() > 0),
    "largest alone": lambda h: h * (h == h.max(1, keepdim=True).values),
    "jumps": lambda h: torch.round(4 * h.detach()) + h,
    "clamped at the ends of its range": lambda h: h.clamp(0, 1),
}


def around(between, before=lambda x: x) -> nn.Module:
    """Two linear layers, with a function between them and one before."""
    return module_of(
        lambda net, x: net.fc2(net.between(torch.relu(net.fc1(net.before(x))))),
        fc1=(10, 32),
        fc2=(32, 3),
        between=between,
        before=before,
    )


def shifted(by) -> nn.Module:
    return module_of(lambda net, x: x + net.by, by=by)


def said(network, x, dtype=torch.float32, **options):
    torch.manual_seed(0)
    y = torch.arange(len(x)) % 3
    problem = fl.Problem(network.to(dtype), "cross_entropy", (x.to(dtype), y), **options)
    return "".join(other_derivative(problem, problem.measured()))


@pytest.fixture
def x():
    return torch.randn(40, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHANGED)
def test_another_derivative_is_seen(name, dtype, x):
    torch.manual_seed(0)
    assert said(around(CHANGED[name]), x, dtype).startswith("autograd's derivative is not the function's")


@pytest.mark.parametrize("cut", ["inputs", "weights"])
def test_only_the_numbers_of_that_side_say_so(cut, x):
    """The inputs' own norm without a derivative leaves the curvature right, the weights' the Jacobian."""
    torch.manual_seed(0)

    class Scaled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight / self.weight.detach().norm())

    norm = {"inputs": lambda x: x / x.detach().norm(dim=1, keepdim=True), "weights": lambda x: x}[cut]
    network = nn.Sequential(around(HONEST["nothing"], before=norm), Scaled(3, 3) if cut == "weights" else nn.Tanh())
    problem = fl.Problem(network.double(), "mse", (x.double(), torch.zeros(40, 3)))
    names = {"hessian_trace": "weights", "relative_flatness": "weights", "mls": "inputs"}
    report = fl.measure(fl.Lens(problem), list(names))
    for name, side in names.items():
        expected = f"the function's, with respect to the {side}"
        assert (expected in report[name].note) == (side == cut), (name, report[name].note)
        assert ("derivative" in report[name].note) == (side == cut)


def test_an_input_that_forward_makes_differentiable_gives_no_warning(x):
    def forward(net: nn.Module, x):
        with torch.enable_grad():
            x.requires_grad_(True)
            return torch.autograd.grad(net.energy(x).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    net = module_of(forward, energy=nn.Sequential(nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 1))).double()
    problem = fl.Problem(net, "mse", (x.double(), torch.zeros(40, 10)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other_derivative(problem, problem.measured()) == ("", "")
        assert fl.measure(fl.Lens(problem), "mls")["mls"].note == ""


def test_inputs_without_a_derivative_are_seen(x):
    torch.manual_seed(0)
    assert said(around(HONEST["nothing"], before=torch.Tensor.detach), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("seed", range(5))
def test_kinks_and_ties_are_none(name, dtype, seed):
    """Also where biases are zero, half the inputs are, and the network clamps at the inputs' own ends."""
    torch.manual_seed(seed)
    network = around(HONEST[name], before=HONEST["clamped at the ends of its range"])
    nn.init.zeros_(network.fc1.bias)
    black = torch.rand(40, 10).clamp(0.5, 1) * 2 - 1
    if name == "jumps":
        assert "nan" not in said(network, black, dtype)  # its steps are changes of the function, seen or not
    else:
        assert said(network, black, dtype) == ""


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_rounding_of_large_or_saturated_outputs_is_none(offset, x):
    for seed in range(10):
        torch.manual_seed(seed)
        far = nn.Sequential(around(HONEST["nothing"]), shifted(offset))
        assert said(far, x) == ""
        last = around(HONEST["nothing"])
        with torch.no_grad():
            last.fc2.weight.mul_(offset)
        for end in (nn.Softmax(1), nn.Tanh()):
            assert said(nn.Sequential(last, end), x[:3]) == ""


def test_a_network_that_fails_beside_its_inputs_is_measured_all_the_same(x):
    def between_0_and_1(x):
        assert bool(((x >= 0) & (x <= 1)).all())
        return x

    network = around(HONEST["nothing"], before=between_0_and_1)
    assert said(network, x.clamp(0, 1)) == ""


def test_a_network_whose_weights_take_much_of_the_memory_is_not_tested(x):
    torch.manual_seed(0)
    assert said(around(CHANGED["gradient reversal"]), x, memory="4KiB") == ""


def test_every_number_that_depends_on_it_says_so(x):
    torch.manual_seed(0)
    network = around(CHANGED["gradient reversal"])
    report = fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", (x, torch.arange(40) % 3))), "pass")
    noted = {name.partition(".")[0] for (name, _), e in report.items() if "derivative is not the function's" in e.note}
    assert {"mls", "interpolation_sharpness", "relative_flatness_ggn", "log_volume", "fisher_rao"} <= noted
    assert not noted & {"loss", "accuracy", "weight_norm", "output_norm", "feature_norm"}
    honest = fl.measure(
        fl.Lens(fl.Problem(around(HONEST["nothing"]), "cross_entropy", (x, torch.arange(40) % 3))), "pass"
    )
    assert not any("derivative is not the function's" in e.note for e in honest.values())


LAST = {"softmax": nn.Softmax(1), "log-softmax": nn.LogSoftmax(1)}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 16.0])
def test_rounding_of_saturated_outputs_is_told(last, dtype, margin, x):
    """1 - p is a difference of almost equal numbers: at p = 1 - 2e-7 float32 has lost much of it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3), LAST[last]).to(dtype)
    with torch.no_grad():
        network[2].bias[0] += margin
    labels = torch.zeros(len(x), dtype=torch.long)
    loss, targets = ("mse", torch.eye(3)[labels]) if last == "softmax" else (nn.NLLLoss(), labels)
    report = fl.measure(
        fl.Lens(fl.Problem(network, loss, (x, targets))), ["interpolation_sharpness", "mls", "weight_norm"]
    )
    much = margin > 0 and dtype == torch.float32
    for name, where in (("interpolation_sharpness", "weights"), ("mls", "inputs")):
        assert (f"rounding in float32 moves the derivative in the {where} by up to" in report[name].note) == much
    assert "rounding" not in report["weight_norm"].note


def test_rounding_is_not_looked_at_where_the_copy_does_not_run(x):
    class Narrow(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("float32 alone")
            return super().forward(x).mul(100).softmax(1)

    problem = fl.Problem(Narrow(10, 3), "mse", (x, torch.zeros(len(x), 3)))
    assert moved_by_rounding(problem, problem.measured()) == ("", "")


def test_a_copy_that_draws_other_numbers_says_nothing_of_rounding(x):
    class Masked(nn.Linear):
        def forward(self, x):
            numbers = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
            return super().forward(x * (numbers > 0.5))

    problem = fl.Problem(Masked(10, 3), "mse", (x, torch.zeros(len(x), 3)))
    assert moved_by_rounding(problem, problem.measured()) == ("", "")


def rmsnorm(inside) -> nn.Module:
    """As transformers has it: whatever the network was converted to, it computes in a dtype of its own."""

    def forward(net: nn.Module, h):
        wide = h.to(net.inside)
        return net.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)

    return module_of(forward, weight=nn.Parameter(torch.ones(8)), inside=inside)


def with_norm(inside, dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 8), rmsnorm(inside), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


NAMES = ["sharpness(rtol=1e-09)", "hessian_trace(exact=True)", "mls", "weight_norm"]


def test_a_network_that_computes_in_float32_inside(x):
    data = (x, torch.arange(40) % 3)
    coarse, fine = (fl.Problem(with_norm(one), "cross_entropy", data) for one in (torch.float32, torch.float64))
    found, truth = (fl.measure(fl.Lens(problem), NAMES) for problem in (coarse, fine))
    words = "in float32 inside: derivatives are good to some 1e-07, second ones to 1e-06"
    for name in NAMES:
        assert (words in found[name].note) == (name != "weight_norm")
        assert "inside" not in truth[name].note
    value, residual = found[NAMES[0]].value, float(found[NAMES[0]].arrays["residuals"][0])
    assert abs(value - truth[NAMES[0]].value) <= residual
    assert residual == pytest.approx(10 * torch.finfo(torch.float32).eps * value)


@pytest.mark.parametrize("seed", [0, 2])
def test_another_derivative_is_seen_through_float32_inside(seed):
    torch.manual_seed(seed)
    net, *data = tied_words()
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", tuple(data))), "ggn_trace")
    assert "autograd's derivative is not the function's" in report["ggn_trace"].note


def test_constants_in_float32_leave_a_network_in_float64(x):
    class Scaled(nn.Linear):
        def forward(self, x):
            scale = torch.linspace(0.5, 1.5, 10, dtype=torch.float32)
            return super().forward(x * scale).tanh()

    problem = fl.Problem(Scaled(10, 3).double(), "mse", (x.double(), torch.zeros(len(x), 3).double()))
    assert moved_by_rounding(problem, problem.measured()) == ("", "")


def test_a_network_in_float32_may_compute_in_it(x):
    problem = fl.Problem(with_norm(torch.float32, torch.float32), "cross_entropy", (x, torch.arange(40) % 3))
    assert moved_by_rounding(problem, problem.measured()) == ("", "")


@pytest.mark.parametrize(("activation", "looks"), [(nn.ReLU(), 0), (nn.Tanh(), 1)])
def test_rounding_is_looked_at_where_an_operation_is_curved(x, activation, looks, monkeypatch):
    seen = []
    monkeypatch.setattr("flatlens.measures.lens.moved_by_rounding", lambda *_: seen.append(1) or ("", ""))
    network = nn.Sequential(nn.Linear(10, 8), activation, nn.Linear(8, 3))
    fl.measure(fl.Lens(fl.Problem(network, "cross_entropy", (x, torch.zeros(len(x), dtype=torch.long)))), "pass")
    assert len(seen) == looks
