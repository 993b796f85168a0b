"""Checkpoints that hold odd things: one line, and the network is left as it was."""

import json

import pytest
import torch
from torch import nn

from flatlens.errors import BadWeights
from flatlens.models.checkpoints import load_weights
from flatlens.models.weightfiles import read_weights


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def refused(file) -> str:
    model = net()
    with pytest.raises(BadWeights) as caught:
        load_weights(model, file)
    for (name, now), before in zip(model.state_dict().items(), net().state_dict().values(), strict=True):
        assert torch.equal(now, before), name
    assert "\n" not in str(caught.value)
    return str(caught.value)


ODD = {
    "int8": lambda t: (t * 100).to(torch.int8),
    "bool": lambda t: t > 0,
    "int64": lambda t: t.round().to(torch.int64),
    "qint8": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "complex": lambda t: t.to(torch.complex64),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_are_no_weights_are_refused_by_name(tmp_path, kind):
    state = net().state_dict()
    state["2.weight"] = ODD[kind](state["2.weight"])  # the last one: those before it must not have been loaded
    state["0.weight"] = state["0.weight"] + 1
    torch.save(state, tmp_path / "w.pt")
    message = refused(tmp_path / "w.pt")
    assert kind in message
    assert "2.weight" in message
    assert "0.weight" not in message


def test_whole_numbers_belong_where_the_network_has_them(tmp_path):
    state = net().state_dict()
    state["1.num_batches_tracked"] = torch.tensor(7)
    torch.save(state, tmp_path / "w.pt")
    model = net()
    load_weights(model, tmp_path / "w.pt")
    assert model[1].num_batches_tracked.item() == 7


@pytest.mark.parametrize("names", [("state_dict",), ("model", "state_dict")])
def test_a_dictionary_that_holds_itself(tmp_path, names):
    inner: dict[str, object] = dict(net().state_dict())
    outer = inner
    for name in names[:-1]:
        outer = {name: outer}
    inner[names[-1]] = outer
    torch.save(outer, tmp_path / "w.pt")
    assert "contains itself" in refused(tmp_path / "w.pt")


@pytest.mark.parametrize(
    "index",
    [
        json.dumps({"weight_map": {"0.weight": 5}}),
        json.dumps({"weight_map": {"0.weight": None}}),
        json.dumps({"weight_map": {"0.weight": 5, "0.bias": "b.safetensors"}}),
        json.dumps({"weight_map": {}}),
        json.dumps({"weight_map": {"0.weight": {"weight_map": "b.safetensors"}}}),
        json.dumps({"weight_map": {"weight_map": {"0.weight": "b.safetensors"}}}),
        json.dumps({"weight_map": [["0.weight", "b.safetensors"]]}),
        json.dumps([{"weight_map": {}}]),
        "[" * 100_000,
        "",
        "\x00",
    ],
)
def test_an_index_that_is_none(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "no readable weight_map" in refused(tmp_path)


@pytest.mark.parametrize("shard", ["", ".", "..", "/", "../w.safetensors", "/etc/passwd", "a/b"])
def test_a_shard_that_is_no_file_beside_the_index(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": shard}}))
    assert "not in its own folder" in refused(tmp_path)


def test_checksums_of_an_archive_are_read(tmp_path):
    state, file = nn.Linear(600, 600).state_dict(), tmp_path / "net.pt"
    torch.save(state, file)
    whole = file.read_bytes()
    place = whole.index(state["weight"].numpy().tobytes()[:64])
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(BadWeights, match="does not have its checksum"):
        read_weights(file)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_weights(file).tensors["weight"], state["weight"])
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWeights, match="damaged or cut short"):
        read_weights(file)
    file.write_text("import torch")
    with pytest.raises(BadWeights, match="is not a weights file"):
        read_weights(file)
