"""Layers by block: the names of common libraries, and what stands for many of them."""

import pytest

from flatlens.report.blocks import blocks, by_reason, grouped, heights, profile, summed_up

TIMM = ["patch_embed.proj", *(f"blocks.{i}.{part}" for i in range(3) for part in ("attn.qkv", "mlp.fc1")), "head"]
BERT = [f"bert.encoder.layer.{i}.{part}" for i in range(12) for part in ("attention.self.query", "output.dense")]
SWIN = ["layers.1.blocks.0.attn.qkv", "layers.1.blocks.0.mlp.fc1", "layers.1.downsample.reduction"]
RESNET = ["conv1", "layer2.0.conv1", "layer2.0.conv2", "layer2.0.downsample.0", "layer2.0.downsample.1.weight"]
DENSE = ["features.denseblock1.denselayer2.conv1", "features.denseblock1.denselayer2.conv2"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (TIMM, ["", *["blocks.0"] * 2, *["blocks.1"] * 2, *["blocks.2"] * 2, ""]),
        (BERT[-2:], ["bert.encoder.layer.11"] * 2),
        (SWIN, ["layers.1.blocks.0", "layers.1.blocks.0", "layers.1"]),
        (RESNET, ["", *["layer2.0"] * 4]),
        (DENSE, ["features.denseblock1.denselayer2"] * 2),
        (["fc1", "fc2", "fc2:1"], [""] * 3),
        (["features.0", "features.3"], [""] * 2),  # a plain Sequential has no blocks
        (["blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.0.mlp.2:1"], ["blocks.0"] * 3),
        (["h.0.ln.weight", "h.0.ln.bias"], [""] * 2),  # one layer is no block
    ],
)
def test_where_blocks_begin(names, expected):
    assert list(blocks(names).values()) == expected


def test_parameters_met_late_stand_with_their_block_and_nothing_is_lost():
    names = [*BERT, "classifier", "bert.encoder.layer.3.norm.weight"]
    groups = grouped(names)
    assert len(groups) == 13
    assert dict(groups)["bert.encoder.layer.3"][-1] == names[-1]
    assert sorted(name for _, members in groups for name in members) == sorted(names)


def test_many_names_in_few_words():
    assert summed_up(BERT[::2]) == "bert.encoder.layer.{0-11}.attention.self.query"
    assert summed_up(["3 features that h.1.fc reads", "3 features that h.2.fc reads"]) == (
        "3 features that h.{1-2}.fc reads"
    )
    assert summed_up([]) == ""
    reasons = dict.fromkeys(TIMM[1:-1:2], "tied") | {"head": "last"}
    assert by_reason(reasons) == [("tied", "blocks.{0-2}.attn.qkv"), ("last", "head")]


def test_heights_and_profiles_leave_out_what_is_undefined():
    nan = float("nan")
    assert heights({"a": nan, "b": 5.0}) == {"b": 0.5}
    assert heights({}) == {}
    assert profile([nan, nan], 10) == "  "
    assert profile([], 10) == ""
    assert profile([0.0, 1.0], 10) == "▁█"  # a zero has no logarithm
    assert len(profile([1.0] * 130, 60)) <= 60
