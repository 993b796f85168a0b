"""Numbers of a trajectory are those of its table; it ends where its partner gets there; lines are weighed singly."""

import numpy as np
import pandas as pd
import pytest
from fake_study import fake_result

from flatlens.papers.contrasts import mean_of
from flatlens.papers.evidence import (
    along,
    between,
    correlated_changes,
    first,
    gain,
    growth_beyond,
    histories,
    in_trajectory,
    last,
    late,
    log_gain,
    once_below,
    peak,
    reached,
    rise,
    slowing,
    trained_in,
    until_partner,
    up_to_edge,
)
from flatlens.papers.experiment import conclusion_of

VALUES = {  # of s at steps 0, 5, 10, 15
    "a": [2.0, 4.0, 8.0, 1.0],
    "b": [1.0, 2.0, 3.0, 5.0],
    "c": [2.0, 2.0, 2.0, 2.0],
    "d": [9.0, 9.0, 9.0, 9.0],
}
RIGHT = {"a": [0.1, 0.5, 0.99, 0.7], "b": [0.1, 0.2, 0.3, 0.4], "c": [0.1, 0.2, 0.3, 0.4], "d": [1.0, 1.0, 1.0, 1.0]}


def result():
    """a and b differ in smoothing alone; c has no partner; d did not get there."""
    networks = pd.DataFrame(
        {"key": list("abcd"), "smoothing": [0.0, 0.5, 0.0, 0.5], "seed": [0, 0, 1, 1],
         "outcome": ["finished", "converged", "finished", "out of steps"]}
    )  # fmt: skip
    rows = [
        (key, step, measure, "", value, 4.0)
        for key in VALUES
        for measure, of in (("s", VALUES), ("accuracy", RIGHT))
        for step, value in zip((0, 5, 10, 15), of[key], strict=True)
    ]
    columns = ["key", "step", "measure", "layer", "value", "edge"]
    return fake_result(networks, histories=pd.DataFrame(rows, columns=columns))


NUMBERS = {"first": first("s"), "last": last("s"), "largest": peak("s"), "ratio": peak("s", "edge"),
           "late": late("s"), "late ratio": late("s", "edge"), "rise": rise("s")}  # fmt: skip


def test_networks_without_a_course_are_counted_where_a_reason_is_given():
    trajectories = until_partner("smoothing", "accuracy", 0.9, ["seed"])
    found = mean_of(
        in_trajectory("one", {"last": last("s")}, trajectories, without="its partner never came there"), "last"
    )
    one = found({"one": result()})
    assert (one.n, one.excluded) == (2, (("its partner never came there", 1),))  # c; d is not among those that ended
    assert one.value == (8 + 3) / 2
    silent = mean_of(in_trajectory("one", {"last": last("s")}, trajectories), "last")({"one": result()})
    assert (silent.n, silent.excluded, silent.value) == (2, (), one.value)


def test_numbers_of_whole_courses():
    table = in_trajectory("one", NUMBERS)({"one": result()}).set_index("key")
    assert table.index.tolist() == ["a", "b", "c"]  # d is left out
    assert table.loc["a", ["first", "last", "largest", "ratio"]].tolist() == [2.0, 1.0, 8.0, 2.0]
    assert table.loc["a", ["late", "late ratio", "rise"]].tolist() == [4.5, 1.125, 2.5]
    assert table["smoothing"].tolist() == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("model", [{"classes": 2}, {"outputs": 2}])
def test_networks_that_never_trained_are_left_out(model):
    one = result()
    one.settings["base"] = {"model": model}
    one.networks = one.networks.assign(accuracy=[0.99, 0.54, 0.56, 1.0])  # chance is .5, a tenth of the way .55
    table = in_trajectory("one", NUMBERS, networks=trained_in)
    assert table({"one": one})["left out"].tolist() == ["", "it never trained: accuracy below 0.55 (smoothing 0.5)", ""]
    mean = mean_of(table, "last")({"one": one})
    assert (mean.value, mean.excluded) == (1.5, (("it never trained: accuracy below 0.55 (smoothing 0.5)", 1),))


def test_two_columns_of_a_trajectory():
    trajectory = pd.DataFrame({"s": [1.0, 4.0, 3.0, 5.0], "j": [1.0, 2.0, 4.0, 8.0], "edge": 4.0})
    assert correlated_changes("s", "j")(trajectory) == pytest.approx(np.corrcoef([3, -1, 2], [1, 2, 4])[0, 1])
    assert correlated_changes("s", "j", "spearman")(trajectory) == pytest.approx(-0.5)
    assert np.isnan(correlated_changes("s", "j")(trajectory.iloc[:3]))
    five = pd.DataFrame({"s": [1.0, 4.0, 3.0, 5.0, 2.0], "j": [1.0, 2.0, 4.0, 8.0, 9.0]})
    assert correlated_changes("s", "j", apart=2)(five) == pytest.approx(np.corrcoef([2, 1, -1], [3, 6, 5])[0, 1])
    assert np.isnan(correlated_changes("s", "j", apart=2)(trajectory))
    assert np.isnan(correlated_changes("s", "nowhere")(trajectory))
    assert growth_beyond("j", "s", "edge")(trajectory) == pytest.approx(np.log(8 / 2))
    assert np.isnan(growth_beyond("j", "s", "edge")(trajectory.iloc[:1]))
    assert up_to_edge(last("j"), "s", "edge")(trajectory) == 2  # where growth beyond it begins
    assert up_to_edge(last("j"), "s", "edge")(trajectory.iloc[:1]) == last("j")(trajectory.iloc[:1])
    assert up_to_edge(len, "s", "edge")(trajectory.assign(edge=np.inf)) == len(trajectory)


def test_courses_begin_where_the_loss_is_low():
    result = fake_result(
        pd.DataFrame({"key": ["a", "b"], "seed": [0, 1]}),
        histories=pd.DataFrame(
            [("a", step, "loss", "", loss, 1.0) for step, loss in ((0, 1.0), (5, 0.1), (10, 0.3), (15, 0.05))]
            + [("b", step, "loss", "", 1.0, 1.0) for step in (0, 5)],
            columns=["key", "step", "measure", "layer", "value", "edge"],
        ),
    )
    trajectories = once_below(0.15)(result)
    assert list(trajectories) == ["a"]
    assert trajectories["a"].index.tolist() == [5, 10, 15]  # once it was below, it counts


def test_one_step_does_not_decide_what_follows_what():
    """Of every network, the first change is large in both columns; the others go against each other."""
    seeds = range(8)
    rows = [
        (f"n{seed}", step, name, "", start + sign * wave, 1.0)
        for seed in seeds
        for name, sign in (("s", 1), ("j", -1))
        for step, (start, wave) in enumerate(
            [(100.0, 0), (1, 1), (1, 2), (1, 1.5), (1, 3 + 0.1 * seed), (1, 0.5), (1, 4), (1, 0)]
        )
    ]
    columns = ["key", "step", "measure", "layer", "value", "edge"]
    networks = pd.DataFrame({"key": [f"n{seed}" for seed in seeds], "seed": seeds})
    numbers = {"r": correlated_changes("s", "j"), "of ranks": correlated_changes("s", "j", "spearman")}
    results = {"one": fake_result(networks, histories=pd.DataFrame(rows, columns=columns))}
    alone, beside = (mean_of(in_trajectory("one", numbers), "r", ranks)(results) for ranks in (None, "of ranks"))
    assert alone.value == beside.value > 0.9
    assert beside.of_ranks < 0
    assert [conclusion_of(one, "above", 0.0) for one in (alone, beside)] == ["reproduced", "open"]


def test_courses_end_where_the_partner_gets_there():
    trajectories = until_partner("smoothing", "accuracy", 0.99, ["seed"])(result())
    assert {key: trajectory.index.tolist() for key, trajectory in trajectories.items()} == {
        "a": [0, 5, 10],
        "b": [0, 5, 10],
    }
    assert trajectories["b"]["s"].tolist() == [1.0, 2.0, 3.0]
    table = in_trajectory("one", NUMBERS, until_partner("smoothing", "accuracy", 0.99, ["seed"]))({"one": result()})
    assert table[["last", "late"]].to_numpy().tolist() == [[8.0, 6.0], [3.0, 2.5]]
    assert set(histories(result())) == {"a", "b", "c"}


def test_gains_of_a_course():
    trajectory = pd.DataFrame({"s": [8.0, 4.0, 2.0, 1.0, 0.5]})
    assert gain("s")(trajectory) == -7.5
    assert log_gain("s")(trajectory) == pytest.approx(np.log(1 / 16))
    assert slowing("s")(trajectory) == -0.75 - -3
    assert slowing("s")(trajectory.iloc[:4]) == -1 - -4  # the fall between the halves is left out
    assert slowing("s")(-trajectory) == -slowing("s")(trajectory)
    assert np.isnan(slowing("s")(trajectory.iloc[:2]))


def test_courses_from_where_the_loss_is_low():
    one = result()
    one.histories = one.histories.replace({"measure": {"accuracy": "loss"}})
    trajectories = once_below(0.25)(one)  # b and c are at once, and rise again
    assert {key: trajectory.index.tolist() for key, trajectory in trajectories.items()} == {
        "a": [0, 5, 10, 15],
        "b": [0, 5, 10, 15],
        "c": [0, 5, 10, 15],
    }
    falling = one.histories.assign(value=lambda t: t["value"].where(t["measure"] != "loss", 1 - t["value"]))
    one.histories = falling
    trajectories = once_below(0.4)(one)  # 1 - accuracy: of a from step 10 on; of b and c never
    assert {key: trajectory.index.tolist() for key, trajectory in trajectories.items()} == {"a": [10, 15]}
    assert once_below(0.02)(one)["a"].index.tolist() == [10, 15]
    assert once_below(0)(one) == {}


def test_courses_between_two_shares_of_their_steps():
    assert between(0.5, 1)(result())["a"].index.tolist() == [10, 15]
    assert between(0, 0.1)(result())["b"].index.tolist() == [0, 5]
    assert between(0, 1)(result())["c"]["s"].tolist() == VALUES["c"]
    assert between(1, 1)(result()) == {}


def test_lines_are_weighed_one_by_one():
    """Pooled, the larger setting has the larger values; along every line they fall."""
    networks = pd.DataFrame(
        {"lr": [1, 2, 3] * 4, "batch": [8] * 6 + [16] * 6, "seed": ([0] * 3 + [1] * 3) * 2, "outcome": "finished",
         "y": [3.0, 2, 1, 6, 5, 4, 13, 12, 11, 16, 15, 17]}
    )  # fmt: skip
    results = {"one": fake_result(networks)}
    found = along(reached("one"), "lr", "y", ["batch", "seed"])(results)
    assert found.n == 12
    assert found.value == pytest.approx((-3 + 1 / 3) / 4)
    assert (found.units, found.unit) == (2, "seed")
    pooled = along(reached("one"), "lr", "y", ["batch"])(results)  # a line holds both seeds: lines are the units
    assert (pooled.n, pooled.units, pooled.unit) == (12, 1, "group")
    missing = along(reached("one"), "lr", "nowhere", ["batch", "seed"])(results)
    assert missing.value != missing.value
