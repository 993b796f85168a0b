"""Choosing, standardising, scaling: each against its definition."""

import pytest
import torch

from flatlens.data import Preparation
from flatlens.data.split import _IMAGES_TOGETHER, Images
from flatlens.errors import BadInput


def drawn(n=200, test=60, shape=(3, 4, 5), classes=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n + test, *shape), generator=g, dtype=torch.uint8)
    labels = torch.randint(0, classes, (n + test,), generator=g)
    return Images("drawn", pixels[:n], labels[:n], pixels[n:], labels[n:], classes, "random numbers")


def test_each_component_is_centred_with_unit_deviation():
    x = Preparation(standardise="component")(drawn()).x.double()
    assert x.mean(0).abs().max() < 1e-6
    assert torch.allclose(x.std(0, correction=0), torch.ones(3, 4, 5, dtype=torch.float64), atol=1e-6)


def test_each_channel_is_centred_with_unit_deviation_over_its_pixels():
    images = drawn()
    x = Preparation(standardise="channel")(images).x.double()
    assert x.mean((0, 2, 3)).abs().max() < 1e-6
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-6)
    # one number for each channel: differences between its pixels stay in proportion
    raw = images.pixels.double()
    ratio = (x[0, 1] - x[0, 1, 0, 0])[1:] / (raw[0, 1] - raw[0, 1, 0, 0])[1:]
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-5)


def test_none_leaves_pixels_between_0_and_1():
    images = drawn()
    assert torch.equal(Preparation(standardise="none")(images).x, (images.pixels.double() / 255).float())


def test_the_statistics_are_the_training_images_and_serve_the_test_images():
    images = drawn()
    prepare = Preparation(train=50, order="first", standardise="component")
    first = images.pixels[:50].double()
    expected = (images.test_pixels.double() - first.mean(0)) / first.std(0, correction=0)
    assert torch.allclose(prepare(images).test_x.double(), expected, atol=1e-5)
    changed = Images(**{**vars(images), "test_pixels": torch.zeros_like(images.test_pixels)})
    assert torch.equal(prepare(changed).x, prepare(images).x)


def test_statistics_of_all_training_images():
    images = drawn()
    split = Preparation(train=50, order="first", standardise="component", statistics="all", classes=(0, 1))(images)
    kept = torch.isin(images.labels, torch.tensor([0, 1]))
    every = images.pixels.double()
    expected = (every[kept][:50] - every.mean(0)) / every.std(0, correction=0)
    assert torch.allclose(split.x.double(), expected, atol=1e-5)
    assert "(of all training images of the set)" in split.description


@pytest.mark.parametrize("standardise", ["component", "channel"])
def test_what_is_constant_is_centred_only(standardise):
    images = drawn()
    images.pixels[:, 2] = 51
    split = Preparation(standardise=standardise)(images)
    assert split.x[:, 2].eq(0).all()
    expected = (images.test_pixels[:, 2].double() - 51) / 255
    assert torch.allclose(split.test_x[:, 2].double(), expected, atol=1e-6)
    assert split.x.isfinite().all()


def test_the_scale_multiplies_at_the_end():
    images = drawn()
    one, half = (Preparation(standardise="component", scale=s)(images) for s in (1.0, 0.5))
    assert torch.equal(half.x, one.x * 0.5)
    assert torch.equal(half.test_x, one.test_x * 0.5)
    assert half.description.endswith("; times 0.5")


def test_classes_are_kept_and_relabelled_in_the_order_given():
    images = drawn()
    split = Preparation(classes=(4, 1), standardise="none")(images)
    assert split.classes == 2
    for new, old in enumerate((4, 1)):
        expected = images.pixels[images.labels == old].double() / 255
        assert torch.equal(split.x[split.y == new], expected.float())
    assert len(split.x) == int(torch.isin(images.labels, torch.tensor([1, 4])).sum())
    assert set(split.test_y.tolist()) == {0, 1}


def test_the_first_ones_and_random_ones():
    images = drawn()
    first = Preparation(train=30, test=10, order="first", standardise="none")(images)
    assert torch.equal(first.y, images.labels[:30])
    assert torch.equal(first.test_y, images.test_labels[:10])
    one, same, other = (Preparation(train=30, test=10, seed=s)(images) for s in (1, 1, 2))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.test_y, same.test_y)
    assert not torch.equal(one.x, other.x)


def test_random_subsets_are_nested_without_repeats_and_the_test_draw_stays():
    images = drawn(n=200)
    images.pixels[:, 0, 0, 0] = torch.arange(200, dtype=torch.uint8)
    few, many = (Preparation(train=n, test=20, standardise="none")(images) for n in (50, 120))
    assert torch.equal(many.x[:50], few.x)
    assert torch.equal(many.test_x, few.test_x)
    assert len(many.x[:, 0, 0, 0].unique()) == 120


def test_flat_rows_are_the_images_in_memory_order():
    images = drawn()
    assert torch.equal(Preparation(flat=True)(images).x, Preparation()(images).x.flatten(1))


def test_more_images_than_a_chunk():
    images = drawn(n=2 * _IMAGES_TOGETHER + 3, shape=(1, 2, 2))
    x = Preparation(standardise="component")(images).x.double()
    raw = images.pixels.double()
    assert torch.allclose(x, (raw - raw.mean(0)) / raw.std(0, correction=0), atol=1e-5)


def test_the_description_says_what_was_done():
    assert Preparation(train=50, test=20, classes=(0, 2), seed=3)(drawn()).description == (
        "random numbers, 50 training images drawn with seed 3 and 20 test images drawn with seed 3, of the classes "
        "0, 2; each channel centred and divided by its standard deviation over all pixels (of the training images used)"
    )
    assert "the first 50 training images and all 60 test images; pixels between 0 and 1" in (
        Preparation(train=50, order="first", standardise="none")(drawn()).description
    )


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    Preparation(train=5)(drawn())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": 0}, "train=0"),
        ({"test": -1}, "test=-1"),
        ({"classes": (1,)}, "two classes or more"),
        ({"classes": (1, 1)}, "each named once"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"order": "last"}, "choose from random, first"),
        ({"standardise": "pixel"}, "choose from component, channel, none"),
        ({"statistics": "mine"}, "choose from used, all"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, words):
    with pytest.raises(BadInput, match=words):
        Preparation(**options)


def test_more_than_there_is_is_refused():
    with pytest.raises(
        BadInput, match=r"Preparation\(train=201\): drawn has only 200 training images: ask for at most 200$"
    ):
        Preparation(train=201)(drawn())
    with pytest.raises(BadInput, match=r"Preparation\(test=60\): drawn has only \d+ test images of these classes: ask"):
        Preparation(test=60, classes=(0, 1))(drawn())
    with pytest.raises(BadInput, match="drawn has the classes 0 to 4"):
        Preparation(classes=(0, 5))(drawn())
