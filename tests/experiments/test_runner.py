"""Workers that raise, die and are interrupted. Tasks leave a file each, as networks do."""

import os
import signal
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError, Future, ThreadPoolExecutor

import pytest

from flatlens.errors import BadFolder, BadInput
from flatlens.experiments import runner
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


@pytest.mark.slow
def test_killed_workers_tasks_are_run_again_and_a_killer_is_given_up(tmp_path, noted, note):
    function = writer(tmp_path, deaths={1: 1, 3: 99}, raises={4: ValueError("from a process")})
    run_all(range(6), function, note, workers=2)
    assert done(tmp_path) == [0, 1, 2, 5]
    assert sorted(noted) == [3, 4]
    assert "killed" in noted[3]
    assert "from a process" in noted[4]
    assert tries(tmp_path, 3) == MAX_DEATHS
    assert all(tries(tmp_path, task) == 1 for task in (0, 2, 5))  # a neighbour's death is not theirs


def test_a_pack_whose_worker_was_killed_is_taken_up_singly(tmp_path, noted, note):
    seen = []
    function = writer(tmp_path, deaths={1: 99}, raises={2: ValueError("no such luck")})
    run_all(range(6), function, note, workers=2, pack=3, progress=lambda *what: seen.append(what))
    assert done(tmp_path) == [0, 3, 4, 5]
    assert sorted(noted) == [1, 2]
    assert f"killed {MAX_DEATHS} times" in noted[1]
    assert tries(tmp_path, 1) == MAX_DEATHS
    assert all(tries(tmp_path, task) <= 2 for task in (0, 2, 3, 4, 5))
    assert seen[-1] == ("networks", 6, 6)


def test_packs_are_handed_out_whole(tmp_path, note):
    handed = []

    class Watched(ThreadPoolExecutor):
        def submit(self, fn, *args):
            handed.append(args[-1])
            return super().submit(fn, *args)

    with Watched(1) as executor:
        run_all(range(5), writer(tmp_path), note, executor=executor, pack=2)
    assert handed == [(0, 1), (2, 3), (4,)]
    assert done(tmp_path) == [0, 1, 2, 3, 4]


class Losing(ThreadPoolExecutor):
    """An executor that gives up what `gives_up` names, as often as that says."""

    def __init__(self, gives_up, error):
        super().__init__(1)
        self.gives_up, self.error = gives_up, error

    def submit(self, fn, function, pack):
        future = Future()
        for task in pack:
            if self.gives_up.get(task):
                self.gives_up[task] -= 1
                future.cancel() if self.error is CancelledError else future.set_exception(self.error)
                if self.error is CancelledError:
                    future.set_running_or_notify_cancel()
                return future
        return super().submit(fn, function, pack)


@pytest.mark.parametrize("error", [KeyError("gone with its worker"), CancelledError])
@pytest.mark.parametrize("pack", [1, 3])
def test_what_an_executor_gives_up_is_tried_once_more_alone_then_noted(tmp_path, noted, note, error, pack):
    with Losing({1: 1, 4: 99}, error) as executor:
        run_all(range(6), writer(tmp_path), note, executor=executor, pack=pack)
    assert done(tmp_path) == [0, 1, 2, 3, 5]
    assert list(noted) == [4]
    assert ("CancelledError" if error is CancelledError else "gone with its worker") in noted[4]
    assert all(tries(tmp_path, task) == 1 for task in (0, 1, 2, 3, 5))


def test_a_broken_executor_is_one_line_and_nothing_is_noted(tmp_path, noted, note):
    executor = Losing({3: 1}, BrokenExecutor("the cluster is gone"))
    with pytest.raises(BadInput, match=r"the worker processes failed \(the cluster is gone.*kept") as caught:
        run_all(range(6), writer(tmp_path), note, executor=executor)
    assert "\n" not in str(caught.value)
    assert noted == {}
    executor.shutdown()
    with pytest.raises(BadInput, match=r"worker processes failed \(cannot schedule new futures"):
        run_all(range(6), writer(tmp_path), note, executor=executor)


@pytest.mark.parametrize("end", [SystemExit(3), MemoryError("too big"), RecursionError()])
def test_what_ends_a_worker_politely_is_noted_too(tmp_path, noted, note, end):
    with ThreadPoolExecutor(1) as executor:
        run_all(range(3), writer(tmp_path, raises={1: end}), note, executor=executor)
    assert done(tmp_path) == [0, 2]
    assert type(end).__name__ in noted[1]


def test_what_cannot_be_sent_to_a_worker_is_noted(noted, note):
    run_all([1, 2], threading.Lock().__enter__, note, workers=1)
    assert "cannot pickle" in noted[1]
    assert sorted(noted) == [1, 2]


def test_what_is_under_way_is_shown_once_a_second_by_its_label(monkeypatch, note):
    monkeypatch.setattr(runner, "LOOK_EVERY", 0.01)
    seen, running = [], {}

    def run(task):
        running[task] = (1, 5)
        while (f"task {task}", 1, 5) not in seen:
            time.sleep(0.001)
        running[task] = (3, 5)
        while (f"task {task}", 3, 5) not in seen:
            time.sleep(0.001)
        del running[task]

    with ThreadPoolExecutor(1) as executor:
        run_all(
            *(range(2), run, note),
            **{"executor": executor, "progress": lambda *what: seen.append(what)},
            **{"label": "task {}".format, "in_progress": lambda: dict(running)},
        )
    runs = [what for what in seen if what[0] != "networks"]
    assert runs == [(f"task {task}", done, 5) for task in range(2) for done in (1, 3, 5)]  # each is shown finished
    assert seen[0] == ("networks", 0, 2)
    assert seen[-1] in [("networks", 2, 2), ("task 1", 5, 5)]


def test_nobody_is_asked_what_is_under_way_when_nobody_looks(note):
    with ThreadPoolExecutor(1) as executor:
        run_all(range(2), lambda _: None, note, executor=executor, in_progress=lambda: pytest.fail("asked"))


def test_an_interrupt_stops_the_workers_and_keeps_what_is_finished(tmp_path, noted, note, heeded):
    def slow(task):
        import pathlib
        import time

        if task:
            time.sleep(600)
        (pathlib.Path(folder) / f"{task}.done").touch()

    def interrupt():
        while not (tmp_path / "0.done").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    folder = str(tmp_path)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_all(range(4), slow, note, workers=1)
    assert done(tmp_path) == [0]


@pytest.fixture
def heeded():
    """SIGINT interrupts, also where a shell started the tests in the background and had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("what", ["workers", "pack"])
def test_at_least_one_is_needed(note, what):
    with pytest.raises(BadInput, match=f"{what}=0"):
        run_all([1], print, note, **{what: 0})


def test_nothing_to_do_starts_no_worker(monkeypatch, note):
    monkeypatch.setattr("flatlens.experiments.runner.WorkerProcesses.submit", lambda *_: pytest.fail("started"))
    run_all([], print, note)
