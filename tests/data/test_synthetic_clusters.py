"""The synthetic clusters: the separation, the covariances and the redundancy they were asked for."""

import pytest
import torch

from flatlens.data import clusters
from flatlens.data.synthetic import mixture
from flatlens.errors import BadInput


@pytest.mark.parametrize("separation", [0.5, 3.0, 20.0])
def test_the_nearest_centres_are_as_far_apart_as_asked(separation):
    for seed in range(5):
        centroids = mixture(separation, torch.Generator().manual_seed(seed)).centroids
        assert float(torch.pdist(centroids).min()) == pytest.approx(separation, rel=1e-12)


def test_samples_have_the_centres_and_covariances_of_their_clusters():
    drawn = mixture(30.0, torch.Generator().manual_seed(0))
    x, y = drawn.sample(200_000, torch.Generator().manual_seed(1))
    nearest = torch.cdist(x[:, :6], drawn.centroids).argmin(1)
    assert torch.equal(y, nearest // 2)  # so far apart, the nearest centre is a sample's own
    for k in range(4):
        mine = x[nearest == k][:, :6]
        assert len(mine) == pytest.approx(50_000, rel=0.03)
        assert torch.allclose(mine.mean(0), drawn.centroids[k], atol=0.05)
        assert torch.allclose(mine.T.cov(), drawn.factors[k] @ drawn.factors[k].T, atol=0.08)


def test_moments_are_those_of_the_samples():
    drawn = mixture(3.0, torch.Generator().manual_seed(2))
    means, covariances, labels = drawn.moments()
    x, y = drawn.sample(200_000, torch.Generator().manual_seed(3))
    second = covariances + means[:, :, None] * means[:, None]
    for label in (0, 1):
        mine = x[y == label]
        spread = (mine[:, :, None] * mine[:, None]).std(0) / len(mine) ** 0.5
        assert (mine.mean(0) - means[labels == label].mean(0)).abs().max() < 5 * mine.std(0).max() / len(mine) ** 0.5
        assert ((mine.T @ mine / len(mine) - second[labels == label].mean(0)).abs() < 5 * spread).all()


def test_covariances_are_the_identity_on_average():
    g = torch.Generator().manual_seed(0)
    factors = torch.cat([mixture(1.0, g).factors for _ in range(2000)])
    assert torch.allclose((factors @ factors.mT).mean(0), torch.eye(6, dtype=torch.float64), atol=0.03)


def test_two_features_are_combinations_of_the_others():
    drawn = mixture(2.0, torch.Generator().manual_seed(0))
    x, _ = drawn.sample(50, torch.Generator())
    assert torch.equal(x[:, 6:], x[:, :6] @ drawn.mixing)
    assert (drawn.mixing.abs() <= 1).all()


def test_sizes_labels_and_seed():
    split = clusters(2.0, n=500, test=4500, seed=5)
    assert (split.x.shape, split.test_x.shape) == ((500, 8), (4500, 8))
    assert split.x.dtype == torch.float32
    assert split.y.double().mean() == pytest.approx(0.5, abs=0.1)
    assert torch.equal(split.x, clusters(2.0, seed=5).x)
    assert not torch.equal(split.x, clusters(2.0, seed=6).x)
    before = torch.get_rng_state()
    clusters()
    assert torch.equal(before, torch.get_rng_state())


def test_more_separation_makes_the_labels_easier():
    from sklearn.linear_model import RidgeClassifier

    def error(separation):
        wrong = []
        for seed in range(10):
            s = clusters(separation, 300, 1000, seed)
            wrong.append(1 - RidgeClassifier().fit(s.x, s.y).score(s.test_x, s.test_y))
        return sum(wrong) / len(wrong)

    assert error(0.0) > 0.3 > error(6.0)


@pytest.mark.parametrize("arguments", [(-1.0,), (float("inf"),), (1.0, 0), (1.0, 5, 0)])
def test_bad_arguments(arguments):
    with pytest.raises(BadInput, match=r"clusters\("):
        clusters(*arguments)
