import pytest
import torch

from flatlens.data import digits
from flatlens.errors import BadInput


def test_the_rest_is_test_data_and_nothing_is_in_both():
    split = digits(train=600, seed=3)
    assert (len(split.x), len(split.test_x)) == (600, 1197)
    assert split.x.dtype == torch.float32
    assert split.y.dtype == torch.int64
    assert not torch.cdist(split.x, split.test_x).eq(0).any()
    assert set(split.y.tolist()) == set(range(split.classes))


def test_training_pixels_are_centred_and_their_mean_squared_norm_is_64():
    x = digits(train=300).x.double()
    assert x.mean(0).abs().max() < 1e-6
    assert x.square().sum(1).mean() == pytest.approx(64, rel=1e-6)


def test_a_scale_multiplies_the_inputs_alone():
    plain, scaled = digits(train=50), digits(train=50, scale=1.5)
    assert torch.allclose(scaled.x, 1.5 * plain.x, rtol=1e-6)
    assert torch.allclose(scaled.test_x, 1.5 * plain.test_x, rtol=1e-6)
    assert torch.equal(scaled.y, plain.y)
    assert scaled.description == f"{plain.description}, then multiplied by 1.5"
    with pytest.raises(BadInput, match="scale=0"):
        digits(scale=0)


def test_the_seed_decides_the_split_and_the_global_state_is_left_alone():
    before = torch.get_rng_state()
    assert torch.equal(digits(seed=1).x, digits(seed=1).x)
    assert not torch.equal(digits(seed=1).y, digits(seed=2).y)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("train", [0, 9, 1698, 1797])
def test_sizes_that_leave_nothing_are_refused(train):
    with pytest.raises(BadInput, match=rf"digits\(train={train}\)"):
        digits(train=train)


def test_pairs_are_those_a_problem_takes():
    split = digits(train=20)
    assert split.train[0] is split.x
    assert split.test[1] is split.test_y


def test_as_images_they_are_the_same_pixels():
    rows, images = digits(train=20, seed=2), digits(train=20, seed=2, flat=False)
    assert images.x.shape == (20, 1, 8, 8)
    assert torch.equal(images.x.flatten(1), rows.x)
    assert torch.equal(images.test_x.flatten(1), rows.test_x)
