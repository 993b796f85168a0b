"""A sample of a folder of images."""

import numpy as np
import pytest
import torch
from PIL import Image

from flatlens.data import DataSettings
from flatlens.data.raw import imagenet
from flatlens.errors import BadData


@pytest.fixture
def root(tmp_path):
    """Three classes of four images each, wide and tall ones, each of one grey: 20 times its number."""
    for number in range(12):
        folder = tmp_path / "imagenet" / f"n{number // 4:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        size = (40, 30) if number % 2 else (300, 400)
        Image.new("RGB", size, (20 * number,) * 3).save(folder / f"{number:02d}.png")
    return tmp_path


def test_samples_are_drawn_cut_and_labelled(root):
    split = imagenet(7, 5, seed=1, root=root)
    assert split.x.shape == (7, 3, 224, 224)
    assert split.test_x.shape == (5, 3, 224, 224)
    numbers = torch.cat([split.x, split.test_x]).mean((1, 2, 3)) * 255 / 20
    assert sorted(numbers.round().int().tolist()) == list(range(12))
    assert torch.equal(torch.cat([split.y, split.test_y]), numbers.round().long() // 4)
    assert split.classes == 3
    again, other = imagenet(7, 5, seed=1, root=root), imagenet(7, 5, seed=2, root=root)
    assert torch.equal(split.x, again.x)
    assert not torch.equal(split.y, other.y) or not torch.equal(split.x, other.x)


def test_the_middle_of_the_shorter_side_is_taken(root):
    picture = np.zeros((256, 512, 3), dtype=np.uint8)
    picture[:, 144:368] = 255  # the middle 224 of 512 columns
    for path in (root / "imagenet").rglob("*.png"):
        Image.fromarray(picture).save(path)
    assert float(imagenet(1, 1, root=root).x.min()) == 1.0


def test_it_is_found_by_name(root, monkeypatch):
    monkeypatch.setenv("FLATLENS_DATA", str(root))
    assert DataSettings("imagenet", train=3, test=2, seed=4).load().x.shape == (3, 3, 224, 224)


def test_what_is_missing_is_one_line(root, tmp_path):
    with pytest.raises(BadData, match=r"7 training and 6 test images were requested, but .* has 12"):
        imagenet(7, 6, root=root)
    with pytest.raises(BadData, match="there is no folder"):
        imagenet(root=tmp_path / "elsewhere")
    (tmp_path / "texts" / "imagenet" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "imagenet" / "a" / "one.txt").write_text("one")
    with pytest.raises(BadData, match="holds texts"):
        imagenet(root=tmp_path / "texts")
    next((root / "imagenet").rglob("*.png")).write_bytes(b"no image")
    with pytest.raises(BadData, match="cannot be read as an image"):
        imagenet(12, 0, root=root)
