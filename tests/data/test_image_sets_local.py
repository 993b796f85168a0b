"""Where the files of a set are looked for, and what is said when there are none."""

from pathlib import Path

import pytest

from flatlens.data import Preparation, cifar10, default_root, mnist
from flatlens.data.image_sets import IMAGE_SETS, find
from flatlens.errors import BadData


def test_the_default_root_is_the_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATLENS_DATA", str(tmp_path))
    assert default_root() == tmp_path
    for empty in (lambda: monkeypatch.delenv("FLATLENS_DATA"), lambda: monkeypatch.setenv("FLATLENS_DATA", "")):
        empty()
        monkeypatch.setenv("HOME", "/home/somebody")
        assert default_root() == Path("/home/somebody/.cache/flatlens")


def test_the_default_root_is_read(small, monkeypatch):
    files = small("cifar10")
    files.write_binary()
    monkeypatch.setenv("FLATLENS_DATA", str(files.root))
    assert len(cifar10().x) == 20
    assert len(cifar10(prepare=Preparation(train=5, test=3)).x) == 5


def test_a_home_folder_is_understood(small, monkeypatch):
    files = small("cifar10")
    files.write_binary()
    monkeypatch.setenv("HOME", str(files.root.parent))
    assert len(cifar10(f"~/{files.root.name}").x) == 20
    monkeypatch.setenv("FLATLENS_DATA", f"~/{files.root.name}")
    assert default_root() == files.root


def test_nothing_there_is_one_line_that_says_where_it_looked(tmp_path):
    with pytest.raises(BadData) as caught:
        mnist(tmp_path / "nowhere")
    assert str(caught.value) == (
        f"mnist: no MNIST in {tmp_path / 'nowhere'}, neither MNIST/raw/train-images-idx3-ubyte(.gz) nor "
        "mnist/**/train-*.parquet: run `flatlens data fetch mnist`, or name its folder by mnist:ROOT or FLATLENS_DATA"
    )
    assert list(tmp_path.iterdir()) == []


def test_every_form_is_found(small):
    files = small("cifar10")
    assert find(files.known, files.root) is None
    archive = files.write_archive()
    assert find(files.known, files.root).place == archive
    folder = files.write_binary()
    found = find(files.known, files.root)
    assert (found.form, found.place) == ("binary files", folder)


def test_the_fetched_form_is_found(small):
    pytest.importorskip("pyarrow")
    files = small("fashion_mnist")
    folder = files.write_parquet()
    found = find(IMAGE_SETS["fashion_mnist"], files.root)
    assert (found.form, found.place, len(found.train), len(found.test)) == ("parquet files", folder, 2, 1)
    assert find(IMAGE_SETS["mnist"], files.root) is None
