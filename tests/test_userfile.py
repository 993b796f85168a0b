"""The user's own files: found, run once, and every mistake in them one line."""

import os
import sys
from pathlib import Path

import pytest

from flatlens import userfile
from flatlens.errors import BadInput, UnknownName


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_name_in_the_file_is_found(tmp_path):
    file = write(tmp_path, "def build():\n    return 42\n")
    assert userfile.load(f"{file}:build", "MODEL")() == 42


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text elsewhere")
def test_a_folder_whose_name_is_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    file = write(folder, "def build():\n    return 42\n")
    assert userfile.load(f"{file}:build", "MODEL")() == 42


def test_a_file_runs_once_for_model_and_data(tmp_path):
    file = write(tmp_path, "class Made: pass\ndef build(): return Made\n")
    assert userfile.load(f"{file}:build", "MODEL")() is userfile.load(f"{file}:build", "--data")()


def test_a_file_can_import_its_neighbours_and_hides_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "answer = 7\n", "neighbour_of_mine.py")
    file = write(tmp_path, "import neighbour_of_mine\ndef build(): return neighbour_of_mine.answer\n", "json.py")
    assert userfile.load(f"{file}:build", "MODEL")() == 7
    assert "json" in sys.modules
    assert hasattr(sys.modules["json"], "loads")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine.py:buld", ["buld", "did you mean build"]),
        ("mine.py", ["mine.py:NAME", "build"]),
        ("absent.py:build", ["no file", "absent.py", "mine.py"]),
        ("nowhere/absent.py:build", ["no file", "no .py file"]),
    ],
)
def test_a_wrong_name_is_told_what_there_is(tmp_path, monkeypatch, spec, words):
    write(tmp_path, "import os\ndef build(): pass\n_hidden = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        userfile.load(spec, "MODEL")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_says_so(tmp_path):
    file = write(tmp_path, "")
    with pytest.raises(BadInput, match="defines no function"):
        userfile.load(f"{file}:build", "MODEL")
    with pytest.raises(UnknownName):
        userfile.load(write(tmp_path, "def a(): pass\n", "other.py") + ":b", "MODEL")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit(3)\n", ["SystemExit", "line 2"]),
        ("x = 1\ny = 1 / 0\n", ["ZeroDivisionError", "mine.py, line 2"]),
        ("def build(:\n", ["SyntaxError", "line 1"]),
        ("import not_a_package_at_all\n", ["ModuleNotFoundError", "not_a_package_at_all"]),
    ],
)
def test_a_file_that_fails_is_one_line_with_the_place(tmp_path, text, words):
    file = write(tmp_path, text)
    for _ in range(2):  # a failed import must not look finished the second time
        with pytest.raises(BadInput) as caught:
            userfile.load(f"{file}:build", "MODEL")
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_function_that_fails_names_the_line_that_is_the_users(tmp_path):
    file = write(tmp_path, "import torch\ndef build():\n    return torch.ones(2) @ torch.ones(3)\n")
    build = userfile.load(f"{file}:build", "MODEL")
    with pytest.raises(BadInput, match=r"MODEL raised RuntimeError: .*\(mine\.py, line 3\)"):
        userfile.guarded(build, "MODEL")


def test_needed_arguments():
    assert userfile.needed_arguments(lambda a, b=1, *c, **d: None) == ["a"]
