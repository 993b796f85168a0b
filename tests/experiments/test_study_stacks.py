"""Which networks a worker takes at a time, and studies whose networks are trained in stacks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_study import small_study, tables

from flatlens.errors import BadInput
from flatlens.experiments import Study, load_study, run_study
from flatlens.experiments.network import ComputeInto, measure_network
from flatlens.experiments.store import Store
from flatlens.experiments.study import packs
from flatlens.models import LeNet5
from flatlens.training import SAM
from flatlens.training.stack import population

SMALL = small_study(networks=5, steps=200).over("batch_size", 4, 16)


@pytest.fixture(autouse=True)
def _always_fast(monkeypatch):
    """Times that say a stack is faster."""
    monkeypatch.setattr(population, "_timed", lambda step: step() or 1.0)


def run(study, out, **options):
    with ThreadPoolExecutor(1) as executor:
        return run_study(study, out, executor=executor, **options)


@pytest.mark.parametrize("hands", [1, 2, 7, None])
def test_packs_are_of_one_kind_and_hold_each_network_once(hands):
    networks = Study.digits("laptop").over("seed", *range(9)).networks()
    found = packs(networks, together=16, hands=hands, pack=1)
    assert sorted(one.key for pack in found for one in pack) == sorted(one.key for one in networks)
    for pack in found:
        assert len({one.training.batch_size for one in pack}) == 1
        assert len(pack) <= 64
    assert len(found) >= min(hands or 1, 3)
    assert found[0][0].training.batch_size == 64  # what takes longest goes first


def test_what_no_stack_takes_goes_out_as_before():
    networks = Study.digits("smoke").networks()
    convolutions = [replace(one, model=LeNet5(seed=number)) for number, one in enumerate(networks)]
    sharp = [replace(one, training=replace(one.training, ascent=SAM(0.1))) for one in networks]
    for alone in (convolutions, sharp):
        assert [len(pack) for pack in packs(alone, together=16, hands=2, pack=3)] == [2, 3, 3]
    assert [len(pack) for pack in packs(networks, together=1, hands=2, pack=1)] == [1] * 8
    with_both = packs([*convolutions, *networks], together=16, hands=2, pack=1)
    assert [len(pack) for pack in with_both] == [4, 4, *[1] * 8]


def test_a_study_in_stacks_ends_in_the_bytes_of_each_alone(tmp_path):
    wanted = run(SMALL, tmp_path / "alone", together=1)
    found = run(SMALL, tmp_path / "together", together=3)
    assert tables(tmp_path / "alone") == tables(tmp_path / "together")
    assert wanted.alone == found.alone == []
    for folder in (tmp_path / "alone" / "networks").iterdir():
        other = tmp_path / "together" / "networks" / folder.name
        for name in ("weights.safetensors", "curves.safetensors"):
            assert (folder / name).read_bytes() == (other / name).read_bytes()
    assert not list((tmp_path / "together" / "training").iterdir())


def test_networks_followed_in_training_have_the_same_histories(tmp_path):
    from flatlens.experiments.settings import Followed

    study = SMALL.setting("followed", Followed(("relative_flatness",), every=70))
    for name, together in (("alone", 1), ("together", 4)):
        run(study, tmp_path / name, together=together)
    assert tables(tmp_path / "alone") == tables(tmp_path / "together")
    assert (tmp_path / "alone" / "histories.csv").read_bytes() == (tmp_path / "together" / "histories.csv").read_bytes()


def test_the_study_says_why_a_network_was_trained_alone(tmp_path):
    study = SMALL.over("ascent", None, SAM(0.05)).over("batch_size", 4).over("seed", 0, 1)
    found = run(study, tmp_path / "out")
    assert found.alone == [("an ascent cannot be stacked", 2)]
    assert load_study(tmp_path / "out").alone == found.alone


def test_an_error_in_one_network_leaves_the_others_of_its_pack(tmp_path, monkeypatch):
    store, networks = Store.create(tmp_path / "out", SMALL), SMALL.networks()[::2]
    broken = networks[1].key
    monkeypatch.setattr(
        "flatlens.experiments.network.measure_network",
        lambda model, split, settings, measured=measured: measured(model, split, settings, broken),
    )
    traces = ComputeInto(store, tell=True, together=16).several(networks)
    assert ["no" in trace for trace in traces] == [False, True, False, False, False]
    assert len(store.finished(one.key for one in networks)) == 4
    assert not list((store.out / "training").glob("*.progress"))


def measured(model, split, settings, broken):
    if settings.key == broken:
        raise ValueError("no")
    return measure_network(model, split, settings)


def test_progress_counts_networks_as_they_end(tmp_path):
    seen = []
    run(SMALL, tmp_path / "out", progress=lambda *what: seen.append(what))
    counts = [done for what, done, total in seen if what == "networks" and total == 10]
    assert counts == sorted(counts)
    assert counts[-1] == 10


@pytest.mark.parametrize("name", ["workers", "pack", "together"])
def test_a_number_below_one_is_refused_before_a_folder_is_made(tmp_path, name):
    with pytest.raises(BadInput, match=rf"^run_study\({name}=0\): expected at least 1"):
        run_study(SMALL, tmp_path / "out", **{name: 0})
    assert not (tmp_path / "out").exists()
