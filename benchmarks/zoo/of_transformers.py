"""Tiny networks of transformers' architectures, from their configurations, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40,
    "max_position_embeddings": 16, **SPECIAL,
}  # fmt: skip
DECODER: dict[str, Any] = ENCODER | {"num_key_value_heads": 1}
GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16, **SPECIAL}
PICTURE: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "intermediate_size": 24}  # fmt: skip
STAGES: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 2, 1]}
TEXT, IMAGE = "ForSequenceClassification", "ForImageClassification"

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Albert": (TEXT, ENCODER | {"embedding_size": 8}),
    "Bart": (TEXT, {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
        "max_position_embeddings": 16, **SPECIAL,
    }),
    "Bert": (TEXT, ENCODER),
    "Bloom": (TEXT, {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, **SPECIAL}),
    "DebertaV2": (TEXT, ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}),
    "DistilBert": (TEXT, {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40,
                          "max_position_embeddings": 16, **SPECIAL}),
    "Electra": (TEXT, ENCODER | {"embedding_size": 8}),
    "Falcon": (TEXT, ENCODER | {"new_decoder_architecture": False}),
    "GPT2": (TEXT, GPT),
    "GPTNeo": (TEXT, {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
                      "window_size": 3, "vocab_size": 40, "max_position_embeddings": 16, **SPECIAL}),
    "GPTNeoX": (TEXT, ENCODER),
    "Gemma": (TEXT, DECODER | {"head_dim": 8}),
    "Llama": (TEXT, DECODER),
    "MPNet": (TEXT, ENCODER),
    "Mistral": (TEXT, DECODER | {"sliding_window": 4}),
    "Mixtral": (TEXT, DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    "MobileBert": (TEXT, ENCODER | {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}),
    "OPT": (TEXT, {"hidden_size": 16, "word_embed_proj_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                   "ffn_dim": 24, "vocab_size": 40, "max_position_embeddings": 16, **SPECIAL}),
    "Phi": (TEXT, ENCODER),
    "Qwen2": (TEXT, DECODER),
    "Roberta": (TEXT, ENCODER),
    "T5": (TEXT, {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40,
                  "relative_attention_num_buckets": 4, "decoder_start_token_id": 0, "pad_token_id": 0,
                  "eos_token_id": 2}),
    "Beit": (IMAGE, PICTURE | {"use_relative_position_bias": True}),
    "ConvNext": (IMAGE, STAGES | {"image_size": 32}),
    "DeiT": (IMAGE, PICTURE),
    "MobileViT": (IMAGE, {"image_size": 32, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 4, 8, 8, 12, 12, 16],
                          "num_attention_heads": 2, "mlp_ratio": 1.0}),
    "PoolFormer": (IMAGE, STAGES),
    "ResNet": (IMAGE, STAGES | {"embedding_size": 8, "layer_type": "basic"}),
    "Segformer": (IMAGE, STAGES | {"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 8}),
    "Swin": (IMAGE, {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                     "window_size": 4}),
    "ViT": (IMAGE, PICTURE),
}  # fmt: skip


@torch.no_grad()
def build(name: str) -> nn.Module:
    """Return the network, with a classifier of three classes and newly drawn weights.

    The weights are drawn again because transformers' own deviation of 0.02 leaves almost no signal in such a narrow
    network, and because it does not initialise some parameters at all.
    """
    import transformers

    head, settings = NETWORKS[name]
    config = getattr(transformers, f"{name}Config")(**settings, num_labels=3)
    network: nn.Module = getattr(transformers, f"{name}{head}")(config)
    for p in network.parameters():
        if p.ndim > 1:
            p.normal_(std=(p.shape[0] / p.numel()) ** 0.5)
    return network


def samples(name: str, n: int) -> dict[str, Tensor] | Tensor:
    """Return images of 32 x 32, or texts, the last one shorter and padded."""
    if NETWORKS[name][0] == IMAGE:
        return torch.randn(n, 3, 32, 32, dtype=torch.float64)
    ids = torch.randint(3, 40, (n, 7))
    ids[:, -1] = SPECIAL["eos_token_id"]
    mask = torch.ones_like(ids)
    ids[-1, 4:], mask[-1, 5:] = SPECIAL["pad_token_id"], 0
    ids[-1, 4] = SPECIAL["eos_token_id"]
    return {"input_ids": ids, "attention_mask": mask}
