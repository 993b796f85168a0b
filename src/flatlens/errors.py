"""The errors that flatlens raises.

    FlatlensError
    |-- BadInput (also a ValueError)   the caller's mistake: what, where, how to mend; exit status 2
    |   |-- BadModel                   a network that cannot be measured: random, coupled samples, NaN weights, odd
    output
    |   |   |-- ForwardFailed          the network's own code raised (also a RuntimeError)
    |   |   |-- NotAlike               a network that differs between the processes that measure it
    |   |   |-- NotDifferentiable      autograd has no such derivative, or a wrong one (also a RuntimeError)
    |   |   `-- Overflows              a gradient or product is not finite (also an ArithmeticError)
    |   |-- BadLoss                    a loss of the wrong shape, or one that is not a mean over samples
    |   |   `-- LossFailed             the user's loss raised (also a RuntimeError)
    |   |-- BadData                    empty, not finite, a label out of range, a batch that changes when read again
    |   |-- BadWeights                 a weights file that is damaged, foreign, or would have to be unpickled
    |   |-- BadOption                  an option of a measure that cannot be used
    |   |-- TooLong                    work that is expected to take longer than allowed
    |   |-- BadFolder                  an output folder that holds something else
    |   |-- MissingExtra               a package of an extra is not installed (also an ImportError)
    |   `-- UnknownName                no such measure, layer, data set...; says the nearest name (also a KeyError)
    |-- StaleLens (also a RuntimeError)  the model changed after the lens was made
    |-- LostRank (also a RuntimeError)   another process that shares the samples has ended or died
    `-- FunctionChanged (also a RuntimeError)  a transform of the weights did not leave the function alone: a bug here

A message names the argument, what is required of it, the value met, the likely cause and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_SHOWN = 60
"""Largest number of names that an error lists: a deep network has hundreds of layers."""


class FlatlensError(Exception):
    """The base class of all errors of flatlens."""

    def __str__(self) -> str:  # a KeyError would show the repr, quotes and all
        return " ".join(str(part) for part in self.args)


class BadInput(FlatlensError, ValueError):
    """An input of the caller that cannot be used."""


class BadModel(BadInput):
    """A network that cannot be measured as it is."""


class ForwardFailed(BadModel, RuntimeError):
    """The network's own code raised an error, its cause."""


class NotAlike(BadModel):
    """A network that differs between the processes that measure it together."""


class NotDifferentiable(BadModel, RuntimeError):
    """Autograd cannot give a derivative that a number takes."""


class Overflows(BadModel, ArithmeticError):
    """A number in the computation is larger than the network's dtype can hold."""


class BadLoss(BadInput):
    """A loss whose values do not make a mean over samples."""


class LossFailed(BadLoss, RuntimeError):
    """The loss's own code raised an error, its cause."""


class BadData(BadInput):
    """Data that cannot be read, or must not be measured."""


class BadWeights(BadInput):
    """A weights file that cannot be loaded safely."""


class BadOption(BadInput):
    """An option of a measure that cannot be used."""


class TooLong(BadInput):
    """Work that is expected to take longer than allowed."""


class BadFolder(BadInput):
    """An output folder that holds something else, or cannot be written."""


class MissingExtra(BadInput, ImportError):
    """A package that an extra installs is missing."""


class UnknownName(BadInput, KeyError):
    """A name that is not in the list it was looked up in."""

    @classmethod
    def among(cls, what: str, name: object, known: Iterable[str]) -> UnknownName:
        """Return the error for `name`, with the nearest known names, whatever their case.

        >>> print(UnknownName.among("measure", "ML", ["mls", "nmls"]))
        no measure is called 'ML': did you mean mls, nmls?
        """
        known = sorted(map(str, known))
        lower: dict[str, list[str]] = {}
        for one in known:
            lower.setdefault(one.lower(), []).append(one)
        close = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)
        near = [one for match in close for one in lower[match]]
        more = f", ... ({len(known)} in all)" if len(known) > _SHOWN else ""
        hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known[:_SHOWN])}{more}"
        return cls(f"no {what} is called {name!r}: {hint}")


class StaleLens(FlatlensError, RuntimeError):
    """The model changed after the lens was made: its cached numbers belong to another network."""


class LostRank(FlatlensError, RuntimeError):
    """Another process that shares the samples has ended or died."""


class FunctionChanged(FlatlensError, RuntimeError):
    """A transform that must not change the network's outputs changed them: an error in flatlens."""


OF_ONE_NUMBER = ForwardFailed, LossFailed, NotDifferentiable, Overflows
"""Errors that say why one number cannot be computed; all other errors of flatlens say that no number would be right."""


class Unexpected(RuntimeWarning):
    """An error that flatlens did not foresee, which made a number undefined; the tests turn it into an error."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turn a failed import inside into one line that names the extra to install.

    >>> with needs("study", "a page"):
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    flatlens.errors.MissingExtra: a page needs pip install 'flatlens[study]' (No module named 'no_such_package')

    Raises:
        MissingExtra: a package cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, MissingExtra) or (error.name or "").startswith("flatlens"):
            raise
        raise MissingExtra(f"{what} needs pip install 'flatlens[{extra}]' ({one_line(error)})") from error


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted.

    >>> out_of_memory(RuntimeError("CUDA out of memory")), out_of_memory(RuntimeError("memory_format is not known"))
    (True, False)
    """
    told = message_of(error)
    words = "out of memory", "allocate memory", "not enough memory"
    return isinstance(error, MemoryError) or any(each in told for each in words)


def one_line(error: BaseException, longest: int | None = None) -> str:
    r"""Return the first `longest` characters of an exception's message on one line; its type if there is no message.

    >>> one_line(ValueError("shapes do\n  not fit"), 9), one_line(MemoryError())
    ('shapes do', 'MemoryError')
    """
    return " ".join(message_of(error).split())[:longest] or type(error).__name__


def typed_line(error: BaseException, longest: int | None = None) -> str:
    r"""Return the type and the first `longest` characters of the message, on one line.

    >>> typed_line(ValueError("shapes do\n  not fit")), typed_line(MemoryError())
    ('ValueError: shapes do not fit', 'MemoryError: no message')
    """
    return f"{type(error).__name__}: {' '.join(message_of(error).split())[:longest] or 'no message'}"


def message_of(error: BaseException) -> str:
    """Return an exception's message; empty if its __str__ fails."""
    try:
        return str(error)
    except Exception:  # whatever the __str__ of a class of the user's own does
        return ""
