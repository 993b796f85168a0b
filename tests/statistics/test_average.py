import numpy as np
import pytest

from flatlens.errors import BadInput
from flatlens.statistics import average


def test_it_is_the_mean_and_its_interval_covers():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        x = rng.gamma(2.0, size=25)
        found = average(x, seed=seed)
        assert found.value == pytest.approx(x.mean())
        covered += found.low <= 2.0 <= found.high
    assert 0.89 <= covered / 300 <= 0.98  # 95% but for skewness in small samples


def test_what_is_missing_is_left_out_and_said():
    found = average([1.0, np.nan, np.inf, 2.0, 3.0, 4.0], name="ratio")
    assert (found.value, found.n, found.left_out) == (2.5, 4, 2)
    assert "ratio is missing" in found.why
    assert np.isnan(average([1.0, 2.0]).value)
    assert "at least 4" in average([1.0, 2.0]).note
    assert average([]).n == 0
    with pytest.raises(BadInput, match="resampled"):
        average([1.0], resampled=-1)
