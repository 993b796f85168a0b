"""Checkpoints that hold odd things: one line, and the network is left as it was."""

import json
import random

import pytest
import torch
from torch import nn

from flatlens.errors import BadWeights
from flatlens.models.weights import load_weights, read_weights


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


class Loads(nn.Module):
    """A network with a load_state_dict of its own, in one of several places; `way` says what it does."""

    def __init__(self, way, place):
        super().__init__()
        self.way = way
        part = Part(self) if place == "part" else nn.Linear(3, 2)
        self.a, self.b = part, nn.BatchNorm1d(2)
        self.place = place
        if place == "pre hook":
            self._register_load_state_dict_pre_hook(lambda state, *_: self.act(state))
        if place == "post hook":
            self.register_load_state_dict_post_hook(lambda *_: self.act({}))

    def load_state_dict(self, state, *args, **options):
        if self.place != "method":
            return super().load_state_dict(state, *args, **options)
        if self.act(state) == "skip":
            return None
        return super().load_state_dict(state, *args, **options)

    def act(self, state):
        """What its own code does to the state dict, or to the network."""
        if isinstance(self.way, BaseException):
            with torch.no_grad():
                self.a.bias.fill_(7.0)  # half done
            raise self.way
        if self.way == "renames":
            for name in list(state):
                state[f"x.{name}"] = state.pop(name)
        if self.way == "forgets":
            state.pop("a.weight", None)
        return self.way


class Part(nn.Linear):
    def __init__(self, whole):
        super().__init__(3, 2)
        self.__dict__["whole"] = whole

    def _load_from_state_dict(self, state, prefix, *args):
        self.whole.act(state)
        super()._load_from_state_dict(state, prefix, *args)


RAISED = [
    KeyError("a.weight"), ValueError("two\nlines"), IndexError(), AssertionError("no"), StopIteration(), SystemExit(3),
    RuntimeError("size mismatch"), TypeError("'NoneType'"), ZeroDivisionError("x"), AttributeError(),
]  # fmt: skip


def state_of(model):
    return {name: tensor.detach().clone() for name, tensor in nn.Module.state_dict(model).items()}


@pytest.mark.parametrize("place", ["method", "part", "pre hook", "post hook"])
@pytest.mark.parametrize("way", [*RAISED, "skip", "renames", "forgets"], ids=lambda way: str(way) or type(way).__name__)
def test_a_load_state_dict_of_the_networks_own_is_all_or_nothing(tmp_path, place, way):
    if isinstance(way, str) and (place == "post hook" or (way == "skip" and place != "method")):
        pytest.skip("nothing to change there")
    saved = {name: torch.full_like(tensor, 3) for name, tensor in state_of(Loads("", "")).items()}
    torch.save(saved, tmp_path / "w.pt")
    model = Loads(way, place)
    before = state_of(model)
    with pytest.raises(BadWeights, match=r"its own load_state_dict (raised|left weights as they were: )") as caught:
        load_weights(model, tmp_path / "w.pt")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_load_state_dict_that_converts_is_told(tmp_path, factor):
    class Converts(nn.Linear):
        def load_state_dict(self, state, *args, **options):
            return super().load_state_dict({name: tensor * factor for name, tensor in state.items()}, *args, **options)

    torch.save({"weight": torch.ones(2, 3), "bias": torch.full((2,), torch.nan)}, tmp_path / "w.pt")
    remarks = load_weights(model := Converts(3, 2), tmp_path / "w.pt")
    assert bool((model.weight == factor).all())
    assert remarks == ["the network's own load_state_dict changed weights of the file: weight"] * (factor != 1)


@pytest.mark.parametrize(
    "gives", [ValueError("two\nlines"), None, [1], {3: torch.ones(2)}, {"weight": "x"}, {"w": 1}, {}]
)
def test_a_state_dict_of_the_networks_own_is_one_line(tmp_path, gives):
    class Odd(nn.Linear):
        def state_dict(self, *args, **options):
            if isinstance(gives, Exception):
                raise gives
            return gives

    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "w.pt")
    model = Odd(3, 2)
    before = state_of(model)
    with pytest.raises(BadWeights) as caught:
        load_weights(model, tmp_path / "w.pt")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(model).items())


@pytest.mark.parametrize("seed", range(10))
def test_a_safetensors_file_with_other_bytes_is_one_line(tmp_path, seed):
    from safetensors.torch import save

    drawn, good = random.Random(seed), save({k: v.contiguous() for k, v in net().state_dict().items()})
    size = int.from_bytes(good[:8], "little")
    for _ in range(10):
        content, header = bytearray(good), json.loads(good[8 : 8 + size])
        way = drawn.choice(["cut", "length", "header", "field"])
        if way == "cut":
            content = content[: drawn.randrange(1, len(content))]
        elif way == "length":
            content[:8] = drawn.choice([0, 1, size - 1, size + 9, len(good), 2**40, 2**64 - 1]).to_bytes(8, "little")
        else:
            name, odd = drawn.choice(list(header)), [None, [], {}, "x", -1, 2**70, [2, -3], ["a"], [0, 10**12]]
            if way == "header":
                header[name] = drawn.choice(odd)
            else:
                header[name][drawn.choice(["dtype", "shape", "data_offsets"])] = drawn.choice(odd)
            text = json.dumps(header).encode()
            content = len(text).to_bytes(8, "little") + text + good[8 + size :]
        (tmp_path / "w.safetensors").write_bytes(bytes(content))
        refused(tmp_path / "w.safetensors")
