"""Eigenvalues by Lanczos, and densities by its quadrature, of matrices whose spectra are known."""

from __future__ import annotations

import pytest
import torch
from builders import normal, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import network
from torch import Tensor, nn

import flatlens as fl
from flatlens.curvature import Eigenpairs, GaussNewton, Hessian, Operator, eigenpairs, lanczos, spectral_density

torch.set_num_threads(1)


def search(A: Tensor, start: Tensor | None = None, **options: object) -> Eigenpairs:
    """Lanczos, with its promises checked: honest residuals, unit vectors that are orthogonal, products counted."""
    counted = 0

    def apply(v: Tensor) -> Tensor:
        nonlocal counted
        counted += 1
        return A @ v

    pairs = lanczos(apply, normal(len(A), seed=99) if start is None else start, **options)
    scale = max(float(torch.linalg.matrix_norm(A, 2)), 1e-300)
    values, vectors = pairs.values, pairs.vectors
    truly = (vectors @ A - values[:, None] * vectors).norm(dim=1)
    assert pairs.products == counted <= options.get("most", 300)
    assert torch.allclose(truly, pairs.residuals, rtol=1e-6, atol=1e-13 * scale * len(A))
    assert torch.allclose(vectors @ vectors.T, torch.eye(len(values), dtype=torch.float64), atol=1e-10)
    nearest = (torch.linalg.eigvalsh(A) - values[:, None]).abs().amin(1)
    assert bool((nearest <= pairs.residuals + 1e-12 * scale).all())
    top = options.get("top_k", 1)
    if pairs.converged:
        allowed = torch.where(torch.arange(len(values)) < top, values.abs(), scale)
        assert bool((pairs.residuals <= options.get("rtol", 1e-3) * allowed + 1e-11 * scale).all())
    if pairs.exact:
        assert bool((truly <= 1e-11 * scale).all())
    return pairs


def close(ours: Tensor, truth: Tensor | list[float], tolerance: float = 1e-8, scale: float = 0.0) -> None:
    truth = torch.as_tensor(truth, dtype=torch.float64)
    assert ours.shape == truth.shape
    assert torch.allclose(ours, truth, rtol=tolerance, atol=tolerance * max(scale, float(truth.abs().max())))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 30), st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1e-6, 1.0, 1e6])
)
def test_any_symmetric_matrix(size: int, seed: int, top: int, bottom: int, scale: float) -> None:
    A = symmetric(scale * normal(size, seed=seed), seed + 1)
    values = torch.linalg.eigvalsh(A)
    pairs = search(A, top_k=top, bottom_k=bottom, rtol=1e-9)
    top = min(top, size)
    close(pairs.values, torch.cat([values.flip(0)[:top], values[: min(bottom, size - top)]]), scale=scale)
    assert pairs.converged


SPECTRA = {
    "clustered": torch.cat([1 + 1e-4 * torch.arange(5), 0.3 * normal(75).sigmoid()]),
    "decaying": 0.8 ** torch.arange(80.0),
    "repeated": torch.tensor([5.0] * 3 + [2.0] * 4 + [-1.0] * 2 + [0.0] * 30),
    "repeated among many": torch.cat([torch.tensor([5.0, 5.0, 5.0]), torch.linspace(0, 1, 77)]),
    "two values": torch.tensor([3.0] * 4 + [1.0] * 8),
    "negative definite": -torch.linspace(1, 9, 40),
    "both signs": torch.linspace(-7, 3, 60),
    "rank one": torch.tensor([4.0] + [0.0] * 29),
    "rank one, negative": torch.tensor([-4.0] + [0.0] * 29),
    "identity": torch.ones(20),
    "minus identity": -torch.ones(20),
}  # fmt: skip


@pytest.mark.parametrize("tolerance", [1e-3, 1e-9])
@pytest.mark.parametrize("kind", SPECTRA)
def test_known_spectra(kind: str, tolerance: float) -> None:
    """Repeated eigenvalues as often as they occur, at both ends."""
    spectrum = SPECTRA[kind].double().sort(descending=True).values
    A = symmetric(spectrum)
    for top, bottom in ((1, 0), (2, 0), (3, 0), (1, 1), (3, 2)):
        pairs = search(A, top_k=top, bottom_k=bottom, rtol=tolerance)
        truth = torch.cat([spectrum[:top], spectrum.flip(0)[:bottom]])
        close(pairs.values, truth, max(2 * tolerance, 1e-8), float(spectrum.abs().max()))
        assert pairs.converged


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tops=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    bottoms=st.lists(st.integers(1, 4), max_size=3),
    gap=st.sampled_from([0.05, 0.2, 0.5]),
    rest=st.integers(9, 120),
    asked=st.tuples(st.integers(2, 8), st.integers(0, 4)),
    room=st.sampled_from([8, 300]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    shift=st.sampled_from([0.0, 0.0, -3.0]),
    seed=st.integers(0, 10**6),
)
def test_repeated_values_are_found_as_often_as_they_occur(
    tops: list[int],
    bottoms: list[int],
    gap: float,
    rest: int,
    asked: tuple[int, int],
    room: int,
    dtype: torch.dtype,
    shift: float,
    seed: int,
) -> None:
    """Among many others, at a tolerance at which no basis closes; or they are not called converged."""
    repeated = [
        sign * (1 - gap) ** i for sign, of in ((1, tops), (-0.5, bottoms)) for i, m in enumerate(of) for _ in range(m)
    ]
    others = 0.3 * normal(rest, seed=seed).sigmoid()
    spectrum = torch.cat([torch.tensor(repeated).double(), others]).sort(descending=True).values + shift
    A, (top, bottom) = symmetric(spectrum, seed).to(dtype), asked
    start, counted = normal(len(A), seed=seed + 1).to(dtype), []
    pairs = lanczos(
        lambda v: counted.append(v) or A @ v, start, top_k=top, bottom_k=bottom, room=room, most=1000, keep=9
    )
    assert pairs.converged
    assert pairs.products == len(counted)
    truth = torch.cat([spectrum[:top], spectrum.flip(0)[:bottom]])
    assert bool(((pairs.values - truth).abs() <= 2e-3 * spectrum.abs().max()).all())
    V, eps = pairs.remembered.vectors, 100 * torch.finfo(dtype).eps
    assert torch.allclose(V @ V.T, torch.eye(len(V), dtype=dtype), atol=eps)
    assert torch.allclose(V[: len(truth)], pairs.vectors, atol=eps)
    off = (pairs.vectors @ A - pairs.values[:, None].to(dtype) * pairs.vectors).norm(dim=1)
    assert torch.allclose(off.double(), pairs.residuals, rtol=1e-2, atol=20 * eps)


def test_the_largest_value_needs_no_search_for_its_repetitions() -> None:
    repeated = SPECTRA["repeated among many"].double()
    often, once = (search(symmetric(spectrum)).products for spectrum in (repeated, repeated[2:]))
    assert abs(often - once) <= 2
    assert search(symmetric(repeated), top_k=2).products > often + 3


@pytest.mark.parametrize("outputs", [2, 10])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_the_last_layer_of_a_regression(kind: type[Operator], outputs: int) -> None:
    """Every eigenvalue occurs once for each output."""
    net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, outputs)).double()
    problem = fl.Problem(net, "mse", (normal(300, 20), normal(300, outputs)), parameters=["2.weight", "2.bias"])
    operator = kind(problem)
    truth = torch.linalg.eigvalsh(kind(problem).matrix()).flip(0)
    pairs = eigenpairs(operator, top_k=5)
    assert pairs.converged
    assert torch.allclose(pairs.values, truth[:5], rtol=2e-3)
    assert operator.products == pairs.products
    few = eigenpairs(operator, top_k=5, most=pairs.products - 6)
    assert not few.converged


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_zero_matrix(size: int) -> None:
    pairs = search(torch.zeros(size, size, dtype=torch.float64), top_k=2, bottom_k=1)
    assert pairs.exact
    assert pairs.converged
    assert pairs.values.tolist() == [0.0] * min(3, size)
    assert pairs.residuals.tolist() == [0.0] * min(3, size)


@pytest.mark.parametrize("value", [-3.0, 0.0, 2.0, 1e-200])
def test_one_by_one(value: float) -> None:
    pairs = search(torch.tensor([[value]], dtype=torch.float64), top_k=3, bottom_k=2)
    assert pairs.values.tolist() == pytest.approx([value], rel=1e-14)
    assert pairs.exact
    assert pairs.products == 1


@pytest.mark.parametrize("tolerance", [1e-3, 1e-9])
def test_a_start_that_cannot_see_the_largest_eigenvalue(tolerance: float) -> None:
    """Block-diagonal, the start in the lower block; and a start that is an eigenvector itself."""
    upper, lower = symmetric(torch.tensor([9.0, 8.0, 1.0])), symmetric(torch.tensor([3.0, -2.0, 0.5, 0.1]))
    A = torch.block_diag(upper, lower)
    start = torch.cat([torch.zeros(3), torch.ones(4)]).double()
    pairs = search(A, start, top_k=2, bottom_k=1, rtol=tolerance)
    close(pairs.values, [9.0, 8.0, -2.0], max(tolerance, 1e-8))
    for v in torch.linalg.eigh(A).eigenvectors.T:
        close(search(A, v.clone(), top_k=1, rtol=tolerance).values, [9.0], max(tolerance, 1e-8))


@pytest.mark.parametrize("start", [torch.zeros(20), torch.full((20,), torch.nan), torch.tensor([torch.inf] * 20)])
def test_a_start_that_is_none(start: Tensor) -> None:
    spectrum = torch.linspace(-1, 4, 20)
    pairs = search(symmetric(spectrum), start.double(), top_k=2, bottom_k=1, rtol=1e-9)
    close(pairs.values, [4.0, float(spectrum[-2]), -1.0])


@pytest.mark.parametrize("room", [1, 6, 10, 15])
@pytest.mark.parametrize(("top", "bottom"), [(1, 0), (3, 0), (2, 2)])
def test_restarts_in_little_room(room: int, top: int, bottom: int) -> None:
    spectrum = torch.linspace(-1, 1, 100).double().pow(3) * 5
    pairs = search(symmetric(spectrum), top_k=top, bottom_k=bottom, rtol=1e-6, room=room, most=3000)
    close(pairs.values, torch.cat([spectrum.flip(0)[:top], spectrum[:bottom]]), 1e-6)
    assert pairs.converged
    roomy = search(symmetric(spectrum), top_k=top, bottom_k=bottom, rtol=1e-6, most=3000)
    assert roomy.products <= pairs.products


@pytest.mark.parametrize("room", [6, 300])
def test_repeated_values_in_little_room(room: int) -> None:
    spectrum = torch.tensor([5.0] * 2 + [2.0] * 3 + [-1.0] * 35)
    pairs = search(symmetric(spectrum), top_k=2, rtol=1e-9, room=room)
    close(pairs.values, [5.0, 5.0])


def test_out_of_products() -> None:
    """What was found, and that it is not converged."""
    A = symmetric(torch.linspace(0, 1, 200))
    pairs = search(A, top_k=2, rtol=1e-12, most=8)
    assert pairs.products == 8
    assert not pairs.converged
    assert not pairs.exact
    assert pairs.largest <= 1
    few = search(A, top_k=4, most=2)
    assert len(few.values) == 2
    assert not few.converged


@pytest.mark.parametrize("seed", range(5))
def test_the_first_value_is_a_lower_bound(seed: int) -> None:
    spectrum = normal(60, seed=seed)
    for most in (1, 3, 6, 12, 24):
        assert search(symmetric(spectrum, seed), most=most).largest <= float(spectrum.max()) + 1e-12


def test_single_precision() -> None:
    A = symmetric(SPECTRA["both signs"]).float()
    pairs = lanczos(lambda v: A @ v, normal(60).float(), top_k=2, bottom_k=1, rtol=1e-12)
    close(pairs.values, [3.0, 3 - 10 / 59, -7.0], 1e-5)
    assert pairs.values.dtype == torch.float64
    assert pairs.converged


def test_a_warm_start_needs_fewer_products() -> None:
    net, x, y = network("cnn-tanh", n=40)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    cold = eigenpairs(Hessian(problem), rtol=1e-6)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1e-3 * torch.sign(p))
    again, warm = (eigenpairs(Hessian(problem), rtol=1e-6, start=s) for s in (None, cold.vectors[0]))
    assert warm.products < again.products
    assert warm.largest == pytest.approx(again.largest, rel=1e-8)


def test_a_lens_starts_where_an_earlier_one_ended() -> None:
    net, x, y = network("mlp-tanh", n=40)
    problem, key = fl.Problem(net, "cross_entropy", (x, y)), "sharpness(rtol=1e-06)"
    first = fl.Lens(problem)
    value = fl.measure(first, [key])[key]
    second = fl.Lens(problem, after=first)
    again = fl.measure(second, [key])[key]
    assert again.value == pytest.approx(value.value, rel=1e-8)
    assert again.products < value.products


def test_the_share_of_the_data_that_warms_up_large_problems() -> None:
    """Its products are counted, and it leads to the same eigenvalue."""
    net, x, y = network("mlp-gelu", n=600)
    for kind in (Hessian, GaussNewton):
        operator = kind(fl.Problem(net, "cross_entropy", (x, y)))
        pairs = eigenpairs(operator, rtol=1e-9)
        assert pairs.largest == pytest.approx(float(torch.linalg.eigvalsh(operator.matrix())[-1]), rel=1e-8)
        assert operator.products == pairs.products + 2 + operator.size  # 12 products on every 8th sample


def with_spectrum(spectrum: Tensor) -> Operator:
    """The Hessian of a linear model under a loss that bends down where its target is -1: mean_i y_i x_i x_i^T."""
    size = len(spectrum)
    Q = torch.linalg.qr(normal(size, size, seed=5)).Q
    x = (Q * (size * spectrum.double().abs()).sqrt()).T.contiguous()
    net = nn.Linear(size, 1, bias=False).double()
    problem = fl.Problem(net, lambda f, y: 0.5 * (y * f.square()).sum(1), (x, spectrum.double().sign()[:, None]))
    return Hessian(problem)


def test_the_operator_has_the_spectrum_it_was_made_for() -> None:
    spectrum = torch.linspace(-2, 5, 12).double()
    assert torch.allclose(torch.linalg.eigvalsh(with_spectrum(spectrum).matrix()), spectrum, atol=1e-12)


def smoothed(spectrum: Tensor, grid: Tensor, width: float) -> Tensor:
    bumps = torch.exp(-0.5 * ((grid - spectrum[:, None]) / width).square()) / (width * (2 * torch.pi) ** 0.5)
    return bumps.mean(0)


@pytest.mark.parametrize("width", [None, 0.3])
def test_the_density_of_a_known_spectrum(width: float | None) -> None:
    spectrum = torch.cat([torch.linspace(-1, 1, 30), torch.tensor([3.0, 3.1, 6.0, 6.0, -2.0])]).double()
    operator, inside = with_spectrum(spectrum), []
    for seed in range(25):
        found = spectral_density(
            operator, probes=6, steps=35, bandwidth=width, generator=torch.Generator().manual_seed(seed)
        )
        assert float(torch.trapezoid(found.density, found.grid)) == pytest.approx(1, abs=1e-3)
        assert bool((found.density >= 0).all())
        assert torch.allclose(found.weights.sum(1), torch.ones(6, dtype=torch.float64))
        truth = smoothed(spectrum, found.grid, found.width)
        inside.append(((found.density - truth).abs() <= 1.96 * found.stderr + 1e-9 * truth.max()).double().mean())
        rms = float(spectrum.square().mean().sqrt())
        assert abs(found.rms - rms) <= 4 * found.rms_stderr
        assert found.grid[0] < spectrum.min()
        assert found.grid[-1] > spectrum.max()
    assert 0.9 <= float(torch.stack(inside).mean()) <= 0.99


@pytest.mark.parametrize("probes", [4, 8, 32])
def test_the_root_mean_square_is_calibrated(probes: int) -> None:
    """Two steps integrate the square exactly: 400 runs are few products."""
    spectrum = torch.cat([torch.linspace(-0.1, 0.4, 20), torch.tensor([3.0, 1.0, -0.5, 2.0])]).double()
    operator, rms = with_spectrum(spectrum), float(spectrum.square().mean().sqrt())
    runs = 400 if probes < 32 else 200
    inside = 0
    for seed in range(runs):
        found = spectral_density(
            operator, probes=probes, steps=2, points=2, generator=torch.Generator().manual_seed(seed)
        )
        inside += abs(found.rms - rms) <= 1.96 * found.rms_stderr
    assert 0.92 <= inside / runs <= 0.998, inside / runs  # as wide as one direction that dominates needs


@pytest.mark.parametrize("probes", [2, 4])
def test_probes_of_two_parameters_do_not_agree_by_chance(probes: int) -> None:
    """Signs agree half of the time with two probes: the error was then 0, and the value wrong."""
    operator, rms, inside = with_spectrum(torch.tensor([2.0, 0.5]).double()), (4.25 / 2) ** 0.5, 0
    for seed in range(100):
        found = spectral_density(operator, probes=probes, generator=torch.Generator().manual_seed(seed))
        inside += abs(found.rms - rms) <= 1.96 * found.rms_stderr
    assert inside >= 90


def test_densities_of_degenerate_matrices() -> None:
    for spectrum, value in ((torch.zeros(6), 0.0), (torch.full((6,), 2.0), 2.0), (torch.full((6,), -2.0), -2.0)):
        found = spectral_density(with_spectrum(spectrum), probes=3, steps=5)
        assert found.rms == pytest.approx(abs(value), abs=1e-12)
        assert found.rms_stderr == pytest.approx(0, abs=1e-12)
        assert bool(torch.isfinite(found.density).all())
        assert float(torch.trapezoid(found.density, found.grid)) == pytest.approx(1, abs=1e-3)
        assert float(found.grid[found.density.argmax()]) == pytest.approx(value, abs=0.02)


def test_the_measure_is_the_density() -> None:
    net, x, y = network("mlp-tanh", n=10)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    report = fl.measure(fl.Lens(problem), ["spectral_density(probes=16, ggn=True, layers=True)"])
    G = GaussNewton(problem).matrix()
    for at, block in ((None, G), ("2", G[49:89, 49:89])):
        found = report["spectral_density(probes=16, ggn=True, layers=True)", at]
        rms = float(block.norm()) / len(block) ** 0.5
        assert abs(found.value - rms) <= 4 * found.stderr
        assert found.kind == "estimate"
        assert float(torch.trapezoid(found.arrays["density"], found.arrays["grid"])) == pytest.approx(1, abs=1e-3)
