"""What is called: every entry of the Python interface, with sensible or odd arguments."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from setups import Setup

import flatlens as fl
from flatlens.curvature import Hessian, eigenpairs

NAMES = (
    "mls", "nmls", "ggn_trace", "interpolation_sharpness", "loss", "accuracy", "fisher_rao", "weight_norm",
    "relative_flatness", "neuron_flatness_ggn", "kappa_trace", "local_volume(top_k=1)", "normalized_mls",
    "input_invariant_mls", "adaptive_sharpness_ggn", "jacobian_norm", "generalisation_gap", "test_loss",
)  # fmt: skip
ASKED = (
    "sharpness", "hessian_trace", "hessian_trace(exact=True)", "ggn_norm", "layer_sharpness", "adaptive_sharpness",
    "maximal_relative_flatness", "average_sharpness(probes=2)", "worst_sharpness(restarts=1, steps=2)",
    "worst_sharpness(m=2, restarts=1, steps=2)", "pac_bayes_flatness(probes=2)", "interpolation_gap",
    "feature_robustness",
    "layer_factors", "local_variation(delta=0.1, restarts=1, steps=1)", "representativeness", "locally_constant_labels",
    "mls_by_search(restarts=1)", "spectral_density",
)  # fmt: skip
ODD = (
    "", "nope", "mls(", "mls(x=1)", "mls\n", "local_volume(top_k=-1)", "local_volume(top_k=9)",
    "local_volume(top_k='a')",
    "local_volume(top_k=None)", "average_sharpness(rho=0)", "average_sharpness(rho=-1)", "average_sharpness(rho=1e300)",
    "average_sharpness(rho=1e-300)", "average_sharpness(probes=1)", "average_sharpness(probes=True)",
    "average_sharpness(adaptive=3)", "average_sharpness(scale='x')", "worst_sharpness(m=0)", "worst_sharpness(rho='a')",
    "worst_sharpness(rho=1e300, restarts=1, steps=1)", "pac_bayes_flatness(level=0)", "pac_bayes_flatness(of='x')",
    "pac_bayes_flatness(level=1e9, probes=2)", "hessian_trace(probes=1)", "hessian_trace(exact=1)",
    "sharpness(rtol=0)",
    "feature_robustness(delta=0)", "local_variation(delta=-1)", "local_variation(delta=1e300, restarts=1, steps=1)",
    "mls_by_search(restarts=0)", "spectral_density(steps=0)", 5, None, [5], [None], ["mls", "nope"], [], b"mls", {},
    object(),
    [["mls"]], len, "mls(softmax=2)", "sharpness(top_k=0)", "x" * 5000, "mls(softmax=[1])", "mls(**{})", "a.b", "(1)",
    "\0",
)  # fmt: skip
PATHS = (None, 5, "", ".", b"abc", "a\0b", "x" * 300, "/proc/nope", object(), [], "no/such/folder/r", Path("/"))
KEYS = (
    5, None, ("mls",), ("mls", "a", "b"), ("mls", 5), (5, "mls"), [], ["mls"], {}, "", object(), ("mls", []), ([], None)
)  # fmt: skip


def problem_of(s: Setup) -> fl.Problem:
    return fl.Problem(s.model, s.loss, s.data, **s.options)


def lens_of(s: Setup) -> fl.Lens:
    return fl.Lens(problem_of(s))


def one_of(options: tuple, pick: int) -> object:
    return options[pick % len(options)]


def whole(s: Setup, pick: int) -> list[object]:
    lens = lens_of(s)
    return [fl.measure(lens, "pass"), fl.measure(lens, ["mls", "loss"])]


def some(s: Setup, pick: int) -> list[object]:
    return [fl.measure(lens_of(s), [one_of(NAMES, pick), one_of(NAMES, pick // 20), "interpolation_sharpness"])]


def asked(s: Setup, pick: int) -> list[object]:
    return [fl.measure(lens_of(s), [one_of(ASKED, pick), "mls"])]


def sketched(s: Setup, pick: int) -> list[object]:
    outputs = one_of((2, "exact", 1, 0, -1, True, 1.5, "all", 10**9, None), pick)
    return [fl.measure(fl.Lens(problem_of(s), outputs=outputs), ["ggn_trace", "mls"])]


def odd_names(s: Setup, pick: int) -> list[object]:
    return [fl.measure(lens_of(s), one_of(ODD, pick))]


def odd_draws(s: Setup, pick: int) -> list[object]:
    options = one_of(({"generator": 5}, {"progress": 5}, {"generator": torch.Generator()}, {"generator": "x"}), pick)
    return [fl.measure(lens_of(s), ["average_sharpness(probes=2)"], **options)]


def odd_lens(s: Setup, pick: int) -> list[object]:
    lens = one_of((None, 5, "x", s.model, [], object()), pick // 6)
    calls = (fl.measure, fl.check_bounds, fl.check_invariance, fl.Lens, fl.compare, lambda x: fl.Tracker(x, "mls"))
    return [one_of(calls, pick)(lens)]


def bounds(s: Setup, pick: int) -> list[object]:
    names = ("mls_chain", "interpolation_bound", "nmls_bound", "linear_stability", "adaptive_bound", "lipschitz_bound",
             "volume_bound", "network_volume_bound", "residual_bound", "normalized_mls_bound",
             "jacobian_growth")  # fmt: skip
    return [fl.check_bounds(lens_of(s), one_of(names, pick)).frame()]


def every_bound(s: Setup, pick: int) -> list[object]:
    return [fl.check_bounds(lens_of(s)).frame()]


def odd_bounds(s: Setup, pick: int) -> list[object]:
    options = (
        {"assume": {"nope"}}, {"assume": 5}, {"assume": "convex_support"}, {"assume": [5]}, {"distribution": 5},
        {"bounds": ["nope"]}, {"bounds": 5}, {"bounds": [5]}, {"bounds": []}, {"target": 5}, {"delta": 0},
        {"delta": "x"},
        {"delta": float("nan")}, {"rule": "x"}, {"rule": None}, {"rule": []}, {"generator": 5}, {"progress": 5},
    )  # fmt: skip
    return [fl.check_bounds(lens_of(s), **{"bounds": "mls_chain", **one_of(options, pick)}).frame()]


def invariance(s: Setup, pick: int) -> list[object]:
    transforms = (
        "layerwise",
        "neuronwise",
        "permutation",
        "batchnorm_scale",
        "batchnorm_folding",
        None,
        "feature_normalization",
    )
    return [fl.check_invariance(lens_of(s), ["weight_norm", "kappa_trace"], one_of(transforms, pick)).frame()]


def odd_invariance(s: Setup, pick: int) -> list[object]:
    options = ({"transforms": 5}, {"transforms": [5]}, {"transforms": []}, {"transforms": "x"}, {"measures": 5},
               {"measures": []}, {"generator": 5}, {"progress": 5}, {"measures": "local_volume(top_k=9)"})  # fmt: skip
    return [fl.check_invariance(lens_of(s), **{"measures": "mls", **one_of(options, pick)}).frame()]


def tracked(s: Setup, pick: int) -> list[object]:
    odd = ({}, {}, {"every": 0}, {"every": "x"}, {"measures": []}, {"measures": 5}, {"live": 5}, {"samples": 0},
        {"samples": 3},
           {"samples": 99}, {"seed": "x"}, {"budget": -1}, {"budget": "x"}, {"outputs": 0}, {"seed": 10**30},
           {"every": True})  # fmt: skip
    tracker = fl.Tracker(problem_of(s), **{"measures": ["mls", "loss"], "every": 1, "live": False, **one_of(odd, pick)})
    steps = one_of(((0, 1), (0, 0), (3, 2), (-1,), ("x",), (1.5,), (10**20,), (None,)), pick // 20)
    found = [tracker.step(step) for step in steps]
    with tempfile.TemporaryDirectory() as folder:
        tracker.save(one_of((Path(folder) / "h.csv", *PATHS), pick // 100))
    return [*[one for one in found if one is not None], tracker.history]


def compared(s: Setup, pick: int) -> list[object]:
    lens = lens_of(s)
    other = fl.Lens(lens.problem.with_changes(model=copy.deepcopy(s.net)))
    lenses = one_of(({"a": lens, "b": other}, {"a": lens}, {"a": lens, "b": lens}, [lens, other], {5: lens,
        None: other},
                     {"a": lens, "b": 5}, {"": lens, "\n": other}), pick)  # fmt: skip
    return [fl.compare(lenses, ["mls", "loss"])]


def saved(s: Setup, pick: int) -> list[object]:
    report = fl.measure(lens_of(s), ["mls", "loss", "ggn_trace"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r"
        report.save(path)
        content = bytearray(path.read_bytes())
        if pick % 3 == 0:
            return [fl.Report.load(path)]
        if pick % 3 == 1:
            content[pick // 24 % len(content)] ^= 1 << pick // 3 % 8
        else:
            content = content[: pick // 3 % len(content)]
        path.write_bytes(content)
        return [same(fl.Report.load(path), report)]


def same(found: fl.Report, truth: fl.Report) -> fl.Report:
    """What a damaged file gives must be what was saved."""
    assert repr(dict(found)) == repr(dict(truth)), "a damaged report was read as another"
    assert found.about == truth.about, "a damaged report was read as another"
    return found


def odd_paths(s: Setup, pick: int) -> list[object]:
    if pick % 2:
        return [fl.Report.load(one_of(PATHS, pick // 2))]
    fl.measure(lens_of(s), "loss").save(one_of(PATHS, pick // 2))
    return []


def looked_up(s: Setup, pick: int) -> list[object]:
    report = fl.measure(lens_of(s), "mls")
    assert one_of(KEYS, pick) not in report
    return [report[one_of(KEYS, pick)]]


def made(s: Setup, pick: int) -> list[object]:
    problem = problem_of(s)
    again = (lambda: problem.with_changes(loss="half_squared_error"), lambda: problem.subset(pick % 9,
        torch.Generator()),
             lambda: problem.in_ghost_batches(pick % 5), lambda: problem.with_changes(memory=1))  # fmt: skip
    return [fl.measure(fl.Lens(one_of(again, pick)()), ["hessian_trace(probes=2)"]) and None]


def operated(s: Setup, pick: int) -> list[object]:
    operator = Hessian(problem_of(s))
    v = {name: torch.ones_like(p) for name, p in operator.model.named_parameters() if p.requires_grad}
    odd = (
        v,
        v,
        v,
        {},
        None,
        5,
        {"nope": torch.ones(2)},
        {name: t[:0] for name, t in v.items() if t.ndim},
        torch.ones(3),
    )
    return [
        operator(one_of(odd, pick)),
        eigenpairs(operator, top_k=one_of((1, 2, 0, -1, 10**9, "x", True, 1.5), pick // 9)),
    ]


CALLS: dict[str, tuple[int, Callable[[Setup, int], list[object]]]] = {  #: how often, and the call
    "whole": (6, whole), "some": (8, some), "asked": (8, asked), "sketched": (2, sketched), "odd names": (4, odd_names),
    "odd draws": (1, odd_draws), "odd lens": (1, odd_lens), "bounds": (3, bounds), "every bound": (1, every_bound),
    "odd bounds": (2, odd_bounds), "invariance": (2, invariance), "odd invariance": (1, odd_invariance),
    "tracked": (3, tracked), "compared": (2, compared), "saved": (3, saved), "odd paths": (2, odd_paths),
    "looked up": (1, looked_up), "made": (3, made), "operated": (3, operated),
}  # fmt: skip
