"""Workers that raise, die and are interrupted. Tasks leave a file each, as networks do."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flatlens.errors import BadFolder, BadInput
from flatlens.experiments.runner import MAX_DEATHS, run_all


@pytest.fixture
def noted():
    return {}


@pytest.fixture
def note(noted):
    return noted.__setitem__


def writer(folder, deaths=None, raises=None):
    """A task that notes each try in a file, dies as often as `deaths` says, raises what `raises` says.

    A closure, so that it travels by value: workers cannot import this file.
    """
    deaths, raises, folder = deaths or {}, raises or {}, str(folder)

    def run(task):
        import os
        import pathlib
        import signal

        tries = pathlib.Path(folder) / f"{task}.tries"
        with tries.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(tries.read_text().split()) <= deaths.get(task, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if task in raises:
            raise raises[task]
        (pathlib.Path(folder) / f"{task}.done").touch()

    return run


def done(folder):
    return sorted(int(p.stem) for p in folder.glob("*.done"))


def tries(folder, task):
    return len((folder / f"{task}.tries").read_text().split())


def test_an_exception_is_noted_with_its_traceback_and_the_rest_goes_on(tmp_path, noted, note):
    seen = []
    with ThreadPoolExecutor(2) as executor:
        function = writer(tmp_path, raises={2: ValueError("no such luck")})
        run_all(range(5), function, note, executor=executor, progress=lambda *what: seen.append(what), done=3)
    assert done(tmp_path) == [0, 1, 3, 4]
    assert list(noted) == [2]
    assert noted[2].endswith("ValueError: no such luck\n")
    assert "in run" in noted[2]
    assert seen == [("networks", number, 8) for number in range(3, 9)]


def test_a_full_disk_ends_everything(tmp_path, noted, note):
    ended, write = threading.Event(), writer(tmp_path, raises={1: BadFolder("No space")})

    def run(task):
        if task > 1:
            ended.wait(30)
        write(task)

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(BadFolder, match="No space"):
            run_all(range(100), run, note, executor=executor)
        ended.set()
    assert noted == {}
    assert len(done(tmp_path)) <= 2  # task 0, and the one that was running


def test_killed_workers_tasks_are_run_again_and_a_killer_is_given_up(tmp_path, noted, note):
    function = writer(tmp_path, deaths={1: 1, 3: 99}, raises={4: ValueError("from a process")})
    run_all(range(6), function, note, workers=2)
    assert done(tmp_path) == [0, 1, 2, 5]
    assert sorted(noted) == [3, 4]
    assert "killed" in noted[3]
    assert "from a process" in noted[4]
    assert tries(tmp_path, 3) == MAX_DEATHS
    assert all(tries(tmp_path, task) <= 2 for task in (0, 2, 5))  # at most once along with a neighbour


def test_an_interrupt_stops_the_workers_and_keeps_what_is_finished(tmp_path, noted, note):
    def slow(task):
        import pathlib
        import time

        if task:
            time.sleep(60)
        (pathlib.Path(folder) / f"{task}.done").touch()

    def interrupt():
        while not (tmp_path / "0.done").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    folder = str(tmp_path)
    start = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_all(range(4), slow, note, workers=1)
    assert time.monotonic() - start < 30
    assert done(tmp_path) == [0]


def test_at_least_one_worker_is_needed(note):
    with pytest.raises(BadInput, match="workers=0"):
        run_all([1], print, note, workers=0)


def test_nothing_to_do_starts_no_worker(note):
    start = time.monotonic()
    run_all([], print, note)
    assert time.monotonic() - start < 1
