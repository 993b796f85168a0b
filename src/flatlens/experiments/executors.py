"""Executors for sweeps: worker processes on this machine, a Dask cluster, or Slurm through one."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from flatlens.errors import BadInput, needs, one_line
from flatlens.experiments.store import difference, versions
from flatlens.settings_json import require_setting

if TYPE_CHECKING:
    from dask_jobqueue.slurm import SLURMCluster
    from distributed import Client, Worker
    from distributed import Future as DaskFuture
    from loky import ProcessPoolExecutor


SAFE_PATH = "PYTHONSAFEPATH"
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", SAFE_PATH), "1")
"""Variables of workers: one thread, and no import from the folder in which they start, such as of a queue.py there."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WorkerProcesses(Executor):
    """`count` processes of one thread each, taking `count` calls at a time.

    Each process has an executor of its own: so a death is the end of one call, whose future raises BrokenExecutor, and
    is known to have happened in that call. The next call there gets a new process.
    """

    def __init__(self, count: int) -> None:
        with needs("study", "work in several processes"):
            import_module("loky")
        self._places = [_Place() for _ in range(count)]

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Call `fn` in a process that has nothing to do; RuntimeError if there is none."""
        free = next((place for place in self._places if place.free), None)
        if free is None:
            raise RuntimeError(f"all {len(self._places)} worker processes are busy")
        return free.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes: after what they are at, or at once with `cancel_futures`."""
        with ThreadPoolExecutor(len(self._places)) as hands:  # one after the other, many would take seconds
            list(hands.map(lambda place: place.close(kill=cancel_futures), self._places))


class _Place:
    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None
        self.latest: Future[Any] | None = None

    @property
    def free(self) -> bool:
        return self.latest is None or self.latest.done()

    def submit(self, fn: Callable[..., _R], *args: Any, **kwargs: Any) -> Future[_R]:
        if self._died():
            self.close(kill=True)
        try:
            return self._submit(fn, *args, **kwargs)
        except BrokenExecutor:  # it died while it had nothing to do
            self.close(kill=True)
            return self._submit(fn, *args, **kwargs)

    def _submit(self, fn: Callable[..., _R], *args: Any, **kwargs: Any) -> Future[_R]:
        from loky import ProcessPoolExecutor

        # loky's own helpers, which it starts with the pool, get from this process that nothing is imported from the
        # current folder; the worker gets the setting before
        before = os.environ.get(SAFE_PATH)
        _set_safe_path("1")
        try:
            if self.pool is None:
                given = (os.getpid(), before)
                self.pool = ProcessPoolExecutor(1, initializer=_begin_worker, initargs=given, env=ENVIRONMENT)
            future: Future[_R] = self.pool.submit(fn, *args, **kwargs)
        finally:
            _set_safe_path(before)
        self.latest = future
        return future

    def _died(self) -> bool:
        done = self.latest is not None and self.latest.done() and not self.latest.cancelled()
        return done and isinstance(self.latest and self.latest.exception(), BrokenExecutor)

    def close(self, kill: bool) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, kill_workers=kill)
        self.pool = self.latest = None


def _set_safe_path(value: str | None) -> None:
    os.environ.pop(SAFE_PATH, None)
    if value is not None:
        os.environ[SAFE_PATH] = value


def _begin_worker(parent: int, safe_path: str | None) -> None:
    """Prepare a new worker: leave Ctrl-C to the parent, and end when the parent is gone."""
    _set_safe_path(safe_path)  # the user's code may start programs of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the user's code prints must not come between the data on stdout

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # what is half written has a temporary name

    threading.Thread(target=end_with_parent, daemon=True).start()


ANSWER_WITHIN = 10.0
"""Seconds in which a Dask scheduler has to answer."""

WORK_WITHIN = 60.0
"""Seconds in which it has to have a worker."""

SUBMIT_WITHIN = 60.0
"""Seconds in which Slurm has to say whether it would take a job."""


@dataclass(frozen=True)
class SlurmSettings:
    """The resources to ask Slurm for: `jobs` jobs, each running as many networks at a time as it has cores.

    A job that ends is replaced while there is work. Its walltime should be longer than one run takes.
    """

    jobs: int = 1
    cores: int = 1  #: cores of each job
    memory: str = "2GiB"  #: memory of each job
    walltime: str = "01:00:00"
    queue: str | None = None  #: the partition
    account: str | None = None
    directives: tuple[str, ...] = ()  #: more #SBATCH lines: "--constraint=avx512"
    before: tuple[str, ...] = ()  #: shell lines before the workers start: "module load python"
    python: str | None = None  #: the interpreter on the nodes; this one by default
    interface: str | None = None  #: interface of the network that the nodes and this machine share: "ib0"
    host: str | None = None  #: this machine's address in it
    logs: str | None = None  #: a folder for the jobs' output, which goes nowhere by default

    def __post_init__(self) -> None:
        for name in ("jobs", "cores"):
            require_setting(self, name, getattr(self, name) >= 1, "expected at least 1")


@contextmanager
def dask_executor(address: str, *, mixed: bool = False) -> Iterator[Executor]:
    """Return an executor on the Dask cluster whose scheduler is at `address` ("tcp://10.0.0.1:8786").

    Its workers have one thread each (`dask worker ADDRESS --nthreads 1 --nworkers 8`).

    Raises:
        BadInput: Dask is not installed; nothing answers there, or has no worker; a worker has more threads, or, unless
            `mixed`, other versions than this process.
    """
    _require("distributed")
    with _quiet(), _client(address, f"no Dask scheduler answers at {address!r}") as client:
        try:
            client.wait_for_workers(1, timeout=WORK_WITHIN)
        except TimeoutError as error:
            raise BadInput(
                f"the Dask scheduler at {address!r} has no worker: start some with `dask worker {address} --nthreads 1`"
            ) from error
        # a worker that is there must not compute other digits than this process would
        for worker, why in client.run(_unfit, None if mixed else versions(), on_error="return").items():
            if isinstance(why, BaseException):
                text = " ".join(f"{type(why).__name__}: {why}".split())
                raise BadInput(f"the Dask worker {worker} cannot run flatlens ({text}): install the same version there")
            if why:
                raise BadInput(f"the Dask worker {worker} {why}")
        yield OnDask(client, address, mixed=mixed)


@contextmanager
def slurm_executor(settings: SlurmSettings, *, mixed: bool = False) -> Iterator[Executor]:
    """Return an executor on jobs of Slurm, which end with it. This machine has to be one that may call `sbatch`.

    Raises:
        BadInput: dask-jobqueue or Slurm is not installed, or Slurm refuses the jobs.
    """
    _require("dask_jobqueue")
    if shutil.which("sbatch") is None:
        raise BadInput("Slurm's `sbatch` is not found: run this where jobs can be submitted, or use --dask ADDRESS")
    from dask_jobqueue.slurm import SLURMCluster

    silent = () if settings.logs else ("--output=/dev/null", "--error=/dev/null")  # else into the current folder
    exports = [f"export {name}={value}" for name, value in ENVIRONMENT.items()]
    with _quiet():
        try:
            cluster = SLURMCluster(
                cores=settings.cores,
                processes=settings.cores,  # one thread each
                memory=settings.memory,
                walltime=settings.walltime,
                queue=settings.queue,
                account=settings.account,
                job_name="flatlens",
                job_extra_directives=[*silent, *settings.directives],
                job_script_prologue=[*settings.before, *exports],
                python=settings.python or sys.executable,
                interface=settings.interface,
                log_directory=settings.logs,
                scheduler_options={"dashboard": False} | ({"host": settings.host} if settings.host else {}),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise BadInput(f"no scheduler for Slurm's workers could be started here: {one_line(error)}") from error
        with cluster:
            _require_accepted(cluster.job_script())
            cluster.adapt(minimum_jobs=settings.jobs, maximum_jobs=settings.jobs)  # replaces the jobs that end
            with _client(cluster, "the scheduler did not start") as client:
                yield OnDask(client, cluster.scheduler_address, mixed=mixed)


def _require_accepted(script: str) -> None:
    """Ask Slurm whether it would take a job: what it refuses later is told nowhere."""
    command = ["sbatch", "--test-only"]
    try:
        answer = subprocess.run(command, input=script, capture_output=True, text=True, timeout=SUBMIT_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"Slurm does not answer within {SUBMIT_WITHIN:g} s: is its controller running?") from error
    if answer.returncode:
        said = " ".join(answer.stderr.split()).removeprefix("sbatch: error: ").removeprefix("allocation failure: ")
        raise BadInput(f"Slurm refused the jobs ({said}): change the options of --slurm")


def adapted(executor: Executor) -> Executor:
    """Return the executor for a sweep: that of `Client.get_executor` would wait for ever once its scheduler is gone.

    Other versions on its workers are the caller's business.
    """
    if "distributed" not in sys.modules:
        return executor
    from distributed.cfexecutor import ClientExecutor

    if not isinstance(executor, ClientExecutor):
        return executor
    client, options = executor._client, executor._kwargs
    address = client.scheduler.address if client.scheduler else "an unknown address"
    return OnDask(client, address, mixed=True, options=options)


class LostScheduler(BrokenExecutor):
    """The Dask scheduler is gone."""


class UnfitWorker(BrokenExecutor):
    """A worker that has come later and would compute other digits."""


class OnDask(Executor):
    """Calls on the workers of `client`, whose scheduler is at `address`; `mixed`: those of other versions, too."""

    def __init__(
        self, client: Client, address: str, *, mixed: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        self._client, self._address, self._here = client, address, None if mixed else versions()
        self._options = dict(options or {})
        self._theirs: dict[Future[Any], DaskFuture[Any]] = {}  # Dask drops what nobody holds

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Call `fn` on some worker."""
        if self._client.status != "running":
            raise self._lost()
        mine: Future[_R] = Future()
        # in one piece: of separate arguments Dask would look into every tuple
        call = partial(_on_worker, self._here, partial(fn, *args, **kwargs))
        theirs = self._client.submit(call, **{"pure": False, **self._options})
        self._theirs[mine] = theirs
        mine.add_done_callback(self._forget)
        theirs.add_done_callback(partial(self._bring_home, mine))
        return mine

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Give up what is left; the cluster is not ours."""
        for future in list(self._theirs):
            future.cancel()

    def _forget(self, mine: Future[Any]) -> None:
        theirs = self._theirs.pop(mine, None)
        if theirs is not None and mine.cancelled():
            theirs.cancel()

    def _bring_home(self, mine: Future[Any], theirs: DaskFuture[Any]) -> None:
        """Pass the result of Dask's future on to the caller's; runs in a thread of Dask."""
        with suppress(InvalidStateError):  # it was cancelled here
            try:
                result = theirs.result()
            except BaseException as error:  # asyncio's cancellation is not an Exception
                told = error if isinstance(error, Exception) else CancelledError(str(error))
                gone = getattr(error, "reason", "") == "scheduler-connection-lost" or self._client.status != "running"
                mine.set_exception(self._lost() if gone else told)
            else:
                mine.set_result(result)

    def _lost(self) -> LostScheduler:
        return LostScheduler(f"the Dask scheduler at {self._address} is gone")


def _on_worker(here: dict[str, str] | None, call: Callable[[], _R]) -> _R:
    """Run a call in the worker, after checking it: it may have joined later than the others."""
    from distributed import get_worker
    from threadpoolctl import threadpool_limits

    if why := _unfit(here):
        raise UnfitWorker(f"the Dask worker {get_worker().address} {why}")
    with threadpool_limits(1):  # of every library; a worker without a nanny has not set them
        return call()


def _unfit(here: dict[str, str] | None, dask_worker: Worker | None = None) -> str:  # Client.run wants this very name
    """Return why the worker would compute other digits, or none; "" if it is fit. Runs in the worker."""
    from distributed import get_worker

    worker = dask_worker or get_worker()
    if worker.state.nthreads != 1:
        return (
            f"runs {worker.state.nthreads} tasks in one process, which would share torch's threads and random state: "
            f"start it with `dask worker ADDRESS --nthreads 1 --nworkers {worker.state.nthreads}`"
        )
    if here is not None and (what := difference(versions(), here)):
        return f"has other versions ({what}) and would mix two computations: install the same ones, or use --mixed"
    return ""


@contextmanager
def _client(where: str | SLURMCluster, trouble: str) -> Iterator[Client]:
    from distributed import Client

    try:
        with _no_collection():
            client = Client(where, timeout=ANSWER_WITHIN, set_as_default=False)
    except (OSError, ValueError, AssertionError) as error:  # the last where Dask's own thread takes 10 s to start
        raise BadInput(f"{trouble} within {ANSWER_WITHIN:g} s: is it running, and reachable from here?") from error
    try:
        yield client
    finally:
        with _no_collection():
            client.close(timeout=ANSWER_WITHIN)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend garbage collection: a collected client closes itself, and could wait for a lock held here for ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's log inside this context: what matters of it becomes an error of ours, in one line."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _require(module: str) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    with needs("dask", "a run on a cluster"):
        import_module(module)
    if signal.getsignal(signal.SIGINT) is not interrupt:  # dask_jobqueue makes Ctrl-C a quiet exit of any process
        signal.signal(signal.SIGINT, interrupt)
