"""Published networks behind a resizing and a normalisation; the real timm's are in tests/timm."""

import pytest
import torch
from networks import module_of

from flatlens.errors import BadInput, BadModel
from flatlens.models import Published
from flatlens.models.external import AsTrained


def keeping():
    """Keeps what it is given."""

    def forward(net, images):
        net.images = images
        return images.flatten(1)[:, :2]

    return module_of(forward)


def test_images_are_brought_to_the_size_and_scale_of_the_training():
    seen = keeping()
    net = AsTrained(seen, (3, 8, 8), (0.5, 0.25, 0.0), (0.5, 0.5, 2.0), sigmoid=True)
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = net(images)
    halved = images.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))  # bilinear at half the size is the mean of four
    expected = (halved - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor([0.5, 0.5, 2.0])[:, None, None]
    torch.testing.assert_close(seen.images, expected)
    torch.testing.assert_close(found, torch.sigmoid(expected.flatten(1)[:, :2]))


def test_images_of_the_right_size_stay_as_they_are():
    seen = keeping()
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(AsTrained(seen, (3, 8, 8), None, None, sigmoid=False)(images), images.flatten(1)[:, :2])
    AsTrained(seen, None, None, None, sigmoid=False)(images)
    assert torch.equal(seen.images, images)


def test_a_folder_of_transformers_will_do(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    net = Published(f"hf:{tmp_path}", sigmoid=True).build()
    found = net(torch.rand(2, 3, 16, 16))
    assert found.shape == (2, 3)
    assert ((found > 0) & (found < 1)).all()


def test_bad_settings_are_one_line():
    with pytest.raises(BadInput, match="weights='old'"):
        Published("timm:vit_tiny_patch16_224", weights="old")
    for name in ("nonsense", "net.py:build", "runs/networks/0123456789ab", "package.module:build", ""):
        with pytest.raises(BadModel, match="expected timm:NAME, hf:NAME or hf:FOLDER"):
            Published(name)
