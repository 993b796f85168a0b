"""The rule of failures: what cannot be computed is undefined, with its reason, and takes no other number with it."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from flatlens.errors import OF_ONE_NUMBER, FlatlensError, Overflows, Unexpected, one_line, out_of_memory, typed_line
from flatlens.grams import PlanBroken
from flatlens.problem.ranks import ALONE, Ranks
from flatlens.userfile import OURS, is_users, said

_T = TypeVar("_T")
_OF_DERIVATIVES = re.compile("deriv|differentiab|autograd|backward|grad|vmap|functorch|batching", re.IGNORECASE)


def attempted(work: Callable[[], _T], what: str, peers: Ranks = ALONE, singular: Callable[[], str] = str) -> _T | str:
    """Return the result of `work`, or why there is none; `what` names it, `singular` explains what is not finite.

    Errors that spoil all numbers are raised. So is, where several processes measure together, what one of them may meet
    alone: the others would wait for it.
    """
    try:
        return work()
    except Exception as error:
        if _spoils_all(error) or (peers.size > 1 and _of_one_process(error)):
            raise
        not_finite = isinstance(error, Overflows | torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        return (not_finite and singular()) or reason_of(error, what)


def _spoils_all(error: Exception) -> bool:
    """Return whether an error says that no number would be right, or is a new plan's."""
    return isinstance(error, FlatlensError | PlanBroken) and not isinstance(error, OF_ONE_NUMBER)


def _of_one_process(error: Exception) -> bool:
    """Return whether an error may have been met by this process alone (torch's own are raised in all of them)."""
    return out_of_memory(error) or not isinstance(error, RuntimeError | ArithmeticError)


def reason_of(error: Exception, what: str) -> str:
    """Return why there is no number: the words of an error that was met on the way to `what`.

    One that flatlens did not foresee is a warning, too: `Unexpected`.
    """
    if out_of_memory(error):
        why = one_line(error, 160)  # with the bytes
        return f"memory ran out ({why}): give a smaller Problem(memory=...), fewer samples, outputs or parameters"
    if isinstance(error, FlatlensError):
        return one_line(error)
    if isinstance(error, RuntimeError | ArithmeticError):
        of_derivatives = _OF_DERIVATIVES.search(one_line(error))
        failed = "the network cannot be differentiated as this measure needs" if of_derivatives else "torch failed"
        return f"{failed} ({one_line(error, 120)})"
    if _of_the_user(error):
        return f"the code that was given raised {said(error)}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    told = f"an unexpected error, please report it ({typed_line(error, 120)}, in {at.name}, line {at.lineno})"
    warnings.warn(f"{what}: {told}", Unexpected, stacklevel=2)
    return told


def _of_the_user(error: Exception) -> bool:
    """Return whether an error arose in a file of the user's, or in what this file called."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if file.startswith(OURS) or is_users(file)), OURS)
    return not last.startswith(OURS)
