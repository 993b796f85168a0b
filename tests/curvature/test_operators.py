"""Curvature operators and Jacobians against matrices written out."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from builders import normal
from literal import gauss_newton, input_jacobian
from literal_curvature import (
    LOSSES,
    flat_parameters,
    hessian_of,
    jacobian_of,
    output_derivatives,
    places,
    slices,
    with_parameters,
)
from networks import module_of, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.curvature import (
    Fisher,
    GaussNewton,
    Hessian,
    InputJacobian,
    Operator,
    ParameterJacobian,
    Residual,
    eigenpairs,
    spectral_density,
)
from flatlens.errors import BadInput, BadLoss, UnknownName

torch.set_num_threads(1)

OPERATORS: list[type[Operator]] = [Hessian, GaussNewton, Residual, Fisher]


def explicit(net: nn.Module, loss: str, x: Tensor, y: Tensor) -> dict[type[Operator], Tensor]:
    """Each operator's matrix over all parameters."""
    H = hessian_of(net, lambda f: LOSSES[loss](f, y).mean(), x)
    _, C = output_derivatives(LOSSES[loss], net(x.clone()).detach(), y)
    G = gauss_newton(jacobian_of(net, x), C)
    return {Hessian: H, GaussNewton: G, Residual: H - G, Fisher: G}


def close(ours: Tensor, truth: Tensor, tolerance: float = 1e-10) -> None:
    assert ours.shape == truth.shape
    assert torch.allclose(ours, truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()) + 1e-15)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["mlp-tanh", "twice-tanh", "bare"])
def test_whole_matrices(name: str, loss: str) -> None:
    net, x, y = network(name, n=3)
    problem = fl.Problem(net, loss, (x, y))
    for kind, truth in explicit(net, loss, x, y).items():
        close(kind(problem).matrix(), truth)


@pytest.mark.parametrize("kind", [*OPERATORS, Fisher], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_beyond_the_memory_is_refused_before_any_product(kind: type[Operator], dtype: torch.dtype) -> None:
    net, (x, y) = nn.Linear(400, 500).to(dtype), (normal(2, 400).to(dtype), torch.tensor([0, 1]))  # 200,500 parameters
    for memory in ("1GiB", "20GB"):
        operator = kind(fl.Problem(net, "cross_entropy", (x, y), memory=memory))
        size = f"{operator.size**2 * dtype.itemsize / 1e9:.3g} GB"
        with pytest.raises(fl.errors.BadInput, match=rf"200,500 x 200,500 numbers take {size}, and .* allows"):
            operator.matrix()
        assert operator.products == operator.certificate.products == 0
    few = kind(fl.Problem(net, "cross_entropy", (x, y), memory=500**2 * dtype.itemsize), ["bias"])  # in four parts
    assert torch.equal(few.matrix(), few(torch.eye(500, dtype=dtype)))
    assert few.products == 1000


@pytest.mark.parametrize("name", ["cnn-relu-inplace", "attention"])
def test_products_with_convolutions_and_attention(name: str) -> None:
    net, x, y = network(name, n=3)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    for kind, truth in explicit(net, "cross_entropy", x, y).items():
        v = normal(3, len(truth))
        close(kind(problem)(v), v @ truth)


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda k: k.__name__)
def test_subsets_dicts_and_many_vectors(kind: type[Operator]) -> None:
    net, x, y = network("mlp-gelu")
    problem = fl.Problem(net, "cross_entropy", (x, y))
    whole = explicit(net, "cross_entropy", x, y)[kind]
    for names, meant in (
        (["0.weight"], ["0.weight"]),
        ("2", ["2.weight", "2.bias"]),
        (["4", "0.bias", "4.weight"], ["0.bias", "4.weight", "4.bias"]),  # in the network's order, each once
    ):
        operator, at = kind(problem, names), places(net, meant)
        close(operator.matrix(), whole[at][:, at])
        assert operator.products == operator.size == len(at)
    operator = kind(problem, ["0.bias", "4.weight"])
    at = places(net, ["0.bias", "4.weight"])
    A = whole[at][:, at]
    many = normal(4, len(at))
    close(operator(many), many @ A)
    assert operator.products == 4
    close(operator(many[0]), A @ many[0])
    assert operator.products == 5
    V = normal(3, 5)
    out = operator({"4.weight": V})
    assert operator.products == 6
    assert {name: v.shape for name, v in out.items()} == {"0.bias": (7,), "4.weight": (3, 5)}
    close(torch.cat([out["0.bias"], out["4.weight"].flatten()]), A[:, 7:] @ V.flatten())


def fishers(loss: str, f: Tensor, y: Tensor) -> Tensor:
    """E[s s^T] of targets drawn from the model, (n, N, N)."""
    p = f.softmax(1)
    if loss == "cross_entropy":
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1) * (1 if loss.startswith("half") else 2 / 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_empirical_fisher(loss: str) -> None:
    net, x, y = network("cnn-tanh")
    s, _ = output_derivatives(LOSSES[loss], net(x.clone()).detach(), y)
    g = torch.einsum("nk,nkp->np", s, jacobian_of(net, x))
    close(Fisher(fl.Problem(net, loss, (x, y)), kind="empirical").matrix(), g.T @ g / len(x))


def test_the_exact_fisher_is_the_models_own_distribution() -> None:
    """Label smoothing bends the loss, and targets of its own do; neither touches the model's distribution."""
    net, x, _ = network("mlp-tanh")
    J, f = jacobian_of(net, x), net(x).detach()
    soft = normal(5, 3).softmax(1)
    for loss, y in ((nn.CrossEntropyLoss(label_smoothing=0.3), torch.arange(5) % 3), ("cross_entropy", soft)):
        close(Fisher(fl.Problem(net, loss, (x, y))).matrix(), gauss_newton(J, fishers("cross_entropy", f, y)))


@pytest.mark.parametrize("loss", LOSSES)
def test_sampled_fishers_tend_to_the_exact_one(loss: str) -> None:
    net, x, y = network("mlp-tanh", n=4)
    problem = fl.Problem(net, loss, (x, y))
    exact = Fisher(problem, "4").matrix()
    runs = torch.stack([
        Fisher(problem, "4", kind="sampled", draws=10, generator=torch.Generator().manual_seed(seed)).matrix()
        for seed in range(60)
    ])  # fmt: skip
    z = (runs.mean(0) - exact) / (runs.std(0) / len(runs) ** 0.5 + 1e-12 * exact.abs().max())
    assert float(z.abs().max()) < 5


def test_more_draws_are_closer() -> None:
    net, x, y = network("mlp-tanh", n=4)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    exact = Fisher(problem, "4").matrix()
    off = [float((Fisher(problem, "4", kind="sampled", draws=k).matrix() - exact).norm()) for k in (1, 100, 10_000)]
    assert off[0] > 3 * off[1] > 9 * off[2]


def loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), batch_size=3)


@pytest.mark.parametrize("memory", [1, "1KB", "1GiB"])
@pytest.mark.parametrize("kind", OPERATORS, ids=lambda k: k.__name__)
def test_batches_of_unequal_size_kept_or_not(kind: type[Operator], memory: str | int) -> None:
    net, x, y = network("cnn-tanh", n=7)
    operator = kind(fl.Problem(net, "cross_entropy", loader(x, y), memory=memory))
    truth = explicit(net, "cross_entropy", x, y)[kind]
    v = normal(operator.size)
    for _ in range(2):  # from graphs just made, and from what is kept of them
        close(operator(v), truth @ v)
    many = normal(3, operator.size, seed=1)
    close(operator(many), many @ truth)
    assert operator.products == 5


@pytest.mark.parametrize("memory", ["1KB", "1GiB"])
def test_the_same_targets_are_drawn_for_every_product(memory: str) -> None:
    net, x, y = network("mlp-tanh", n=7)
    problem = fl.Problem(net, "cross_entropy", loader(x, y), memory=memory)
    operator = Fisher(problem, kind="sampled", generator=torch.Generator().manual_seed(3))
    v = normal(operator.size)
    once = operator(v)
    assert torch.equal(operator(v), once)
    if memory == "1GiB":
        A = operator.matrix()
        close(A @ v, once)
        close(A, A.T)
        assert int((torch.linalg.eigvalsh(A) > 1e-12).sum()) <= 7  # one draw a sample
    again = Fisher(problem, kind="sampled", generator=torch.Generator().manual_seed(3))
    other = Fisher(problem, kind="sampled", generator=torch.Generator().manual_seed(4))
    assert torch.equal(again(v), once)
    assert not torch.allclose(other(v), once)


def tied_network() -> nn.Module:
    """One weight in two places, one that nothing uses, one frozen."""
    net = module_of(
        lambda net, x: net.head(torch.tanh(net.second(torch.tanh(net.first(x))))), first=(4, 4), second=(4, 4)
    )
    net.second.weight = net.first.weight
    net.idle = nn.Linear(2, 2)
    net.head = nn.Linear(4, 3)
    net.first.bias.requires_grad_(False)
    return net


def tied() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return tied_network().double(), torch.randn(5, 4).double(), torch.arange(5) % 3


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda k: k.__name__)
def test_tied_unused_and_frozen_parameters(kind: type[Operator]) -> None:
    net, x, y = tied()
    thawed = copy.deepcopy(net)
    for p in thawed.parameters():
        p.requires_grad_()
    truth = explicit(thawed, "half_squared_error", x, y)[kind]
    everything = kind(fl.Problem(net, "half_squared_error", (x, y), parameters="all"))
    assert everything.size == 16 + 4 + 4 + 6 + 15
    close(everything.matrix(), truth)
    where = slices(net)["idle.weight"]
    assert not everything.matrix()[where].any()
    trainable = kind(fl.Problem(net, "half_squared_error", (x, y)))
    at = places(net, [name for name in slices(net) if name != "first.bias"])
    close(trainable.matrix(), truth[at][:, at])
    assert not net.first.bias.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_nothing_at_all_depends_on_the_parameters() -> None:
    net, x, y = tied()
    for kind in OPERATORS:
        operator = kind(fl.Problem(net, "cross_entropy", (x, y)), "idle")
        assert not operator.matrix().any()


def test_the_gauss_newton_matrix_of_a_loss_without_curvature_is_zero() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    problem = fl.Problem(net, nn.L1Loss(), (torch.randn(6, 4).double(), torch.randn(6, 3).double()))
    assert not GaussNewton(problem).matrix().any()
    assert fl.measure(fl.Lens(problem), "ggn_norm")["ggn_norm"].value == 0


def weighed(ignore: int, smoothing: float = 0.0, weights: tuple[float, ...] = (0.5, 2.0, 1.3)) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(
        torch.tensor(weights, dtype=torch.float64), ignore_index=ignore, label_smoothing=smoothing
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_and_ignored_labels_are_divided_out_once(smoothing: float) -> None:
    net, x, y = network("mlp-gelu", n=7)
    y[1] = y[5] = -1
    loss = weighed(-1, smoothing)
    H = hessian_of(net, lambda f: loss(f, y), x)  # torch's own mean over the whole data
    J, f = jacobian_of(net, x), net(x).detach()
    mass = torch.where(y >= 0, loss.weight[y.clamp(min=0)], 0.0)

    def one(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            f, y, weight=loss.weight, ignore_index=-1, label_smoothing=smoothing, reduction="none"
        ) / float(mass.sum())

    s, C = output_derivatives(one, f, y)
    G = gauss_newton(J, C) * len(x)
    own = gauss_newton(J, fishers("cross_entropy", f, y) * mass[:, None, None]) * len(x) / mass.sum()
    g = torch.einsum("nk,nkp->np", s, J)[mass > 0] * mass.sum()  # of l_i itself, its class weight in it
    empirical = (g / mass[mass > 0, None]).T @ g / mass.sum()
    v = normal(3, len(H))
    for memory in ("1KB", "1GiB"):
        problem = fl.Problem(net, loss, loader(x, y), memory=memory)
        for kind, truth in ((Hessian, H), (GaussNewton, G), (Residual, H - G), (Fisher, own)):
            close(kind(problem)(v), v @ truth)
        close(Fisher(problem, kind="empirical")(v), v @ empirical)


def test_a_loss_without_a_distribution_has_no_fisher() -> None:
    net, x, y = network("mlp-tanh")
    problem = fl.Problem(net, lambda f, y: f.square().sum(1), (x, y))
    for kind in ("exact", "sampled"):
        with pytest.raises(BadLoss, match="negative log-likelihood"):
            Fisher(problem, kind=kind)(normal(107))
    g = torch.einsum("nk,nkp->np", 2 * net(x).detach(), jacobian_of(net, x))
    close(Fisher(problem, kind="empirical").matrix(), g.T @ g / len(x))


@pytest.mark.parametrize("memory", ["1KB", "1GiB"])
@pytest.mark.parametrize("name", ["cnn-tanh", "attention", "bare", "mlp-relu"])
def test_jacobians_of_the_outputs(name: str, memory: str) -> None:
    net, x, y = network(name, n=7)
    problem = fl.Problem(net, "cross_entropy", loader(x, y), memory=memory)
    J, w = jacobian_of(net, x), normal(7, 3)
    ours = ParameterJacobian(problem)
    for _ in range(2):
        v = normal(ours.space.size, seed=1)
        close(ours.times(v), J @ v)
        close(ours.transposed_times(w), torch.einsum("nk,nkp->p", w, J))
    assert ours.products == 4
    layer = next(iter(slices(net))).rpartition(".")[0] or "scale"
    part = ParameterJacobian(problem, layer)
    at = places(net, [n for n in slices(net) if n == layer or n.startswith(f"{layer}.")])
    close(part.transposed_times(w), torch.einsum("nk,nkp->p", w, J)[at])
    Jx, inputs = input_jacobian(net, x), InputJacobian(problem)
    v = normal(*x.shape, seed=2).flatten(1)
    for _ in range(2):
        close(inputs.times(v), torch.einsum("nkm,nm->nk", Jx, v))
        close(inputs.transposed_times(w), torch.einsum("nkm,nk->nm", Jx, w))
    assert inputs.products == 4


def with_norms(volumes: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        if volumes:
            net = nn.Sequential(
                nn.Conv2d(1, 2, 2, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
            )
            x = torch.randn(10, 1, 3, 3)
        else:
            net = nn.Sequential(
                nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
            )
            x = torch.randn(10, 5)
        net = net.double()
        net(x.double())  # running statistics that are not at their defaults
        return net, x.double(), torch.randint(0, 3, (10,))


def in_train_mode(net: nn.Module, x: Tensor, ghost: int) -> Callable[[Tensor], Tensor]:
    """flat parameters -> outputs on ghost batches, each normalised by itself."""
    copied = copy.deepcopy(net).train()
    return lambda flat: torch.cat([with_parameters(copied, flat, part) for part in x.split(ghost)])


@pytest.mark.parametrize(
    ("loss", "volumes", "batched", "memory"),
    [("cross_entropy", False, False, "1GiB"), ("mse", True, True, "1GiB"), ("cross_entropy", True, True, 1)],
)
def test_ghost_batches(loss: str, volumes: bool, batched: bool, memory: str | int) -> None:
    """Train-mode BatchNorm over batches of 4, 4 and 2, however the data is read; no statistic moves."""
    net, x, y = with_norms(volumes)
    before = {name: b.clone() for name, b in net.named_buffers()}
    flat = flat_parameters(net)
    outputs = in_train_mode(net, x, 4)
    H = torch.autograd.functional.hessian(lambda v: LOSSES[loss](outputs(v), y).mean(), flat)
    J = torch.autograd.functional.jacobian(outputs, flat)
    _, C = output_derivatives(LOSSES[loss], outputs(flat), y)
    G = gauss_newton(J, C)
    net.train()
    data = loader(x, y) if batched else (x, y)
    problem = fl.Problem(net, loss, data, batchnorm="train", ghost_batch=4, memory=memory)
    assert problem.coupled
    v = normal(len(flat))
    for kind, truth in ((Hessian, H), (GaussNewton, G), (Residual, H - G), (Fisher, G)):
        close(kind(problem)(v), truth @ v, 1e-9)
    close(ParameterJacobian(problem).times(v), J @ v, 1e-9)
    measured = ["sharpness(rtol=1e-9, top_k=2)", "ggn_norm(rtol=1e-9)", "hessian_trace(exact=True)", "hessian_trace"]
    report = fl.measure(fl.Lens(problem), measured)
    values = torch.linalg.eigvalsh(H)
    top = report["sharpness(top_k=2, rtol=1e-09)"].arrays["eigenvalues"]
    assert torch.allclose(top, values.flip(0)[:2], rtol=1e-8, atol=1e-8 * float(values.abs().max()))
    assert report["ggn_norm(rtol=1e-09)"].value == pytest.approx(float(torch.linalg.eigvalsh(G)[-1]), rel=1e-8)
    assert report["hessian_trace(exact=True)"].value == pytest.approx(float(H.trace()), rel=1e-8)
    rough = report["hessian_trace"]
    assert rough.value == pytest.approx(float(H.trace()), abs=max(5 * rough.stderr, 1e-8 * abs(rough.value)))
    assert net.training
    assert all(m.training and m.track_running_stats for m in net.modules() if isinstance(m, nn.BatchNorm1d))
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())


@pytest.mark.parametrize("size", [4, 100])
def test_batch_statistics_are_an_option_of_the_eigenvalues(size: int) -> None:
    """The same as a problem in ghost batches; what else is measured beside them stays in eval mode."""
    net, x, y = with_norms()
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    coupled = fl.Lens(fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=size))
    for name in ("sharpness", "ggn_norm"):
        plain = f"{name}(rtol=1e-06, layers=True)"
        asked = f"{name}(rtol=1e-06, layers=True, batch_statistics={size})"
        found, truth = fl.measure(lens, [asked, plain, "jacobian_norm"]), fl.measure(coupled, plain)
        for layer in (None, "0"):
            assert found[asked, layer].value == pytest.approx(truth[plain, layer].value, rel=1e-5)
        assert found[plain].value != pytest.approx(found[asked].value, rel=1e-2)
        assert found["jacobian_norm"].kind == "exact"


@pytest.mark.parametrize(("size", "why"), [(9, "the last of 10 samples"), (1, "at least 2"), (True, "other than True")])
def test_sizes_of_ghost_batches_that_leave_one_alone_are_refused(size: object, why: str) -> None:
    net, x, y = with_norms()
    with pytest.raises(BadInput, match=why):
        fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), f"sharpness(batch_statistics={size})")


def test_ghost_batches_leave_what_is_per_sample_undefined() -> None:
    net, x, y = with_norms()
    lens = fl.Lens(fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=5))
    others = ("generalisation_gap", "preconditioned_sharpness")  # they need held-out data and an optimiser
    names = [m for m in fl.measures.MEASURES if not m.startswith("test_") and m not in others]
    report = fl.measure(lens, names)
    for key, layer in set(report) - {("eigenspace.update", None), ("eigenspace.overlap", None)}:  # they need two looks
        defined = fl.measures.named(key.partition(".")[0])[0].works_coupled
        estimate = report[key, layer]
        assert (estimate.kind == "undefined") != defined, key
        assert defined or "couples" in estimate.note
        assert (estimate.value == estimate.value) == defined
    f = in_train_mode(net, x, 5)(flat_parameters(net))
    assert report["loss"].value == pytest.approx(float(LOSSES["cross_entropy"](f, y).mean()), rel=1e-10)


def bad_calls() -> dict[str, Callable[[fl.Problem], object]]:
    calls: dict[str, Callable[[fl.Problem], object]] = {
        "short vector": lambda p: Hessian(p)(torch.ones(3)),
        "stacked too deep": lambda p: Hessian(p)(torch.ones(1, 1, 107)),
        "no vector": lambda p: Hessian(p)(torch.tensor(1.0)),
        "unknown part": lambda p: Hessian(p)({"0.wieght": torch.ones(7, 6)}),
        "part not of this operator": lambda p: Hessian(p, "0")({"2.bias": torch.ones(5)}),
        "part of a wrong shape": lambda p: Hessian(p)({"0.weight": torch.ones(6, 7)}),
        "unknown module": lambda p: GaussNewton(p, ["9"]),
        "part of a name": lambda p: GaussNewton(p, "0.wei"),
        "unknown kind": lambda p: Fisher(p, kind="true"),
        "no draws": lambda p: Fisher(p, draws=0),
        "half a draw": lambda p: Fisher(p, draws=0.5),
        "short start": lambda p: eigenpairs(Hessian(p), start=torch.ones(3)),
        "no eigenpairs": lambda p: eigenpairs(Hessian(p), top_k=0),
        "negative eigenpairs": lambda p: eigenpairs(Hessian(p), top_k=-1),
        "one probe": lambda p: spectral_density(Hessian(p), probes=1),
        "no steps": lambda p: spectral_density(Hessian(p), steps=0),
        "Jv": lambda p: ParameterJacobian(p).times(torch.ones(3)),
        "J^T w": lambda p: ParameterJacobian(p).transposed_times(torch.ones(5, 2)),
        "J_i v_i": lambda p: InputJacobian(p).times(torch.ones(5, 4)),
        "J_i^T w_i": lambda p: InputJacobian(p).transposed_times(torch.ones(5, 4)),
        "J_i of too few": lambda p: InputJacobian(p).times(torch.ones(2, 6)),
    }
    for spelling in (
        "sharpness(top_k=0)", "sharpness(top_k=1.5)", "sharpness(bottom_k=-1)", "sharpness(rtol=0)",
        "sharpness(rtol=2)",
        "ggn_norm(top_k=0)", "layer_sharpness(rtol=-1)", "maximal_relative_flatness(rtol=0)",
        "layer_factors(rtol='fine')",
        "hessian_trace(rtol=0)", "hessian_trace(probes=1)", "adaptive_sharpness(probes=2.5)",
        "interpolation_gap(rtol='x')", "spectral_density(probes=1)", "normalized_sharpness(lam=0)",
    ):  # fmt: skip
        calls[spelling] = lambda p, spelling=spelling: fl.measure(fl.Lens(p), [spelling])
    return calls


@pytest.mark.parametrize("what", bad_calls())
@pytest.mark.parametrize("name", ["mlp-relu", "mlp-tanh"])
def test_bad_arguments_give_one_clear_line(what: str, name: str) -> None:
    net, x, y = network(name)
    with pytest.raises(BadInput) as told:
        bad_calls()[what](fl.Problem(net, "cross_entropy", (x, y)))
    assert "\n" not in str(told.value)
    assert len(str(told.value)) > 20


def test_ghost_batches_asked_wrongly() -> None:
    net, x, y = with_norms()
    for options in (
        {"batchnorm": "train"}, {"batchnorm": "train", "ghost_batch": 1}, {"batchnorm": "trane", "ghost_batch": 5},
        {"ghost_batch": 5}, {"batchnorm": "train", "ghost_batch": 3},  # 3, 3, 3, 1
    ):  # fmt: skip
        with pytest.raises(BadInput) as told:
            fl.Problem(net, "cross_entropy", (x, y), **options)
        assert "\n" not in str(told.value)
    with pytest.raises(BadInput, match="samples depend on each other"):
        InputJacobian(fl.Problem(net, "cross_entropy", (x, y), batchnorm="train", ghost_batch=5))


def test_a_subset_that_is_not_measured_can_still_be_asked_for() -> None:
    net, x, y = tied()
    problem = fl.Problem(net, "cross_entropy", (x, y))
    thawed = copy.deepcopy(net).requires_grad_(True)
    at = places(net, ["first.bias"])
    close(Hessian(problem, ["first.bias"]).matrix(), explicit(thawed, "cross_entropy", x, y)[Hessian][at][:, at])
    assert not net.first.bias.requires_grad


def test_names_are_suggested() -> None:
    net, x, y = tied()
    with pytest.raises(UnknownName, match="did you mean"):
        Hessian(fl.Problem(net, "cross_entropy", (x, y)), "head.wieght")


def test_every_other_sample_is_the_same_operator_on_them() -> None:
    """What a warm start multiplies with: scaled as the whole, and not counted."""
    net, x, y = network("mlp-tanh", n=8)
    problem = fl.Problem(net, "cross_entropy", (x, y))
    operator = Hessian(problem)
    v = normal(operator.size)
    sums = [operator.on_every(share)(v) / share for share in (1, 2, 4)]
    assert operator.products == 0
    close(sums[0], operator(v))
    for share, ours in zip((2, 4), sums[1:], strict=True):
        subsets = itertools.combinations(range(8), 8 // share)
        parts = [hessian_of(net, lambda f, i=i: LOSSES["cross_entropy"](f, y[i : i + 1]).sum() / 8, x[i : i + 1]) @ v
                 for i in range(8)]  # fmt: skip
        assert any(torch.allclose(sum(parts[i] for i in chosen), ours, rtol=1e-8) for chosen in subsets)


@pytest.mark.parametrize("memory", ["1GiB", 1], ids=["kept", "one graph at a time"])
@pytest.mark.parametrize("batch", [13, 5], ids=["one batch", "batches of 5, 5 and 3"])
def test_risk_and_gradient_are_those_of_plain_autograd(batch: int, memory: str | int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x, y = torch.randn(13, 3, dtype=torch.float64), torch.arange(13) % 2
    problem = fl.Problem(net, "cross_entropy", DataLoader(TensorDataset(x, y), batch_size=batch), memory=memory)
    operator = Hessian(problem)
    found, gradient = operator.risk_and_gradient()
    risk, named = F.cross_entropy(net(x), y), dict(net.named_parameters())
    assert found == pytest.approx(risk.item(), rel=1e-12)
    rows = torch.autograd.grad(risk, list(named.values()), allow_unused=True)
    for (name, p), row in zip(named.items(), rows, strict=True):
        assert torch.allclose(gradient[name], torch.zeros_like(p) if row is None else row, rtol=1e-12, atol=1e-14), name
    vector = torch.randn(operator.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(operator(vector), Hessian(problem)(vector))
    assert all(torch.equal(gradient[name], again) for name, again in operator.risk_and_gradient()[1].items())


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_root_mean_square_needs_no_quadrature(steps: int) -> None:
    """One node has the square of <v, H v>, which is smaller than ||H v||^2."""
    x = 0.3 * normal(6, 40) + 3
    problem = fl.Problem(nn.Linear(40, 1, bias=False).double(), "half_squared_error", (x, normal(6, 1)))
    found = spectral_density(Hessian(problem), probes=200, steps=steps)
    wanted = float((x.T @ x / 6).norm()) / 40**0.5
    assert found.rms_stderr < 0.2 * wanted
    assert found.rms == pytest.approx(wanted, abs=3 * found.rms_stderr)


def test_the_graph_whose_bytes_were_counted_is_freed() -> None:
    """The hook that counts saved tensors kept outputs with their own nodes, in each operator of other parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh())
    problem = fl.Problem(net, "mse", (torch.ones(8, 3), torch.zeros(8, 4)))

    def alive(*names: str) -> int:
        H = Hessian(problem, names)
        H(torch.ones(H.size, dtype=H.dtype))
        del H
        gc.collect()
        return sum(torch.is_tensor(one) for one in gc.get_objects())

    first = alive("0.weight", "0.bias", "2.weight", "2.bias")  # what others left may be freed later
    assert max(alive("0.weight"), alive("2.weight"), alive("2.bias")) <= first
