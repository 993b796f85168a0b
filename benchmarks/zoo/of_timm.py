"""Small members of timm's families (its modules), unchanged except for random weights and three classes.

Each module has one of those with the fewest parameters; a few modules have others, too, which work differently from
the first. Images are 32 x 32 pixels if the network takes them and attends or is large. They are 64 x 64 if it
convolves, so that its last layers still have several positions. Families whose smallest network has 80 million
parameters or more are made narrower (`NARROW`). Those for which timm has no option for it are left out: deepseek_vit,
gemma4_vit, inception_resnet_v2, inception_v4, mobilenetv5, nasnet, pnasnet, vgg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NARROW: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": NARROW, "naflexvit_base_patch16_gap": NARROW, "qwen3_vit_88m": NARROW,
    "samvit_base_patch16_224": {**NARROW, "global_attn_indexes": (1,)},
}  # fmt: skip
PIXELS = {
    28: "eva02_tiny_patch14_224",
    32: "beit_base_patch16_224 caformer_s18 cait_xxs24_224 coat_tiny coatnet_nano_rw_224 convit_tiny convmixer_768_32 "
    "davit_tiny deit_tiny_distilled_patch16_224 focalnet_tiny_srf gmlp_ti16_224 hiera_tiny_224 hrnet_w18_small "
    "legacy_xception maxvit_rmlp_pico_rw_256 mvitv2_tiny naflexvit_base_patch16_gap nest_tiny nextvit_small "
    "pit_ti_224 qwen3_vit_88m rdnet_tiny res2next50 resmlp_12_224 sam2_hiera_tiny samvit_base_patch16_224 selecsls42 "
    "sequencer2d_s swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 test_coatnet test_maxvit "
    "test_nfnet test_vit_relpos tnt_s_patch16_224 tresnet_m twins_svt_small visformer_tiny vit_tiny_patch16_224 "
    "vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p16_224",
    64: "convnext_atto cpubone_nano cs3darknet_focus_s csatv2 cspnext_tiny densenet121 dla46x_c dpn48b "
    "eca_botnext26ts_256 edgenext_xx_small efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 "
    "ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 iformer_t "
    "inception_next_atto lcnetv2_small legacy_seresnet18 levit_128s lowformer_b0 mambaout_femto mixnet_s "
    "mobilenetv3_small_050 mobileone_s1 mobilevit_xxs nf_regnet_b0 poolformer_s12 pvt_v2_b0 regnetx_002 "
    "repghostnet_050 repvit_m1 resnest14d resnet10t resnetv2_18 rexnet_100 shvit_s1 skresnet18 starnet_s050 "
    "swiftformer_xs test_byobnet tf_efficientnet_b0 tiny_vit_5m_224",
    72: "crossvit_tiny_240",
    96: "inception_v3",
    224: "efficientformer_l1",
}
NETWORKS: dict[str, int] = {name: pixels for pixels, names in PIXELS.items() for name in names.split()}


def build(name: str) -> nn.Module:
    """Return the network, made for the smaller images where it needs their size."""
    import timm

    options = {"num_classes": 3, **OPTIONS.get(name, {})}
    try:
        network: nn.Module = timm.create_model(name, img_size=NETWORKS[name], **options)
    except TypeError:  # it takes any size
        network = timm.create_model(name, **options)
    return network


def samples(name: str, n: int) -> Tensor:
    """Return images."""
    return torch.randn(n, 3, NETWORKS[name], NETWORKS[name], dtype=torch.float64)
