"""Groups of networks: which is flatter, how certain, who is left out; each sentence only where it is true."""

import json

import numpy as np
import pytest
import torch
from checkpoints import TEST, X, Y, lens, network
from made_up import CHANCE, grouped, report

import flatlens as fl
from flatlens.errors import BadInput, UnknownName

SEEDS = range(6)


def reports(times=1.0, train=0.2, test=None, seeds=SEEDS, start=0, **others):
    """Six seeds with a spread of their own; `times` is the ratio of both flat measures to those of another group."""
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        common, own = rng.lognormal(0, 1, 4), np.random.default_rng(100 + seed + 10 * start).lognormal(0, 0.05, 4)
        flat, adaptive, mls, volume = common * own
        values = {"neuron_flatness": times * flat, "adaptive_sharpness": times * adaptive, "mls": mls,
                  "log_volume": -volume} | {name: of * mls for name, of in others.items()}  # fmt: skip
        found.append(report(train, None if test is None else test * common[0] * own[1], **values))
    return found


def text(found):
    assert 1 <= len(found.answer) <= 3
    assert all(one.endswith(".") for one in found.answer)
    return " ".join(found.answer)


def test_did_sam_find_flatter_minima_than_sgd():
    found = grouped(SGD=reports(), SAM=reports(0.6, start=1))
    told = text(found)
    assert told.startswith("SAM is flatter than SGD by 2 of 2 invariant measures: neuron_flatness of SAM is 0.")
    assert "times that of SGD (smaller in 6 of 6 pairs, Holm-corrected p = " in told
    assert "SAM and SGD do not differ significantly in sensitivity and compression: mls of SAM is" in told
    assert found.answer[-1] == "Held-out data (test=..., --test) shows which group generalises better."
    assert "SGD is" not in told


def test_the_other_way_round_it_is_sharper():
    assert "SGD is sharper than SAM by 2 of 2" in text(grouped(SAM=reports(0.6), SGD=reports(start=1)))


def test_without_pairs_the_spread_between_seeds_hides_it():
    found = grouped(False, SGD=reports(), SAM=reports(0.6, start=1))
    assert "SAM and SGD do not differ significantly in flatness" in text(found)
    assert "(12 networks, Holm-corrected p = " in text(found)


def test_did_my_regulariser_make_the_representation_less_sensitive():
    found = grouped(plain=reports(), decay=reports(start=1, mls=0.5))
    assert "decay is less sensitive than plain by 1 of 2 invariant measures: mls of decay is 0." in text(found)
    assert "more compressed" not in text(found)
    assert "flatter than" not in text(found)


def test_groups_that_do_not_differ_are_told_not_to():
    told = text(grouped(SGD=reports(), SAM=reports(start=1)))
    assert "do not differ significantly in flatness" in told
    assert "do not differ significantly in sensitivity and compression" in told
    assert " is flatter" not in told
    assert " is sharper" not in told


def test_measures_that_point_both_ways_decide_nothing():
    up = [{**dict(zip(("neuron_flatness", "adaptive_sharpness"), pair, strict=True))} for pair in [(1, 1)] * 6]
    base = [report(0.2, **{name: value * (1 + i / 10) for name, value in one.items()}) for i, one in enumerate(up)]
    rng = np.random.default_rng(0)
    moved = [report(0.2, neuron_flatness=0.5 * (1 + i / 10) * rng.lognormal(0, 0.02),
                    adaptive_sharpness=2.0 * (1 + i / 10) * rng.lognormal(0, 0.02)) for i in SEEDS]  # fmt: skip
    told = text(grouped(SGD=base, SAM=moved))
    assert told.startswith("Whether SAM is flatter than SGD depends on the measure: neuron_flatness is 0.")


def test_groups_that_do_not_fit_the_data_equally_well_are_not_called_flatter():
    rng = np.random.default_rng(0)
    worse = [report(0.6 * rng.lognormal(0, 0.1), neuron_flatness=0.5 * rng.lognormal(0, 0.1)) for _ in SEEDS]
    better = [report(0.2 * rng.lognormal(0, 0.1), neuron_flatness=rng.lognormal(0, 0.1)) for _ in SEEDS]
    both = grouped(SGD=better, SAM=worse), grouped(SAM=worse, SGD=better)
    assert both[0].answer[0] == both[1].answer[0]
    for found in both:
        first, second, last = found.answer
        assert first.startswith("SAM fits the training data worse than SGD (its training loss is ")
        assert first.endswith("so smaller values need not mean a flatter minimum or less sensitivity.")
        assert second.startswith("neuron_flatness of S")
        assert "flatter than" not in text(found)
        assert "Compare networks of equal training loss." in last
    assert "fits the training data worse" not in text(grouped(SGD=reports(), SAM=reports(0.6, train=0.25)))


def test_an_accuracy_over_two_points_lower_is_a_worse_fit():
    def of(accuracy):
        return [report(0.2, accuracy=accuracy + i / 1000, neuron_flatness=1 + i) for i in (*range(5), 7)]

    odd = [report(0.2, accuracy=0.9 + i / 500, neuron_flatness=1 + i) for i in SEEDS]
    assert "SAM fits the training data worse than SGD (its accuracy is lower" in text(grouped(SGD=of(0.95), SAM=odd))
    assert "worse" not in text(
        grouped(SGD=of(0.95), SAM=[*of(0.949)[:-1], report(0.2, accuracy=0.95, neuron_flatness=2)])
    )


def test_a_network_that_does_not_fit_is_left_out_with_its_pair():
    sam = reports(0.6, start=1)
    sam[2] = report(CHANCE + 0.1, neuron_flatness=1e-6, adaptive_sharpness=1e-6, mls=1e-6, log_volume=-9.0)
    found = grouped(SGD=reports(), SAM=sam)
    assert list(found.not_ranked) == ["SAM 3"]
    assert found["neuron_flatness"][0].n == 5
    assert "Left out: SAM 3 (untrained or failed: training loss 2.4" in text(found)
    assert "smaller in 5 of 5 pairs" in text(found)
    assert "Left out" not in text(grouped(SGD=reports(), SAM=reports(0.6, start=1)))


def test_ordinary_differences_between_seeds_leave_nobody_out():
    """The best seed has half of the median's training loss: the rule is against the median."""
    uneven = [report(train, neuron_flatness=1.0) for train in (0.1, 0.2, 0.21, 0.22, 0.23, 0.24)]
    assert not grouped(SGD=uneven, SAM=uneven).not_ranked


def test_the_held_out_loss_is_among_what_is_corrected():
    found = grouped(SGD=reports(test=0.3), SAM=reports(0.6, test=0.2, start=1))
    assert found.deciding == ["mls", "log_volume", "neuron_flatness", "adaptive_sharpness", "test_loss"]
    (one,) = found["test_loss"]
    assert one.significant
    assert f"The held-out loss of SAM is {one.value:.3g} [" in text(found)
    same = grouped(SGD=reports(test=0.3), SAM=reports(0.6, test=0.3, start=1))
    assert text(same).endswith("times that of SGD (not significant).")


def test_three_groups_are_compared_with_the_first():
    found = grouped(SGD=reports(), SAM=reports(0.6, start=1), none=reports(start=2))
    assert "SAM is flatter than SGD by 2 of 2" in text(found)
    assert "none and SGD do not differ significantly in flatness" in text(found)


def test_without_an_interval_nothing_is_decided():
    found = grouped(SGD=reports(seeds=range(2)), SAM=reports(0.6, seeds=range(2)))
    told = text(found)
    assert told.startswith("Whether SAM is flatter than SGD is open: neuron_flatness of SAM is 0.6")
    assert "2 pairs, no interval: fewer than 3 independent units" in told
    assert "an interval needs 3 networks a group" in told.lower()


def test_without_an_invariant_measure_it_is_open():
    found = grouped(
        *[], SGD=[report(0.2, ggn_trace=1.0 + i) for i in SEEDS], SAM=[report(0.2, ggn_trace=0.1) for _ in SEEDS]
    )
    assert found.answer[0].startswith("Which group is flatter is open: no measure that decides is invariant")
    assert np.isfinite(found["ggn_trace"][0].value)


def test_a_multiple_of_a_measure_is_tested_once():
    base, sam = reports(), reports(0.6, start=1)
    for one in (*base, *sam):
        one._estimates["adaptive_sharpness", None] = fl.Estimate(2 * one["neuron_flatness"].value)
    assert grouped(SGD=base, SAM=sam).deciding == ["mls", "log_volume", "neuron_flatness"]


def test_the_frame_and_the_saved_file_hold_everything(tmp_path):
    found = grouped(SGD=reports(test=0.3), SAM=reports(0.6, test=0.2, start=1, ggn_trace=2.0))
    frame = found.frame().set_index("measure")
    assert frame.loc["ggn_trace", ["decides", "small_means", "scale"]].tolist() == [False, "flat", "ratio"]
    assert frame.loc["log_volume", ["decides", "small_means", "scale"]].tolist() == [True, "compressed", "difference"]
    assert np.isnan(frame.loc["loss", "p_holm"])
    assert frame.loc[found.deciding, "p_holm"].notna().all()
    json.dumps(frame.reset_index().to_dict("records"))
    found.save(tmp_path / "g")
    again = fl.GroupComparison.load(tmp_path / "g")
    assert again.frame().equals(found.frame())
    assert again.answer == found.answer
    assert again.groups == {group: list(of) for group, of in found.groups.items()}
    assert found.answer[0] in " ".join(repr(found).split())
    with pytest.raises(BadInput, match="it is a saved group comparison"):
        fl.Comparison.load(tmp_path / "g")
    with pytest.raises(UnknownName, match="did you mean mls"):
        found["ml"]


def test_real_networks():
    groups = {
        name: [lens(network(seed), test=TEST) for seed in range(start, start + 3)]
        for name, start in (("a", 0), ("b", 5))
    }
    found = fl.compare(groups=groups, paired=True)
    assert found.groups == {"a": ("a 1", "a 2", "a 3"), "b": ("b 1", "b 2", "b 3")}
    values = {group: [found.networks["mls", name].value for name in names] for group, names in found.groups.items()}
    if not found.not_ranked:
        assert found["mls"][0].value == pytest.approx(np.exp(np.mean(np.log(values["b"]) - np.log(values["a"]))))
    text(found)


@pytest.mark.parametrize(("call", "told"), [
    (lambda one: {}, "give either networks or groups"),
    (lambda one: {"lenses": {"a": one()}, "groups": {"b": [one()]}}, "give either networks or groups"),
    (lambda one: {"lenses": {"a": one(), "b": one()}, "paired": True}, "only groups have pairs"),
    (lambda one: {"groups": {"a": [one(), one()]}}, "expected at least two groups of networks: a has 2"),
    (lambda one: {"groups": {"a": [one()], "b": []}}, "a has 1, b has 0"),
    (lambda one: {"groups": {"a": [one()], "b": [one(), one()]}, "paired": True}, "pairs need groups of one size"),
    (lambda one: {"groups": [one()]}, "expected a dict of name -> list of Lens"),
    (lambda one: {"groups": {"a": one(), "b": one()}}, "expected a dict of name -> list of Lens"),
    (lambda one: {"groups": {"a": [one()], "b": [torch.nn.Linear(2, 2)]}}, "expected a dict of name -> Lens"),
    (lambda one: {"groups": {"a": [one()], "b": [lens(network(1), (X.roll(1, 0), Y))]}}, "the data of a 1 and b 1"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(call, told):
    with pytest.raises(BadInput, match=told) as caught:
        fl.compare(measures="mls", **call(lambda: lens(network(0))))
    assert "\n" not in str(caught.value)
