"""How far a run is, noted by its worker in a tiny file and read by who watches."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_study import small_study

from flatlens.errors import BadFolder
from flatlens.experiments import run_study, runner
from flatlens.experiments import store as store_module
from flatlens.experiments.network import ComputeInto
from flatlens.experiments.store import Store

STUDY = small_study(networks=2, steps=600)
FIRST, SECOND = STUDY.networks()


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "out", STUDY)


def test_a_note_is_read_by_its_network_and_gone_at_the_end(store):
    networks = {settings.key: settings for settings in STUDY.networks()}
    with store.progress_file(FIRST.key) as note:
        assert store.in_progress(networks) == {}
        note("training steps", 3, 600)
        assert store.in_progress(networks) == {FIRST: (3, 600)}
        assert store.in_progress({}) == {}  # another study's
    assert store.in_progress(networks) == {}
    with pytest.raises(TypeError), store.progress_file(FIRST.key) as note:
        note("training steps", 3)
    assert not list((store.out / "training").iterdir())


def test_notes_are_at_most_one_a_second(store):
    networks = {FIRST.key: FIRST}
    with store.progress_file(FIRST.key) as note:
        for done in range(1, 100):
            note("training steps", done, 600)
        assert store.in_progress(networks) == {FIRST: (1, 600)}
        note.next -= store_module.EVERY
        note("training steps", 100, 600)
        assert store.in_progress(networks) == {FIRST: (100, 600)}


def test_a_note_that_cannot_be_written_or_read_is_no_matter(store):
    (store.out / "training" / f"{SECOND.key}.progress").write_text("half of")
    with store.progress_file(FIRST.key) as note:
        (store.out / "training").rename(store.out / "elsewhere")
        note("training steps", 3, 600)
    (store.out / "elsewhere").rename(store.out / "training")
    assert store.in_progress({SECOND.key: SECOND}) == {}


def test_what_killed_runs_left_is_swept(store):
    training = store.out / "training"
    for name in (f"{FIRST.key}.progress", f"{FIRST.key}.versions.pt", f"{SECOND.key}.versions.pt"):
        (training / name).write_text("3 600")
    store.folder(FIRST.key).mkdir()  # killed between its last two steps: the network is there
    Store.create(store.out, STUDY)
    assert [path.name for path in training.iterdir()] == [f"{SECOND.key}.versions.pt"]


def test_a_watched_study_shows_its_runs_and_an_unwatched_one_notes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(store_module, "EVERY", 0.0)
    seen = []
    with ThreadPoolExecutor(1) as executor:
        run_study(STUDY, tmp_path / "watched", executor=executor, progress=lambda *what: seen.append(what))
        runs = [what for what in seen if what[0] != "networks"]
        assert {label for label, _, _ in runs} == {"seed 0", "seed 1"}
        assert {total for _, _, total in runs} == {600}
        assert len({done for _, done, _ in runs}) > 2
        monkeypatch.setattr(store_module._Note, "__call__", lambda *_: pytest.fail("noted"))
        assert run_study(STUDY, tmp_path / "unwatched", executor=executor).failed == []


def test_a_network_that_is_there_is_not_computed_again(store, monkeypatch):
    ComputeInto(store)(FIRST)
    monkeypatch.setattr("flatlens.experiments.network.compute", lambda *_, **__: pytest.fail("computed again"))
    ComputeInto(store)(FIRST)


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path, store, monkeypatch):
    monkeypatch.setattr(store_module, "SEEN_WITHIN", 0.1)
    with pytest.raises(BadFolder, match=r"the worker on .* cannot see the folder .*share") as caught:
        ComputeInto(Store(tmp_path / "elsewhere"))(FIRST)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_shows_late_is_waited_for(tmp_path, store):
    late = tmp_path / "late"
    threading.Timer(0.3, lambda: store.out.rename(late)).start()
    Store(late).require_seen()


def test_failed_are_those_with_a_note_and_no_network(store):
    for settings in STUDY.networks():
        store.write_failure(settings, "Traceback\nValueError: no\n")
    store.folder(FIRST.key).mkdir()
    assert store.failed(settings.key for settings in STUDY.networks()) == [SECOND.key]
    store.forget_failure(SECOND.key)
    assert store.failed([FIRST.key, SECOND.key]) == []
