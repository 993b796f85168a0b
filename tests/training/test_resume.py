"""A run killed anywhere and taken up again ends in the same bits as the undisturbed one."""

import copy
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from flatlens.errors import BadFolder
from flatlens.training import (
    ASAM,
    SAM,
    SGD,
    Adam,
    Augmentation,
    InputJacobian,
    Mixup,
    RelativeFlatness,
    RMSProp,
    Steps,
    Training,
    Until,
    train,
)
from flatlens.training import run as run_module


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def samples(n=22, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 4, 4, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


ALL_NOISE = {"augmentation": Augmentation(p=0.5, pad=1), "mixup": Mixup(0.5), "batch_size": 8}
SETTINGS = {
    "everything": Training(
        SGD(0.05, momentum=0.9, weight_decay=1e-3),
        schedule=Steps(at=(2,)),
        ascent=SAM(0.05),
        penalties=(InputJacobian(0.01), RelativeFlatness(0.01)),
        label_smoothing=0.1,
        max_steps=11,
        check_every=2,
        seed=4,
        **ALL_NOISE,
    ),
    "adam": Training(Adam(0.01), ascent=ASAM(0.1), max_epochs=4, check_every=3, **ALL_NOISE),
    "rmsprop": Training(
        RMSProp(0.01, momentum=0.5), batch_size=8, until=Until(loss_below=0.3, loss_over="epoch"), max_steps=40
    ),
    "ghosts": Training(
        SGD(0.1), ghost_batch=8, until=Until(loss_below=0.5, loss_window=3), max_steps=30, check_every=2
    ),
}  # fmt: skip


class Killed(Exception):
    pass


class Watcher:
    """Counts, and ends the run at a step as a kill would."""

    def __init__(self, killed_at=None):
        self.killed_at, self.seen = killed_at, []

    def step(self, step=None, *, optimiser=None):
        if step == self.killed_at:
            raise Killed
        self.seen.append(step)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def inside(path):
    outside = torch.load(path, weights_only=True)
    return torch.load(io.BytesIO(outside["state"].numpy().tobytes()), weights_only=True)


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("killed_at", [1, 2, 3, 6, 7, 10])
def test_killed_at_any_step_it_ends_in_the_same_bits(tmp_path, monkeypatch, name, killed_at):
    monkeypatch.setattr(run_module, "INTERVAL", 0.0)  # a checkpoint after every step
    how, save = SETTINGS[name], tmp_path / "run.pt"
    whole, watcher = network(), Watcher()
    undisturbed = train(whole, samples(), how, test=samples(9, 2), watch=watcher, save=tmp_path / "undisturbed.pt")
    with pytest.raises(Killed):
        train(network(), samples(), how, test=samples(9, 2), watch=Watcher(killed_at), save=save)
    again, witness = network(), Watcher()
    resumed = train(again, samples(), how, test=samples(9, 2), watch=witness, save=save)
    assert same(whole, again)
    assert witness.seen == watcher.seen
    assert equal(*(inside(tmp_path / f"{which}.pt") for which in ("run", "undisturbed")))
    assert (resumed.outcome, resumed.steps, resumed.loss) == (undisturbed.outcome, undisturbed.steps, undisturbed.loss)
    for name, curve in undisturbed.curves.items():
        assert torch.equal(resumed.curves[name], curve)


def test_checkpoints_change_no_digit_and_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "INTERVAL", 0.0)
    how = SETTINGS["everything"]
    plain, saved, again = network(), network(), network()
    train(plain, samples(), how)
    first = train(saved, samples(), how, save=tmp_path / "run.pt")
    assert same(plain, saved)
    told = []
    second = train(again, samples(), how, save=tmp_path / "run.pt", progress=lambda *what: told.append(what))
    assert told == []
    assert same(plain, again)
    assert (second.outcome, second.steps, second.loss) == (first.outcome, first.steps, first.loss)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pt"]


def test_a_short_run_writes_once_and_a_kill_in_the_middle_of_writing_loses_nothing(tmp_path, monkeypatch):
    how = SETTINGS["ghosts"]
    writes = []
    monkeypatch.setattr("flatlens.training.run.write_whole", lambda path, content: writes.append(len(content)))
    train(network(), samples(), how, save=tmp_path / "run.pt")
    assert len(writes) == 1


CODE = """
import sys, torch
sys.path.insert(0, {folder!r})
import test_resume as t
from flatlens.training import run
run.INTERVAL = 0.0
torch.set_num_threads(1)
net = t.network()
t.train(net, t.samples(), t.LONG, save=sys.argv[1])
torch.save(net.state_dict(), sys.argv[2])
"""
LONG = Training(SGD(0.05, momentum=0.9), ascent=SAM(0.05), max_steps=1500, check_every=5, **ALL_NOISE)


def test_kill_minus_nine(tmp_path):
    folder = str(Path(__file__).resolve().parent)
    code = CODE.format(folder=folder)

    def start(save, out):
        return subprocess.Popen([sys.executable, "-c", code, str(save), str(out)])

    undisturbed = start(tmp_path / "a.pt", tmp_path / "a.out")
    kills = 0
    while not (tmp_path / "b.out").exists() and kills < 3:
        process = start(tmp_path / "b.pt", tmp_path / "b.out")
        before = (tmp_path / "b.pt").stat().st_mtime_ns if (tmp_path / "b.pt").exists() else 0
        while process.poll() is None and (
            not (tmp_path / "b.pt").exists() or (tmp_path / "b.pt").stat().st_mtime_ns == before
        ):
            time.sleep(0.005)
        time.sleep(0.2 + 0.15 * kills)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert start(tmp_path / "b.pt", tmp_path / "b.out").wait() == 0
    assert undisturbed.wait() == 0
    assert kills >= 2
    a, b = (torch.load(tmp_path / f"{name}.out", weights_only=True) for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_another_runs_checkpoint_is_refused_in_a_line_and_left_alone(tmp_path):
    how, save = SETTINGS["ghosts"], tmp_path / "run.pt"
    train(network(), samples(), how, save=save)
    before = save.read_bytes()
    other = copy.deepcopy(network())
    with torch.no_grad():
        other[0].weight.add_(1.0)
    for model, data, settings in [
        (other, samples(), how),
        (network(), samples(seed=2), how),
        (network(), samples(), SETTINGS["adam"]),
    ]:
        with pytest.raises(BadFolder, match="belongs to another run") as caught:
            train(model, data, settings, save=save)
        assert "\n" not in str(caught.value)
    assert save.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04 half a file", b"hello"])
def test_a_damaged_checkpoint_is_refused_in_a_line(tmp_path, content):
    save = tmp_path / "run.pt"
    save.write_bytes(content)
    with pytest.raises(BadFolder, match=r"cannot be read.*delete it to start the run again") as caught:
        train(network(), samples(), SETTINGS["ghosts"], save=save)
    assert "\n" not in str(caught.value)


def test_a_hostile_checkpoint_is_never_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    torch.save({"format": 1, "of": "x", "model": Evil()}, tmp_path / "run.pt")
    with pytest.raises(BadFolder):
        train(network(), samples(), SETTINGS["ghosts"], save=tmp_path / "run.pt")
    assert not (tmp_path / "pwned").exists()


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(BadFolder, match="there is no folder") as caught:
        train(network(), samples(), SETTINGS["ghosts"], save=tmp_path / "nowhere" / "run.pt")
    assert "\n" not in str(caught.value)
