"""Theorems 4.3, 5.1 and 6.1 of sharpening on networks whose data's law is known; and that wrong ones are caught."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import pytest
import torch
from builders import seeded
from mutants import mutated
from networks import module_of
from torch import Tensor, nn

import flatlens as fl
from flatlens.bounds import BoundsReport, Target, check_bounds, sharpening
from flatlens.distributions import Cube, Distribution, PushForward, Sphere
from flatlens.perturbation.variation import certified_variation, found_variation

ROWS = ("lipschitz_bound", "jacobian_growth", "jacobian_generalisation")
ACTIVATIONS = (nn.ReLU(), nn.Tanh(), nn.GELU(), nn.Sigmoid(), nn.Softplus())
LOSSES = ("mse", "half_squared_error", "cross_entropy")


def steep_mlp(
    seed: int, inputs: int, act: nn.Module | None, outputs: int = 2, width: int = 5, steep: float = 1.5
) -> nn.Module:
    middle: list[nn.Module] = [] if act is None else [act]
    net = nn.Sequential(nn.Linear(inputs, width), *middle, nn.Linear(width, outputs)).to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(steep * torch.randn(p.shape, generator=seeded(seed), dtype=torch.float64) / p.shape[-1] ** 0.5)
    return net


def steepness(net: nn.Module) -> float:
    """Of layers none of whose activations' slopes exceed 1.13, GELU's largest."""
    norms = [float(torch.linalg.matrix_norm(m.weight.detach(), 2)) for m in net if isinstance(m, nn.Linear)]
    return 1.13 * math.prod(norms)


def beside(net: nn.Module, x: Tensor, c: float) -> Target:
    """f*(y) = f(y) + c min_i ||y - x_i|| e_1: coincides with f on the samples, and leaves them at slope c."""

    def function(y: Tensor) -> Tensor:
        f: Tensor = net(y)
        return f + c * torch.cdist(y, x).amin(1, keepdim=True) * torch.eye(f.shape[1], dtype=f.dtype)[0]

    return Target(function, steepness(net) + c)


def laws() -> list[tuple[Distribution, set[str]]]:
    """With what is to be declared: an affine image of a cube is convex."""
    return [
        (Cube(1), set()),
        (Cube(2), set()),
        (Cube(4), set()),
        (Sphere(1), set()),
        (Sphere(2), set()),
        (PushForward(Cube(2), nn.Linear(2, 3).double()), {"convex_support"}),
        (PushForward(Sphere(1), steep_mlp(3, 2, nn.Tanh(), 3)), set()),
        (PushForward(Cube(1), steep_mlp(4, 1, nn.Tanh(), 2)), set()),
    ]


def checked(net: nn.Module, law: Distribution, x: Tensor, y: Tensor, loss: str, **more: object) -> BoundsReport:
    more.setdefault("assume", {"iid_samples"})
    more.setdefault("bounds", ROWS)
    lens = fl.Lens(fl.Problem(net, loss, (x, y)))
    return check_bounds(lens, distribution=law, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_none_whose_assumptions_hold_is_violated(seed: int) -> None:
    torch.manual_seed(seed)
    law, convex = laws()[seed % 8]
    loss, act = LOSSES[seed % 3], ACTIVATIONS[seed % 5]
    net, x = steep_mlp(seed, law.dimension, act), law.sample(30 + 10 * (seed % 5), seeded(seed))
    f = net(x).detach()
    y = f.argmax(1) if loss == "cross_entropy" else f + 0.1 * torch.randn(f.shape, generator=seeded(seed)).double()
    target = beside(net, x, 3.0 * (seed % 4))
    report = checked(net, law, x, y, loss, assume={"iid_samples", *convex}, target=target)
    assert not report.violated
    straight = law.support_is_convex or bool(convex)
    for row in report:
        needs = row.bound in ("lipschitz_bound", "lipschitz_bound.searched", "jacobian_growth", "jacobian_growth.sharp")
        if row.bound == "lipschitz_bound.searched":
            assert row.status == ("undecided" if straight else "not applicable")
        elif row.bound == "lipschitz_bound.latent":
            assert row.status == (
                "holds" if isinstance(law, PushForward) and isinstance(law.base, Cube) else "not applicable"
            )
        else:
            assert row.status == ("holds" if straight or not needs else "not applicable"), row
        assert row.violated_share == 0  # not even where nothing was promised
    certified, found = report.of("lipschitz_bound").rhs, report.of("lipschitz_bound.searched").rhs
    assert certified >= found * (1 - 1e-9)


def test_a_linear_network_attains_its_lipschitz_norm() -> None:
    for law in (Cube(1), Cube(3)):
        net = steep_mlp(0, law.dimension, None)
        x = law.sample(20, seeded(1))
        norm = float(torch.linalg.matrix_norm((net[1].weight @ net[0].weight).detach(), 2))
        report = checked(net, law, x, net(x).detach(), "mse", target=Target(net))
        row, remark = report.of("lipschitz_bound"), report.of("lipschitz_bound.remark")
        assert row.rhs == pytest.approx(norm, rel=1e-9)
        assert row.status == remark.status == "holds"
        assert row.tightness >= 0.999
        assert remark.tightness >= 0.999


@pytest.mark.parametrize("loss", ["mse", "half_squared_error"])
def test_growth_is_attained_on_a_line(loss: str) -> None:
    net, x = steep_mlp(0, 1, None), Cube(1).sample(20, seeded(1))
    row = checked(net, Cube(1), x, net(x).detach(), loss, bounds="jacobian_growth").of("jacobian_growth")
    assert row.status == "holds"
    assert row.tightness >= 0.999


def test_growth_follows_the_loss() -> None:
    """The targets' slope is 2; with residuals of up to l the network's must be 2 - 2 l / ||x_1 - x_2|| somewhere."""
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for w in (2.0, 1.5, 1.0):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(net.weight, w)
        for loss in ("mse", "half_squared_error"):
            row = checked(net, Cube(1), x, 2 * x, loss, bounds="jacobian_growth").of("jacobian_growth")
            assert row.lhs == pytest.approx(2 - 2 * (2 - w), abs=1e-12)
            assert row.rhs == pytest.approx(w)


def test_one_is_the_largest_alpha_of_the_divergence() -> None:
    p, q = torch.distributions.Dirichlet(torch.full((4,), 0.5, dtype=torch.float64)).sample((2, 100_000))
    ratio = (p * (p.log() - q.log())).sum(1) / (p - q).square().sum(1)
    assert float(ratio.nan_to_num(nan=1.0).min()) >= 1
    near = torch.tensor([0.5 + 1e-4, 0.5 - 1e-4], dtype=torch.float64)
    assert float((near * (2 * near).log()).sum() / (near - 0.5).square().sum()) == pytest.approx(1, abs=1e-6)


def test_no_third_moment_is_above_its_bound() -> None:
    p = torch.distributions.Dirichlet(torch.full((3,), 0.3, dtype=torch.float64)).sample((200_000,))
    h = torch.nn.functional.normalize(torch.randn(p.shape, generator=seeded(0), dtype=torch.float64), dim=1)
    third = (p * (h - (p * h).sum(1, keepdim=True)) ** 3).sum(1).abs()
    assert float(third.max()) <= sharpening.BENT
    rare = (1 - 1 / math.sqrt(3)) / 2
    assert math.sqrt(2) ** 3 * rare * (1 - rare) * (1 - 2 * rare) == pytest.approx(sharpening.BENT)


@pytest.mark.parametrize("seed", range(6))
def test_the_softmaxed_variation_is_above_all_that_is_found(seed: int) -> None:
    net, x = steep_mlp(seed, 2, ACTIVATIONS[seed % 5], 3, steep=3.0), Cube(2).sample(12, seeded(seed))
    problem = fl.Problem(net, "cross_entropy", (x, net(x).argmax(1)))
    softmaxed = nn.Sequential(net, nn.Softmax(1))
    other = fl.Problem(softmaxed, "mse", (x, softmaxed(x).detach()))
    slopes = torch.linalg.matrix_norm(jacobians(net, x), 2)
    for delta in (0.02, 0.3):
        upper = sharpening.of_softmax(net(x).detach(), slopes, certified_variation(problem, net, delta), delta)
        found = found_variation(other, softmaxed, delta, restarts=4, steps=5, generator=seeded(0))
        assert bool((found <= upper * (1 + 1e-9)).all())


# Against the literal formulas; and formulas that are wrong


def jacobians(net: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda one: net(one[None])[0]))(x).detach()


def agree(check: Callable[..., BoundsReport]) -> None:
    """Every side of B9 to B11 is what the theorems say, written out."""
    n, c = 40, 2.0
    net, x = steep_mlp(7, 2, nn.Tanh(), 3), Cube(2).sample(40, seeded(7))
    y = (net(x) + 0.05 * torch.randn(n, 3, generator=seeded(8), dtype=torch.float64)).detach()
    delta = 4 / math.sqrt(math.pi) * math.sqrt(math.log(n / 0.05) / n)  # Eq. 6, d = 2
    lens = fl.Lens(fl.Problem(net, "mse", (x, y)))
    target = beside(net, x, c)
    options = {"distribution": Cube(2), "assume": {"iid_samples"}, "target": target}
    report = check(lens, ROWS, **options)
    J, V = torch.linalg.matrix_norm(jacobians(net, x), 2), certified_variation(lens.problem, net, delta)
    steep = float((J + V).max())
    _agrees(report, "lipschitz_bound", rhs=steep)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 101, dtype=torch.float64)] * 2)
    true = float(torch.linalg.matrix_norm(jacobians(net, grid), 2).max())
    assert 0.98 * true <= report.of("lipschitz_bound").lhs <= 1.001 * true
    found = report.of("lipschitz_bound.remark")
    assert any(found.rhs == pytest.approx(2 * delta * float(one), rel=1e-9) for one in J + V)
    assert 0.05 < found.tightness <= 1
    f = net(x).detach()
    ell = float((f - y).norm(dim=1).max())
    _agrees(report, "jacobian_growth", lhs=growth_of(x, y, ell) - float(V.max()), rhs=float(J.max()))
    L = steepness(net) + c
    _agrees(report, "jacobian_generalisation", rhs=delta * (L + steep))
    distances = torch.cdist(Cube(2).sample(100_000, seeded(9)), x).amin(1)
    assert report.of("jacobian_generalisation").lhs == pytest.approx(c * float(distances.mean()), rel=0.05)
    classes = fl.Lens(fl.Problem(net, nn.CrossEntropyLoss(label_smoothing=0.1), (x, y.argmax(1))))
    logits, onehot = f.softmax(1), torch.nn.functional.one_hot(y.argmax(1), 3) * 0.9 + 0.1 / 3
    divergence = (onehot * (onehot.log() - logits.log())).sum(1)
    P = torch.diag_embed(logits) - logits[:, :, None] * logits[:, None]
    slopes = torch.linalg.matrix_norm(P @ jacobians(net, x), 2)
    W = sharpening.of_softmax(f, J, V, delta)
    report = check(classes, "jacobian_growth", **options)
    for part, alpha in (("", 0.5), (".sharp", 1.0)):
        reached = growth_of(x, onehot, math.sqrt(float(divergence.max()) / alpha)) - float(W.max())
        _agrees(report, "jacobian_growth" + part, lhs=reached, rhs=float(slopes.max()))


def test_growth_along_a_sphere_divides_the_quotient_by_the_longest_detour() -> None:
    net, x = steep_mlp(5, 2, nn.Tanh(), 3, steep=0.5), Sphere(1).sample(60, seeded(5))
    y = (net(x) + 0.01 * torch.randn(60, 3, generator=seeded(6), dtype=torch.float64)).detach()
    report = checked(net, Sphere(1), x, y, "half_squared_error", bounds="jacobian_growth", delta=0.3)
    V = certified_variation(fl.Problem(net, "half_squared_error", (x, y)), net, 0.3)
    ell = float((net(x).detach() - y).norm(dim=1).max())
    _agrees(report, "jacobian_growth.geodesic", lhs=growth_of(x, y, ell) / (math.pi / 2) - float(V.max()))
    assert report.of("jacobian_growth").status == "not applicable"
    assert report.of("jacobian_growth.geodesic").status == "holds"


def growth_of(x: Tensor, y: Tensor, ell: float) -> float:
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    return max((float((y[i] - y[j]).norm()) - 2 * ell) / float((x[i] - x[j]).norm()) for i, j in pairs)


def _agrees(report: BoundsReport, row: str, **sides: float) -> None:
    for side, value in sides.items():
        assert getattr(report.of(row), side) == pytest.approx(value, rel=1e-7), (row, side)


def test_the_sides_are_those_of_the_theorems() -> None:
    agree(check_bounds)


STEEPEST = "float((slopes + seen.variation).max())"
STEP = f"seen.delta * (L + {STEEPEST})"
RADIUS = '(*inside, Assumption("covering_radius", True), context.declare("iid_samples")), radius.value, note'
WRONG = [  # (module, function, the right expression, a wrong one)
    (sharpening, "lipschitz_bound", STEEPEST, "float(slopes.max())"),
    (sharpening, "lipschitz_bound", STEEPEST, "float((slopes + seen.variation).mean())"),
    (sharpening, "lipschitz_bound", STEEPEST, "float((slopes**2 + seen.variation).max())"),
    (sharpening, "lipschitz_bound", "2 * seen.delta", "seen.delta"),
    (sharpening, "jacobian_generalisation", STEP, "seen.delta * (L + float(slopes.max()))"),
    (sharpening, "jacobian_generalisation", STEP, f"seen.delta * {STEEPEST}"),
    (sharpening, "jacobian_generalisation", STEP, f"seen.delta**2 * (L + {STEEPEST})"),
    (sharpening, "jacobian_generalisation", "error.mean()", "error.max()"),
    (sharpening, "_radius", RADIUS, RADIUS.replace("radius.value", "radius.value / 2")),
    (sharpening, "steepest", "(rise - less) / apart", "(rise - less) / apart**2"),
    (sharpening, "steepest", "(rise - less) / apart", "(rise + less) / apart"),
    (sharpening, "jacobian_growth", "2 * reach", "reach"),
    (sharpening, "jacobian_growth", "float(V.max())", "-float(V.max())"),
    (sharpening, "jacobian_growth", "float(V.max())", "float(V.mean())"),
    (sharpening, "jacobian_growth", "float(cost.max())", "float(cost.mean())"),
    (sharpening, "jacobian_growth", "float(cost.max()) / alpha", "float(cost.max()) * alpha"),
    (sharpening, "_targets", "values - loss.least(f, y)", "values"),
    (sharpening, "jacobian_growth", "jacobian_norm(softmax=softmaxed)", "jacobian_norm"),
    (sharpening, "jacobian_growth", "1 / problem.outputs", "0.5"),
]


@pytest.mark.parametrize(("module", "where", "right", "wrong"), WRONG, ids=[f"{at}: {w}" for _, at, _, w in WRONG])
def test_wrong_formulas_are_caught(module: types.ModuleType, where: str, right: str, wrong: str) -> None:
    with (
        mutated([sharpening], module, where, right, wrong) as check,
        pytest.raises(AssertionError),
    ):
        agree(check)


def test_a_mutant_that_changes_nothing_is_not_caught() -> None:
    same = "(rise - less) / apart"
    with mutated([sharpening], sharpening, "steepest", same, f"({same})") as check:
        agree(check)


@pytest.mark.parametrize(("where", "right"), [("steepest", "rise / apart"), ("no_such", "rise"), ("steepest", "apart")])
def test_a_mutant_of_an_expression_that_is_not_there_once_fails(where: str, right: str) -> None:
    with pytest.raises(AssertionError, match="expected once"), mutated([sharpening], sharpening, where, right, "0"):
        pass


def test_outputs_without_an_axis_of_their_own_and_networks_that_count_their_calls() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.calls += 1
        return net.net(x).squeeze(-1)

    torch.manual_seed(0)
    net = module_of(
        forward, net=nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), calls=torch.zeros(1)
    )
    x = torch.randn(12, 2).double()
    lens = fl.Lens(fl.Problem(net, "half_squared_error", (x, x.sum(1))))
    for bound in ("jacobian_growth", "lipschitz_bound"):
        row = check_bounds(lens, bound, delta=0.1, assume="convex_support").of(bound)
        assert row.status == "holds", row
