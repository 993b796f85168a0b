"""Patches of two photographs: from where they should be, and never from where the others are."""

import pytest
import torch

from flatlens.data import patches
from flatlens.data.bundled import COLUMNS, ROWS, SIDE, TEST_STRIPS, TRAIN_STRIPS, corners
from flatlens.errors import BadInput


def covered(strips, count):
    """Which pixels of a photograph some patch uses."""
    mask = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    for row, column in corners(count, strips, torch.Generator().manual_seed(0)).tolist():
        assert 0 <= row <= ROWS - SIDE
        assert 0 <= column <= COLUMNS - SIDE
        mask[row : row + SIDE, column : column + SIDE] = True
    return mask


def test_no_pixel_is_in_both_parts():
    train, test = covered(TRAIN_STRIPS, 20_000), covered(TEST_STRIPS, 10_000)
    assert not (train & test).any()
    assert (train | test).float().mean() > 0.98  # and hardly any is left out


def test_corners_are_all_different():
    every = len(TEST_STRIPS) * 49 * 396
    assert len(corners(every, TEST_STRIPS, torch.Generator()).unique(dim=0)) == every


def test_patches_are_cut_from_the_photographs_with_their_labels():
    from sklearn.datasets import load_sample_images

    photographs = [torch.tensor(p).permute(2, 0, 1) for p in load_sample_images().images]
    split = patches(train=40, test=20, standardise="none")
    for x, y, strips in ((split.x, split.y, TRAIN_STRIPS), (split.test_x, split.test_y, TEST_STRIPS)):
        for patch, label in zip((x * 255).round().to(torch.uint8), y, strict=True):
            photograph = photographs[int(label)]
            starts = (photograph[:, : ROWS - SIDE + 1, : COLUMNS - SIDE + 1] == patch[:, :1, :1]).all(0).nonzero()
            places = [
                (row, column)
                for row, column in starts.tolist()
                if torch.equal(photograph[:, row : row + SIDE, column : column + SIDE], patch)
            ]
            assert places
            assert all(column // 80 == (column + SIDE - 1) // 80 in strips for _, column in places)


def test_shapes_balance_and_standardisation():
    split = patches(train=101, test=60)
    assert split.x.shape == (101, 3, 32, 32)
    assert split.test_x.shape == (60, 3, 32, 32)
    assert split.y.bincount().tolist() == [51, 50]
    assert split.test_y.bincount().tolist() == [30, 30]
    assert split.x.double().mean((0, 2, 3)).abs().max() < 1e-6
    assert patches(train=20, flat=True, scale=0.5).x.shape == (20, 3072)


def test_seed_and_global_state():
    before = torch.get_rng_state()
    assert torch.equal(patches(seed=1, train=20).x, patches(seed=1, train=20).x)
    assert not torch.equal(patches(seed=1, train=20).x, patches(seed=2, train=20).x)
    assert torch.equal(before, torch.get_rng_state())


def test_sizes_out_of_range():
    with pytest.raises(BadInput, match=r"patches\(train=9\): expected between 10 and 232848"):
        patches(train=9)
    with pytest.raises(BadInput, match=r"patches\(test=100000\)"):
        patches(test=100_000)
