from dataclasses import replace

import pytest
import torch

from flatlens.data import UserData
from flatlens.errors import BadData, BadInput
from flatlens.models import UserNetwork

DATA = """
import itertools
import torch
from torch.utils.data import DataLoader, TensorDataset

calls = itertools.count()
x = torch.arange(40.0).reshape(20, 2)
y = torch.arange(20) % 3

def pair(): return x, y
def numbers(): return x.double().numpy(), x.sum(1).numpy()
def images(): return torch.randn(20, 1, 2, 3), y[:, None]
def dataset(): return TensorDataset(x, y)
def loader(): return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
def other(): return -x[:7], y[:7]
class Both:
    def __init__(self): self.x, self.y, self.test_x, self.test_y = x, y, x[:5] + 1, y[:5]
def restless(): return x + next(calls), y
def dicts(): return {"ids": x}, y
def uneven(): return x, y[:3]
class Mixed:
    def __init__(self): self.x, self.y, self.test_x, self.test_y = x, y, x[:5], x[:5, 0]
def below(): return x, y - 5
def fails(): raise OSError("no disk")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.py"
    path.write_text(DATA)
    return path


def test_a_fifth_is_held_out_where_there_is_no_test_data(file):
    split = UserData.of(f"{file}:pair").load()
    assert (len(split.x), len(split.test_x), split.classes) == (16, 4, 3)
    assert sorted([*split.x[:, 0].tolist(), *split.test_x[:, 0].tolist()]) == list(range(0, 40, 2))
    assert split.y.tolist() == [int(v) // 2 % 3 for v in split.x[:, 0]]  # inputs and labels stay together
    assert split.description == "mine.py:pair; 4 of 20 samples are held out as test data, drawn with seed 0"
    assert not torch.equal(replace(UserData.of(f"{file}:pair"), seed=1).load().test_x, split.test_x)


def test_test_data_and_numbers_of_samples(file):
    both, (_, test) = UserData.read(f"{file}:Both")
    assert test is not None
    assert (len(both.load().x), len(both.load().test_x)) == (20, 5)
    some = replace(both, train=9, test=2).load()
    assert (len(some.x), len(some.test_x)) == (9, 2)
    apart = UserData.of(f"{file}:pair", f"{file}:other").load()
    assert (len(apart.x), apart.test_x[1].tolist()) == (20, [-2.0, -3.0])
    assert len(replace(UserData.of(f"{file}:pair"), test=0).load().test_x) == 0
    for wrong in ({"train": 21}, {"test": 6}):
        with pytest.raises(BadData, match=r"the data has (20|5) samples"):
            replace(both, **wrong).load()
    with pytest.raises(BadData, match="at least one must be left"):
        replace(UserData.of(f"{file}:pair"), test=20).load()


def test_every_form_becomes_pairs_of_tensors(file):
    numbers = UserData.of(f"{file}:numbers").load()
    assert (numbers.x.dtype, numbers.y.shape, numbers.classes) == (torch.float32, (16, 1), 0)
    images = replace(UserData.of(f"{file}:images"), flat=True).load()
    assert (images.x.shape, images.y.shape) == ((16, 6), (16,))
    assert torch.equal(UserData.of(f"{file}:dataset").load().x, UserData.of(f"{file}:pair").load().x)
    loaded = UserData.of(f"{file}:loader").load()
    assert sorted(loaded.x[:, 0].tolist() + loaded.test_x[:, 0].tolist()) == list(range(0, 40, 2))


def test_random_samples_are_the_same_at_each_call_and_the_global_state_stays(file):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    data = UserData.of(f"{file}:images")
    torch.manual_seed(4)
    data.load()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_change_from_call_to_call_are_refused(file):
    with pytest.raises(BadData, match="restless returns other samples than when the study began"):
        UserData.of(f"{file}:restless").load()


def test_random_numbers_of_the_import_do_not_shift_those_of_the_call(tmp_path):
    """The first call in a process imports the file; a worker may import it for the network before."""
    texts = (
        "import torch\nnoise = torch.randn(3)\ndef samples(): return torch.randn(9, 2) + noise[0], torch.arange(9)\n"
    )
    (tmp_path / "net.py").write_text(texts + "def build(): return torch.nn.Linear(2, 9)\n")
    torch.manual_seed(5)
    first = UserData.of(f"{tmp_path}/net.py:samples")
    assert torch.equal(first.load().x, first.load().x)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "net.py").write_text((tmp_path / "net.py").read_text())
    torch.manual_seed(6)
    UserNetwork.of(f"{tmp_path}/elsewhere/net.py:build").build()
    assert UserData.of(f"{tmp_path}/elsewhere/net.py:samples").contents == first.contents


def test_labels_and_numbers_do_not_go_together(file):
    for spec in ((f"{file}:Mixed",), (f"{file}:numbers", f"{file}:pair")):
        with pytest.raises(
            BadData, match=r"the targets of mine.py:\w+ are .*those of the test data .*y.float"
        ) as caught:
            UserData.of(*spec)
        assert "\n" not in str(caught.value)


def test_labels_below_0_make_no_negative_number_of_classes(file):
    assert UserData.of(f"{file}:below").load().classes == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dicts", "a study needs pairs of tensors"),
        ("uneven", "20 inputs and 3 targets"),
        ("fails", "raised OSError: no disk"),
        ("pear", "did you mean pair"),
    ],
)
def test_what_cannot_be_read_is_one_line(file, name, said):
    with pytest.raises(BadInput, match=said) as caught:
        UserData.of(f"{file}:{name}")
    assert "\n" not in str(caught.value)


def test_a_name_without_folders(file):
    assert UserData.of(f"{file}:pair").name == "mine.py:pair"
