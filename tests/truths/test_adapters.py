"""Adapters of the peft library: what is frozen counts nowhere, what is trained is right. Skipped without it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from literal_modern import Literal, assert_flatness, close, top
from modern import Case, gpt2_network, hf_vit_network, images, tokens

import flatlens as fl


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    return pytest.importorskip("peft")


def gpt2(peft: ModuleType, *, dora: bool = False) -> Case:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.1, use_dora=dora
    )
    net = peft.get_peft_model(gpt2_network(), config)
    return tokens(net, "cross_entropy", "base_model.model.transformer.wte", 7, True, lambda out: out.logits)


def vit(peft: ModuleType) -> Case:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    return images(peft.get_peft_model(hf_vit_network(), config), "cross_entropy", 3, lambda out: out.logits)


CASES = {"gpt2": gpt2, "gpt2-dora": lambda peft: gpt2(peft, dora=True), "vit": vit}


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_measured_and_the_rest_is_not(peft: ModuleType, name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        this = CASES[name](peft)
    lens, truth = fl.Lens(fl.Problem(this.net, this.loss, this.data), outputs="exact"), Literal(this)
    assert set(lens.problem.parameters) == set(truth.names) < {name for name, _ in this.net.named_parameters()}
    report = fl.measure(lens, ["interpolation_sharpness", "ggn_trace", "mls", "hessian_trace(exact=True)",
                               "sharpness(rtol=1e-8)", "relative_flatness", "relative_flatness_ggn", "kappa_trace",
                               "neuron_flatness"])  # fmt: skip
    close(report["interpolation_sharpness"].value, truth.mean(lambda i: truth.J[i].square().sum()))
    close(report["ggn_trace"].value, truth.GN.trace())
    close(report["hessian_trace(exact=True)"].value, truth.H.trace(), 1e-8)
    close(report["sharpness(rtol=1e-08)"].value, torch.linalg.eigvalsh(truth.H)[-1], 1e-8)
    close(report["mls"].value, truth.mean(lambda i: top(truth.Jx[i])))
    assert_flatness(truth, lens, report)
