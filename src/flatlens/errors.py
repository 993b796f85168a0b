"""The errors that flatlens raises.

    FlatlensError
    |-- BadInput (also a ValueError)   the caller's mistake: what, where, what to do; exit status 2
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

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

_SHOWN = 60  #: largest number of names that an error lists: a deep network has hundreds of layers


class FlatlensError(Exception):
    """The base class of all errors of flatlens.

    >>> from flatlens.errors import BadInput
    >>> issubclass(BadInput, FlatlensError)
    True
    """

    def __str__(self) -> str:  # a KeyError would show the repr, quotes and all
        return " ".join(str(part) for part in self.args)


class Code(str):
    """A value that is shown without quotes: the name of a loss, or k for any number."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Give:
    """An argument of `Problem` within a sentence: `batchnorm='train'` in Python, `--batchnorm train` as an option."""

    argument: str
    value: object = ...

    def __str__(self) -> str:
        return f"{self.argument}={'...' if self.value is ... else repr(self.value)}"


FORWARD = Give("forward", Code("(model, batch) -> (outputs, targets)"))

Words: TypeAlias = "str | Give | tuple[str | Give, ...]"
"""A sentence: a text, or its parts where it names other arguments."""


class BadInput(FlatlensError, ValueError):
    """An input of the caller that cannot be used: what is wrong with which argument, and what to do.

    The text of an error is written where it is shown: Python names the argument, the command line the option.

    >>> print(BadInput("expected 'eval' or 'train'", argument="batchnorm", value="on"))
    Problem(batchnorm='on'): expected 'eval' or 'train'
    >>> print(BadInput("tokens differ", argument="data", remedy=("give ", Give("forward"))))
    Problem(data=...): tokens differ: give forward=...

    Args:
        what: What is wrong.
        argument: The name of the argument.
        value: Its value, if that is short.
        remedy: What to do.
        call: What takes the argument: `Problem` unless another call is named; "" for a label that is not an argument.
    """

    _argument, _call, _shown = "", "Problem", staticmethod(repr)
    """What most errors of the class are about, and how a value is shown."""

    def __init__(
        self, what: Words, *, argument: str | None = None, value: object = ..., remedy: Words = "",
        call: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what)
        self.what, self.remedy = what, remedy
        self.argument = self._argument if argument is None else argument
        self.value = "..." if value is ... else self._shown(value)
        self.call = (self._call if self.argument else "") if call is None else call
        self.where = ""  #: where it happened, in brackets at the end

    def but(self, **changes: Any) -> Self:
        """Return a copy of this error with other parts."""
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    @property
    def place(self) -> str:
        """The argument as Python writes it."""
        inside = f"{self.argument}={self.value}" if self.argument else self.value
        return f"{self.call}({inside})" if self.call else self.argument

    def told(self, place: str | None = None, given: Callable[[Give], str] = str) -> str:
        """Return the text with `place` for the argument, if it is given, and `given` for each other one."""
        place = self.place if place is None else place
        parts = [words if isinstance(words, tuple) else (words,) for words in (self.what, self.remedy)]
        texts = ["".join(part if isinstance(part, str) else given(part) for part in words) for words in parts]
        return " ".join(filter(None, [": ".join(filter(None, [place, *texts])), self.where]))

    def __str__(self) -> str:
        return self.told()


class BadModel(BadInput):
    """A network that cannot be measured as it is."""

    _argument = "model"


class ForwardFailed(BadModel, RuntimeError):
    """The network's own code raised an error, its cause."""


class NotAlike(BadModel):
    """A network that differs between the processes that measure it together."""


class NotDifferentiable(BadModel, RuntimeError):
    """Autograd cannot give a derivative that a number takes."""

    _argument = ""


class Overflows(BadModel, ArithmeticError):
    """A number in the computation is larger than the network's dtype can hold."""

    _argument = ""


class BadLoss(BadInput):
    """A loss whose values do not make a mean over samples."""

    _argument, _shown = "loss", staticmethod(str)  # a loss by its name


class LossFailed(BadLoss, RuntimeError):
    """The loss's own code raised an error, its cause."""


class BadData(BadInput):
    """Data that cannot be read, or must not be measured."""


class BadWeights(BadInput):
    """A weights file that cannot be loaded safely."""

    _argument, _call = "weights", ""


class BadOption(BadInput):
    """An option of a measure or a bound that cannot be used."""


class TooLong(BadInput):
    """Work that is expected to take longer than allowed."""


class BadFolder(BadInput):
    """An output folder that holds something else, or cannot be written."""


class MissingExtra(BadInput, ImportError):
    """A package that an extra installs is missing."""


class UnknownName(BadInput, KeyError):
    """A name that is not in the list it was looked up in."""

    @classmethod
    def among(cls, what: str, name: object, known: Iterable[str], *, where: str = "", **place: Any) -> UnknownName:
        """Return the error for a `name` of the kind `what`, with the nearest known names, whatever their case.

        `where` has words for after the name; `place` is as for `BadInput`.

        >>> print(UnknownName.among("measure", "ML", ["mls", "nmls"]))
        unknown measure 'ML': did you mean mls, nmls?
        >>> print(UnknownName.among("layer", "fc9", ["fc1"], where="in this report", argument="layer", call=""))
        layer: unknown layer 'fc9' in this report: did you mean fc1?
        """
        known = sorted(map(str, known))
        lower: dict[str, list[str]] = {}
        for one in known:
            lower.setdefault(one.lower(), []).append(one)
        close = difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)
        near = [one for match in close for one in lower[match]]
        more = f", ... ({len(known)} in all)" if len(known) > _SHOWN else ""
        hint = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known[:_SHOWN])}{more}"
        return cls(" ".join(filter(None, [f"unknown {what} {name!r}", where])), remedy=hint, **place)


class StaleLens(FlatlensError, RuntimeError):
    """The model changed after the lens was made: its cached numbers belong to another network.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Linear(3, 2, dtype=torch.float64)
    >>> data = (torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64))
    >>> problem = fl.Problem(net, "half_squared_error", data)
    >>> lens = fl.Lens(problem)
    >>> _ = net.weight.data.add_(1)
    >>> fl.measure(lens, ["mls"])  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    StaleLens: ...
    """


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

    >>> with needs("study", "a page"):  # doctest: +ELLIPSIS
    ...     import no_such_package
    Traceback (most recent call last):
    ...
    flatlens.errors.MissingExtra: a page needs the extra 'study', pip install 'flatlens[study]' (No module named ...
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, MissingExtra) or (error.name or "").startswith("flatlens"):
            raise
        mend = f"pip install 'flatlens[{extra}]' ({one_line(error)})"
        raise MissingExtra(f"{what} needs the extra {extra!r}, {mend}") from error


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
