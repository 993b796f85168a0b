"""X5: many vision transformers, published ones or small ones trained here.

The compression paper took 181 networks from the timm of 2023 and does not list them. VIT_NAMES are those of timm 1.0
with weights trained for ImageNet's 1000 classes and "vit" in their names; timm's own test networks and the families of
2024 and later (naflexvit, shvit) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Literal

import pandas as pd

from flatlens.data.sources import DataSettings
from flatlens.experiments.overrides import seedless
from flatlens.experiments.settings import Axis, NetworkSettings, Study
from flatlens.measures import named
from flatlens.models import Published, ViT
from flatlens.papers.evidence import Evidence, Table, correlated, labelled, where, with_units
from flatlens.papers.experiment import Plot, Results, Scale, deferred
from flatlens.papers.figures import scatter
from flatlens.statistics import Statistic
from flatlens.training import Adam, Training

TEXT = """
    convit_base convit_small convit_tiny crossvit_9_240 crossvit_9_dagger_240 crossvit_15_240 crossvit_15_dagger_240
    crossvit_15_dagger_408 crossvit_18_240 crossvit_18_dagger_240 crossvit_18_dagger_408 crossvit_base_240
    crossvit_small_240 crossvit_tiny_240 davit_base davit_small davit_tiny efficientvit_b0 efficientvit_b1
    efficientvit_b2 efficientvit_b3 efficientvit_l1 efficientvit_l2 efficientvit_l3 efficientvit_m0 efficientvit_m1
    efficientvit_m2 efficientvit_m3 efficientvit_m4 efficientvit_m5 fastvit_ma36 fastvit_s12 fastvit_sa12
    fastvit_sa24 fastvit_sa36 fastvit_t8 fastvit_t12 flexivit_base flexivit_large flexivit_small gcvit_base
    gcvit_small gcvit_tiny gcvit_xtiny gcvit_xxtiny levit_128 levit_128s levit_192 levit_256 levit_384
    levit_conv_128 levit_conv_128s levit_conv_192 levit_conv_256 levit_conv_384 maxvit_base_tf_224
    maxvit_base_tf_384 maxvit_base_tf_512 maxvit_large_tf_224 maxvit_large_tf_384 maxvit_large_tf_512
    maxvit_nano_rw_256 maxvit_rmlp_base_rw_224 maxvit_rmlp_base_rw_384 maxvit_rmlp_nano_rw_256
    maxvit_rmlp_pico_rw_256 maxvit_rmlp_small_rw_224 maxvit_rmlp_tiny_rw_256 maxvit_small_tf_224 maxvit_small_tf_384
    maxvit_small_tf_512 maxvit_tiny_rw_224 maxvit_tiny_tf_224 maxvit_tiny_tf_384 maxvit_tiny_tf_512
    maxvit_xlarge_tf_384 maxvit_xlarge_tf_512 maxxvit_rmlp_nano_rw_256 maxxvit_rmlp_small_rw_256
    maxxvitv2_nano_rw_256 maxxvitv2_rmlp_base_rw_224 maxxvitv2_rmlp_base_rw_384 mobilevit_s mobilevit_xs
    mobilevit_xxs mobilevitv2_050 mobilevitv2_075 mobilevitv2_100 mobilevitv2_125 mobilevitv2_150 mobilevitv2_175
    mobilevitv2_200 mvitv2_base mvitv2_large mvitv2_small mvitv2_tiny nextvit_base nextvit_large nextvit_small
    repvit_m0_9 repvit_m1 repvit_m1_0 repvit_m1_1 repvit_m1_5 repvit_m2 repvit_m2_3 repvit_m3 tiny_vit_21m_384
    tiny_vit_21m_512 vit_base_patch8_224 vit_base_patch16_224 vit_base_patch16_384 vit_base_patch16_clip_224
    vit_base_patch16_clip_384 vit_base_patch16_rope_224 vit_base_patch16_rope_ape_224
    vit_base_patch16_rope_mixed_224 vit_base_patch16_rope_mixed_ape_224 vit_base_patch16_rope_reg1_gap_256
    vit_base_patch16_rpn_224 vit_base_patch32_224 vit_base_patch32_384 vit_base_patch32_clip_224
    vit_base_patch32_clip_384 vit_base_patch32_clip_448 vit_base_r50_s16_384 vit_betwixt_patch16_reg1_gap_256
    vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384 vit_betwixt_patch16_rope_reg4_gap_256
    vit_dlittle_patch16_reg1_gap_256 vit_dpwee_patch16_reg1_gap_256 vit_dwee_patch16_reg1_gap_256
    vit_huge_patch14_clip_224 vit_huge_patch14_clip_336 vit_large_patch14_clip_224 vit_large_patch14_clip_336
    vit_large_patch16_224 vit_large_patch16_384 vit_large_patch16_rope_224 vit_large_patch16_rope_ape_224
    vit_large_patch16_rope_mixed_224 vit_large_patch16_rope_mixed_ape_224 vit_large_patch32_384
    vit_large_r50_s32_224 vit_large_r50_s32_384 vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256
    vit_medium_patch16_gap_256 vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256
    vit_medium_patch16_reg4_gap_256 vit_medium_patch16_rope_reg1_gap_256 vit_mediumd_patch16_reg4_gap_256
    vit_mediumd_patch16_reg4_gap_384 vit_mediumd_patch16_rope_reg1_gap_256 vit_pwee_patch16_reg1_gap_256
    vit_relpos_base_patch16_224 vit_relpos_base_patch16_clsgap_224 vit_relpos_base_patch32_plus_rpn_256
    vit_relpos_medium_patch16_224 vit_relpos_medium_patch16_cls_224 vit_relpos_medium_patch16_rpn_224
    vit_relpos_small_patch16_224 vit_small_patch16_224 vit_small_patch16_384 vit_small_patch16_rope_224
    vit_small_patch16_rope_ape_224 vit_small_patch16_rope_mixed_224 vit_small_patch16_rope_mixed_ape_224
    vit_small_patch32_224 vit_small_patch32_384 vit_small_r26_s32_224 vit_small_r26_s32_384
    vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
    vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384 vit_srelpos_medium_patch16_224
    vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_384 vit_tiny_r_s16_p8_224
    vit_tiny_r_s16_p8_384 vit_wee_patch16_reg1_gap_256
"""
VIT_NAMES = tuple(TEXT.split())

SHARPNESS_46, SEARCHED = (
    one.key for one in named(["average_sharpness(probes=16,scale='published46')", "mls_by_search(normalized=True)"])
)
_POOLINGS: tuple[Literal["class"], Literal["mean"]] = ("class", "mean")
_VARIANTS = tuple(
    ViT(classes=2, patch=patch, width=width, depth=depth, heads=heads, pooling=_POOLINGS[mean], sigmoid=True)
    for patch, width, depth, heads, mean in (
        (8, 24, 2, 2, 0), (8, 24, 2, 2, 1), (8, 48, 2, 4, 0), (8, 48, 4, 4, 1),
        (8, 96, 2, 4, 0), (8, 96, 4, 8, 0), (4, 24, 2, 2, 0), (4, 24, 4, 2, 1),
        (4, 48, 2, 4, 1), (4, 48, 4, 4, 0), (16, 48, 4, 4, 0), (16, 96, 6, 8, 1),
    )
)  # fmt: skip

_MANY = tuple(
    ViT(patch=patch, width=width, depth=depth, heads=width // 12, pooling=pooling, sigmoid=True, seed=number)
    for number, (pooling, patch, width, depth) in enumerate(
        (pooling, *sizes) for sizes in product((4, 8, 16), (24, 36, 48, 72, 96), (2, 4)) for pooling in _POOLINGS
    )
)
"""Sixty sizes for ten classes, each from a start of its own."""


def _x5(scale: Scale) -> Mapping[str, Study]:
    data = DataSettings("patches", train=200, test=200)
    variants: tuple[ViT | Published, ...] = _VARIANTS
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: tuple[int, ...] = (0, 300)
    if scale == "smoke":
        data, variants, seeds, steps = DataSettings("patches", train=10, test=10), _VARIANTS[:2], (0, 1), (0, 2)
    if scale == "desk":
        data, seeds, steps = DataSettings("cifar10", train=2000, test=1000), (0,), (1000,)
    if scale == "paper":
        data = DataSettings("imagenet", train=100, test=100)
        variants = tuple(Published(f"timm:{name}", sigmoid=True) for name in VIT_NAMES)
        seeds, steps = (0,), (0,)
    training = Training(Adam(1e-3), batch_size=32, loss="mse", max_steps=0, check_every=250 if scale == "desk" else 10)
    exact = () if scale == "paper" else ("normalized_mls", "adaptive_sharpness_ggn")
    measures = (SHARPNESS_46, SEARCHED, *exact)
    samples = data.train if scale == "paper" else min(32, data.train or 32)
    base = NetworkSettings(data, variants[0], training, measures, samples=samples)
    networks: tuple[ViT | Published, ...] = tuple(replace(variant, seed=seed) for variant in variants for seed in seeds)
    if scale == "desk":
        networks = _MANY
    return {"transformers": Study("transformers", base, (Axis("model", networks), Axis("max_steps", steps)))}


COMMAND = "FLATLENS_DATA=FOLDER flatlens reproduce X5 --scale paper --out runs/x5"
"""Tests the claims; FOLDER/imagenet/CLASS/FILE are images, and the weights come from the hub."""
NEEDED = f"needs trained networks of timm and images of ImageNet in FOLDER/imagenet/CLASS/FILE: {COMMAND}"
TREND = "Spearman rho of adaptive sharpness and normalised MLS"
CLASS, _ARCHITECTURE, OFF_TREND = "class", "architecture", "rank of adaptive sharpness less rank of normalised MLS"


def published(results: Results) -> pd.DataFrame:
    """Return the networks with published weights: their class, and how far they are off the trend.

    Ranks are shares between 0 and 1: above 0 a network lies above and left of the trend in Fig. 3.
    """
    networks = with_units(results["transformers"], results["transformers"].networks)
    found = networks[networks["model"].str.contains("timm:")].reset_index(drop=True)
    ranks = found.reindex(columns=[SHARPNESS_46, SEARCHED]).rank(pct=True)
    return found.assign(**{CLASS: found["model"].map(_class_of), OFF_TREND: ranks[SHARPNESS_46] - ranks[SEARCHED]})


most = where(published, lambda networks: ~networks[CLASS].str.contains("mobilevit|fastvit"))
"""The published networks outside the classes that Fig. 3 names as outliers."""


def of_class(name: str) -> Table:
    """Return the published networks of the classes whose names begin so."""
    return where(published, lambda networks: networks[CLASS].str.startswith(name))


def trained_here(results: Results) -> pd.DataFrame:
    """Return our own networks that were trained longest; those of one architecture are one unit."""
    networks = results["transformers"].networks
    own = networks[~networks["model"].str.contains("timm:")]
    kept = own[own["steps"] == own["steps"].max()]
    return labelled(kept.assign(**{_ARCHITECTURE: kept["model"].map(seedless)}), [_ARCHITECTURE])


def trend_of(table: Table) -> Evidence:
    """Return Spearman's correlation of adaptive sharpness and normalised MLS."""
    return correlated(table, SHARPNESS_46, SEARCHED, "spearman")


@deferred
def tested_on(results: Results, table: Table, weighed: Evidence, name: str, needed: str) -> Statistic:
    """Return the evidence; where the table has no networks, an undefined statistic that says what is needed."""
    return weighed(results) if len(table(results)) else Statistic(name, float("nan"), 0, note=needed)


def _x5_plots(results: Results) -> list[Plot]:
    networks = results["transformers"].networks
    steps = networks["steps"].map(lambda number: f", {number} steps" if number else "")
    drawn = scatter(
        networks.assign(kind=networks["model"].map(_class_of) + steps),
        "sharpness_mls",
        "Fig. 3: adaptive sharpness against normalised MLS",
        "One mark a network: adaptive sharpness (Eq. 46) over normalised MLS, both as Appendix F approximates them.",
        {f"{len(networks)} networks": SEARCHED},
        SHARPNESS_46,
        "kind",
        x="normalised MLS",
        y="adaptive sharpness",
    )
    return [replace(drawn, log_x=True)]


def _class_of(model: str) -> str:
    """Return the class that a colour stands for: the family of a published network, the pooling of ours."""
    if name := re.search(r"timm:([a-z0-9]+)", model):
        return name[1]
    return "mean pooling" if "mean" in model else "class token"
