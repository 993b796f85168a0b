"""The contestants of a case, each used as its library's own documentation shows.

All get the 2000 samples as one batch, unless a row says chunks. What a library prepares once for a network (curvlinops'
operator, BackPACK's `extend`, flatlens's Problem) is made outside the timing; PyHessian's constructor, which does the
first backward pass, and flatlens's Lens are inside. No library is patched; wrappers count the products. PyHessian looks
for the largest eigenvalue in absolute value, the others for the largest.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import flatlens as fl
from benchmarks.peers.cases import Case


@dataclass(frozen=True)
class Answer:
    """The result of one run."""

    value: float
    products: int | None = None
    parts: dict[str, float] = field(default_factory=dict)


Run = Callable[[], Answer]
Maker = Callable[[Case], Run]


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Count and call."""
        self.calls += 1
        return self.function(*args, **options)


def pyhessian(what: Callable[[Any], float]) -> Maker:
    """Return PyHessian on one batch, whose first-order graph it keeps; `what` takes its `hessian` object."""

    def make(case: Case) -> Run:
        module = importlib.import_module("pyhessian.hessian")
        original = getattr(module.hessian_vector_product, "function", module.hessian_vector_product)

        def run() -> Answer:
            counted = module.hessian_vector_product = Counted(original)
            case.net.zero_grad()
            value = what(module.hessian(case.net, nn.CrossEntropyLoss(), data=(case.x, case.y), cuda=False))
            case.net.zero_grad()  # the gradients hold the graph
            return Answer(value, counted.calls)

        return run

    return make


def curvlinops_operator(case: Case) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        case.net, nn.CrossEntropyLoss(), case.params, [(case.x, case.y)], check_deterministic=False
    )


def curvlinops_eigsh(case: Case) -> Run:
    from scipy.sparse.linalg import LinearOperator, eigsh

    operator = curvlinops_operator(case).to_scipy()

    def run() -> Answer:
        counted = Counted(operator.matvec)
        wrapped = LinearOperator(operator.shape, matvec=counted, dtype=operator.dtype)
        (value,) = eigsh(wrapped, k=1, tol=1e-2, which="LA", return_eigenvectors=False)
        return Answer(float(value), counted.calls)

    return run


def curvlinops_hutchinson(matvecs: int) -> Maker:
    def make(case: Case) -> Run:
        from curvlinops import hutchinson_trace

        operator = curvlinops_operator(case)
        return lambda: Answer(float(hutchinson_trace(operator, matvecs)), matvecs)

    return make


def hutchinson_samples(case: Case, matvecs: int = 100, at_once: int = 4) -> Tensor:
    """Return the single numbers whose mean is curvlinops' `hutchinson_trace`, (matvecs,) float64."""
    from curvlinops.sampling import random_vector

    operator = curvlinops_operator(case)
    found = []
    for _ in range(0, matvecs, at_once):
        drawn = [
            random_vector(operator.shape[0], "rademacher", operator.device, operator.dtype) for _ in range(at_once)
        ]
        G = torch.stack(drawn, 1)
        found.append((G * (operator @ G)).double().sum(0))
    return torch.cat(found)


def eigenthings_lanczos(case: Case) -> Run:
    import hessian_eigenthings as he

    def run() -> Answer:
        operator = he.HessianOperator(case.net, [(case.x, case.y)], he.supervised_loss(nn.CrossEntropyLoss()))
        counted = operator.matvec = Counted(operator.matvec)
        found = he.lanczos(operator, which="LA", seed=torch.initial_seed() % 2**31)
        return Answer(float(found.eigenvalues[0]), counted.calls)

    return run


def backpack_diagonal(extension: str, chunk: int) -> Maker:
    """Return the sum of an exact diagonal, parameter by parameter, over chunks of the data."""

    def make(case: Case) -> Run:
        from backpack import backpack, extend, extensions

        net, loss = extend(copy.deepcopy(case.net)), extend(nn.CrossEntropyLoss(reduction="sum"))
        which = getattr(extensions, extension)
        attribute = {"DiagGGNExact": "diag_ggn_exact", "DiagHessian": "diag_h"}[extension]

        def run() -> Answer:
            parts = {name: 0.0 for name, _ in net.named_parameters()}
            for x, y in zip(case.x.split(chunk), case.y.split(chunk), strict=True):
                net.zero_grad()
                with backpack(which()):
                    loss(net(x), y).backward()
                for name, p in net.named_parameters():
                    parts[name] += float(getattr(p, attribute).sum()) / len(case.x)
            return Answer(sum(parts.values()), parts=parts)

        return run

    return make


def flatlens(measure: str, layer: str | None = None) -> Maker:
    """Return one measure of a new Lens; a random measure takes its generator from torch's seed."""

    def make(case: Case) -> Run:
        problem = fl.Problem(case.net, "cross_entropy", (case.x, case.y))

        def run() -> Answer:
            generator = torch.Generator().manual_seed(torch.initial_seed())
            report = fl.measure(fl.Lens(problem), [measure], generator=generator)
            parts = {at: e.value for (name, at), e in report.items() if at is not None and name == measure}
            found = report[measure] if layer is None else report[measure, layer]
            return Answer(found.value, found.products, parts)

        return run

    return make


def rms_error(case: Case, reference: float, probes: int, seeds: int) -> float:
    """Return the relative error of flatlens's `hessian_trace` with these probes, root mean square over draws."""
    problem, errors = fl.Problem(case.net, "cross_entropy", (case.x, case.y)), []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        report = fl.measure(fl.Lens(problem), [f"hessian_trace(probes={probes})"], generator=generator)
        errors.append(report[f"hessian_trace(probes={probes})"].value / reference - 1)
    return float(torch.tensor(errors).square().mean().sqrt())


def literal_relative_flatness(case: Case, weights: int = 20) -> Answer:
    """Return the seconds of Definition 3, weight by weight, for the last layer but one, as `value`.

    A double backward per weight gives its row of the Hessian block. `weights` of them are timed; `value` is the seconds
    that all would take.
    """
    layer = case.net[-3]
    W = layer.weight.detach()
    start = time.perf_counter()
    risk = nn.functional.cross_entropy(case.net(case.x), case.y)
    (slope,) = torch.autograd.grad(risk, layer.weight, create_graph=True)
    ready = time.perf_counter()
    for number in range(weights):
        s, t = divmod(number * 499 % W.numel(), W.shape[1])
        (row,) = torch.autograd.grad(slope[s, t], layer.weight, retain_graph=True)
        _ = (W @ W[s]) @ row[:, t]  # sum over s' of <w_s, w_s'> H[(s, t), (s', t)]
    each = (time.perf_counter() - ready) / weights
    return Answer(ready - start + each * W.numel(), weights)


def literal_rebuilt(case: Case, weights: int = 3) -> Answer:
    """Return the same where nothing is kept between weights: forward, backward, double backward for each."""
    layer = case.net[-3]
    start = time.perf_counter()
    for number in range(weights):
        s, t = divmod(number * 499 % layer.weight.numel(), layer.weight.shape[1])
        risk = nn.functional.cross_entropy(case.net(case.x), case.y)
        (slope,) = torch.autograd.grad(risk, layer.weight, create_graph=True)
        torch.autograd.grad(slope[s, t], layer.weight)
    return Answer((time.perf_counter() - start) / weights * layer.weight.numel(), weights)


EIGENVALUE: dict[str, Maker] = {
    "PyHessian power iteration": pyhessian(lambda h: float(h.eigenvalues(top_n=1)[0][0])),
    "curvlinops + eigsh(tol=1e-2)": curvlinops_eigsh,
    "hessian-eigenthings Lanczos": eigenthings_lanczos,
    "flatlens sharpness(rtol=0.02)": flatlens("sharpness(rtol=0.02)"),
}
TRACE: dict[str, Maker] = {  # for ReLU networks
    "PyHessian trace": pyhessian(lambda h: float(torch.tensor(h.trace(), dtype=torch.float64).mean())),
    "curvlinops Hutchinson, 4": curvlinops_hutchinson(4),
    "BackPACK DiagGGNExact": backpack_diagonal("DiagGGNExact", 2000),
    "flatlens hessian_trace": flatlens("hessian_trace"),
}
SMOOTH_TRACE: dict[str, Maker] = {  # for networks whose Gauss-Newton trace differs from the Hessian's
    **{name: maker for name, maker in TRACE.items() if not name.startswith("BackPACK")},
    "BackPACK DiagHessian": backpack_diagonal("DiagHessian", 100),  # residuals are (n, 512, 512): in chunks
    "flatlens hessian_trace(exact=True)": flatlens("hessian_trace(exact=True)"),
}
GAUSS_NEWTON: dict[str, Maker] = {
    "BackPACK DiagGGNExact, whole": backpack_diagonal("DiagGGNExact", 2000),
    "BackPACK DiagGGNExact, chunks of 256": backpack_diagonal("DiagGGNExact", 256),
    "flatlens ggn_trace": flatlens("ggn_trace"),
}
LITERAL = "literal, 20 of the 10080 weights"
REBUILT = "literal, 3 of them, no graph kept"
RELATIVE: dict[str, Maker] = {
    "flatlens relative_flatness": flatlens("relative_flatness", "9"),
    LITERAL: lambda case: lambda: literal_relative_flatness(case),
    REBUILT: lambda case: lambda: literal_rebuilt(case),
}


def of(task: str, case: Case) -> dict[str, Maker]:
    """Return the contestants of a task."""
    return {
        "eigenvalue": EIGENVALUE,
        "trace": SMOOTH_TRACE if case.smooth else TRACE,
        "gauss_newton": GAUSS_NEWTON,
        "relative_flatness": RELATIVE,
    }[task]
