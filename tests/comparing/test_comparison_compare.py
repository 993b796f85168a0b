"""fl.compare: who is flatter by which measure, who cannot be distinguished, and what may not be compared."""

import numpy as np
import pandas as pd
import pytest
import torch
from checkpoints import TEST, X, Y, lens, network, rescaled

import flatlens as fl
from flatlens.comparing import direction
from flatlens.deprecated_names import FormerName
from flatlens.errors import BadInput
from flatlens.measures import MEASURES


def test_one_function_written_in_two_ways_ties_exactly_where_the_card_says(three):
    """The test that matters: c is b with its layers rescaled, so whatever is left alone by that cannot tell them."""
    ranks = three.ranks()
    for name in ranks.index:
        if "layerwise" in MEASURES[name].invariant_under:
            assert ranks.loc[name, "b"] == ranks.loc[name, "c"], name
    assert ranks.loc["interpolation_sharpness", "b"] < ranks.loc["interpolation_sharpness", "c"]
    assert ranks.loc["weight_norm", "b"] < ranks.loc["weight_norm", "c"]


def test_ranks_follow_the_values_of_fl_measure(three):
    values = {
        name: fl.measure(lens(net), "mls")["mls"].value for name, net in {"a": network(0), "b": network(1)}.items()
    }
    frame = three.frame().set_index(["measure", "model"])
    for name, value in values.items():
        assert frame.loc[("mls", name), "value"] == pytest.approx(value, rel=1e-12)
    assert (values["a"] < values["b"]) == (frame.loc[("mls", "a"), "rank"] < frame.loc[("mls", "b"), "rank"])


def test_the_former_name_of_is_invariant_warns(three):
    assert three.is_invariant("mls")
    assert not three.is_invariant("ggn_trace")
    with pytest.warns(FormerName, match="survives is now called is_invariant"):
        assert three.survives("mls")


def test_the_frame_is_tidy_and_says_what_survives(three):
    frame = three.frame()
    assert list(frame) == [
        "measure", "model", "value", "stderr", "kind", "rank", "undecided_with", "small_means", "invariant", "note",
    ]  # fmt: skip
    assert not frame.duplicated(["measure", "model"]).any()
    rows = frame.set_index(["measure", "model"])
    assert rows.loc[("mls", "b"), "undecided_with"] == "c"
    assert rows.loc[("mls", "a"), "invariant"] == "headwise, layerwise, neuronwise, permutation"
    assert rows.loc[("ggn_trace", "a"), "invariant"] == "permutation"
    assert rows.loc[("mls", "a"), "small_means"] == "compressed"
    assert rows.loc[("ggn_trace", "a"), "small_means"] == "flat"
    assert rows.loc[("weight_norm", "a"), "small_means"] == ""
    assert not set(frame["measure"]) & {"loss", "accuracy", "test_loss", "generalisation_gap"}
    assert not frame["measure"].str.contains(".", regex=False).any()


def test_every_family_has_been_thought_of():
    known = {"sharpness", "flatness", "normalised", "hessian", "perturbation", "sensitivity", "compression"}
    assert {m.card.family for m in MEASURES.values() if direction(m.card)} == known
    silent = {name for name, m in MEASURES.items() if not direction(m.card) and m.card.family != "generalisation"}
    assert silent == {"fisher_rao", "weight_norm", "output_norm", "feature_norm", "interpolation_gap",
                      "gradient_noise_scale",
                      "representativeness", "locally_constant_labels"}  # fmt: skip


def test_the_networks_stand_with_their_gap(three):
    rows = three.networks().set_index("model")
    report = three.reports["a"]
    assert rows.loc["a", "generalisation_gap"] == report["generalisation_gap"].value
    assert rows.loc["a", "gap_stderr"] == report["generalisation_gap"].stderr > 0
    assert rows.loc["b", "test_loss"] == pytest.approx(rows.loc["c", "test_loss"], rel=1e-12)
    counted = three.agreement().counted
    assert rows.loc["a", "mean_rank"] == pytest.approx(three.ranks().loc[counted, "a"].mean())
    assert rows.loc["b", "mean_rank_surviving"] == pytest.approx(rows.loc["c", "mean_rank_surviving"])
    assert rows.loc["b", "mean_rank"] < rows.loc["c", "mean_rank"]


def test_without_held_out_data_there_is_no_gap():
    found = fl.compare({"a": lens(network(0)), "b": lens(network(1))}, "mls")
    assert "generalisation_gap" not in found.networks()
    assert {"loss", "accuracy"} <= set(found.networks())
    assert found.agreement().gap.empty
    assert list(found.measures) == ["mls"]


def test_estimates_whose_intervals_overlap_share_their_rank():
    nets = {"a": network(0), "b": network(0, width=9), "c": rescaled(network(0), 40.0)}
    generator = torch.Generator().manual_seed(0)
    found = fl.compare({name: lens(net) for name, net in nets.items()}, "average_sharpness", generator=generator)
    rows = found.frame().set_index("model")
    for one in nets:
        for two in rows.loc[one, "undecided_with"].split(", "):
            if two:
                reach = 1.96 * (rows.loc[one, "stderr"] + rows.loc[two, "stderr"])
                assert abs(rows.loc[one, "value"] - rows.loc[two, "value"]) <= reach * (1 + 1e-6)
    # the same draws for each, and the measure is invariant: the same function gets the same numbers
    assert rows.loc["a", "value"] == pytest.approx(rows.loc["c", "value"], rel=1e-6)
    assert "c" in rows.loc["a", "undecided_with"]


def test_the_generator_decides():
    nets = {"a": network(0), "b": network(1)}

    def values(seed):
        lenses = {name: lens(net) for name, net in nets.items()}
        found = fl.compare(lenses, "average_sharpness", generator=torch.Generator().manual_seed(seed))
        return found.frame()["value"].tolist()

    assert values(1) == values(1) != values(2)


def test_what_is_undefined_has_no_rank_and_the_reason():
    dead = network(0)
    with torch.no_grad():
        dead[0].bias.fill_(-100.0)
    found = fl.compare({"alive": lens(network(1)), "dead": lens(dead)}, ["log_volume", "mls"])
    row = found.frame().set_index(["measure", "model"]).loc[("log_volume", "dead")]
    assert np.isnan(row["rank"])
    assert row["kind"] == "undefined"
    assert row["note"]
    assert found.agreement().left_out["log_volume"] == "undefined on dead"
    assert found.frame().set_index(["measure", "model"]).loc[("log_volume", "alive"), "rank"] == 1


def test_options_and_own_measures_are_ranked_under_their_spelling():
    found = fl.compare({"a": lens(network(0)), "b": lens(network(1))}, ["local_volume(top_k=2)", fl.measures.mls])
    assert list(found.measures) == ["local_volume(top_k=2)", "mls"]
    assert set(found.frame()["measure"]) == {"local_volume(top_k=2)", "mls"}


def test_progress_is_told():
    told = []
    lenses = {"a": lens(network(0)), "b": lens(network(1))}
    fl.compare(lenses, "mls", progress=lambda what, done, total: told.append((what, done, total)))
    assert ("networks", 0, 2) in told
    assert told[-1] == ("networks", 2, 2)


def test_other_architectures_are_compared_with_a_remark():
    found = fl.compare({"small": lens(network(0)), "wide": lens(network(0, width=30))}, "mls")
    assert "differ in architecture (parameters: small 115, wide 357)" in found.notes[0]
    assert (
        "precision" in fl.compare({"a": lens(network(0)), "b": lens(network(1), dtype=torch.float32)}, "mls").notes[0]
    )
    assert fl.compare({"a": lens(network(0)), "b": lens(network(1))}, "mls").notes == ()
    parts = {"a": lens(network(0)), "b": lens(network(1), parameters=["0.weight"])}
    assert "which parameters" in fl.compare(parts, "ggn_trace").notes[0]


def test_single_precision_ties_what_rounding_alone_tells_apart():
    net = network(0).float()
    data, options = (X.float(), Y), {"a": net, "b": rescaled(net, 7.0)}
    found = fl.compare({name: lens(one, data) for name, one in options.items()}, ["mls", "neuron_flatness", "nmls"])
    assert found.ranks().loc[["mls", "neuron_flatness"]].eq(1.5).all(axis=None)
    assert found.ranks().loc["nmls"].nunique() == 2


def test_data_read_twice_may_be_other_objects_with_the_same_bytes():
    a, b = lens(network(0), (X, Y)), lens(network(1), (X.clone(), Y.clone()))
    assert isinstance(fl.compare({"a": a, "b": b}, "mls").ranks(), pd.DataFrame)


@pytest.mark.parametrize(("lenses", "told"), [
    (lambda: {"a": lens(network(0))}, "expected at least two networks, got 1"),
    (lambda: {}, "expected at least two networks, got 0"),
    (lambda: [lens(network(0)), lens(network(1))], "a dict of name"),
    (lambda: {"a": network(0), "b": network(1)}, "a dict of name"),
    (lambda: {"a": lens(network(0)), "b": lens(network(1), loss="mse", data=(X, Y[:, None].double().expand(-1, 3)))},
     "loss of a: cross_entropy, of b: mse; they must be measured under one loss"),
    (lambda: {"a": lens(network(0)), "b": lens(network(1), (X[:9], Y[:9]))}, "samples of a: 20, of b: 9"),
    (lambda: {"a": lens(network(0)), "b": lens(network(1, outputs=4))},
     "outputs of a: 3, of b: 4"),
    (lambda: {"a": lens(network(0)), "b": lens(network(1), (X.roll(1, 0), Y))}, "the data of a and b differ"),
    (lambda: {"a": lens(network(0), test=TEST), "b": lens(network(1))}, "held-out data of a: given, of b: none"),
    (lambda: {"a": lens(network(0), test=TEST), "b": lens(network(1), test=(X, Y))}, "the held-out data of a and b"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(lenses, told):
    with pytest.raises(BadInput, match=told) as caught:
        fl.compare(lenses(), "mls")
    assert "\n" not in str(caught.value)


def test_one_model_object_under_two_names_is_refused():
    net = network(0)
    with pytest.raises(BadInput, match="a and b use the same model object"):
        fl.compare({"a": lens(net), "b": lens(net)}, "mls")


def test_a_model_trained_on_is_stale():
    net = network(0)
    before = lens(net)
    with torch.no_grad():
        net[0].weight += 1
    with pytest.raises(fl.StaleLens, match=r"0\.weight"):
        fl.compare({"a": before, "b": lens(network(1))}, "mls")


@pytest.mark.parametrize("measures", ["generalisation_gap", [], ["loss", "accuracy"]])
def test_something_to_rank_by_is_needed(measures):
    with pytest.raises(BadInput, match="name at least one other measure"):
        fl.compare({"a": lens(network(0)), "b": lens(network(1))}, measures)
