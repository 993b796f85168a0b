"""hf: networks from folders that the real transformers wrote, with their image processors and tokenizers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from flatlens.data.sources import load_data
from flatlens.errors import BadData, BadInput, BadModel
from flatlens.models.preparing import ImagePreparation, TextPreparation
from flatlens.models.sources import load_model

transformers_folders = pytest.importorskip("transformers_folders", reason="transformers is not installed")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("flatlens.models.hub.reachable", lambda: False)


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
