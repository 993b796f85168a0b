import pytest
import torch
from scipy.stats import kstest
from torch.nn import functional as F

from flatlens.errors import BadData, BadInput
from flatlens.training import Augmentation, Mixup


def images(n=400):
    return 1 + torch.arange(float(n * 2 * 5 * 6)).reshape(n, 2, 5, 6)


def every_move(image, pad, flip):
    padded = F.pad(image, [pad] * 4)
    crops = [padded[:, a : a + 5, b : b + 6] for a in range(2 * pad + 1) for b in range(2 * pad + 1)]
    return crops + ([crop.flip(2) for crop in crops] if flip else [])


@pytest.mark.parametrize(("pad", "flip"), [(1, True), (2, False), (0, True)])
def test_an_image_becomes_one_of_its_crops_or_their_mirror_images_each_as_often(pad, flip):
    x = images()
    moved = Augmentation(1.0, pad, flip).apply(x, torch.Generator().manual_seed(0))
    which = []
    for before, after in zip(x, moved, strict=True):
        alike = [k for k, move in enumerate(every_move(before, pad, flip)) if torch.equal(move, after)]
        assert len(alike) == 1
        which += alike
    counts = torch.bincount(torch.tensor(which), minlength=(2 * pad + 1) ** 2 * (1 + flip)).double()
    expected = 400 / len(counts)
    chi = float(((counts - expected).square() / expected).sum())
    assert chi < 2 * len(counts) + 12


def test_the_probability_is_that_of_touching_an_image_at_all():
    x = images()
    for p in (0.0, 0.3, 1.0):
        moved = Augmentation(p, 2).apply(x, torch.Generator().manual_seed(1))
        share = (moved != x).flatten(1).any(1).double().mean()
        assert share == pytest.approx(p * (1 - 1 / 50), abs=0.08 if 0 < p < 1 else 0.04)
    assert torch.equal(Augmentation(0.0).apply(x, torch.Generator()), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_in_memory_as_they_came(channels):
    x = torch.zeros(4, channels, 8, 8)
    for augmentation in (Augmentation(pad=1), Augmentation(p=0.0), Augmentation(pad=0)):
        assert augmentation.apply(x, torch.Generator()).stride() == x.stride()


def test_what_is_no_image_is_refused():
    with pytest.raises(BadData, match=r"\(n, C, h, w\), got \(3, 64\)"):
        Augmentation().apply(torch.zeros(3, 64), torch.Generator())
    for wrong in ({"p": 1.5}, {"pad": -1}):
        with pytest.raises(BadInput, match="Augmentation"):
            Augmentation(**wrong)
    with pytest.raises(BadInput, match="Mixup"):
        Mixup(-1.0)


@pytest.mark.parametrize("beta", [0.2, 1.0, 3.0])
def test_the_mixing_coefficient_follows_its_law(beta):
    generator = torch.Generator().manual_seed(0)
    draws = [Mixup(beta).draw(generator) for _ in range(500)]
    assert kstest(draws, "beta", (beta, beta)).pvalue > 1e-3


def test_at_zero_the_law_is_bernoullis():
    generator = torch.Generator().manual_seed(0)
    draws = [Mixup(0.0).draw(generator) for _ in range(400)]
    assert set(draws) == {0.0, 1.0}
    assert 160 < sum(draws) < 240
