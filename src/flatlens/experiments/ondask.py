"""A Dask client as an executor: one call a process at a time, on one thread, by the same versions everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from distributed import Client, Worker, get_worker
from distributed import Future as DaskFuture
from distributed.cfexecutor import ClientExecutor
from threadpoolctl import threadpool_limits

from flatlens.errors import BadInput
from flatlens.experiments.store import difference, versions

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LostScheduler(BrokenExecutor):
    """The Dask scheduler is gone."""


class UnfitWorker(BrokenExecutor):
    """A worker that has come later and would compute other digits."""


class OnDask(Executor):
    """Calls on the workers of `client`, whose scheduler is at `address`; `mixed`: those of other versions, too.

    A future raises what the call raised, Dask's KilledWorker when that lost too many workers, LostScheduler or
    UnfitWorker.
    """

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
            except BaseException as error:  # asyncio's cancellation is no Exception
                mine.set_exception(self._told(error))
            else:
                mine.set_result(result)

    def _told(self, error: BaseException) -> BaseException:
        lost = getattr(error, "reason", "") == "scheduler-connection-lost" or self._client.status != "running"
        if lost:
            return self._lost()
        return error if isinstance(error, Exception) else CancelledError(str(error))

    def _lost(self) -> LostScheduler:
        return LostScheduler(f"the Dask scheduler at {self._address} is gone")


def adapted(executor: Executor) -> Executor:
    """Return OnDask for the executor of `Client.get_executor`, which would wait for ever once its scheduler is gone.

    Other versions on the workers are the caller's business there.
    """
    if not isinstance(executor, ClientExecutor):
        return executor
    client, options = executor._client, executor._kwargs
    address = client.scheduler.address if client.scheduler else "an unknown address"
    return OnDask(client, address, mixed=True, options=options)


def refuse_unfit_workers(client: Client, *, mixed: bool) -> None:
    """Raise BadInput if a worker that is there computes other digits than this process would."""
    here = None if mixed else versions()
    for worker, why in client.run(_unfit, here, on_error="return").items():
        if isinstance(why, BaseException):
            text = " ".join(f"{type(why).__name__}: {why}".split())
            raise BadInput(f"the Dask worker {worker} cannot run flatlens ({text}): install the same version there")
        if why:
            raise BadInput(f"the Dask worker {worker} {why}")


def _on_worker(here: dict[str, str] | None, call: Callable[[], _R]) -> _R:
    """Run a call in the worker, after checking it: it may have joined later than the others."""
    if why := _unfit(here):
        raise UnfitWorker(f"the Dask worker {get_worker().address} {why}")
    with threadpool_limits(1):  # of every library; a worker without a nanny has not set them
        return call()


def _unfit(here: dict[str, str] | None, dask_worker: Worker | None = None) -> str:  # Client.run wants this very name
    """Return why the worker would compute other digits, or none; "" if it is fit. Runs in the worker."""
    worker = dask_worker or get_worker()
    if worker.state.nthreads != 1:
        return (
            f"runs {worker.state.nthreads} tasks in one process, which would share torch's threads and random state: "
            f"start it with `dask worker ADDRESS --nthreads 1 --nworkers {worker.state.nthreads}`"
        )
    if here is not None and (what := difference(versions(), here)):
        return f"has other versions ({what}) and would mix two computations: install the same ones, or use --mixed"
    return ""
