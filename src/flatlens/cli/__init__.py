"""The command line: each command reads its options, calls the library and prints.

stdout is data: tables, findings, or JSON with `--json`. Everything else goes to stderr. Exit status:

    0    done
    1    done, and with --strict something asked for does not hold; or an unexpected error
    2    bad input, or the user's own code failed: one line says what, and what to do
    130  stopped by Ctrl-C; 143 by SIGTERM; 141 where nobody reads stdout any more
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, UnusedCliTokensError

from flatlens.cli.landscape import path_between, plane_around
from flatlens.cli.listing import data, list_names
from flatlens.cli.networks import bounds, compare, compress, invariance, measure
from flatlens.cli.processes import JOIN, launched, speak, stoppable, stopped, together
from flatlens.cli.studies import report, reproduce, study, track
from flatlens.cli.terminal import note
from flatlens.deprecated_names import FormerName
from flatlens.errors import FORWARD, BadInput, FlatlensError, Give, Unexpected, out_of_memory, typed_line
from flatlens.progress import SideOutputFailed, visible
from flatlens.user_code import said
from flatlens.version import __version__

TRACEBACK = "--traceback"

app = App(
    name="flatlens",
    version=__version__,
    help="Measure flatness, compression and sensitivity of neural networks; every number comes with its accuracy.",
    help_format="markdown",
    help_epilogue="With any command, `--traceback` shows where an error occurred.",
    suppress_keyboard_interrupt=False,
)
for command in (study, measure, bounds, invariance, compress, compare):
    app.command(command)
app.command(path_between, name="path")
app.command(plane_around, name="plane")
app.command(reproduce)
app.command(list_names, name="list")
app.command(report)
app.command(track)
app.command(data)
app.register_install_completion_command(
    help="Complete commands and options with the Tab key: writes a script for bash, zsh or fish, and a line in its "
    "startup file that reads it."
)


def main() -> None:
    """Run the `flatlens` command: its entry point."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # a shell has closed it, such as by `>&-`
            setattr(sys, stream, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for an encoding without some of our characters
    with nullcontext() if launched() else stoppable():  # torchrun ends its processes itself
        sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    try:
        with together(arguments), _warnings_noted():
            words = [word for word in arguments if word not in (TRACEBACK, JOIN)]
            status = app(words, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt as error:
        _say(f"stopped{f': {error}' if str(error) else ''}")
        return stopped()
    except (Exception, SystemExit) as error:
        # Nobody reads stdout any more, as after `| head`; rich then exits, with the system's error as the context. The
        # interpreter must not flush into it again.
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if TRACEBACK in arguments:
            print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        # what is wrong and what to do, in one line
        more, status = f" ({TRACEBACK} shows the rest)", 2
        if isinstance(error, FlatlensError):
            message = in_options(error) + more * _in_the_users_code(error.__cause__)
        elif isinstance(error, UnusedCliTokensError):
            advice = "an option needs its name, such as --data; a path with spaces needs quotes"
            message = f"unexpected argument {', '.join(map(repr, error.unused_tokens or ()))} ({advice})"
        elif isinstance(error, CycloptsError):
            message = str(error)
        elif _in_the_users_code(error):
            message = f"your code raised {said(error)}{more}"
        elif isinstance(error, OSError):
            full = "; free some space, then the same command continues"
            advice = full if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            message = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}{advice}"
        elif out_of_memory(error):
            message = f"out of memory: give a smaller --memory, fewer --samples, or fewer --parameters{more}"
        else:
            output = f"an unexpected error (please report it, with the output of {TRACEBACK})"
            status, message = 1, f"{typed_line(error)}: {output}"
        _say(message)
        return status


NOTED = (FormerName, SideOutputFailed, Unexpected)  #: kinds of warnings that are flatlens' own


@contextmanager
def _warnings_noted() -> Iterator[None]:
    """Print each warning of flatlens' own as one line on stderr: Python hides some, and adds a line of code."""
    with warnings.catch_warnings():
        for kind in NOTED:
            warnings.simplefilter("default", kind)
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            note(str(message)) if issubclass(category, NOTED) else show(message, category, *rest)

        warnings.showwarning = shown  # type: ignore[assignment]
        yield


def _in_the_users_code(error: BaseException | None) -> bool:
    """Return whether an error that flatlens did not raise itself came through a file of the user's."""
    return error is not None and not isinstance(error, FlatlensError) and said(error) != typed_line(error, 200)


def in_options(error: FlatlensError) -> str:
    """Return the text of an error in the words of the command line.

    >>> from flatlens.errors import BadModel, Code
    >>> in_options(BadInput("expected a size", argument="memory", value="lots"))
    "--memory 'lots': expected a size"
    >>> in_options(BadModel("samples are coupled", remedy=(Give("ghost_batch", Code("k")), " measures it")))
    'MODEL: samples are coupled: --ghost-batch k measures it'
    """
    if not isinstance(error, BadInput):
        return str(error)
    if place := PLACES.get((error.call, error.argument)) or (PLACES.get((error.call, ...)) if error.argument else None):
        value = "" if error.value == "..." else f" {error.value}"
        place = place.format(argument=error.argument.replace("_", "-"), value=value, file=error.value.strip("'"))
    return error.told(place, _option)


OPTION = "--{argument}{value}"
PLACES: dict[tuple[str, object], str] = {
    ("Problem", "model"): "MODEL",
    ("Problem", "ranks"): "torchrun",
    ("Problem", ...): OPTION,
    ("Lens", ...): OPTION,
    ("check_bounds", ...): OPTION,
    ("compare", ...): OPTION,
    ("path", "a"): "MODEL",
    ("path", "b"): "MODEL, the second",
    ("path", ...): OPTION,
    ("plane", ...): OPTION,
    ("compression", "lens"): "MODEL",
    ("compression", ...): OPTION,
    ("Searches.load", ""): "--after {file}",
    ("train", ...): "{argument}",
    ("", "weights"): "--weights",
}
"""What the command line calls an argument, by its call in Python and its name; ... stands for all others of a call."""


def _option(advised: Give) -> str:
    if advised == FORWARD:
        return "a module of your own around the network (in Python: Problem(forward=...))"
    value = "" if advised.value in (..., True) else f" {advised.value}".replace("torch.", "")
    return f"--{advised.argument.replace('_', '-')}{value}"


def _say(message: str) -> None:
    speak(" ".join(message.split()))
