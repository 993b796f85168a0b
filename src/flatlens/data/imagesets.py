"""Facts on the image sets that the papers train on: shapes, sizes, files, published checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ImageSet:
    """One set: the names of its files and what they must contain."""

    name: str
    title: str
    shape: tuple[int, int, int]  #: channels, rows, columns
    classes: int
    train: int  #: training images in all
    test: int
    folder: str  #: folder of the original files, under the root
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    repository: str  #: on the Hugging Face hub
    hub_folder: str  #: folder of the parquet files, in the repository
    image_column: str
    label_column: str
    archive: str = ""  #: holds the folder, unpacked or not
    label_bytes: int = 1  #: before each image of a CIFAR file; the last one is the label
    md5: Mapping[str, str] = field(default_factory=dict, hash=False)  #: checksums; of IDX files uncompressed


IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST = ImageSet(
    name="mnist",
    title="MNIST",
    shape=(1, 28, 28),
    classes=10,
    train=60_000,
    test=10_000,
    folder="MNIST/raw",
    train_files=IDX_TRAIN,
    test_files=IDX_TEST,
    repository="ylecun/mnist",
    hub_folder="mnist",
    image_column="image",
    label_column="label",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)

FASHION_MNIST = ImageSet(
    name="fashion_mnist",
    title="FashionMNIST",
    shape=(1, 28, 28),
    classes=10,
    train=60_000,
    test=10_000,
    folder="FashionMNIST/raw",
    train_files=IDX_TRAIN,
    test_files=IDX_TEST,
    repository="zalando-datasets/fashion_mnist",
    hub_folder="fashion_mnist",
    image_column="image",
    label_column="label",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)

CIFAR10 = ImageSet(
    name="cifar10",
    title="CIFAR-10",
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    test=10_000,
    folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test_files=("test_batch.bin",),
    repository="uoft-cs/cifar10",
    hub_folder="plain_text",
    image_column="img",
    label_column="label",
    archive="cifar-10-binary.tar.gz",
    md5={
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)

CIFAR100 = ImageSet(
    name="cifar100",
    title="CIFAR-100",
    shape=(3, 32, 32),
    classes=100,
    train=50_000,
    test=10_000,
    folder="cifar-100-binary",
    train_files=("train.bin",),
    test_files=("test.bin",),
    repository="uoft-cs/cifar100",
    hub_folder="cifar100",
    image_column="img",
    label_column="fine_label",
    archive="cifar-100-binary.tar.gz",
    label_bytes=2,  # the superclass, then the class
    md5={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
)

IMAGE_SETS: dict[str, ImageSet] = {s.name: s for s in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
"""The sets that are read from a folder, by name."""
