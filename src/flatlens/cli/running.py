"""The options for where and how a sweep of networks runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flatlens.cli.output import WHOLE, Flag, Whole, stdout_to_stderr
from flatlens.cli.stopping import patient
from flatlens.errors import BadInput, UnknownName

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from flatlens.experiments.study import RunOptions


CALLED_BACK = 20.0
"""Seconds in which jobs of Slurm are cancelled."""


@Parameter(name="*")
@dataclass(frozen=True)
class Running:
    """The processes or machines that train and measure networks."""

    workers: Whole = 2
    """Processes that train and measure, one thread each."""

    dask: str | None = None
    """The address of a Dask scheduler whose workers see the same folder."""

    slurm: str | None = None
    """Run in jobs of Slurm, such as `jobs=8,cores=4,memory=8GiB,walltime=02:00:00,queue=short`."""

    pack: Whole = 1
    """Networks given to a worker at a time, of those that are trained alone; more for very short ones on many
    machines."""

    together: Annotated[int | Literal["off"] | None, WHOLE] = None
    """Networks of one kind that are trained together in one stack, 16 by default, if a trial finds that faster; the
    results are the same to the last digit. `off`: each alone."""

    retry_failed: Annotated[bool, Flag] = False
    """Re-run the networks that ended in an error."""

    mixed: Annotated[bool, Flag] = False
    """Continue a study that was begun with other versions of the software."""

    def check(self) -> None:
        """Refuse impossible values before anything is imported or written."""
        for name, number in (("workers", self.workers), ("pack", self.pack)):
            if number < 1:
                raise BadInput(f"--{name} {number}: at least 1 is needed")
        if isinstance(self.together, int) and self.together < 1:
            raise BadInput(f"--together {self.together}: a number of networks, at least 1, or off")
        if self.dask is not None and self.slurm is not None:
            raise BadInput("--dask and --slurm: give one of them")

    @contextmanager
    def started(self) -> Iterator[RunOptions]:
        """Yield the keyword arguments of `run_study`; an interrupt says that nothing is lost."""
        try:
            with stdout_to_stderr(), self._executor() as executor:
                options: RunOptions = {
                    "workers": self.workers,
                    "executor": executor,
                    "pack": self.pack,
                    "retry_failed": self.retry_failed,
                    "mixed": self.mixed,
                }
                if self.together is not None:
                    options["together"] = 1 if self.together == "off" else self.together
                yield options
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the finished networks are kept, and the same command continues") from None

    @contextmanager
    def _executor(self) -> Iterator[Executor | None]:
        """Yield the executor to run on; None for processes of this machine."""
        if self.dask is None and self.slurm is None:
            yield None
            return
        from flatlens.experiments.executors import SlurmSettings, dask_executor, slurm_executor

        if self.dask is not None:
            with dask_executor(self.dask, mixed=self.mixed) as executor:
                yield executor
            return
        settings = _slurm_settings(self.slurm or "", SlurmSettings)
        with patient(CALLED_BACK), slurm_executor(settings, mixed=self.mixed) as executor:
            yield executor


def _slurm_settings(text: str, kind: type[Any]) -> Any:
    """Return the settings in text such as `jobs=8,queue=short`; no value may contain a comma."""
    from flatlens.plain import made

    known = {field.name: field for field in fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise BadInput(f"--slurm {part}: write NAME=VALUE, with commas between")
        if name not in known:
            raise UnknownName.among("setting of --slurm", name, known)
        several = isinstance(known[name].default, tuple)
        given[name] = int(value) if isinstance(known[name].default, int) and value.isdecimal() else value
        given[name] = (value,) if several else given[name]
    return made(kind, given)
