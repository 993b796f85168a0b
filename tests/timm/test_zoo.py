"""The most telling of timm's networks against brute force; all of the zoo: `python -m benchmarks.zoo`."""

import pytest
from benchmarks.zoo import of_timm, page
from benchmarks.zoo.case import case, measured

TELLING = (
    "convnext_atto",  # norms over channels that permute the features in forward
    "edgenext_xx_small",  # the same, and attention over channels
    "efficientformerv2_s0",  # attention biases that are kept in eval mode, talking heads
    "levit_128s",  # the same; a convolution's output turned to tokens
    "mixnet_s",  # convolutions of several sizes side by side, padded in forward
    "poolformer_s12",  # a group norm behind a subclass, pooling less the input
    "test_coatnet",  # windows, relative positions, a norm over channels
    "test_maxvit",  # windows and grids
    "test_nfnet",  # standardised weights, gains on them
    "tf_efficientnet_b0",  # convolutions that pad in forward
    "vit_tiny_r_s16_p8_224",  # standardised weights before a transformer
    "xcit_nano_12_p16_224",  # learned temperatures, a norm whose gradient is transposed
)


@pytest.mark.parametrize("name", TELLING)
def test_a_network_of_timm_is_what_brute_force_says(name):
    assert page.verdict(measured(case(f"timm:{name}"), differences=False)) == "right"


def test_the_zoo_has_a_network_of_each_of_sixty_families():
    import timm

    modules = [timm.models._registry._model_to_module[name] for name in of_timm.NETWORKS]
    assert len(set(modules)) >= 60
    missing = set(timm.list_modules()) - set(modules)
    assert missing == {
        "deepseek_vit", "gemma4_vit", "inception_resnet_v2", "inception_v4", "mobilenetv5", "nasnet", "pnasnet", "vgg",
    }  # fmt: skip
