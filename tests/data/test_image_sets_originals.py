"""IDX and CIFAR's binary files: the right pixels and labels; whatever is wrong with a file is one line."""

import gzip
import struct

import numpy as np
import pytest
import torch

from flatlens.data import Preparation, cifar10, cifar100, fashion_mnist, mnist
from flatlens.errors import BadData

RAW = Preparation(standardise="none")


def same(split, files):
    for found, images in ((split.x, files.x), (split.test_x, files.test_x)):
        assert torch.equal((found * 255).round().to(torch.uint8), torch.from_numpy(images))
    assert split.y.tolist() == files.y.tolist()
    assert split.test_y.tolist() == files.test_y.tolist()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("load", [mnist, fashion_mnist])
def test_idx_files_gzipped_or_not(small, load, zipped):
    files = small(load.__name__)
    files.write_idx(zipped)
    split = load(files.root, RAW)
    same(split, files)
    assert (split.name, split.classes, split.x.dtype, split.y.dtype) == (
        load.__name__, 10, torch.float32, torch.int64,
    )  # fmt: skip
    assert split.x.shape == (20, 1, 28, 28)


@pytest.mark.parametrize("load", [cifar10, cifar100])
def test_cifar_files_and_archives(small, load):
    files = small(load.__name__)
    folder = files.write_binary()
    same(load(files.root, RAW), files)
    same(load(folder, RAW), files)  # the folder itself is named as well as its parent
    for path in folder.iterdir():
        path.unlink()
    files.write_archive()
    same(load(files.root, RAW), files)
    assert {p.name for p in files.root.iterdir()} == {files.known.archive, folder.name}  # nothing was unpacked


def test_a_cifar_record_is_a_label_and_three_planes_row_by_row(small):
    files = small("cifar10")
    folder = files.write_binary()
    record = bytearray((folder / "data_batch_1.bin").read_bytes())
    record[0] = 7
    record[1:3073] = bytes(3072)
    record[1 + 1024 + 5 * 32 + 9] = 255  # green, row 5, column 9
    (folder / "data_batch_1.bin").write_bytes(record)
    split = cifar10(files.root, RAW)
    assert int(split.y[0]) == 7
    assert split.x[0].nonzero().tolist() == [[1, 5, 9]]


def test_cifar100_reads_the_fine_label(small):
    files = small("cifar100")
    folder = files.write_binary()
    record = bytearray((folder / "train.bin").read_bytes())
    record[:2] = bytes((3, 77))
    (folder / "train.bin").write_bytes(record)
    assert int(cifar100(files.root).y[0]) == 77


def refused(load, root):
    with pytest.raises(BadData) as caught:
        load(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


MEND = "download it again: `flatlens data fetch mnist`"


def test_a_damaged_idx_file_is_refused(small):
    files = small("mnist")
    path = files.write_idx() / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert refused(mnist, files.root) == (
        f"{path}: this file of MNIST must have {len(whole)} bytes; it has {len(whole) - 5}: truncated; {MEND}"
    )
    path.write_bytes(whole + b"x")
    assert refused(mnist, files.root) == (
        f"{path}: this file of MNIST must have {len(whole)} bytes; it has more; {MEND}"
    )
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    assert refused(mnist, files.root) == (
        f"{path}: not an IDX file of MNIST (it begins with 504b0304 instead of 00000803); {MEND}"
    )
    path.write_bytes(whole[:4] + struct.pack(">3I", 20, 14, 56) + whole[16:])
    assert refused(mnist, files.root) == (f"{path}: the file's shape is 20 x 14 x 56; MNIST has 20 x 28 x 28; {MEND}")
    path.write_bytes(b"")
    assert "begins with  instead of" in refused(mnist, files.root)


def test_a_damaged_gzip_file_is_refused(small):
    files = small("mnist")
    path = files.write_idx(zipped=True) / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not gzip at all", whole[:40] + bytes(40) + whole[80:]):
        path.write_bytes(damaged)
        line = refused(mnist, files.root)
        assert line.startswith(f"{path}: a damaged or truncated gzip file (")
        assert line.endswith(MEND)


def test_a_gzip_file_is_not_unfolded_beyond_what_is_expected(small):
    files = small("mnist")
    path = files.write_idx(zipped=True) / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(10_000_000)))
    assert "must have 28 bytes; it has more" in refused(mnist, files.root)


def test_labels_out_of_range_are_refused(small):
    files = small("mnist")
    folder = files.write_idx()
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + bytes([10]))
    assert refused(mnist, files.root) == f"{path}: the label 10 is out of range: MNIST has 0 to 9; {MEND}"
    cifar = small("cifar10")
    path = cifar.write_binary() / "test_batch.bin"
    path.write_bytes(bytes([200]) + path.read_bytes()[1:])
    assert f"{path}: the label 200 is out of range: CIFAR-10 has 0 to 9" in refused(cifar10, cifar.root)


def test_a_missing_fellow_is_named(small):
    files = small("mnist")
    path = files.write_idx() / "train-labels-idx1-ubyte"
    path.unlink()
    assert refused(mnist, files.root) == f"{path}: there is no such file, and MNIST needs it; {MEND}"
    cifar = small("cifar10")
    path = cifar.write_binary() / "data_batch_4.bin"
    path.unlink()
    assert str(path) in refused(cifar10, cifar.root)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_published_checksum_is_that_of_the_unzipped_content(small, md5, zipped):
    files = small("mnist")
    content = (files.write_idx() / "train-images-idx3-ubyte").read_bytes()
    for path in (files.root / files.known.folder).iterdir():
        path.unlink()
    files.write_idx(zipped)
    right = small("mnist", md5={"train-images-idx3-ubyte": md5(content)})
    mnist(right.root)
    wrong = small("mnist", md5={"train-images-idx3-ubyte": "0" * 32})
    path = files.root / files.known.folder / f"train-images-idx3-ubyte{'.gz' if zipped else ''}"
    assert refused(mnist, wrong.root) == (
        f"{path}: not the published MNIST: its MD5 is {md5(content)} instead of {'0' * 32}; {MEND}"
    )


def test_cifar_checksums_of_files_and_archive(small, md5):
    files = small("cifar10")
    archive = files.write_archive()
    whole = {n: md5(c) for n, c in files.binaries().items()}
    right = small("cifar10", md5={**whole, archive.name: md5(archive.read_bytes())})
    cifar10(right.root)
    small("cifar10", md5={**whole, archive.name: "1" * 32})
    assert refused(cifar10, files.root).startswith(f"{archive}: not the published CIFAR-10: its MD5 is ")
    small("cifar10", md5={**whole, "test_batch.bin": "2" * 32})
    assert "test_batch.bin: not the published CIFAR-10" in refused(cifar10, files.root)
    archive.unlink()
    files.write_binary()
    assert "test_batch.bin: not the published CIFAR-10" in refused(cifar10, files.root)


def test_a_truncated_cifar_file_or_archive_is_refused(small):
    files = small("cifar10")
    path = files.write_binary() / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(cifar10, files.root) == (
        f"{path}: this file of CIFAR-10 must have {4 * 3073} bytes; it has {4 * 3073 - 1}: truncated; "
        "download it again: `flatlens data fetch cifar10`"
    )
    for each in path.parent.iterdir():
        each.unlink()
    archive = files.write_archive()
    archive.write_bytes(archive.read_bytes()[:2000])
    assert refused(cifar10, files.root).startswith(f"{archive}: a damaged or truncated archive (")
    archive.write_bytes(b"<html>not found</html>")
    assert refused(cifar10, files.root).startswith(f"{archive}: a damaged or truncated archive (")


def test_an_archive_without_a_file_is_refused(small):
    files = small("cifar100")
    archive = files.write_archive()
    other = small("cifar100", test_files=("evaluation.bin",))
    assert refused(cifar100, other.root).startswith(f"{archive}: does not contain cifar-100-binary/evaluation.bin; ")


@pytest.mark.parametrize(
    ("load", "there"),
    [
        (cifar10, "cifar-10-batches-py/data_batch_1"),
        (cifar10, "cifar-10-python.tar.gz"),
        (cifar10, "data_batch_1"),
        (cifar100, "cifar-100-python/train"),
    ],
)
def test_pickled_cifar_is_refused_unread(small, load, there):
    files = small(load.__name__)
    path = files.root / there
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    line = refused(load, files.root)
    shown = path.parent if path.parent != files.root and path.parent.name.endswith(("py", "python")) else path
    assert line == (
        f"{shown}: this is the pickled Python version of {files.known.title}, and flatlens never unpickles: get the "
        f"binary version ({files.known.archive}) into {files.root}, or run `flatlens data fetch {load.__name__}`"
    )


def test_published_sizes_are_those_of_the_files():
    from flatlens.data.image_sets import CIFAR10, CIFAR100, _file_size

    assert (_file_size(CIFAR10, True), _file_size(CIFAR10, False)) == (30_730_000, 30_730_000)
    assert (_file_size(CIFAR100, True), _file_size(CIFAR100, False)) == (153_700_000, 30_740_000)


def test_every_known_checksum_is_an_md5_of_a_known_file():
    from flatlens.data.image_sets import IMAGE_SETS

    for known in IMAGE_SETS.values():
        files = {*known.train_files, *known.test_files, known.archive}
        assert set(known.md5) <= files
        assert all(len(bytes.fromhex(value)) == 16 for value in known.md5.values())
        assert len(set(known.md5.values())) == len(known.md5)
    assert np.prod(known.shape) == 3072
