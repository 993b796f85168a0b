"""hf: networks from folders that the real transformers wrote, with their image processors and tokenizers."""

import io
import itertools
import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from flatlens.data.sources import load_data
from flatlens.errors import BadData, BadInput, BadModel
from flatlens.models.external import ImagePreparation, TextPreparation, load_model

transformers_folders = pytest.importorskip("transformers_folders", reason="transformers is not installed")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("flatlens.models.external.reachable", lambda: False)


def write_images(folder: Path) -> np.ndarray:
    """Four images in folders named by their labels, one of another size; the first one's pixels come back."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for label, rows in (("0", 16), ("3", 24)):
        (folder / label).mkdir(parents=True)
        for number in range(2):
            pixels = drawn.integers(0, 256, (rows, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return np.array(Image.open(folder / "0" / "0.png"))


def test_a_vit_sees_images_as_its_processor_makes_them(tmp_path):
    made = transformers_folders.vision(tmp_path / "vit")
    named = load_model(f"hf:{tmp_path / 'vit'}")
    assert all(torch.equal(a, b) for a, b in zip(named.network.parameters(), made.parameters(), strict=True))
    assert isinstance(named.preparation, ImagePreparation)
    first = write_images(tmp_path / "images")
    source = load_data(str(tmp_path / "images"), preparation=named.preparation)
    x, y = source.data
    assert x.shape == (4, 3, 16, 16)
    assert y.tolist() == [0, 0, 3, 3]
    by_hand = (torch.from_numpy(first).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(x[0], by_hand.to(torch.float32), rtol=0, atol=1e-5)
    assert "16 x 16" in source.preparation
    assert "deviation 0.25" in source.preparation


def test_a_network_without_a_processor_takes_images_of_one_size_only(tmp_path):
    transformers_folders.vision(tmp_path / "vit", processor=False)
    named = load_model(f"hf:{tmp_path / 'vit'}")
    assert named.preparation is None
    write_images(tmp_path / "images")
    with pytest.raises(BadData, match="16 x 16 and 24 x 16"):
        load_data(str(tmp_path / "images"), preparation=named.preparation)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_texts_are_tokenised_padded_and_cut(tmp_path, kind):
    transformers_folders.language(tmp_path / kind, kind)
    transformers_folders.write_texts(tmp_path / "texts")
    named = load_model(f"hf:{tmp_path / kind}")
    assert isinstance(named.preparation, TextPreparation)
    source = load_data(str(tmp_path / "texts"), preparation=named.preparation)
    x, y = source.data
    assert y.tolist() == [1, 1, 0, 0]  # the network's own numbers of the classes
    assert x["input_ids"].shape == (4, 6)  # the second text has nine tokens
    assert x["attention_mask"].sum(1).tolist() == [3, 6, 3, 2]
    together = named.network(**x).logits
    alone = named.network(**{name: part[2:3, :3] for name, part in x.items()}).logits
    torch.testing.assert_close(together[2:3], alone, rtol=1e-4, atol=1e-5)  # padding changes nothing
    assert ("no padding token" in source.preparation) == (kind == "gpt2")


def test_no_weights_in_the_folder_are_said(tmp_path):
    transformers_folders.language(tmp_path / "bert", "bert", weights=False)
    first, second = (load_model(f"hf:{tmp_path / 'bert'}") for _ in range(2))
    assert "random" in first.weights
    assert "holds no weights" in first.remark
    assert all(torch.equal(a, b) for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True))


def test_weights_for_a_part_alone_are_said(tmp_path):
    from safetensors.torch import load_file, save_file

    transformers_folders.language(tmp_path / "bert", "bert")
    file = tmp_path / "bert" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "classifier" not in k}, file, metadata={"format": "pt"})
    named = load_model(f"hf:{tmp_path / 'bert'}")
    assert "no weights for classifier.bias, classifier.weight" in named.remark


def test_a_kind_of_network_is_enough_where_weights_are_to_be_random(offline):
    small = "num_hidden_layers=1,hidden_size=12,num_attention_heads=2,intermediate_size=16"
    named = load_model(f"hf:vit({small})", "random")
    assert type(named.network).__name__ == "ViTForImageClassification"
    assert "default configuration" in named.remark
    with pytest.raises(BadModel, match="hub cannot be reached"):
        load_model("hf:vit")
    with pytest.raises(BadModel, match="hub cannot be reached"):
        load_model("hf:some/net", "random")
    with pytest.raises(BadModel, match="there is no folder /some/net"):
        load_model("hf:/some/net")


def test_a_pickle_is_never_loaded(tmp_path):
    network = transformers_folders.vision(tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "vit" / "pytorch_model.bin")
    with pytest.raises(BadInput, match="safetensors") as caught:
        load_model(f"hf:{tmp_path / 'vit'}")
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_and_an_unknown_architecture_are_one_line(tmp_path):
    folder = tmp_path / "bert"
    transformers_folders.language(folder, "bert")
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadInput, match="bert") as caught:
        load_model(f"hf:{folder}")
    assert "\n" not in str(caught.value)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("BertForSequenceClassification", "Nothing"))
    with pytest.raises(BadModel, match="no architecture 'Nothing'"):
        load_model(f"hf:{folder}")


REFERENCES = {
    "config.json": {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoModelForSequenceClassification": "own.Own"},
    "tokenizer_config.json": {"AutoTokenizer": ["own.Own", "own.Own"]},
    "preprocessor_config.json": {"AutoImageProcessor": "own.Own"},
}
"""The files by which a folder names its own Python code, and the form in which each does."""


def refusal(folder: Path) -> str:
    """The line with which a folder is refused; empty if it is not."""
    try:
        load_model(f"hf:{folder}")
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("answer", ["", "y\n", "yes\n", "1\n"])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_code_of_a_folder_never_runs(tmp_path, kind, answer, monkeypatch):
    (transformers_folders.vision if kind == "vit" else partial(transformers_folders.language, kind=kind))(
        tmp_path / kind
    )
    marker = tmp_path / "marker"
    changes = {
        "model_type": "own",
        "architectures": ["Own"],
        "tokenizer_class": "Own",
        "image_processor_type": "Own",
        "backbone_config": {"model_type": "own", "auto_map": REFERENCES["config.json"]},
    }
    drawn = random.Random(kind + answer)
    every = [c for n in (0, 1, 2) for c in itertools.combinations(changes, n)]
    refused = 0
    for changed in drawn.sample(every, 8):
        folder = shutil.copytree(tmp_path / kind, tmp_path / "-".join(["case", *changed]))
        (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
        for file, references in REFERENCES.items():
            if (folder / file).is_file():
                plain = json.loads((folder / file).read_text()) | {name: changes[name] for name in changed}
                (folder / file).write_text(json.dumps(plain | {"auto_map": references}))
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer * 20))
        if said := refusal(folder):
            refused += 1
            assert "\n" not in said
            assert "model_type" not in changed or "never runs code of a folder" in said
        assert not marker.exists()
        assert sys.stdin.read() == answer * 20  # nobody has asked
    assert refused


def test_trust_in_code_cannot_be_asked_for(offline):
    with pytest.raises(BadModel, match="never runs code"):
        load_model("hf:some/net(trust_remote_code=True)", "random")


def test_only_networks_of_transformers_are_built(tmp_path):
    transformers_folders.language(tmp_path / "bert", "bert")
    config = tmp_path / "bert" / "config.json"
    plain = json.loads(config.read_text())
    for named in (
        ["AutoModel"],
        ["pipeline"],
        ["BertConfig"],
        ["Trainer"],
        ["utils"],
        "a b",
        [[1]],
        {"a": 1},
        7,
        [None],
    ):
        config.write_text(json.dumps(plain | {"architectures": named}))
        with pytest.raises(BadInput) as caught:
            load_model(f"hf:{config.parent}")
        assert "\n" not in str(caught.value)


WRONG = ("abc", "", -3, 0, 1.5, None, True, [], [1, 2], [[]], {}, {"a": 1}, float("nan"), 10**30)


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_wrong_types_in_the_files_of_a_folder_are_one_line(tmp_path, kind, capfd):
    (transformers_folders.vision if kind == "vit" else partial(transformers_folders.language, kind=kind))(
        tmp_path / kind
    )
    capfd.readouterr()
    drawn, refused = random.Random(kind), 0
    for number in range(40):
        folder = shutil.copytree(tmp_path / kind, tmp_path / f"{number}")
        file = drawn.choice([folder / "config.json", *sorted(folder.glob("*config.json"))])
        plain = json.loads(file.read_text())
        for name in drawn.sample(sorted(plain), drawn.choice((1, 1, 2))):
            plain[name] = drawn.choice(WRONG)
        file.write_text(json.dumps(plain))
        if said := refusal(folder):  # some settings play no role
            refused += 1
            assert len(said.splitlines()) == 1, plain
        shutil.rmtree(folder)
    assert refused > 10
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["", "{", "[]", '"bert"', "null", "3", '{"model_type": "bert"', "\0", "[" * 3000])
def test_a_config_that_is_no_json_object_is_one_line(tmp_path, text):
    transformers_folders.language(tmp_path / "bert", "bert")
    (tmp_path / "bert" / "config.json").write_text(text)
    with pytest.raises(BadInput) as caught:
        load_model(f"hf:{tmp_path / 'bert'}")
    assert "\n" not in str(caught.value)


def test_weights_of_other_shapes_than_the_config_are_named(tmp_path):
    transformers_folders.language(tmp_path / "bert", "bert")
    config = tmp_path / "bert" / "config.json"
    plain = json.loads(config.read_text())
    config.write_text(json.dumps(plain | {"num_labels": 7, "id2label": {str(i): str(i) for i in range(7)}}))
    with pytest.raises(BadModel, match=r"other shapes than its config.json says: classifier.bias, classifier.weight"):
        load_model(f"hf:{config.parent}")
