"""timm's own networks: by name, against brute force, with timm's preparation of images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.zoo import truth
from PIL import Image
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatlens as fl
from flatlens import cli
from flatlens.data.sources import load_data
from flatlens.errors import BadInput, BadModel, UnknownName
from flatlens.models.external import load_model

VIT = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=12,num_heads=3,num_classes=4)"
MEASURED = ("mls", "interpolation_sharpness", "ggn_trace")


@pytest.fixture
def small():
    """A ViT of depth 2 on 32 x 32 pixels, in float64."""
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=12, num_heads=3, num_classes=4
    ).double()


def relative_flatness(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, name: str) -> float:
    """Definition 3 with the explicit Hessian: sum over rows s, t of <w_s, w_t> Tr H_st."""
    W = model.get_parameter(name).detach()

    def risk(weight: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.cross_entropy(functional_call(model, {name: weight}, (x,)), y)

    H = torch.autograd.functional.hessian(risk, W)
    return float(torch.einsum("sm,tm,sktk->", W, W, H))


def test_a_vit_measured_is_what_brute_force_says(small):
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 3, 1])
    report = fl.measure(fl.Lens(fl.Problem(small, "cross_entropy", (x, y))), [*MEASURED, "relative_flatness"])
    true, _ = truth.first_order(small, x)
    for name in MEASURED:
        assert report[name].kind == "exact"
        assert report[name].value == pytest.approx(true[name], rel=1e-10)
    for layer in ("head", "blocks.0.mlp.fc1"):
        literal = relative_flatness(small, x, y, f"{layer}.weight")
        assert report["relative_flatness", layer].value == pytest.approx(literal, rel=1e-8)


def test_a_resnet_of_timm_is_measured():
    named = load_model("timm:resnet18(num_classes=3)", "random")
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    problem = fl.Problem(named.network, "cross_entropy", (x, torch.tensor([0, 2])), dtype=torch.float64)
    report = fl.measure(fl.Lens(problem), ["mls", "ggn_trace"])
    true, _ = truth.first_order(named.network.double(), x.double())
    assert len(report.about["layers"]) == 21
    for name in ("mls", "ggn_trace"):
        assert report[name].value == pytest.approx(true[name], rel=1e-9)


def test_a_name_brings_timm_s_own_preparation():
    import timm

    named = load_model("timm:vit_tiny_patch16_224", "random")
    assert "random" in named.weights
    settings = timm.data.resolve_model_data_config(named.network)
    assert "224 x 224 pixels by bicubic" in named.preparation.description
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = timm.data.create_transform(**settings, is_training=False)(image)
    assert expected.shape == (3, 224, 224)
    assert torch.equal(named.preparation.convert(image), expected)
    even = Image.fromarray(np.full((50, 50, 3), 255, dtype=np.uint8))  # by hand: (1 - 0.5) / 0.5
    assert torch.allclose(named.preparation.convert(even), torch.ones(3, 224, 224))


def test_named_sets_are_resized_and_normalised():
    named = load_model("timm:resnet18(num_classes=10)", "random")
    source = load_data("digits", preparation=named.preparation)
    assert source.preparation == named.preparation.description
    x, y = source.drawn(3).data
    assert x.shape == (3, 3, 224, 224)
    assert len(y) == 3


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\ndef samples(): return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)), "
        "torch.tensor([0, 1, 2])\n"
    )
    options = ["--data", "net.py:samples", "--loss", "cross_entropy", "--measures", "ggn_trace", "--json"]
    found = []
    for _ in range(2):
        assert cli.run(["measure", f"timm:{VIT}", "--weights", "random", *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["about"]["origin"] == {"weights": "random (seed 0)", "data": "net.py:samples"}
    assert found[0]["estimates"][0]["value"] == found[1]["estimates"][0]["value"] > 0


def test_errors_are_one_line(monkeypatch):
    monkeypatch.setattr("flatlens.models.external.reachable", lambda: False)
    with pytest.raises(UnknownName, match=r"did you mean.*vit_tiny_patch16_224") as caught:
        load_model("timm:vit_tiny_patch16_223")
    assert len(str(caught.value)) < 300
    with pytest.raises(BadModel, match=r"hub cannot be reached: give --weights FILE.*--weights random"):
        load_model("timm:vit_tiny_patch16_224")
    with pytest.raises(BadInput, match="nonsense") as caught:
        load_model("timm:vit_tiny_patch16_224.nonsense")
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="no_such_option") as caught:
        load_model("timm:resnet18(no_such_option=3)", "random")
    assert "\n" not in str(caught.value)


def test_an_architecture_without_trained_weights_says_so():
    import timm

    name = next(name for name in timm.list_models("vit_*") if not timm.is_model_pretrained(name))
    named = load_model(f"timm:{name}(depth=1)")
    assert f"no trained weights for {name}" in named.remark
