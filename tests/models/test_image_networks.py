"""The vision transformer: its sizes, its forward pass against a literal one, its refusals."""

import math

import pytest
import torch

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.models import ViT

SMALL = ViT(classes=3, image=16, patch=8, width=12, depth=2, heads=3)


def literal(net, settings, x):
    """One sample at a time, one head at a time, by matrices."""
    norm = torch.nn.functional.layer_norm
    outputs = []
    for image in x:
        p = settings.patch
        cut = [image[:, i : i + p, j : j + p].flatten() for i in range(0, 16, p) for j in range(0, 16, p)]
        tokens = torch.stack(cut) @ net.embedding.weight.flatten(1).T + net.embedding.bias
        if settings.pooling == "class":
            tokens = torch.cat([net.token[0], tokens])
        tokens = tokens + net.positions[0]
        for block in net.blocks:
            h = norm(tokens, (12,), block.norm1.weight, block.norm1.bias)
            q, k, v = (h @ block.qkv.weight.T + block.qkv.bias).split(12, dim=1)
            heads = []
            for part in range(3):
                columns = slice(4 * part, 4 * part + 4)
                weights = torch.softmax(q[:, columns] @ k[:, columns].T / math.sqrt(4), dim=1)
                heads.append(weights @ v[:, columns])
            tokens = tokens + block.projection(torch.cat(heads, dim=1))
            h = norm(tokens, (12,), block.norm2.weight, block.norm2.bias)
            tokens = tokens + block.fc2(block.act(block.fc1(h)))
        tokens = norm(tokens, (12,), net.norm.weight, net.norm.bias)
        out = net.head(tokens[0] if settings.pooling == "class" else tokens.mean(0))
        outputs.append(torch.sigmoid(out) if settings.sigmoid else out)
    return torch.stack(outputs)


@pytest.mark.parametrize("change", [{}, {"pooling": "mean"}, {"sigmoid": True}, {"activation": "relu"}])
def test_it_computes_what_a_literal_one_does(change):
    settings = ViT(**{"classes": 3, "image": 16, "patch": 8, "width": 12, "depth": 2, "heads": 3, **change})
    net = settings.build().double()
    with torch.no_grad():
        for parameter in net.parameters():  # far from the small start, where everything is nearly linear
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64), alpha=0.3
            )
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(net(x), literal(net, settings, x), rtol=1e-10, atol=1e-12)


def test_its_start_follows_from_the_seed_alone():
    before = torch.random.get_rng_state()
    one, same, other = SMALL.build(), SMALL.build(), ViT(**{**vars(SMALL), "seed": 1}).build()
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim > 1:
            assert not torch.equal(a, c)
            assert 0.01 < a.std().item() < 0.03
        else:
            assert set(a.tolist()) == {1.0 if "norm" in name and name.endswith("weight") else 0.0}


def test_the_pass_agrees_with_per_sample_gradients():
    net = SMALL.build().double()
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = fl.measure(fl.Lens(fl.Problem(net, "mse", (x, torch.zeros(3, 3, dtype=torch.float64)))), "pass")
    parameters = list(net.parameters())
    total = 0.0
    for i in range(3):
        for output in net(x[i : i + 1])[0]:
            total += sum(float(g.square().sum()) for g in torch.autograd.grad(output, parameters, retain_graph=True))
    assert report["interpolation_sharpness"].value == pytest.approx(total / 3, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"patch": 5}, "image=16.*multiple of 5"),
        ({"heads": 5}, "width=12.*multiple of 5"),
        ({"pooling": "max"}, "pooling='max'"),
        ({"activation": "sine"}, "activation='sine'"),
        ({"depth": 0}, "at least 1"),
        ({"mlp": 0.01}, "no hidden unit"),
    ],
)
def test_bad_settings_are_one_line(change, said):
    with pytest.raises(BadInput, match=said) as caught:
        ViT(**{**vars(SMALL), **change})
    assert "\n" not in str(caught.value)
