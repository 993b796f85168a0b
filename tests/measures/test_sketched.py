"""A few combinations in place of all outputs: unbiased, with an error that holds; spectral norms from below."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from networks import NETWORKS, network
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature.spectral_norms import top_of_each
from flatlens.errors import BadInput
from flatlens.grams import LayerGrams, Sketch, one_pass
from flatlens.measures.definition import per_sample
from flatlens.problem.losses import as_loss

BY_PROBES = [
    m for m in fl.measures.MEASURES.values() if isinstance(m, fl.measures.PassMeasure) and m.sketched == "probes"
]
TOP = ["mls", "nmls", "jacobian_norm", "normalized_mls", "jacobian_norm(softmax=True)", "mls(softmax=True)"]


def own_loss(f: Tensor, y: Tensor) -> Tensor:
    """Curved in the outputs, and not convex."""
    return (f - nn.functional.one_hot(y, f.shape[1])).square().sum(1) + f.sin().prod(1)


LOSSES = {
    "cross_entropy": "cross_entropy",
    "weighted": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
    "half_squared_error": "half_squared_error",
    "own": own_loss,
    "huber": nn.HuberLoss(delta=0.3),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_combinations_have_the_losss_curvature_on_average(loss: str) -> None:
    """Over all signs in turn: E[u u^T] = I."""
    one = as_loss(LOSSES[loss])
    f, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 2, 1])
    y = nn.functional.one_hot(y, 3).double() if loss == "huber" else y
    total = torch.zeros(4, 3, 3, dtype=torch.float64)
    for signs in product((-1.0, 1.0), repeat=3):
        rows, B = one.combine(f, y, torch.tensor(signs, dtype=torch.float64).expand(4, 3))
        total += rows.mT @ B @ rows / 8
    torch.testing.assert_close(total, one.output_hessian(f, y))


class AllSigns(Sketch):
    """Every combination of signs of three outputs, once."""

    def views(self, loss, f, y, chunk):
        for signs in product((-1.0, 1.0), repeat=3):
            u = torch.tensor(signs, dtype=torch.float64).expand(len(f), 3)
            yield loss.combine(f.detach(), y, u) if self.weighted else (u[:, None], u.new_ones(len(f), 1, 1))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("loss", ["weighted", "own"])
def test_every_measure_by_probes_is_exact_over_all_signs(name: str, loss: str) -> None:
    """Of all eight together the mean is the exact value, whatever the network; roots and minima are left out."""
    net, x, y = network(name, n=3)
    problem = fl.Problem(net, LOSSES[loss], (x, y))
    lens = fl.Lens(problem)
    nonlinear = {"matrix_normalized_sharpness", "normalized_sharpness"}
    for measure in (m for m in BY_PROBES if m.card.name not in nonlinear):
        exact = fl.Lens(problem).per_sample([measure])
        sketch = AllSigns(8, 0, "C" in measure.needs)
        found: dict[str | None, Tensor] = {}
        for chunk in one_pass(problem, net, lens.plan, None, None, measure.needs, sketch):
            for (key, place), value in fl.measures.lens._values(measure, chunk):
                assert key == measure.key
                value = value / (8 * problem.n if measure.total else 8)
                found[place] = found[place] + value if place in found else value
        assert found
        for place, value in found.items():
            torch.testing.assert_close(value, exact[measure.key, place], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-relu-inplace", "attention"])
def test_estimates_lie_within_their_errors(name: str) -> None:
    net, x, y = network(name, n=20)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    keys = [*(m.key for m in BY_PROBES), "hessian_trace", "adaptive_sharpness", "interpolation_gap"]
    exact, sketched = fl.measure(fl.Lens(problem), keys), fl.measure(_sketched(problem, 60), keys)
    for key, value in sketched.items():
        if "max" in key[0]:  # the largest of noisy terms is biased
            continue
        assert value.value == pytest.approx(exact[key].value, abs=4.5 * value.stderr + 1e-9 * abs(value.value)), key
        assert value.kind in ("estimate", "exact")


def _sketched(problem: fl.Problem, probes: int) -> fl.Lens:
    """Also with more probes than outputs, which a user is not given."""
    lens = fl.Lens(problem)
    lens.probes = probes
    return lens


def wide(outputs: int, n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    return net, torch.randn(n, 9).double(), torch.randint(outputs, (n,))


@pytest.mark.parametrize("key", TOP)
def test_spectral_norms_are_bounded_from_below_within_their_residuals(key: str) -> None:
    net, x, y = wide(150)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    exact, found = (fl.measure(fl.Lens(problem, outputs=o), [key])[key] for o in ("exact", 16))
    assert found.kind == "lower bound"
    assert exact.value * (1 - 0.015) <= found.value <= exact.value * (1 + 1e-9)
    if key != "nmls":
        assert float(found.arrays["residuals"].max()) <= 0.03
        (told,) = re.findall(r"to residuals of (\S+) of their size at most", found.note)
        assert float(found.arrays["residuals"].max()) <= float(told) <= 0.03


def test_many_matrices_at_once_reach_the_residual_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    R = torch.randn(6, 30, 30, generator=generator).double()
    A = R @ R.mT
    A[0] = 0
    values, residuals, steps = top_of_each(lambda u: (A @ u[..., None])[..., 0], torch.Size([6, 30]), 1e-6, generator)
    truth = torch.linalg.eigvalsh(A)[:, -1]
    assert steps < 30
    assert bool((residuals <= 1e-6 * values).all())
    torch.testing.assert_close(values, truth, rtol=1e-9, atol=1e-12)


def test_many_outputs_are_combined_by_themselves_and_it_is_said() -> None:
    for outputs, expected in ((128, None), (129, 16)):
        net, x, y = wide(outputs, n=3)
        lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
        report = fl.measure(lens, "pass")
        assert lens.probes == expected == report.about["combinations_of_outputs"]
        assert report["ggn_trace"].kind == ("exact" if expected is None else "estimate")
        assert (report["ggn_trace"].stderr > 0) == (expected is not None)
        assert ("local_dimension" in report) == ("nmls" in report) == (expected is None)
    named = fl.measure(lens, "local_dimension")["local_dimension"]
    assert "all 129 outputs: Lens(problem, outputs='exact')" in named.note
    assert fl.measure(lens, "nmls")["nmls"].kind == "lower bound"
    assert fl.measure(lens, "layer_factors")["layer_factors"].kind == "undefined"
    assert fl.measure(lens, "layer_sharpness")["layer_sharpness"].kind == "lower bound"


def test_losses_of_single_outputs_keep_a_diagonal_nonnegative() -> None:
    net, x, _ = wide(150)
    problem = fl.Problem(net, nn.HuberLoss(delta=0.3), (x, torch.randn(12, 150).double()))
    for seed in range(4):
        found = fl.measure(fl.Lens(problem), "pass", generator=torch.Generator().manual_seed(seed))
        assert found["normalized_sharpness"].kind == "estimate"


def test_a_loss_that_is_not_convex_has_no_normalized_sharpness() -> None:
    net, x, y = wide(3)
    found = fl.measure(fl.Lens(fl.Problem(net, lambda f, y: -f.square().sum(1), (x, y))), "pass")
    assert found["normalized_sharpness"].kind == "undefined"
    assert found["ggn_trace"].value < 0


def test_the_same_seed_gives_the_same_digits() -> None:
    net, x, y = wide(40)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    a, b, c = (
        fl.measure(fl.Lens(problem, outputs=8), ["ggn_trace", "mls"], generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert [e.value for e in a.values()] == [e.value for e in b.values()]
    assert a["ggn_trace"].value != c["ggn_trace"].value


def test_errors_of_layers_go_together_in_their_sum() -> None:
    net, x, y = wide(40)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), outputs=8), "ggn_trace")
    layers = [e.arrays["probes"] for (_, layer), e in found.items() if layer is not None]
    torch.testing.assert_close(found["ggn_trace"].arrays["probes"], torch.stack(layers).sum(0))
    assert found["ggn_trace"].value == pytest.approx(float(torch.stack(layers).sum(0).mean()))


def test_the_largest_column_has_an_error_of_its_own() -> None:
    net, x, y = wide(40)
    found = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), outputs=8), "neuron_flatness_ggn")
    assert 0 < found["neuron_flatness_ggn.max"].stderr < found["neuron_flatness_ggn.max"].value


@pytest.mark.parametrize("outputs", [1, 0, -3, True, "all", 2.5])
def test_a_number_that_makes_no_sense_is_refused(outputs: object) -> None:
    net, x, y = wide(5)
    with pytest.raises(BadInput, match=r"Lens\(outputs=.*at least 2"):
        fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), outputs=outputs)  # type: ignore[arg-type]


def test_as_many_combinations_as_outputs_are_the_outputs() -> None:
    net, x, y = wide(5)
    assert fl.Lens(fl.Problem(net, "cross_entropy", (x, y)), outputs=5).probes is None


def test_a_measure_that_says_nothing_of_sketches_needs_every_output() -> None:
    @per_sample(
        id="own", family="own", symbol="s", source="nowhere", unit="", place="input", needs={"G"}, answer="input"
    )
    def stable_rank(g: LayerGrams) -> Tensor:
        """tr G / lmax(G), which one combination alone makes 1."""
        return g.G.diagonal(dim1=1, dim2=2).sum(1) / g.eigenvalues[:, -1]

    net, x, y = wide(150)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    assert fl.measure(fl.Lens(problem), stable_rank)["stable_rank"].kind == "undefined"
    assert fl.measure(fl.Lens(problem, outputs="exact"), stable_rank)["stable_rank"].value > 1.5
