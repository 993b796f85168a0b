"""The hub's parquet files, and the record of a fetch beside them."""

import builtins
import hashlib
import json
import zlib

import pytest
import torch

from flatlens.data import Preparation, cifar10, cifar100, mnist
from flatlens.errors import BadData, BadInput

pytest.importorskip("pyarrow")
RAW = Preparation(standardise="none")


@pytest.mark.parametrize("load", [mnist, cifar10, cifar100])
def test_images_and_labels_in_the_files_order(small, load):
    files = small(load.__name__)
    folder = files.write_parquet()
    for root in (files.root, folder, folder / files.known.hub_folder):
        split = load(root, RAW)
        assert torch.equal((split.x * 255).round().to(torch.uint8), torch.from_numpy(files.x))
        assert torch.equal((split.test_x * 255).round().to(torch.uint8), torch.from_numpy(files.test_x))
        assert split.y.tolist() == files.y.tolist()
        assert split.test_y.tolist() == files.test_y.tolist()
    assert split.description.startswith(f"{files.known.title} (parquet files), all 20 training images and all 10 test")


def test_progress_is_reported(small):
    files = small("mnist")
    files.write_parquet()
    seen = []
    mnist(files.root, progress=lambda *a: seen.append(a))
    assert ("MNIST: training images", 20, 20) in seen
    assert ("MNIST: test images", 10, 10) in seen


def refused(load, root, kind=BadData):
    with pytest.raises(kind) as caught:
        load(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_foreign_and_damaged_files_are_refused(small):
    files = small("cifar10")
    folder = files.write_parquet() / "plain_text"
    path = folder / "test-00000-of-00001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refused(cifar10, files.root) == (
        f"{path}: not a parquet file, or cut short; download it again: `flatlens data fetch cifar10`"
    )
    path.write_bytes((folder / "train-00000-of-00002.parquet").read_bytes())
    cifar10(files.root)  # as many rows, and images all the same: nothing to object to without a record
    (folder / "train-00001-of-00002.parquet").unlink()
    assert "CIFAR-10 must have 20 images here, and train-00000-of-00002.parquet holds 10" in refused(
        cifar10, files.root
    )


def test_columns_images_and_labels_of_another_set_are_refused(small):
    other = small("mnist")
    other.write_parquet()
    (other.root / "mnist").rename(other.root / "cifar10")
    files = small("cifar10")
    line = refused(cifar10, files.root)
    assert "CIFAR-10 has images in 'img' and labels in 'label'; the columns here are image (struct<bytes: " in line
    small("cifar10", image_column="image")
    assert "an image of CIFAR-10 is RGB, 32 x 32; one here is L, 28 x 28" in refused(cifar10, files.root)
    small("mnist", classes=3)
    (other.root / "cifar10").rename(other.root / "mnist")
    line = refused(mnist, files.root)
    assert "train-00000-of-00002.parquet: the label " in line
    assert " is out of range: MNIST has 0 to 2; " in line


def test_an_image_that_is_no_png_is_refused(small):
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = small("mnist")
    path = files.write_parquet() / "mnist" / "test-00000-of-00001.parquet"
    table = pq.read_table(path)
    header = b"IHDR" + (100_000).to_bytes(4) * 2 + b"\x08\x00\x00\x00\x00"  # ten billion pixels
    bomb = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4)
    for bad in (bomb, b"GIF89a", b"", None, table.column("image")[0].as_py()["bytes"][:60]):
        images = table.column("image").to_pylist()
        images[4] = {"bytes": bad, "path": None}
        column = pa.array(images, table.schema.field("image").type)
        pq.write_table(table.set_column(0, "image", column), path)
        assert refused(mnist, files.root) == (
            f"{path}: contains an image that is not a valid PNG; download it again: `flatlens data fetch mnist`"
        )


def test_files_are_held_to_their_record(small):
    files = small("mnist")
    folder = files.write_parquet()
    listed = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.parquets().items()
    ]
    record = {"repository": "ylecun/mnist", "revision": "0" * 40, "files": listed}
    (folder / "fetched.json").write_text(json.dumps(record))
    mnist(files.root)
    path = folder / listed[2]["path"]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert refused(mnist, files.root) == (
        f"{path}: the file has changed since it was downloaded (its SHA256 is not {listed[2]['sha256']}): "
        "`flatlens data fetch mnist` downloads it again"
    )
    path.write_bytes(content[:-1])
    assert "it has" in refused(mnist, files.root)
    (folder / "fetched.json").write_text("{")
    assert refused(mnist, files.root) == (
        f"{folder / 'fetched.json'}: a damaged record; delete it, and fetch the set again"
    )


@pytest.mark.parametrize("module", ["pyarrow"])
def test_a_missing_extra_is_one_line(small, monkeypatch, module):
    files = small("mnist")
    files.write_parquet()
    real = builtins.__import__

    def without(name, *args, **options):
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'flatlens[data]'" in refused(mnist, files.root, BadInput)
