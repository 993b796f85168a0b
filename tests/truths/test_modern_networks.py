"""Transformers and residual nets against literal definitions in float64: explicit Jacobians and Hessians, sample by
sample, sentences without their padding."""

from __future__ import annotations

import math

import pytest
import torch
from literal_modern import Literal, assert_flatness, close, top
from modern import CASES, LOSSES, case
from torch import Tensor
from torch.autograd.functional import jacobian

import flatlens as fl
from flatlens.operations.layers import is_linear

ONE_PASS = [name for name, m in fl.measures.MEASURES.items() if not m.on_request and not m.held_out]
REQUESTED = ["sharpness(rtol=1e-8)", "ggn_norm(rtol=1e-8)", "hessian_trace(exact=True)", "jacobian_norm(softmax=True)",
             "local_volume(top_k=2)"]  # fmt: skip


TWICE = ("vit-mha", "encoder", "gpt2", "resnet")  # under both losses in the default run, the others under one
PARAMS = [
    pytest.param(
        (name, loss), marks=() if name in TWICE or loss == LOSSES[0] else pytest.mark.slow, id=f"{name}-{loss}"
    )
    for name in CASES
    for loss in LOSSES
]


@pytest.fixture(scope="module", params=PARAMS)
def both(request):
    """(case, its literal definitions, lens, report of everything)."""
    this = case(*request.param)
    lens = fl.Lens(fl.Problem(this.net, this.loss, this.data), outputs="exact")
    report = fl.measure(lens, [*ONE_PASS, *REQUESTED])
    return this, Literal(this), lens, report


def test_risk_and_traces(both) -> None:
    _, truth, _, report = both
    close(report["loss"].value, truth.risk(torch.cat([truth.values[name].flatten() for name in truth.names])))
    close(report["interpolation_sharpness"].value, truth.mean(lambda i: truth.J[i].square().sum()))
    close(report["ggn_trace"].value, truth.GN.trace())
    close(report["hessian_trace(exact=True)"].value, truth.H.trace(), 1e-8)
    theta = torch.cat([truth.values[name].flatten() for name in truth.names])
    close(report["adaptive_sharpness_ggn"].value, (theta.square() * truth.GN.diagonal()).sum())


def test_eigenvalues_of_the_hessian_and_of_its_gauss_newton_part(both) -> None:
    _, truth, _, report = both
    close(report["sharpness(rtol=1e-08)"].value, torch.linalg.eigvalsh(truth.H)[-1], 1e-8)
    close(report["ggn_norm(rtol=1e-08)"].value, torch.linalg.eigvalsh(truth.GN)[-1], 1e-8)


def test_sensitivity_to_the_input(both) -> None:
    this, truth, _, report = both
    J = truth.Jx
    close(report["mls"].value, truth.mean(lambda i: top(J[i])))
    close(report["jacobian_norm"].value, max(float(top(j)) for j in J))
    close(report["jacobian_frobenius"].value, truth.mean(lambda i: J[i].square().sum()))
    x2 = [x.square().flatten() for x in this.inputs]
    close(report["normalized_mls"].value, truth.mean(lambda i: x2[i].sum() * top(J[i]).square()))
    close(report["input_invariant_mls"].value, truth.mean(lambda i: (J[i].square().sum(0) * x2[i]).sum()))


def test_softmax_is_taken_token_by_token(both) -> None:
    this, truth, lens, report = both
    width = lens.problem.outputs if isinstance(this.data[0], Tensor) else this.data[1].shape[-1]
    width = truth.f[0].numel() if this.data[1].ndim == 1 else lens.problem.outputs // width
    norms = []
    for f, J in zip(truth.f, truth.Jx, strict=True):
        P = jacobian(lambda g: g.reshape(-1, width).softmax(1).flatten(), f)
        norms.append(float(top(P @ J)))
    close(report["jacobian_norm(softmax=True)"].value, max(norms))


def test_volume_and_dimension_are_of_the_unmasked_rows(both) -> None:
    _, truth, _, report = both
    values = [torch.linalg.svdvals(J) for J in truth.Jx]
    shares = [float(s.square().sum() ** 2 / s.pow(4).sum()) for s in values]
    close(report["local_dimension"].value, sum(shares) / len(shares))
    least = 100 * torch.finfo(torch.float64).eps
    two = [float(s[:2].prod()) if s[1] ** 2 > least * s[0] ** 2 else 0.0 for s in values]
    close(report["local_volume(top_k=2)"].value, sum(two) / len(two), 1e-6)
    logs = [float(s.log().sum()) for s in values if s[-1] ** 2 > least * s[0] ** 2]
    if logs:
        close(report["log_volume"].value, sum(logs) / len(logs), 1e-2)  # a G of condition 1e13 has few digits left
    else:
        assert report["log_volume"].kind == "undefined"


def test_flatness_of_every_layer_is_definition_3(both) -> None:
    assert_flatness(*both[1:])


def test_every_matrix_that_multiplies_features_has_rows(both) -> None:
    this, _, lens, _ = both
    names = {name for name, p in this.net.named_parameters() if p.ndim >= 2}
    looked_up = ("embed.weight", "wpe.weight", "_embeddings.weight", "cls", "position", "cls_token", "embeddings")
    names = {name for name in names if not name.endswith(looked_up)}
    assert {weight.parameter for weight in lens.plan.weights.values()} == names
    called = [name for name, m in this.net.named_modules() if is_linear(m) and not name.endswith("out_proj")]
    bare = [
        name for name in names if name.endswith(("in_proj_weight", "out_proj.weight", "table.weight", ".down", ".up"))
    ]
    assert set(lens.plan.weights) == {*called, *bare}


def test_both_spellings_of_attention_have_the_same_numbers() -> None:
    """nn.MultiheadAttention, which holds its projections as bare parameters, and the same network by linear layers."""
    by_layers, packed = case("vit-sdpa", "cross_entropy"), case("vit-mha", "cross_entropy")
    named = {"attn.mha.in_proj_": "attn.qkv.", "attn.mha.out_proj": "attn.proj"}
    values = dict(by_layers.net.named_parameters())
    with torch.no_grad():
        for name, p in packed.net.named_parameters():
            for old, new in named.items():
                name = name.replace(old, new)
            p.copy_(values[name])
    data = by_layers.data
    names = [*ONE_PASS, "relative_flatness(normalized='std')", "feature_norm", "hessian_trace(exact=True)"]
    names += ["layer_factors", "maximal_relative_flatness(rtol=1e-6)", "layer_sharpness(rtol=1e-6)"]
    first, second = (fl.measure(fl.Lens(fl.Problem(c.net, c.loss, data)), names) for c in (by_layers, packed))
    at_layers = {key: estimate for key, estimate in first.items() if key[1] is None}
    for key, estimate in at_layers.items():
        if not key[0].startswith("nmls"):  # a sum over the inputs of calls, which bare projections have not
            close(second[key].value, estimate.value, 1e-3 if "volume" in key[0] else 1e-6)  # G is near singular
            assert second[key].kind == estimate.kind, key
    for layer in (at for name, at in first if name == "neuron_flatness" and at is not None):
        bare = layer.replace("attn.qkv", "attn.mha.in_proj_weight").replace("attn.proj", "attn.mha.out_proj.weight")
        close(second["neuron_flatness", bare].value, first["neuron_flatness", layer].value, 1e-8)
        close(second["layer_factors.features", bare].value, first["layer_factors.features", layer].value, 1e-8)


def test_nothing_is_undefined_without_a_reason(both) -> None:
    _, _, _, report = both
    for key, estimate in report.items():
        assert math.isfinite(estimate.value) or estimate.note, key
