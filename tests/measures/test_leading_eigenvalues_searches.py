"""Eigenpairs in a file: read as they were written, and the next measurement starts from them."""

import pytest
import torch

import flatlens as fl
from flatlens.errors import BadInput
from flatlens.measures.leading_eigenvalues import Searches


def test_a_search_that_starts_from_a_file_takes_fewer_products(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    problem = fl.Problem(net, "cross_entropy", (torch.randn(40, 6), torch.arange(40) % 3))
    first = fl.Lens(problem)
    measures = ["sharpness", "layer_sharpness"]
    cold = fl.measure(first, measures)
    Searches(first.remembered, {}).save(tmp_path / "pairs")
    kept = Searches.load(tmp_path / "pairs")
    assert list(kept.pairs) == list(first.remembered)
    for key, pairs in first.remembered.items():
        assert torch.equal(kept.pairs[key].values, pairs.values)
        assert torch.equal(kept.pairs[key].vectors, pairs.vectors)
    assert set(kept.frame()["measure"]) == {search for search, _ in first.remembered}
    with torch.no_grad():
        net[0].weight.add_(1e-4)
    warm = fl.measure(fl.Lens(problem, after=kept.pairs), measures)
    assert warm["sharpness"].products < cold["sharpness"].products
    assert warm["sharpness"].value == pytest.approx(cold["sharpness"].value, rel=1e-2)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "pairs").write_text("mls")
    with pytest.raises(BadInput, match="not a saved warm start"):
        Searches.load(tmp_path / "pairs")
