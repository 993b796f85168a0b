"""Transformers and residual nets, tiny, in float64, each with its data and its outputs written out by hand.

A case says what flatlens is given, and beside it the literal meaning: `rows(values, i)`, the output vector of sample
i under other parameters (its unmasked tokens' rows, one after another), and `loss(rows, i)`, its share of the risk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from networks import module_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Values = dict[str, Tensor]


def self_attention(width: int, heads: int) -> nn.Module:
    """Heads by hand around torch's fused call: queries, keys and values from one token-wise linear."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        qkv = net.qkv(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return net.proj(mixed.transpose(1, 2).flatten(2))

    return module_of(forward, qkv=(width, 3 * width), proj=(width, width))


def packed(width: int, heads: int, seen: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    """The same through nn.MultiheadAttention, whose weights no hook sees."""
    mha = nn.MultiheadAttention(width, heads, batch_first=True)
    return module_of(lambda net, x: net.mha(x, z := seen(x), z, need_weights=False)[0], mha=mha)


def crossed(width: int, heads: int) -> nn.Module:
    """Attention of tokens to those in reverse: torch multiplies by slices of the packed weight."""
    return packed(width, heads, lambda x: x.flip(1) / 2)


def words() -> nn.Module:
    """A network of single tokens whose outputs are products with the table that it looks tokens up in."""

    def forward(net: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = net.table(input_ids)
        return F.linear(x + net.mlp(net.norm(x)), net.table.weight)

    mlp = nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)
    return module_of(forward, table=nn.Embedding(7, 4), norm=nn.LayerNorm(4), mlp=nn.Sequential(*mlp))


def block(width: int, heads: int, attention: Callable[[int, int], nn.Module]) -> nn.Module:
    """x + attention(norm x), then x + mlp(norm x), with GELU."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = x + net.attn(net.norm1(x))
        return x + net.mlp(net.norm2(x))

    norms, attn = (nn.LayerNorm(width), nn.LayerNorm(width)), attention(width, heads)
    mlp = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))
    return module_of(forward, norm1=norms[0], attn=attn, norm2=norms[1], mlp=mlp)


def vit(attention: Callable[[int, int], nn.Module], width: int = 4) -> nn.Module:
    """Patches by a convolution, a class token, a position embedding, two blocks, a norm and a linear head."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        tokens = net.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([net.cls.expand(x.shape[0], -1, -1), tokens], 1) + net.position
        return net.head(net.norm(net.blocks(tokens))[:, 0])

    return module_of(
        forward,
        patch=nn.Conv2d(1, width, 2, stride=2),
        cls=nn.Parameter(torch.randn(1, 1, width)),
        position=nn.Parameter(torch.randn(1, 5, width)),
        blocks=nn.Sequential(*(block(width, 2, attention) for _ in range(2))),
        norm=nn.LayerNorm(width),
        head=(width, 3),
    )


def encoder(norm_first: bool = False) -> nn.Module:
    """nn.TransformerEncoder on token ids with a padding mask, and a row for each token."""

    def forward(net: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return net.head(net.encoder(net.embed(input_ids), src_key_padding_mask=attention_mask == 0))

    embed = nn.Embedding(7, 4)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return module_of(forward, embed=embed, encoder=layers, head=(4, 3))


def basic_block(before: int, after: int, stride: int) -> nn.Module:
    """Two convolutions with norms, and a projection where the shape changes."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        out = net.bn2(net.conv2(net.relu(net.bn1(net.conv1(x)))))
        out += net.shortcut(x)
        return net.relu(out)

    conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
    net = module_of(forward, conv1=conv1, bn1=nn.BatchNorm2d(after), conv2=conv2, bn2=nn.BatchNorm2d(after))
    net.relu, net.shortcut = nn.ReLU(inplace=True), nn.Identity()
    if stride > 1 or before != after:
        net.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    return net


def resnet() -> nn.Module:
    """A stem, a block with an identity skip, one with a projection, pooling, a linear head."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = net.relu(net.bn(net.conv(x)))
        return net.fc(net.pool(net.layer2(net.layer1(x))).flatten(1))

    conv, layers = nn.Conv2d(1, 2, 3, 1, 1, bias=False), (basic_block(2, 2, 1), basic_block(2, 3, 2))
    net = module_of(forward, conv=conv, bn=nn.BatchNorm2d(2), relu=nn.ReLU(inplace=True))
    net.layer1, net.layer2 = layers
    net.pool, net.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 3)
    return net


def low_rank(base: nn.Linear, rank: int) -> nn.Module:
    """A frozen linear layer and a trained change of low rank, W + B A: adapters by hand."""
    return module_of(
        lambda net, x: net.base(x) + x @ net.down.T @ net.up.T,
        base=base.requires_grad_(False),
        down=nn.Parameter(torch.randn(rank, base.in_features) / 2),
        up=nn.Parameter(torch.randn(base.out_features, rank) / 2),
    )


def adapted() -> nn.Module:
    """A ViT whose weights are frozen but for low-rank changes of its projections, and its head."""
    net = vit(self_attention).requires_grad_(False)
    for block in net.blocks:
        block.attn.qkv = low_rank(block.attn.qkv, 2)
    net.head.requires_grad_(True)
    return net


@dataclass(eq=False)
class Case:
    """What flatlens is given, and what it means."""

    net: nn.Module
    data: Any
    loss: str
    rows: Callable[[Values, int], Tensor]  #: (parameters, sample) -> its outputs, one vector
    cost: Callable[[Tensor, int], Tensor]  #: (its outputs, sample) -> its loss; the risk is their mean
    at_input: Callable[[Tensor, int], Tensor]  #: (the network's input, sample) -> its outputs
    inputs: list[Tensor]  #: the network's input of each sample
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.inputs)


def _spread(net: nn.Module) -> nn.Module:
    """In float64, with nothing at its default: norms, biases, statistics."""
    net = net.double().eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim < 2:
                p.copy_(1 + 0.4 * torch.randn_like(p) if "norm" in name.lower() or "ln" in name else p + 0.3)
            elif "embedding" in name or "wte" in name or "wpe" in name or "weight" in name:
                p.copy_(torch.randn_like(p) * (0.9 / p.flatten(1).shape[1] ** 0.5 + 0.1))
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.bias.add_(1.0)  # so that no sample is dead
    return net


def images(net: nn.Module, loss: str, n: int, pick: Callable[[Any], Tensor] = lambda out: out) -> Case:
    """A classifier of 4 x 4 images."""
    net, x, y = _spread(net), torch.randn(n, 1, 4, 4).double(), torch.randint(0, 3, (n,))

    def out(values: Values, one: Tensor) -> Tensor:
        return pick(functional_call(net, values, (one,)))[0]

    return Case(
        net,
        (x, y),
        loss,
        lambda values, i: out(values, x[i : i + 1]),
        lambda f, i: _of_rows(loss, f[None], y[i : i + 1]).sum(),
        lambda one, i: out({}, one),
        [x[i : i + 1] for i in range(n)],
    )


def _of_rows(loss: str, f: Tensor, y: Tensor) -> Tensor:
    """One loss a row."""
    if loss == "cross_entropy":
        return -f.log_softmax(1)[torch.arange(len(f)), y]
    target = F.one_hot(y, f.shape[1]).to(f)
    return 0.5 * (f - target).square().sum(1)


LENGTHS = [5, 3, 4, 2]


def _padded(classes: int, causal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, labels) of sentences of unequal length; some labels are -100 in mid-sentence, too."""
    ids = torch.randint(0, 7, (len(LENGTHS), 5))
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long()
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1) if causal else torch.randint(0, classes, ids.shape)
    if causal:
        labels[torch.arange(len(ids)), mask.sum(1) - 1] = -100  # the last token foretells nothing
    labels[0, 1] = -100
    return ids, mask, labels


def _at_embedding(
    layer: nn.Module, ids: Tensor, out: Callable[[Values, int], Tensor]
) -> tuple[Callable[[Tensor, int], Tensor], list[Tensor]]:
    """Return the outputs as a function of what the embedding gives, and what it gives for each sample."""

    def at_input(made: Tensor, i: int) -> Tensor:
        handle = layer.register_forward_hook(lambda m, a, z: made.reshape(z.shape))
        try:
            return out({}, i)
        finally:
            handle.remove()

    return at_input, [layer.weight.detach()[ids[i, : LENGTHS[i]]] for i in range(len(ids))]


def tokens(net: nn.Module, loss: str, embedding: str, classes: int, causal: bool, pick: Callable[[Any], Tensor]):
    """A row for each token; the input is the first embedding's output."""
    net = _spread(net)
    ids, mask, labels = _padded(classes, causal)
    keep = [(mask[i].bool() & (labels[i] != -100)).nonzero()[:, 0] for i in range(len(ids))]
    per_sample = sum(len(k) for k in keep) / len(ids) if loss == "cross_entropy" else 1

    def out(values: Values, i: int) -> Tensor:
        fed = {"input_ids": ids[i : i + 1, : LENGTHS[i]], "attention_mask": mask[i : i + 1, : LENGTHS[i]]}  # no padding
        return pick(functional_call(net, values, (), fed))[0][keep[i]].flatten()

    def cost(f: Tensor, i: int) -> Tensor:
        return _of_rows(loss, f.reshape(len(keep[i]), -1), labels[i][keep[i]]).sum() / per_sample

    at_input, inputs = _at_embedding(net.get_submodule(embedding), ids, out)
    data = ({"input_ids": ids, "attention_mask": mask}, labels)
    return Case(net, data, loss, out, cost, at_input, inputs)


def _pooled(net: nn.Module, loss: str, embedding: str) -> Case:
    """A transformers classifier of padded sentences."""
    net = _spread(net)
    ids, mask, _ = _padded(3)
    y = torch.randint(0, 3, (len(ids),))

    def out(values: Values, i: int) -> Tensor:
        fed = {"input_ids": ids[i : i + 1, : LENGTHS[i]], "attention_mask": mask[i : i + 1, : LENGTHS[i]]}
        return functional_call(net, values, (), fed).logits[0]

    at_input, inputs = _at_embedding(net.get_submodule(embedding), ids, out)
    data = ({"input_ids": ids, "attention_mask": mask}, y)
    return Case(net, data, loss, out, lambda f, i: _of_rows(loss, f[None], y[i : i + 1]).sum(), at_input, inputs)


def gpt2_network() -> nn.Module:
    """A causal language model, its head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=7, n_positions=6, n_embd=4, n_layer=2, n_head=2, n_inner=6, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def gpt2(loss: str) -> Case:
    """The label of a token is the next one."""
    return tokens(gpt2_network(), loss, "transformer.wte", 7, True, lambda out: out.logits)


def bert(loss: str) -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=6,
        max_position_embeddings=6, num_labels=3,
    )  # fmt: skip
    return _pooled(BertForSequenceClassification(config), loss, "bert.embeddings.word_embeddings")


def hf_vit_network() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=6, image_size=4, patch_size=2,
        num_channels=1, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


def hf_vit(loss: str) -> Case:
    return images(hf_vit_network(), loss, 3, lambda out: out.logits)


CASES: dict[str, Callable[[str], Case]] = {
    "vit-mha": lambda loss: images(vit(packed), loss, 4),
    "vit-sdpa": lambda loss: images(vit(self_attention), loss, 4),
    "vit-crossed": lambda loss: images(vit(crossed), loss, 4),
    "words": lambda loss: tokens(words(), loss, "table", 7, True, lambda out: out),
    "encoder": lambda loss: tokens(encoder(), loss, "embed", 3, False, lambda out: out),
    "encoder-norm-first": lambda loss: tokens(encoder(True), loss, "embed", 3, False, lambda out: out),
    "resnet": lambda loss: images(resnet(), loss, 4),
    "low-rank": lambda loss: images(adapted(), loss, 4),
    "gpt2": gpt2,
    "bert": bert,
    "hf-vit": hf_vit,
}
LOSSES = ("cross_entropy", "half_squared_error")


def case(name: str, loss: str, seed: int = 0) -> Case:
    """A network and its data, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CASES[name](loss)
