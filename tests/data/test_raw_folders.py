"""Folders of images and of texts, and lists of either from a user's file."""

import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from flatlens.data import raw
from flatlens.data.sources import UserData, load_data
from flatlens.errors import BadData, BadInput
from flatlens.models.external import ImagePreparation, TextPreparation

MINE = """
import numpy as np
from PIL import Image
def texts(): return ["one two", "three"], [0, 1]
def pictures(): return [Image.fromarray(np.full((2, 2, 3), 51 * i, dtype=np.uint8)) for i in range(3)], [0, 1, 0]
def uneven(): return ["one"], [0, 1]
"""


def counted(texts):
    """A tokenizer that counts words."""
    return {"input_ids": torch.tensor([[len(text.split())] for text in texts])}


WORDS = TextPreparation(counted, "words counted")
MEANS = ImagePreparation(lambda image: torch.tensor(np.array(image)).double().mean((0, 1))[:, None, None], "means")


@pytest.fixture
def pictures(tmp_path):
    """FOLDER/{train,test}/{a,b}/*.png of one grey each: 10, 20 and 30, 40; 50 and 60 held out."""
    grey = iter([10, 20, 30, 40, 50, 60])
    for place in ("train/a/0", "train/a/1", "train/b/0", "train/b/1", "test/a/0", "test/b/0"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 4), next(grey), dtype=np.uint8)).save(tmp_path / f"{place}.png")
    (tmp_path / "train" / "a" / "notes.md").write_text("not a picture")
    return tmp_path


def test_images_become_pixels_between_0_and_1(pictures):
    source = load_data(str(pictures))
    x, y = source.data
    assert x.shape == (4, 3, 3, 4)
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [10, 20, 30, 40]
    assert y.tolist() == [0, 0, 1, 1]
    assert (source.test[0][:, 2, 2, 3] * 255).round().tolist() == [50, 60]
    assert "4 images of 2 classes (a is 0, b is 1)" in source.description
    assert source.preparation == raw.PLAIN


def test_the_network_s_preparation_replaces_that(pictures):
    source = load_data(str(pictures), preparation=MEANS)
    assert source.data[0][:, 1, 0, 0].tolist() == [10, 20, 30, 40]
    assert source.preparation == "means"


def test_named_sets_of_images_are_prepared_by_the_network_too():
    x, y = load_data("digits", preparation=MEANS).data
    plain, labels = load_data("digits").data
    assert x.shape == (600, 3, 1, 1)
    assert torch.equal(y, labels)
    # both follow the same images: their ink, up to the constant that one takes off
    ink = torch.stack([x[:, 0, 0, 0], plain.double().sum(1)])
    assert torch.corrcoef(ink)[0, 1] > 0.999
    assert torch.equal(load_data("clusters", preparation=MEANS).data[0], load_data("clusters").data[0])


def test_many_images_are_prepared_when_they_are_read(pictures, monkeypatch):
    held = load_data(str(pictures), preparation=MEANS).data
    monkeypatch.setattr(raw, "HELD", 0)
    read = load_data(str(pictures), preparation=MEANS).data
    assert isinstance(read, Dataset)
    assert torch.equal(torch.stack([read[i][0] for i in range(4)]), held[0])
    assert [int(read[i][1]) for i in range(4)] == held[1].tolist()
    (pictures / "train" / "b" / "1.png").write_bytes(b"no image")
    with pytest.raises(BadData, match=r"1\.png cannot be read as an image"):
        _ = read[3]


def test_class_folders_with_numbers_or_known_names_say_their_labels(tmp_path):
    for name in ("10", "2"):
        (tmp_path / "numbers" / name).mkdir(parents=True)
        (tmp_path / "numbers" / name / "x.txt").write_text("a b")
    assert load_data(str(tmp_path / "numbers"), preparation=WORDS).data[1].tolist() == [10, 2]
    known = TextPreparation(counted, "", {"10": 0, "2": 1, "more": 2})
    assert load_data(str(tmp_path / "numbers"), preparation=known).data[1].tolist() == [0, 1]


def test_held_out_folders_have_the_labels_of_the_training_samples(pictures):
    """A held-out folder that lacks the first class: alphabetical labels of its own would shift the others."""
    (pictures / "test" / "a" / "0.png").rename(pictures / "test" / "b" / "1.png")
    (pictures / "test" / "a").rmdir()
    train = load_data(str(pictures / "train"))
    held_out = load_data(str(pictures / "test"), "--test", classes=train.classes)
    assert held_out.data[1].tolist() == load_data(str(pictures)).test[1].tolist() == [1, 1]
    _, (_, studied) = UserData.read(str(pictures / "train"), str(pictures / "test"))
    assert studied[1].tolist() == [1, 1]


def test_a_class_that_only_the_held_out_samples_have_is_refused(pictures):
    shutil.copytree(pictures / "test" / "b", pictures / "test" / "c")
    words = r"has a class c, and the training samples have none .*\(they have a, b\)"
    with pytest.raises(BadData, match=words):
        load_data(str(pictures))
    classes = load_data(str(pictures / "train")).classes
    with pytest.raises(BadData, match=words):
        load_data(str(pictures / "test"), "--test", classes=classes)


def test_numbers_and_the_network_s_own_names_need_no_training_samples(tmp_path):
    for name in ("train/0", "test/2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text("words")
    assert load_data(str(tmp_path), preparation=WORDS).test[1].tolist() == [2]
    (tmp_path / "train" / "0").rename(tmp_path / "train" / "cat")
    (tmp_path / "test" / "2").rename(tmp_path / "test" / "dog")
    known = TextPreparation(counted, "", {"cat": 5, "cow": 6, "dog": 7})
    assert load_data(str(tmp_path), preparation=known).test[1].tolist() == [7]


def test_lists_from_a_file_are_prepared(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    texts = load_data(f"{tmp_path}/mine.py:texts", preparation=WORDS)
    assert texts.data[0]["input_ids"].tolist() == [[2], [1]]
    assert texts.data[1].tolist() == [0, 1]
    images = load_data(f"{tmp_path}/mine.py:pictures")
    torch.testing.assert_close(images.data[0][:, 0, 0, 0], torch.tensor([0.0, 0.2, 0.4]))
    with pytest.raises(BadData, match="1 inputs and 2 targets"):
        load_data(f"{tmp_path}/mine.py:uneven", preparation=WORDS)


@pytest.mark.parametrize(
    ("files", "preparation", "words"),
    [
        ([], None, "no folder for each class"),
        (["a/x.md"], None, "neither images nor"),
        (["a/x.txt", "a/x.png"], None, "1 images and 1 texts"),
        (["a/x.txt"], None, "has no tokenizer"),
        (["a/x.txt"], MEANS, "the network reads images"),
        (["a/x.png"], WORDS, "the network reads texts"),
        (["a/x.png"], None, "x.png cannot be read as an image"),
        (["a/latin.txt"], WORDS, "not UTF-8"),
    ],
)
def test_folders_that_cannot_be_measured_are_one_line(tmp_path, files, preparation, words):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"caf\xe9" if "latin" in file else b"words")
    with pytest.raises(BadInput, match=words) as caught:
        load_data(str(tmp_path), "--test", preparation)
    assert str(caught.value).startswith("--test: ")
    assert "\n" not in str(caught.value)


UNREADABLE = """
import os, sys
from PIL import Image
from flatlens.data.sources import load_data
Image.init()  # the readers of image forms are imported now: another user may not read them
if os.geteuid() == 0:
    os.setuid(65534)  # root may read everything
try:
    load_data(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("place", ["b", "b/inner", "b/0.png"])
def test_what_cannot_be_read_is_not_dropped(place):
    with TemporaryDirectory(prefix="flatlens", dir="/tmp") as name:  # everybody may go there
        folder = Path(name)
        folder.chmod(0o755)
        for file in ("a/0.png", "b/0.png", "b/inner/1.png"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((3, 4), dtype=np.uint8)).save(folder / file)
        (folder / place).chmod(0)
        command = [sys.executable, "-c", UNREADABLE, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (folder / place).chmod(0o755)
    assert done.stdout.startswith("BadData --data: "), done
    assert f"{folder / place}" in done.stdout
    assert "Permission denied" in done.stdout


def bomb(side: int) -> bytes:
    """A PNG of side x side pixels in its header, and none after it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


@pytest.mark.parametrize("side", [2, 10_000, 100_000, 2**31 - 1])
def test_images_that_would_fill_the_memory_or_are_cut_short(tmp_path, recwarn, side):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(bomb(side))
    with pytest.raises(BadData, match=r"x\.png cannot be read as an image") as caught:
        load_data(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not [w for w in recwarn if "decompression bomb" in str(w.message)]


def test_some_of_the_samples(pictures):
    source = load_data(str(pictures), preparation=MEANS)
    some = source.drawn(3)
    assert len(some.data[0]) == len(some.data[1]) == 3
    assert set(some.data[0][:, 0, 0, 0].tolist()) < {10, 20, 30, 40}
    assert some.test is source.test
    assert "3 of 4 samples" in some.description
    texts = load_data("digits").drawn(5)
    assert texts.data[0].shape == (5, 64)
    with pytest.raises(BadInput, match="--samples 5: expected 1 to 4"):
        source.drawn(5)
