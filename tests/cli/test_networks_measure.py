"""`flatlens measure` on the user's own files: numbers on stdout, and one line for every mistake."""

import json
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatlens import cli
from flatlens.estimate import Report

NET = """
import torch
from torch import nn
from types import SimpleNamespace

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return self.fc(x) + torch.randn(len(x), 3)

class Paired(nn.Linear):
    def forward(self, x):
        return super().forward(x), x

def paired():
    return Paired(4, 3)

def coupled():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))

def conv():
    return nn.Conv1d(4, 3, 1)

def chatty():
    print("building")
    return build()

x = torch.linspace(-1, 1, 80).reshape(20, 4).sin()
y = torch.arange(20) % 3
def samples(): return x, y
def held_out(): return x[:5] + 0.1, y[:5]
def both(): return SimpleNamespace(x=x, y=y, test_x=x[:5] + 0.1, test_y=y[:5])
def nan(): return x.clone().fill_(float("nan")), y
def from_one(): return x, y + 1
def empty(): return x[:0], y[:0]
def sequences(): return x[:, :, None].expand(-1, -1, 7), y

def half(outputs, targets):
    return 0.5 * (outputs - nn.functional.one_hot(targets, 3)).square().sum(1)
def weighted(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, torch.ones(3), reduction="none")
def factory(smoothing=0.1):
    return nn.CrossEntropyLoss(label_smoothing=smoothing)
def total(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")
Smooth = type("Smooth", (nn.CrossEntropyLoss,), {"__module__": __name__})
number = 3
"""


TOKENS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
    def forward(self, x):
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))

def build():
    torch.manual_seed(0)
    return Net()

def samples():
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A folder with net.py in it, and the command's usual options."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return ["--data", "net.py:samples", "--loss", "cross_entropy"]


def measured(capsys, *arguments: str) -> dict[str, float]:
    """The network's numbers by name."""
    assert cli.run(["measure", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["estimates"]
    return {row["measure"]: row["value"] for row in rows if row["layer"] == ""}


def test_the_screen_says_what_survives(net, capsys):
    assert cli.run(["measure", "net.py:build", *net]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("mls", "relative_flatness", "exact", "rescaling", "20 samples"):
        assert word in out
    assert len(out.splitlines()) < 80
    assert max(map(len, out.splitlines())) <= 100


def test_json_agrees_with_the_library(net, capsys):
    import flatlens as fl
    from flatlens import user_code

    names = measured(capsys, "net.py:build", *net, "--measures", "mls,nmls", "--measures", "local_volume(top_k=2)")
    assert list(names) == ["mls", "nmls", "local_volume(top_k=2)"]
    model, data = user_code.load("net.py:build", "MODEL")(), user_code.load("net.py:samples", "--data")()
    report = fl.measure(fl.Lens(fl.Problem(model, "cross_entropy", data)), ["mls"])
    assert names["mls"] == report["mls"].value


def test_json_has_no_error_for_a_bound_and_the_answer_first(net, capsys):
    assert cli.run(["measure", "net.py:build", *net, "--measures", "mls,sharpness", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    errors = {row["measure"]: (row["kind"], row["stderr"]) for row in found["estimates"] if not row["layer"]}
    assert errors == {"mls": ("exact", 0), "sharpness": ("lower bound", None)}
    assert list(found)[2] == "answer"
    assert found["answer"][0].startswith("mls is ")


def test_held_out_data_adds_the_gap(net, capsys):
    with_test = measured(capsys, "net.py:build", *net, "--test", "net.py:held_out")
    both = measured(capsys, "net.py:build", "--data", "net.py:both", "--loss", "cross_entropy")
    assert with_test["generalisation_gap"] == both["generalisation_gap"]
    assert with_test["test_loss"] == pytest.approx(with_test["loss"] + with_test["generalisation_gap"])


def test_heads_of_attention_have_rows_where_they_are_asked_for(net, capsys):
    Path("tokens.py").write_text(TOKENS)
    asked = ("tokens.py:build", "--data", "tokens.py:samples", "--loss", "cross_entropy", "--measures", "kappa_trace")
    found = []
    for more in ((), ("--attention-heads",)):
        assert cli.run(["measure", *asked, *more, "--page", "heads.html", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["estimates"]
        found.append({row["layer"]: row["value"] for row in rows if row["measure"] == "kappa_trace"})
    plain, more = found
    assert {name: more[name] for name in plain} == plain
    kinds = [f"{kind}{head}" for kind in ("query", "key", "value") for head in ("", "/0", "/1")]
    parts = [*(f"mix.in_proj_weight/{kind}" for kind in kinds), *(f"mix.out_proj.weight/output/{n}" for n in (0, 1))]
    assert more.keys() - plain.keys() == set(parts)
    assert "mix.in_proj_weight/query/1" in Path("heads.html").read_text()


def test_a_loss_of_ones_own(net, capsys):
    mine = measured(capsys, "net.py:build", "--data", "net.py:samples", "--loss", "net.py:half", "--dtype", "float64")
    named = measured(
        capsys, "net.py:build", "--data", "net.py:samples", "--loss", "half_squared_error", "--dtype", "float64"
    )
    for name in ("loss", "hessian_trace", "mls"):
        assert mine[name] == pytest.approx(named[name], rel=1e-10)
    assert measured(capsys, "net.py:build", "--data", "net.py:samples", "--loss", "net.py:Smooth", "--measures", "loss")
    made = measured(
        capsys, "net.py:build", "--data", "net.py:samples", "--loss", "net.py:factory", "--measures", "loss"
    )
    assert made["loss"] > 0


def test_save_keeps_the_whole_report(net, capsys):
    assert cli.run(["measure", "net.py:build", *net, "--measures", "mls", "--save", "r.safetensors"]) == 0
    assert len(Report.load("r.safetensors")["mls"].samples) == 20
    assert "r.safetensors" in capsys.readouterr().err


def test_a_chatty_file_leaves_stdout_clean(net, capsys):
    assert cli.run(["measure", "net.py:chatty", *net, "--measures", "mls", "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "building" in err


def test_parameters_by_name(net, capsys):
    everything = measured(capsys, "net.py:build", *net, "--measures", "ggn_trace")
    one = measured(capsys, "net.py:build", *net, "--measures", "ggn_trace", "--parameters", "2.weight, 2.bias")
    assert 0 < one["ggn_trace"] < everything["ggn_trace"]


def test_batches_are_normalised_as_in_training(net, capsys, refused):
    import flatlens as fl
    from flatlens import user_code

    with Path("net.py").open("a") as file:
        file.write(
            "def normed(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))\n"
        )
    torch.manual_seed(0)
    save_file(user_code.load("net.py:normed", "MODEL")().state_dict(), "w.safetensors")
    command = ["net.py:normed", *net, "--weights", "w.safetensors", "--measures", "ggn_trace,hessian_trace(exact=True)"]
    found = measured(capsys, *command, "--batchnorm", "train", "--ghost-batch", "10")
    assert found["ggn_trace"] is None  # of single samples
    model, data = user_code.load("net.py:normed", "MODEL")(), user_code.load("net.py:samples", "--data")()
    model.load_state_dict(load_file("w.safetensors"))
    problem = fl.Problem(model, "cross_entropy", data, batchnorm="train", ghost_batch=10)
    name = "hessian_trace(exact=True)"
    assert found[name] == fl.measure(fl.Lens(problem), name)[name].value
    assert found[name] != measured(capsys, *command)[name]
    assert "--ghost-batch None: expected the number of samples" in refused("measure", *command, "--batchnorm", "train")
    assert "with --batchnorm train only" in refused("measure", *command, "--ghost-batch", "5")


def test_searches_start_from_those_of_the_measurement_before(net, capsys, refused):
    command = ["measure", "net.py:build", *net, "--measures", "sharpness(rtol=1e-6)", "--json", "--after", "pairs"]
    products = []
    for _ in range(2):
        assert cli.run(command) == 0
        products.append(json.loads(capsys.readouterr().out)["estimates"][0]["products"])
    assert products[1] < products[0]
    Path("pairs").write_text("mls")
    assert "--after pairs: not a saved warm start" in refused(*command)


def test_weights_change_the_numbers(net, capsys, refused):
    state = {
        "0.weight": torch.ones(8, 4),
        "0.bias": torch.ones(8),
        "2.weight": torch.ones(3, 8),
        "2.bias": torch.ones(3),
    }
    save_file({f"net.{name}": tensor for name, tensor in state.items()}, "w.safetensors")
    line = refused("measure", "net.py:build", *net, "--weights", "w.safetensors")
    assert "--prefix net." in line
    before = measured(capsys, "net.py:build", *net, "--measures", "mls")
    after = measured(
        capsys, "net.py:build", *net, "--measures", "mls", "--weights", "w.safetensors", "--prefix", "net."
    )
    assert after["mls"] != before["mls"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net.py:build", "--data", "net.py:nan"], ["--data", "NaN"]),
        (["net.py:build", "--data", "net.py:from_one"], ["label 3", "out of range"]),
        (["net.py:build", "--data", "net.py:empty"], ["empty"]),
        (["net.py:build", "--loss", "net.py:total"], ["it is their sum"]),
        (["net.py:build", "--loss", "net.py:number"], ["--loss", "function"]),
        (["net.py:build", "--loss", "net.py:weighted"], ["float64 outputs", ".to(outputs.dtype)", "CrossEntropyLoss"]),
        (["net.py:build", "--loss", "cross_entropie"], ["cross_entropy"]),
        (["net.py:paired"], ["tuple of 2 parts", "a module of your own around the network"]),
        (["nan.safetensors"], ["MODEL", "a file of weights goes to --weights"]),
        (["net.py:coupled"], ["MODEL", "--batchnorm train with --ghost-batch k measures"]),
        (["net.py:Noisy"], ["MODEL", "same batch twice", "eval mode"]),
        (["net.py:conv", "--data", "net.py:sequences"], ["--data", "one row per token"]),
        (["net.py:build", "--measures", "relative_flatnes"], ["did you mean relative_flatness"]),
        (["net.py:build", "--measures", "local_volume(top_l=3)"], ["top_l", "top_k"]),
        (["net.py:build", "--measures", "mls("], ["mls("]),
        (["net.py:build", "--memory", "lots"], ["--memory", "1GiB"]),
        (["net.py:build", "--parameters", "0.wieght"], ["0.weight"]),
        (["net.py:build", "--weights", "w.pkl"], ["w.pkl", "safetensors"]),
        (["net.py:build", "--weights", "nan.safetensors"], ["NaN", "0.weight"]),
        (["net.py:build", "--weights", "none.pt"], ["no file"]),
        (["net.py:biuld"], ["did you mean build"]),
        (["empty"], ["no network of a study"]),
        (["study"], ["whole study", "networks/abc"]),
        (["hub"], ["hf:hub"]),
    ],
)
def test_bad_input_is_one_line_and_2(net, refused, arguments, words):
    Path("w.pkl").write_bytes(pickle.dumps({"0.weight": torch.ones(2)}))
    state = {"0.weight": torch.full((8, 4), torch.nan), "0.bias": torch.ones(8), "2.weight": torch.ones(3, 8)}
    save_file(state | {"2.bias": torch.ones(3)}, "nan.safetensors")
    for folder in ("empty", "study/networks/abc", "hub"):
        Path(folder).mkdir(parents=True)
    for config in ("study/networks/abc/config.json", "hub/config.json"):
        Path(config).write_text("{}")
    options = dict(zip(net[::2], net[1::2], strict=True)) | dict(zip(arguments[1::2], arguments[2::2], strict=True))
    line = refused("measure", arguments[0], *[word for pair in options.items() for word in pair])
    assert all(word in line for word in words), line


def test_the_network_of_a_study_has_its_own_data_and_loss(tmp_path, capsys):
    from flatlens.data import digits
    from flatlens.experiments.settings import Study

    settings = Study.digits("smoke").networks()[0]
    folder = tmp_path / "networks" / settings.key
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings.as_json()))
    network = settings.model.build()
    save_file(network.state_dict(), folder / "weights.safetensors")
    found = measured(capsys, str(folder), "--measures", "loss", "--measures", "test_accuracy")
    split = digits(train=settings.data.train, seed=settings.data.seed)
    with torch.no_grad():
        outputs, test_outputs = network(split.x), network(split.test_x)
    targets = torch.nn.functional.one_hot(split.y, 10)
    assert found["loss"] == pytest.approx(float(0.5 * (outputs - targets).square().sum(1).mean()), rel=1e-5)
    assert found["test_accuracy"] == pytest.approx(float((test_outputs.argmax(1) == split.test_y).double().mean()))


def test_the_network_of_a_study_whose_weights_have_a_flipped_bit_is_refused(tmp_path, refused):
    from flatlens.experiments.settings import Study
    from flatlens.files import write_checksums

    settings = Study.digits("smoke").networks()[0]
    (tmp_path / "config.json").write_text(json.dumps(settings.as_json()))
    save_file(settings.model.build().state_dict(), tmp_path / "weights.safetensors")
    write_checksums(tmp_path)
    content = bytearray((tmp_path / "weights.safetensors").read_bytes())
    content[-100] ^= 4
    (tmp_path / "weights.safetensors").write_bytes(content)
    line = refused("measure", str(tmp_path))
    assert (
        f"{tmp_path} is damaged (weights.safetensors has changed since it was written (its checksum differs)): remove "
        f"it" in line
    )


def test_a_held_out_folder_has_the_labels_of_the_data(net, capsys):
    from PIL import Image

    for at, name in enumerate(("one/cat/0", "one/dog/0", "two/dog/0", "two/dog/1")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (60 * at, 0, 0)).save(f"{name}.png")
    Path("flat.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
        "    nn.init.zeros_(net[1].weight), net[1].bias.data.copy_(net[1].bias.new_tensor([0.0, 9.0]))\n"
        "    return net\n"
    )
    options = ["--data", "one", "--test", "two", "--loss", "cross_entropy", "--measures", "test_accuracy"]
    assert measured(capsys, "flat.py:build", *options)["test_accuracy"] == 1


def test_a_page_and_chosen_layers(net, capsys, refused):
    assert cli.run(["measure", "net.py:build", *net, "--measures", "mls", "--page", "page.html", "--layers", "2"]) == 0
    out, err = capsys.readouterr()
    assert "page written: page.html" in err
    assert "Layers with '2'" in out
    assert 'data-search="0"' in Path("page.html").read_text()
    assert "--layers: unknown layer '7'" in refused(
        "measure", "net.py:build", *net, "--measures", "mls", "--layers", "7"
    )
    assert "--page none/page.html" in refused("measure", "net.py:build", *net, "--page", "none/page.html")


def test_no_file_but_a_page_or_a_saved_result_is_replaced(net, capsys, refused):
    Path("w.safetensors").write_bytes(b"weights")
    Path("notes.html").write_text("mine")
    command = ["measure", "net.py:build", *net, "--measures", "mls"]
    assert "is not a saved result" in refused(*command, "--save", "w.safetensors")
    assert "--save r.json: the format is safetensors: choose a name" in refused(*command, "--save", "r.json")
    assert "is not a flatlens page" in refused(*command, "--page", "notes.html")
    assert "ends in .html" in refused(*command, "--page", "net.py")
    assert Path("w.safetensors").read_bytes() == b"weights"
    for _ in range(2):
        assert cli.run([*command, "--save", "r.safetensors", "--page", "page.html"]) == 0


def test_samples_that_a_loader_gives_otherwise_are_noted_once_and_in_the_head(net, capsys):
    with Path("net.py").open("a") as file:
        file.write(
            "from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler\n"
            "drawn = WeightedRandomSampler([1.0] + [0.0] * 19, 12)\n"
            "def loader(): return DataLoader(TensorDataset(*samples()), batch_size=4, sampler=drawn)\n"
            "def drops(): return DataLoader(TensorDataset(*samples()), batch_size=8, drop_last=True)\n"
        )
    for name, told in {"loader": "11 of the 12 samples are repeated", "drops": "4 of the 20 samples are"}.items():
        for command in (["measure", "net.py:build"], ["compare", "net.py:build", "net.py:build"]):
            assert cli.run([*command, "--data", f"net.py:{name}", *net[2:], "--measures", "mls"]) == 0
            out, err = capsys.readouterr()
            assert err.count(told) == 1
            assert f"data: net.py:{name}; {told}" in " ".join(out.split())


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("option", "file", "writer", "status"),
    [("--save", "x.safetensors", "flatlens.result", 2), ("--page", "x.html", "flatlens.report.page", 0)],
)
def test_a_disk_that_fills_during_the_work_takes_no_numbers(
    net, option, file, writer, status, as_json, monkeypatch, capsys
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module(writer), "write_whole", full)
    flags = ["--json"] * as_json
    assert cli.run(["measure", "net.py:build", *net, "--measures", "mls", *flags]) == 0
    alone = capsys.readouterr().out
    assert cli.run(["measure", "net.py:build", *net, "--measures", "mls", option, file, *flags]) == status
    out, err = capsys.readouterr()
    assert out.split("seconds")[0] == alone.split("seconds")[0]
    (line,) = err.splitlines()
    assert option in line
    assert "No space left on device" in line


@pytest.mark.parametrize("option", ["--save", "--page"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(net, option, monkeypatch, refused):
    def full(*_, **__):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Path, "touch", full)
    name = "x.safetensors" if option == "--save" else "x.html"
    told = refused("measure", "net.py:build", *net, "--measures", "mls", option, name)
    assert told.startswith(f"flatlens: {option} {name}: cannot be written there")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_on_a_terminal(tmp_path, width):
    """A real terminal: every value of the JSON output is on the screen, with its exponent."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    import fcntl
    import struct

    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))\n"
        "    net.requires_grad_(False)[0].weight.mul_(1e9)\n"
        "    return net.requires_grad_()\n"
        "def samples():\n"
        "    return torch.linspace(-1, 1, 36).sin().reshape(9, 4), torch.arange(9) % 3\n"
    )
    command = [sys.executable, "-m", "flatlens", "measure", "net.py:build", "--data", "net.py:samples", "--loss"]
    command += ["cross_entropy"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    shown = subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, cwd=tmp_path, env=environment)
    os.close(terminal)
    text = b""
    while part := read_or_nothing(master):
        text += part
    assert shown.wait(timeout=120) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.decode()).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text.decode()
    told = subprocess.run([*command, "--json"], capture_output=True, cwd=tmp_path, env=environment, check=True)
    rows = [row for row in json.loads(told.stdout)["estimates"] if not row["layer"] and row["value"] is not None]
    main = [row for row in rows if "." not in row["measure"]]
    assert any("e+" in f"{row['value']:.4g}" for row in main)
    for row in main:
        assert f"{row['value']:.4g}" in " ".join(lines).split(), row["measure"]


def read_or_nothing(master):
    try:
        return os.read(master, 2**16)
    except OSError:  # Linux's end of a pseudo-terminal
        return b""
