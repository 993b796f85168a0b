"""Weights in the wild, on real files: every wrapper that fits is taken off, nothing is ever unpickled."""

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from flatlens.errors import BadWeights
from flatlens.models.weights import load_weights


def net(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def tied() -> nn.ModuleDict:
    net = nn.ModuleDict({name: nn.Linear(3, 5, bias=False) for name in ("embed", "out")})
    net.out.weight = net.embed.weight
    return net


class Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def assert_loaded(model: nn.Module, source: nn.Module) -> None:
    for (name, a), b in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


STATES = {
    "bare": lambda s: s,
    "DataParallel": lambda s: prefixed(s, "module."),
    "compiled": lambda s: prefixed(s, "_orig_mod."),
    "compiled inside DataParallel": lambda s: prefixed(s, "module._orig_mod."),
    "compiled in the middle": lambda s: {n.replace(".", "._orig_mod.", 1): t for n, t in s.items()},
    "nested": lambda s: {"state_dict": s, "epoch": 3},
    "nested twice": lambda s: {"model": {"state_dict": prefixed(s, "module.")}, "epoch": torch.tensor(3)},
    "training script": lambda s: {"model_state_dict": s, "optimizer_state_dict": {"state": {}, "param_groups": []}},
    "Lightning": lambda s: {"state_dict": prefixed(s, "model."), "pytorch-lightning_version": "2.5", "epoch": 1},
    "without counters": lambda s: {n: t for n, t in s.items() if not n.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("wrap", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin"])
def test_wrappers_come_off(tmp_path, wrap, suffix):
    torch.save(wrap(net(1).state_dict()), tmp_path / f"w{suffix}")
    model = net(0)
    assert load_weights(model, tmp_path / f"w{suffix}") == []
    assert_loaded(model, net(1))


def test_the_old_format_of_torch_save(tmp_path):
    torch.save(net(1).state_dict(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    model = net(0)
    load_weights(model, tmp_path / "w.pth")
    assert_loaded(model, net(1))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])  # the name does not decide what it is
def test_safetensors(tmp_path, name):
    save_file(prefixed(net(1).state_dict(), "module."), tmp_path / name)
    model = net(0)
    load_weights(model, tmp_path / name)
    assert_loaded(model, net(1))


@pytest.mark.parametrize("given", ["folder", "index"])
def test_sharded_safetensors(tmp_path, given):
    state = net(1).state_dict()
    places = {}
    for number, names in enumerate((list(state)[:3], list(state)[3:])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({n: state[n] for n in names}, tmp_path / file)
        places |= dict.fromkeys(names, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model = net(0)
    load_weights(model, tmp_path if given == "folder" else index)
    assert_loaded(model, net(1))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadWeights, match=r"model-00002-of-00002\.safetensors"):
        load_weights(net(0), tmp_path)


def test_an_index_must_not_lead_out_of_its_folder(tmp_path):
    (tmp_path / "inner").mkdir()
    save_file(net(1).state_dict(), tmp_path / "w.safetensors")
    index = tmp_path / "inner" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(net().state_dict(), "../w.safetensors")}))
    with pytest.raises(BadWeights, match="not in its own folder"):
        load_weights(net(0), index)


def test_tied_tensors_are_needed_once(tmp_path):
    source, model = tied(), tied()
    save_model(source, str(tmp_path / "w.safetensors"))  # drops one of the two names
    load_weights(model, tmp_path / "w.safetensors")
    assert torch.equal(model.out.weight, source.embed.weight)


def test_a_network_that_ties_what_the_file_does_not(tmp_path):
    torch.save({"embed.weight": torch.zeros(5, 3), "out.weight": torch.ones(5, 3)}, tmp_path / "w.pt")
    with pytest.raises(BadWeights, match="uses one tensor for both"):
        load_weights(tied(), tmp_path / "w.pt")


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ["w.pkl", "w.safetensors"])
def test_a_pickle_never_runs(tmp_path, protocol, name):
    mark = tmp_path / "it ran"
    (tmp_path / name).write_bytes(pickle.dumps({"0.weight": Payload(mark)}, protocol=protocol))
    with pytest.raises(BadWeights) as caught:
        load_weights(net(), tmp_path / name)
    assert not mark.exists()
    assert "\n" not in str(caught.value)
    assert "safetensors" in str(caught.value)


def test_objects_beside_the_weights_are_refused_by_name(tmp_path):
    mark = tmp_path / "it ran"
    torch.save({"state_dict": net().state_dict(), "extra": Payload(mark)}, tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=r"pickled code or objects .*safetensors"):
        load_weights(net(), tmp_path / "w.pt")
    assert not mark.exists()
    torch.save(net(), tmp_path / "whole.pt")
    with pytest.raises(BadWeights, match=r"Sequential"):
        load_weights(net(), tmp_path / "whole.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive(tmp_path):
    torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)).save(str(tmp_path / "w.pt"))
    with pytest.raises(BadWeights, match="TorchScript"):
        load_weights(net(), tmp_path / "w.pt")


def test_an_archive_of_torch_export_is_not_called_damaged(tmp_path):
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.ones(2, 3),)), tmp_path / "w.pt2")
    with pytest.raises(BadWeights, match=r"an archive of another kind, such as torch.export's"):
        load_weights(net(), tmp_path / "w.pt2")


DAMAGES = [
    "empty.pt",
    "empty.safetensors",
    "cut.pt",
    "cut.safetensors",
    "cut_header.safetensors",
    "text.pt",
    "text.safetensors",
    "lfs.safetensors",
    "noise.pt",
    "zip.pt",
    "index.safetensors.index.json",
]


def damaged(folder: Path) -> dict[str, bytes]:
    torch.save(net().state_dict(), folder / "good.pt")
    save_file(net().state_dict(), folder / "good.safetensors")
    good, safe = (folder / "good.pt").read_bytes(), (folder / "good.safetensors").read_bytes()
    return {
        "empty.pt": b"",
        "empty.safetensors": b"",
        "cut.pt": good[: len(good) // 2],
        "cut.safetensors": safe[: len(safe) - 7],
        "cut_header.safetensors": safe[:20],
        "text.pt": b"hello, world\n",
        "text.safetensors": b"hello, world\n",
        "lfs.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "noise.pt": bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)),
        "zip.pt": b"PK\x03\x04" + b"junk" * 20,
        "index.safetensors.index.json": b"[1, 2",
    }


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(damaged(tmp_path)[name])
    before = net()
    with pytest.raises(BadWeights) as caught:
        load_weights(before, tmp_path / name)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert len(message) < 300
    assert_loaded(before, net())


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ([1, 2], "a list"),
        ({}, "empty dictionary"),
        ({"epoch": 3, "lr": 0.1}, "epoch, lr"),
    ],
)
def test_a_file_without_tensors(tmp_path, payload, words):
    torch.save(payload, tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=words):
        load_weights(net(), tmp_path / "w.pt")


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(BadWeights, match="no file"):
        load_weights(net(), tmp_path / "absent.pt")
    with pytest.raises(BadWeights, match=r"model\.safetensors"):
        load_weights(net(), tmp_path)


def test_a_mismatch_lists_five_and_proposes_the_prefix(tmp_path):
    torch.save(prefixed(net(1).state_dict(), "encoder.net."), tmp_path / "w.pt")
    model = net(0)
    with pytest.raises(BadWeights) as caught:
        load_weights(model, tmp_path / "w.pt")
    message = str(caught.value)
    assert "--prefix encoder.net." in message
    assert "8 in all" in message  # parameters and statistics; the counter is not needed
    assert message.count("encoder.net.") == 5 + 2  # five names, then the proposal
    assert_loaded(model, net(0))
    assert load_weights(model, tmp_path / "w.pt", prefix="encoder.net.") == []
    assert_loaded(model, net(1))


def test_a_network_that_wraps_what_was_saved(tmp_path):
    torch.save(net(1).state_dict(), tmp_path / "w.pt")
    with pytest.raises(BadWeights, match="only the network's part 'backbone'"):
        load_weights(nn.ModuleDict({"backbone": net()}), tmp_path / "w.pt")


def test_names_that_nothing_mends(tmp_path):
    torch.save({"a.weight": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=r"the network needs 0\.bias, .*the file has a\.weight, which"):
        load_weights(net(), tmp_path / "w.pt")


def test_a_shape_mismatch_says_which(tmp_path):
    state = net().state_dict()
    state["3.weight"] = torch.zeros(7, 4)
    torch.save(state, tmp_path / "w.pt")
    model = net(0)
    with pytest.raises(BadWeights, match=r"3\.weight is \(7, 4\) in the file, \(2, 4\) in the network"):
        load_weights(model, tmp_path / "w.pt")
    assert_loaded(model, net(0))  # all or nothing


def test_what_is_left_out_or_rounded_is_said(tmp_path):
    state = {n: t.double() if t.is_floating_point() else t for n, t in net(1).state_dict().items()}
    torch.save({"state_dict": prefixed(state, "model.") | {"criterion.weight": torch.ones(2)}}, tmp_path / "w.ckpt")
    model = net(0)
    remarks = load_weights(model, tmp_path / "w.ckpt")
    assert_loaded(model, net(1))
    assert len(remarks) == 2
    assert "criterion.weight" in remarks[0]
    assert "float64 in the file, float32 in the network" in remarks[1]


def test_nan_weights_load(tmp_path):
    """Problem refuses them, naming the parameter; the loader has no opinion."""
    state = net(1).state_dict()
    state["0.weight"] = torch.full((4, 3), float("nan"))
    torch.save(state, tmp_path / "w.pt")
    model = net(0)
    load_weights(model, tmp_path / "w.pt")
    assert model[0].weight.isnan().all()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    torch.save(net().state_dict(), tmp_path / "w.pt")
    (tmp_path / "w.pt").chmod(0)
    with pytest.raises(OSError, match="Permission"):
        load_weights(net(), tmp_path / "w.pt")


@pytest.mark.parametrize("prefix", ["ema", "ema."])
def test_one_of_several_networks_in_a_file_is_chosen_by_its_key(tmp_path, prefix):
    optimiser = {"state": {0: {"momentum": torch.ones(3)}}, "param_groups": []}
    torch.save({"net": net(1).state_dict(), "ema": net(2).state_dict(), "optimizer": optimiser}, tmp_path / "w.pt")
    model = net(0)
    (told,) = load_weights(model, tmp_path / "w.pt")
    assert "from 'net' of the file, which also holds ema:" in told
    assert_loaded(model, net(1))
    (told,) = load_weights(model, tmp_path / "w.pt", prefix=prefix)
    assert "from 'ema' of the file, which also holds net:" in told
    assert_loaded(model, net(2))


@pytest.mark.parametrize("prefix", ["ema", "ema.", "ema.module", "ema.module."])
@pytest.mark.parametrize("wrap", [lambda s: {"module": s, "updates": 3}, lambda s: prefixed(s, "module.")])
def test_averaged_weights_one_level_deeper_are_told_and_chosen(tmp_path, wrap, prefix):
    torch.save({"model": net(1).state_dict(), "ema": wrap(net(2).state_dict())}, tmp_path / "w.pt")
    model = net(0)
    (told,) = load_weights(model, tmp_path / "w.pt")
    assert "from 'model' of the file, which also holds ema:" in told
    assert_loaded(model, net(1))
    load_weights(model, tmp_path / "w.pt", prefix=prefix)
    assert_loaded(model, net(2))


@pytest.mark.parametrize("prefix", ["average", "average.", "average.module."])
def test_a_wrapper_comes_off_below_a_prefix_too(tmp_path, prefix):
    states = {**prefixed(net(1).state_dict(), "model."), **prefixed(net(2).state_dict(), "average.module.")}
    torch.save({"state_dict": states}, tmp_path / "w.ckpt")
    load_weights(model := net(0), tmp_path / "w.ckpt", prefix=prefix)
    assert_loaded(model, net(2))


def test_several_networks_with_no_usual_key_are_refused_until_one_is_chosen(tmp_path):
    torch.save({"student": net(1).state_dict(), "teacher": net(2).state_dict()}, tmp_path / "w.pt")
    model = net(0)
    with pytest.raises(
        BadWeights, match=r"several networks \(student, teacher\): choose one, such as --prefix student"
    ):
        load_weights(model, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt", prefix="teacher")
    assert_loaded(model, net(2))


@pytest.mark.parametrize(
    ("beside", "key", "inside", "prefix"),
    [
        ({"weights": torch.ones(3)}, "model_dict", "", "model_dict"),
        ({"loss": torch.ones(3)}, "state", "", "state"),
        ({"loss": torch.ones(3)}, "state", "module.", "state"),
        ({"loss": torch.ones(3)}, "state", "m.", "state.m."),
        ({"weights": {"of_classes": torch.ones(3)}}, "my_model", "", "my_model"),
    ],
)
def test_the_state_dict_that_fits_is_offered(tmp_path, beside, key, inside, prefix):
    torch.save({**beside, key: prefixed(net(1).state_dict(), inside)}, tmp_path / "w.pt")
    model = net(0)
    with pytest.raises(BadWeights, match=rf"; '{key}' in the file fits: give --prefix {re.escape(prefix)}$"):
        load_weights(model, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt", prefix=prefix)
    assert_loaded(model, net(1))


def test_a_prefix_that_no_name_has_is_named(tmp_path):
    torch.save(net(1).state_dict(), tmp_path / "w.pt")
    with pytest.raises(BadWeights, match=r"the prefix 'foo' \(they begin with 0., 2., 3.\); without --prefix every"):
        load_weights(net(0), tmp_path / "w.pt", prefix="foo")
    torch.save(prefixed(net(1).state_dict(), "encoder."), tmp_path / "w.pt")
    load_weights(model := net(0), tmp_path / "w.pt", prefix="encoder")  # without its dot
    assert_loaded(model, net(1))
