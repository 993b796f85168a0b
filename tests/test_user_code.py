"""The user's own files: found, run once, and every mistake in them one line."""

import importlib
import os
import pickle
import random
import sys
from pathlib import Path

import pytest

from flatlens import user_code
from flatlens.errors import BadInput, UnknownName


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_name_in_the_file_is_found(tmp_path):
    file = write(tmp_path, "def build():\n    return 42\n")
    assert user_code.load(f"{file}:build", "MODEL")() == 42


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text elsewhere")
def test_a_folder_whose_name_is_no_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    file = write(folder, "def build():\n    return 42\n")
    assert user_code.load(f"{file}:build", "MODEL")() == 42


def test_a_file_runs_once_for_model_and_data(tmp_path):
    file = write(tmp_path, "class Made: pass\ndef build(): return Made\n")
    assert user_code.load(f"{file}:build", "MODEL")() is user_code.load(f"{file}:build", "--data")()


def test_a_file_can_import_its_neighbours_and_hides_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "answer = 7\n", "neighbour_of_mine.py")
    file = write(tmp_path, "import neighbour_of_mine\ndef build(): return neighbour_of_mine.answer\n", "json.py")
    assert user_code.load(f"{file}:build", "MODEL")() == 7
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
        user_code.load(spec, "MODEL")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_says_so(tmp_path):
    file = write(tmp_path, "")
    with pytest.raises(BadInput, match="defines no function"):
        user_code.load(f"{file}:build", "MODEL")
    with pytest.raises(UnknownName):
        user_code.load(write(tmp_path, "def a(): pass\n", "other.py") + ":b", "MODEL")


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
            user_code.load(f"{file}:build", "MODEL")
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_function_that_fails_names_the_line_that_is_the_users(tmp_path):
    file = write(tmp_path, "import torch\ndef build():\n    return torch.ones(2) @ torch.ones(3)\n")
    build = user_code.load(f"{file}:build", "MODEL")
    with pytest.raises(BadInput, match=r"MODEL raised RuntimeError: .*\(mine\.py, line 3\)"):
        user_code.guarded(build, "MODEL")


def test_needed_arguments():
    assert user_code.needed_arguments(lambda a, b=1, *c, **d: None) == ["a"]


LAYERS = "import torch\nclass L(torch.nn.Linear):\n    pass\n"
PARTS = {
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass Size:\n    width: int = 4\n",
    "main": "if __name__ == '__main__':\n    raise SystemExit(1)\n",
    "pool": "from multiprocessing import get_context\ndef double(x):\n    return 2 * x\n",
    "standard": "import queue, random, json\nassert hasattr(queue, 'Queue') and hasattr(json, 'loads')\n",
    "sibling": "import a_sibling_of_{n}\nassert a_sibling_of_{n}.answer == {n}\n",
    "absolute": "from {top}{n}.layers import L as Again\n",
}


def drawn_package(folder: Path, seed: int) -> tuple[str, str]:
    """A file in packages, some without an __init__.py, some named like Python's modules, with imports of all kinds."""
    rng = random.Random(seed)
    depth, namespace = rng.randint(1, 3), rng.random() < 0.3
    top = rng.choice(["net_", "code" if not seed % 3 else "mine_", "tests" if not seed % 4 else "nets_"])
    standard = top in ("code", "tests")
    names = [top if standard else f"{top}{seed}", *(f"sub{k}" for k in range(1, depth))]
    here = folder.joinpath(*names)
    here.mkdir(parents=True)
    for length in range(1, depth + 1):
        (folder.joinpath(*names[:length]) / "layers.py").write_text(LAYERS)
        if not namespace:
            (folder.joinpath(*names[:length]) / "__init__.py").write_text("")
    for name in ("queue.py", "random.py", "json.py"):
        (here / name).write_text("raise RuntimeError('a standard module was hidden')\n")
    (here / f"a_sibling_of_{seed}.py").write_text(f"answer = {seed}\n")
    level = rng.randint(1, depth)
    picked = [part for name, part in PARTS.items() if rng.random() < 0.6 and (name != "absolute" or not standard)]
    if namespace:  # relative imports alone say how deep the packages are
        level = depth
    code = f"import torch\nfrom {'.' * level}layers import L\n" + "".join(picked).replace("{n}", str(seed))
    code = code.replace("{top}", top)
    (here / "net.py").write_text(code + "def build():\n    return torch.nn.Sequential(L(3, 4), L(4, 2))\n")
    return str(here.joinpath("net.py").relative_to(folder)), ".".join([*names, "net"])


@pytest.mark.parametrize("seed", range(24))
def test_a_file_of_a_package_is_imported_as_part_of_it(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file, module = drawn_package(tmp_path, seed)
    assert user_code.is_userfile(f"{module}:build")
    assert user_code.with_folder(f"{module}:build") == f"{tmp_path / file}:build"
    build = user_code.load(f"{file}:build" if seed % 2 else f"{module}:build", "MODEL")
    assert user_code.load(f"{module}:build" if seed % 2 else f"{file}:build", "MODEL") is build
    assert len(build()) == 2
    assert user_code.is_current(Path(file))
    for name in ("queue", "random", "json", "code"):
        assert not str(getattr(sys.modules.get(name), "__file__", "")).startswith(str(tmp_path))
    sibling = Path(file).with_name("layers.py")
    before = user_code.code_of(Path(file))
    for layers in [sibling, *(folder / "layers.py" for folder in sibling.parent.parents)]:
        if layers.is_file():
            layers.write_text(LAYERS + "x = 1\n")
    assert user_code.code_of(Path(file)) != before


def test_a_class_of_a_package_is_pickled_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pickled_ones").mkdir()
    (tmp_path / "pickled_ones" / "__init__.py").write_text("")
    file = write(tmp_path / "pickled_ones", "class Made: pass\n")
    assert pickle.loads(pickle.dumps(user_code.load(f"{file}:Made", "MODEL"))).__module__ == "pickled_ones.mine"


@pytest.mark.parametrize("late", range(4))
def test_two_neighbours_of_one_name_are_never_confused(tmp_path, monkeypatch, late):
    """Imports at the top of a file come at once; one in a function may come when the name is another file's."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name, builds = f"two_of_one_name_{late}", []
    top = f"import {name}\ndef build():\n    return {name}.answer\n"
    inside = f"def build():\n    import {name}\n    return {name}.answer\n"
    for number, folder in enumerate("aba"):
        (tmp_path / folder).mkdir(exist_ok=True)
        write(tmp_path / folder, f"answer = '{folder}'\n", f"{name}.py")
        code = inside if late >> min(number, 1) & 1 else top
        file = write(tmp_path / folder, code, f"mine{number}.py")
        if number and late:
            with pytest.raises(BadInput, match=f"imports '{name}' from .*b, and this process has another .*a: rename"):
                user_code.load(f"{file}:build", "MODEL")
            break
        builds.append(user_code.load(f"{file}:build", "MODEL"))
    assert [build() for build in builds] == ["a"] if late else ["a", "b", "a"]


def test_a_neighbour_of_an_installed_packages_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "answer = 1\n", "pytest.py")
    file = write(tmp_path, "import pytest\ndef build(): pass\n")
    with pytest.raises(BadInput, match=r"this process has another 'pytest', from .*site-packages: rename"):
        user_code.load(f"{file}:build", "MODEL")


@pytest.mark.parametrize("module", ["json.tool", "xml.sax.handler"])
def test_an_installed_module_is_named_without_its_file(module):
    assert user_code.is_userfile(f"{module}:main")
    assert user_code.file_and_name(f"{module}:main") == (Path(importlib.import_module(module).__file__), "main")


@pytest.mark.parametrize(
    "text", ["timm:resnet18.a1", "hf:org/x.y", "no.such.module:build", "a.b", "digits", "..:x", ".a:b"]
)
def test_other_names_are_no_modules(text):
    assert not user_code.is_userfile(text)
