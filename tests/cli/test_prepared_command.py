"""hf: networks on folders of texts and images, from the command line to the report."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import flatlens as fl
from flatlens import cli
from flatlens.data import raw

transformers_folders = pytest.importorskip("transformers_folders", reason="transformers is not installed")
ASKED = ["--loss", "cross_entropy", "--measures", "ggn_trace,loss"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder with bert (no weights), vit, texts, and images of the classes 0 and 3."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    transformers_folders.language(Path("bert"), "bert", weights=False)
    transformers_folders.vision(Path("vit"))
    transformers_folders.write_texts(Path("texts"))
    drawn = np.random.default_rng(0)
    for label in ("0", "3"):
        Path("images", label).mkdir(parents=True)
        for number in range(3):
            pixels = drawn.integers(0, 256, (20 + number, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path("images", label, f"{number}.png"))


def measured(capsys, *arguments: str) -> tuple[dict, str]:
    assert cli.run(["measure", *arguments, *ASKED, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_random_weights_and_the_tokenizer_are_told(folders, capsys):
    found, err = measured(capsys, "hf:bert", "--data", "texts")
    assert "the folder bert holds no weights: they are random (seed 0)" in err
    origin = found["about"]["origin"]
    assert origin["weights"] == "random (seed 0)"
    assert "4 texts of 2 classes (neg is 1, pos is 0)" in origin["data"]
    assert "tokenizer" in origin["preparation"]
    again, _ = measured(capsys, "hf:bert", "--data", "texts", "--weights", "random")
    assert again["estimates"][0]["value"] == found["estimates"][0]["value"]


def test_images_are_those_of_the_processor(folders, capsys, monkeypatch):
    import transformers
    from PIL import Image

    found, _ = measured(capsys, "hf:vit", "--data", "images")
    processor = transformers.AutoImageProcessor.from_pretrained("vit")
    files = sorted(Path("images").rglob("*.png"))
    x = processor(images=[Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    network = transformers.ViTForImageClassification.from_pretrained("vit")
    problem = fl.Problem(network, "cross_entropy", (x, torch.tensor([int(file.parent.name) for file in files])))
    by_hand = fl.measure(fl.Lens(problem), "ggn_trace")["ggn_trace"].value
    assert found["estimates"][0]["value"] == pytest.approx(by_hand, rel=1e-6)
    monkeypatch.setattr(raw, "HELD", 0)  # prepared anew at each reading: the same numbers
    anew, _ = measured(capsys, "hf:vit", "--data", "images")
    assert anew["estimates"][0]["value"] == pytest.approx(by_hand, rel=1e-6)


def test_a_part_of_the_samples(folders, capsys):
    found, _ = measured(capsys, "hf:vit", "--data", "images", "--samples", "4")
    assert found["about"]["n"] == 4
    assert "4 of 6 samples, drawn with seed 0" in found["about"]["origin"]["data"]


def test_networks_that_prepare_alike_are_compared(folders, capsys):
    assert cli.run(["compare", "hf:vit", "hf:vit", "--name", "a,b", "--data", "images", *ASKED]) == 0
    assert "1.5~" in capsys.readouterr().out  # one network twice ties


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("hf:vit", "texts", "the network reads images"),
        ("hf:bert", "images", "the network reads texts"),
        ("hf:vit", "bert", "no folder for each class"),
        ("hf:texts", "texts", "MODEL: hf:texts"),
    ],
)
def test_what_does_not_go_together_is_one_line(folders, refused, model, data, words):
    assert words in refused("measure", model, "--data", data, *ASKED)


def test_a_language_model_predicts_the_next_token(folders, capsys):
    import transformers

    network = transformers_folders.language(Path("lm"), "language model").eval()
    found, _ = measured(capsys, "hf:lm", "--data", "texts")
    tokenizer = transformers.AutoTokenizer.from_pretrained("lm")
    tokenizer.pad_token = tokenizer.eos_token
    texts = [file.read_text() for file in sorted(Path("texts").rglob("*.txt"))]
    x = tokenizer(texts, padding=True, truncation=True, max_length=6, return_tensors="pt")
    labels = x["input_ids"].where(x["attention_mask"].bool(), -100)
    with torch.no_grad():
        theirs = float(network(**x, labels=labels).loss)  # transformers shifts the labels itself
    assert {row["measure"]: row["value"] for row in found["estimates"]}["loss"] == pytest.approx(theirs, rel=1e-5)
    assert "the next one" in found["about"]["origin"]["preparation"]
