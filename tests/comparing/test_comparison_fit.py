"""Networks that do not fit the data as well as the best one have values, and no ranks."""

import pytest
import torch
from checkpoints import X, Y, lens, network

import flatlens as fl


def trained(steps, seed=0):
    net = network(seed, width=32)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(X), Y).backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("seed", range(4))
def test_networks_that_do_not_fit_the_data_are_not_ranked(seed):
    """An untrained network is the flattest by many measures, and a failed one, too."""
    nets = {"untrained": trained(0, seed), "fits": trained(400, seed), "also": trained(400, seed + 10)}
    nets["failed"] = trained(0, seed)
    torch.nn.init.zeros_(nets["failed"][4].weight)
    found = fl.compare({name: lens(net) for name, net in nets.items()})
    assert set(found.not_ranked) >= {"untrained", "failed"}
    assert found["mls", "failed"].value < found["mls", "fits"].value  # it would be first
    ranks = found.ranks()
    assert ranks[["untrained", "failed"]].isna().all(axis=None)
    best = found.networks().set_index("model")["loss"].idxmin()
    assert ranks[best].notna().any()
    assert found.networks().set_index("model")["mean_rank"].isna()[["untrained", "failed"]].all()
    told = " ".join(found.answer)
    assert "Not ranked: untrained (untrained or failed: training loss" in told
    assert "failed (untrained or failed: training loss" in told
    for one in found.not_ranked.values():
        assert one.loss == found.reports[one.network]["loss"].value


def test_networks_that_fit_alike_are_all_ranked_and_nobody_is_told_not_to_be():
    nets = {name: trained(400, seed) for name, seed in (("a", 0), ("b", 0))}
    with torch.no_grad():
        nets["b"][0].weight += 1e-4
    found = fl.compare({name: lens(net) for name, net in nets.items()}, ["mls", "ggn_trace"])
    assert not found.not_ranked
    assert "ranked" not in " ".join(found.answer)
    assert found.ranks().notna().all(axis=None)


def test_where_one_network_fits_nothing_is_ranked():
    nets = {"untrained": trained(0), "fits": trained(400)}
    found = fl.compare({name: lens(net) for name, net in nets.items()}, ["mls", "ggn_trace"])
    assert list(found.not_ranked) == ["untrained"]
    assert found.answer[0] == "No other network fits the training data as well as fits: nothing to rank."
    assert not found.agreement().counted
    again = found.agreement().remarks
    assert not any("same weights" in one for one in again)


def test_the_saved_comparison_leaves_out_the_same(tmp_path):
    nets = {"untrained": trained(0), "fits": trained(400)}
    found = fl.compare({name: lens(net) for name, net in nets.items()}, ["mls"])
    found.save(tmp_path / "c")
    again = fl.comparing.Comparison.load(tmp_path / "c")
    assert again.not_ranked == found.not_ranked
    assert again.answer == found.answer
