"""DATA: named sets and whatever a user's function returns."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatlens.data.sources import load_data
from flatlens.errors import BadData, BadInput, UnknownName

MINE = """
import numpy as np, torch
from types import SimpleNamespace
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.ones(6, 3), torch.arange(6) % 2
def pair(): return x, y
def arrays(): return np.ones((6, 3), dtype=np.float32), np.arange(6)
def listed(): return [[[1., 2.], [3., 4.]], [0, 1]]
def dataset(): return TensorDataset(x, y)
def loader(): return DataLoader(TensorDataset(x, y), batch_size=2)
def split(): return SimpleNamespace(x=x, y=y, test_x=x[:2], test_y=y[:2])
def no_test(): return SimpleNamespace(x=x, y=y)
ready = TensorDataset(x, y)
def triple(): return x, y, y
def nothing(): return None
def uneven(): return x, y[:4]
def words(): return np.array(["a", "b"]), np.array([0, 1])
def needs(path): return x, y
def labelled(): return {"x": x, "labels": y}
def rows(): return [{"x": one, "label": label} for one, label in zip(x, y)]
def unlabelled(): return {"x": x}
def named(): return x, ["ab"[i] for i in y]
def ragged(): return x, [[1], [2, 3]]
def named_in_a_table():
    import pandas as pd
    return pd.DataFrame(x.numpy()), pd.Series(["ab"[i] for i in y])
def broken(): raise FileNotFoundError("data.npz")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_digits_come_with_their_test_data():
    source = load_data("digits")
    assert isinstance(source.data, tuple)
    assert source.test is not None


@pytest.mark.parametrize("name", ["pair", "arrays", "listed"])
def test_pairs_become_tensors(mine, name):
    source = load_data(f"{mine}:{name}")
    x, y = source.data
    assert x.dtype == (torch.float64 if name == "listed" else torch.float32)
    assert y.dtype == torch.int64
    assert len(x) == len(y)
    assert source.test is None


def test_datasets_and_loaders_are_handed_on(mine):
    assert isinstance(load_data(f"{mine}:dataset").data, Dataset)
    assert isinstance(load_data(f"{mine}:loader").data, DataLoader)
    assert isinstance(load_data(f"{mine}:ready").data, Dataset)


@pytest.mark.parametrize("name", ["labelled", "rows"])
def test_dicts_with_labels_and_lists_of_dicts_are_handed_on(mine, name):
    import flatlens as fl

    class Named(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    source = load_data(f"{mine}:{name}")
    net = Named(3, 2)
    found, pair = (fl.Problem(net, "cross_entropy", data) for data in (source.data, load_data(f"{mine}:pair").data))
    assert fl.measure(fl.Lens(found), "mls")["mls"].value == fl.measure(fl.Lens(pair), "mls")["mls"].value
    with pytest.raises(BadInput, match="--samples: does not work with a DataLoader or dicts"):
        source.drawn(2)


@pytest.mark.parametrize("count", [0, 7])
def test_a_number_of_samples_that_there_are_not_is_refused_with_those_there_are(mine, count):
    with pytest.raises(BadInput, match=f"--samples {count}: expected 1 to 6"):
        load_data(f"{mine}:pair").drawn(count)


def test_an_object_with_held_out_data(mine):
    assert len(load_data(f"{mine}:split").test[0]) == 2
    assert load_data(f"{mine}:no_test").test is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("triple", r"tuple of 3; .*; several inputs of the network go into a tuple, \(\(x, z\), y\)"),
        ("unlabelled", "dict of 1; it must return .* a dict with labels"),
        ("named", "the targets of .* are text: number the classes 0, 1, ..."),
        ("named_in_a_table", "the targets of .* are text: number the classes 0, 1, ..."),
        ("nothing", "NoneType"),
        ("uneven", "6 inputs and 4 targets"),
        ("words", "the inputs of .* are text: give a list of texts, or numbers"),
        ("ragged", "cannot be turned into an array of numbers"),
        ("needs", "needs the arguments path"),
        ("broken", r"FileNotFoundError: data\.npz"),
    ],
)
def test_what_is_no_data_is_one_line(mine, name, words):
    with pytest.raises(BadInput, match=words) as caught:
        load_data(f"{mine}:{name}", "--test")
    assert str(caught.value).startswith("--test: ")
    assert "\n" not in str(caught.value)


def test_an_unknown_name_and_a_file_that_is_not_python(tmp_path):
    with pytest.raises(UnknownName, match="did you mean digits"):
        load_data("digit")
    with pytest.raises(UnknownName, match="did you mean digits"):
        load_data("DIGITS")
    with pytest.raises(BadData, match=f"^--data: there is no folder or file {tmp_path}/nowhere$"):
        load_data(f"{tmp_path}/nowhere")
    (tmp_path / "x.csv").write_text("1,2\n")
    with pytest.raises(BadData, match=r"file\.py:NAME"):
        load_data(str(tmp_path / "x.csv"))


@pytest.mark.parametrize("name", ["patches", "clusters", "eight_points", "waves_square"])
def test_what_needs_no_files_comes_by_name(name):
    source = load_data(name)
    assert len(source.data[0]) == len(source.data[1])
    assert len(source.test[0]) == len(source.test[1])


def test_sets_from_files_come_by_name_and_root(small, monkeypatch):
    files = small("cifar10")
    files.write_binary()
    assert load_data(f"cifar10:{files.root}").data[0].shape == (20, 3, 32, 32)
    monkeypatch.setenv("FLATLENS_DATA", str(files.root))
    assert load_data("cifar10").test[1].tolist() == files.test_y.tolist()


def test_names_with_roots_that_hold_nothing(tmp_path):
    for spec, words in (
        (f"mnist:{tmp_path}", f"--data: mnist: no MNIST in {tmp_path}, "),
        ("mnist:", "--data: mnist cannot be read from '': write name:FOLDER"),
        (f"digits:{tmp_path}", "it has no files of its own: write the name alone"),
    ):
        with pytest.raises(BadData) as caught:
            load_data(spec)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnknownName, match="did you mean cifar10"):
        load_data(f"cifar-10:{tmp_path}")


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_copied(mine, tmp_path):
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\ndef frozen():\n    import numpy\n    x = numpy.ones((4, 2))\n    x.flags.writeable = False\n")
        file.write("    return x, x[:, 0]\n")
    assert load_data(f"{mine}:frozen").data[0].tolist() == [[1.0, 1.0]] * 4
