import numpy as np
import pytest
import torch

from flatlens.data import eight_points
from flatlens.errors import BadInput


def test_eight_points_are_a_regression():
    split = eight_points()
    assert split.x.shape == split.y.shape == (8, 1)
    assert split.x.dtype == split.y.dtype == torch.float32
    assert split.classes == 0
    assert split.y.abs().max() <= 1
    assert torch.allclose(split.x.diff(dim=0), torch.tensor(1 / 7))
    assert (float(split.x[0]), float(split.x[-1])) == (0.0, 1.0)


def test_the_test_curve_passes_through_the_points_and_is_natural():
    split = eight_points(seed=3, grid=7001)
    for x, y in zip(split.x, split.y, strict=True):
        at = (split.test_x - x).abs().argmin()
        assert float(split.test_y[at]) == pytest.approx(float(y), abs=1e-5)
    coarse = split.test_y.double().flatten()[::100]
    bend = np.diff(coarse.numpy(), 2) / 0.0143**2
    assert abs(bend[0]) < 0.2 * np.abs(bend).max()  # second derivative 0 at the ends
    assert abs(bend[-1]) < 0.2 * np.abs(bend).max()


def test_a_line_stays_a_line():
    split = eight_points(np.linspace(-2, 5, 8).tolist(), grid=50)
    assert torch.allclose(split.test_y, -2 + 7 * split.test_x, atol=1e-5)


def test_seed_and_own_targets():
    assert torch.equal(eight_points(seed=1).y, eight_points(seed=1).y)
    assert not torch.equal(eight_points(seed=1).y, eight_points(seed=2).y)
    own = [0.5, -0.5, 1, 0, 0, 2, 3, -1]
    assert eight_points(own).y.flatten().tolist() == own
    assert "targets given" in eight_points(own).description


@pytest.mark.parametrize("targets", [[1.0] * 7, [float("nan")] * 8, [[1.0] * 8]])
def test_targets_that_are_not_eight_numbers(targets):
    with pytest.raises(BadInput, match="8 finite numbers"):
        eight_points(targets)
    with pytest.raises(BadInput, match="grid=1"):
        eight_points(grid=1)
