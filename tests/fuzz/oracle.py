"""One judgement for every case: a right number, `undefined` with a reason, or one line; and nothing left changed."""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from brute_force import Truth
from judged import LOSS_OF
from setups import Setup
from torch import Tensor, nn
from torch.nn.modules import module as torchs
from torch.utils._pytree import tree_leaves

import flatlens as fl
from flatlens.errors import FlatlensError

EXACT = ("interpolation_sharpness", "ggn_trace", "mls", "loss")


@dataclass
class Verdict:
    """What came of one case."""

    outcome: str = "answered"  #: or "refused"
    line: str = ""
    faults: list[str] = field(default_factory=list)  #: "class: what was met"
    held: Counter[str] = field(default_factory=Counter)  #: numbers held against brute force, by measure


def judged(setup: Setup, call: Callable[[Setup], list[object]]) -> Verdict:
    """Call, and judge what comes of it."""
    verdict = Verdict()
    before = snapshot(setup)
    twin = copy.deepcopy(setup.net) if setup.truth else None
    try:
        results = call(setup)
    except FlatlensError as error:
        verdict.outcome, verdict.line, results = "refused", str(error), []
        if "\n" in verdict.line or not verdict.line.strip():
            verdict.faults.append(f"refused in more than one line: {verdict.line!r}")
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/flatlens/" in f.filename]
        where = f"{frames[-1].filename.rpartition('/')[2]} {frames[-1].name}" if frames else "outside"
        verdict.faults.append(f"crash {type(error).__name__} in {where}: {str(error)[:200]!r}")
        results = []
    verdict.faults += [f"changed {what.partition(' of ')[0]}: {what}" for what in changed(before, snapshot(setup))]
    for result in results:
        if isinstance(result, fl.Report):
            verdict.faults += odd_numbers(result)
            if twin is not None:
                hold(result, twin, setup, verdict)
    return verdict


def odd_numbers(report: fl.Report) -> Iterator[str]:
    """Estimates that are neither numbers nor undefined with a reason."""
    for key, estimate in report.items():
        if estimate.kind == "undefined":
            if not estimate.note or "\n" in estimate.note:
                yield f"undefined without a reason in one line: {key} {estimate.note!r}"
        elif not (math.isfinite(estimate.value) and math.isfinite(estimate.margin) and estimate.margin >= 0):
            yield f"no number: {key} {estimate!r}"


def hold(report: fl.Report, twin: nn.Module, setup: Setup, verdict: Verdict) -> None:
    """Compare what brute force can tell; a case that brute force cannot run is a fault of the case."""
    asked = [name for name in EXACT if name in report and report[name].kind == "exact"]
    if not asked:
        return
    x, y = setup.x, setup.y
    truth = Truth(twin, x.double() if x.is_floating_point() else x, y, LOSS_OF[setup.loss])
    samples = {
        "interpolation_sharpness": truth.sizes_of_parameters,
        "ggn_trace": truth.traces,
        "mls": truth.norms,
        "loss": LOSS_OF[setup.loss](truth.rows[0], y).detach(),
    }
    for name in asked:
        true, scale = float(samples[name].mean()), float(samples[name].abs().max())
        verdict.held[name] += 1
        if not abs(report[name].value - true) <= 1e-8 * scale + 1e-12:
            verdict.faults.append(f"wrong {name}: {report[name].value:.10g}, truth {true:.10g}")


def snapshot(setup: Setup) -> dict[str, object]:
    """All that a call must leave alone."""
    kept: dict[str, object] = {}
    for name, module in setup.net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        kept[f"mode of {name}"] = module.training
        kept[f"module of {name}"] = id(module)
        kept[f"children of {name}"] = list(module._modules)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            kept[f"hooks of {name}{hooks}"] = [id(hook) for hook in getattr(module, hooks).values()]
        for option in ("max_norm", "sparse", "scale_grad_by_freq", "track_running_stats"):
            kept[f"option of {name}.{option}"] = getattr(module, option, None)
        for name_of, p in [*module._parameters.items(), *module._buffers.items()]:
            at = f"{name}.{name_of}"
            kept[f"values of {at}"], kept[f"identity of {at}"] = bits(p), id(p)
            kept[f"freezing of {at}"] = p is not None and p.requires_grad
            grad = p.grad if p is not None and p.is_leaf else None
            kept[f"gradient of {at}"], kept[f"its identity of {at}"] = bits(grad), id(grad)
    for number, leaf in enumerate(tree_leaves((setup.x, setup.y))):
        kept[f"data of {number}"] = bits(leaf) if isinstance(leaf, Tensor) else None
        kept[f"data's gradient of {number}"] = isinstance(leaf, Tensor) and leaf.requires_grad
    kept["torch's random state of all"] = torch.get_rng_state().numpy().tobytes()
    kept["numpy's random state of all"] = np.random.get_state()[1].tobytes()
    kept["Python's random state of all"] = random.getstate()
    kept["global hooks of all"] = [
        len(hooks) for hooks in (torchs._global_forward_hooks, torchs._global_forward_pre_hooks)
    ]
    kept["gradients on of all"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kept["defaults of all"] = torch.get_default_dtype(), torch.get_num_threads(), nn.functional.hardsigmoid
    kept["attention of all"] = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    return kept


def bits(t: Tensor | None) -> object:
    """A tensor's bytes, for NaN is not equal to itself; what has none by its form."""
    if t is None or isinstance(t, nn.parameter.UninitializedTensorMixin):
        return None
    if t.is_meta or t.is_quantized or t.is_nested or t.layout != torch.strided:
        return str(t.layout), str(t.dtype)
    return (
        t.dtype,
        tuple(t.shape),
        t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What is not as it was."""
    return [key for key in before | after if before.get(key) != after.get(key)]
