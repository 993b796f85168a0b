"""What flatlens says of a network against brute force: right, undefined with the reason, refused in one line, or a
fault."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from brute_force import Truth, along_columns, as_matrix, definition_3, plainly
from drawn_networks import LOSS_OF, OF_POSITIONS, Drawn, build
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.curvature import Hessian, eigenpairs
from flatlens.errors import FlatlensError

AT_ONCE = ["interpolation_sharpness", "ggn_trace", "mls", "jacobian_norm", "input_invariant_mls"]
BY_LAYER = ["relative_flatness_ggn", "neuron_flatness_ggn"]
CURVED = ["relative_flatness", "neuron_flatness", "kappa_trace", "layer_sharpness"]
SECOND = {  #: what is asked for by name
    "": [],
    "product": ["sharpness"],
    "trace": ["hessian_trace(exact=True)", "hessian_trace(probes=16)"],
    "layers": CURVED,
}
TOLERANCE = 1e-8


@dataclass
class Verdict:
    """All that was found on one network."""

    faults: list[str] = field(default_factory=list)  #: "class: what was met"
    refused: str = ""  #: the error's line
    numbers: int = 0
    undefined: Counter[str] = field(default_factory=Counter)  #: measures without a value, network's and layers'
    answered: bool = False  #: whether every number of the network as a whole is there

    def fault(self, what: str, told: str) -> None:
        self.faults.append(f"{what}: {told}")


@dataclass(frozen=True)
class Subject:
    """A network with its data, twice: for flatlens, and for brute force (parametrised weights cannot be copied)."""

    net: nn.Module
    truth: Truth
    plain: Truth  #: every reparametrised weight a parameter
    data: object
    loss: object
    options: dict[str, object]


def subject(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, loss: str = "cross_entropy", chunk: int = 0
) -> Subject:
    """Of a network that is made anew each time, in chunks of so many samples, 0 for one chunk."""
    net, bare = make(), make().eval()  # in train mode a spectral norm moves with each look
    truth = Truth(make(), x, y, LOSS_OF[loss])
    plain = Truth(bare, x, y, LOSS_OF[loss]) if plainly(bare) else truth
    data: object = (x.clone(), y.clone())
    if chunk > 1:
        data = DataLoader(TensorDataset(x.clone(), y.clone()), batch_size=chunk)
    options: dict[str, object] = {"memory": 1} if chunk == 1 else {}
    of_torch = nn.CrossEntropyLoss() if loss in OF_POSITIONS else loss
    return Subject(net, truth, plain, data, LOSS_OF[loss] if loss == "log_cosh" else of_torch, options)


def judge(drawn: Drawn) -> Verdict:
    """Measure a drawn network, and hold every number against brute force."""
    _, x, y = build(drawn)
    return judged(subject(lambda: build(drawn)[0], x, y, drawn.loss, drawn.chunk), drawn.second)


def judged(this: Subject, second: str) -> Verdict:
    """The verdict; of second derivatives, too, where asked."""
    verdict = Verdict()
    before = snapshot(this.net)
    generator = torch.Generator().manual_seed(0)
    v = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in this.truth.parameters.items()}
    report, Hv, pairs = None, None, None
    try:
        problem = fl.Problem(this.net, this.loss, this.data, **this.options)
        report = fl.measure(fl.Lens(problem), [*AT_ONCE, *BY_LAYER, *SECOND[second]])
        if second == "product":
            Hv = Hessian(problem)(v)
            pairs = eigenpairs(Hessian(problem), top_k=min(3, sum(p.numel() for p in v.values())))
    except FlatlensError as error:
        verdict.refused = str(error)
        if "\n" in verdict.refused or not verdict.refused:
            verdict.fault("refused in more than one line", repr(verdict.refused))
    except Exception as error:
        verdict.fault("crash", f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")
    for what in changed(before, snapshot(this.net)):
        verdict.fault("model changed", what)
    if report is not None:
        Judgement(this, report, verdict).run(second)
    if Hv is not None:
        held_product(this.truth, v, Hv, verdict)
    if pairs is not None and pairs.converged:
        held_pairs(this.truth, pairs.values, verdict)
    return verdict


@dataclass
class Judgement:
    """One report beside the truth."""

    this: Subject
    report: fl.Report
    verdict: Verdict

    def run(self, second: str) -> None:
        """Every number that was asked for."""
        truth = self.this.truth
        scales = {"interpolation_sharpness": truth.sizes_of_parameters, "ggn_trace": truth.traces}
        inputs = {"mls": truth.norms, "jacobian_norm": truth.norms, "input_invariant_mls": truth.invariant}
        for name, samples in (scales | inputs).items():
            whole = samples.max() if name == "jacobian_norm" else samples.mean()
            self.number(name, None, float(whole), float(samples.abs().max()))
            self.samples(name, samples)
        for name, of in (("interpolation_sharpness", torch.ones_like(truth.C)), ("ggn_trace", truth.C)):
            self.shares(name, of)
        self.verdict.answered = all(self.report[name].kind != "undefined" for name in AT_ONCE)
        for name in [*BY_LAYER, *SECOND["layers" if second == "layers" else ""]]:
            for layer in [at for key, at in self.report if key == name and at is not None]:
                self.layer(name, layer)
        if second == "trace":
            scale = float(truth.H.diagonal().abs().sum()) + float(truth.traces.mean())
            for name in SECOND["trace"]:
                self.number(name, None, float(truth.H.trace()), scale)
        if second == "product":
            self.eigenvalue("sharpness", None, truth.H)

    def number(self, name: str, layer: str | None, truth: float, scale: float) -> bool:
        """Whether there is one; a fault where it is wrong."""
        estimate = self.report[name, layer] if layer else self.report[name]
        at = f"{name} at {layer}" if layer else name
        if estimate.kind == "undefined":
            self.verdict.undefined[name] += 1
            if not estimate.note:
                self.verdict.fault("undefined without a reason", at)
            return False
        self.verdict.numbers += 1
        rounding = TOLERANCE * max(abs(truth), scale) + 1e-12
        if estimate.margin > 0 and not abs(estimate.value - truth) <= rounding + 2.5 * estimate.margin:
            estimate = self.once_more(name)
        if not abs(estimate.value - truth) <= rounding + 2.5 * estimate.margin:
            self.verdict.fault(f"wrong {name}", f"{at} {estimate.value:.8g} ({estimate.kind}), truth {truth:.8g}")
        return True

    def once_more(self, name: str) -> fl.Estimate:
        """The same by 256 other probes. Sixteen of a skewed law are five standard errors off once in a thousand times,
        but an estimate that is wrong stays wrong."""
        key = name.replace("probes=16", "probes=256")
        assert key != name
        problem = fl.Problem(self.this.net, self.this.loss, self.this.data, **self.this.options)
        return fl.measure(fl.Lens(problem), key, generator=torch.Generator().manual_seed(1))[key]

    def samples(self, name: str, truth: Tensor) -> None:
        """Sample by sample, in the order of the data."""
        found = self.report[name].samples
        if found is not None:
            apart = (found - truth).abs() > TOLERANCE * truth.abs() + 1e-10 * truth.abs().max() + 1e-12
            if bool(apart.any()):
                self.verdict.fault(f"wrong {name}", f"samples {apart.nonzero()[:, 0].tolist()} of {len(truth)}")

    def shares(self, name: str, weights: Tensor) -> None:
        """What the modules have of a sum over parameters, each its own tensors together."""
        truth = self.this.truth
        if not any(key == name and at for key, at in self.report) or _tied(self.this.net):
            return
        J = truth.rows[1]
        C = torch.eye(J.shape[1]).double().expand_as(weights) if name == "interpolation_sharpness" else weights
        of = truth.by_parameter(torch.einsum("nka,nkl,nla->a", J, C, J) / len(J))
        wanted, found = Counter[str](), Counter[str]()
        for parameter, share in of.items():
            wanted[parameter.rpartition(".")[0]] += share
        for (key, at), estimate in self.report.items():
            if key == name and at is not None:
                found[at.rpartition(".")[0] if at in of else at.partition(":")[0]] += estimate.value
        whole = sum(of.values())
        for owner in wanted | found:
            if not abs(wanted[owner] - found[owner]) <= TOLERANCE * whole + 1e-12:
                told = f"{owner} has {found[owner]:.8g}, truth {wanted[owner]:.8g}"
                self.verdict.fault(f"wrong share of {name}", told)

    @cached_property
    def owners(self) -> dict[str, nn.Module]:
        return dict(self.this.plain.net.named_modules())

    def layer(self, name: str, layer: str) -> None:
        """A measure of one layer's weight."""
        if self.report[name, layer].kind == "undefined":
            self.number(name, layer, 0.0, 0.0)
            return
        plain = self.this.plain
        module = self.owners.get(layer)
        weight = dict(plain.net.named_parameters()).get(layer) if module is None else getattr(module, "weight", None)
        parameter = next((other for other, p in plain.parameters.items() if p is weight), None)
        if parameter is None:
            self.verdict.fault("unknown layer", f"{name} at {layer}")
            return
        w, place = weight.detach().flatten(), as_matrix(module or plain.net, weight)
        GN, H = self.matrices(parameter, name in CURVED)
        size = float(w.square().sum())
        if name == "layer_sharpness":
            self.eigenvalue(name, layer, H)
            return
        A = GN if H is None else H
        of = {"relative_flatness": definition_3, "neuron_flatness": along_columns}.get(name.removesuffix("_ggn"))
        truth = size * float(A.trace()) if of is None else of(A, w, place)
        self.number(name, layer, truth, size * float(A.norm()) * 1e-2)

    def matrices(self, parameter: str, second: bool) -> tuple[Tensor, Tensor | None]:
        """Computed once a weight."""
        kept = self.__dict__.setdefault("_kept", {})
        if (parameter, second) not in kept:
            kept[parameter, second] = self.this.plain.of_weight(parameter, second)
        return kept[parameter, second]

    def eigenvalue(self, name: str, layer: str | None, H: Tensor) -> None:
        """A lower bound is not above the largest, and has an eigenvalue as near as its residual says."""
        estimate = self.report[name, layer] if layer else self.report[name]
        if not bool(H.isfinite().all()):
            self.number(name, layer, math.nan, 0.0)
            return
        values = torch.linalg.eigvalsh((H + H.T) / 2)
        at, rounding = f"{name} at {layer}" if layer else name, TOLERANCE * float(values.abs().max()) + 1e-12
        if estimate.kind in ("undefined", "exact"):
            self.number(name, layer, float(values[-1]), float(values.abs().max()))
            return
        self.verdict.numbers += 1
        residual = float(estimate.arrays["residuals"][0])
        said = f"{at} {estimate.value:.8g} ({estimate.kind}), truth {float(values[-1]):.8g}"
        if estimate.value > float(values[-1]) + rounding:
            self.verdict.fault(f"{name} on the wrong side", said)
        elif float((values - estimate.value).abs().min()) > residual + rounding:
            self.verdict.fault(f"wrong {name}", f"{said}: no eigenvalue within {residual:.1g}")


def held_product(truth: Truth, v: dict[str, Tensor], Hv: dict[str, Tensor], verdict: Verdict) -> None:
    """One Hessian product against the explicit matrix."""
    if set(Hv) != set(truth.parameters):
        verdict.fault("wrong Hessian product", f"over {sorted(set(Hv) ^ set(truth.parameters))}")
        return
    if not bool(truth.H.isfinite().all()):  # such as behind the root of a constant: a product may be NaN or a number
        return
    true = truth.H @ torch.cat([v[name].flatten() for name in truth.parameters])
    found = torch.cat([Hv[name].flatten() for name in truth.parameters])
    apart = float((true - found).norm())
    if not apart <= TOLERANCE * float(true.norm()) + 1e-12:
        verdict.fault("wrong Hessian product", f"{apart / float(true.norm()):.2g} relative")


def held_pairs(truth: Truth, values: Tensor, verdict: Verdict) -> None:
    """The largest eigenvalues, as often as they occur, against the explicit matrix."""
    true = torch.linalg.eigvalsh((truth.H + truth.H.T) / 2).flip(0)[: len(values)]
    apart = float((true - values.double()).abs().max())
    if not apart <= 1e-2 * float(true.abs().max()) + 1e-12:
        verdict.fault("wrong eigenpairs called converged", f"{values.tolist()}, truth {true.tolist()}")


def _tied(net: nn.Module) -> bool:
    """Whether a tensor has several owners, so that shares have no one name."""
    return len(list(net.named_parameters(remove_duplicate=False))) > len(list(net.named_parameters()))


def snapshot(net: nn.Module) -> dict[str, object]:
    """All that measuring must leave alone."""
    kept: dict[str, object] = {f"value of {name}": t.detach().clone() for name, t in net.state_dict().items()}
    kept |= {f"identity of {name}": id(p) for name, p in net.named_parameters()}
    kept |= {f"gradient of {name}": p.grad for name, p in net.named_parameters()}
    kept |= {f"freezing of {name}": p.requires_grad for name, p in net.named_parameters()}
    for name, module in net.named_modules():
        kept[f"mode of {name}"] = module.training
        kept[f"attributes of {name}"] = sorted(key for key in vars(module) if key != "weight")
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            kept[f"{hooks} of {name}"] = [id(hook) for hook in getattr(module, hooks).values()]
    kept["random state"] = torch.get_rng_state()
    kept["fast attention"] = torch.backends.mha.get_fastpath_enabled()
    return kept


def changed(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    """What is not as it was."""
    for key in before | after:
        was, now = before.get(key), after.get(key)
        same = torch.equal(was, now) if isinstance(was, Tensor) and isinstance(now, Tensor) else was == now
        if not same:
            yield key
