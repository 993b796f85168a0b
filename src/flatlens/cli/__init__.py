"""The command line: thin. Each command reads its options, calls the library and prints.

stdout is data: tables, findings, or JSON with `--json`. Everything else goes to stderr. Exit status:

    0    done
    1    done, and with --strict something asked for does not hold
    2    bad input: one line says what, and how to mend it
    130  stopped by Ctrl-C
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from flatlens import __version__
from flatlens.cli.bounds import bounds
from flatlens.cli.compare import compare
from flatlens.cli.data import data
from flatlens.cli.invariance import invariance
from flatlens.cli.listing import list_names
from flatlens.cli.measure import measure
from flatlens.cli.reproduce import reproduce
from flatlens.cli.sharing import speak, together
from flatlens.cli.study import report, study
from flatlens.errors import FlatlensError

app = App(
    name="flatlens",
    version=__version__,
    help="How flat is the minimum, how compressed the representation, and which of those numbers to trust.",
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
app.command(study)
app.command(measure)
app.command(bounds)
app.command(invariance)
app.command(compare)
app.command(reproduce)
app.command(list_names, name="list")
app.command(report)
app.command(data)


def main() -> None:
    """Entry point of the `flatlens` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; the exit status comes back."""
    try:
        with together(arguments):
            status = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not flush into it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CycloptsError, FlatlensError) as error:
        return _failed(in_options(str(error)))
    except OSError as error:
        return _failed(_trouble(error))
    except KeyboardInterrupt as error:
        _failed(f"stopped{f': {error}' if str(error) else ''}")
        return 130


def in_options(message: str) -> str:
    """An error of the library in the words of the command line.

    >>> in_options("Problem(data=...): the data is empty")
    '--data: the data is empty'
    >>> in_options("Problem(memory='lots'): a size is needed")
    "--memory 'lots': a size is needed"
    """
    message = re.sub(r"^weights:", "--weights:", message)
    message = re.sub(r"^Problem\(ranks=\.\.\.\)", "torchrun", message)
    message = re.sub(r"^Problem\(model=\.\.\.\)", "MODEL", message)
    message = re.sub(r"^Problem\((\w+)=\.\.\.\)", r"--\1", message)
    return re.sub(r"^Problem\((\w+)=(.*?)\):", r"--\1 \2:", message)


def _trouble(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "; free some space, then the same command carries on" if full else ""
    return f"{error.strerror or error}{where}{advice}"


def _failed(message: str) -> int:
    speak(" ".join(message.split()))
    return 2
