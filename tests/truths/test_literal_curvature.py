"""Norms, normalised sharpness, eigenvalues and traces against matrices written out, on every kind of network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from literal import call_jacobians, count_calls, gauss_newton, input_jacobian, matrices
from literal_curvature import (
    LOSSES,
    along_columns,
    bare_inputs,
    block_matrix,
    call_inputs,
    flat_parameters,
    hessian_of,
    jacobian_above,
    jacobian_of,
    largest,
    least,
    linear_layers,
    norm2,
    operator_matrix,
    output_derivatives,
    places,
    row_blocks,
    slices,
    with_parameters,
)
from networks import NETWORKS, network
from scipy.linalg import block_diag
from torch import Tensor, nn

import flatlens as fl
from flatlens.measures import (
    adaptive_sharpness,
    ggn_norm,
    hessian_trace,
    interpolation_gap,
    layer_factors,
    layer_sharpness,
    matrix_normalized_sharpness,
    maximal_relative_flatness,
    normalized_sharpness,
)

torch.set_num_threads(1)

TOL = 1e-9
ADAPTIVE, TRACE, GAP = adaptive_sharpness(exact=True), hessian_trace(exact=True), interpolation_gap(exact=True)
ENDS, GGN = (
    fl.measures.MEASURES["sharpness"](top_k=3, bottom_k=2, rtol=TOL, layers=True),
    ggn_norm(rtol=TOL, layers=True),
)
ALIGNED = ggn_norm(rtol=1e-7, top_k=2, alignment=True)
LAYERS, ROWS, FACTORS = layer_sharpness(rtol=TOL), maximal_relative_flatness(rtol=TOL), layer_factors(rtol=TOL)
MEASURED = [
    "input_invariant_mls", "neuron_flatness", "neuron_flatness_ggn", "adaptive_sharpness_ggn",
    "matrix_normalized_sharpness", matrix_normalized_sharpness(frobenius=True),
    "normalized_sharpness", normalized_sharpness(lam=3.0), "fisher_rao", "weight_norm",
    "jacobian_frobenius", "parameter_jacobian_frobenius", "output_norm", "feature_norm",
    ADAPTIVE, TRACE, GAP, ENDS, GGN, LAYERS, ROWS, FACTORS,
    ALIGNED,
]  # fmt: skip


@dataclass
class Case:
    """A network, what flatlens says of it, and its matrices."""

    name: str
    loss: str
    net: nn.Module
    x: Tensor
    y: Tensor
    report: fl.Report
    H: Tensor
    J: Tensor
    f: Tensor
    s: Tensor
    C: Tensor
    G: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.G = gauss_newton(self.J, self.C)

    def block(self, A: Tensor, *names: str) -> Tensor:
        """The block of some parameters."""
        at = places(self.net, list(names))
        return A[at][:, at]

    def owned(self, measure: str) -> dict[str, list[str]]:
        """The parameters behind each row of a measure over parameters: its own, but for those with rows of theirs."""
        rows = [at for key, at in self.report if key == measure and at is not None]
        known = list(slices(self.net))
        found = {}
        for at in rows:
            inside = [n for n in known if n.rpartition(".")[0] == at and n not in rows]
            found[at] = [at] if at in known else inside
        return found

    def weights(self) -> list[tuple[str, str, nn.Module]]:
        """(row, parameter, layer) of every matrix, also of one that acts outside its layer, too."""
        return [(layer, weight, module) for layer, (weight, module) in matrices(self.net).items()]


CASES = [(name, "cross_entropy") for name in NETWORKS]
CASES += [(name, loss) for name in ("mlp-gelu", "cnn-tanh", "twice-tanh") for loss in ("half_squared_error", "mse")]
CASES += [("mlp-relu", "mse"), ("residual", "half_squared_error"), ("bare", "half_squared_error"), ("attention", "mse")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request) -> Case:
    name, loss = request.param
    net, x, y = network(name)
    report = fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), MEASURED)
    H = hessian_of(net, lambda f: LOSSES[loss](f, y).mean(), x)
    f = net(x.clone()).detach()
    return Case(name, loss, net, x, y, report, H, jacobian_of(net, x), f, *output_derivatives(LOSSES[loss], f, y))


def close(value: float, truth: float, tolerance: float = 1e-8, scale: float = 0.0) -> None:
    assert value == pytest.approx(float(truth), rel=tolerance, abs=max(1e-13, tolerance * scale))


def test_all_of_it_is_exact_or_bounded_to_the_tolerance(case: Case) -> None:
    for (key, _), estimate in case.report.items():
        if key.startswith(ALIGNED.key):  # its error is of the vectors, too
            continue
        assert estimate.margin == 0
        tied = case.name == "bare" and key.endswith(".jacobian")  # of a weight that acts elsewhere, too
        assert estimate.kind in ("exact", "lower bound") or tied, key


def test_the_outliers_of_the_hessian_and_of_its_gauss_newton_part(case: Case) -> None:
    """||V_H^T V_GN||_F^2 / k, and the largest difference of the eigenvalues, of the explicit matrices."""
    (h, V), (g, U) = torch.linalg.eigh(case.H), torch.linalg.eigh(case.G)
    found, far = case.report[f"{ALIGNED.key}.alignment"], case.report[f"{ALIGNED.key}.difference"]
    difference = float((h[-2:] - g[-2:]).abs().max() / h[-1])
    assert abs(far.value - difference) <= 1.96 * far.stderr + 1e-9
    assert difference <= norm2(case.H - case.G) / float(h[-1]) + 1e-12  # Weyl
    if found.kind != "undefined":
        truth = float((V[:, -2:].T @ U[:, -2:]).square().sum()) / 2
        assert abs(found.value - truth) <= 1.96 * found.stderr + 1e-9
        assert found.arrays["overlaps"].sum() / 2 == pytest.approx(found.value)
        assert (found.arrays["cosines"].square().sum() / 2).item() == pytest.approx(found.value, abs=1e-6)
    else:
        assert min(float(h[-2] - h[-3]), float(g[-2] - g[-3])) < 1e-3 * float(h[-1])


def test_invariant_sensitivity_at_the_input_and_through_every_call(case: Case) -> None:
    J = input_jacobian(case.net, case.x)
    truth = (case.x.flatten(1).square() * J.square().sum(1)).sum(1).mean()
    close(case.report["input_invariant_mls"].value, truth)
    close(case.report["jacobian_frobenius"].value, J.square().sum((1, 2)).mean())
    for layer in linear_layers(case.net):
        calls = zip(call_jacobians(case.net, layer, case.x), call_inputs(case.net, layer, case.x), strict=True)
        for number, (J, phi) in enumerate(calls):
            key = layer if number == 0 else f"{layer}:{number}"
            close(case.report["input_invariant_mls", key].value, (phi.square() * J.square().sum(1)).sum(1).mean())
            close(case.report["jacobian_frobenius", key].value, J.square().sum((1, 2)).mean())


@pytest.mark.parametrize("key", ["neuron_flatness", "neuron_flatness_ggn"])
def test_curvature_along_every_column(case: Case, key: str) -> None:
    A = case.G if key.endswith("ggn") else case.H
    sums, peaks = [], []
    for layer, weight, module in case.weights():
        columns = along_columns(case.block(A, weight), module)
        ours = case.report[key, layer].arrays["columns"].flatten()
        assert torch.allclose(ours, columns, rtol=1e-8, atol=1e-10 * float(columns.abs().max()))
        close(case.report[key, layer].value, columns.sum(), scale=float(columns.abs().sum()))
        close(case.report[f"{key}.max", layer].value, columns.max())
        sums.append(float(columns.sum()))
        peaks.append(float(columns.max()))
    close(case.report[key].value, sum(sums), scale=sum(map(abs, sums)))
    close(case.report[f"{key}.max"].value, max(peaks))


@pytest.mark.parametrize("key", ["adaptive_sharpness_ggn", ADAPTIVE.key])
def test_curvature_along_every_parameter(case: Case, key: str) -> None:
    A = case.G if key.endswith("ggn") else case.H
    terms = flat_parameters(case.net).square() * A.diagonal()
    close(case.report[key].value, terms.sum(), scale=float(terms.abs().sum()))
    owned = case.owned(key)
    assert sorted(name for names in owned.values() for name in names) == sorted(slices(case.net))
    for at, names in owned.items():
        mine = terms[places(case.net, names)]
        close(case.report[key, at].value, mine.sum(), scale=float(mine.abs().sum()))


def test_the_trace_and_its_blocks(case: Case) -> None:
    close(case.report[TRACE.key].value, case.H.trace(), scale=float(case.H.diagonal().abs().sum()))
    close(case.report[f"{TRACE.key}.gauss_newton"].value, case.G.trace())
    close(case.report[f"{TRACE.key}.functional_hessian"].value, (case.H - case.G).trace(), scale=float(case.G.trace()))
    owned = case.owned(TRACE.key)
    assert sorted(name for names in owned.values() for name in names) == sorted(slices(case.net))
    for at, names in owned.items():
        block = case.block(case.H, *names)
        close(case.report[TRACE.key, at].value, block.trace(), scale=float(block.diagonal().abs().sum()))


def test_distance_from_the_trace_at_interpolation(case: Case) -> None:
    size = float(case.J.square().sum((1, 2)).mean())
    close(case.report["parameter_jacobian_frobenius"].value, size)
    close(case.report[GAP.key].value, float(case.H.trace()) - size, scale=size)


def layer_norm(case: Case, module: nn.Module, layer: str) -> float:
    """||W||_2 of the layer's map on one input."""
    if isinstance(module, nn.Linear):
        return norm2(module.weight.detach())
    shapes: list[torch.Size] = []
    handle = module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[1:]))
    case.net(case.x.clone())
    handle.remove()
    return norm2(operator_matrix(module, tuple(shapes[0])))


def test_sizes_of_weights(case: Case) -> None:
    frobenius, spectral, kernel = [], [], []
    for layer, _, module in case.weights():
        frobenius.append(float(module.weight.detach().norm()))
        spectral.append(layer_norm(case, module, layer))
        kernel += [] if isinstance(module, nn.Linear) else [norm2(block_matrix(module))]
        close(case.report["weight_norm", layer].value, frobenius[-1])
        close(case.report["weight_norm.spectral", layer].value, spectral[-1])
        if not isinstance(module, nn.Linear):
            close(case.report["weight_norm.kernel", layer].value, kernel[-1])
    close(case.report["weight_norm"].value, math.sqrt(sum(n**2 for n in frobenius)))
    close(case.report["weight_norm.spectral"].value, max(spectral))
    assert ("weight_norm.kernel" in case.report) == bool(kernel)
    if kernel:
        close(case.report["weight_norm.kernel"].value, max(kernel))


def test_matrix_normalised_sharpness(case: Case) -> None:
    for frobenius in (False, True):
        key, terms = matrix_normalized_sharpness(frobenius=frobenius).key, []
        for layer, weight, module in case.weights():
            J = case.J[:, :, places(case.net, [weight])]
            norm = float(module.weight.detach().norm()) if frobenius else layer_norm(case, module, layer)
            terms.append(norm * math.sqrt(float(J.square().sum((1, 2)).mean())))
            close(case.report[key, layer].value, terms[-1])
        close(case.report[key].value, sum(terms))


def test_normalised_sharpness_is_the_minimum(case: Case) -> None:
    terms = []
    for layer, weight, module in case.weights():
        groups = getattr(module, "groups", 1)
        h = case.block(case.G, weight).diagonal().reshape(module.weight.flatten(1).shape).chunk(groups)
        w = (module.weight.detach().flatten(1).square() / 4).chunk(groups)
        terms.append(sum(least(a, b) for a, b in zip(h, w, strict=True)))
        close(case.report["normalized_sharpness", layer].value, terms[-1])
        close(case.report["normalized_sharpness(lam=3.0)", layer].value, terms[-1] / 3)
    close(case.report["normalized_sharpness"].value, sum(terms))


def test_fisher_rao(case: Case) -> None:
    gradients = torch.einsum("nk,nkp->np", case.s, case.J)
    empirical = gradients.T @ gradients / len(case.x)
    theta = flat_parameters(case.net)
    truth = math.sqrt(float(theta @ empirical @ theta))
    close(case.report["fisher_rao.parameters"].value, truth)  # from the columns of weights, where they have some
    problem = fl.Problem(case.net, case.loss, (case.x, case.y))
    for beside, products in (([], 1), (["ggn_trace"], 0)):  # by a product; from the layers' outputs
        alone = fl.measure(fl.Lens(problem), ["fisher_rao", *beside])["fisher_rao.parameters"]
        close(alone.value, truth)
        assert alone.products == products
    inner = (case.s * case.f).sum(1).square().mean().sqrt()
    close(case.report["fisher_rao"].value, len(case.weights()) * float(inner))


def test_sizes_of_outputs_and_features(case: Case) -> None:
    close(case.report["output_norm"].value, case.f.norm())
    norms = []
    for layer, weight, _ in case.weights():
        bare = layer == weight
        for number, phi in enumerate(
            [bare_inputs(case.net, layer, case.x)] if bare else call_inputs(case.net, layer, case.x)
        ):
            norms.append(norm2(phi))
            close(case.report["feature_norm", layer if number == 0 else f"{layer}:{number}"].value, norms[-1])
    close(case.report["feature_norm"].value, max(norms))


def test_factors_of_the_gauss_newton_matrix(case: Case) -> None:
    report, key = case.report, FACTORS.key
    whole = torch.from_numpy(block_diag(*case.C.numpy())) / len(case.C)
    close(report[f"{key}.loss_curvature"].value, math.sqrt(largest(whole)))
    terms = []
    for layer, weight, module in case.weights():
        terms.append(largest(case.block(case.G, weight)))
        close(report[key, layer].value, terms[-1])
        if layer == weight:
            close(report[f"{key}.features", layer].value, norm2(bare_inputs(case.net, layer, case.x)))
            continue
        read = [phi.flatten(1) for phi in call_inputs(case.net, layer, case.x)]  # of all its calls, side by side
        close(report[f"{key}.features", layer].value, norm2(torch.cat(read, 1)))
        if (case.name, layer) == ("bare", "tied"):  # its weight also acts elsewhere
            assert report[f"{key}.jacobian", layer].kind == "undefined"
            continue
        if count_calls(case.net, module, case.x) == 1:
            above = torch.linalg.matrix_norm(jacobian_above(case.net, layer, case.x), 2).max()
            close(report[f"{key}.jacobian", layer].value, above)
        if isinstance(module, nn.Linear) and case.name not in ("attention", "attention-tokens-first", *TWICE):
            three = [report[f"{key}.loss_curvature"]] + [report[f"{key}.{p}", layer] for p in ("features", "jacobian")]
            assert terms[-1] <= math.prod(e.value**2 for e in three) * (1 + 1e-12)
    close(report[key].value, sum(terms))
    at = places(case.net, [weight for _, weight, _ in case.weights()])
    assert largest(case.G[at][:, at]) <= sum(terms) * (1 + 1e-12)


TWICE = ("twice-relu", "twice-tanh")


def test_both_ends_of_the_spectrum(case: Case) -> None:
    values = torch.linalg.eigvalsh(case.H)
    truth = torch.cat([values.flip(0)[:3], values[:2]])
    found = case.report[ENDS.key].arrays
    assert torch.allclose(found["eigenvalues"], truth, rtol=1e-8, atol=1e-8 * float(values.abs().max()))
    assert bool((found["residuals"] <= 1.01 * TOL * values.abs().max()).all())
    close(case.report[ENDS.key].value, values[-1])
    close(case.report[GGN.key].value, largest(case.G))
    for kind, A in ((ENDS, case.H), (GGN, case.G)):
        owned = case.owned(kind.key)
        assert sorted(name for names in owned.values() for name in names) == sorted(slices(case.net))
        for at, names in owned.items():
            block = case.block(A, *names)
            close(case.report[kind.key, at].value, largest(block), scale=norm2(block))


def test_sharpness_of_each_layers_weight(case: Case) -> None:
    report, key = case.report, LAYERS.key
    plain, kappa = [], []
    for layer, weight, module in case.weights():
        block = case.block(case.H, weight)
        plain.append(largest(block))
        kappa.append(plain[-1] * float(module.weight.detach().square().sum()))
        close(report[key, layer].value, plain[-1], scale=norm2(block))
        close(report[f"{key}.kappa", layer].value, kappa[-1], scale=kappa[-1] / plain[-1] * norm2(block))
    for part, truth in (("", sum(plain)), (".max", max(plain)), (".kappa", sum(kappa)), (".kappa_max", max(kappa))):
        close(report[f"{key}{part}"].value, truth)


def test_maximal_relative_flatness(case: Case) -> None:
    report, key = case.report, ROWS.key
    layers = []
    for layer, weight, module in case.weights():
        blocks = row_blocks(case.block(case.H, weight), module)
        rows = torch.tensor([largest(block) for block in blocks], dtype=torch.float64)
        sizes = torch.tensor([norm2(block) for block in blocks], dtype=torch.float64)
        norms = module.weight.detach().flatten(1).square().sum(1)
        assert torch.allclose(
            report[key, layer].arrays["rows"].flatten(), rows, rtol=1e-8, atol=1e-8 * float(sizes.max())
        )
        layers.append(float(norms @ rows))
        close(report[key, layer].value, layers[-1], scale=float(norms @ sizes))
    scale = max(map(abs, layers))
    close(report[key].value, layers[-1], scale=scale)
    close(report[f"{key}.sum"].value, sum(layers), scale=scale)
    close(report[f"{key}.max"].value, max(layers), scale=scale)


@pytest.mark.parametrize("name", ["mlp-tanh", "cnn-relu-inplace", "attention"])
def test_class_weights_and_ignored_labels(name: str) -> None:
    net, x, y = network(name, n=7)
    y[2] = y[5] = -7
    loss = nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.3], dtype=torch.float64), ignore_index=-7, label_smoothing=0.1)
    report = fl.measure(fl.Lens(fl.Problem(net, loss, (x, y))), [TRACE, ADAPTIVE, ENDS, LAYERS, ROWS, "fisher_rao"])
    H = hessian_of(net, lambda f: loss(f, y), x)
    close(report[TRACE.key].value, H.trace())
    close(report[ADAPTIVE.key].value, (flat_parameters(net).square() * H.diagonal()).sum())
    close(report[ENDS.key].value, largest(H))
    for layer, (weight, module) in matrices(net).items():
        at = places(net, [weight])
        close(report[LAYERS.key, layer].value, largest(H[at][:, at]))
        rows = [largest(block) for block in row_blocks(H[at][:, at], module)]
        norms = module.weight.detach().flatten(1).square().sum(1)
        truth = float(norms @ torch.tensor(rows, dtype=torch.float64))
        close(report[ROWS.key, layer].value, truth, scale=float(norms.sum() * norm2(H[at][:, at])))


def test_outputs_are_those_of_the_network() -> None:
    """The literal definitions' own forward pass."""
    for name in NETWORKS:
        net, x, _ = network(name)
        assert torch.allclose(with_parameters(net, flat_parameters(net), x.clone()), net(x.clone()), atol=1e-12)
