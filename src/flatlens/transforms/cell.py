"""A number before and after a transform, and the transform's effect on the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from flatlens.transforms.definition import Moved


@dataclass(frozen=True)
class Cell:
    """A number before and after a transform.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> cell = fl.check_invariance(fl.Lens(problem), ["mls"], transforms="permutation")[0]
    >>> cell.measure, cell.unchanged, cell.agrees
    ('mls', True, True)
    """

    measure: str  #: name of the measure, with its part
    transform: str
    before: float
    after: float
    change: float  #: relative to `before`
    stderr: float  #: standard error of after - before
    unchanged: bool | None
    """Whether before and after agree within rounding and error; None if a number is missing or unreliable."""
    declared: bool | None  #: whether it must be unchanged, by the literature and the measure's card; None: not said
    agrees: bool | None
    """Whether the number does what is declared.

    None if nothing is declared, and if a measure that is not declared unchanged is unchanged here: the claim is about
    networks in general.
    """
    note: str = ""


CELL_COLUMNS = [one.name for one in fields(Cell)]


@dataclass(frozen=True)
class Applied:
    """The effect of a transform on the network, and the proof.

    >>> import torch, flatlens as fl
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> problem = fl.Problem(net, "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    >>> table = fl.check_invariance(fl.Lens(problem), ["mls"], transforms="permutation")
    >>> table.moved["permutation"].links
    ('0 -> 2',)
    """

    difference: float  #: max |f' - f| over the data
    links: tuple[str, ...]  #: links whose features moved, as `fc1 -> fc2`
    left: Mapping[str, str] = field(default_factory=dict)  #: layers whose features did not move, with the reason
    note: str = ""

    @classmethod
    def of(cls, moved: Moved) -> Applied:
        """Return the facts without the network."""
        return cls(moved.difference, moved.links, dict(moved.left), moved.note)
