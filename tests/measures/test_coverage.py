"""Intervals hold the truth as often as they say where few probes are skewed, agree, or move in steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from builders import seeded
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.krylov import unseen
from flatlens.curvature.leading import lanczos
from flatlens.curvature.probes import largest_of, mean_of_forms, skewed, student
from flatlens.grams.data_pass import Sketch
from flatlens.perturbation.searches import Crossing, first_crossing

torch.set_num_threads(1)


def share_inside(values: Tensor, truth: float, error: Callable[[Tensor], tuple[Tensor, Tensor]] = skewed) -> float:
    """Of sets of probes, (probes, sets)."""
    mean, stderr = error(values)
    return float(((mean - truth).abs() <= 1.96 * stderr).double().mean())


@pytest.mark.parametrize("probes", [4, 8, 16, 32])
def test_skewed_draws_are_covered_and_normal_ones_hardly_wider(probes: int) -> None:
    normal = torch.randn(probes, 20000, generator=seeded(0), dtype=torch.float64)
    other = torch.randn(probes, 20000, generator=seeded(1), dtype=torch.float64)
    squares = normal.square() + other.square()  # chi-square with two degrees of freedom
    assert 0.945 <= share_inside(normal, 0.0) <= 0.976
    assert 0.92 <= share_inside(squares, 2.0) <= 0.96
    assert share_inside(squares, 2.0) >= share_inside(squares, 2.0, student) + 0.015


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("probes", [2, 3, 4, 8, 16, 32])
def test_forms_that_one_direction_decides_are_covered(probes: int, noise: float) -> None:
    """Squares of normal numbers, alone or beside normal noise."""
    normal, other = (torch.randn(probes, 20000, generator=seeded(s), dtype=torch.float64) for s in (0, 1))
    inside = share_inside(normal.square() + noise * other, 1.0, mean_of_forms)
    assert 0.93 <= inside <= 0.99
    assert inside >= share_inside(normal.square() + noise * other, 1.0, student) + 0.02
    assert share_inside(normal, 0.0, mean_of_forms) >= 0.95


LAWS: dict[str, Callable[[Tensor], Tensor]] = {  # of independent normal numbers (2, ...), with mean 1
    "squares": lambda z: z[0].square(),
    "two squares": lambda z: z.square().mean(0),
    "normal": lambda z: 1 + z[0],
    "squares that share a part": lambda z: (0.8 * z[1, ..., :1] + 0.6 * z[0]).square(),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("probes", [4, 8, 60])
@pytest.mark.parametrize("count", [3, 10, 50])
@pytest.mark.parametrize("ahead", [1.0, 1.3])
def test_the_largest_of_noisy_means_is_covered(law: str, probes: int, count: int, ahead: float) -> None:
    """Equal quantities, or one ahead; the interval is at most three times as wide as the largest mean's own."""
    drawn = LAWS[law](torch.randn(2, 400, probes, count, generator=seeded(probes * count), dtype=torch.float64))
    drawn[..., 0] *= ahead
    inside = wider = 0.0
    for values in drawn:
        means, errors = mean_of_forms(values)
        value, stderr = largest_of(means, errors, probes)
        assert value == float(means.max())
        inside += (abs(value - ahead) <= 1.96 * stderr) / len(drawn)
        wider += stderr / float(errors[means.argmax()]) / len(drawn)
    assert inside >= 0.95
    assert 1 <= wider <= 3


KINDS = ["neuron_flatness_ggn", "ggn_trace", "kappa_trace", "interpolation_sharpness"]


@pytest.mark.parametrize("shape", [(6, 12, 150), (3, 5, 5, 5, 5, 140)])
def test_rows_of_largest_terms_are_covered_with_many_outputs(shape: tuple[int, ...]) -> None:
    """Columns and layers that are nearly alike, from eight combinations of more than 128 outputs; fixed seeds."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(shape)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    net = nn.Sequential(*layers)
    x = torch.randn(5, shape[0], dtype=torch.float64)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(5, shape[-1], dtype=torch.float64)))
    exact = fl.measure(fl.Lens(problem, outputs="exact"), KINDS)
    rows = [key for key in exact if key[0].endswith(".max")]
    assert len(rows) >= len(KINDS)
    inside = dict.fromkeys(rows, 0)
    for seed in range(40):
        found = fl.measure(fl.Lens(problem, outputs=8), KINDS, generator=seeded(seed))
        for key in rows:
            inside[key] += abs(found[key].value - exact[key].value) <= 1.96 * found[key].stderr
            assert found[key].kind == "estimate"
    assert min(inside.values()) >= 36, inside
    assert sum(inside.values()) >= 0.95 * 40 * len(rows), inside


def test_the_scale_of_draws_does_not_matter() -> None:
    values = torch.randn(5, 30, generator=seeded(0), dtype=torch.float64).exp()
    stderr = skewed(values)[1]
    for scale in (1e-150, 1e150):
        torch.testing.assert_close(skewed(values * scale)[1] / scale, stderr, rtol=1e-9, atol=0)
    torch.testing.assert_close(skewed(-values)[1], stderr)
    assert float(skewed(torch.full((4,), 3.0))[1]) == 0


def sketched(form: Tensor, rest: Tensor, probes: int, seed: int) -> Tensor:
    """What each probe gives for one sample and others, (probes,)."""
    every = torch.cat([form[None], rest])
    each = Sketch(probes, seed, False).combinations(0, len(every), len(form))
    return torch.stack([torch.einsum("na,nab,nb->", u, every, u) for u in each])


@pytest.mark.parametrize(("alike", "probes"), [(3, 5), (3, 8), (4, 12), (4, 16), (4, 32)])
def test_outputs_that_move_alike_are_covered(alike: int, probes: int) -> None:
    """Of 2,000 samples that are measured alone; signs hold the trace for 0.76, 0.90, 0.87, 0.91 and 0.97 of them."""
    sketch = Sketch(probes, 0, False)
    each = torch.stack([u[:, :alike].sum(1).square() for u in sketch.combinations(0, 2000, 20)])
    assert share_inside(each, float(alike), mean_of_forms) >= 0.94


def forms(what: str, outputs: int) -> tuple[Tensor, Tensor, float]:
    """(one sample's form, those of twenty others, which have trace 1 together; the trace of all)."""
    form = torch.zeros(outputs, outputs, dtype=torch.float64)
    if what == "half in one sample":  # and there in two outputs
        form[:2, :2] = torch.tensor([[0.5, -0.4], [-0.4, 0.5]])
    elif what == "half in one direction":
        a = torch.randn(outputs, generator=seeded(5), dtype=torch.float64)
        form = torch.outer(a, a) / a.square().sum()
    roots = torch.randn(20, outputs, 6, generator=seeded(3), dtype=torch.float64)
    rest = roots @ roots.mT
    return form, rest / rest.diagonal(dim1=1, dim2=2).sum(), 1.0 if what == "plain" else 2.0


def covered_by_sketches(what: str, outputs: int, probes: int, runs: int) -> float:
    """The share of intervals that hold the trace."""
    form, rest, trace = forms(what, outputs)
    values = torch.stack([sketched(form, rest, probes, seed) for seed in range(runs)], 1)
    assert abs(float(values.mean()) - trace) <= 4 * float(values.mean(0).std()) / runs**0.5
    return share_inside(values, trace, mean_of_forms)


SPLIT = ["half in one sample", "half in one direction", "plain"]


@pytest.mark.parametrize("what", SPLIT)
@pytest.mark.parametrize("probes", [3, 4, 8])
def test_sketches_hold_the_trace(probes: int, what: str) -> None:
    """At least 0.93 (0.83 to 0.88 with Student's widths, where one direction holds half), less two deviations."""
    assert covered_by_sketches(what, 10, probes, 300) >= 0.93 - 0.029


@pytest.mark.slow
@pytest.mark.parametrize("what", SPLIT)
@pytest.mark.parametrize("outputs", [10, 150])
@pytest.mark.parametrize("probes", [2, 3, 4, 8, 16])
def test_sketches_hold_the_trace_over_many_seeds(probes: int, outputs: int, what: str) -> None:
    inside = covered_by_sketches(what, outputs, probes, 2000)
    print(f"{what}, {outputs} outputs, {probes} combinations: {inside:.3f}")
    assert inside >= 0.93 - 0.01  # of which 0.01 is two standard deviations


@pytest.mark.parametrize("probes", [3, 4])
def test_few_combinations_vary_no_more_than_signs(probes: int) -> None:
    form, rest, _ = forms("half in one sample", 10)
    means = torch.stack([sketched(form, rest, probes, seed) for seed in range(600)], 1).mean(0)
    every = torch.cat([form[None], rest])
    off = every - torch.diag_embed(every.diagonal(dim1=1, dim2=2))
    assert float(means.var()) <= 1.15 * float(2 * off.square().sum() / probes)


@pytest.mark.parametrize("probes", [2, 3, 5, 16])
def test_combinations_of_a_sample_are_the_same_in_every_chunk(probes: int) -> None:
    sketch = Sketch(probes, 2**40 - 1, True)
    whole = list(sketch.combinations(0, 11, 300))
    for u, a, b in zip(whole, sketch.combinations(0, 4, 300), sketch.combinations(4, 7, 300), strict=True):
        assert torch.equal(u, torch.cat([a, b]))
    many = torch.stack(list(sketch.combinations(0, 20000, 3)))
    second = torch.einsum("pna,pnb->pab", many, many) / 20000
    torch.testing.assert_close(second, torch.eye(3, dtype=torch.float64).expand(probes, 3, 3), rtol=0, atol=0.05)


def trained(convolutions: bool, steps: int = 60) -> fl.Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if convolutions:
            first = [nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm([4, 6, 6]), nn.ReLU(), nn.Flatten()]
            net, x = nn.Sequential(*first, nn.Linear(144, 3)).double(), torch.randn(24, 1, 6, 6).double()
        else:
            net, x = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)).double(), torch.randn(24, 9).double()
        y = torch.randint(3, (24,))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return fl.Problem(net, "cross_entropy", (x, y))


def test_average_sharpness_below_a_layer_norm() -> None:
    problem = trained(convolutions=True)
    key = "average_sharpness(rho=0.3, probes={})"
    values = fl.measure(fl.Lens(problem), key.format(800), generator=seeded(1))[key.format(800)].arrays["pairs"]
    chosen = torch.randint(len(values), (8, 3000), generator=seeded(2))
    assert 0.93 <= share_inside(values[chosen], float(values.mean())) <= 0.97


def covered(key: str, longer: str, problem: fl.Problem, runs: int) -> float:
    """The share of runs of one measure whose interval holds what a longer run gives, within its own."""
    lens, one, long = fl.Lens(problem), fl.measures.named(key)[0], fl.measures.named(longer)[0]
    there = fl.measure(lens, long, generator=seeded(10**6))[long.key]
    inside = 0
    for seed in range(runs):
        found = fl.measure(lens, one, generator=seeded(seed))[one.key]
        inside += abs(found.value - there.value) <= 1.96 * math.hypot(found.stderr, there.stderr)
    return inside / runs


@pytest.mark.slow
@pytest.mark.parametrize("probes", [8, 16])
def test_noise_that_costs_accuracy(probes: int) -> None:
    key = "pac_bayes_flatness(probes={})"
    inside = covered(key.format(probes), key.format(600), trained(convolutions=False), 200)
    print(f"{probes} probes: {inside:.3f}")
    assert 0.925 <= inside <= 0.985


@pytest.mark.parametrize("probes", [8, 16])
def test_a_level_crossed_in_steps(probes: int) -> None:
    """Twenty samples, each wrong beyond a margin of its own, under noise in four weights."""
    x = torch.randn(20, 4, generator=seeded(0), dtype=torch.float64)
    margin = torch.rand(20, generator=seeded(1), dtype=torch.float64) + 0.1

    def crossing(probes: int, seed: int) -> Crossing:
        moved = (torch.randn(probes, 4, generator=seeded(seed), dtype=torch.float64) @ x.T).abs()
        found = first_crossing(lambda sigma: (sigma * moved > margin).double().mean(1) / 2, 0.1, 0.05)
        assert found is not None
        return found

    truth = crossing(200000, 10**6).log_sigma
    found = [crossing(probes, seed) for seed in range(300)]
    inside = sum(abs(one.log_sigma - truth) <= 1.96 * one.stderr for one in found) / 300
    assert 0.925 <= inside <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("convolutions", [False, True])
def test_the_density_of_few_probes_and_steps(convolutions: bool) -> None:
    inside, rms = density_covered(trained(convolutions), 300)
    print(f"density {inside:.3f}, root mean square {rms:.3f}")
    assert 0.93 <= inside <= 0.985
    assert 0.93 <= rms <= 0.995


def test_the_density_of_few_probes_and_steps_in_a_few_runs() -> None:
    """A smoothing of 1% of the range, which 20 steps do not resolve, covered 0.78 of the mass."""
    inside, rms = density_covered(trained(convolutions=False), 20)
    assert inside >= 0.9
    assert rms >= 0.85


def density_covered(problem: fl.Problem, runs: int) -> tuple[float, float]:
    """(share of the mass, of the runs' roots of the mean square) inside the intervals of three probes of 20 steps."""
    operator = fl.curvature.Hessian(problem)
    values, inside, roots = torch.linalg.eigvalsh(operator.matrix()), 0.0, 0
    rms = float(values.square().mean().sqrt())
    for seed in range(runs):
        found = fl.curvature.spectral_density(operator, probes=3, steps=20, generator=seeded(seed))
        truth = torch.distributions.Normal(values[:, None], found.width).log_prob(found.grid).exp().mean(0)
        held = (found.density - truth).abs() <= 1.96 * found.stderr + 1e-9 * truth.max()
        inside += float((held * truth).sum() / truth.sum()) / runs
        roots += abs(found.rms - rms) <= 1.96 * found.rms_stderr
    return inside, roots / runs


LEADERS = {
    "two alike": torch.cat([torch.tensor([1, 0.998]), torch.linspace(0, 0.9, 398)]),
    "outliers": torch.cat([torch.tensor([1, 0.998, 0.6]), torch.linspace(-0.1, 0.1, 397)]),
}


@pytest.mark.parametrize("name", LEADERS)
def test_what_a_search_misses_is_bounded(name: str) -> None:
    """The second eigenvalue is taken for the first now and then, by more than the note allows in 5% at most."""
    spectrum = LEADERS[name].double()
    missed, beyond, found = 0, 0, []
    for seed in range(100):
        start = torch.randn(400, generator=seeded(seed), dtype=torch.float64)
        found.append(lanczos(lambda v: spectrum * v, start, random=1.0))
        missed += found[-1].largest < 0.999
        beyond += found[-1].largest + found[-1].above < 1
        assert float((spectrum - found[-1].values[0]).abs().min()) <= float(found[-1].residuals[0])
    assert beyond <= 9  # 5% and two standard errors
    assert 1 <= missed <= 27  # 9 and 15% of 300 seeds, 15 and 35% where searches stop at the tolerance itself
    assert name == "outliers" or max(pairs.above for pairs in found) < 0.6


def test_a_start_that_is_not_random_bounds_nothing() -> None:
    spectrum = torch.linspace(0, 1, 400, dtype=torch.float64)
    start = torch.randn(400, generator=seeded(0), dtype=torch.float64)
    assert lanczos(lambda v: spectrum * v, start, most=60, rtol=1e-9).above == math.inf
    theta, betas = torch.linspace(0, 1, 30, dtype=torch.float64), torch.full((30,), 0.25, dtype=torch.float64)
    few = unseen(theta[:20], betas[:20], 400, 0.1)
    assert 0 < unseen(theta, betas, 400, 1.0) < unseen(theta, betas, 400, 0.1) < few


def test_the_note_says_what_can_be_missed() -> None:
    report = fl.measure(fl.Lens(trained(convolutions=True)), ["sharpness", "ggn_norm(rtol=1e-9)"])
    assert "an eigenvalue lies within" in report["sharpness"].note
    assert "a larger eigenvalue may exist" in report["sharpness"].note
    assert "has a probability of at most 5%" in report["ggn_norm(rtol=1e-09)"].note
